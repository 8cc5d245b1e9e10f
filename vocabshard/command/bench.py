"""`vocabshard bench`: how long the operators take on this machine, beside the plain matrix products and torch's own."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import vocabshard
from vocabshard import kernels
from vocabshard.command.errors import InputError, first_line
from vocabshard.command.files import writable, write_text
from vocabshard.contract import CONTRACT_ID
from vocabshard.functional import batch_invariant_logp, linear_logp
from vocabshard.testing.timing import Call, medians, milliseconds, peak_bytes, ratio
from vocabshard.testing.yardsticks import FOUR, HeadInputs, products, torch_logits_logp, torch_logp

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORWARD, BOTH = "forward", "forward + backward"
SHAPES = {"cpu": [(64, 256, 16000), (1, 256, 16000)], "cuda": [(4096, 4096, 151936), (64, 4096, 151936)]}
ROUNDS = {"cpu": 5, "cuda": 20}
_OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


def _out_of_memory(error: BaseException) -> bool:
    """The CPU's allocator has no class of error of its own, nor have sizes beyond 64 bits."""
    return isinstance(error, _OUT_OF_MEMORY) or any(
        told in str(error) for told in ("can't allocate memory", "Storage size calculation overflowed")
    )


@dataclass(frozen=True)
class _Pass:
    """One pass of one operator, and what it is held against."""

    op: str
    what: str
    ours: Call
    torch: Call
    yardstick: str  # of the table
    alone: Call

    def calls(self) -> Iterator[tuple[str, Call]]:
        """By their names within a round."""
        yield f"{self.op} {self.what}", self.ours
        yield f"torch {self.op} {self.what}", self.torch
        yield self.yardstick, self.alone


def bench(args: argparse.Namespace) -> int:
    """Prints a table a shape; 0. Raises InputError for bad input."""
    device = _device(args.device)
    rounds = ROUNDS[device.type] if args.rounds is None else args.rounds
    if rounds < 1:
        raise InputError(f"--rounds must be at least 1, got {rounds}")
    if args.out is not None:
        writable("--out", args.out)
    name = args.dtype or ("bf16" if device.type == "cuda" else "fp32")
    backends = {op: _backend(args.backend, device, DTYPES[name], op) for op in ("linear_logp", "batch_invariant_logp")}
    result: dict[str, Any] = {
        "contract": CONTRACT_ID,
        "version": vocabshard.__version__,
        "build": kernels.build_id(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        "dtype": name,
        "backends": backends,
        "rounds": rounds,
        "shapes": [],
    }
    on = result["device"] if device.type == "cuda" else f"{platform.machine()}, {result['threads']} threads"
    print(f"vocabshard {vocabshard.__version__}, torch {torch.__version__}, {on}; {name}, {rounds} rounds", flush=True)
    for n, d, v in args.shapes or SHAPES[device.type]:
        print(f"{n} x {d} x {v}", flush=True)
        try:
            x = HeadInputs.make(n, d, v, DTYPES[name], device)
            entry = measure(x, backends, rounds)
        except (*_OUT_OF_MEMORY, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            raise InputError(f"--shapes: {n},{d},{v} does not fit into memory: {first_line(error)}") from error
        result["shapes"].append({"N": n, "D": d, "V": v, "passes": entry})
        for line in _table(entry, backends):
            print(line, flush=True)
    if args.out is not None:
        write_text("--out", args.out, json.dumps(result, indent=1) + "\n")
    return 0


def measure(x: HeadInputs, backends: dict[str, str], rounds: int) -> list[dict[str, Any]]:
    """A dict a pass, as --out writes it; None for torch where it did not fit."""
    gpu = x.hidden.device.type == "cuda"
    found = []
    for make in (_linear, _logits):
        for of in make(x, backends):
            calls = dict(of.calls())
            ours, theirs, alone = calls
            calls[ours]()
            try:
                calls[theirs]()
            except (*_OUT_OF_MEMORY, RuntimeError) as error:
                if not _out_of_memory(error):
                    raise
                del calls[theirs]
            calls[alone]()
            peak = peak_bytes(calls[ours], gpu=gpu)
            times = milliseconds(calls, rounds, gpu=gpu)
            median = medians(times)
            found.append(
                {
                    "op": of.op,
                    "pass": of.what,
                    "ms": median[ours],
                    "yardstick": alone,
                    "yardstick_ms": median[alone],
                    "of_yardstick": ratio(times, ours, alone),
                    "torch_ms": median.get(theirs),
                    "of_torch": ratio(times, ours, theirs) if theirs in calls else None,
                    "MiB": None if peak is None else peak / 2**20,
                }
            )
            if gpu:
                torch.cuda.empty_cache()
    return found


def _linear(x: HeadInputs, backends: dict[str, str]) -> Iterator[_Pass]:
    run = products(x)

    def logp(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
        return linear_logp(hidden, weight, target, validate=False, backend=backends["linear_logp"])

    leaves = (x.hidden, x.weight)
    ours, theirs = (_passes(f, leaves, x) for f in (logp, torch_logp))
    for what, names, yardstick in ((FORWARD, "z", "the product"), (BOTH, FOUR, "its four products")):
        yield _Pass("linear_logp", what, ours[what], theirs[what], yardstick, run(names))


def _logits(x: HeadInputs, backends: dict[str, str]) -> Iterator[_Pass]:
    logits = x.hidden @ x.weight.t()
    other = torch.empty_like(logits)

    def logp(logits: Tensor, target: Tensor) -> Any:
        return batch_invariant_logp(logits, target, validate=False, backend=backends["batch_invariant_logp"])

    ours, theirs = (_passes(f, (logits,), x) for f in (logp, torch_logits_logp))
    for what in (FORWARD, BOTH):
        copy = "a copy of the logits"
        yield _Pass("batch_invariant_logp", what, ours[what], theirs[what], copy, lambda: other.copy_(logits))


def _passes(logp: Callable[..., Any], operands: tuple[Tensor, ...], x: HeadInputs) -> dict[str, Call]:
    leaves = [operand.detach().requires_grad_() for operand in operands]

    def forward() -> Any:
        with torch.no_grad():
            return logp(*operands, x.target)

    return {FORWARD: forward, BOTH: lambda: torch.autograd.grad(logp(*leaves, x.target), leaves, x.upstream)}


def _table(entry: list[dict[str, Any]], backends: dict[str, str]) -> Iterator[str]:
    for row in entry:
        memory = "" if row["MiB"] is None else f"  {row['MiB']:6.0f} MiB"
        torch_ = "torch: out of memory" if row["torch_ms"] is None else f"{row['of_torch']:.2f} of torch's {_ms(row)}"
        yield (
            f"  {row['op']:20} {backends[row['op']]:6} {row['pass']:18} {row['ms']:9.3f} ms{memory}  "
            f"{row['of_yardstick']:.2f} of {row['yardstick']}, {torch_}"
        )


def _ms(row: dict[str, Any]) -> str:
    return f"{row['torch_ms']:.3f} ms"


def _backend(asked: str, device: torch.device, dtype: torch.dtype, op: str) -> str:
    try:
        return kernels.select_backend(asked, device, dtype, op != "linear_logp").backend
    except (ImportError, ValueError) as error:
        raise InputError(f"--backend {asked}: {first_line(error)}") from error


def _device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: there is no GPU that this torch can use")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
