"""Log-probs of logits that exist: time, memory, accuracy and batch invariance beside torch and other libraries.

    python benchmarks/batch_invariant_logp.py --json out/logits.json --png out/logits.png
    python benchmarks/batch_invariant_logp.py --peers torch,compile,liger,fla,quack,flash_attn
    python benchmarks/batch_invariant_logp.py --peers available

Time is the median of shuffled, interleaved rounds; fractions are of a device copy of the logits in the same rounds
(bytes: the forward reads them once; forward + backward reads them twice and writes the gradient once). Ahead of every
call the logits are copied: what that copy left in the L2 is written to memory meanwhile, which weighs at small sizes.
`in a row` has no such guest: calls of one kind one after another, over two inputs in turn, and copies likewise.
All candidates get one upstream gradient a row that bf16 holds exactly. Memory is the allocator's peak beyond inputs and
results of a call that is not the first; `stays` is what the first call left behind. A peer that is asked for and cannot
be imported is an error; `available` takes those that can and notes the others.
Peers that write their gradient over the logits are timed that way; `keep` is what one copy to keep the logits costs.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import random
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

import vocabshard as vs
from vocabshard import _C
from vocabshard.testing.timing import medians, milliseconds

SHAPES = ["4096x32768", "4096x128256", "4096x151936", "8192x128256", "32768x151936"]
PARTS = ("shapes", "few", "accuracy", "invariance")
FEW = [1, 2, 4, 8, 16]
FEW_V = 151936
COVER = 2**31  # bytes of logits that are copied ahead of a call, at least once: a millisecond hides the host's time
DEVICE = "cuda"  # accuracy and invariance run on the CPU, too


@dataclass(frozen=True)
class Candidate:
    """nll(logits, target) -> [N] losses, differentiable in the logits; our own gives -logp."""

    name: str
    nll: Callable[[Tensor, Tensor], Tensor]
    package: str
    overwrites: bool = False  # the logits hold something else after forward and backward
    logp: Callable[[Tensor, Tensor], Tensor] | None = None  # where nll has to launch more than that


def _ours(x: Tensor, target: Tensor) -> Tensor:
    return -vs.batch_invariant_logp(x, target)


def _logp_in_place(x: Tensor, target: Tensor) -> Tensor:
    return vs.batch_invariant_logp(x, target, inplace_backward=True)


def _ours_in_place(x: Tensor, target: Tensor) -> Tensor:
    return -_logp_in_place(x, target)


def _torch(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), target, reduction="none")


def _torch_bf16(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, reduction="none")


def _of_pair(loss: Callable[..., tuple[Tensor, Tensor]], package: str, label: str) -> list[Candidate]:
    """Of a function that returns losses and a second loss."""
    return [
        Candidate(label, lambda x, t: loss(x, t)[0], package),
        Candidate(f"{label} in place", lambda x, t: loss(x, t, inplace_backward=True)[0], package, overwrites=True),
    ]


def _flash_attn() -> ModuleType:
    """The Triton file alone: importing its package asks for a compiled extension, which it does not need."""
    package = importlib.util.find_spec("flash_attn")
    if package is None or package.origin is None:
        raise ImportError("flash_attn is not installed")
    place = Path(package.origin).parent / "ops" / "triton" / "cross_entropy.py"
    spec = importlib.util.spec_from_file_location("flash_attn_triton_cross_entropy", place)
    if spec is None or spec.loader is None or not place.exists():
        raise ImportError(f"flash_attn has no {place}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peer(name: str) -> list[Candidate]:
    """ImportError where its package is missing."""
    if name == "torch":
        return [Candidate("torch fp32", _torch, "torch"), Candidate("torch bf16", _torch_bf16, "torch")]
    if name == "compile":
        return [Candidate("torch.compile", torch.compile(_torch), "torch")]
    if name == "liger":
        loss = importlib.import_module("liger_kernel.transformers").LigerCrossEntropyLoss(reduction="none")
        return [Candidate("Liger", loss, "liger-kernel", overwrites=True)]
    if name == "fla":
        fla = importlib.import_module("fla.modules.fused_cross_entropy").cross_entropy_loss
        return _of_pair(fla, "fla-core", "FLA")
    if name == "flash_attn":
        return _of_pair(_flash_attn().cross_entropy_loss, "flash-attn", "flash-attn")
    if name == "quack":
        quack = importlib.import_module("quack.cross_entropy").cross_entropy
        return [Candidate("QuACK", lambda x, t: quack(x, t, reduction="none"), "quack-kernels")]
    raise ValueError(f"peers are torch, compile, liger, fla, quack, flash_attn; got {name!r}")


PEERS = ("torch", "compile", "liger", "fla", "quack", "flash_attn")


def size_of(text: str) -> tuple[int, int]:
    """Of "4096x32768"."""
    rows, columns = map(int, text.split("x"))
    return rows, columns


def upstream(rows: int) -> Tensor:
    g = torch.randn(rows, device=DEVICE).bfloat16().float()
    assert torch.equal(g.bfloat16().float(), g), "the upstream gradient must survive a rounding to bf16"
    return g


def in_a_row(
    calls: dict[str, Callable[[int], object]], count: int, rounds: int, before: Callable[[], object]
) -> dict[str, float]:
    """Milliseconds of each call, `count` of one kind one after another; each gets its number."""
    names, times = list(calls), {name: [] for name in calls}  # type: dict[str, list[float]]
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before()
            for i in range(count + 2):
                if i == 2:
                    begin.record()
                calls[name](i)
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / count)
    return medians(times)


def extra_memory(call: Callable[[], object], given: set[int]) -> tuple[float, float]:
    """MB beyond what the second call returns, and MB that the first one left behind. given: storages of the inputs."""
    torch.cuda.synchronize()
    empty = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    own = torch.cuda.max_memory_allocated() - before
    assert isinstance(kept, Tensor)
    if kept.untyped_storage().data_ptr() not in given:
        own -= -(-kept.untyped_storage().nbytes() // 512) * 512  # as the allocator rounds
    return max(own, 0) / 2**20, (before - empty) / 2**20


def scored(candidate: Candidate, x: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probs, gradient of sum(g * logp)); the candidate gets logits of its own."""
    leaf = x.clone().requires_grad_()
    # a view, not the leaf: some write into it
    nll = candidate.nll(leaf.view_as(leaf), target)
    grad = torch.autograd.grad(nll, leaf, -g.to(nll.dtype))[0]
    return -nll.detach().float(), grad


def time_shape(candidates: list[Candidate], rows: int, columns: int, rounds: int) -> dict[str, dict[str, float | str]]:
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    for begin in range(0, rows, 1024):
        x[begin : begin + 1024].normal_()
    target = torch.randint(0, columns, (rows,), device=DEVICE)
    g = upstream(rows)
    upstreams = {
        (logp, t): (g if logp else -g).to(t) for logp in (True, False) for t in (torch.float32, torch.bfloat16)
    }
    other = x.clone()

    def both(c: Candidate) -> Callable[[], object]:
        # who overwrites works on the copy, which is made anew before every call
        leaf = (other if c.overwrites else x).detach().requires_grad_()

        def call() -> object:
            loss = (c.logp or c.nll)(leaf.view_as(leaf), target)
            return torch.autograd.grad(loss, leaf, upstreams[c.logp is not None, loss.dtype])[0]

        return call

    def forward(c: Candidate) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return (c.logp or c.nll)(x, target)

        return call

    def numbered(c: Candidate) -> Callable[[int], object]:
        def call(i: int) -> object:
            with torch.no_grad():
                return (c.logp or c.nll)((x, other)[i % 2], target)

        return call

    size = x.numel() * x.element_size()
    result: dict[str, dict[str, float | str]] = {"copy": {}}
    usable: dict[str, Callable[[], object]] = {"copy": lambda: other.copy_(x)}
    for c in candidates:
        try:
            given = {t.untyped_storage().data_ptr() for t in (x, other)}
            (fwd, stays), (f_b, _) = extra_memory(forward(c), given), extra_memory(both(c), given)
        except Exception as error:  # whatever a peer raises: the others are measured
            result[c.name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        result[c.name] = {"fwd MB": fwd, "f+b MB": f_b, "stays MB": stays}
        usable[f"{c.name}|fwd"], usable[f"{c.name}|f+b"] = forward(c), both(c)
    again = max(1, COVER // size)

    def cover() -> None:
        for _ in range(again):
            other.copy_(x)

    for call in usable.values():
        call()
        call()
    times = medians(milliseconds(usable, rounds, gpu=True, before=cover))
    copy = times.pop("copy")
    result["copy"] = {"TB/s": 2 * size / copy / 1e9, "ms": copy}
    for name, ms in times.items():
        who, what = name.split("|")
        result[who][f"{what} ms"] = ms
        result[who][f"{what} of copy"] = (1.5 if what == "f+b" else 0.5) * copy / ms
    other.copy_(x)
    alone: dict[str, Callable[[int], object]] = {"copy": lambda i: other.copy_(x)}
    alone |= {c.name: numbered(c) for c in candidates if f"{c.name}|fwd" in usable}
    times = in_a_row(alone, max(4, COVER // size), max(3, rounds // 3), cover)
    result["copy"]["in a row ms"] = times["copy"]
    for c in candidates:
        if "failed" not in result[c.name]:
            result[c.name]["in a row of copy"] = 0.5 * times["copy"] / times[c.name]
            if c.overwrites:
                result[c.name]["keep ms"] = copy
    return result


def few_of(call: Callable[[], object]) -> dict[str, float]:
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
    except Exception:  # cannot be captured
        torch.cuda.synchronize()
    return entry


def time_few(candidates: list[Candidate]) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds of a forward, host included, and in a CUDA graph, for few rows."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for rows in FEW:
        x = torch.randn(rows, FEW_V, device=DEVICE).bfloat16()
        target = torch.randint(0, FEW_V, (rows,), device=DEVICE)
        result[str(rows)] = {}
        for c in candidates:
            if c.overwrites:
                continue

            def call(c: Candidate = c, x: Tensor = x, target: Tensor = target) -> Tensor:
                return (c.logp or c.nll)(x, target)

            with torch.no_grad():
                try:
                    result[str(rows)][c.name] = few_of(call)
                except Exception:
                    result[str(rows)][c.name] = {}
    return result


def accuracy(candidates: list[Candidate], rows: int, columns: int) -> dict[str, dict[str, float | str]]:
    """Against fp64 on the same bf16 logits."""
    torch.manual_seed(1)
    x = (torch.randn(rows, columns, device=DEVICE) * 3).bfloat16()
    target = torch.randint(0, columns, (rows,), device=DEVICE)
    g = upstream(rows)
    exact = torch.log_softmax(x.double(), -1)
    picked = exact.gather(1, target[:, None])[:, 0]
    gradient = -exact.exp() * g.double()[:, None]
    gradient[torch.arange(rows, device=DEVICE), target] += g.double()
    rounded = gradient.to(torch.bfloat16)  # correctly: one rounding from fp64
    result: dict[str, dict[str, float | str]] = {}
    for c in candidates:
        try:
            logp, grad = scored(c, x, target, g)
        except Exception as error:
            result[c.name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        result[c.name] = {
            "largest logp error": float((logp.double() - picked).abs().max()),
            "correctly rounded gradients %": 100 * float((grad.to(torch.bfloat16) == rounded).double().mean()),
            "logp dtype": str(logp.dtype).removeprefix("torch."),
            "gradient dtype": str(grad.dtype).removeprefix("torch."),
        }
    return result


def invariance(candidates: list[Candidate], total: int, columns: int) -> dict[str, dict[str, int | str]]:
    """Rows whose log-prob or gradient changes bytes with the batch around them, over a sweep of batches."""
    torch.manual_seed(2)
    x = (torch.randn(total, columns, device=DEVICE) * 3).bfloat16()
    target = torch.randint(0, columns, (total,), device=DEVICE)
    g = upstream(total)
    sizes = [*range(1, 10), *(n for k in range(4, 12) for n in (2**k - 1, 2**k, 2**k + 1) if n <= total)]
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
        except Exception as error:
            result[c.name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    return result


def environment(candidates: list[Candidate], missing: dict[str, str], commit: str | None) -> dict[str, object]:
    command = ["git", "rev-parse", "HEAD"]
    commit = commit or subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    packages = sorted({"triton", *(c.package for c in candidates)} - {"vocabshard", "torch"})
    installed = {
        d.metadata["Name"].lower().replace("_", "-"): d.version
        for d in importlib.metadata.distributions()
        if d.metadata["Name"]
    }
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "vocabshard": vs.__version__,
        "build": _C.build_info()["build"],  # a digest of the sources of the kernels
        "commit": commit or "unknown",
        **{package: installed.get(package, "unknown") for package in packages},
        "missing": missing,
    }


def number(value: object, form: str) -> str:
    return form.format(value) if isinstance(value, (int, float)) else "-"


def tables(report: dict[str, dict]) -> str:
    """The report as Markdown."""
    lines = []

    def table(head: list[str], rows: list[list[str]]) -> None:
        lines.extend(["| " + " | ".join(head) + " |", "|" + "---|" * len(head)])
        lines.extend("| " + " | ".join(row) + " |" for row in rows)
        lines.append("")

    shapes = report["shapes"]
    if shapes:
        names = [name for name in next(iter(shapes.values())) if name != "copy"]
        lines.append("Fraction of copy bandwidth, forward (in a row) / forward + backward; ms; MB beyond results\n")
        rows = [["copy", *(f"{v['copy']['ms']:.3f} ms, {v['copy']['TB/s']:.2f} TB/s" for v in shapes.values())]]
        for name in names:
            row = [name]
            for v in shapes.values():
                of = v.get(name, {})
                if "failed" in of:
                    row.append("failed")
                    continue
                alone = number(of.get("in a row of copy"), "{:.3f}")
                row.append(
                    f"{of['fwd of copy']:.3f} ({alone}) / {of['f+b of copy']:.3f}, "
                    f"{of['fwd ms']:.3f} / {of['f+b ms']:.3f} ms, "
                    f"{of['fwd MB']:.1f} / {of['f+b MB']:.1f} MB"
                )
            rows.append(row)
        table(["", *(s.replace("x", " x ") for s in shapes)], rows)
    few = report.get("few rows", {})
    if few:
        names = list(next(iter(few.values())))
        lines.append("Forward of few rows, ms with the host / in a graph\n")
        cells = [
            [name, *(f"{number(v[name].get('eager ms'), '{:.4f}')} / {number(v[name].get('graph ms'), '{:.4f}')}"
                     for v in few.values())]
            for name in names
        ]  # fmt: skip
        table([f"V = {FEW_V}", *(f"N = {n}" for n in few)], cells)
    evidence, moved = report.get("accuracy", {}), report.get("invariance", {})
    if evidence or moved:
        cells = []
        for name in evidence or moved:
            e, m = evidence.get(name, {}), moved.get(name, {})
            cells.append([
                name,
                number(e.get("largest logp error"), "{:.2g}"),
                number(e.get("correctly rounded gradients %"), "{:.4f}"),
                f"{m.get('differing logp', '-')} / {m.get('differing gradients', '-')} of {m.get('rows', '-')}",
                f"{e.get('logp dtype', '-')} / {e.get('gradient dtype', '-')}",
            ])  # fmt: skip
        table(["", "largest error of logp", "correctly rounded gradients %", "rows that differ, logp / gradient",
               "dtypes, logp / gradient"], cells)  # fmt: skip
    return "\n".join(lines)


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
        axis.set_title({"fwd of copy": "forward", "f+b of copy": "forward + backward"}[what])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=10, fontsize=8)
    figure.suptitle(f"bf16 logits, fraction of copy bandwidth, {report['environment']['gpu']}")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=130)


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="torch", help=f"from {','.join(PEERS)}, or available")
    parser.add_argument("--shapes", default="", help="N x V, as 4096x32768,8192x128256; default: five with N >= 4096")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: accuracy and invariance alone")
    parser.add_argument("--size", default="256x128256", help="N x V of accuracy")
    parser.add_argument("--sweep", default="2049x50257", help="N x V of invariance")
    parser.add_argument("--json", type=Path, default=Path("out/batch_invariant_logp.json"))
    parser.add_argument("--png", type=Path)
    parser.add_argument("--commit", help="for the record, where git does not say it")
    parser.add_argument("--drawn", type=Path, help="measure nothing: tables and picture of this JSON")
    args = parser.parse_args()
    if args.drawn:
        drawn = json.loads(args.drawn.read_text())
        print(tables(drawn))
        if args.png:
            draw(drawn, args.png)
        return
    DEVICE = args.device
    parts = args.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts are from {','.join(PARTS)}, got {args.parts}")
    if DEVICE == "cpu" and set(parts) & {"shapes", "few"}:
        parser.error("--device cpu measures no times: say --parts accuracy,invariance")
    candidates = [
        Candidate("vocabshard", _ours, "vocabshard", logp=vs.batch_invariant_logp),
        Candidate("vocabshard in place", _ours_in_place, "vocabshard", overwrites=True, logp=_logp_in_place),
    ]
    missing = {}
    for name in PEERS if args.peers == "available" else filter(None, args.peers.split(",")):
        try:
            candidates += peer(name)
        except Exception as error:
            if args.peers != "available":
                raise SystemExit(f"--peers asks for {name}, which cannot be imported: {error}") from error
            missing[name] = f"{type(error).__name__}: {error}"
            print(f"not here: {name}: {missing[name]}")
    report: dict[str, dict] = {"environment": environment(candidates, missing, args.commit), "shapes": {}}

    def save() -> None:  # after every part: a run that is cut short leaves what it has
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1))

    for shape in (args.shapes.split(",") if args.shapes else SHAPES) if "shapes" in parts else ():
        torch.compiler.reset()  # so that torch.compile makes code for this shape
        rows, columns = size_of(shape)
        report["shapes"][shape] = time_shape(candidates, rows, columns, args.rounds)
        print(shape, f"{report['shapes'][shape]['copy']['TB/s']:.2f} TB/s", flush=True)
        save()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    if "accuracy" in parts:
        report["accuracy"] = accuracy(candidates, *size_of(args.size))
        save()
    if "invariance" in parts:
        report["invariance"] = invariance(candidates, *size_of(args.sweep))
        save()
    # last: a capture that a peer breaks off may spoil what comes after it
    if "few" in parts:
        report["few rows"] = time_few(candidates)
        save()
    print(tables(report))
    for part in report.values():
        for name, of in part.items():
            if isinstance(of, dict) and "failed" in of:
                print(f"failed: {name}: {of['failed']}")
    if args.png:
        draw(report, args.png)


if __name__ == "__main__":
    main()
