"""Log-probs of logits that exist: time, memory, accuracy and batch invariance beside torch and other libraries.

    python benchmarks/batch_invariant_logp.py --json out/logits.json --png out/logits.png
    python benchmarks/batch_invariant_logp.py --peers torch,compile,liger,fla,quack,flash_attn

Time is the median of shuffled, interleaved rounds; fractions are of a device copy of the logits in the same rounds
(bytes: the forward reads them once; forward + backward reads them twice and writes the gradient once). All candidates
get one upstream gradient a row that bf16 holds exactly. A peer that is asked for and cannot be imported is an error.
Peers that write their gradient over the logits are timed that way; `keep` is what one copy to keep the logits costs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import vocabshard as vs
from vocabshard.testing.timing import medians, milliseconds, peak_bytes

SHAPES = [(4096, 32768), (4096, 128256), (4096, 151936), (8192, 128256), (32768, 151936)]
FEW = [1, 2, 4, 8, 16]
FEW_V = 151936


@dataclass(frozen=True)
class Candidate:
    """nll(logits, target) -> [N] losses, differentiable in the logits; our own gives -logp."""

    name: str
    nll: Callable[[Tensor, Tensor], Tensor]
    package: str
    overwrites: bool = False  # the logits hold something else after forward and backward


def _ours(x: Tensor, target: Tensor) -> Tensor:
    return -vs.batch_invariant_logp(x, target)


def _ours_in_place(x: Tensor, target: Tensor) -> Tensor:
    return -vs.batch_invariant_logp(x, target, inplace_backward=True)


def _torch(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), target, reduction="none")


def _torch_bf16(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, reduction="none")


def peer(name: str) -> list[Candidate]:
    """ImportError where its package is missing."""
    if name == "torch":
        return [Candidate("torch fp32", _torch, "torch"), Candidate("torch bf16", _torch_bf16, "torch")]
    if name == "compile":
        return [Candidate("torch.compile", torch.compile(_torch), "torch")]
    if name == "liger":
        loss = importlib.import_module("liger_kernel.transformers").LigerCrossEntropyLoss(reduction="none")
        return [Candidate("Liger", loss, "liger-kernel", overwrites=True)]
    if name == "quack":
        quack = importlib.import_module("quack.cross_entropy").cross_entropy
        return [Candidate("QuACK", lambda x, t: quack(x, t, reduction="none"), "quack-kernels")]
    if name in ("fla", "flash_attn"):
        place, package, label = {
            "fla": ("fla.modules.fused_cross_entropy", "flash-linear-attention", "FLA"),
            "flash_attn": ("flash_attn.ops.triton.cross_entropy", "flash-attn", "flash-attn"),
        }[name]
        triton_loss = importlib.import_module(place).cross_entropy_loss
        return [
            Candidate(label, lambda x, t: triton_loss(x, t)[0], package),
            Candidate(f"{label} in place", lambda x, t: triton_loss(x, t, inplace_backward=True)[0], package, True),
        ]
    raise ValueError(f"peers are torch, compile, liger, fla, quack, flash_attn; got {name!r}")


PEERS = ("torch", "compile", "liger", "fla", "quack", "flash_attn")


def upstream(rows: int) -> Tensor:
    g = torch.randn(rows, device="cuda").bfloat16().float()
    assert torch.equal(g.bfloat16().float(), g), "the upstream gradient must survive a rounding to bf16"
    return g


def peak_megabytes(call: Callable[[], object]) -> float:
    peak = peak_bytes(call, gpu=True)
    assert peak is not None
    return peak / 2**20


def scored(candidate: Candidate, x: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probs, gradient of sum(g * logp)); the candidate gets logits of its own."""
    leaf = x.clone().requires_grad_()
    # a view, not the leaf: some write into it
    nll = candidate.nll(leaf.view_as(leaf), target)
    grad = torch.autograd.grad(nll, leaf, -g.to(nll.dtype))[0]
    return -nll.detach().float(), grad


def time_shape(candidates: list[Candidate], rows: int, columns: int, rounds: int) -> dict[str, dict[str, float | str]]:
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    for begin in range(0, rows, 1024):
        x[begin : begin + 1024].normal_()
    target = torch.randint(0, columns, (rows,), device="cuda")
    g = upstream(rows)
    other = x.clone()

    def both(c: Candidate) -> Callable[[], object]:
        # who overwrites works on the copy, which is made anew before every call
        leaf = (other if c.overwrites else x).detach().requires_grad_()

        def call() -> object:
            nll = c.nll(leaf.view_as(leaf), target)
            return torch.autograd.grad(nll, leaf, -g.to(nll.dtype))[0]

        return call

    def forward(c: Candidate) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return c.nll(x, target)

        return call

    size = x.numel() * x.element_size()
    result: dict[str, dict[str, float | str]] = {"copy": {}}
    usable: dict[str, Callable[[], object]] = {"copy": lambda: other.copy_(x)}
    for c in candidates:
        try:
            memory = {"fwd MB": peak_megabytes(forward(c)), "f+b MB": peak_megabytes(both(c))}
        except (torch.OutOfMemoryError, RuntimeError, AssertionError) as error:
            result[c.name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        result[c.name] = dict(memory)
        usable[f"{c.name}|fwd"], usable[f"{c.name}|f+b"] = forward(c), both(c)
    for call in usable.values():
        call()
        call()
    # the copy hides the host's time behind the GPU's, and leaves the L2 to nobody
    times = medians(milliseconds(usable, rounds, gpu=True, before=lambda: other.copy_(x)))
    copy = times.pop("copy")
    result["copy"] = {"TB/s": 2 * size / copy / 1e9, "ms": copy}
    for name, ms in times.items():
        who, what = name.split("|")
        result[who][f"{what} ms"] = ms
        result[who][f"{what} of copy"] = (1.5 if what == "f+b" else 0.5) * copy / ms
    for c in candidates:
        if c.overwrites and "failed" not in result[c.name]:
            result[c.name]["keep ms"] = copy
    return result


def time_few(candidates: list[Candidate]) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds of a forward, host included, and in a CUDA graph, for few rows."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for rows in FEW:
        x = torch.randn(rows, FEW_V, device="cuda").bfloat16()
        target = torch.randint(0, FEW_V, (rows,), device="cuda")
        result[str(rows)] = {}
        for c in candidates:
            if c.overwrites:
                continue
            with torch.no_grad():

                def call(c: Candidate = c, x: Tensor = x, target: Tensor = target) -> Tensor:
                    return c.nll(x, target)

                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                times = []
                for i in range(60):
                    begin.record()
                    call()
                    end.record()
                    end.synchronize()
                    if i >= 10:
                        times.append(begin.elapsed_time(end))
                entry = {"eager ms": statistics.median(times)}
                try:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        for _ in range(20):
                            call()
                    graph.replay()
                    torch.cuda.synchronize()
                    begin.record()
                    graph.replay()
                    end.record()
                    end.synchronize()
                    entry["graph ms"] = begin.elapsed_time(end) / 20
                except RuntimeError:
                    pass
            result[str(rows)][c.name] = entry
    return result


def accuracy(candidates: list[Candidate], rows: int = 256, columns: int = 128256) -> dict[str, dict[str, float | str]]:
    """Against fp64 on the same bf16 logits."""
    torch.manual_seed(1)
    x = (torch.randn(rows, columns, device="cuda") * 3).bfloat16()
    target = torch.randint(0, columns, (rows,), device="cuda")
    g = upstream(rows)
    exact = torch.log_softmax(x.double(), -1)
    picked = exact.gather(1, target[:, None])[:, 0]
    gradient = -exact.exp() * g.double()[:, None]
    gradient[torch.arange(rows, device="cuda"), target] += g.double()
    rounded = gradient.to(torch.bfloat16)  # correctly: one rounding from fp64
    result: dict[str, dict[str, float | str]] = {}
    for c in candidates:
        try:
            logp, grad = scored(c, x, target, g)
        except (RuntimeError, AssertionError) as error:
            result[c.name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        result[c.name] = {
            "largest logp error": float((logp.double() - picked).abs().max()),
            "correctly rounded gradients %": 100 * float((grad.to(torch.bfloat16) == rounded).double().mean()),
            "logp dtype": str(logp.dtype).removeprefix("torch."),
            "gradient dtype": str(grad.dtype).removeprefix("torch."),
        }
    return result


def invariance(candidates: list[Candidate], columns: int = 50257) -> dict[str, dict[str, int | str]]:
    """Rows whose log-prob or gradient changes bytes with the batch around them, over a sweep of batches."""
    torch.manual_seed(2)
    total = 2049
    x = (torch.randn(total, columns, device="cuda") * 3).bfloat16()
    target = torch.randint(0, columns, (total,), device="cuda")
    g = upstream(total)
    sizes = [*range(1, 10), *(2**k + d for k in range(4, 12) for d in (-1, 0, 1))]
    result: dict[str, dict[str, int | str]] = {}
    for c in candidates:
        try:
            logp, grad = scored(c, x, target, g)
            rows = differing_logp = differing_grad = 0
            for n in sizes:
                for begin in sorted({0, (total - n) // 2, total - n}):
                    part = slice(begin, begin + n)
                    a, b = scored(c, x[part], target[part], g[part])
                    rows += n
                    differing_logp += int((a.view(torch.int32) != logp[part].view(torch.int32)).sum())
                    differing_grad += int((b.view(torch.int16) != grad[part].view(torch.int16)).any(1).sum())
            result[c.name] = {"rows": rows, "differing logp": differing_logp, "differing gradients": differing_grad}
        except (RuntimeError, AssertionError) as error:
            result[c.name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    return result


def environment(candidates: list[Candidate]) -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = {c.package: importlib.metadata.version(c.package) for c in candidates if c.package != "vocabshard"}
    return {
        "gpu": torch.cuda.get_device_name(),
        "cuda": str(torch.version.cuda),
        "vocabshard": vs.__version__,
        "commit": commit or "unknown",
        **versions,
    }


def draw(report: dict[str, dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(report["shapes"])
    figure, axes = pyplot.subplots(1, 2, figsize=(14, 5), sharey=True)
    for axis, what, goal in zip(axes, ("fwd of copy", "f+b of copy"), (0.88, 0.92), strict=True):
        names = [n for n in report["shapes"][shapes[0]] if n != "copy"]
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            heights = [report["shapes"][s].get(name, {}).get(what, 0.0) for s in shapes]
            axis.bar([j + i * width for j in range(len(shapes))], heights, width, label=name)
        axis.axhline(goal, color="black", linewidth=0.8)
        axis.set_xticks([j + 0.4 for j in range(len(shapes))], shapes)
        axis.set_title(what)
    axes[0].legend(fontsize=8)
    figure.suptitle(f"bf16 logits, fraction of copy bandwidth, {report['environment']['gpu']}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="torch", help=f"from {','.join(PEERS)}; missing ones are errors")
    parser.add_argument("--shapes", default="", help="N x V, as 4096x32768,8192x128256; default: five with N >= 4096")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, default=Path("out/batch_invariant_logp.json"))
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    candidates = [
        Candidate("vocabshard", _ours, "vocabshard"),
        Candidate("vocabshard in place", _ours_in_place, "vocabshard", overwrites=True),
    ]
    for name in filter(None, args.peers.split(",")):
        try:
            candidates += peer(name)
        except ImportError as error:
            raise SystemExit(f"--peers asks for {name}, which cannot be imported: {error}") from error
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")] if args.shapes else SHAPES
    report: dict[str, dict] = {"environment": environment(candidates), "shapes": {}}
    for rows, columns in shapes:
        entry = time_shape(candidates, rows, columns, args.rounds)
        report["shapes"][f"{rows}x{columns}"] = entry
        print(f"{rows} x {columns}: copy {entry['copy']['TB/s']:.2f} TB/s")
        for name, values in entry.items():
            if name != "copy":
                print(
                    f"  {name:22}", "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else v for k, v in values.items())
                )
        torch.cuda.empty_cache()
    for part, of in (("few rows", time_few), ("accuracy", accuracy), ("invariance", invariance)):
        report[part] = of(candidates)
        for name, values in report[part].items():
            print(f"{part}: {name:22}", values)
        torch.cuda.empty_cache()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1))
    if args.png:
        draw(report, args.png)


if __name__ == "__main__":
    main()
