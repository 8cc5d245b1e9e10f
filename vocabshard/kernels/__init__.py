"""Local kernels, and the one table that chooses among them. Nothing here knows of ranks."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from vocabshard.contract import CONTRACT_PROJECTIONS, FMA_CHAIN, GIVEN_LOGITS, HOPPER_K16, LIBRARY


@dataclass(frozen=True)
class Choice:
    """A backend for one input, and whether its bytes are those of the contract."""

    backend: str
    projection: str
    contract_bearing: bool
    reason: str  # why not contract-bearing; with "auto" also why a faster backend was not taken


_MODULES = {
    "cpu": "vocabshard.kernels.cpu",
    "sm90": "vocabshard.kernels.sm90",
    "triton": "vocabshard.kernels.triton_backend",
    "torch": "vocabshard.kernels.reference",
}
BACKENDS = ("auto", *_MODULES)


def module(backend: str) -> ModuleType:
    """The kernel module of a chosen backend."""
    return importlib.import_module(_MODULES[backend])


@functools.lru_cache(maxsize=256)
def select_backend(backend: str, device: torch.device, dtype: torch.dtype, given_logits: bool = False) -> Choice:
    """Pure in its arguments and in what is installed. ValueError when the named backend cannot serve the input."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch":
        return Choice("torch", LIBRARY, False, 'backend="torch" is ordinary F.linear and log_softmax')
    if device.type == "cpu" and backend in ("auto", "cpu"):
        return Choice("cpu", GIVEN_LOGITS if given_logits else FMA_CHAIN, True, "")
    no_sm90 = "it serves linear_logp; logits that exist take Triton" if given_logits else _sm90_missing(device)
    if backend == "sm90" or (backend == "auto" and not no_sm90):
        if no_sm90:
            raise ValueError(f'backend="sm90" does not serve tensors on {device.type!r}: {no_sm90}')
        projection = FMA_CHAIN if dtype == torch.float32 else HOPPER_K16
        return Choice("sm90", projection, True, "")
    missing = _triton_missing(device)
    if backend == "triton" or (backend == "auto" and not missing and torch.version.hip is None):
        if missing:
            raise ValueError(f'backend="triton" does not serve tensors on {device.type!r}: {missing}')
        choice = _triton(device, dtype, given_logits)
        if backend == "auto" and device.type == "cuda" and not given_logits:
            reasons = [f"sm90 was not taken: {no_sm90}", choice.reason]
            choice = replace(choice, reason="; ".join(r for r in reasons if r))
        return choice
    if backend == "auto":
        why = missing or 'ROCm is served by an explicit backend="triton" alone'
        return Choice("torch", LIBRARY, False, f"no kernels for {device.type!r}: {why}")
    raise ValueError(f'backend="{backend}" does not serve tensors on {device.type!r}; move them or use backend="auto"')


def _sm90_missing(device: torch.device) -> str:
    """Why the Hopper kernels cannot serve this device, or an empty text."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "it needs an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"it needs compute capability (9, 0), the GPU has {capability}"
    from vocabshard import _C

    if not _C.build_info()["cuda"]:
        return "vocabshard._C was built without CUDA: install nvcc and build again with VOCABSHARD_CUDA=1"
    return ""


def _triton_missing(device: torch.device) -> str:
    """Why Triton cannot serve this device, or an empty text."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda":
        return ""
    from vocabshard import triton_contract

    return "" if device.type == "cpu" and triton_contract.INTERPRETED else "Triton needs a GPU"


def _triton(device: torch.device, dtype: torch.dtype, given_logits: bool) -> Choice:
    from vocabshard.kernels.triton_linear import projection_id

    projection = GIVEN_LOGITS if given_logits else projection_id(dtype, device)
    bearing = projection in CONTRACT_PROJECTIONS
    reason = "" if bearing else f"projection {projection!r} has not been validated: there are no goldens for it"
    return Choice("triton", projection, bearing, reason)


@functools.cache
def build_id() -> str:
    """Version and fingerprint of the compiled kernels."""
    from vocabshard import _C

    return str(_C.build_info()["build"])
