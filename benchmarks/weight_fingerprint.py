"""How long the fingerprint of a head takes, beside a copy of it on the same device.

    python benchmarks/weight_fingerprint.py [--rows 151936] [--depth 4096] [--rounds 20]

The fingerprint reads the weight once; a copy reads and writes it, twice as many bytes. Medians of interleaved rounds.
"""

from __future__ import annotations

import argparse

import torch

from vocabshard.kernels.fingerprint import local_sum
from vocabshard.testing.timing import medians, milliseconds


def main() -> None:
    """Prints a line: times, bytes a second, and the share of the copy's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=151936)
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    weight = torch.randn(args.rows, args.depth, device=device).bfloat16()
    copy = torch.empty_like(weight)
    calls = {"fingerprint": lambda: local_sum(weight, 0), "copy": lambda: copy.copy_(weight)}
    milliseconds(calls, 2, gpu=device.type == "cuda")
    found = medians(milliseconds(calls, args.rounds, gpu=device.type == "cuda"))
    ours, copied = found["fingerprint"] / 1e3, found["copy"] / 1e3
    size = weight.numel() * weight.element_size()
    print(
        f"{args.rows} x {args.depth} bf16: fingerprint {ours * 1e3:.3f} ms, {size / ours / 1e9:.0f} GB/s; copy "
        f"{copied * 1e3:.3f} ms, {2 * size / copied / 1e9:.0f} GB/s; share {copied / ours / 2:.2f}"
    )


if __name__ == "__main__":
    main()
