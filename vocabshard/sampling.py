"""Sampling programs, and a truncation as one int64 a row. docs/operators/sampling.md has the exact semantics.

`csrc/sampling.h` holds the same constants for C++ and CUDA; a test compares the bytes that come of them.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocabshard import contract as C

NAMES = ("temperature", "min_p", "top_k", "top_p")  # in the order of vLLM's sampler
GREEDY_BELOW = 1e-5

MASS_BITS = 40  # a mass is an integer in units of 2^-40 of a term with k = k_max
MASS_SPAN = 64  # terms this far below are 0
SHARE_BITS = 30  # p of a top-p in units of 2^-30
RADIX = ((21, 11), (10, 11), (0, 10))  # shift and width of the digits of a logit's order, highest first
EVERY_TIE = 0x7FFFFFFF
KEEP_ALL = -(1 << 63)
NO_ARRIVAL = (1 << 63) - 1

SQRT2_SINGLE = float.fromhex("0x1.6a09e6p+0")
# E = s (l0 + l1 s^2 + ...), fp32
CLOCK_COEFFICIENTS = tuple(
    float.fromhex(c) for c in ("0x1.715476p+1", "0x1.ec709ep-1", "0x1.2776c6p-1", "0x1.a61762p-2", "0x1.484b14p-2")
)
SECOND_BELOW = 256  # a random word below asks for a second one
PHILOX = (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85)  # two factors, two steps of the key
PHILOX_ROUNDS = 10


class Step(NamedTuple):
    """A truncation as kernels take it."""

    kind: str  # "min_p", "top_k", "top_p", "greedy"
    number: float  # ln of min_p; k; p in units of 2^-30; 0
    scaled: bool  # whether y is z * scale here, or z


@dataclass(frozen=True)
class SamplingProgram:
    """An ordered list of transforms that tokens are drawn, and log-probs taken, under.

    transforms: pairs (name, value), each acting on what those before it left:
        ("temperature", T): at most once. Scales what comes after it, and the distribution itself. Below 1e-5: greedy,
            and the rest of the program falls away.
        ("min_p", m): keeps what is at least m times as probable as the best column.
        ("top_k", k): keeps the k best columns and all equals of the k-th.
        ("top_p", p): keeps the smallest set of best columns with a mass of at least p.
    What is off (T = 1, m = 0, k = 0 or -1, p = 1) is dropped, so that programs that do the same are equal.

    Raises: ValueError, TypeError for names and values that are none. docs/operators/sampling.md has every edge value.
    """

    transforms: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.transforms, str) or not isinstance(self.transforms, Iterable):
            raise TypeError(f"SamplingProgram: transforms must be pairs (name, value), got {self.transforms!r}")
        kept = []
        for transform in self.transforms:
            if isinstance(transform, str) or not isinstance(transform, (tuple, list)) or len(transform) != 2:
                raise TypeError(f"SamplingProgram: a transform is a pair (name, value), got {transform!r}")
            name, value = transform
            if name not in NAMES:
                raise ValueError(f"SamplingProgram: a transform is one of {', '.join(NAMES)}, got {name!r}")
            checked = _checked(name, value)
            if checked is not None:
                kept.append((name, checked))
        names = [name for name, _ in kept]
        if names.count("temperature") > 1:
            raise ValueError("SamplingProgram: temperature may stand once; multiply the two")
        if ("temperature", 0.0) in kept:
            kept = [("temperature", 0.0)]
        object.__setattr__(self, "transforms", tuple(kept))

    @classmethod
    def of(
        cls,
        temperature: float = 1.0,
        min_p: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> SamplingProgram:
        """In vLLM's order: temperature, min_p, top_k, top_p."""
        values = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
        return cls(tuple(values.items()))

    @property
    def temperature(self) -> float | None:
        """T of the program, None where it has none; 0 is greedy."""
        return dict(self.transforms).get("temperature")

    @property
    def greedy(self) -> bool:
        """Whether the best column is all that is left."""
        return self.temperature == 0.0

    @functools.cached_property
    def truncates(self) -> bool:
        """Whether there is a cut to be found."""
        return bool(self.steps)

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """The truncations. A temperature that is not the program's own stands in front of it."""
        if self.greedy:
            return (Step("greedy", 0, False),)
        steps = []
        scaled = self.temperature is None
        for name, value in self.transforms:
            if name == "temperature":
                scaled = True
            elif name == "min_p":
                steps.append(Step(name, natural_log(value), scaled))
            elif name == "top_p":
                steps.append(Step(name, max(1, round(value * (1 << SHARE_BITS))), scaled))
            else:
                steps.append(Step(name, value, scaled))
        return tuple(steps)

    def as_list(self) -> list[list[Any]]:
        """For JSON; SamplingProgram takes it back."""
        return [list(transform) for transform in self.transforms]


def _checked(name: str, value: Any) -> float | None:
    """The value in its one form; None: the transform is off."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if name == "top_k":
        if not whole:
            raise TypeError(f"SamplingProgram: top_k must be an int, 0 or -1 for off, got {value!r}")
        if value < -1:
            raise ValueError(f"SamplingProgram: top_k must be at least 1, or 0 or -1 for off, got {value}")
        return None if value in (0, -1) else min(value, EVERY_TIE)
    if not (whole or isinstance(value, float)):
        raise TypeError(f"SamplingProgram: {name} must be a number, got {value!r}")
    if name == "temperature":
        if not 0 <= value < 3e38:
            raise ValueError(f"SamplingProgram: temperature must be finite and at least 0, got {value!r}")
        if value < GREEDY_BELOW:
            return 0.0
        rounded = float(struct.unpack("f", struct.pack("f", value))[0])
        return None if rounded == 1.0 else rounded
    if name == "top_p":
        if not 0 < value <= 1:
            raise ValueError(f"SamplingProgram: top_p must be in (0, 1], got {value!r}")
        return None if value == 1 else float(value)
    if not 0 <= value <= 1:
        raise ValueError(f"SamplingProgram: min_p must be in [0, 1], got {value!r}")
    return None if value == 0 else float(value)


def natural_log(x: float) -> float:
    """ln x by the contract's log2, the same on every machine; 0 < x <= 1."""
    r, a = math.frexp(x)  # [1/2, 1)
    r, a = r * 2, a - 1
    if r > C.SQRT2:
        r, a = r * 0.5, a + 1
    s = (r - 1.0) / (r + 1.0)
    z = s * s
    value = C.LOG2_COEFFICIENTS[-1]
    for coefficient in reversed(C.LOG2_COEFFICIENTS[:-1]):
        value = value * z + coefficient
    return (float(a) + s * value) * C.LN2


# ---- places and cuts ----


def order_of(z: Tensor) -> Tensor:
    """int64, ascending with fp32 z; the two zeros are one."""
    s = (z + 0.0).contiguous().view(torch.int32)
    return (s ^ ((s >> 31) & 0x7FFFFFFF)).to(torch.int64)


def logit_of(order: Tensor) -> Tensor:
    """The fp32 logits of an order."""
    o = order.to(torch.int32)
    return (o ^ ((o >> 31) & 0x7FFFFFFF)).view(torch.float32)


def place_of(z: Tensor, ids: Tensor) -> Tensor:
    """int64, larger is better: larger z, then lower id."""
    return (order_of(z) << 32) + (EVERY_TIE - ids)


def place_parts(place: Tensor) -> tuple[Tensor, Tensor]:
    """(fp32 logit, int64 id) of places."""
    return logit_of(place >> 32), EVERY_TIE - (place & 0xFFFFFFFF)


def make_cut(logit: Tensor, tie: Tensor | int = EVERY_TIE) -> Tensor:
    """int64: keeps columns with z above `logit`, and of those equal to it the ids up to `tie`; all by default.

    logit fp32 [...]; -inf keeps everything.
    """
    cut = (order_of(logit) << 32) + (EVERY_TIE - tie)
    return torch.where(torch.isneginf(logit), KEEP_ALL, cut)


def cut_parts(cut: Tensor) -> tuple[Tensor, Tensor]:
    """(fp32 logit, int64 tie) of cuts int64 [...]: what make_cut takes."""
    everything = cut == KEEP_ALL
    logit, tie = place_parts(torch.where(everything, 0, cut))
    return torch.where(everything, float("-inf"), logit), torch.where(everything, EVERY_TIE, tie)


def left_out(z: Tensor, first_id: int, cut: Tensor) -> Tensor:
    """bool [N, V]: the columns of fp32 z that cuts int64 [N] leave out. A NaN is kept, so that it poisons its row."""
    logit, tie = (part[:, None] for part in cut_parts(cut))
    ids = torch.arange(first_id, first_id + z.shape[1], device=z.device)
    return (z < logit) | ((z == logit) & (ids > tie))
