"""Compares two loss curves that train.py wrote: `python examples/train/curves.py A B [--plot FILE.png]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def read(path: Path) -> list[float]:
    """The losses in the order of the steps."""
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Both curves, and under them their difference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        above.plot(losses, style, label=name)
    above.set(ylabel="loss [nats]")
    above.legend()
    a, b = curves.values()
    below.plot([y - x for x, y in zip(a, b, strict=True)], color="black", linewidth=0.8)
    below.set(xlabel="step", ylabel="difference")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Prints the largest difference of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path, metavar="A")
    parser.add_argument("second", type=Path, metavar="B")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    a, b = read(args.first), read(args.second)
    if len(a) != len(b):
        raise SystemExit(f"expected curves of one length, got {len(a)} steps in A and {len(b)} in B")
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    print(
        f"{len(a)} steps, {sum(d == 0 for d in differences)} the same bytes, largest difference {max(differences):.3g} "
        f"(of losses {min(a):.4g} to {max(a):.4g})"
    )
    if args.plot is not None:
        plot({args.first.name: a, args.second.name: b}, args.plot)


if __name__ == "__main__":
    main()
