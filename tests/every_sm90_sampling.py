"""Launches every Hopper kernel of sampling, the best columns and the backward under a cut once, on small problems: for
compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/every_sm90_sampling.py

and the same with synccheck and racecheck (`--rows 5`, which is faster).
"""

from __future__ import annotations

import argparse
import itertools

import torch

import vocabshard as vs
from vocabshard.sampling import SamplingProgram

PROGRAMS = (
    SamplingProgram.of(temperature=0.8),
    SamplingProgram.of(temperature=0.8, top_k=50),
    SamplingProgram.of(temperature=0.8, top_p=0.95),
    SamplingProgram.of(0.8, 0.01, 50, 0.95),
    SamplingProgram.of(0.8, 0.01, 0, 0.95),
    SamplingProgram.of(temperature=0.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,5,70,300")  # few rows, more than a block, beside the forward
    parser.add_argument("--columns", default="1003,8004")  # odd rows, rows on 16 bytes
    args = parser.parse_args()
    torch.set_default_device("cuda")
    runs = 0
    for n, v in itertools.product(map(int, args.rows.split(",")), map(int, args.columns.split(","))):
        hidden, weight = torch.randn(n, 64).bfloat16(), torch.randn(v, 64).bfloat16()
        target = torch.randint(0, v, (n,))
        for program in PROGRAMS:
            drawn = vs.vocab_parallel_sample(hidden, weight, program=program, seed=7, topk=5, backend="sm90")
            h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            vs.linear_logp(h, w, drawn.token, sampling=program, cut=drawn.cut, backend="sm90").sum().backward()
            vs.linear_logp(hidden, weight, target, sampling=program, backend="sm90")
            vs.vocab_parallel_sample(hidden, weight, program=program, seed=7, backend="sm90")
            runs += 4
        vs.linear_logp(hidden, weight, target, topk=20, backend="sm90")
        runs += 1
    # so many columns that the forward leaves time for a grid beside it; three tiles a CTA (docs/testing.md: racecheck)
    for n in (1, 5, 70):
        hidden, weight = torch.randn(n, 64).bfloat16(), torch.randn(60000, 64).bfloat16()
        vs.vocab_parallel_sample(hidden, weight, program=PROGRAMS[2], seed=7, backend="sm90")
        vs.vocab_parallel_sample(5 * hidden, weight, program=PROGRAMS[2], seed=7, backend="sm90")
        runs += 2
    torch.cuda.synchronize()
    print(f"{runs} calls ran")


if __name__ == "__main__":
    main()
