"""Short digests of what a token's score comes from, so that a comparison can say which of it differs.

The third of them, the head's, is `vocabshard.weight_fingerprint`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

DIGEST_BYTES = 8


def row_fingerprints(rows: torch.Tensor) -> list[str]:
    """Of each row [D] of fp32, 16 hexadecimal digits."""
    return [hashlib.blake2b(row, digest_size=DIGEST_BYTES).hexdigest() for row in rows.contiguous().numpy()]


def target_fingerprints(ids: Sequence[int], context: int) -> list[str]:
    """Of each token from `context` on, with all that precedes it in its sequence."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    found = []
    for position, token in enumerate(ids):
        digest.update(token.to_bytes(8, "little"))
        if position >= context:
            found.append(digest.copy().hexdigest())
    return found
