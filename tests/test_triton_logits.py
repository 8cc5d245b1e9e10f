"""Logits that exist, through Triton: records and gradients are the bytes of the CPU kernels, whatever the launch."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard import partials
from vocabshard.kernels import cpu
from vocabshard.kernels.problem import LocalProblem, RowGrads, SavedRows
from vocabshard.testing import specification
from vocabshard.testing.compare import assert_same_bytes
from vocabshard.testing.inputs import stacked_hard_rows

if importlib.util.find_spec("triton"):  # conftest.py says why, where there is none
    from vocabshard.kernels import triton_logits
    from vocabshard.kernels.triton_config import logits_launch

pytestmark = [
    pytest.mark.needs("triton"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # the interpreter's
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STORED = DTYPES[::2] if INTERPRETED else DTYPES  # the interpreter truncates to bf16


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def forward(logits: Tensor, target: Tensor, scale, problem: LocalProblem, rows: Tensor | None = None, launch=None):
    moved = (x.to(DEVICE) if isinstance(x, Tensor) else x for x in (logits, target, scale))
    index = None if rows is None else rows.to(DEVICE)
    return triton_logits.logits_forward(*moved, problem, index, launch=launch).cpu()


def wide(logits: Tensor, offset: int = 3) -> Tensor:
    """The same logits inside rows that start at any address, NaN around them."""
    around = torch.full((len(logits), logits.shape[1] + 7), NAN, dtype=logits.dtype)
    around[:, offset : offset + logits.shape[1]] = logits
    return around[:, offset : offset + logits.shape[1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [None, 0.625, "rows"])
def test_records_equal_the_cpu(dtype: torch.dtype, temperature: object) -> None:
    for n, v, valid in ((2, 600, 590), (3, 33, 33), (1, 1, 1), (1, 16, 9)):
        logits = normal(n, v, seed=v, scale=4, dtype=dtype)
        logits[:, valid:] = NAN
        target = torch.randint(-2, v + 3, (n,), generator=torch.Generator().manual_seed(n)) + 50
        target[0] = 50 + valid - 1
        scale = normal(n, seed=3).abs() + 0.5 if temperature == "rows" else temperature
        for entropy in (False, True):
            problem = LocalProblem(50, valid, None, entropy)
            want = cpu.logits_forward(logits, target, scale, problem)
            assert_same_bytes(forward(logits, target, scale, problem), want, f"{n} x {v}, entropy {entropy}")
    assert_same_bytes(forward(wide(logits), target, scale, problem), want, "unaligned")


@pytest.mark.parametrize("entropy", [False, True])
def test_hard_rows(entropy: bool) -> None:
    columns = 65 if entropy else 96
    names, y = stacked_hard_rows(columns)
    target = torch.arange(len(y)) % columns
    want = specification.partials(y, target, entropy)
    for launch in ((1, 1, 1),) if INTERPRETED else ((1, 1, 1), (4, 2, 1), None):
        got = forward(y, target, None, LocalProblem(0, columns, None, entropy), launch=launch)
        for i, name in enumerate(names):
            assert_same_bytes(got[:, i], want[:, i], name)


def test_every_launch_gives_the_same_bytes() -> None:
    logits = normal(2, 4500, scale=30)
    logits[0, ::3] = -INF
    logits[1, :2048] = -2e6
    target = torch.tensor([2047, 4498])
    problem = LocalProblem(0, 4499, None, True)
    want = cpu.logits_forward(logits, target, None, problem)
    for launch in ((4, 2, 1), (2, 1, 3), (1, 2, 4)):
        assert_same_bytes(forward(logits, target, None, problem, launch=launch), want, f"{launch}")


def test_rows() -> None:
    logits = normal(9, 100, scale=3)
    rows = torch.tensor([7, 0, 7, 3, 8])
    target = torch.arange(5) * 20
    problem = LocalProblem(0, 97, None, True)
    want = cpu.logits_forward(logits, target, None, problem, rows)
    assert_same_bytes(forward(logits, target, None, problem, rows), want)
    outside = forward(logits, target, None, problem, torch.tensor([7, -1, 9, 3, 2**40]))
    assert_same_bytes(outside[:, [0, 3]], want[:, [0, 3]])
    assert partials.maxima(outside)[[1, 2, 4]].isnan().all() and (outside[1:, [1, 2, 4]] == 0).all()


def gradients_of(module, logits, target, scale, problem, saved, grads, rows=None, out=None) -> Tensor:
    device = DEVICE if module is triton_logits else "cpu"

    def move(x):
        return x.to(device) if isinstance(x, Tensor) else x

    logits = move(logits) if out is None else out
    to = torch.full(logits.shape, 7.0, dtype=logits.dtype, device=device) if out is None else out
    module.logits_backward(
        logits, move(target), move(scale), problem, SavedRows(*map(move, saved)), RowGrads(*map(move, grads)), to,
        move(rows),
    )  # fmt: skip
    return to.cpu()


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_equal_the_cpu(dtype: torch.dtype, entropy: bool) -> None:
    names, hard = stacked_hard_rows(70)
    logits = torch.cat([hard, normal(9, 70, scale=5)]).to(dtype)
    logits = torch.cat([logits, torch.full((len(logits), 3), NAN, dtype=dtype)], 1)
    n = len(logits)
    target = torch.arange(n) % 70 + 1000
    target[3] = -100
    problem = LocalProblem(1000, 70, None, entropy)
    gs = [normal(n, seed=1), normal(n, seed=2), normal(n, seed=3) if entropy else None]
    for g in gs:
        if g is not None:
            g[len(names) + 5 : len(names) + 8] = 0
    for scale in (None, normal(n, seed=4).abs() + 0.5):
        records = cpu.logits_forward(logits, target, scale, problem)
        folded = specification.fold(records[None], target, -100, 1070, "nan")
        saved, grads = SavedRows(folded.lse2_int, folded.lse2_frac, folded.entropy), RowGrads(*gs)
        arguments = (logits, target, scale, problem, saved, grads)
        want = gradients_of(cpu, *arguments)
        got = gradients_of(triton_logits, *arguments)
        for i in range(n):
            nan = got[i].isnan()
            assert torch.equal(nan, want[i].isnan())
            zeroed = [torch.where(nan, 0.0, x[i]) for x in (got, want)]
            assert_same_bytes(*zeroed, names[i] if i < len(names) else f"row {i}")
        assert (got[:, 70:] == 0).all() and (got[len(names) + 5 : len(names) + 8] == 0).all()

    def few(x):
        return None if x is None else x[::4].contiguous()

    some = (few(logits), few(target), few(scale), problem, SavedRows(*map(few, saved)), RowGrads(*map(few, grads)))
    in_place = gradients_of(triton_logits, *some, out=some[0].to(DEVICE).clone())
    assert torch.equal(in_place.nan_to_num(1e9), few(got).nan_to_num(1e9))


def test_gradients_of_rows_add_up() -> None:
    logits = normal(6, 50, scale=2)
    rows, target = torch.tensor([4, 1, 4, 4, 0]), torch.arange(5) * 9
    problem = LocalProblem(0, 50, None, False)
    folded = specification.fold(specification.partials(logits[rows], target, False)[None], target, -100, 50, "nan")
    grads = RowGrads(normal(5, seed=1), normal(5, seed=2), None)
    saved = SavedRows(folded.lse2_int, folded.lse2_frac, None)
    arguments = (logits, target, None, problem, saved, grads, rows)
    want = gradients_of(cpu, *arguments)
    assert_same_bytes(gradients_of(triton_logits, *arguments), want)
    assert_same_bytes(gradients_of(triton_logits, *arguments, out=logits.to(DEVICE).clone()), want, "in place")
    assert (want[[2, 3, 5]] == 0).all()


def test_the_operators_through_triton() -> None:
    logits, target = normal(2, 5, 200, scale=3), torch.arange(10).view(2, 5) * 11
    results = {}
    for backend, device in (("triton", DEVICE), ("cpu", "cpu")):
        leaf = logits.to(device).requires_grad_()
        out = vs.vocab_parallel_logp(
            leaf, target.to(device), temperature=0.7, return_entropy=True, backend=backend, strict=True, validate=False
        )
        torch.autograd.backward([out.logp.sum(), out.lse.sum(), (out.entropy * 2).sum()])
        results[backend] = [x.detach().cpu() for x in (*out[:3], leaf.grad)]
        assert out.provenance.backend == backend and out.provenance.projection_id == "given-logits"
    for ours, theirs in zip(*results.values(), strict=True):
        assert_same_bytes(ours, theirs)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    empty = LocalProblem(0, 8, None, False)
    assert triton_logits.logits_forward(torch.zeros(4, 8, device=DEVICE), none, None, empty).shape == (4, 0)


def test_launches_cut_the_columns() -> None:
    for outputs in (1, 3, 64, 1000, 5000):
        for columns in (1, 100, 32768, 151936):
            warps, unroll, runs = logits_launch(outputs, columns, 132)
            assert 1 <= runs <= -(-columns // (512 * warps * unroll))
    assert logits_launch(1, 151936, 132)[2] > 132
