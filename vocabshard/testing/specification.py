"""The softmax layer as an executable specification in plain torch operations, any device.

Written from the contract's text, independent of the kernels: they must equal it byte for byte. It is slow, holds
several [N, V] tensors, and is a test module, not a backend. y is fp32 [N, V] after bias, soft-cap and temperature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabshard import contract as C
from vocabshard.partials import FoldedRows, new_records

F32, F64, I32, I64 = torch.float32, torch.float64, torch.int32, torch.int64
INF = float("inf")


def f32(value: float, like: Tensor) -> Tensor:
    """An fp32 scalar on the device of `like`."""
    return torch.tensor(value, dtype=F32, device=like.device)


def bits_of(x: Tensor) -> Tensor:
    """Bit pattern of an fp32 tensor as a non-negative int64."""
    return x.contiguous().view(I32).to(I64) & 0xFFFFFFFF


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fp32 a * b + c with one rounding: exact fp64 product, TwoSum, round to odd, then to fp32."""
    a, b, c = torch.broadcast_tensors(a, b, c)
    product, addend = a.to(F64) * b.to(F64), c.to(F64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    finite = torch.isfinite(total)
    word = total.contiguous().view(I64)
    # an inexact sum with an even last bit moves one step towards the error: the last bit becomes odd, sticky
    toward = torch.where((error > 0) == (total > 0), word + 1, word - 1)
    inexact = finite & (error != 0) & ((word & 1) == 0)
    return torch.where(inexact, toward, word).view(F64).to(F32)


def fma_chain(hidden: Tensor, weight: Tensor) -> Tensor:
    """The projection `fma-chain`: fp32 [N, V], one accumulator from +0 over ascending k."""
    h, w = hidden.to(F32), weight.to(F32)
    acc = torch.zeros(h.shape[0], w.shape[0], dtype=F32, device=h.device)
    for k in range(h.shape[1]):
        acc = fma(h[:, k, None], w[None, :, k], acc)
    return acc


def exp_split(y: Tensor) -> tuple[Tensor, Tensor]:
    """e^y = p * 2^k: (k int64, p fp32) for |y| <= 2^20."""
    c, magic = f32(C.LOG2E, y), f32(C.MAGIC, y)
    kf = fma(y, c, magic) - magic
    f = fma(y, c, -kf)
    p = f32(C.EXP_COEFFICIENTS[-1], y).expand_as(f)
    for coefficient in reversed(C.EXP_COEFFICIENTS[:-1]):
        p = fma(p, f, f32(coefficient, y))
    return kf.to(I64), fma(p, f, f32(1.0, y))


def clamp_logit(y: Tensor) -> Tensor:
    """Finite logits below -2^20 count as -2^20; so does -inf here."""
    return torch.where(y < -C.LOGIT_LIMIT, f32(-C.LOGIT_LIMIT, y), y)


def softcap(z: Tensor, cap: float) -> Tensor:
    """cap * tanh(z / cap), fp32; infinities and NaN pass."""
    capped = f32(cap, z)
    u = torch.where(torch.isfinite(z), z / capped, f32(0.0, z))
    a, u2 = u.abs(), u * u
    t1, t2, t3 = (f32(t, z) for t in C.TANH_COEFFICIENTS)
    small = fma(u * u2, fma(fma(t3, u2, t2), u2, t1), u)
    limited = torch.minimum(a, f32(C.TANH_ONE, z))
    k, p = exp_split(limited + limited)
    exp = torch.ldexp(p.to(F64), k).to(F32)
    one = f32(1.0, z)
    large = torch.copysign(one - f32(2.0, z) / (one + exp), u)
    return torch.where(torch.isfinite(z), capped * torch.where(a < C.TANH_SMALL, small, large), z)


def tree16(terms: Tensor) -> Tensor:
    """Adjacent-pairwise balanced fp32 sum over the last dimension, 16 wide."""
    while terms.shape[-1] > 1:
        terms = terms[..., 0::2] + terms[..., 1::2]
    return terms[..., 0]


def limbs_of(mantissa: Tensor, exponent: Tensor) -> tuple[Tensor, list[Tensor]]:
    """mantissa * 2^exponent (mantissa < 2^53) as (position of the lowest limb, three 32-bit limbs)."""
    position, r = exponent >> 5, exponent & 31
    low = mantissa & 0xFFFFFFFF
    high = mantissa >> 32
    a = low << r
    b = (high << r) + (a >> 32)
    return position, [a & 0xFFFFFFFF, b & 0xFFFFFFFF, b >> 32]


def counters(mantissa: Tensor, exponent: Tensor, sign: Tensor, top: Tensor) -> list[Tensor]:
    """Sums over the last dimension of what falls on positions top, top - 1, top - 2; top [N], others [N, T]."""
    position, limbs = limbs_of(mantissa, exponent)
    sums = []
    for i in range(C.LIMBS):
        total = torch.zeros_like(top)
        for j, limb in enumerate(limbs):
            here = position + j == top[:, None] - i
            total = total + torch.where(here, sign * limb, torch.zeros_like(limb)).sum(-1)
        sums.append(total)
    return sums


def poisoned(maximum: Tensor) -> Tensor:
    """Whether a row's maximum makes its results NaN: NaN, or above 2^20."""
    return ~(maximum <= C.LOGIT_LIMIT)


def k_of_max(maximum: Tensor) -> Tensor:
    """The integer k of a maximum; EMPTY_K where it is not finite or poisons the row."""
    finite = torch.isfinite(maximum) & ~poisoned(maximum)
    k, _ = exp_split(clamp_logit(torch.where(finite, maximum, torch.zeros_like(maximum))))
    return torch.where(finite, k, torch.full_like(k, C.EMPTY_K))


def partials(y: Tensor, target_local: Tensor, entropy: bool, K_rise: int = 0) -> Tensor:
    """Records int64 [R, N] of y fp32 [N, V]; target_local int64 [N], outside [0, V) where the target is elsewhere.

    K_rise > 0 scales every tile by a K that much above its own largest k, but never above the row's: the contract
    says that the kept bits are the same (not with entropy, which fixes K).
    """
    rows, columns = y.shape
    records = new_records(rows, entropy, y.device)
    if columns == 0:
        y = y.new_full((rows, 1), -INF)
        columns = 1
    pad = -columns % C.TILE
    y = torch.cat([y, y.new_full((rows, pad), -INF)], 1)
    tiles = y.view(rows, -1, C.TILE)
    maximum = y.amax(1) + 0.0  # keeps NaN; -0 becomes +0
    poison = poisoned(maximum)
    k_max = k_of_max(maximum)

    finite = tiles > -INF
    safe = clamp_logit(torch.where(finite & (tiles <= C.LOGIT_LIMIT), tiles, torch.zeros_like(tiles)))
    k, p = exp_split(safe)
    lowest = torch.full_like(k, 2 * C.EMPTY_K)
    K = torch.where(finite, k, lowest).amax(-1, keepdim=True)
    occupied = K > C.EMPTY_K
    K = torch.where(occupied, K, torch.zeros_like(K))
    if K_rise:
        K = torch.minimum(K + K_rise, torch.maximum(K, k_max[:, None, None]))
    n = k - K
    kept = finite & (n >= -C.SPAN)
    e = torch.where(kept, torch.ldexp(p.to(F64), torch.where(kept, n + C.SCALE, n * 0)).to(F32), torch.zeros_like(p))
    s = tree16(e)
    word = bits_of(s)
    mantissa = torch.where(word > 0, (word & 0x7FFFFF) | 0x800000, word)
    c = counters(mantissa, (word >> 23) - 150 + K[..., 0] - C.SCALE, torch.ones_like(word), (k_max + C.HEADROOM) >> 5)

    target = torch.full((rows,), float("nan"), dtype=F32, device=y.device)
    here = (target_local >= 0) & (target_local < columns)
    picked = y.gather(1, torch.where(here, target_local, torch.zeros_like(target_local))[:, None])[:, 0]
    target = torch.where(here, picked, target)

    nan = torch.full_like(maximum, float("nan"))
    high = bits_of(torch.where(torch.isnan(target), nan, target))
    low = bits_of(torch.where(torch.isnan(maximum), nan, maximum))
    records[0] = ((high - ((high >> 31) << 32)) << 32) | low
    for i in range(C.LIMBS):
        records[1 + i] = torch.where(poison, torch.zeros_like(c[i]), c[i])
    if entropy:
        d = fma(safe, f32(C.LOG2E, y), -K.to(F32))
        w = torch.where(e == 0, torch.zeros_like(e), e * d)
        u = K[..., 0].to(F64) * s.to(F64) + tree16(w).to(F64)  # the product is exact
        word = u.contiguous().view(I64)
        exponent = (word >> 52) & 0x7FF
        mantissa = torch.where(exponent > 0, (word & 0xFFFFFFFFFFFFF) | 0x10000000000000, torch.zeros_like(word))
        sign = torch.where(word < 0, -1, 1)
        top = (k_max + C.ENTROPY_HEADROOM) >> 5
        for i, total in enumerate(counters(mantissa, exponent - 1075 + K[..., 0] - C.SCALE, sign, top)):
            records[1 + C.LIMBS + i] = torch.where(poison, torch.zeros_like(total), total)
    return records


def log2_split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = 2^a * r, sqrt(1/2) < r <= sqrt(2): (a int64, log2 r fp64) for positive normal fp64 x."""
    word = x.contiguous().view(I64)
    a = (word >> 52) - 1023
    r = ((word & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).view(F64)
    large = r > C.SQRT2
    r, a = torch.where(large, r * 0.5, r), a + large.to(I64)
    s = (r - 1.0) / (r + 1.0)
    z = s * s
    value = torch.full_like(z, C.LOG2_COEFFICIENTS[-1])
    for coefficient in reversed(C.LOG2_COEFFICIENTS[:-1]):
        value = value * z + coefficient
    return a, s * value


def counters_value(c: list[Tensor]) -> Tensor:
    """Counters as fp64 in units of 2^(32 (J - 1))."""
    low = c[1].to(F64) + c[2].to(F64) * 2.0**-32
    return c[0].to(F64) * 2.0**32 + low


def merge(gathered: Tensor) -> Tensor:
    """Folds records [W, R, N] into one [R, N]."""
    words = gathered[:, 0].contiguous()
    maxima_, targets = words.view(F32)[:, 0::2], words.view(F32)[:, 1::2]
    maximum = maxima_.amax(0)
    poison = poisoned(maximum)
    target = torch.full_like(maximum, float("nan"))
    for t in reversed(targets.unbind(0)):
        target = torch.where(torch.isnan(t), target, t)
    k_max, k = k_of_max(maximum), k_of_max(maxima_)
    merged = torch.zeros_like(gathered[0])
    high, low = bits_of(target), bits_of(maximum)
    merged[0] = ((high - ((high >> 31) << 32)) << 32) | low
    for base, headroom in ((1, C.HEADROOM), (1 + C.LIMBS, C.ENTROPY_HEADROOM))[: 1 + (gathered.shape[1] > 4)]:
        rise = ((k_max + headroom) >> 5)[None] - ((k + headroom) >> 5)
        for i in range(C.LIMBS):
            for j in range(C.LIMBS):
                moved = torch.where(rise + j == i, gathered[:, base + j], torch.zeros_like(gathered[:, 0]))
                merged[base + i] += moved.sum(0)
        for i in range(C.LIMBS):
            merged[base + i] = torch.where(poison, torch.zeros_like(merged[0]), merged[base + i])
    return merged


def fold(gathered: Tensor, target_ids: Tensor, ignore_index: int, real_vocab_size: int, invalid: str) -> FoldedRows:
    """Folds records [W, R, N] and finishes: logp, lse, entropy, lse2 pair, maximum."""
    entropy = gathered.shape[1] > 1 + C.LIMBS
    merged = merge(gathered)
    halves = merged[0].contiguous().view(F32)
    maximum, target = halves[0::2], halves[1::2]
    empty = maximum == -INF
    poison = poisoned(maximum) | (~empty & (maximum <= -C.LOGIT_LIMIT))
    usable = ~(empty | poison)
    k_max = k_of_max(maximum)
    J = (k_max + C.HEADROOM) >> 5
    S = torch.where(usable, counters_value([merged[1 + i] for i in range(C.LIMBS)]), torch.ones(1, dtype=F64))
    a, log2_r = log2_split(S)
    lse2_int = a + 32 * (J - 1)
    lse2 = lse2_int.to(F64) + log2_r
    lse = (lse2 * C.INV_LOG2E).to(F32)

    scorable = usable & torch.isfinite(target)
    inside = scorable & (target >= -C.LOGIT_LIMIT)
    k_t, p_t = exp_split(torch.where(inside, target, torch.zeros_like(target)))
    word = S.view(I64)
    e = (word >> 52) - 1023 + 32 * (J - 1)
    m = ((word & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).view(F64)
    ratio_a, ratio_l = log2_split(m / p_t.to(F64))
    near = -(((e - k_t + ratio_a).to(F64) + ratio_l) * C.LN2)
    far = (target.to(F64) * C.LOG2E - lse2) * C.LN2
    x = torch.where(inside, near, far)
    logp = torch.where(x < 0, x.to(F32), torch.zeros_like(target))
    logp = torch.where(torch.isnan(target), target, torch.where(target == -INF, target, logp))

    nan, zero = torch.full_like(logp, float("nan")), torch.zeros_like(logp)
    minus = torch.full_like(logp, -INF)
    logp = torch.where(empty, minus, torch.where(poison, nan, logp))
    lse = torch.where(empty, minus, torch.where(poison, nan, lse))
    ignored = target_ids == ignore_index
    valid = (target_ids >= 0) & (target_ids < real_vocab_size)
    logp = torch.where(ignored, zero, torch.where(valid, logp, nan if invalid == "nan" else zero))
    H = None
    if entropy:
        J_u = (k_max + C.ENTROPY_HEADROOM) >> 5
        U = counters_value([merged[1 + C.LIMBS + i] for i in range(C.LIMBS)])
        mean = U / S * torch.where(J_u == J, 1.0, 2.0**32).to(F64)
        h = (lse2 - mean) * C.LN2
        H = torch.where(h > 0, h.to(F32), zero)
        H = torch.where(empty, zero, torch.where(poison, nan, H))
    lse2_int = torch.where(usable, lse2_int, torch.zeros_like(lse2_int)).to(I32)
    lse2_frac = torch.where(poison, nan, torch.where(empty, zero, log2_r.to(F32)))
    return FoldedRows(logp, lse, H, lse2_int, lse2_frac, maximum)
