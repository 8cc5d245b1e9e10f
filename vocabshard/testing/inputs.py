"""Inputs that break careless implementations of the softmax layer, and seeded ones for goldens."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

INF = float("inf")
NAN = float("nan")


def float_from_bits(bits: int) -> float:
    """The fp32 value with these 32 bits."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def rows_from_bits(bits: int, columns: int) -> Tensor:
    """fp32 [columns] all of one bit pattern (NaN payloads survive)."""
    signed = bits - (1 << 32) if bits >> 31 else bits
    return torch.full((columns,), signed, dtype=torch.int32).view(torch.float32)


def near_tie_chains() -> Tensor:
    """Three rows [3, 48] whose sum is not order-free in a tree scaled to 1: subnormals, flushes and clamps tip it."""
    base = torch.full((48,), -200.0)
    chain = {
        0: 0.0,
        16: -36.73679733276367,
        32: -45.0583381652832,
        33: -45.050933837890625,
        40: -54.05238342285156,
        44: -71.20244598388672,
        45: -71.63156127929688,
    }
    for column, value in chain.items():
        base[column] = value
    rows = []
    for last in ((-89.06903839111328, -88.4661636352539), (-88.5, -88.5), (-200.0, -200.0)):
        row = base.clone()
        row[46], row[47] = last
        rows.append(row)
    return torch.stack(rows)


def hard_rows(columns: int = 96, seed: int = 0) -> dict[str, Tensor]:
    """Named fp32 rows [columns], columns >= 64: what users of operators like this one tripped over."""
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(columns, generator=g) * 4
    rows: dict[str, Tensor] = {"normal": normal}
    for i, chain in enumerate(near_tie_chains()):
        row = torch.full((columns,), -200.0)
        row[:48] = chain
        rows[f"near-tie chain {i}"] = row
    for k in (5, 6, 7, 8, 27, 28):  # the limb index turns at 28 = 32 - 4, the entropy's at 6 = 32 - 26
        for sign in (1, -1):
            value = (sign * 32 * 3 + k) * math.log(2)
            row = normal * 0.5
            row = row - row.max() + value
            rows[f"k_max {sign * 96 + k}"] = row
    rising = torch.linspace(-250, 0, columns)
    rows["maximum rising slowly"] = rising
    rows["maximum falling"] = rising.flip(0)
    steps = torch.full((columns,), -900.0)
    for i, value in enumerate((-850, -800, -778, -700, -640, -500, -300, 0)):
        steps[i * (columns // 8)] = float(value)
    rows["maximum rising by 1, 2, 3 and more limbs"] = steps
    for offset in (100.0, -1e4, 1e4, 1e5, -1e5, 1e6, -1e6, 2000.0, -2000.0, 4096.0, -4096.0, 9984.0, -9984.0):
        rows[f"offset {offset:g}"] = normal + offset
    limit = 2.0**20
    rows["maximum 2^20"] = normal * 0 + limit
    rows["maximum above 2^20"] = torch.full((columns,), limit + 0.125)
    rows["maximum just above -2^20"] = torch.full((columns,), -limit + 0.0625)
    rows["maximum -2^20"] = torch.full((columns,), -limit)
    rows["maximum below -2^20"] = torch.full((columns,), -1.2e6)
    rows["smallest finite"] = torch.full((columns,), -3.4028234663852886e38)
    rows["1e30"] = normal + 1e30
    rows["-1e30"] = normal - 1e30
    mixed = normal.clone()
    mixed[::3] = -1e30
    mixed[1] = -1.5e6
    rows["masked by -1e30"] = mixed
    rows["-3e38 and -inf"] = torch.tensor([-3e38, -INF]).repeat(columns)[:columns]
    masked = normal.clone()
    masked[: columns // 2] = -INF
    rows["first half -inf"] = masked
    rows["all -inf"] = torch.full((columns,), -INF)
    one_hot = torch.full((columns,), -INF)
    one_hot[columns // 3] = 2.5
    rows["one-hot"] = one_hot
    peaked = torch.full((columns,), -15.0)
    peaked[7] = 3.0
    rows["peaked"] = peaked
    two = torch.full((columns,), -80.0)
    two[1] = two[2] = 1.0
    rows["two-hot in one tile"] = two
    apart = torch.full((columns,), -80.0)
    apart[1] = apart[40] = 1.0
    rows["two-hot in two tiles"] = apart
    rows["flat"] = torch.zeros(columns)
    rows["negative zero"] = torch.full((columns,), -0.0)
    rows["subnormal"] = normal * 1e-40
    cancel = torch.randn(columns, generator=g) * 300
    rows["mixed signs"] = cancel
    for name, bits in (("7fffffff", 0x7FFFFFFF), ("7fc00000", 0x7FC00000), ("ffc00000", 0xFFC00000)):
        for place in (0, 17, columns - 1):
            row = normal.clone()
            row[place] = rows_from_bits(bits, 1)[0]
            rows[f"NaN {name} at {place}"] = row
    plus = normal.clone()
    plus[20] = INF
    rows["+inf"] = plus
    both = normal.clone()
    both[3], both[30] = INF, NAN
    rows["+inf and NaN"] = both
    sharp = torch.full((columns,), -1e5)
    sharp[5], sharp[6] = 1e5, 1e5 * (1 - 2.0**-23)
    rows["temperature 1e-5"] = sharp
    return rows


def stacked_hard_rows(columns: int = 96, seed: int = 0) -> tuple[list[str], Tensor]:
    """(names, fp32 [rows, columns])."""
    rows = hard_rows(columns, seed)
    return list(rows), torch.stack(list(rows.values()))


def integer_logits(rows: int, columns: int, seed: int, spread_bits: int = 13) -> Tensor:
    """fp32 [rows, columns] from a 64-bit integer recurrence alone: the same on every machine and version.

    Values are multiples of 2^-10 within +-2^(spread_bits - 10).
    """
    index = torch.arange(rows * columns, dtype=torch.int64) + seed * 1_000_003
    x = index * 6364136223846793005 + 1442695040888963407
    x = (x ^ (x >> 29)) * 0x27BB2EE687B0B0FD
    x = (x ^ (x >> 32)) & ((1 << (spread_bits + 1)) - 1)
    return ((x - (1 << spread_bits)).to(torch.float32) * 2.0**-10).view(rows, columns)
