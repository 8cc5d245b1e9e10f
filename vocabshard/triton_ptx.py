"""PTX of the soft-cap: one element after the other, where the compiler would hold every step of a whole block at once.

It is `softcap_quick` of triton_contract.py, step for step.
"""

from __future__ import annotations

import struct

from vocabshard import contract as C


def f32(value: float) -> str:
    """An fp32 constant as PTX writes it."""
    return "0f" + struct.pack(">f", value).hex()


_E1, _E2, _E3, _E4, _E5, _E6 = map(f32, C.EXP_COEFFICIENTS)
_T1, _T2, _T3 = map(f32, C.TANH_COEFFICIENTS)
_LOG2E, _MAGIC, _ONE = f32(C.LOG2E), f32(C.MAGIC), f32(1.0)

# $0 = cap * tanh(z / cap), $1 = z, $2 = cap, $3 = fp32(1 / cap)
SOFTCAP = f"""
{{
.reg .b32 far, near, half, minus, x, q, rest, n, t, u, a, square, small, f, p, d, r, large;
.reg .pred finite, tiny, off, few, flat;
abs.f32 a, $1;
setp.lt.f32 finite, a, {f32(float("inf"))};
mul.rn.f32 far, $2, {f32(32.0)};
neg.f32 near, far;
max.f32 x, $1, near;
min.f32 x, x, far;
abs.f32 a, x;
setp.lt.f32 tiny, a, {f32(2.0**-90)};
selp.f32 t, {f32(2.0**80)}, {_ONE}, tiny;
mul.rn.f32 x, x, t;
neg.f32 minus, $2;
mul.rn.f32 q, x, $3;
fma.rn.f32 rest, q, minus, x;
fma.rn.f32 q, rest, $3, q;
fma.rn.f32 rest, q, minus, x;
fma.rn.f32 q, rest, $3, q;
copysign.f32 t, q, {f32(2.0**-46)};
add.rn.f32 n, q, t;
sub.rn.f32 n, n, t;
fma.rn.f32 rest, n, minus, x;
mul.rn.f32 half, $2, {f32(2.0**-70)};
abs.f32 a, rest;
setp.gt.f32 off, a, half;
copysign.f32 t, rest, {f32(2.0**-69)};
@off add.rn.f32 n, n, t;
abs.f32 a, q;
setp.lt.f32 few, a, {f32(2.0**-46)};
selp.f32 n, n, q, few;
mul.rn.f32 n, n, {f32(2.0**-80)};
selp.f32 u, n, q, tiny;
abs.f32 a, u;
mul.rn.f32 square, u, u;
fma.rn.f32 t, square, {_T3}, {_T2};
fma.rn.f32 t, t, square, {_T1};
mul.rn.f32 small, u, square;
fma.rn.f32 small, small, t, u;
min.f32 x, a, {f32(C.TANH_ONE)};
add.rn.f32 x, x, x;
fma.rn.f32 t, x, {_LOG2E}, {_MAGIC};
sub.rn.f32 f, {_MAGIC}, t;
fma.rn.f32 f, x, {_LOG2E}, f;
fma.rn.f32 p, f, {_E6}, {_E5};
fma.rn.f32 p, p, f, {_E4};
fma.rn.f32 p, p, f, {_E3};
fma.rn.f32 p, p, f, {_E2};
fma.rn.f32 p, p, f, {_E1};
fma.rn.f32 p, p, f, {_ONE};
shl.b32 t, t, 23;
add.s32 p, p, t;
add.rn.f32 d, p, {_ONE};
rcp.approx.ftz.f32 r, d;
neg.f32 d, d;
fma.rn.f32 t, d, r, {_ONE};
fma.rn.f32 r, t, r, r;
fma.rn.f32 large, r, {f32(-2.0)}, {_ONE};
copysign.f32 large, u, large;
setp.lt.f32 flat, a, {f32(C.TANH_SMALL)};
selp.f32 t, small, large, flat;
mul.rn.f32 t, t, $2;
selp.f32 $0, t, $1, finite;
}}
"""
