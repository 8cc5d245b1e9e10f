"""Every launch configuration of every backend gives the goldens; a change of bits without a new id fails here."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vocabshard import _C, contract, kernels
from vocabshard.kernels import cpu
from vocabshard.kernels.backends import LOGITS
from vocabshard.testing import goldens, specification

CPU_CASES = [(p, name) for p in (contract.FMA_CHAIN, contract.GIVEN_LOGITS) for name in goldens.CASES[p]]
ISAS = [isa for isa, name in enumerate(("base", "avx2", "avx512")) if name in _C.build_info()["cpu_usable"]]


def check(projection: str, name: str, run: goldens.Runner, device: str, launch: str) -> None:
    assert goldens.digest(projection, name, run, device) == goldens.recorded()[projection][name], f"{name}, {launch}"


def test_this_contract_has_goldens_for_every_projection_and_case() -> None:
    recorded = goldens.recorded()
    assert recorded.keys() == contract.CONTRACT_PROJECTIONS
    for projection, cases in goldens.CASES.items():
        assert recorded[projection].keys() == cases.keys(), projection
    digests = [digest for cases in recorded.values() for digest in cases.values()]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("projection, name", CPU_CASES)
def test_cpu(monkeypatch: pytest.MonkeyPatch, projection: str, name: str) -> None:
    for isa, threads in itertools.product(ISAS, (1, 3)):
        monkeypatch.setattr(cpu, "_run", lambda i=isa, t=threads: _C.CpuRun(t, i))
        check(projection, name, goldens.runner("cpu"), "cpu", f"isa {isa}, {threads} threads")


def specified(logits: Tensor, target_ids: Tensor, scale, problem) -> Tensor:
    """logits_forward by the specification."""
    y = logits[:, : problem.valid].float()
    if scale is not None:
        y = y * (scale[:, None] if isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float32))
    local = target_ids - problem.vocab_start
    local = torch.where((local >= 0) & (local < problem.valid), local, -1)
    return specification.partials(y, local, problem.entropy)


SPECIFICATION = goldens.Runner(lambda *_: None, specified, specification.fold)


@pytest.mark.parametrize("name", ["fp32, everything", "bf16", "fp16, temperature"])
def test_specification(name: str) -> None:
    check(contract.GIVEN_LOGITS, name, SPECIFICATION, "cpu", "specification")


def test_a_change_of_bits_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = contract.EXP_COEFFICIENTS
    nudged = float(torch.nextafter(torch.tensor(first), torch.tensor(1.0)))
    monkeypatch.setattr(contract, "EXP_COEFFICIENTS", (nudged, *others))
    with pytest.raises(AssertionError, match="fp32, specification"):
        check(contract.GIVEN_LOGITS, "fp32", SPECIFICATION, "cpu", "specification")


def test_verdicts_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found = goldens.verdicts()
    assert {v.projection for v in found} >= {contract.FMA_CHAIN, contract.GIVEN_LOGITS}
    assert not any(v.wrong for v in found), [v.line for v in found]
    other = {projection: dict.fromkeys(cases, "") for projection, cases in goldens.recorded().items()}
    monkeypatch.setattr(goldens, "recorded", lambda: other)
    lines = [v.line for v in goldens.verdicts() if v.device == "cpu"]
    assert lines and all("WRONG BYTES in" in line and "hold" not in line for line in lines)


def test_verdicts_count_what_they_leave() -> None:
    quick, whole = ([v for v in goldens.verdicts(every) if v.device == "cpu"] for every in (False, True))
    for few, all_of_them in zip(quick, whole, strict=True):
        cases = goldens.CASES[few.projection].keys()
        assert few.left and all_of_them.left == () and not few.wrong and not all_of_them.wrong
        assert {*few.held, *few.left} == set(all_of_them.held) == cases


@pytest.mark.needs("triton", "sm90")  # the interpreter takes minutes, and misreads subnormal bf16
@pytest.mark.parametrize("name", goldens.CASES[contract.GIVEN_LOGITS])
def test_triton_logits(name: str) -> None:
    check(contract.GIVEN_LOGITS, name, goldens.runner("triton"), "cuda", "triton")


@pytest.mark.needs("sm90")
@pytest.mark.parametrize("name", goldens.CASES[contract.GIVEN_LOGITS])
def test_sm90_logits(name: str) -> None:
    if LOGITS not in kernels.row("sm90").capability.entries:
        pytest.skip("this backend does not declare that it serves logits that exist")
    check(contract.GIVEN_LOGITS, name, goldens.runner("sm90"), "cuda", "sm90")


TRITON_CASES = [
    (projection, case)
    for projection in (contract.HOPPER_K16, contract.FMA_CHAIN)
    for case in goldens.CASES[projection]
    if case.startswith("fp32") == (projection == contract.FMA_CHAIN)  # which chain Triton takes on Hopper
]


@pytest.mark.needs("triton", "sm90")
@pytest.mark.parametrize("projection, case", TRITON_CASES)
def test_triton_products(projection: str, case: str) -> None:
    from vocabshard.kernels.triton_config import CONFIGS

    fma = projection == contract.FMA_CHAIN
    chosen = {name: config for name, config in CONFIGS.items() if (config.block_k == 1) == fma}

    def one(name: str) -> None:
        for runs in (1, 5):
            launch = replace(chosen[name], runs=runs)
            check(projection, case, goldens.runner("triton", launch=launch), "cuda", f"{name}, {runs} runs")

    with ThreadPoolExecutor(len(chosen)) as pool:  # compilations run side by side
        list(pool.map(one, chosen))


@pytest.mark.needs("sm90")
def test_sm90_products() -> None:
    from vocabshard.kernels import sm90

    for path in ("auto", *(path for path in sm90.PATHS if path != "auto")):
        for projection in (contract.FMA_CHAIN, contract.HOPPER_K16):
            for case in goldens.CASES[projection]:
                fp32 = case.startswith("fp32")
                if fp32 == (projection == contract.FMA_CHAIN) and (path == "auto" or fp32 == (path == "fma")):
                    check(projection, case, goldens.runner("sm90", path=path), "cuda", path)
