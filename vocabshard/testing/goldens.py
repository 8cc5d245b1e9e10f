"""Goldens: SHA-256 of records, logits and folded rows, one for each contract, projection and case.

Inputs are built of integers, so they are the same on every machine. Every launch configuration of every backend has to
give the digest of goldens.json; another one is a new contract id or a new projection id.

    python -m vocabshard.testing.goldens          what this machine gives, beside what is recorded
    python -m vocabshard.testing.goldens --write  record it (after a new id, or a new case)
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocabshard import kernels
from vocabshard.contract import CONTRACT_ID, FMA_CHAIN, GIVEN_LOGITS, HOPPER_K16
from vocabshard.dist import fold
from vocabshard.kernels.backends import BACKENDS, LINEAR, LOGITS, Site
from vocabshard.kernels.problem import LocalProblem
from vocabshard.testing.compare import sha256
from vocabshard.testing.inputs import integer_logits, near_tie_chains

FILE = Path(__file__).with_name("goldens.json")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IGNORE = -100


class Case(NamedTuple):
    """What a call asks for."""

    dtype: str
    logits: bool = False
    entropy: bool = False
    bias: bool = False
    temperature: str = "none"  # "scalar", "rows"
    softcap: float | None = None


class Sizes(NamedTuple):
    """Of a case's tensors; `valid` columns of V are real."""

    N: int
    D: int
    V: int
    valid: int


class Runner(NamedTuple):
    """Kernels with a launch configuration, in the kernel interface, and the fold that goes with them."""

    forward: Callable[..., Any]
    logits_forward: Callable[..., Tensor]
    fold: Callable[[Tensor, Tensor, int, int, str], Any]


SIZES = {HOPPER_K16: Sizes(193, 1104, 3016, 3011), FMA_CHAIN: Sizes(37, 145, 1000, 997)}
_LINEAR: dict[str, dict[str, Any]] = {
    "{}": {},
    "{}, logits": {"logits": True},
    "{}, entropy": {"entropy": True},
    "{}, everything": {"logits": True, "entropy": True, "bias": True, "temperature": "rows", "softcap": 30.0},
}
_LOGITS: dict[str, dict[str, Any]] = {
    "{}": {},
    "{}, temperature": {"temperature": "scalar"},
    "{}, everything": {"entropy": True, "temperature": "rows"},
}


def _cases(options: dict[str, dict[str, Any]], *dtypes: str) -> dict[str, Case]:
    return {name.format(dtype): Case(dtype, **o) for dtype in dtypes for name, o in options.items()}


CASES: dict[str, dict[str, Case]] = {
    HOPPER_K16: _cases(_LINEAR, "bf16") | _cases({name: _LINEAR[name] for name in ("{}", "{}, everything")}, "fp16"),
    FMA_CHAIN: _cases(_LINEAR, "fp32", "bf16", "fp16"),
    GIVEN_LOGITS: _cases(_LOGITS, "fp32", "bf16", "fp16"),
}
BOUNDS = (0, 16, 512, 512, 1000)  # of the shards that logits are cut into as well


def recorded() -> dict[str, dict[str, str]]:
    """{projection: {case: digest}} of this build's contract."""
    contracts: dict[str, dict[str, dict[str, str]]] = json.loads(FILE.read_text())
    return contracts.get(CONTRACT_ID, {})


def runner(backend: str, **launch: Any) -> Runner:
    """A backend's kernels; `launch` goes to its forward, to force a configuration."""
    module = kernels.module(backend)

    def forward(*arguments: Any, **options: Any) -> Any:
        return module.forward(*arguments, **options, **launch)

    def folded(gathered: Tensor, target_ids: Tensor, ignore_index: int, real: int, invalid: str) -> Any:
        return fold.fold(backend, gathered, target_ids, ignore_index, real, invalid)

    return Runner(forward, getattr(module, "logits_forward", None) or _no_logits, folded)


def _no_logits(*arguments: Any) -> Tensor:
    raise NotImplementedError("this backend has no kernel for logits that exist")


def digest(projection: str, name: str, run: Runner, device: torch.device | str) -> str:
    """What a runner gives for a case."""
    case = CASES[projection][name]
    if projection == GIVEN_LOGITS:
        return _of_logits(case, run, torch.device(device))
    return _of_product(case, SIZES[projection], run, torch.device(device))


def _matrix(rows: int, columns: int, seed: int, scale: float, dtype: torch.dtype) -> Tensor:
    return (integer_logits(rows, columns, seed) * scale).to(dtype)


def _inverse_temperature(case: Case, rows: int, device: torch.device) -> float | Tensor | None:
    if case.temperature == "rows":
        return (_matrix(rows, 1, 4, 2.0**-6, torch.float32)[:, 0].abs() + 0.5).to(device)
    return 1.4285714626312256 if case.temperature == "scalar" else None  # fp32(1 / fp32(0.7))


def _of_product(case: Case, sizes: Sizes, run: Runner, device: torch.device) -> str:
    N, D, V, valid = sizes
    dtype = DTYPES[case.dtype]
    hidden, weight = _matrix(N, D, 1, 2.0**-2, dtype), _matrix(V, D, 2, 2.0**-6, dtype)
    weight[valid:] = float("nan")
    target_ids = (torch.arange(N) * 61 % valid).to(device)
    bias = _matrix(1, V, 3, 2.0**-3, torch.float32)[0].to(device) if case.bias else None
    records, logits = run.forward(
        hidden.to(device), weight.to(device), bias, target_ids, _inverse_temperature(case, N, device),
        LocalProblem(0, valid, case.softcap, case.entropy), want_logits=case.logits,
    )[:2]  # fmt: skip
    return sha256(records, logits, *run.fold(records[None], target_ids, IGNORE, valid, "nan"))


def logits_input() -> Tensor:
    """fp32 [61, 1000]: ordinary rows at many offsets, and one of each special kind."""
    y = integer_logits(61, 1000, 7, 15)
    offsets = (0.0, 100.0, -1e4, 1e4, 1e5, -1e5, 1e6, 2000.0, -2000.0, 0.0)
    y[:50] += torch.tensor(offsets).repeat(5)[:, None]
    y[50] = float("-inf")
    y[51, 17] = float("nan")
    y[52, 20] = float("inf")
    y[53, :500] = float("-inf")
    y[54, 1:] = float("-inf")
    y[55, 3] = 2.0**20 + 0.125
    y[56] = -1.2e6
    y[57] *= 2.0**-130
    y[58:] = -200.0
    y[58:, :48] = near_tie_chains()
    return y


def _of_logits(case: Case, run: Runner, device: torch.device) -> str:
    logits = logits_input().to(DTYPES[case.dtype]).to(device)
    rows, real = logits.shape[0], 997
    target_ids = torch.arange(rows) * 61 % real
    target_ids[[3, 4, 5]] = torch.tensor([IGNORE, -1, real])
    target_ids[58:] = 33
    target_ids = target_ids.to(device)
    scale = _inverse_temperature(case, rows, device)

    def records(start: int, stop: int) -> Tensor:
        valid = min(stop, real) - start
        problem = LocalProblem(start, valid, None, case.entropy)
        return run.logits_forward(logits[:, start:stop].contiguous(), target_ids, scale, problem)

    whole = records(0, logits.shape[1])[None]
    parts = torch.stack([records(start, stop) for start, stop in pairwise(BOUNDS)])
    folded = [run.fold(gathered, target_ids, IGNORE, real, "nan") for gathered in (whole, parts)]
    return sha256(whole, *folded[0], *folded[1])


class Verdict(NamedTuple):
    """Whether a backend gives a projection's goldens on this machine."""

    backend: str
    projection: str
    device: str
    held: tuple[str, ...]  # cases
    wrong: tuple[str, ...]  # cases with other bytes
    left: tuple[str, ...]  # cases that were not checked

    @property
    def line(self) -> str:
        """For a report."""
        cases = len(self.held) + len(self.wrong) + len(self.left)
        told = [f"{len(self.held)} of {cases} goldens hold"] if self.held else []
        told += [f"WRONG BYTES in {', '.join(self.wrong)}"] if self.wrong else []
        told += [f"{len(self.left)} not checked"] if self.left else []
        return f"{self.device}, backend {self.backend}, projection {self.projection}: {'; '.join(told)}"


def verdicts(every: bool = False) -> list[Verdict]:
    """Of the backends that bear the contract on this machine, each with its default launches.

    Checked is a case of fp32, of bf16 and of logits with the backends that "auto" takes; `every`: all, with each one.
    """
    plan: dict[tuple[torch.device, str, str], tuple[list[str], list[str]]] = {}  # names to check, and the others
    for device in [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]:
        for row in BACKENDS:
            for dtype, entry in itertools.product(DTYPES.values(), (LINEAR, LOGITS)):
                site = Site(device, dtype, entry)
                if row.refusal(site) or row.automatic(site) or row.projection_id(site) not in CASES:
                    continue
                first = (entry == LINEAR and dtype != torch.float16) or dtype == torch.float32
                kind = "{}" if row.name == "triton" else "{}, everything"  # which takes Triton long to compile
                taken = kernels.select_backend("auto", device, dtype, entry == LOGITS).backend == row.name
                check, leave = plan.setdefault((device, row.name, row.projection_id(site)), ([], []))
                for name, case in CASES[row.projection_id(site)].items():
                    if DTYPES[case.dtype] == dtype:
                        wanted = every or (first and taken and name == kind.format(case.dtype))
                        (check if wanted else leave).append(name)

    def holds(job: tuple[torch.device, str, str, str]) -> bool:
        device, backend, projection, name = job
        return digest(projection, name, runner(backend), device) == recorded().get(projection, {}).get(name)

    jobs = [(*where, name) for where, (check, _) in plan.items() for name in check]
    with ThreadPoolExecutor(8) as pool:  # what Triton compiles, it compiles side by side
        found = dict(zip(jobs, pool.map(holds, jobs), strict=True))
    return [
        Verdict(
            backend,
            projection,
            device.type,
            tuple(name for name in check if found[device, backend, projection, name]),
            tuple(name for name in check if not found[device, backend, projection, name]),
            tuple(leave),
        )
        for (device, backend, projection), (check, leave) in plan.items()
    ]


def main() -> None:
    """Prints what this machine gives, and records it with --write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record them in goldens.json")
    write = parser.parse_args().write
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    contracts = json.loads(FILE.read_text()) if FILE.exists() else {}
    mine = contracts.setdefault(CONTRACT_ID, {})
    for projection, cases in CASES.items():
        for name, case in cases.items():
            given = projection == GIVEN_LOGITS
            choice = kernels.select_backend("auto", device, DTYPES[case.dtype], given)
            if choice.projection != projection:
                continue
            got = digest(projection, name, runner(choice.backend), device)
            before = mine.get(projection, {}).get(name)
            print(f"{projection} {name}: {got} {'as recorded' if got == before else f'recorded is {before}'}")
            mine.setdefault(projection, {})[name] = got
    if write:
        FILE.write_text(json.dumps(contracts, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
