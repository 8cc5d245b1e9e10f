"""Errors of the softmax layer against mpmath (40 digits): exp, logp, lse, entropy, beside torch's fp32 log_softmax.

    python benchmarks/accuracy.py --rows 40 --columns 2000

Rows are N(0, s) logits plus an offset, the target drawn uniformly, or the largest logit. Errors of logp and lse are in
ulp of the exact value and absolute, those of entropy absolute. Prints a Markdown table.
"""

from __future__ import annotations

import argparse

import mpmath
import torch

import vocabshard as vs
from vocabshard import contract
from vocabshard.testing import specification


def ulp(x: mpmath.mpf) -> float:
    t = torch.tensor(abs(float(x)), dtype=torch.float32)
    return float(torch.nextafter(t, torch.tensor(float("inf"))) - t)


def exact(values: list[float], target: int) -> tuple[mpmath.mpf, mpmath.mpf, mpmath.mpf]:
    y = [mpmath.mpf(v) for v in values]
    top = max(y)
    terms = [mpmath.exp(v - top) for v in y]
    total = mpmath.fsum(terms)
    log_total = mpmath.log(total)
    mean = mpmath.fsum(t * (v - top) for t, v in zip(terms, y, strict=True)) / total
    return y[target] - top - log_total, top + log_total, log_total - mean


def exp_error(samples: int) -> float:
    """Largest error in ulp of the polynomial against 2^(y c - k), y over +-20 and +-2^20."""
    g = torch.Generator().manual_seed(0)
    y = torch.cat([torch.rand(samples, generator=g) * 40 - 20, (torch.rand(samples, generator=g) * 2 - 1) * 2.0**20])
    k, p = specification.exp_split(y)
    c = mpmath.mpf(contract.LOG2E)
    exact_terms = (mpmath.mpf(2) ** (mpmath.mpf(v) * c - n) for v, n in zip(y.tolist(), k.tolist(), strict=True))
    return max(float(abs(q - e)) / ulp(e) for q, e in zip(p.tolist(), exact_terms, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--columns", type=int, default=2000)
    parser.add_argument("--exp-samples", type=int, default=100_000)
    args = parser.parse_args()
    mpmath.mp.dps = 40
    print(f"exp: {exp_error(args.exp_samples):.3f} ulp over {2 * args.exp_samples} samples\n")
    print("| logits | target | logp ulp | logp abs | torch logp abs | lse ulp | entropy abs |")
    print("|---|---|---|---|---|---|---|")
    for scale, offset in ((1, 0), (4, 0), (20, 0), (4, 1e2), (4, 1e4), (4, 1e5), (4, 1e6)):
        g = torch.Generator().manual_seed(1)
        logits = torch.randn(args.rows, args.columns, generator=g) * scale + offset
        for kind in ("drawn", "largest"):
            drawn = torch.randint(0, args.columns, (args.rows,), generator=g)
            target = drawn if kind == "drawn" else logits.argmax(1)
            out = vs.batch_invariant_logp(logits, target, return_lse=True, return_entropy=True)
            theirs = torch.log_softmax(logits, 1).gather(1, target[:, None])[:, 0]
            worst = [0.0] * 5
            for i in range(args.rows):
                logp, lse, entropy = exact(logits[i].tolist(), int(target[i]))
                error = abs(float(out.logp[i]) - logp)
                found = (
                    error / ulp(logp),
                    error,
                    abs(float(theirs[i]) - logp),
                    abs(float(out.lse[i]) - lse) / ulp(lse),
                    abs(float(out.entropy[i]) - entropy),
                )
                worst = [max(a, float(b)) for a, b in zip(worst, found, strict=True)]
            cells = f"{worst[0]:.2f} | {worst[1]:.1e} | {worst[2]:.1e} | {worst[3]:.2f} | {worst[4]:.1e}"
            print(f"| N(0, {scale}) + {offset:g} | {kind} | {cells} |")


if __name__ == "__main__":
    main()
