"""Short digests of what the head is given, so that a comparison can say which of it differs.

Values count, not how they are stored: a matrix in bf16 and the same in fp32 have one fingerprint, and so have its rows
on one rank and on several.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

DIGEST_BYTES = 8
ROWS_AT_A_TIME = 1024


def row_digests(matrix: torch.Tensor, bias: torch.Tensor | None = None) -> list[bytes]:
    """Of each row [D] as fp32, with its element of the bias [rows] after it."""
    found = []
    for start in range(0, len(matrix), ROWS_AT_A_TIME):
        stop = start + ROWS_AT_A_TIME
        rows = matrix[start:stop].float()
        if bias is not None:
            rows = torch.cat([rows, bias[start:stop, None].float()], 1)
        found += [_digest(row) for row in rows.contiguous().numpy()]
    return found


def fingerprint(digests: Sequence[bytes]) -> str:
    """One fingerprint of rows in their order, 16 hexadecimal digits."""
    return _digest(b"".join(digests)).hex()


def target_fingerprints(ids: Sequence[int], context: int) -> list[str]:
    """Of each token from `context` on, with all that precedes it in its sequence."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    found = []
    for position, token in enumerate(ids):
        digest.update(token.to_bytes(8, "little"))
        if position >= context:
            found.append(digest.copy().hexdigest())
    return found


def _digest(content: object) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()  # type: ignore[arg-type]
