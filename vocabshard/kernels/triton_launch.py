"""What every Triton launch of the linear head asks of its arguments. N rows, D hidden size."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocabshard.kernels.problem import LocalProblem
from vocabshard.triton_contract import INTERPRETED


class Epilogue(NamedTuple):
    """From a logit to y, as the kernels' arguments say it."""

    temperature: str  # "none", "scalar" or "rows"
    scale: float
    row_scale: Tensor | None  # fp32 [N]
    softcap: str  # "none", "quick" for caps that divide_by takes, "any"
    cap: float
    cap_reciprocal: float


def epilogue_of(inv_temperature: Tensor | float | None, problem: LocalProblem) -> Epilogue:
    """How a kernel caps and scales its logits."""
    cap = 1.0 if problem.softcap is None else _fp32(problem.softcap)
    softcap = "none" if problem.softcap is None else "quick" if 2.0**-20 <= cap <= 2.0**20 else "any"
    if inv_temperature is None:
        return Epilogue("none", 1.0, None, softcap, cap, 1.0 / cap)
    if isinstance(inv_temperature, Tensor):
        return Epilogue("rows", 1.0, inv_temperature, softcap, cap, 1.0 / cap)
    return Epilogue("scalar", float(inv_temperature), None, softcap, cap, 1.0 / cap)


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def mappable(x: Tensor) -> bool:
    """Whether the tensor copy engine can address a matrix as it lies."""
    step = x.element_size()
    return x.stride(1) == 1 and x.stride(0) * step % 16 == 0 and x.stride(0) > 0 and x.data_ptr() % 16 == 0


def chain_of(hidden: Tensor, weight: Tensor) -> str:
    """How the products' operands are read: "descriptors" or "pointers" for the matrix unit, "fma" for fp32."""
    if hidden.dtype == torch.float32:
        return "fma"
    fits = mappable(hidden) and mappable(weight) and hidden.shape[1] > 0
    return "descriptors" if fits and _has_copy_engine(hidden.device) else "pointers"


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    return INTERPRETED or (torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9)


@functools.cache
def sm_count_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 in the interpreter."""
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, whatever its arguments are on."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
