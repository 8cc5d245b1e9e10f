"""The fingerprint of a weight: every bit and place counts, the sharding does not."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.kernels import fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MASK = 2**64 - 1


def weight(rows: int = 37, columns: int = 13, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(dtype)


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def by_hand(rows: Tensor, first_row: int) -> int:
    """The definition, in Python's integers, as an int64."""
    total = 0
    for r, row in enumerate(rows):
        content = bytes(row.contiguous().view(torch.uint8).tolist())
        content += bytes(-len(content) % 8)
        for w in range(len(content) // 8):
            x = int.from_bytes(content[8 * w : 8 * w + 8], "little")
            y = x ^ ((mix(2 * (first_row + r)) + mix(2 * w + 1)) & MASK)
            total += (y & 0xFFFFFFFF) * (y >> 32) + ((x << 32 | x >> 32) & MASK)
    total &= MASK
    return total - (total >> 63 << 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 3, 4, 13, 16])
def test_the_sum_is_as_defined(columns: int, dtype: torch.dtype) -> None:
    rows = weight(9, columns, dtype)
    assert int(fingerprint.local_sum(rows, 5)) == by_hand(rows, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up_whatever_the_cut_and_the_layout(dtype: torch.dtype) -> None:
    whole = weight(1000, 24, dtype)
    want = int(fingerprint.local_sum(whole, 0)) & MASK
    for bounds in ([0, 1000], [0, 1, 999, 1000], [0, 16, 16, 512, 1000]):
        parts = [int(fingerprint.local_sum(whole[a:b], a)) for a, b in pairwise(bounds)]
        assert sum(parts) & MASK == want
    for same in (whole.t().contiguous().t(), torch.cat([whole, whole], 1)[:, :24], whole.clone()):
        assert int(fingerprint.local_sum(same, 0)) & MASK == want
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 3)
    try:
        assert int(fingerprint.local_sum(whole, 0)) & MASK == want
    finally:
        torch.set_num_threads(before)


def test_every_change_is_another_version() -> None:
    w = weight()
    found = {"as it is": vs.weight_fingerprint(w)}
    for name, change in {
        "one bit": lambda x: x.view(torch.int32)[3, 5].bitwise_xor_(1),
        "the last bit of all": lambda x: x.view(torch.int32)[-1, -1].bitwise_xor_(1),
        "two rows": lambda x: x.copy_(x[[1, 0, *range(2, 37)]]),
        "two columns": lambda x: x.copy_(x[:, [1, 0, *range(2, 13)]]),
        "two words": lambda x: x.copy_(x[:, [2, 3, 0, 1, *range(4, 13)]]),
        "signs": lambda x: x.neg_(),
        "zero": lambda x: x.zero_(),
        "negative zero": lambda x: x.zero_().neg_(),
        "one value": lambda x: x.fill_(1.0),
    }.items():
        changed = w.clone()
        change(changed)
        found[name] = vs.weight_fingerprint(changed)
    found["another dtype"] = vs.weight_fingerprint(w.bfloat16())
    found["a row less"] = vs.weight_fingerprint(w[:-1])
    found["another shape"] = vs.weight_fingerprint(w.reshape(13, 37))
    assert len(set(found.values())) == len(found)
    assert all(len(text) == 32 for text in found.values())


def test_padding_does_not_count_and_a_bias_is_a_column() -> None:
    w = weight()
    padded = torch.cat([w, torch.full((11, 13), float("nan"))])
    shard = vs.VocabShard(0, 48, 37, 48)
    assert vs.weight_fingerprint(padded, shard) == vs.weight_fingerprint(w)
    assert vs.weight_fingerprint(w[:, 0]) == vs.weight_fingerprint(w[:, :1])
    w.requires_grad_()
    assert vs.weight_fingerprint(w[:0]) != vs.weight_fingerprint(w)


def test_what_is_no_weight() -> None:
    for bad, error, said in (
        (torch.ones(3, 4, dtype=torch.int64), TypeError, "fp32, bf16, fp16"),
        (torch.ones(2, 3, 4), ValueError, r"V_local, D"),
        (torch.ones(2, 3, device="meta"), ValueError, "meta device"),
        ([1.0], TypeError, "torch.Tensor"),
    ):
        with pytest.raises(error, match=said):
            vs.weight_fingerprint(bad)
    with pytest.raises(ValueError, match="48 rows, got 37"):
        vs.weight_fingerprint(weight(), vs.VocabShard(0, 48, 37, 48))


@pytest.mark.needs("triton")
def test_triton_gives_the_same_sum() -> None:
    from vocabshard.kernels import triton_fingerprint

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for rows, columns, dtype in ((9, 13, torch.float32), (17, 2100, torch.bfloat16), (3, 4, torch.float16)):
        w = weight(rows, columns, dtype)
        parts = [triton_fingerprint.local_sum(x.to(device), 5 + start) for start, x in fingerprint._as_words(w)]
        assert sum(map(int, parts)) == int(fingerprint.local_sum(w, 5))


@pytest.mark.needs("sm90")
def test_on_a_gpu_as_on_the_cpu() -> None:
    for rows, columns, dtype in ((4097, 2048, torch.bfloat16), (1000, 13, torch.float16), (33, 5120, torch.float32)):
        w = weight(rows, columns, dtype)
        assert vs.weight_fingerprint(w.cuda()) == vs.weight_fingerprint(w)
        assert vs.weight_fingerprint(w.cuda().t().contiguous().t()) == vs.weight_fingerprint(w)
