"""The Triton backward on small shapes: against fp64 and torch's fp32, exact zeros, every option of a GradPlan.

On a GPU, or on the CPU under TRITON_INTERPRET=1, where bf16 products are wrong and those of fp32 have no fixed order.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard import sampling
from vocabshard.dist.fold import fold
from vocabshard.kernels import cpu
from vocabshard.kernels.problem import ORDINARY, GradPlan, LocalProblem, Needs, RowGrads, SavedRows
from vocabshard.testing.compare import assert_same_bytes

if importlib.util.find_spec("triton"):  # conftest.py says why, where there is none
    from vocabshard.kernels import triton_backward, triton_linear
    from vocabshard.kernels.triton_config import DLOGITS, PRODUCTS, SCRATCH_BYTES, STRIDED, GradLaunch, grad_launch

pytestmark = [
    pytest.mark.needs("triton"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # the interpreter's
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
NAN, INF = float("nan"), float("inf")
EVERY = Needs(True, True, True)
LOG2E = float.fromhex("0x1.715476p+0")


class Case:
    """Inputs of a backward whose last columns are padding, and the gradients in any precision."""

    def __init__(
        self, n, d, v, dtype=torch.float32, *, valid=None, bias=False, softcap=None, temperature=None, start=0
    ):
        g = torch.Generator().manual_seed(n * d + v)
        self.hidden = torch.randn(n, d, generator=g).to(dtype)
        self.weight = (torch.randn(v, d, generator=g) * 2 / d**0.5).to(dtype)
        self.bias = torch.randn(v, generator=g) if bias else None
        self.valid = v if valid is None else valid
        self.target = torch.randint(0, self.valid, (n,), generator=g)
        self.scale = torch.rand(n, generator=g) + 0.5 if temperature == "rows" else temperature
        self.softcap, self.start = softcap, start
        self.upstream = torch.randn(3, n, generator=g)  # of logp, lse and entropy
        self.upstream[:, 1::5] = 0

    def exact(self, dtype: torch.dtype) -> list[Tensor]:
        """Gradients of the textbook composition in `dtype`, from the logits of the half-precision operands."""
        leaves = [x[:k].to(dtype).requires_grad_() for x, k in self._leaves()]
        z = leaves[0] @ leaves[1].T
        if self.bias is not None:
            z = z + leaves[2]
        if self.softcap:
            z = self.softcap * torch.tanh(z / self.softcap)
        if self.scale is not None:
            z = z * (self.scale[:, None].to(dtype) if isinstance(self.scale, Tensor) else self.scale)
        logps = torch.log_softmax(z, -1)
        self.lse, self.entropy = torch.logsumexp(z, -1), -(logps.exp() * logps).sum(-1)
        of = (logps.gather(1, self.target[:, None])[:, 0], self.lse, self.entropy)
        return list(torch.autograd.grad(of, leaves, list(self.upstream.to(dtype))))

    def _leaves(self):
        bias = [] if self.bias is None else [(self.bias, self.valid)]
        return [(self.hidden, len(self.hidden)), (self.weight, self.valid), *bias]

    def run(self, needs: Needs = EVERY, how: GradPlan = ORDINARY, launch=None, rows=slice(None)) -> list[Tensor | None]:
        if not hasattr(self, "lse"):
            self.exact(torch.float64)
        lse2 = self.lse.double() * LOG2E
        saved = SavedRows(lse2.round().int(), (lse2 - lse2.round()).float(), self.entropy.float())
        logp, lse, entropy = self.upstream
        weight = self.weight.clone()
        weight[self.valid :] = NAN

        def moved(x):
            return x[rows].contiguous().to(DEVICE)

        return [
            None if x is None else x.cpu()
            for x in triton_backward.backward(
                moved(self.hidden),
                weight.to(DEVICE),
                None if self.bias is None else self.bias.to(DEVICE),
                moved(self.target + self.start),
                moved(self.scale) if isinstance(self.scale, Tensor) else self.scale,
                LocalProblem(self.start, self.valid, self.softcap, True),
                SavedRows(*map(moved, saved)),
                RowGrads(moved(logp), moved(lse - logp), moved(entropy)),
                needs,
                how,
                launch=launch,
            )
        ]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True, "softcap": 3.0, "temperature": "rows", "start": 777}, {"bias": True, "temperature": 0.625}],
    ids=["plain", "all", "bias, temperature"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_against_fp64(dtype: torch.dtype, options: dict) -> None:
    case = Case(20, 24, 150, dtype, valid=139, **options)
    want = case.exact(torch.float64)
    theirs = case.exact(torch.float32)
    for got, w, t in zip(case.run(), want, theirs, strict=False):
        # half precision rounds dlogits, and the result once more
        bar = 4 * error(t, w) if got.dtype == torch.float32 and dtype == torch.float32 else 6e-4
        assert error(got[: len(w)], w) < bar
        assert (got[len(w) :] == 0).all(), "padding"


def test_exact_zeros_and_poison() -> None:
    case = Case(9, 8, 70, valid=64, bias=True)
    case.bias[40:50] = -INF
    case.target[:] = case.target % 40
    case.target[0] = 45  # a -inf target in a finite row: the other columns get theirs, it gets nothing
    z = (case.hidden @ case.weight[:64].T + case.bias[:64]).double()
    logps = torch.log_softmax(z, -1)
    case.lse = torch.logsumexp(z, -1)
    case.entropy = -(logps.exp() * torch.where(torch.isneginf(logps), 0.0, logps)).sum(-1)
    clean = case.run()
    assert (clean[0][1::5] == 0).all() and (clean[0][0] != 0).any()
    for grad in clean[1:]:
        assert (grad[40:50] == 0).all() and (grad[64:] == 0).all() and torch.isfinite(grad).all()
    case.hidden[1::5] = torch.tensor([NAN, INF] * 4)  # rows without an upstream gradient hold anything
    for got, want in zip(case.run(), clean, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    case.lse[2] = NAN
    poisoned = case.run()
    assert torch.isnan(poisoned[0][2]).all() and torch.isfinite(poisoned[0][[0, 1, 3, 4]]).all()
    assert torch.isnan(poisoned[1][:40]).all()


def test_near_certain_targets_keep_their_gradient() -> None:
    case = Case(1, 8, 16)
    case.hidden[:], case.weight[:] = 1 / 8, torch.tensor([0.0, -14.0, -15.0, -16.5] + 12 * [-40.0])[:, None]
    case.target[:], case.upstream[:, 0] = 0, torch.tensor([1.0, 0.0, 0.0])
    (want, want_weight), (got, got_weight, _) = case.exact(torch.float64), case.run()
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=0)
    torch.testing.assert_close(got_weight.double(), want_weight, rtol=1e-3, atol=0)


def test_blocks_of_rows_and_columns() -> None:
    """Many blocks go on where one would: the same gradients, and the same bytes where the products' order is fixed."""
    case = Case(24, 16, 200, torch.float16, valid=190, bias=True)
    launch = GradLaunch(24, 256, DLOGITS["few"], PRODUCTS["narrow"][0], PRODUCTS["narrow"][0])
    whole = case.run(launch=launch)
    for rows, columns in ((24, 128), (16, 256)):
        parts = case.run(launch=replace(launch, rows=rows, columns=columns))
        for got, want, name in zip(parts, whole, ("hidden", "weight", "bias"), strict=True):
            if INTERPRETED or name == "bias":
                assert error(got, want.double()) < (1e-3 if name == "weight" else 1e-5), name
            else:
                assert_same_bytes(got, want, f"{name}, {rows} rows, {columns} columns")
    few = case.run(Needs(True, False, False), launch=launch, rows=slice(7, 12))[0]
    assert_same_bytes(few, whole[0][7:12]) if not INTERPRETED else torch.testing.assert_close(few, whole[0][7:12])


def test_what_a_grad_plan_asks_for() -> None:
    case = Case(20, 16, 150, torch.float16)
    hidden, weight, _ = case.run()
    for needs in ((True, False, False), (False, True, False)):
        alone = case.run(Needs(*needs))
        for got, want, need in zip(alone, (hidden, weight, None), needs, strict=True):
            assert (got is not None) == need
            if need:
                assert_same_bytes(got, want)
    seen = []

    def ready(total: Tensor) -> None:
        seen.append((total, main.clone()))
        total += 1  # it is complete: nothing is added after

    accumulators = torch.ones(20, 16, device=DEVICE)
    main = torch.full((150, 16), 0.5, device=DEVICE)
    launch = GradLaunch(20, 64, DLOGITS["few"], PRODUCTS["small"][0], PRODUCTS["small"][0])
    how = GradPlan(main, accumulators, ready)
    got, none, _ = case.run(how=how, launch=launch)
    assert none is None and len(seen) == 1 and seen[0][0] is accumulators
    torch.testing.assert_close(got - 2, hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(main.cpu() - 0.5, weight.float(), rtol=2e-3, atol=1e-4)
    assert (seen[0][1][128:] == 0.5).all() and (seen[0][1][:128] != 0.5).any(), "before the last block's grad_weight"


def test_nothing_to_do() -> None:
    case = Case(3, 8, 20, bias=True)
    case.exact(torch.float64)
    seen = []
    grads = case.run(how=GradPlan(hidden_ready=seen.append), rows=slice(0, 0))
    assert grads[0].shape == (0, 8) and (grads[1] == 0).all() and (grads[2] == 0).all() and len(seen) == 1
    case.valid = 0
    grads = case.run(how=GradPlan(hidden_ready=seen.append))
    assert all((x == 0).all() for x in grads) and len(seen) == 2


def test_from_another_thread_and_twice() -> None:
    case = Case(6, 8, 40)
    hidden, weight = (x.to(DEVICE).requires_grad_() for x in (case.hidden, case.weight))
    logp = vs.linear_logp(hidden, weight, case.target.to(DEVICE), backend="triton")
    loss = (logp * case.upstream[0].to(DEVICE)).sum()
    loss.backward(retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_same_bytes(hidden.grad, first[0])
    assert_same_bytes(weight.grad, first[1])


def test_scratch_is_bounded_and_blocks_fit() -> None:
    for n in (1, 64, 65, 1000, 4096, 65536, 10**6):
        for d in (1, 2048, 16384):
            for columns in (1, 50257, 151936, 2**20):
                for chain, item in (("descriptors", 2), ("pointers", 2), ("fma", 4)):
                    launch = grad_launch(n, columns, d, chain, item, False, True, 132)
                    rows, width = min(n, launch.rows), min(columns, launch.columns)
                    sums = 4 * width * (-(-rows // launch.dlogits.block_m) + 1)
                    weight_sum = 4 * width * d if rows < n else 0
                    assert rows * -(-width // 8) * 8 * item + sums + weight_sum <= SCRATCH_BYTES + (1 << 20)
                    assert rows == n or rows % 64 == 0, "chains are cut between their steps"
                    assert launch.columns % 64 == 0
                    assert (launch.of_hidden is STRIDED) == (chain != "descriptors")
    assert SCRATCH_BYTES < 256 << 20
    # many rows take large tiles, few rows of hidden's gradient small ones, so that no SM idles
    launch = grad_launch(4096, 131072, 2048, "descriptors", 2, False, False, 132)
    assert launch.of_hidden is PRODUCTS["large"][0] and launch.of_weight is PRODUCTS["large"][0]
    assert grad_launch(64, 131072, 2048, "descriptors", 2, False, False, 132).of_hidden is PRODUCTS["small"][0]


def test_kept_logits_give_the_bytes_of_logits_made_again() -> None:
    dtype = torch.float32 if INTERPRETED else torch.float16
    case = Case(19, 3, 60, dtype, valid=57, bias=True, temperature="rows")
    inputs = [case.hidden, case.weight, case.bias, case.target, case.scale]
    hidden, weight, bias, target, scale = (x.to(DEVICE) if isinstance(x, Tensor) else x for x in inputs)
    problem = LocalProblem(0, 57, case.softcap, True)
    records, logits = triton_linear.forward(hidden, weight, bias, target, scale, problem, want_logits=True)
    want = case.run()
    for rows in (19, 7):
        kept = triton_linear.new_kept(rows, 57, dtype, hidden.device)
        got, given = triton_linear.forward(
            hidden, weight, bias, target, scale, problem, want_logits=rows == 7, keep=kept
        )
        assert_same_bytes(got, records)
        assert_same_bytes(kept.tensors[0].contiguous(), logits[:rows, :57].contiguous())
        if given is not None:
            assert_same_bytes(given.contiguous(), logits.contiguous())
        assert kept.tensors[0].stride(0) * 4 == triton_linear.kept_bytes_per_row(57, dtype)
        for grad, expect, name in zip(
            case.run(how=GradPlan(kept=kept)), want, ("hidden", "weight", "bias"), strict=True
        ):
            if name == "bias" and expect is not None:
                torch.testing.assert_close(grad, expect, rtol=1e-4, atol=1e-5)
            elif not INTERPRETED:
                assert_same_bytes(grad, expect, f"{name}, {rows} rows kept")
            elif expect is not None:
                torch.testing.assert_close(grad, expect, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("softcap, temperature", [(None, None), (4.0, "rows")])
def test_gradients_under_a_cut(kept: bool, softcap: float | None, temperature: str | None) -> None:
    """Those of the CPU kernels, and exactly 0 in columns that no row keeps; from kept logits too."""
    case = Case(20, 24, 210, valid=200, bias=True, softcap=softcap, temperature=temperature, start=48)
    problem = LocalProblem(48, 200, softcap, True)
    target = case.target + 48
    rows = (case.hidden, case.weight, case.bias, target, case.scale, problem)
    logits = cpu.forward(*rows, want_logits=True)[1][:, :200]
    order = sampling.place_of(logits, torch.arange(48, 248)).sort(dim=1, descending=True).values
    cut = order[:, 6].clone()
    cut[::4] = order[::4, 0]
    target[2] = 0 if bool(sampling.left_out(logits[2:3], 48, cut[2:3])[0, 0]) else 1  # and one on another rank
    target[3] = 48 + int(sampling.left_out(logits[3:4], 48, cut[3:4])[0].nonzero()[0])
    folded = fold("cpu", cpu.forward(*rows, cut=cut)[0][None], target, -100, 248, "nan")
    saved = SavedRows(folded.lse2_int, folded.lse2_frac, folded.entropy)
    up = case.upstream
    grads = RowGrads(up[0].contiguous(), (up[1] - up[0]).contiguous(), up[2].contiguous())
    want = cpu.backward(*rows, saved, grads, EVERY, cut=cut)

    def there(x):
        return x.to(DEVICE) if isinstance(x, Tensor) else x

    moved, plan = [there(x) for x in rows], ORDINARY
    if kept:
        keep = triton_linear.new_kept(13, 200, torch.float32, torch.device(DEVICE))
        records, _ = triton_linear.forward(*moved, keep=keep, cut=cut.to(DEVICE))
        assert_same_bytes(records.cpu(), cpu.forward(*rows, cut=cut)[0], "records")
        plan = GradPlan(kept=keep)
    of_rows = (SavedRows(*map(there, saved)), RowGrads(*map(there, grads)))
    got = triton_backward.backward(*moved, *of_rows, EVERY, plan, cut=cut.to(DEVICE))
    for a, b in zip(got, want, strict=True):
        assert a is not None and b is not None
        assert float((a.cpu() - b).abs().max()) < 1e-5 * max(1, float(b.abs().max()))
    counted = (up != 0).any(0)
    never = sampling.left_out(logits, 48, cut)[counted].all(0)
    assert int(never.sum()) > 50 and not got[1][:200][never].any() and not got[2][:200][never].any()
