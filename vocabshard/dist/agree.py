"""Agreement between ranks: everybody gets the same answer or the same error, and nobody is left waiting.

A rank that has already failed joins the collective with its error, so that the others hear of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vocabshard.contract import ContractError
from vocabshard.dist.gather import gather_objects, gather_tensors, group_device


_KINDS: dict[str, type[Exception]] = {
    e.__name__: e for e in (TypeError, ValueError, NotImplementedError, ContractError)
}
CHUNK = 1 << 18  # elements that are looked at a time, so that agreeing takes no memory to speak of


def raise_together(error: Exception | None, group: Any) -> None:
    """One collective; raises the error of the lowest failing rank on every rank."""
    described = None if error is None else (type(error).__name__, str(error), getattr(error, "field", None))
    errors = gather_objects(described, group)
    _raise_first(errors, error)


def _raise_first(errors: list[tuple[str, str, str | None] | None], own: Exception | None) -> None:
    failed = [(rank, e) for rank, e in enumerate(errors) if e is not None]
    if not failed:
        return
    if len(errors) == 1 and own is not None:
        raise own
    rank, (kind, message, field) = failed[0]
    text = f"rank {rank} of the group: {message}"
    raise (ContractError(text, field) if kind == "ContractError" else _KINDS.get(kind, ValueError)(text)) from own


def compare(values: list[dict[str, Any]], advice: str) -> None:
    for name, first in values[0].items():
        for rank, other in enumerate(values):
            if other.get(name) != first:
                raise ValueError(
                    f"the ranks of the group do not agree on {name}: rank 0 has {first!r}, "
                    f"rank {rank} has {other.get(name)!r}; {advice}"
                )


# What a call's ranks must have in common. A fixed list: a rank that failed sends as many words as the others.
AGREED = ("hidden", "target_ids", "temperature", "cut", "row_keys", "options")


def agree_call(
    error: Exception | None, hashes: dict[str, int], group: Any, names: tuple[str, ...] = AGREED
) -> None:
    """The per-call agreement of validate=True: one small all-gather of a status and of int64 hashes of `names`.

    Only when something is wrong does a second collective carry the text.
    """
    row = [0 if error is None else 1] + [hashes.get(name, 0) for name in names]
    mine = torch.tensor(row, dtype=torch.int64, device=group_device(group))
    everyone = gather_tensors(mine, group).cpu()
    if bool((everyone[:, 0] != 0).any()):
        raise_together(error, group)
    for i, name in enumerate(names, start=1):
        different = (everyone[:, i] != everyone[0, i]).nonzero()
        if len(different):
            raise ValueError(
                f"the ranks of the group called with different {name} (ranks 0 and {int(different[0])} differ); "
                f"every rank of a tensor-parallel group must be given the same {name}"
            )


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The elements in row-major order, whatever the strides, some at a time."""
    matrix = tensor.detach()
    if matrix.dim() == 0:
        matrix = matrix[None]
    width = max(matrix[0].numel(), 1) if matrix.shape[0] else 1
    step = max(CHUNK // width, 1)
    for start in range(0, matrix.shape[0], step):
        piece = matrix[start : start + step].reshape(-1)
        yield from piece.split(CHUNK)


def content_hash(tensor: Tensor) -> int:
    """An int64 of shape, dtype and bytes; the same on every device. Reads the tensor back."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    index = torch.arange(min(CHUNK, tensor.numel()), dtype=torch.int64, device=tensor.device)
    mix = (index * 0x5851F42D4C957F2D + 0x14057B7EF767814F) | 1
    for number, piece in enumerate(_chunks(tensor)):
        part = (piece.view(integer).to(torch.int64) * mix[: piece.numel()]).sum()
        total = total * 0x2545F4914F6CDD1D + part + number
    return int(total) ^ text_hash(f"{list(tensor.shape)} {tensor.dtype}")


def is_constant(tensor: Tensor) -> bool:
    """Whether all elements are one number (or there are none). Reads the tensor back."""
    if tensor.numel() == 0:
        return True
    first = tensor.detach()[(0,) * tensor.dim()]
    return all(bool((piece == first).all()) for piece in _chunks(tensor))


def text_hash(text: str) -> int:
    """A non-negative int64 of a text. Not Python's hash(), which differs between processes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
