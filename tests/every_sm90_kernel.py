"""Launches every Hopper kernel of the forward and the fold once, on a small problem: for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/every_sm90_kernel.py

and the same with synccheck; racecheck, which is slow, in parts: `--paths rows128 --dtypes bf16`, then others.
"""

from __future__ import annotations

import argparse
import itertools

import torch

from vocabshard.dist.fold import fold
from vocabshard.kernels import sm90
from vocabshard.kernels.problem import LocalProblem

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", default="rows64,rows128,mma,fma")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="of all paths but fma")
    parser.add_argument("--rows", default="5,300,450")  # one block, clusters that share rows, that share columns
    args = parser.parse_args()
    torch.set_default_device("cuda")
    runs = 0
    for path in args.paths.split(","):
        dtypes = [torch.float32] if path == "fma" else [DTYPES[name] for name in args.dtypes.split(",")]
        for dtype, n, entropy in itertools.product(dtypes, map(int, args.rows.split(",")), (False, True)):
            # a tail of columns, a depth with one
            hidden, weight = torch.randn(n, 200).to(dtype), torch.randn(1000, 200).to(dtype)
            target = torch.randint(0, 1000, (n,))
            for everything in (False, True):
                bias, scale = (torch.randn(1000), torch.rand(n) + 0.5) if everything else (None, None)
                share = LocalProblem(0, 990, 5.0 if everything else None, entropy)
                x = (hidden, weight, bias, target, scale, share)
                records, _ = sm90.forward(*x, want_logits=everything, path=path)
                fold("sm90", torch.stack([records, records]), target, -100, 2000, "nan")
                runs += 1
            if path in ("rows128", "fma"):  # which this shape takes of itself: without records
                sm90.forward_rows(*x, -100, 2000, "nan")
    torch.cuda.synchronize()
    print(f"{runs} forwards and folds ran")


if __name__ == "__main__":
    main()
