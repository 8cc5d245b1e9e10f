"""Local kernels, and the one table that chooses among them. Nothing here knows of ranks."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType

import torch

from vocabshard.contract import FMA_CHAIN, GIVEN_LOGITS, LIBRARY


@dataclass(frozen=True)
class Choice:
    """A backend for one input, and whether its bytes are those of the contract."""

    backend: str
    projection: str
    contract_bearing: bool
    reason: str  # why not contract-bearing; or why a faster backend was not taken


BACKENDS = ("auto", "cpu", "torch")
_MODULES = {"cpu": "vocabshard.kernels.cpu", "torch": "vocabshard.kernels.reference"}


def module(backend: str) -> ModuleType:
    """The kernel module of a chosen backend."""
    return importlib.import_module(_MODULES[backend])


def select_backend(backend: str, device: torch.device, dtype: torch.dtype, given_logits: bool = False) -> Choice:
    """Pure in its arguments and in what is installed. ValueError when the named backend cannot serve the input."""
    return _select(backend, device.type, dtype, given_logits)


@functools.lru_cache(maxsize=256)
def _select(backend: str, device_type: str, dtype: torch.dtype, given_logits: bool) -> Choice:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch":
        return Choice("torch", LIBRARY, False, 'backend="torch" is ordinary F.linear and log_softmax')
    if device_type == "cpu":
        return Choice("cpu", GIVEN_LOGITS if given_logits else FMA_CHAIN, True, "")
    if backend == "auto":
        return Choice("torch", LIBRARY, False, f"no kernels for device {device_type!r} in this build")
    raise ValueError(f'backend="{backend}" does not serve tensors on {device_type!r}; move them or use backend="auto"')


@functools.cache
def build_id() -> str:
    """Version and fingerprint of the compiled kernels."""
    from vocabshard import _C

    return str(_C.build_info()["build"])
