"""What truncations and draws need of a block of logits, in torch operations: any device, the bytes of csrc/sampling.h.

Every function takes fp32 logits [N, V_local] before temperature, of which problem.valid leading columns count, and some
take scale (None, a float, or fp32 [N]): y = z * scale. docs/operators/sampling.md says what each has to compute; a
backend's kernels take their place where it has them (`functions`). They hold several tensors of the block's size.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from vocabshard import sampling as S
from vocabshard.contract import EXP_COEFFICIENTS, LOG2E, LOGIT_LIMIT
from vocabshard.kernels.problem import LocalProblem

F32, F64, I64 = torch.float32, torch.float64, torch.int64
WORD = 0xFFFFFFFF
RAN_TORCH = "torch operations"
FUNCTIONS = ("maxima", "histogram", "floor", "equal", "draw", "best", "before")


@functools.cache
def functions(module: ModuleType) -> SimpleNamespace:
    """The functions of this file by name, a backend module's own where it has them; `ran` says whose they are."""
    here = sys.modules[__name__]
    name = module.__name__.rpartition(".")[2]
    found, own = {}, 0
    for function in FUNCTIONS:
        kernel = getattr(module, f"sampling_{function}", None)
        own += kernel is not None
        found[function] = kernel or getattr(here, f"sampling_{function}")
    found["rows"] = getattr(module, "sampling_rows", None)  # everything about whole rows in one launch
    ran = name if own == len(FUNCTIONS) else f"{name}, {RAN_TORCH}" if own else RAN_TORCH
    return SimpleNamespace(ran=ran, **found)


def scaled(z: Tensor, scale: float | Tensor | None) -> Tensor:
    """y [N, ...] of z [N, ...]."""
    if scale is None:
        return z
    return z * (scale.view(-1, *[1] * (z.dim() - 1)) if isinstance(scale, Tensor) else scale)


def fma(a: Tensor, b: Tensor, c: Tensor | float) -> Tensor:
    """fp32 a * b + c with one rounding, by way of fp64: an inexact sum is made odd before it is rounded again."""
    product = a.to(F64) * b.to(F64)
    addend = torch.as_tensor(c, dtype=F32, device=a.device).to(F64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    word = total.contiguous().view(I64)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where(torch.isfinite(total) & (error != 0) & ((word & 1) == 0), word + step, word)
    return odd.view(F64).to(F32)


def exp_split(y: Tensor) -> tuple[Tensor, Tensor]:
    """e^y = p * 2^k of fp32 y, clamped at -2^20: (k int64, p fp32)."""
    y = torch.where(y < -LOGIT_LIMIT, -LOGIT_LIMIT, y)
    product = y.to(F64) * LOG2E  # exact
    k = torch.round(torch.where(torch.isfinite(product), product, 0.0).clamp(-(2.0**40), 2.0**40))
    f = (product - k).to(F32)
    p = torch.full_like(f, EXP_COEFFICIENTS[-1])
    for coefficient in reversed(EXP_COEFFICIENTS[:-1]):
        p = fma(p, f, coefficient)
    return k.to(I64), fma(p, f, 1.0)


def exp_k(y: Tensor) -> Tensor:
    """The k alone, int32."""
    product = y.to(F64).clamp(-LOGIT_LIMIT, LOGIT_LIMIT) * LOG2E
    return torch.round(torch.where(torch.isnan(product), 0.0, product)).to(torch.int32)


def _ids(logits: Tensor, problem: LocalProblem) -> Tensor:
    return torch.arange(problem.vocab_start, problem.vocab_start + problem.valid, device=logits.device)


def _places(logits: Tensor, problem: LocalProblem) -> Tensor:
    return S.place_of(logits[:, : problem.valid], _ids(logits, problem))


def sampling_maxima(logits: Tensor, problem: LocalProblem) -> Tensor:
    """int64 [N]: the best place; 2^63 - 1 in a row with NaN, -2^63 where there is no column."""
    rows = logits.shape[0]
    if problem.valid == 0:
        return torch.full((rows,), S.KEEP_ALL, dtype=I64, device=logits.device)
    nan = torch.isnan(logits[:, : problem.valid]).any(1)
    return torch.where(nan, S.NO_ARRIVAL, _places(logits, problem).amax(1))


def sampling_histogram(
    logits: Tensor,
    problem: LocalProblem,
    scale: float | Tensor | None,
    k_max: Tensor,
    cut: Tensor,
    prefix: Tensor,
    level: int,
    want_mass: bool,
) -> Tensor:
    """int64 [2, N, bins], counts and masses by digit; [1, N, bins] without masses. k_max int32, others int64 [N]."""
    shift, width = S.RADIX[level]
    z = logits[:, : problem.valid]
    u = S.order_of(z) + (1 << 31)
    counted = ((u >> (shift + width)) == prefix[:, None]) & ~S.left_out(z, problem.vocab_start, cut)
    bins = (u >> shift) & ((1 << width) - 1)
    out = torch.zeros(1 + want_mass, logits.shape[0], 1 << width, dtype=I64, device=logits.device)
    out[0].scatter_add_(1, bins, counted.to(I64))
    if want_mass:
        out[1].scatter_add_(1, bins, torch.where(counted, masses(scaled(z, scale), k_max), 0))
    return out


def masses(y: Tensor, k_max: Tensor) -> Tensor:
    """int64 as y [N, V]."""
    k, p = exp_split(y)
    n = k - k_max[:, None]
    usable = (y > float("-inf")) & (n >= -S.MASS_SPAN) & (n <= 0)
    exponent = torch.where(usable, n, 0) + S.MASS_BITS
    value = p.to(F64) * ((exponent + 1023) << 52).view(F64)
    return torch.where(usable, torch.round(torch.where(usable, value, 0.0)), 0.0).to(I64)


def sampling_floor(logits: Tensor, problem: LocalProblem, scale: float | Tensor | None, threshold: Tensor) -> Tensor:
    """int64 [N]: the smallest order of the columns with y >= threshold fp32 [N]; 2^31 - 1 where there is none."""
    if problem.valid == 0:
        return torch.full((logits.shape[0],), S.EVERY_TIE, dtype=I64, device=logits.device)
    z = logits[:, : problem.valid]
    return torch.where(scaled(z, scale) >= threshold[:, None], S.order_of(z), S.EVERY_TIE).amin(1)


def sampling_equal(logits: Tensor, problem: LocalProblem, order: Tensor, nth: Tensor) -> Tensor:
    """int64 [N]: the id of the nth column of that order, from 1; -1 where there are fewer, or nth < 1."""
    if problem.valid == 0:
        return torch.full((logits.shape[0],), -1, dtype=I64, device=logits.device)
    equal = S.order_of(logits[:, : problem.valid]) == order[:, None]
    this = equal & (equal.cumsum(1) == nth[:, None])
    return torch.where(this, _ids(logits, problem), -1).amax(1)


def sampling_draw(
    logits: Tensor, problem: LocalProblem, scale: float | Tensor | None, cut: Tensor, seed: int, row_keys: Tensor
) -> Tensor:
    """int64 [3, N]: arrival (2^63 - 1: none), id (-1: none) and order of the column whose clock goes off first."""
    rows = logits.shape[0]
    if problem.valid == 0:
        none = torch.full((3, rows), S.NO_ARRIVAL, dtype=I64, device=logits.device)
        none[1], none[2] = -1, S.order_of(torch.tensor(float("-inf"))).item()
        return none
    z = logits[:, : problem.valid]
    races = ~torch.isneginf(z) & ~S.left_out(z, problem.vocab_start, cut)
    k, p = exp_split(scaled(z, scale))
    q = clocks(_ids(logits, problem), seed, row_keys) / p
    arrival = q.view(torch.int32).to(I64) - (k << 23)
    arrival = torch.where(races, arrival, S.NO_ARRIVAL)
    best = arrival.amin(1)
    ids = torch.where(arrival == best[:, None], _ids(logits, problem), S.EVERY_TIE).amin(1)
    some = best != S.NO_ARRIVAL
    column = torch.where(some, ids - problem.vocab_start, 0)
    winner = torch.where(some, z.gather(1, column[:, None])[:, 0], float("-inf"))
    return torch.stack([best, torch.where(some, ids, -1), S.order_of(winner)])


def philox(counter: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    """Philox4x32-10 of four int64 tensors of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(S.PHILOX_ROUNDS):
        a, b = c0 * S.PHILOX[0], c2 * S.PHILOX[1]  # modulo 2^64, which is all that is read
        c0, c1 = ((b >> 32) & WORD) ^ c1 ^ k0, b & WORD
        c2, c3 = ((a >> 32) & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + S.PHILOX[2]) & WORD, (k1 + S.PHILOX[3]) & WORD
    return c0, c1, c2, c3


def random_words(ids: Tensor, tag: int, seed: int, row_keys: Tensor) -> Tensor:
    """int64 [N, V] of 32 bits each, for global ids int64 [V] and keys int64 [N]."""
    group = (ids >> 2)[None]
    low, high = (row_keys & WORD)[:, None], ((row_keys >> 32) & WORD)[:, None]
    words = philox((group + 0 * low, torch.full_like(low, tag), low, high), seed)
    lane = (ids & 3)[None]
    return torch.where(
        lane == 0, words[0], torch.where(lane == 1, words[1], torch.where(lane == 2, words[2], words[3]))
    )


def clocks(ids: Tensor, seed: int, row_keys: Tensor) -> Tensor:
    """E fp32 [N, V]."""
    x = random_words(ids, 0, seed, row_keys)
    return clock_of(x, random_words(ids, 1, seed, row_keys))


def clock_of(x: Tensor, second: Tensor) -> Tensor:
    """An exponential variable in units of 1 / ln 2 of 32-bit words in int64."""
    refined = x < S.SECOND_BELOW
    t = torch.where(refined, ((x << 32 | second).to(F32) + 0.5) * 2.0**-64, (x.to(F32) + 0.5) * 2.0**-32)
    early = _clock_series(t / (2.0 - t))
    b = ((WORD - x).to(F32) + 0.5).view(torch.int32)
    a = (b >> 23) - 127
    r = ((b & 0x7FFFFF) | 0x3F800000).view(F32)
    large = r > S.SQRT2_SINGLE
    r, a = torch.where(large, r * 0.5, r), a + large.int()
    late = (32 - a).to(F32) - _clock_series((r - 1.0) / (r + 1.0))
    return torch.where(x < 1 << 30, early, late)


def _clock_series(s: Tensor) -> Tensor:
    w = s * s
    value = torch.full_like(w, S.CLOCK_COEFFICIENTS[-1])
    for coefficient in reversed(S.CLOCK_COEFFICIENTS[:-1]):
        value = fma(value, w, coefficient)
    return s * value


def sampling_best(logits: Tensor, problem: LocalProblem, n: int) -> Tensor:
    """int64 [N, n]: the best places, descending, filled up with -2^63."""
    found = torch.full((logits.shape[0], n), S.KEEP_ALL, dtype=I64, device=logits.device)
    some = min(n, problem.valid)
    found[:, :some] = _places(logits, problem).topk(some, dim=1, sorted=True).values
    return found


def sampling_before(logits: Tensor, problem: LocalProblem, place: Tensor) -> Tensor:
    """int64 [N]: how many places are better than the given one."""
    return (_places(logits, problem) > place[:, None]).sum(1)
