"""Comparison by bytes: NaN equals NaN of the same bits, +0 differs from -0."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: Tensor) -> Tensor:
    """The bits, as integers of the same size."""
    return tensor.detach().contiguous().view(_INTEGER[tensor.element_size()])


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements differ in bytes."""
    return int((as_integers(a) != as_integers(b).to(a.device)).sum())


def assert_same_bytes(actual: Tensor | None, expected: Tensor | None, what: str = "tensor") -> None:
    """Fails with the number of differing elements and the first one: its place, values and bytes."""
    if actual is None or expected is None:
        assert actual is expected, f"{what}: one is None ({actual is None}, {expected is None})"
        return
    assert actual.shape == expected.shape, f"{what}: shapes {list(actual.shape)} and {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtypes {actual.dtype} and {expected.dtype}"
    x, y = as_integers(actual), as_integers(expected).to(actual.device)
    wrong = (x != y).nonzero()
    if len(wrong):
        place = tuple(wrong[0].tolist())
        mask = (1 << (8 * actual.element_size())) - 1
        raise AssertionError(
            f"{what}: {len(wrong)} of {x.numel()} elements differ, first at {list(place)}: "
            f"{actual.detach()[place].item()!r} ({int(x[place]) & mask:#x}) where "
            f"{expected.detach()[place].item()!r} ({int(y[place]) & mask:#x}) was expected"
        )


def sha256(*tensors: Tensor | None) -> str:
    """Of shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
            continue
        digest.update(f"{list(tensor.shape)}{tensor.dtype}".encode())
        digest.update(bytes(as_integers(tensor).cpu().reshape(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()
