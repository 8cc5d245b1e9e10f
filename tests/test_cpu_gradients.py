"""The CPU kernels' gradients: against fp64 beside torch's own fp32, by bytes across how they are run, exact zeros."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.dist.fold import fold
from vocabshard.kernels import cpu
from vocabshard.kernels.problem import ORDINARY, GradPlan, KeptLogits, LocalProblem, Needs, RowGrads, SavedRows
from vocabshard.testing.compare import assert_same_bytes

INF, NAN = float("inf"), float("nan")
USABLE = [isa for isa, name in enumerate(("base", "avx2", "avx512")) if name in _C.build_info()["cpu_usable"]]
ALL = Needs(True, True, True)
Gradients = tuple[Tensor, ...]


class Case:
    """Inputs, saved rows and upstream gradients of one problem; every fifth row sends nothing."""

    def __init__(
        self,
        N: int,
        D: int,
        V: int,
        dtype: torch.dtype = torch.float32,
        *,
        softcap: float | None = None,
        temperature: bool = False,
        seed: int = 0,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(N, D, generator=g).to(dtype)
        self.weight = (torch.randn(V, D, generator=g) * (3 / D**0.5)).to(dtype)
        self.bias = torch.randn(V, generator=g).to(dtype)
        self.target_ids = torch.randint(0, V, (N,), generator=g)
        self.inv_temperature = torch.rand(N, generator=g) + 0.5 if temperature else None
        self.softcap, self.V = softcap, V
        self.upstream = torch.randn(3, N, generator=g)  # of logp, lse, entropy
        self.upstream[:, 4::5] = 0

    def problem(self, start: int = 0, stop: int | None = None) -> LocalProblem:
        return LocalProblem(start, (self.V if stop is None else stop) - start, self.softcap, True)

    def grads(self) -> RowGrads:
        logp, lse, entropy = self.upstream
        return RowGrads(logp, lse - logp, entropy)

    def saved(self, keep: KeptLogits | None = None, want_logits: bool = False) -> SavedRows:
        records, _ = cpu.forward(
            self.hidden,
            self.weight,
            self.bias,
            self.target_ids,
            self.inv_temperature,
            self.problem(),
            want_logits=want_logits,
            keep=keep,
        )
        rows = fold("cpu", records[None], self.target_ids, -100, self.V, "nan")
        return SavedRows(rows.lse2_int, rows.lse2_frac, rows.entropy)

    def run(
        self, saved: SavedRows | None = None, needs: Needs = ALL, how: GradPlan = ORDINARY
    ) -> tuple[Tensor | None, ...]:
        return cpu.backward(
            self.hidden,
            self.weight,
            self.bias,
            self.target_ids,
            self.inv_temperature,
            self.problem(),
            self.saved() if saved is None else saved,
            self.grads(),
            needs,
            how,
        )

    def logits(self) -> Tensor:
        """The contract's logits before soft-cap and temperature, so that all differentiate one function."""
        bare = LocalProblem(0, self.V, None, False)
        z = cpu.forward(self.hidden, self.weight, self.bias, self.target_ids, None, bare, want_logits=True)[1]
        assert z is not None
        return z

    def products(self, dz: Tensor) -> Gradients:
        return dz @ self.weight.to(dz.dtype), dz.T @ self.hidden.to(dz.dtype), dz.sum(0)

    def plain(self, dtype: torch.dtype) -> Gradients:
        """The textbook composition from those logits on, in `dtype`."""
        z = self.logits().to(dtype).requires_grad_()
        y = z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)
        y = y if self.inv_temperature is None else y * self.inv_temperature.to(dtype)[:, None]
        return self.products(differentiate(y, z, self.target_ids, self.upstream))

    def exact(self) -> Gradients:
        """In fp64 at the y that the kernels see, which is rounded."""
        z = self.logits()
        if self.softcap is not None:
            capped = torch.empty_like(z)
            _C.spec_softcap(z.data_ptr(), z.numel(), self.softcap, capped.data_ptr())
        y = z if self.softcap is None else capped
        y = (y if self.inv_temperature is None else y * self.inv_temperature[:, None]).double().requires_grad_()
        dy = differentiate(y, y, self.target_ids, self.upstream)
        if self.inv_temperature is not None:
            dy = dy * self.inv_temperature.double()[:, None]
        if self.softcap is not None:
            dy = dy / torch.cosh(z.double() / self.softcap).square()
        return self.products(dy)


def differentiate(y: Tensor, leaf: Tensor, target_ids: Tensor, upstream: Tensor) -> Tensor:
    """d(logp, lse, entropy of y) / d leaf under the upstream gradients [3, N]."""
    logps = torch.log_softmax(y, -1)
    outputs = (logps.gather(1, target_ids[:, None])[:, 0], torch.logsumexp(y, -1), -(logps.exp() * logps).sum(-1))
    (gradient,) = torch.autograd.grad(outputs, leaf, list(upstream.to(y.dtype)))
    return gradient


def run_with(monkeypatch: pytest.MonkeyPatch, threads: int = 2, isa: int = -1) -> None:
    monkeypatch.setattr(cpu, "_run", lambda: _C.CpuRun(threads, isa))


def same(got: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...], what: str = "") -> None:
    for name, a, b in zip(("hidden", "weight", "bias"), got, expected, strict=True):
        assert_same_bytes(a, b, f"grad_{name} {what}")


# sizes that cross register tiles, the 256-blocks of sums, blocks of rows and super-blocks of columns
SIZES = [(17, 33, 50), (257, 100, 777), (1500, 9, 700), (40, 24, 5000), (20, 12_500, 40)]


@pytest.mark.parametrize("softcap, temperature", [(None, False), (4.0, True)])
@pytest.mark.parametrize("N, D, V", SIZES)
def test_no_worse_than_torch(N: int, D: int, V: int, softcap: float | None, temperature: bool) -> None:
    ours, torchs = torch.zeros(3), torch.zeros(3)
    for seed in range(3):
        case = Case(N, D, V, softcap=softcap, temperature=temperature, seed=seed)
        ours += torch.tensor(
            [rms(got - want) for got, want in zip(case.run(), case.exact(), strict=True) if got is not None]
        )
        plain = zip(case.plain(torch.float32), case.plain(torch.float64), strict=True)
        torchs += torch.tensor([rms(got - want) for got, want in plain])
    assert bool((ours <= torchs).all()), (ours / torchs).tolist()


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("N, D, V", [(1, 8, 8), (17, 17, 300), (300, 40, 1000), (3000, 9, 260)])
def test_same_bytes_however_it_runs(
    N: int, D: int, V: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(N, D, V, dtype, softcap=9.0, temperature=True)
    saved = case.saved()
    expected = case.run(saved)
    for isa in USABLE:
        for threads in (1, 2, 3):
            run_with(monkeypatch, threads, isa)
            same(case.run(saved), expected, f"isa {isa}, {threads} threads")
    for needs in itertools.product((False, True), repeat=3):
        kept = tuple(g if need else None for g, need in zip(expected, needs, strict=True))
        same(case.run(saved, Needs(*needs)), kept, f"needs {needs}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_summed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    case = Case(1500, 24, 1000, dtype)
    saved, got = case.saved(), case.run()
    case.hidden, case.weight, case.bias = case.hidden.float(), case.weight.float(), case.bias.float()
    hidden, weight, bias = case.run(saved)
    assert weight is not None and bias is not None
    same(got, (hidden, weight.to(dtype), bias.to(dtype)))


@pytest.mark.parametrize("D", [30, 12_500])
def test_shards_and_batches(D: int) -> None:
    case = Case(1700 if D < 100 else 20, D, 1030 if D < 100 else 50)
    saved = case.saved()
    hidden, weight, bias = case.run(saved)
    assert hidden is not None and weight is not None and bias is not None
    full, total = (case.weight, case.bias), torch.zeros_like(hidden)
    for start, stop in itertools.pairwise((0, 16, 16, 48, case.V)):
        part = cpu.backward(
            case.hidden,
            full[0][start:stop],
            full[1][start:stop],
            case.target_ids,
            None,
            case.problem(start, stop),
            saved,
            case.grads(),
            ALL,
        )
        same((*part[1:], None), (weight[start:stop], bias[start:stop], None), f"columns {start} ... {stop}")
        assert part[0] is not None
        total += part[0]
    assert torch.allclose(total, hidden, rtol=1e-4, atol=1e-5)

    rows = torch.arange(len(hidden)).flip(0)[3:]  # another batch around each row
    case.hidden, case.target_ids, case.upstream = case.hidden[rows], case.target_ids[rows], case.upstream[:, rows]
    moved = SavedRows(*(x[rows] for x in saved if x is not None))
    assert_same_bytes(case.run(moved)[0], hidden[rows], "grad_hidden in another batch")


@pytest.mark.parametrize("N, D, V", [(17, 17, 300), (300, 40, 1000), (1500, 9, 700)])
def test_what_the_forward_kept_changes_no_byte(N: int, D: int, V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(N, D, V, torch.bfloat16, softcap=9.0, temperature=True)
    saved, expected = case.saved(), case.run()
    for rows in (1, 16, N // 2, N):
        for isa in USABLE:
            run_with(monkeypatch, 2, isa)
            kept = cpu.new_kept(rows, V, case.hidden.dtype, case.hidden.device)
            kept.tensors[0].fill_(NAN)
            for a, b in zip(case.saved(kept, want_logits=rows == N), saved, strict=True):
                assert_same_bytes(a, b, f"folded rows, {rows} kept")
            for _ in range(2):  # the backward leaves what was kept
                same(case.run(saved, how=GradPlan(kept=kept)), expected, f"{rows} rows kept, isa {isa}")
    # they are read: what was kept, changed, changes the gradients
    kept.tensors[0][0] += 1
    with pytest.raises(AssertionError, match="grad_hidden"):
        same(case.run(saved, how=GradPlan(kept=kept)), expected)
    hidden = case.run(saved, Needs(True, False, False))[0]
    assert hidden is not None
    part = slice(N // 3, N // 3 + N // 2)  # rows of it, as a batch of their own
    case.hidden, case.target_ids, case.upstream = case.hidden[part], case.target_ids[part], case.upstream[:, part]
    assert case.inv_temperature is not None
    case.inv_temperature = case.inv_temperature[part]
    kept.tensors[0][0] -= 1
    some = SavedRows(*(x[part] for x in saved if x is not None))
    how = GradPlan(kept=KeptLogits((kept.tensors[0][: N // 2],)).part(part.start, part.stop))
    assert_same_bytes(case.run(some, Needs(True, False, False), how)[0], hidden[part], "a slice of what was kept")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_is_added_to_once(dtype: torch.dtype) -> None:
    case = Case(1500, 24, 1000, dtype)
    case.V = 990
    case.target_ids %= case.V
    saved, expected = case.saved(), case.run()
    case.weight = case.weight.float()
    case.hidden, case.bias = case.hidden.float(), case.bias.float()
    in_fp32 = case.run(saved)[1]
    case.hidden, case.weight, case.bias = (x.to(dtype) for x in (case.hidden, case.weight, case.bias))
    before = torch.randn(1000, 24, generator=torch.Generator().manual_seed(3))
    main_grad = before.clone()
    hidden, weight, bias = case.run(saved, how=GradPlan(main_grad=main_grad))
    assert weight is None
    same((hidden, bias, None), (expected[0], expected[2], None))
    assert_same_bytes(main_grad, before + in_fp32)
    case.upstream.zero_()
    case.run(saved, how=GradPlan(main_grad=main_grad))
    assert_same_bytes(main_grad, before + in_fp32, "nothing to add")


@pytest.mark.parametrize("N, D", [(30, 100), (300, 30), (20, 12_500)])
def test_accumulators_go_on_as_one_chain_that_no_shard_boundary_cuts(
    N: int, D: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(N, D, 1030 if D < 1000 else 70)
    saved = case.saved()
    start_values = torch.randn(N, D, generator=torch.Generator().manual_seed(4))
    weight, bias, V = case.weight, case.bias, case.V
    results, eighths = [], (*(min(i * (V // 128 + 1) * 16, V) for i in range(8)), V)
    for number, bounds in enumerate(((0, V), (0, 16, 16, 48, V), (0, 48, 64, V), eighths)):
        run_with(monkeypatch, 1 + number, USABLE[number % len(USABLE)])
        grad_hidden = start_values.clone()
        for start, stop in itertools.pairwise(bounds):
            case.weight, case.bias = weight[start:stop], bias[start:stop]
            got = cpu.backward(
                case.hidden, case.weight, case.bias, case.target_ids, None, case.problem(start, stop), saved,
                case.grads(), Needs(True, False, False), GradPlan(grad_hidden=grad_hidden),
            )  # fmt: skip
            assert got[0] is grad_hidden
        results.append(grad_hidden)
    case.weight, case.bias = weight, bias
    silent = (case.upstream == 0).all(0)
    assert_same_bytes(results[0][silent], start_values[silent])
    for other in results[1:]:
        assert_same_bytes(other, results[0])
    ordinary = case.run(saved)[0]
    assert ordinary is not None
    assert rms(results[0] - start_values - ordinary) < 1e-5 * rms(ordinary)
    # an ordinary sum by shards differs, so the chain is what makes them equal
    halves = torch.zeros(N, D)
    for start, stop in ((0, 48), (48, V)):
        case.weight, case.bias = weight[start:stop], bias[start:stop]
        part = cpu.backward(
            case.hidden, case.weight, case.bias, case.target_ids, None, case.problem(start, stop), saved,
            case.grads(), Needs(True, False, False),
        )[0]  # fmt: skip
        assert part is not None
        halves += part
    assert bool((halves != ordinary).any())


def test_rows_without_a_gradient_contribute_nothing() -> None:
    case = Case(300, 40, 500)
    active = (case.upstream != 0).any(0)
    saved, expected = case.saved(), case.run()
    assert not bool(active.all())
    case.hidden[~active] = NAN
    for x in saved:
        assert x is not None
        x[~active] = 7 if x.dtype == torch.int32 else NAN
    got = case.run(saved)
    same(got, expected, "with NaN in silent rows")
    assert got[0] is not None
    assert_same_bytes(got[0][~active], torch.zeros(int((~active).sum()), 40))
    # and they need not be there
    case.hidden, case.target_ids, case.upstream = case.hidden[active], case.target_ids[active], case.upstream[:, active]
    dropped = SavedRows(*(x[active] for x in saved if x is not None))
    same((*case.run(dropped)[1:], None), (*expected[1:], None), "without the silent rows")
    case.upstream.zero_()
    same(case.run(dropped), tuple(torch.zeros_like(x) for x in (case.hidden, case.weight, case.bias)), "all silent")


def test_padding_masks_and_poisons() -> None:
    case = Case(20, 16, 80, temperature=True)
    case.V = 70  # ten columns of padding
    case.target_ids %= 70
    case.weight[70:], case.bias[70:] = NAN, NAN
    case.bias[7] = -INF
    case.target_ids[3] = 7
    hidden, weight, bias = case.run()
    assert hidden is not None and weight is not None and bias is not None
    for zero in (weight[70:], bias[70:], weight[7:8], bias[7:8]):
        assert_same_bytes(zero, torch.zeros_like(zero))
    assert all(bool(torch.isfinite(x).all()) for x in (hidden, weight, bias))

    case.hidden[5] = INF  # a poisoned row
    hidden, weight, bias = case.run()
    assert hidden is not None and weight is not None and bias is not None
    assert bool(torch.isnan(hidden[5]).all()) and bool(torch.isfinite(hidden[torch.arange(20) != 5]).all())
    assert bool(torch.isnan(weight[:70]).all()) and bool((weight[70:] == 0).all())
    case.upstream[:, 5] = 0
    assert all(bool(torch.isfinite(x).all()) for x in case.run() if x is not None)

    case.bias[:] = -INF  # every row is all -inf
    case.hidden[5] = 0
    for x in case.run():
        assert x is not None
        assert_same_bytes(x, torch.zeros_like(x), "all -inf")


def test_flush_to_zero_modes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode")
    torch.set_flush_denormal(False)
    case = Case(19, 24, 130)
    case.hidden, case.weight = case.hidden * 1e-36, case.weight * 1e-3
    saved = case.saved()
    for isa in USABLE:
        run_with(monkeypatch, 2, isa)
        expected = case.run(saved)
        torch.set_flush_denormal(True)
        try:
            got = case.run(saved)
        finally:
            torch.set_flush_denormal(False)
        same(got, expected, f"isa {isa}")
        assert expected[1] is not None and bool(((expected[1] != 0) & (expected[1].abs() < 1e-38)).any())


def logits_gradient(logits: Tensor, case: Case, rows: Tensor | None, out: Tensor) -> Tensor:
    problem = LocalProblem(0, case.V, None, True)
    records = cpu.logits_forward(logits, case.target_ids, case.inv_temperature, problem, rows)
    folded = fold("cpu", records[None], case.target_ids, -100, case.V, "nan")
    saved = SavedRows(folded.lse2_int, folded.lse2_frac, folded.entropy)
    cpu.logits_backward(logits, case.target_ids, case.inv_temperature, problem, saved, case.grads(), out, rows)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_given_logits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    N, V, padded = 70, 5000, 5011
    case = Case(N, 1, V, temperature=True)
    g = torch.Generator().manual_seed(1)
    logits = (torch.randn(N, padded, generator=g) * 3).to(dtype)
    logits[:, V:] = NAN
    assert case.inv_temperature is not None
    y = (logits[:, :V].float() * case.inv_temperature[:, None]).double().requires_grad_()
    want = differentiate(y, y, case.target_ids, case.upstream) * case.inv_temperature.double()[:, None]
    run_with(monkeypatch, 1)
    expected = logits_gradient(logits, case, None, torch.empty_like(logits))
    step = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}[dtype]
    smallest = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}[dtype]
    # the contract's softmax is that of y (1 - 1.3e-8); log p + H is rounded at its own size; then comes the dtype
    logps = torch.log_softmax(y, 1)
    bound = (4 * step - 2e-8 * logps) * want.abs() + 4e-6 * logps.exp() + smallest
    assert bool(((expected[:, :V] - want).abs() <= bound).all())
    assert_same_bytes(expected[:, V:], torch.zeros_like(expected[:, V:]), "padding")
    for isa in USABLE:
        run_with(monkeypatch, 3, isa)
        inplace = logits.clone()
        assert_same_bytes(logits_gradient(inplace, case, None, inplace), expected, f"in place, isa {isa}")


def test_readers_of_one_row_add_up_in_order() -> None:
    M, N, V = 90, 40, 300
    case = Case(M, 1, V)
    g = torch.Generator().manual_seed(2)
    logits, rows = torch.randn(N, V, generator=g) * 3, torch.randint(0, N, (M,), generator=g)
    got = logits_gradient(logits, case, rows, torch.full_like(logits, NAN))
    apart = logits_gradient(logits[rows], case, None, torch.empty(M, V))
    expected = torch.zeros(N, V)
    for m in range(M):
        expected[rows[m]] = expected[rows[m]] + apart[m]
    assert_same_bytes(got + 0.0, expected + 0.0)
    assert len(rows.unique()) < N  # some rows are read by nobody
    inplace = logits.clone()
    assert_same_bytes(logits_gradient(inplace, case, rows, inplace), got, "in place")
