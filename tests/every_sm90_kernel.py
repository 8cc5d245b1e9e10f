"""Launches every Hopper kernel of the forward and the fold once, on a small problem: for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/every_sm90_kernel.py

and the same with racecheck and synccheck.
"""

from __future__ import annotations

import itertools

import torch

from vocabshard.dist.fold import fold
from vocabshard.kernels import sm90
from vocabshard.kernels.problem import LocalProblem


def main() -> None:
    torch.set_default_device("cuda")
    runs = 0
    for path, dtype in (
        *itertools.product(("rows64", "rows128", "mma"), (torch.bfloat16, torch.float16)),
        ("fma", None),
    ):
        # one block of rows, clusters that share rows, clusters that share columns; a tail of columns, a depth with one
        for n, entropy in itertools.product((5, 300, 450), (False, True)):
            hidden = torch.randn(n, 200).to(dtype or torch.float32)
            weight = torch.randn(1000, 200).to(dtype or torch.float32)
            target = torch.randint(0, 1000, (n,))
            for everything in (False, True):
                bias, scale = (torch.randn(1000), torch.rand(n) + 0.5) if everything else (None, None)
                share = LocalProblem(0, 990, 5.0 if everything else None, entropy)
                records, _ = sm90.forward(hidden, weight, bias, target, scale, share, want_logits=everything, path=path)
                fold("sm90", torch.stack([records, records]), target, -100, 2000, "nan")
                runs += 1
    torch.cuda.synchronize()
    print(f"{runs} forwards and folds ran")


if __name__ == "__main__":
    main()
