"""The numeric contract as Triton functions: what csrc/contract.h says, for any block of rows.

The kernels and the fold share it. Every operation is one IEEE rounding: launches pass `enable_fp_fusion=False`, every
FMA is explicit, floats are never given to `tl.sum`, and a maximum that a NaN must survive goes through `max_nan`.
Counters c0, c1, c2 are int64 tensors for the limb positions J, J-1, J-2.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from vocabshard import contract as C
from vocabshard import triton_ptx

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
# PTX shifts by 32 or more give 0, which shifts of LLVM don't promise; elsewhere it takes a selection.
PTX = not INTERPRETED and torch.version.hip is None


class Constant(tl.constexpr):
    """Compared quickly: every launch compares all global numbers of its kernel, and constexprs answer in constexprs."""

    def __ne__(self, other):
        return self.value != getattr(other, "value", other)


def constant(value):
    """A module's number as compiled functions want it; the interpreter wants it plain (a constexpr on the left of a
    tensor gives no tensor there)."""
    return value if INTERPRETED else Constant(value)


LOG2E = constant(C.LOG2E)
MAGIC = constant(C.MAGIC)
MAGIC_BITS = constant(0x4B400000)
LIMIT = constant(C.LOGIT_LIMIT)
SCALE = constant(C.SCALE)
SPAN = constant(C.SPAN)
HEADROOM = constant(C.HEADROOM)
ENTROPY_HEADROOM = constant(C.ENTROPY_HEADROOM)
EMPTY_K = constant(C.EMPTY_K)
NAN_BITS = constant(C.NAN_BITS)
E1, E2, E3, E4, E5, E6 = (constant(c) for c in C.EXP_COEFFICIENTS)
T1, T2, T3 = (constant(c) for c in C.TANH_COEFFICIENTS)
TANH_SMALL = constant(C.TANH_SMALL)
TANH_ONE = constant(C.TANH_ONE)
SIGN = constant(-(1 << 31))
LN2_F32 = constant(0.693147182464599609375)

# ---- single operations ----

if INTERPRETED:
    # The interpreter's tl.fma rounds twice. The product is exact in fp64; the sum is rounded to odd there (TwoSum tells
    # whether it was inexact), so that the last rounding, to fp32, is the only one that counts.
    @triton.jit
    def fma(a, b, c):
        """a * b + c with one fp32 rounding."""
        product = a.to(tl.float64) * b.to(tl.float64) if hasattr(b, "to") else a.to(tl.float64) * b
        addend = c.to(tl.float64) if hasattr(c, "to") else c
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
        word = total.to(tl.int64, bitcast=True)
        step = tl.where((error > 0) == (total > 0), 1, -1)
        inexact = (error != 0) & (error == error) & ((word & 1) == 0)
        return tl.where(inexact, word + step, word).to(tl.float64, bitcast=True).to(tl.float32)

else:

    @triton.jit
    def fma(a, b, c):
        """a * b + c with one fp32 rounding."""
        return tl.fma(a, b, c)


if PTX:

    @triton.jit
    def shift_left(m, n):
        """uint32 m << n, 0 for n outside 0..31."""
        return tl.inline_asm_elementwise("shl.b32 $0, $1, $2;", "=r,r,r", [m, n], dtype=tl.uint32, is_pure=True, pack=1)

    @triton.jit
    def shift_right(m, n):
        """uint32 m >> n, 0 for n outside 0..31."""
        return tl.inline_asm_elementwise("shr.b32 $0, $1, $2;", "=r,r,r", [m, n], dtype=tl.uint32, is_pure=True, pack=1)

else:

    @triton.jit
    def shift_left(m, n):
        """uint32 m << n, 0 for n outside 0..31."""
        return tl.where((n >= 0) & (n < 32), m << (n & 31).to(tl.uint32), tl.zeros_like(m))

    @triton.jit
    def shift_right(m, n):
        """uint32 m >> n, 0 for n outside 0..31."""
        return tl.where((n >= 0) & (n < 32), m >> (n & 31).to(tl.uint32), tl.zeros_like(m))


@triton.jit
def bits(x):
    """The 32 bits of fp32 values as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(b):
    """The fp32 values with these bits."""
    return b.to(tl.float32, bitcast=True)


@triton.jit
def max_nan(a, b):
    """The larger; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def halve_max(x):
    """max_nan of adjacent pairs of the last dimension, which is halved."""
    a, b = tl.split(tl.reshape(x, x.shape[:-1] + (x.shape[-1] // 2, 2)))  # noqa: RUF005
    return max_nan(a, b)


@triton.jit
def halve_add(x):
    """Sums of adjacent pairs of the last dimension, which is halved: one level of the tree."""
    a, b = tl.split(tl.reshape(x, x.shape[:-1] + (x.shape[-1] // 2, 2)))  # noqa: RUF005
    return a + b


@triton.jit
def tree16(x):
    """The adjacent-pairwise tree over a last dimension of 16, which is dropped."""
    a, b = tl.split(halve_add(halve_add(halve_add(x))))
    return a + b


# ---- from the logit to its term ----


@triton.jit
def exp_k(y):
    """The integer nearest to y * log2(e), |y| <= 2^20."""
    return bits(fma(y, LOG2E, MAGIC)) - MAGIC_BITS


@triton.jit
def exp_poly(f):
    """2^f for f in [-1/2, 1/2]."""
    p = fma(f, E6, E5)
    p = fma(p, f, E4)
    p = fma(p, f, E3)
    p = fma(p, f, E2)
    p = fma(p, f, E1)
    return fma(p, f, 1.0)


@triton.jit
def exp_scaled(y, magic):
    """p * 2^(k + n) where e^y = p * 2^k, magic = MAGIC + n, by exponent arithmetic; the caller keeps it normal."""
    t = fma(y, LOG2E, magic)
    p = exp_poly(fma(y, LOG2E, magic - t))
    # the low 9 bits of MAGIC's own pattern are 0: shifting t's leaves (k + n) << 23
    return from_bits(bits(p) + (bits(t) << 23))


@triton.jit
def with_sign_of(magnitude, x):
    """The magnitude with the sign of x."""
    return from_bits(bits(magnitude) | (bits(x) & SIGN))


@triton.jit
def divide_by(z, cap, r):
    """z / cap correctly rounded, by FMAs alone: r = fp32(1 / cap), 2^-20 <= cap <= 2^20, |z| <= 32 cap.

    Two corrections by the exact remainder. Small z are scaled up, so that remainders don't underflow; a quotient below
    2^-126 has fewer bits, and is rounded to them from the remainder, not from a quotient that was rounded before.
    """
    tiny = tl.abs(z) < 2.0**-90
    x = z * tl.where(tiny, 2.0**80, 1.0)
    q = x * r
    q = fma(fma(-q, cap, x), r, q)
    q = fma(fma(-q, cap, x), r, q)
    grid = with_sign_of(2.0**-46 + tl.zeros_like(q), q)
    n = (q + grid) - grid
    rest = fma(-n, cap, x)
    n = tl.where(tl.abs(rest) > cap * 2.0**-70, n + with_sign_of(2.0**-69 + tl.zeros_like(q), rest), n)
    return tl.where(tiny, tl.where(tl.abs(q) < 2.0**-46, n, q) * 2.0**-80, q)


@triton.jit
def tanh_pinned(u):
    """tanh as the contract has it."""
    a = tl.abs(u)
    u2 = u * u
    small = fma(u * u2, fma(fma(u2, T3, T2), u2, T1), u)
    capped = tl.minimum(a, TANH_ONE)
    e = exp_scaled(capped + capped, MAGIC + tl.zeros_like(u))
    large = with_sign_of(1.0 - tl.math.div_rn(2.0 + tl.zeros_like(u), 1.0 + e), u)
    return tl.where(a < TANH_SMALL, small, large)


if PTX:
    SOFTCAP_PTX = constant(triton_ptx.SOFTCAP)

    @triton.jit
    def softcap_quick(z, cap, r):
        """cap * tanh(z / cap) for 2^-20 <= cap <= 2^20; r = fp32(1 / cap)."""
        cap += tl.zeros_like(z)
        r += tl.zeros_like(z)
        return tl.inline_asm_elementwise(SOFTCAP_PTX, "=r,r,r,r", [z, cap, r], dtype=tl.float32, is_pure=True, pack=1)

else:

    @triton.jit
    def softcap_quick(z, cap, r):
        """cap * tanh(z / cap) for 2^-20 <= cap <= 2^20; r = fp32(1 / cap)."""
        far = cap * 32.0  # tanh is 1 long before
        u = divide_by(tl.minimum(tl.maximum(z, -far), far), cap, r)
        return tl.where(tl.abs(z) < float("inf"), cap * tanh_pinned(u), z)


@triton.jit
def softcap_pinned(z, cap, r, QUICK: tl.constexpr):
    """cap * tanh(z / cap); infinities and NaN pass. QUICK: cap is as divide_by wants it, r = fp32(1 / cap)."""
    if QUICK:
        return softcap_quick(z, cap, r)
    else:
        finite = tl.abs(z) < float("inf")
        return tl.where(finite, cap * tanh_pinned(tl.math.div_rn(tl.where(finite, z, 0.0), cap)), z)


# ---- counters ----


@triton.jit
def k_of_max(y_max):
    """k of a maximum that does not poison; EMPTY_K for -inf."""
    return tl.where(y_max == float("-inf"), EMPTY_K, exp_k(tl.maximum(y_max, -LIMIT)))


@triton.jit
def limb_top(k, ENTROPY: tl.constexpr):
    """J, the highest position that a partial keeps, from its largest k."""
    if ENTROPY:
        return (k + ENTROPY_HEADROOM) >> 5
    else:
        return (k + HEADROOM) >> 5


@triton.jit
def raise_counters(c0, c1, c2, rise):
    """Counters whose top position moves up by rise >= 0: the lowest drop out."""
    r2 = tl.where(rise == 0, c2, tl.where(rise == 1, c1, tl.where(rise == 2, c0, 0)))
    r1 = tl.where(rise == 0, c1, tl.where(rise == 1, c0, 0))
    return tl.where(rise == 0, c0, 0), r1, r2


@triton.jit
def limbs(m, q):
    """uint32 m * 2^q cut at multiples of 32, q counted from the lowest kept position; highest first."""
    low = shift_left(m, q) | shift_right(m, -q)
    middle = shift_left(m, q - 32) | shift_right(m, 32 - q)
    high = shift_left(m, q - 64) | shift_right(m, 64 - q)
    return high.to(tl.int64), middle.to(tl.int64), low.to(tl.int64)


@triton.jit
def tile_limbs(s, K):
    """Limbs of tile values s * 2^(K - SCALE), s >= 0 normal or zero, where K is also the k of the running maximum."""
    b = s.to(tl.uint32, bitcast=True)
    # K - SCALE - 150 - 32 * (J - 2) with J = (K + HEADROOM) >> 5
    q = (b >> 23).to(tl.int32) + (((K + HEADROOM) & 31) - (HEADROOM + SCALE + 150 - 64))
    return limbs((b & 0x7FFFFF) | 0x800000, q)


@triton.jit
def tile_limbs_at(s, K, J):
    """The same where the running maximum's J is given apart from the tile's K."""
    b = s.to(tl.uint32, bitcast=True)
    q = (b >> 23).to(tl.int32) + (K - (SCALE + 150 - 64) - 32 * J)
    return limbs((b & 0x7FFFFF) | 0x800000, q)


@triton.jit
def entropy_limbs_at(u, K, J):
    """Limbs, signed, of fp64 tile values u * 2^(K - SCALE) under the top position J."""
    b = u.to(tl.int64, bitcast=True)
    e = ((b >> 52) & 0x7FF).to(tl.int32)
    m = tl.where(e == 0, 0, (b & 0xFFFFFFFFFFFFF) | 0x10000000000000)
    q = e + (K - (SCALE + 1075 - 64) - 32 * J)
    h0, h1, h2 = limbs((m >> 32).to(tl.uint32), q + 32)
    l0, l1, l2 = limbs((m & 0xFFFFFFFF).to(tl.uint32), q)
    return (
        tl.where(b < 0, -(h0 + l0), h0 + l0),
        tl.where(b < 0, -(h1 + l1), h1 + l1),
        tl.where(b < 0, -(h2 + l2), h2 + l2),
    )


# ---- records ----


@triton.jit
def poisons(y_max):
    """Whether a maximum makes its row NaN: NaN, or above 2^20."""
    return (y_max <= LIMIT) == 0


@triton.jit
def pack_word0(y_max, target_bits):
    """Word 0 with the one NaN of a record, and +0 for a maximum of either zero."""
    low = tl.where(y_max == y_max, bits(y_max + 0.0), NAN_BITS)
    return (target_bits.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def canonical_bits(y):
    """The bits of y, 0x7fc00000 for any NaN."""
    return tl.where(y == y, bits(y), NAN_BITS)


@triton.jit
def unpack_max(word):
    """The maximum in word 0 of a record."""
    return from_bits((word & 0xFFFFFFFF).to(tl.int32))


@triton.jit
def unpack_target_bits(word):
    """The bits of the target's logit in word 0 of a record."""
    return (word >> 32).to(tl.int32)


# ---- fold: fp64, every operation rounded by itself ----

LOG2_TERMS = tuple(constant(c) for c in C.LOG2_COEFFICIENTS)
L0, L1, L2, L3, L4, L5, L6, L7, L8, L9, L10 = LOG2_TERMS
LN2 = constant(C.LN2)
INV_LOG2E = constant(C.INV_LOG2E)
SQRT2 = constant(C.SQRT2)


@triton.jit
def exponent_f64(x):
    """floor(log2 x) of positive, normal x."""
    return ((x.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32) - 1023


@triton.jit
def mantissa_f64(x):
    """x scaled by a power of two into [1, 2); x positive and normal."""
    word = x.to(tl.int64, bitcast=True)
    return ((word & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)


@triton.jit
def log2_split(x):
    """x = 2^a * r, sqrt(1/2) < r <= sqrt(2): (a int32, log2 r)."""
    a = exponent_f64(x)
    r = mantissa_f64(x)
    large = r > SQRT2
    r = tl.where(large, r * 0.5, r)
    a = tl.where(large, a + 1, a)
    s = (r - 1.0) / (r + 1.0)
    z = s * s
    p = z * L10 + L9
    p = p * z + L8
    p = p * z + L7
    p = p * z + L6
    p = p * z + L5
    p = p * z + L4
    p = p * z + L3
    p = p * z + L2
    p = p * z + L1
    p = p * z + L0
    return a, s * p


@triton.jit
def counters_value(c0, c1, c2):
    """Counters as fp64 in units of 2^(32 (J - 1))."""
    low = c1.to(tl.float64) + c2.to(tl.float64) * 2.3283064365386962890625e-10  # 2^-32
    return c0.to(tl.float64) * 4294967296.0 + low
