"""How long calls take beside each other: shuffled, interleaved rounds, and ratios within a round.

A machine warms up and is shared: two times are compared only where both were taken within one round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
Times = dict[str, list[float]]  # milliseconds by name and round


def milliseconds(calls: Mapping[str, Call], rounds: int, *, gpu: bool, before: Call | None = None) -> Times:
    """Times of each call by round; within a round the order is shuffled.

    On a GPU by its own clock, the host ahead of it: of a whole round, or, where `before` is given, of that. `before`
    runs untimed ahead of each call (and empties caches, or makes anew what a call overwrites).
    """
    names = list(calls)
    times: Times = {name: [] for name in names}
    for _ in range(rounds):
        random.shuffle(names)
        for name, taken in (_on_gpu if gpu else _on_host)(calls, names, before).items():
            times[name].append(taken)
    return times


def _on_host(calls: Mapping[str, Call], names: list[str], before: Call | None) -> dict[str, float]:
    taken = {}
    for name in names:
        if before is not None:
            before()
        begin = time.perf_counter()
        calls[name]()
        taken[name] = 1e3 * (time.perf_counter() - begin)
    return taken


def _on_gpu(calls: Mapping[str, Call], names: list[str], before: Call | None) -> dict[str, float]:
    events = {name: (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for name in names}
    if before is None:
        torch.cuda._sleep(2_000_000)
    for name in names:
        if before is not None:
            before()
        events[name][0].record()
        calls[name]()
        events[name][1].record()
    torch.cuda.synchronize()
    return {name: begin.elapsed_time(end) for name, (begin, end) in events.items()}


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Of each name's rounds."""
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(times: Mapping[str, Sequence[float]], name: str, to: str) -> float:
    """The median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(times[name], times[to], strict=True))


def peak_bytes(call: Call, *, gpu: bool) -> int | None:
    """Of the allocator, beyond what is there before, results included; None on the CPU, where nothing counts them."""
    if not gpu:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before
