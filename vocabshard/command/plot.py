"""Pictures of scores: log-probs token by token, and the distribution of the ratios of two runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vocabshard.command.errors import InputError, require
from vocabshard.command.records import as_float, read_scores

STRIP_COLUMNS = 200


def plot_scores(scores: Path, path: Path) -> None:
    """A strip of the tokens in order, coloured by logp, line by line; and a histogram of logp."""
    read = read_scores(scores)
    logp = [as_float(bits[0]) for bits in read.bits]
    finite = [value for value in logp if math.isfinite(value)]
    columns = min(STRIP_COLUMNS, len(logp))
    grid = [logp[start : start + columns] for start in range(0, len(logp), columns)]
    grid[-1] = grid[-1] + [math.nan] * (columns - len(grid[-1]))

    figure, (strip, histogram) = _figure(2, 2.5 + min(6.0, 0.12 * len(grid)))
    image = strip.imshow(
        grid, aspect="auto", cmap="viridis", interpolation="nearest", extent=(0, columns, len(grid) * columns, 0)
    )
    strip.set(title=f"{len(logp)} tokens of {read.header['text']['name']}", xlabel="token of the line", ylabel="token")
    figure.colorbar(image, ax=strip, label="logp [nats]")
    histogram.hist(finite, bins=60)
    mean = f", mean {sum(finite) / len(finite):.4g}" if finite else ""
    histogram.set(xlabel=f"logp [nats]{mean}; {len(logp) - len(finite)} not finite", ylabel="tokens")
    _save(figure, path)


def plot_ratios(log_ratios: Sequence[float], path: Path, title: str) -> None:
    """How many tokens have which ratio of probabilities; the count on a logarithmic scale, so that one token shows."""
    figure, (histogram,) = _figure(1, 3.5)
    finite = [value for value in log_ratios if math.isfinite(value)]
    largest = max(map(abs, finite), default=0.0)
    span = largest or 1e-7  # all ratios 1: one bar in the middle
    histogram.hist(finite, bins=61, range=(-span, span), log=True)
    equal = sum(value == 0 for value in finite)
    histogram.set(
        title=title,
        xlabel=f"log ratio of the probabilities, B to A [nats]; {equal} of {len(log_ratios)} exactly 0, "
        f"{len(log_ratios) - len(finite)} not finite",
        ylabel="tokens",
    )
    _save(figure, path)


def plot_ladder(result: dict[str, Any], path: Path) -> None:
    """Shares of rows that differ, ours and an ordinary log_softmax's; and the RL run, step by step."""
    rungs, rl = result["rungs"], result["rl"]
    figure, axes = _figure(3 if rl else 1, 3.0)
    places = range(len(rungs))
    for offset, name, prefix in ((-0.2, "vocabshard", ""), (0.2, "ordinary log_softmax", "ordinary_")):
        shares = [rung[f"{prefix}differing"] / max(1, rung[f"{prefix}rows"]) for rung in rungs]
        axes[0].barh([place + offset for place in places], shares, height=0.35, label=name)
    names = [f"{rung['level']}: {rung['differing']} of {rung['rows']} rows" for rung in rungs]
    axes[0].set_yticks(list(places), names)
    axes[0].invert_yaxis()
    speed = result["speed"]
    decode = ", ".join(f"{rate:.0f} at {batch}" for batch, rate in speed["decode_tokens_per_s"].items())
    axes[0].set(
        title=f"{result['contract']} on {result['device']}\nhead D {speed['D']}, V {speed['V']}: scoring "
        f"{speed['score_rows']} rows {speed['score_seconds'] * 1e3:.3g} ms\ndecode tokens/s by batch: {decode}",
        xlabel="share of rows that differ",
    )
    axes[0].legend()
    if rl:
        steps = [step["step"] for step in rl["steps"]]
        axes[1].plot(steps, [step["k3_max"] for step in rl["steps"]], label="vocabshard")
        axes[1].plot(steps, [step["ordinary_k3_max"] for step in rl["steps"]], label="ordinary log_softmax")
        axes[1].set_yscale("symlog", linthresh=1e-16)
        axes[1].set(xlabel="step of the RL run", ylabel="largest K3 before the update")
        axes[1].legend()
        axes[2].plot(steps, [step["reward"] for step in rl["steps"]])
        axes[2].set(xlabel="step of the RL run", ylabel="mean reward")
    _save(figure, path)


def _figure(rows: int, height: float) -> tuple[Any, Sequence[Any]]:
    """A figure without a window system, and its axes from top to bottom."""
    require("matplotlib", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height + 1.5 * (rows - 1)), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, 1, squeeze=False)[:, 0])


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise InputError(f"--plot {path}: cannot be written: {error.strerror}") from error
