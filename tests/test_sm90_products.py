"""The Hopper kernels of the two gradient products: one ascending chain an element, whatever the launch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from vocabshard.testing.compare import assert_same_bytes, differing

pytestmark = pytest.mark.needs("sm90")

BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [
    (1, 8, 8),
    (3, 17, 16),
    (64, 128, 48),
    (65, 136, 50),
    (127, 256, 127),
    (129, 264, 1000),
    (255, 100, 385),
    (300, 1000, 200),
    (193, 2048, 4099),
    (1024, 512, 2112),
]


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def problem(n: int, d: int, v: int, dtype: torch.dtype = BF16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """dlogits [N, Vb] padded to whole lines as a view, hidden [N, D], weight [Vb, D]."""
    g = torch.Generator("cuda").manual_seed(seed)
    rows = torch.randn(n, -(-v // 64) * 64, generator=g)
    rows[:, v:] = float("nan")  # nothing beyond the columns is read into a sum
    dlogits = (rows * torch.rand(n, 1, generator=g)).to(dtype)[:, :v]
    return dlogits, torch.randn(n, d, generator=g).to(dtype), torch.randn(v, d, generator=g).to(dtype)


def hidden_sum(dlogits: Tensor, weight: Tensor, before: Tensor | None = None, **how) -> Tensor:
    from vocabshard.kernels.sm90_products import grad_hidden

    grad = torch.full((dlogits.shape[0], weight.shape[1]), float("nan")) if before is None else before.clone()
    grad_hidden(dlogits, weight, grad, go_on=before is not None, **how)
    return grad


def weight_sum(dlogits: Tensor, hidden: Tensor, dtype: torch.dtype = torch.float32, **how) -> Tensor:
    from vocabshard.kernels.sm90_products import grad_weight

    grad = torch.full((dlogits.shape[1], hidden.shape[1]), float("nan"), dtype=dtype)
    grad_weight(dlogits, hidden, grad, **how)
    return grad


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def library(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.contiguous(), b.contiguous(), out_dtype=torch.float32)


def library_rounded(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.contiguous(), b.contiguous())


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("n, d, v", SHAPES)
def test_errors_are_far_below_a_rounded_products(n: int, d: int, v: int, dtype: torch.dtype) -> None:
    """The tensor core truncates at every step, so a long chain errs more than a split one, by far less than bf16."""
    dlogits, hidden, weight = problem(n, d, v, dtype)
    want = dlogits.double() @ weight.double()
    assert error(hidden_sum(dlogits, weight), want) <= error(library_rounded(dlogits, weight), want) / 30
    want = dlogits.double().T @ hidden.double()
    got = weight_sum(dlogits, hidden)
    assert error(got, want) <= error(library_rounded(dlogits.T, hidden), want) / 30
    assert_same_bytes(weight_sum(dlogits, hidden, dtype), got.to(dtype), "rounded once")


def test_the_chain_is_the_librarys_where_it_splits_nothing() -> None:
    """So it is the chain that the forward and Triton have: k ascending, 16 at a time."""
    dlogits, hidden, weight = problem(2048, 2048, 2048)
    assert_same_bytes(hidden_sum(dlogits, weight), library(dlogits, weight), "grad_hidden")
    assert_same_bytes(weight_sum(dlogits, hidden), library(dlogits.T, hidden), "grad_weight")


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("d, v", [(256, 1000), (72, 4099), (1024, 2112), (100, 130)])
def test_rows_of_grad_hidden_do_not_depend_on_the_batch(d: int, v: int, dtype: torch.dtype) -> None:
    dlogits, _, weight = problem(2049, d, v, dtype)
    whole = hidden_sum(dlogits, weight)
    assert differing(whole, hidden_sum(dlogits.flip(1), weight.flip(0)))  # an order of the sum does show
    for size in (1, 2, 3, 7, 9, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257, 1023, 2047):
        for start in (0, 5, 2049 - size):
            got = hidden_sum(dlogits[start : start + size], weight)
            assert_same_bytes(got, whole[start : start + size], f"rows {start} ... {start + size}")


@pytest.mark.parametrize("n, d, v", [(300, 256, 1000), (65, 72, 4099), (2048, 2048, 700), (33, 100, 130)])
def test_blocks_of_columns_continue_the_chain(n: int, d: int, v: int) -> None:
    dlogits, _, weight = problem(n, d, v)
    whole = hidden_sum(dlogits, weight)
    apart = hidden_sum(dlogits[:, :64], weight[:64]) + hidden_sum(dlogits[:, 64:], weight[64:])
    assert differing(whole, apart)  # sums of blocks, added, are others
    assert_same_bytes(hidden_sum(dlogits, weight, torch.zeros_like(whole)), whole, "from zeros")
    for step in (16, 48, 64, 80, 384, 1008):
        grad = None
        for start in range(0, v, step):
            grad = hidden_sum(dlogits[:, start : start + step], weight[start : start + step], grad)
        assert grad is not None
        assert_same_bytes(grad, whole, f"blocks of {step}")


@pytest.mark.parametrize("n, d, v", [(300, 256, 1000), (1100, 72, 200), (2048, 512, 640), (130, 100, 33)])
def test_blocks_of_rows_continue_the_chain_of_grad_weight(n: int, d: int, v: int) -> None:
    dlogits, hidden, _ = problem(n, d, v)
    whole = weight_sum(dlogits, hidden)
    for step in (16, 64, 80, 448):
        grad = None
        for start in range(0, n, step):
            rows = slice(start, start + step)
            last = start + step >= n
            rounded = weight_sum(dlogits[rows], hidden[rows], BF16, go_on_from=grad) if last else None
            if grad is None:
                grad = weight_sum(dlogits[rows], hidden[rows])
            else:
                from vocabshard.kernels.sm90_products import grad_weight

                grad_weight(dlogits[rows], hidden[rows], grad, go_on_from=grad)
            if rounded is not None:
                assert_same_bytes(rounded, whole.bfloat16(), f"blocks of {step}, the last one rounds")
        assert grad is not None
        assert_same_bytes(grad, whole, f"blocks of {step}")


@pytest.mark.parametrize("n, d, v", [(300, 256, 1000), (64, 72, 200), (1024, 2048, 2112), (130, 100, 33)])
def test_main_grad_is_added_to_once(n: int, d: int, v: int) -> None:
    dlogits, hidden, _ = problem(n, d, v)
    main = torch.randn(v, d)
    from vocabshard.kernels.sm90_products import grad_weight

    got = main.clone()
    grad_weight(dlogits, hidden, got, add=True)
    assert_same_bytes(got, main + weight_sum(dlogits, hidden), "added")


def test_columns_of_grad_weight_do_not_depend_on_the_block() -> None:
    dlogits, hidden, _ = problem(513, 328, 1000)
    whole = weight_sum(dlogits, hidden, BF16)
    for start, stop in ((0, 16), (16, 400), (400, 1000), (991, 1000)):
        part = dlogits[:, start:stop]
        assert_same_bytes(weight_sum(part, hidden, BF16), whole[start:stop], f"columns {start} ... {stop}")


@pytest.mark.parametrize("n, d, v", [(300, 256, 1000), (257, 72, 130), (2047, 2048, 130), (700, 100, 64)])
def test_masked_rows_count_as_zeros(n: int, d: int, v: int) -> None:
    dlogits, hidden, weight = problem(n, d, v)
    out = torch.rand(n) < 0.1
    out[-1] = True
    dlogits[out] = 0
    bad = hidden.clone()
    bad[out] = float("nan")
    bad[out, ::3] = float("inf")
    bits = torch.zeros(-(-n // 64) * 64, dtype=torch.int64)
    bits[:n] = out
    mask = (bits.view(-1, 64) << torch.arange(64)).sum(1)
    clean = torch.where(out[:, None], torch.zeros_like(hidden), hidden)
    assert weight_sum(dlogits, bad).isnan().any()
    for dtype in (torch.float32, BF16):
        want = weight_sum(dlogits, clean, dtype)
        assert_same_bytes(weight_sum(dlogits, bad, dtype, row_mask=mask), want, "masked")

    weight[v // 2] = float("nan")
    active = (~out).to(torch.uint8)
    for before in (None, torch.randn(n, d)):
        got = hidden_sum(dlogits, weight, before, row_active=active)
        assert_same_bytes(got[out], torch.zeros(n, d)[out] if before is None else before[out], "rows left alone")
        assert got[~out].isnan().all()


@pytest.mark.parametrize("n, d, v", [(96, 40, 72), (200, 256, 384)])
def test_any_strides(n: int, d: int, v: int) -> None:
    dlogits, hidden, weight = problem(n, d, v)
    for odd in (
        lambda x: x.T.contiguous().T,
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
        lambda x: torch.cat([x, x[:, :3]], 1)[:, : x.shape[1]],
        lambda x: torch.cat([x[:, :1], x], 1)[:, 1:],
    ):
        assert_same_bytes(hidden_sum(odd(dlogits), odd(weight)), hidden_sum(dlogits, weight), "grad_hidden")
        assert_same_bytes(weight_sum(odd(dlogits), odd(hidden)), weight_sum(dlogits, hidden), "grad_weight")


def test_nothing_outside_is_written() -> None:
    from vocabshard.kernels.sm90_products import grad_hidden, grad_weight

    dlogits, hidden, weight = problem(200, 136, 200)
    frame = torch.full((202, 160), 7.0)
    grad_hidden(dlogits, weight, frame[1:201, 8:144], go_on=False)
    assert_same_bytes(frame[1:201, 8:144], hidden_sum(dlogits, weight), "inside")
    frame[1:201, 8:144] = 7.0
    assert (frame == 7.0).all()
    for dtype in (BF16, torch.float32):
        frame = torch.full((202, 160), 7.0, dtype=dtype)
        grad_weight(dlogits, hidden, frame[1:201, 8:144])
        assert_same_bytes(frame[1:201, 8:144], weight_sum(dlogits, hidden, dtype), "inside")
        frame[1:201, 8:144] = 7.0
        assert (frame == 7.0).all()


def test_empty_sums() -> None:
    hidden, weight = torch.ones(0, 64, dtype=BF16), torch.ones(32, 64, dtype=BF16)
    assert (weight_sum(torch.ones(0, 32, dtype=BF16), hidden) == 0).all()
    assert (hidden_sum(torch.ones(5, 0, dtype=BF16), weight[:0]) == 0).all()
    assert hidden_sum(torch.ones(0, 32, dtype=BF16), weight).shape == (0, 64)


def test_again_under_a_graph_and_beside_other_work() -> None:
    dlogits, hidden, weight = problem(1000, 1024, 5000)
    first = hidden_sum(dlogits, weight), weight_sum(dlogits, hidden, BF16)
    for _ in range(5):
        assert_same_bytes(hidden_sum(dlogits, weight), first[0], "again")
        assert_same_bytes(weight_sum(dlogits, hidden, BF16), first[1], "again")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hidden_sum(dlogits, weight), weight_sum(dlogits, hidden, BF16)
    captured[0].zero_(), captured[1].zero_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        other = weight_sum(dlogits, hidden, BF16)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bytes(other, first[1], "on another stream")
    for got, want in zip(captured, first, strict=True):
        assert_same_bytes(got, want, "replayed")
