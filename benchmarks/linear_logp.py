"""linear_logp beside the matrix products alone, torch and other libraries: time, memory, error.

    python benchmarks/linear_logp.py --configs "4096,4096,151936;64,4096,151936" --json out/l.json --png out/l.png
    python benchmarks/linear_logp.py --backends auto,triton --peers torch,compile,liger,quack,cce,verl
    python benchmarks/linear_logp.py --configs 4096,2048,131072 --kept 0,0.25,0.5,0.75,1 --memory-png out/memory.png

A config is N,D,V. Times are medians over shuffled, interleaved rounds; ratios are medians of the ratios within a round:
the forward to the product z = hidden @ weight.T alone (2 N D V operations, its output written), forward + backward to
the four products z, z, dH, dW that it takes when nothing of size N * V is kept; ours with everything kept (--kept 1) to
three, z, dH, dW; ours with a frozen weight to z, z, dH, or to z, dH. --kept is the share of the rows whose logits a
budget lets the forward keep. Memory is the allocator's peak beyond the inputs, gradients included. All get the same
inputs and one upstream gradient a row that bf16 holds exactly; who takes none (QuACK's loss is a scalar) gets all ones.
The error is the largest of |logp - fp64's| over some rows. A backend or peer that is asked for and is not there is an
error. It runs on the GPU if there is one.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import vocabshard as vs
from vocabshard import kernels
from vocabshard.testing.timing import medians, milliseconds, peak_bytes, ratio
from vocabshard.testing.yardsticks import FOUR, HeadInputs, products, torch_logp

CONFIGS = "4096,2048,131072;4096,4096,151936;4096,4096,37984;1024,2048,131072;64,4096,151936;1,4096,151936"
BACKENDS = ("auto", "sm90", "triton", "cpu", "torch")
PEERS = ("torch", "compile", "liger", "quack", "cce", "verl")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
FORWARD, BOTH = "forward", "forward + backward"
KEPT, FROZEN, FROZEN_KEPT = "z dH dW", "z z dH", "z dH"  # products of a forward + backward, as FOUR


@dataclass(frozen=True)
class Candidate:
    """logp(hidden, weight, target) -> [N] log-probs, or their sum where `scalar`, or several results of [N]."""

    name: str
    logp: Callable[[Tensor, Tensor, Tensor], Any]
    package: str
    scalar: bool = False
    floor: str = FOUR  # products that its forward + backward is held against


def ours(backend: str, dtype: torch.dtype, kept: float = 0.0, variant: str = "") -> Candidate:
    if backend not in BACKENDS:
        raise SystemExit(f"--backends takes {', '.join(BACKENDS)}; got {backend!r}")

    def logp(hidden: Tensor, weight: Tensor, target: Tensor) -> Any:
        budget = 0
        if kept:
            module = kernels.module(kernels.select_backend(backend, weight.device, weight.dtype).backend)
            size = module.kept_bytes_per_row(len(weight), weight.dtype)
            if not size:
                raise SystemExit(f"--kept asks for {kept:.0%} of the logits: backend {backend} keeps none of {dtype}")
            budget = round(kept * len(hidden)) * size
        options = vs.GradOptions(save_logits_budget=budget)
        if variant == "entropy":
            return vs.linear_logp(
                hidden, weight, target, backend=backend, validate=False, grad_options=options, return_entropy=True
            )[0:3:2]
        return vs.linear_logp(hidden, weight, target, backend=backend, validate=False, grad_options=options)

    few = torch.zeros(1, 8, device=DEVICE, dtype=dtype)
    try:
        logp(few, few, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    except ValueError as error:
        raise SystemExit(f"--backends asks for {backend}: {error}") from error
    name = f"vocabshard {backend}" + (f", {kept:.0%} kept" if kept else "") + (f", {variant}" if variant else "")
    floor = (FROZEN_KEPT if kept == 1 else FROZEN) if variant == "frozen" else KEPT if kept == 1 else FOUR
    return Candidate(name, logp, "vocabshard", floor=floor)


def _torch_plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch.log_softmax(F.linear(hidden, weight), -1).gather(1, target[:, None])[:, 0]


def _torch_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return -F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="none")


def peer(name: str) -> list[Candidate]:
    """ImportError where its package is missing."""
    if name == "torch":
        return [
            Candidate("torch", _torch_plain, "torch"),
            Candidate("torch, fp32 log_softmax", torch_logp, "torch"),
        ]
    if name == "compile":
        # a cross-entropy, whose gradient it fuses; that of a gather it makes as a matrix of its own
        return [Candidate("torch.compile", torch.compile(_torch_loss, dynamic=False), "torch")]
    if name == "liger":
        liger = importlib.import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
        return [Candidate("Liger scaled CE", lambda h, w, t: -liger.apply(h, w, t), "liger-kernel")]
    if name == "quack":
        quack = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
        return [Candidate("QuACK", lambda h, w, t: -quack(h, w, t, reduction="sum"), "quack-kernels", scalar=True)]
    if name == "cce":
        cce = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        return [Candidate("CCE", lambda h, w, t: -cce(h, w, t, reduction="none"), "cut-cross-entropy")]
    if name == "verl":
        verl = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
        return [Candidate("verl", lambda h, w, t: verl(h, w, t, 1.0, "none")[0], "verl")]
    raise SystemExit(f"--peers takes {', '.join(PEERS)}; got {name!r}")


def forward(candidate: Candidate, x: HeadInputs) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return candidate.logp(x.hidden, x.weight, x.target)

    return call


def both(candidate: Candidate, x: HeadInputs) -> Callable[[], Any]:
    hidden, weight = x.hidden.detach().requires_grad_(), x.weight.detach()
    leaves = [hidden] if candidate.floor in (FROZEN, FROZEN_KEPT) else [hidden, weight.requires_grad_()]

    def call() -> Any:
        results = candidate.logp(hidden, weight, x.target)
        results = [results] if isinstance(results, Tensor) else list(results)
        upstream = [torch.ones_like(r) if candidate.scalar else x.upstream.to(r.dtype) for r in results]
        return torch.autograd.grad(results, leaves, upstream)

    return call


def exact_logp(x: HeadInputs, rows: Tensor) -> Tensor:
    """fp64 log-probs of some rows, the vocabulary in pieces."""
    hidden, lses = x.hidden[rows].double(), []
    for weight in x.weight.split(16384):
        lses.append(torch.logsumexp(hidden @ weight.double().t(), 1))
    return (hidden * x.weight[x.target[rows]].double()).sum(1) - torch.logsumexp(torch.stack(lses), 0)


def largest_error(candidate: Candidate, x: HeadInputs, rows: Tensor, exact: Tensor) -> float:
    with torch.no_grad():
        if candidate.scalar:  # of the sum, a row
            got = candidate.logp(x.hidden[rows], x.weight, x.target[rows]).double()
            return float((got - exact.sum()).abs()) / len(rows)
        logp = candidate.logp(x.hidden, x.weight, x.target)
        logp = logp if isinstance(logp, Tensor) else logp[0]
        return float((logp.double()[rows] - exact).abs().max())


def measure(candidates: list[Candidate], x: HeadInputs, rounds: int) -> dict[str, dict[str, Any]]:
    report: dict[str, dict[str, Any]] = {}
    for what, make in ((FORWARD, forward), (BOTH, both)):
        calls = {}
        for c in candidates:
            entry = report.setdefault(c.name, {})
            try:
                call = make(c, x)
                call()  # compiles, tunes
                peak = peak_bytes(call, gpu=GPU)
                entry[f"{what} MB"] = None if peak is None else peak / 2**20
                calls[c.name] = call
            except Exception as error:  # whatever a peer's compiler raises: it is a result
                entry[f"{what} failed"] = f"{type(error).__name__}: {str(error).strip()[:200]}"
        floor_of = {c.name: c.floor if what == BOTH else "z" for c in candidates}
        run = products(x)
        floors = {floor: run(floor) for floor in sorted({FOUR if what == BOTH else "z", *floor_of.values()})}
        times = milliseconds({**floors, **calls}, rounds, gpu=GPU)
        median = medians(times)
        product = report.setdefault("product", {})
        product[f"{what} ms"] = median[FOUR if what == BOTH else "z"]
        for floor in floors:
            product[f"{floor} ms"] = median[floor]
        for name in calls:
            report[name][f"{what} ms"] = median[name]
            report[name][f"{what} ratio"] = ratio(times, name, floor_of[name])
            if what == BOTH:
                report[name]["floor"] = floor_of[name]
        if GPU:
            torch.cuda.empty_cache()
    n = len(x.hidden)
    rows = torch.linspace(0, n - 1, min(n, 64), device=DEVICE).long()
    exact = exact_logp(x, rows)
    for c in candidates:
        if f"{FORWARD} ms" in report[c.name]:
            report[c.name]["error"] = largest_error(c, x, rows, exact)
    return report


def environment(candidates: list[Candidate], dtype: str) -> dict[str, Any]:
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    packages = {c.package for c in candidates} | {"torch", "triton"}
    versions = {}
    for package in sorted(packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "device": torch.cuda.get_device_name() if GPU else "cpu",
        "cuda": torch.version.cuda,
        "dtype": {"hidden": dtype, "weight": dtype, "upstream": "fp32 holding bf16 values", "logp": "fp32"},
        "versions": versions,
        "commit": found.stdout.strip() or "unknown",
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
    }


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    configs = report["configs"]
    names = [name for name in next(iter(configs.values())) if name != "product"]
    panels = [(what, unit) for what in (FORWARD, BOTH) for unit in ("ratio", "MB")]
    figure, axes = pyplot.subplots(2, 2, figsize=(15, 9))
    width = 0.8 / len(names)
    for axis, (what, unit) in zip(axes.flat, panels, strict=True):
        for i, name in enumerate(names):
            heights = [entry.get(name, {}).get(f"{what} {unit}") or 0.0 for entry in configs.values()]
            axis.bar([j + i * width for j in range(len(configs))], heights, width, label=name)
        axis.set_xticks([j + 0.4 for j in range(len(configs))], [c.replace(" x ", "\n") for c in configs], fontsize=8)
        if unit == "ratio":
            axis.axhline(1, color="black", linewidth=0.8)
            axis.set_title(f"{what}: time, in matrix products alone")
        else:
            axis.set_title(f"{what}: peak MB beyond the inputs")
            axis.set_yscale("symlog", linthresh=1)
    axes[0][0].legend(fontsize=8)
    environment = report["environment"]
    figure.suptitle(f"linear_logp, N x D x V, {environment['dtype']['hidden']}, {environment['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def draw_memory(report: dict[str, Any], path: Path) -> None:
    """Time of forward + backward against its memory: ours over the range of budgets, each peer a point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    configs = report["configs"]
    figure, axes = pyplot.subplots(1, len(configs), figsize=(7 * len(configs), 5), squeeze=False)
    for axis, (config, entry) in zip(axes[0], configs.items(), strict=True):
        curves: dict[str, list[tuple[float, float]]] = {}
        for name, values in entry.items():
            if f"{BOTH} MB" in values and f"{BOTH} ms" in values and not name.endswith(("frozen", "entropy")):
                curve = name.split(",")[0] if name.startswith("vocabshard") else name
                curves.setdefault(curve, []).append((values[f"{BOTH} MB"] or 0.0, values[f"{BOTH} ms"]))
        for name, points in curves.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        for floor in (FOUR, KEPT):
            if f"{floor} ms" in entry["product"]:
                axis.axhline(entry["product"][f"{floor} ms"], color="black", linewidth=0.8, linestyle=":")
                axis.annotate(floor, (0, entry["product"][f"{floor} ms"]), fontsize=8)
        axis.set_title(config)
        axis.set_xlabel("peak MB beyond the inputs, gradients included")
        axis.set_ylabel("forward + backward, ms")
        axis.legend(fontsize=8)
    environment = report["environment"]
    figure.suptitle(
        f"linear_logp over the budget of kept logits, {environment['dtype']['hidden']}, {environment['device']}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def line(name: str, entry: dict[str, Any]) -> str:
    cells = []
    for what, short in ((FORWARD, "fwd"), (BOTH, "f+b")):
        if f"{what} ms" in entry:
            ratio = f" {entry[f'{what} ratio']:.3f}x" if f"{what} ratio" in entry else ""
            if what == BOTH and entry.get("floor", FOUR) != FOUR:
                ratio += f" of {entry['floor']}"
            memory = entry.get(f"{what} MB")
            cells.append(f"{short} {entry[f'{what} ms']:.3f} ms{ratio}" + (f" {memory:.0f} MB" if memory else ""))
        elif f"{what} failed" in entry:
            cells.append(f"{short} {entry[f'{what} failed'].splitlines()[0][:70]}")
    error = f"error {entry['error']:.1e}" if "error" in entry else ""
    return f"  {name:30} " + "  ".join([*cells, error])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", default=CONFIGS, help="N,D,V;N,D,V;...")
    parser.add_argument("--backends", default="auto", help=f"ours, from {','.join(BACKENDS)}")
    parser.add_argument("--peers", default="torch", help=f"from {','.join(PEERS)}")
    parser.add_argument("--kept", default="", help="shares of the rows to keep logits of, such as 0.5,1")
    parser.add_argument("--variants", default="", help="of ours: frozen (weight), entropy (its gradient too)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--memory-png", type=Path, help="time against memory, with the budgets of --kept")
    args = parser.parse_args()
    shares = sorted({0.0, *map(float, filter(None, args.kept.split(",")))})
    variants = list(filter(None, args.variants.split(",")))
    if unknown := set(variants) - {"frozen", "entropy"}:
        raise SystemExit(f"--variants takes frozen, entropy; got {', '.join(sorted(unknown))}")
    candidates = []
    for backend in filter(None, args.backends.split(",")):
        candidates += [ours(backend, DTYPES[args.dtype], kept) for kept in shares]
        # with nothing kept, and with everything where that is asked for
        candidates += [ours(backend, DTYPES[args.dtype], k, v) for v in variants for k in (0.0, 1.0) if k in shares]
    for name in filter(None, args.peers.split(",")):
        try:
            candidates += peer(name)
        except ImportError as error:
            raise SystemExit(f"--peers asks for {name}, which cannot be imported: {error}") from error
    report: dict[str, Any] = {"environment": environment(candidates, args.dtype), "configs": {}}
    for config in args.configs.split(";"):
        n, d, v = map(int, config.split(","))
        x = HeadInputs.make(n, d, v, DTYPES[args.dtype], DEVICE)
        entry = report["configs"][f"{n} x {d} x {v}"] = measure(candidates, x, args.rounds)
        print(f"{n} x {d} x {v}")
        for name, values in entry.items():
            print(line(name, values), flush=True)
        del x
    for path in filter(None, (args.json, args.png, args.memory_png)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.png:
        draw(report, args.png)
    if args.memory_png:
        draw_memory(report, args.memory_png)


if __name__ == "__main__":
    main()
