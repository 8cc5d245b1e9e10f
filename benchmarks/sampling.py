"""Decode with sampling, scoring and training under a program, and the best columns, against plain calls, on one GPU.

    python benchmarks/sampling.py --rounds 20 --json out/sampling.json

bf16, D and V from --depth and --columns. Variants take turns in shuffled rounds; ratios are medians over rounds. Decode
is timed in a CUDA graph (as engines run it) and eager with the host. Logits are N(0, --spread).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.options import SampleOutput
from vocabshard.sampling import SamplingProgram
from vocabshard.testing.timing import Times, medians, milliseconds, ratio

PROGRAMS = {
    "temperature": SamplingProgram.of(temperature=0.8),
    "top-k 50": SamplingProgram.of(temperature=0.8, top_k=50),
    "top-p 0.95": SamplingProgram.of(temperature=0.8, top_p=0.95),
    "all": SamplingProgram.of(0.8, 0.01, 50, 0.95),
}


def graphed(call: Callable[[], Any]) -> Callable[[], None]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def eager_ms(call: Callable[[], Any], count: int = 50) -> float:
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e3


def table(title: str, times: Times, base: str, eager: dict[str, float]) -> list[dict[str, Any]]:
    print(title)
    lines = []
    for name, ms in medians(times).items():
        line = {"case": title, "name": name, "ms": ms, "ratio": ratio(times, name, base), "eager_ms": eager.get(name)}
        lines.append(line)
        host = f", eager {eager[name]:.3f} ms" if name in eager else ""
        print(f"  {name:28s} {ms:.3f} ms {line['ratio']:.3f}x{host}")
    return lines


def training(
    hidden: Tensor, weight: Tensor, drawn: SampleOutput, program: SamplingProgram
) -> dict[str, Callable[[], Any]]:
    """Forward and backward of both operands, with and without a given cut."""
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    upstream = torch.randn(len(hidden), device="cuda")
    under = {"sampling": program, "cut": drawn.cut}
    kept = {"grad_options": vs.GradOptions(save_logits_budget="auto")}

    def both(**options: Any) -> Callable[[], Any]:
        def call() -> Any:
            logp = vs.linear_logp(*leaves, drawn.token, **options)
            return torch.autograd.grad(logp, leaves, upstream)

        return call

    temperature = {"temperature": program.temperature}
    return {
        "plain": both(), "temperature": both(**temperature), "cut given": both(**under), "plain, kept": both(**kept),
        "cut given, kept": both(**under, **kept),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=151936)
    parser.add_argument("--rows", default="1,8,16,32,64")
    parser.add_argument("--score-rows", type=int, default=4096)
    parser.add_argument("--spread", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    d, v = args.depth, args.columns
    weight = (torch.randn(v, d, device="cuda") * args.spread / d**0.5).bfloat16()
    across = weight.t()
    lines = []
    for n in map(int, args.rows.split(",")):
        hidden = torch.randn(n, d, device="cuda").bfloat16()
        keys, target = torch.arange(n, device="cuda"), torch.randint(0, v, (n,), device="cuda")
        calls: dict[str, Callable[[], Any]] = {"product": lambda h=hidden: torch.mm(h, across)}
        calls["linear_logp"] = lambda h=hidden, t=target: vs.linear_logp(h, weight, t)
        for name, program in PROGRAMS.items():
            calls[f"sample, {name}"] = lambda h=hidden, k=keys, p=program: vs.vocab_parallel_sample(
                h, weight, program=p, seed=1, row_keys=k
            )
        calls["linear_logp topk 20"] = lambda h=hidden, t=target: vs.linear_logp(h, weight, t, topk=20)
        eager = {name: eager_ms(call) for name, call in calls.items()}
        with torch.no_grad():
            found = milliseconds({name: graphed(call) for name, call in calls.items()}, args.rounds, gpu=True)
        lines += table(f"decode {n} x {d} x {v}", found, "product", eager)
    n = args.score_rows
    hidden, target = torch.randn(n, d, device="cuda").bfloat16(), torch.randint(0, v, (n,), device="cuda")
    program = PROGRAMS["top-p 0.95"]
    drawn = vs.vocab_parallel_sample(hidden, weight, program=program, seed=1)
    calls = {
        "product": lambda: torch.mm(hidden, across),
        "plain": lambda: vs.linear_logp(hidden, weight, target),
        "cut given": lambda: vs.linear_logp(hidden, weight, drawn.token, sampling=program, cut=drawn.cut),
        "cut found": lambda: vs.linear_logp(hidden, weight, drawn.token, sampling=program),
        "topk 20": lambda: vs.linear_logp(hidden, weight, target, topk=20),
    }
    for call in calls.values():
        call()
    with torch.no_grad():
        found = milliseconds(calls, max(args.rounds // 3, 5), gpu=True)
    lines += table(f"scoring {n} x {d} x {v}, {program.transforms}", found, "plain", {})
    calls = training(hidden, weight, drawn, program)
    for call in calls.values():
        call()
    found = milliseconds(calls, args.rounds, gpu=True)
    lines += table(f"forward and backward {n} x {d} x {v}, {program.transforms}", found, "plain", {})
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
