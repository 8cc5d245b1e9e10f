"""The Triton kernels on small shapes: the same bytes as the specification, contract.h and the CPU kernels.

They run on a GPU, or on the CPU under TRITON_INTERPRET=1, where bf16 products are wrong: fp32 and fp16 it is.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard import _C, partials, sampling
from vocabshard.dist.fold import fold as fold_of
from vocabshard.kernels import cpu
from vocabshard.kernels.problem import LocalProblem
from vocabshard.testing import specification
from vocabshard.testing.compare import assert_same_bytes, differing
from vocabshard.testing.inputs import hard_rows, stacked_hard_rows

if importlib.util.find_spec("triton"):  # conftest.py says why, where there is none
    from vocabshard.dist import triton_fold
    from vocabshard.kernels import triton_linear
    from vocabshard.kernels.triton_config import CONFIGS, launch_config, with_runs

pytestmark = [
    pytest.mark.needs("triton"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # the interpreter's
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
NAN, INF = float("nan"), float("inf")
EPILOGUES = {
    "plain": {},
    "entropy": {"entropy": True},
    "bias bf16": {"bias": torch.bfloat16},
    "bias fp32": {"bias": torch.float32},
    "softcap": {"softcap": 3.0},
    "temperature": {"temperature": 0.625},
    "temperature of rows": {"temperature": "rows"},
    "all": {"entropy": True, "bias": torch.float16, "softcap": 30.0, "temperature": "rows", "start": 777},
}


def normal(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


class Case:
    """Inputs on the CPU of one forward; `run` computes them in Triton and gives records and logits on the CPU."""

    def __init__(
        self, n, d, v, dtype, *, valid=None, entropy=False, bias=None, softcap=None, temperature=None, start=0
    ):
        self.hidden, self.weight = (
            normal(n, d, seed=n, dtype=dtype),
            normal(v, d, seed=v, scale=2 / d**0.5, dtype=dtype),
        )
        self.bias = None if bias is None else normal(v, seed=1, dtype=bias)
        self.target_ids = torch.randint(-3, v + 5, (n,), generator=torch.Generator().manual_seed(2)) + start
        self.target_ids[0] = start + (v if valid is None else valid) - 1
        self.scale = normal(n, seed=3).abs() + 0.5 if temperature == "rows" else temperature
        self.problem = LocalProblem(start, v if valid is None else valid, softcap, entropy)
        self.weight[self.problem.valid :] = NAN

    @property
    def arguments(self):
        return self.hidden, self.weight, self.bias, self.target_ids, self.scale

    def run(self, want_logits=False, launch=None):
        moved = (x.to(DEVICE) if isinstance(x, Tensor) else x for x in self.arguments)
        records, logits = triton_linear.forward(*moved, self.problem, want_logits=want_logits, launch=launch)
        return records.cpu(), None if logits is None else logits.cpu()

    def scaled(self, logits: Tensor) -> Tensor:
        if self.scale is None:
            return logits[:, : self.problem.valid]
        scale = self.scale[:, None] if isinstance(self.scale, Tensor) else torch.tensor(self.scale)
        return logits[:, : self.problem.valid] * scale

    def local_target(self) -> Tensor:
        local = self.target_ids - self.problem.vocab_start
        return torch.where((local >= 0) & (local < self.problem.valid), local, -1)


def of_contract_h(y: Tensor, target: Tensor, entropy: bool) -> Tensor:
    records = partials.new_records(len(y), entropy, y.device)
    tiles = -(-y.shape[1] // 16)
    y = y.contiguous()
    _C.spec_partials(
        y.data_ptr(), *y.shape, target.tolist(), list(range(tiles)), [0, tiles], entropy, records.data_ptr()
    )
    return records


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_records_are_those_of_the_logits(dtype: torch.dtype, epilogue: str) -> None:
    case = Case(20, 8, 146, dtype, valid=133, **EPILOGUES[epilogue])
    records, logits = case.run(want_logits=True)
    assert (logits[:, 133:] == -INF).all() and torch.isfinite(logits[:, :133]).all()
    y, target = case.scaled(logits), case.local_target()
    assert_same_bytes(records, specification.partials(y, target, case.problem.entropy))
    assert_same_bytes(records, of_contract_h(y, target, case.problem.entropy))
    alone, none = case.run()
    assert none is None
    assert_same_bytes(alone, records, "without logits")
    # an ordinary sum differs by how it is cut; its logarithm often hides that
    terms = (y - y.amax(1, keepdim=True)).exp()
    assert differing(*(terms.view(20, parts, 133 // parts).sum(2).sum(1) for parts in (7, 19))) > 0


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_fp32_equals_the_cpu_kernels(epilogue: str) -> None:
    case = Case(19, 9, 150, torch.float32, valid=141, **EPILOGUES[epilogue])
    records, logits = case.run(want_logits=True)
    want, want_logits = cpu.forward(*case.arguments, case.problem, want_logits=True)
    assert_same_bytes(logits, want_logits)
    assert_same_bytes(records, want)


@pytest.mark.parametrize("n, d, v", [(1, 1, 1), (15, 8, 8), (17, 17, 65), (33, 5, 129), (2, 100, 16)])
def test_ragged_sizes(n: int, d: int, v: int) -> None:
    for dtype in (torch.float32, torch.float16):
        case = Case(n, d, v, dtype, entropy=True)
        records, logits = case.run(want_logits=True)
        assert_same_bytes(records, specification.partials(logits, case.local_target(), True))
        if dtype == torch.float32:
            assert_same_bytes(logits, specification.fma_chain(case.hidden, case.weight))


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Small integers and halves: their products add up exactly, whatever the order."""
    return (torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 2).to(dtype)


@pytest.mark.parametrize("epilogue", ["plain", "all"])
def test_every_configuration_gives_the_same_bytes(epilogue: str) -> None:
    n, v = (20, 330) if epilogue == "plain" else (17, 150)
    case = Case(n, 8, v, torch.float16, valid=v - 5, **EPILOGUES[epilogue])
    case.hidden, case.weight = integers(n, 8, seed=1), integers(v, 8, seed=2)
    y = (case.hidden.double() @ case.weight.double().T).float()[:, : v - 5]
    want = specification.partials(y, case.local_target(), False) if epilogue == "plain" else None
    for name, config in CONFIGS.items():
        if name.startswith("fma"):
            continue
        for runs in {1, -(-v // config.block_n)}:
            got, _ = case.run(launch=replace(config, runs=runs, group_rows=1 if runs > 1 else 32))
            want = got if want is None else want
            assert_same_bytes(got, want, f"{name}, {runs} runs")
    case = Case(20, 9, 130, torch.float32, **EPILOGUES[epilogue])
    want, _ = case.run()
    for name in ("fma", "fma few"):
        for runs in (1, 3):
            assert_same_bytes(case.run(launch=replace(CONFIGS[name], runs=runs))[0], want, f"{name}, {runs} runs")


def test_layouts_change_no_byte() -> None:
    """Transposed, sliced and expanded inputs; those that the copy engine can't address take pointers."""
    hidden, weight = integers(20, 16, seed=1), integers(70, 16, seed=2)
    target = torch.arange(20, device=DEVICE)
    problem = LocalProblem(0, 70, None, False)

    def run(h: Tensor, w: Tensor) -> Tensor:
        return triton_linear.forward(h, w, None, target, None, problem)[0].cpu()

    hidden, weight = hidden.to(DEVICE), weight.to(DEVICE)
    want = run(hidden, weight)
    wide = torch.full((20, 19), NAN, dtype=torch.float16, device=DEVICE)
    wide[:, 1:17] = hidden
    tall = torch.full((140, 16), NAN, dtype=torch.float16, device=DEVICE)
    tall[::2] = weight
    assert_same_bytes(run(hidden.t().contiguous().t(), weight), want, "hidden transposed")
    assert_same_bytes(run(wide[:, 1:17], weight), want, "hidden sliced")
    assert_same_bytes(run(hidden, weight.t().contiguous().t()), want, "weight transposed")
    assert_same_bytes(run(hidden, tall[::2]), want, "every other row of weight")
    one = hidden[3:4].expand(20, 16)
    assert_same_bytes(run(one, weight), run(one.contiguous(), weight), "hidden expanded")
    bias = integers(140, seed=3).to(DEVICE)
    strided, _ = triton_linear.forward(hidden, weight, bias[::2], target, None, problem)
    packed, _ = triton_linear.forward(hidden, weight, bias[::2].contiguous(), target, None, problem)
    assert_same_bytes(strided, packed, "bias strided")


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    case = Case(37, 12, 100, torch.float32, entropy=True, temperature="rows")
    want, _ = case.run()
    for i in (0, 15, 16, 31, 36):
        h, t, s = case.hidden[i : i + 1], case.target_ids[i : i + 1], case.scale[i : i + 1]
        moved = (x.to(DEVICE) for x in (h, case.weight))
        got, _ = triton_linear.forward(*moved, None, t.to(DEVICE), s.to(DEVICE), case.problem)
        assert_same_bytes(got.cpu(), want[:, i : i + 1], f"row {i}")


def test_shards_fold_to_the_same_bytes() -> None:
    n, v = 10, 208
    case = Case(n, 3, v, torch.float32, valid=201, entropy=True)
    case.target_ids = case.target_ids.clamp(max=v + 3)
    whole, _ = case.run()
    target = case.target_ids.to(DEVICE)
    want = triton_fold.fold(whole[None].to(DEVICE), target, -3, 201, "nan")
    for bounds in ([0, 112, 208], [0, 16, 64, 208], [0, 0, 48, 96, 208, 208]):
        stacked = []
        for a, b in itertools.pairwise(bounds):
            problem = LocalProblem(a, max(0, min(b, 201) - a), None, True)
            h, w = case.hidden.to(DEVICE), case.weight[a:b].to(DEVICE)
            stacked.append(triton_linear.forward(h, w, None, target, None, problem)[0])
        got = triton_fold.fold(torch.stack(stacked), target, -3, 201, "nan")
        for name, x, y in zip(want._fields, got, want, strict=True):
            assert_same_bytes(x, y, f"{name} over {bounds}")


@pytest.mark.parametrize("entropy", [False, True])
def test_hard_rows(entropy: bool) -> None:
    """Rows of finite logits all at once, through a hidden state that picks a column; the others as a bias."""
    columns = 96
    rows = hard_rows(columns)
    finite = [name for name, row in rows.items() if row.abs().max() < 1e9]
    y = torch.stack([rows[name] for name in finite])
    target = torch.full((len(y),), 5)
    problem = LocalProblem(0, columns, None, entropy)
    picks = torch.eye(len(y), device=DEVICE)
    got, logits = triton_linear.forward(
        picks, y.T.contiguous().to(DEVICE), None, target.to(DEVICE), None, problem, want_logits=True
    )
    assert_same_bytes(logits.cpu(), y + 0.0, "logits")  # the chain starts from +0
    want = specification.partials(y + 0.0, target, entropy)
    for i, name in enumerate(finite):
        assert_same_bytes(got[:, i].cpu(), want[:, i], name)
    hidden, weight = torch.zeros(1, 1, device=DEVICE), torch.zeros(columns, 1, device=DEVICE)
    for name in set(rows) - set(finite) | {"maximum -2^20", "one-hot"}:
        for config in (None, replace(CONFIGS["fma few"], runs=2))[: 2 if " at " not in name else 1]:
            got, _ = triton_linear.forward(
                hidden, weight, rows[name].to(DEVICE), target[:1].to(DEVICE), None, problem, launch=config
            )
            assert_same_bytes(got.cpu(), specification.partials(rows[name][None], target[:1], entropy), name)


def test_a_bad_temperature_poisons_its_row_alone() -> None:
    case = Case(18, 4, 80, torch.float32, temperature="rows", entropy=True)
    want, _ = case.run()
    case.scale[7] = NAN
    got, _ = case.run()
    others = torch.arange(18) != 7
    assert_same_bytes(got[:, others], want[:, others])
    assert torch.isnan(partials.maxima(got)[7]) and (got[1:, 7] == 0).all()


def test_softcap_equals_the_specification() -> None:
    g = torch.Generator().manual_seed(0)
    spread = torch.cat([torch.randn(50, generator=g) * s for s in (1e-42, 1e-38, 1e-30, 1e-3, 0.3, 1.0, 30.0, 1e4)])
    special = torch.tensor([0.0, 2.0**-149, 3e-45, 2.0**-126, 3.4e38, -3.4e38, 7.5, -7.5, INF, -INF, 15.999999, 16.0])
    z = torch.cat([spread, special])
    one, target = torch.ones(1, 1, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for cap in (0.3, 30.0, 3e-30, 1e30):
        problem = LocalProblem(0, len(z), cap, False)
        zero = torch.zeros(len(z), 1, device=DEVICE)
        _, logits = triton_linear.forward(one, zero, z.to(DEVICE), target, None, problem, want_logits=True)
        assert_same_bytes(logits[0].cpu(), specification.softcap(z + 0.0, cap), f"cap {cap}")


@pytest.mark.parametrize("entropy", [False, True])
def test_fold_equals_the_compiled_one(entropy: bool) -> None:
    columns = 96
    names, y = stacked_hard_rows(columns)
    target = torch.arange(len(y)) % columns
    target[1], target[2], target[3], target[4] = -100, -7, 10**6, 2**40
    one = specification.partials(y, target, entropy)
    elsewhere = specification.partials(y, torch.full_like(target, -1), entropy)
    empty = partials.identity_records(len(y), entropy, y.device)
    stacks = {
        "one": one[None],
        "two": torch.stack([elsewhere.roll(1, 1), one]),
        "eight": torch.stack([one, empty, *(elsewhere.roll(i, 1) for i in (0, 3, 5, 11, 20)), empty]),
        "nothing": torch.stack([empty, empty]),
    }
    for name, gathered in stacks.items():
        for invalid in ("nan", "zero"):
            want = fold_of("cpu", gathered, target, -100, 3 * columns, invalid)
            got = triton_fold.fold(gathered.to(DEVICE), target.to(DEVICE), -100, 3 * columns, invalid)
            for field, a, b in zip(want._fields, got, want, strict=True):
                for i, row in enumerate(names if b is not None else ()):
                    assert_same_bytes(a[i].cpu(), b[i], f"{field} of {row}, {name}, {invalid}")


def test_nothing_to_do() -> None:
    weight = torch.zeros(20, 4, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    problem = LocalProblem(0, 20, None, True)
    records, _ = triton_linear.forward(torch.zeros(0, 4, device=DEVICE), weight, None, none, None, problem)
    assert records.shape == (7, 0)
    assert triton_fold.fold(records[None], none, -100, 20, "nan").entropy.shape == (0,)
    one = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    empty, _ = triton_linear.forward(weight[:1], weight[:0], None, one, None, LocalProblem(20, 0, None, True))
    assert_same_bytes(empty, partials.identity_records(1, True, empty.device))
    padding, logits = triton_linear.forward(
        weight[:1], weight * NAN, None, one, None, LocalProblem(20, 0, None, True), want_logits=True
    )
    assert_same_bytes(padding, empty, "padding alone")
    assert (logits == -INF).all()


def test_the_operator_through_triton() -> None:
    hidden, weight = normal(2, 9, 12, seed=1).to(DEVICE), normal(100, 12, seed=2).to(DEVICE)
    target = torch.arange(18, device=DEVICE).view(2, 9)
    options = {
        "temperature": 0.7,
        "softcap": 5.0,
        "return_lse": True,
        "return_entropy": True,
        "return_logits": True,
        "validate": False,
    }
    with torch.no_grad():
        got = vs.linear_logp(hidden, weight, target, backend="triton", strict=True, **options)
    want = vs.linear_logp(hidden.cpu(), weight.cpu(), target.cpu(), backend="cpu", **options)
    for name in ("logp", "lse", "entropy", "logits"):
        assert_same_bytes(getattr(got, name).cpu(), getattr(want, name), name)
    assert got.provenance.backend == "triton" and got.provenance.projection_id == "fma-chain"
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    vs.linear_logp(h, w, target, backend="triton", validate=False).nansum().backward()
    h2, w2 = (x.detach().cpu().clone().requires_grad_() for x in (hidden, weight))
    vs.linear_logp(h2, w2, target.cpu(), backend="cpu", validate=False).nansum().backward()
    torch.testing.assert_close(h.grad.cpu(), h2.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w.grad.cpu(), w2.grad, rtol=1e-4, atol=1e-5)


def test_configurations_fit_their_shapes() -> None:
    for n in (1, 16, 17, 64, 65, 129, 255, 1024, 4096, 33000, 10**6):
        for columns in (1, 8, 129, 37984, 151936):
            for chain in ("descriptors", "pointers", "fma"):
                for softcap in (False, True):
                    config = launch_config(n, columns, 2048, chain, softcap, 132)
                    assert replace(config, runs=1, short_runs=0, short_blocks=0) in CONFIGS.values()
                    assert config.short_runs == config.short_blocks < config.runs
                    assert 1 <= config.runs <= -(-columns // config.block_n)
                    assert config == launch_config(n, columns, 2048, chain, softcap, 132)
    # 132 SMs: 128 long runs leave 4 SMs to the short ones; whole waves; at N = 1 every slot has something to read
    config = launch_config(4096, 37984, 4096, "descriptors", False, 132)
    assert (config.runs, config.short_runs) == (4 + 9, 9)
    assert launch_config(512, 151936, 4096, "descriptors", False, 132).runs * 4 == 132
    assert launch_config(1, 151936, 4096, "descriptors", False, 132).runs == 264
    assert with_runs(CONFIGS["large"], 128, 300, 64, 132).runs == 2


def test_compiled_for_sm90() -> None:
    """What the compiler makes of the kernels: rounding as written, nothing approximate, the tensor core, no spills."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("triton_on_sm90.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    for case, kernels in json.loads(done.stdout).items():
        assert kernels
        for kernel in kernels:
            where = f"{case}: {kernel['name']}"
            # the soft-cap's reciprocal starts from an approximation, of normal numbers
            ptx = kernel["ptx"].replace("rcp.approx.ftz.f32", "" if "soft-cap" in case else "rcp")
            if case == "backward":  # gradients are no part of the contract
                ptx = ptx.replace("ex2.approx.ftz.f32", "")
                assert "wgmma.mma_async" in ptx or kernel["name"] == "inspect_rows", where
            for forbidden in ("fma.rn.f64", "ex2", "approx", ".ftz", "div.full", "atom.", "red.global"):
                assert forbidden not in ptx, f"{where} has {forbidden}"
            if case == "logits" and kernel["name"] != "merge_runs":
                assert "ld.global.v4" in ptx, f"{where} does not load 16 bytes at a time"
            if kernel["name"] == "linear_partials" and case != "fma":
                product = "mma.sync" if case == "few" else "wgmma.mma_async"
                assert product in kernel["ptx"], where
                assert "cp.async.bulk.tensor" in kernel["ptx"], where
            if kernel["name"] in ("linear_partials", "dlogits_block") and case != "fma":
                assert kernel["stack"] == 0, f"{where} spills {kernel['stack']} bytes"


@pytest.mark.parametrize("epilogue", ["plain", "all"])
def test_records_under_a_cut(epilogue: str) -> None:
    """Those of the CPU kernels, over logits with equals at the cut; wanted logits are those before it."""
    case = Case(20, 24, 200, torch.float32, valid=187, **EPILOGUES[epilogue])
    case.weight[40:80] = case.weight[:40]
    if case.bias is not None:
        case.bias[40:80] = case.bias[:40]
    start = case.problem.vocab_start
    _, logits = case.run(want_logits=True)
    z, ids = logits.sort(dim=1, descending=True, stable=True)
    at = torch.arange(20) * 6
    places = sampling.place_of(z.gather(1, at[:, None])[:, 0], start + ids.gather(1, at[:, None])[:, 0])
    cut = torch.where(torch.arange(20) % 5 == 4, sampling.KEEP_ALL, places)
    case.hidden[3] = NAN
    want = cpu.forward(*case.arguments, case.problem, want_logits=True, cut=cut)
    moved = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in case.arguments]
    for want_logits in (True, False):
        records, served = triton_linear.forward(*moved, case.problem, want_logits=want_logits, cut=cut.to(DEVICE))
        assert_same_bytes(records.cpu(), want[0], f"logits wanted: {want_logits}")
        assert served is None or torch.equal(served.cpu().nan_to_num(7.0), want[1].nan_to_num(7.0))
    whole, _ = case.run()
    assert (whole != want[0]).any(0).sum() >= 14, "the cut shows"
