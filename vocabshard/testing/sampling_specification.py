"""Cuts and draws as an executable specification: rows one by one, by sorting, in Python's integers.

Written from docs/operators/sampling.md, independent of the kernels: they must give the same integers. z is fp32 [N, V].
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from vocabshard.contract import LOGIT_LIMIT
from vocabshard.sampling import SamplingProgram
from vocabshard.testing.specification import clamp_logit, exp_split, f32, fma

KEEP_ALL = -(2**63)
INF = float("inf")


def order(z: float) -> int:
    """Ascending with z."""
    (s,) = struct.unpack("<i", struct.pack("<f", z + 0.0))
    return s if s >= 0 else s ^ 0x7FFFFFFF


def place(z: float, v: int) -> int:
    """Larger is better."""
    return order(z) * 2**32 + 0x7FFFFFFF - v


def masses(y: Tensor, best: float) -> list[int]:
    """Of one row fp32 [V]."""
    k, p = exp_split(clamp_logit(torch.cat([y, torch.tensor([best])])))
    k_max = int(k[-1])
    found = []
    for value, power, mantissa in zip(y.tolist(), k.tolist(), p.tolist(), strict=False):
        exact = math.ldexp(mantissa, power - k_max + 40) if power - k_max >= -64 else 0.0  # a product of 24 bits
        found.append(0 if value == -INF else round(exact))
    return found


def usable(z: list[float], scales: list[float]) -> bool:
    """Whether a row has a distribution that the softmax layer can take, at every scale."""
    best = max(z, default=-INF) if not any(math.isnan(v) for v in z) else math.nan
    if not math.isfinite(best):
        return False
    of_scales = [float(f32(best, torch.empty(0)) * scale) for scale in scales]
    return all(-LOGIT_LIMIT < y <= LOGIT_LIMIT for y in of_scales)


def scales_of(scale: float, program: SamplingProgram) -> list[float]:
    """All that y has in a program."""
    return [scale] if all(step.scaled for step in program.steps) else [scale, 1.0]


def cut_of_row(z: Tensor, scale: float, program: SamplingProgram) -> int:
    """The place of the last kept column of z fp32 [V]; equals of it that are all kept make the low word 0."""
    values = z.tolist()
    steps = program.steps
    if not steps or not usable(values, scales_of(scale, program)):
        return KEEP_ALL
    best_first = sorted(range(len(values)), key=lambda v: -place(values[v], v))
    kept = best_first
    cut = KEEP_ALL
    for kind, number, scaled in steps:
        y = z * (scale if scaled else 1.0)
        best = float(y[best_first[0]])
        if kind == "greedy":
            last, whole = best_first[0], False
        elif kind == "top_k":
            last, whole = best_first[min(int(number), len(best_first)) - 1], True
        elif kind == "min_p":
            threshold = float(torch.tensor(best + number, dtype=torch.float64).float())
            last, whole = [v for v in best_first if float(y[v]) >= threshold][-1], True
        else:
            mass = masses(y, best)
            total = sum(mass[v] for v in kept)
            above = 0
            for last in kept:
                above += mass[last]
                if above * 2**30 >= int(number) * total:
                    break
            equals = [v for v in kept if order(values[v]) == order(values[last])]
            whole = last == equals[-1]
        found = place(values[last], last)
        if whole:
            found -= found % 2**32
        cut = max(cut, found)
        kept = [v for v in kept if place(values[v], v) >= cut]
    return cut


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def word(v: int, tag: int, seed: int, row: int) -> int:
    """32 random bits of column v."""
    seed, row = seed % 2**64, row % 2**64
    return philox([v // 4, tag, row % 2**32, row // 2**32], [seed % 2**32, seed // 2**32])[v % 4]


def series(s: Tensor) -> Tensor:
    """-log2((1 - s) / (1 + s))."""
    w = s * s
    coefficients = [f32(2 / ((2 * i + 1) * math.log(2)), s) for i in range(5)]
    value = coefficients[4].expand_as(s)
    for i in range(3, -1, -1):
        value = fma(value, w, coefficients[i])
    return s * value


def clock(x: int, second: int) -> Tensor:
    """E of a column, fp32."""
    half = torch.tensor(0.5)
    if x < 2**30:
        whole, exponent = (x * 2**32 + second, -64) if x < 256 else (x, -32)
        t = (torch.tensor(whole).float() + half) * torch.tensor(2.0**exponent)
        return series(t / (torch.tensor(2.0) - t))
    f = torch.tensor(2**32 - 1 - x).float() + half
    mantissa, a = torch.frexp(f)
    r, a = mantissa * 2, a - 1
    if r > torch.tensor(2.0).sqrt():
        r, a = r * 0.5, a + 1
    return (32 - a).float() - series((r - 1.0) / (r + 1.0))


def racers(z: Tensor, scale: float, cut: int, seed: int, row: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """(arrival, id) of the columns that race; a column's id is its index and `first`."""
    k, p = exp_split(clamp_logit(z * scale))
    for i, value in enumerate(z.tolist()):
        v = first + i
        if value == -INF or place(value, v) < cut:
            continue
        q = clock(word(v, 0, seed, row), word(v, 1, seed, row)) / p[i]
        (bits,) = struct.unpack("<i", struct.pack("<f", float(q)))
        yield bits - int(k[i]) * 2**23, v


def token(z: Tensor, scale: float, program: SamplingProgram, seed: int, row: int) -> int:
    """The column drawn of z fp32 [V]; -1 where there is no distribution."""
    if not usable(z.tolist(), scales_of(scale, program)):
        return -1
    cut = cut_of_row(z, scale, program)
    return min(racers(z, scale, cut, seed, row), default=(0, -1))[1]
