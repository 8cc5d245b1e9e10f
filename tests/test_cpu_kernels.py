"""The CPU kernels by bytes: instruction sets, threads, batches, shards, strides, specials, floating-point modes.

The oracle is contract.h's scalar text (`_C.spec_*`) over logits made by one FMA after the other.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.dist.fold import fold
from vocabshard.kernels import cpu
from vocabshard.kernels.problem import LocalProblem
from vocabshard.partials import FoldedRows, new_records
from vocabshard.testing.compare import assert_same_bytes, differing
from vocabshard.testing.inputs import near_tie_chains, stacked_hard_rows

INF, NAN = float("inf"), float("nan")
USABLE = [isa for isa, name in enumerate(("base", "avx2", "avx512")) if name in _C.build_info()["cpu_usable"]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run_with(monkeypatch: pytest.MonkeyPatch, threads: int = 2, isa: int = -1) -> None:
    monkeypatch.setattr(cpu, "_run", lambda: _C.CpuRun(threads, isa))


def inputs(N: int, D: int, V: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g) * (3 / max(D, 1) ** 0.5)
    bias, target_ids = torch.randn(V, generator=g), torch.randint(0, max(V, 1), (N,), generator=g)
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), target_ids


def matrix(x: Tensor) -> _C.Matrix:
    return _C.Matrix(x.data_ptr(), 0, x.shape[0], x.shape[1], x.stride(0), x.stride(1))


def chain(hidden: Tensor, weight: Tensor) -> Tensor:
    """fp32 [N, V], scalar FMAs in ascending k."""
    z, h, w = torch.empty(hidden.shape[0], weight.shape[0]), hidden.float(), weight.float()
    _C.spec_fma_chain(matrix(h), matrix(w), z.data_ptr())
    return z


def capped(z: Tensor, cap: float) -> Tensor:
    z = z.contiguous()
    out = torch.empty_like(z)
    _C.spec_softcap(z.data_ptr(), z.numel(), cap, out.data_ptr())
    return out


def scalar_records(
    y: Tensor, target: Tensor, entropy: bool, order: list[int] | None = None, splits: tuple[int, ...] = ()
) -> Tensor:
    y = y.contiguous()
    records = new_records(y.shape[0], entropy, y.device)
    order = list(range(math.ceil(y.shape[1] / 16))) if order is None else order
    _C.spec_partials(y.data_ptr(), *y.shape, target.tolist(), order, list(splits), entropy, records.data_ptr())
    return records


def folded(records: Tensor, target_ids: Tensor, V: int) -> FoldedRows:
    return fold("cpu", records[None] if records.dim() == 2 else records, target_ids, -100, V, "nan")


SIZES = [
    (1, 1, 1),
    (15, 8, 8),
    (16, 100, 50),
    (17, 17, 333),
    (255, 17, 129),
    (257, 100, 500),
    (49, 2100, 40),
    (3, 0, 9),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, D, V", SIZES)
def test_every_instruction_set_and_thread_count(
    N: int, D: int, V: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, bias, target_ids = inputs(N, D, V, dtype)
    inv_temperature = torch.rand(N) + 0.5
    z = chain(hidden, weight) + bias.float()
    for softcap, entropy in ((None, False), (5.0, True)):
        logits = z if softcap is None else capped(z, softcap)
        y = logits * inv_temperature[:, None]
        expected = scalar_records(y, target_ids, entropy)
        problem = LocalProblem(0, V, softcap, entropy)
        for isa in USABLE:
            for threads in (1, 2, 3):
                run_with(monkeypatch, threads, isa)
                got = cpu.forward(hidden, weight, bias, target_ids, inv_temperature, problem, want_logits=True)
                assert_same_bytes(got[1], logits, f"logits, isa {isa}, {threads} threads")
                assert_same_bytes(got[0], expected, f"records, isa {isa}, {threads} threads")
                given = cpu.logits_forward(y, target_ids, None, LocalProblem(0, V, None, entropy))
                assert_same_bytes(given, expected, f"records of given logits, isa {isa}, {threads} threads")


def test_the_chain_is_not_what_a_library_does() -> None:
    """The projection test can fail: another order of summation gives other bytes."""
    hidden, weight, _, _ = inputs(17, 100, 333, torch.float32)
    assert differing(chain(hidden, weight), chain(hidden.flip(1), weight.flip(1))) > 1000


@pytest.mark.parametrize("N, V", [(0, 40), (5, 0), (0, 0)])
def test_empty(N: int, V: int) -> None:
    hidden, weight, bias, target_ids = inputs(N, 8, V, torch.float32)
    records, logits = cpu.forward(
        hidden, weight, bias, target_ids, None, LocalProblem(0, V, None, True), want_logits=True
    )
    assert records.shape == (7, N) and logits is not None and logits.shape == (N, V)
    rows = folded(records, target_ids, V)
    assert bool((rows.lse == -INF).all())


def test_an_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, 1, 7)
    with pytest.raises(ValueError, match="isa must be"):
        cpu.forward(*inputs(2, 3, 4, torch.float32), None, LocalProblem(0, 4, None, False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_anywhere_in_a_batch(dtype: torch.dtype) -> None:
    N, D, V = 257, 70, 300
    hidden, weight, bias, target_ids = inputs(N, D, V, dtype)
    problem = LocalProblem(0, V, None, True)
    expected, _ = cpu.forward(hidden, weight, bias, target_ids, 0.7, problem)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    shuffled, _ = cpu.forward(hidden[order], weight, bias, target_ids[order], 0.7, problem)
    assert_same_bytes(shuffled, expected[:, order], "permuted rows")
    for size in (1, 7, 48, 100):
        parts = [
            cpu.forward(h, weight, bias, t, 0.7, problem)[0]
            for h, t in zip(hidden.split(size), target_ids.split(size), strict=True)
        ]
        assert_same_bytes(torch.cat(parts, 1), expected, f"chunks of {size}")


@pytest.mark.parametrize("V", [8, 1000, 5025])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_at_multiples_of_a_tile(V: int, dtype: torch.dtype) -> None:
    N, D = 33, 40
    hidden, weight, bias, target_ids = inputs(N, D, V, dtype)
    whole, logits = cpu.forward(
        hidden, weight, bias, target_ids, None, LocalProblem(0, V, None, True), want_logits=True
    )
    expected = folded(whole, target_ids, V)
    assert logits is not None
    differs = False
    for cuts in ((16,), (512,), (16, 32, 4096), (0, 0, 496), (V // 16 * 16,)):
        edges = [0, *(min(c, V) for c in cuts), V]
        parts, sums = [], torch.zeros(N)
        for start, stop in itertools.pairwise(edges):
            problem = LocalProblem(start, stop - start, None, True)
            parts.append(cpu.forward(hidden, weight[start:stop], bias[start:stop], target_ids, None, problem)[0])
            sums += logits[:, start:stop].exp().sum(1)
        rows = folded(torch.stack(parts), target_ids, V)
        for name, got, want in zip(rows._fields, rows, expected, strict=True):
            assert_same_bytes(got, want, f"{name}, shards at {edges}")
        differs |= differing(sums, logits.exp().sum(1)) > 0
    assert differs or V == 8  # an ordinary sum would not have passed


def test_padding_is_never_read() -> None:
    N, D, V, padded = 20, 33, 200, 256
    hidden, weight, bias, target_ids = inputs(N, D, padded, torch.float32)
    target_ids = torch.arange(N) * 12 + 3  # some are in the padding: not here
    weight[V:], bias[V:] = NAN, NAN
    records, logits = cpu.forward(
        hidden, weight, bias, target_ids, None, LocalProblem(0, V, None, True), want_logits=True
    )
    expected, _ = cpu.forward(hidden, weight[:V], bias[:V], target_ids, None, LocalProblem(0, V, None, True))
    assert_same_bytes(records, expected)
    assert logits is not None and bool((logits[:, V:] == -INF).all())
    padded_logits = torch.cat([logits[:, :V], torch.full((N, padded - V), NAN)], 1)
    given = cpu.logits_forward(padded_logits, target_ids, None, LocalProblem(0, V, None, True))
    assert_same_bytes(given, expected)


@pytest.mark.parametrize("entropy", [False, True])
def test_hard_rows(entropy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names, y = stacked_hard_rows(200)
    target = torch.arange(len(names)) % 200
    shuffled = torch.randperm(13, generator=torch.Generator().manual_seed(0)).tolist()
    expected = scalar_records(y, target, entropy)
    for splits in ((), (1,), (2, 2, 9)):
        assert_same_bytes(scalar_records(y, target, entropy, splits=splits), expected)
        assert_same_bytes(scalar_records(y, target, entropy, shuffled, splits), expected, "shuffled tiles")
    problem = LocalProblem(0, 200, None, entropy)
    for isa in USABLE:
        run_with(monkeypatch, 2, isa)
        got = cpu.logits_forward(y, target, None, problem)
        for n, name in enumerate(names):
            assert_same_bytes(got[:, n], expected[:, n], f"{name}, isa {isa}")
        # the same through a projection: hidden = 1, D = 1, so that the chain keeps the logit (but +0 for -0)
        one, n = torch.ones(3, 1), names.index("NaN 7fffffff at 17")
        for n in range(0, len(names), 7):
            linear, _ = cpu.forward(one, y[n][:, None], None, target[n].repeat(3), None, problem)
            assert_same_bytes(linear, scalar_records(y[n] + torch.zeros(3, 1), target[n].repeat(3), entropy), names[n])


def test_specials_through_bias_temperature_and_softcap() -> None:
    N, D, V = 6, 4, 64
    hidden, weight, bias, target_ids = inputs(N, D, V, torch.float32)
    bias[5], bias[40] = -INF, -INF
    inv_temperature = torch.tensor([1.0, NAN, 2.0, 1e5, 1e-5, INF])
    for softcap in (None, 3.0):
        z = chain(hidden, weight) + bias
        y = (z if softcap is None else capped(z, softcap)) * inv_temperature[:, None]
        got, _ = cpu.forward(hidden, weight, bias, target_ids, inv_temperature, LocalProblem(0, V, softcap, True))
        assert_same_bytes(got, scalar_records(y, target_ids, True))
    assert torch.isnan(folded(got, target_ids, V).lse).tolist() == [False, True, False, False, False, True]


def test_targets_elsewhere() -> None:
    hidden, weight, _, _ = inputs(9, 8, 48, torch.float32)
    ids = torch.tensor([-(2**63), -100, -1, 99, 100, 147, 148, 2**31, 2**63 - 1])
    records, _ = cpu.forward(hidden, weight, None, ids, None, LocalProblem(100, 48, None, False))
    here = ~torch.isnan(records[0].view(torch.float32)[1::2])
    assert here.tolist() == [False] * 4 + [True, True] + [False] * 3


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode")
    yield
    torch.set_flush_denormal(False)


def subnormal_case() -> tuple[Tensor, ...]:
    hidden, weight, bias, target_ids = inputs(19, 24, 130, torch.float32)
    chains = torch.cat([near_tie_chains()] * 7)[:19]
    return hidden * 1e-20, weight * 1e-20, bias * 1e-40, target_ids, chains


def test_flush_to_zero_modes_change_nothing(flushing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_flush_denormal(False)
    hidden, weight, bias, target_ids, chains = subnormal_case()
    halves = (torch.arange(1, 20)[:, None] * torch.ones(24)).to(torch.int16).view(torch.float16)  # subnormal
    problem = LocalProblem(0, 130, None, True)

    def all_of_it() -> list[Tensor]:
        linear, logits = cpu.forward(hidden, weight, bias, target_ids, None, problem, want_logits=True)
        low, low_logits = cpu.forward(halves, weight.half(), None, target_ids, None, problem, want_logits=True)
        given = cpu.logits_forward(chains, target_ids % 48, None, LocalProblem(0, 48, None, True))
        assert logits is not None and low_logits is not None
        return [linear, logits, low, low_logits, given, *folded(given, target_ids % 48, 48)]

    for isa in USABLE:
        run_with(monkeypatch, 2, isa)
        torch.set_flush_denormal(False)
        plain = all_of_it()
        assert bool((plain[1] != 0).all()) and float(plain[1].abs().max()) < 1.2e-38
        torch.set_flush_denormal(True)
        flushed = all_of_it()
        assert float(torch.full((1,), 1e-39) * torch.ones(1)) == 0  # the caller's mode is still on
        torch.set_flush_denormal(False)
        for a, b in zip(flushed, plain, strict=True):
            assert_same_bytes(a, b, f"isa {isa}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_conversions_are_exact(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)[:, None]
    expected = every.float().T + 0.0  # the chain starts at +0
    target, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, 1, dtype=dtype)
    number = ~torch.isnan(expected)
    for isa in USABLE:
        run_with(monkeypatch, 1, isa)
        _, logits = cpu.forward(one, every, None, target, None, LocalProblem(0, 2**16, None, False), want_logits=True)
        assert logits is not None
        assert_same_bytes(logits[number], expected[number], f"isa {isa}")
        assert torch.equal(torch.isnan(logits), ~number)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(dtype: torch.dtype) -> None:
    N, D, V = 35, 50, 90
    hidden, weight, bias, target_ids = inputs(N, D, V, dtype)
    problem = LocalProblem(0, V, None, False)
    expected, _ = cpu.forward(hidden, weight, bias, target_ids, None, problem)
    wide = torch.zeros(N, 2 * D + 1, dtype=dtype)
    wide[:, 1::2] = hidden
    views = {"transposed": hidden.T.contiguous().T, "sliced": wide[:, 1::2], "reversed rows": hidden.flip(0).flip(0)}
    for name, view in views.items():
        assert_same_bytes(cpu.forward(view, weight, bias, target_ids, None, problem)[0], expected, name)
    spread = bias.repeat_interleave(3)[::3]
    turned = weight.T.contiguous().T
    assert_same_bytes(cpu.forward(hidden, turned, spread, target_ids, None, problem)[0], expected, "weight and bias")
    expanded, _ = cpu.forward(hidden[:1].expand(N, D), weight, bias, target_ids[:1].repeat(N), None, problem)
    assert_same_bytes(expanded, expected[:, :1].repeat(1, N), "expanded")


def test_rows_of_given_logits() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 333, generator=g)[:, 5:305]
    source = torch.randint(0, 40, (77,), generator=g)
    target_ids = torch.randint(0, 300, (77,), generator=g)
    inv_temperature = torch.rand(77, generator=g) + 0.5
    got = cpu.logits_forward(logits, target_ids, inv_temperature, LocalProblem(0, 300, None, True), source)
    assert_same_bytes(got, scalar_records(logits[source] * inv_temperature[:, None], target_ids, True))


def test_few_rows_over_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Column ranges of one row are worked on apart."""
    y = torch.randn(2, 20011, generator=torch.Generator().manual_seed(0))
    y[1] = -y[1].abs()
    y[1, 77], y[1, 15000] = -0.0, 0.0  # of equal maxima
    target_ids = torch.tensor([20010, 5000])
    for threads in (1, 2, 5, 64, 1000):
        run_with(monkeypatch, threads)
        got = cpu.logits_forward(y, target_ids, None, LocalProblem(0, 20011, None, True))
        assert_same_bytes(got, scalar_records(y, target_ids, True), f"{threads} threads")


MEMORY = """
import sys
import torch
from vocabshard import _C
from vocabshard.kernels import cpu
from vocabshard.kernels.problem import LocalProblem, Needs, RowGrads, SavedRows

N, D, V, threads = map(int, sys.argv[1:])
cpu._run = lambda: _C.CpuRun(threads)
hidden, weight = torch.ones(N, D, dtype=torch.bfloat16), torch.ones(V, D, dtype=torch.bfloat16) * 2.0**-8
target_ids, problem = torch.zeros(N, dtype=torch.int64), LocalProblem(0, V, None, False)
saved = SavedRows(torch.full((N,), 20, dtype=torch.int32), torch.zeros(N), None)
grads = RowGrads(torch.ones(N), -torch.ones(N), None)

def size(field):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(field + ":"))

open("/proc/self/clear_refs", "w").write("5")
before = size("VmRSS")
records, _ = cpu.forward(hidden, weight, None, target_ids, None, problem)
left = records.nbytes
print(size("VmHWM") - before - left)
gradients = cpu.backward(hidden, weight, None, target_ids, None, problem, saved, grads, Needs(True, True, False))
left += sum(g.nbytes for g in gradients if g is not None)
print(size("VmHWM") - before - left)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("N, D, V, threads", [(1024, 64, 100_000, 2), (600, 4096, 2048, 64)])
def test_memory_beyond_inputs_and_gradients(N: int, D: int, V: int, threads: int) -> None:
    command = [sys.executable, "-c", MEMORY, str(N), str(D), str(V), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    forward, backward = map(int, done.stdout.split())
    assert max(forward, backward) < 64 << 20, (forward, backward)
