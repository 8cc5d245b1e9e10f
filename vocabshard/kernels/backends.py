"""The backends, a row each: what one declares, why it may be unable to serve on this machine, what it projects with.

Rows stand in the order in which backend="auto" tries them. A new kernel module is a new row here; a new limit of one is
a line in its `missing`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vocabshard.contract import FMA_CHAIN, GIVEN_LOGITS, HOPPER_K16, LIBRARY

LINEAR, LOGITS = "linear_logp", "logits that exist"  # the two entries
EVERY_DTYPE = ("fp32", "bf16", "fp16")


class Site(NamedTuple):
    """What a call brings to the choice."""

    device: torch.device
    dtype: torch.dtype
    entry: str  # LINEAR or LOGITS


@dataclass(frozen=True)
class Capability:
    """What a backend declares of itself, on any machine."""

    devices: tuple[str, ...]  # torch device types; empty: any
    entries: tuple[str, ...]
    projections: tuple[str, ...]  # that linear_logp may run with
    dtypes: tuple[str, ...] = EVERY_DTYPE
    needs: str = ""  # in words


@dataclass(frozen=True)
class Backend:
    """A row of the table."""

    name: str
    module: str  # of the kernel interface
    capability: Capability
    missing: Callable[[Site], str]  # why it cannot serve what it declares, here and now; "" where it can
    projection: Callable[[Site], str]  # of linear_logp
    automatic: Callable[[Site], str] = lambda site: ""  # why backend="auto" leaves it alone though it could serve
    bit_knobs: tuple[str, ...] = ()  # environment variables that may change what its compiler makes
    of_logits: str = GIVEN_LOGITS  # the projection id when the logits exist

    def refusal(self, site: Site) -> str:
        """Why this backend cannot serve the site, or an empty text."""
        declared = self.capability
        if site.entry not in declared.entries:
            return f"it serves {' and '.join(declared.entries)}, not {site.entry}"
        if declared.devices and site.device.type not in declared.devices:
            return f"it needs {declared.needs}"
        return self.missing(site)

    def projection_id(self, site: Site) -> str:
        """What a call of the site would project with."""
        return self.projection(site) if site.entry == LINEAR else self.of_logits


def _sm90_missing(site: Site) -> str:
    if torch.version.hip is not None:
        return "it needs an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(site.device)
    if site.entry == LOGITS:
        if capability != (9, 0) and capability[0] != 8:
            return f"it needs compute capability (8, x) or (9, 0), the GPU has {capability}"
    elif capability != (9, 0):
        return f"it needs compute capability (9, 0), the GPU has {capability}"
    from vocabshard import _C

    if not _C.build_info()["cuda"]:
        return "vocabshard._C was built without CUDA: install nvcc and build again with VOCABSHARD_CUDA=1"
    return ""


def _sm90_projection(site: Site) -> str:
    return FMA_CHAIN if site.dtype == torch.float32 else HOPPER_K16


def _triton_missing(site: Site) -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if site.device.type == "cuda":
        return ""
    from vocabshard import triton_contract

    return "" if triton_contract.INTERPRETED else "Triton needs a GPU"


def _triton_projection(site: Site) -> str:
    from vocabshard.kernels.triton_linear import projection_id

    return projection_id(site.dtype, site.device)


def _triton_automatic(site: Site) -> str:
    if torch.version.hip is not None:
        return 'ROCm is served by an explicit backend="triton" alone'
    return "" if site.device.type == "cuda" else "its interpreter is for tests"


BACKENDS: tuple[Backend, ...] = (
    Backend(
        "cpu",
        "vocabshard.kernels.cpu",
        Capability(("cpu",), (LINEAR, LOGITS), (FMA_CHAIN,), needs="tensors on the CPU"),
        missing=lambda site: "",
        projection=lambda site: FMA_CHAIN,
    ),
    Backend(
        "sm90",
        "vocabshard.kernels.sm90",
        Capability(("cuda",), (LINEAR, LOGITS), (HOPPER_K16, FMA_CHAIN), needs="an NVIDIA GPU"),
        missing=_sm90_missing,
        projection=_sm90_projection,
    ),
    Backend(
        "triton",
        "vocabshard.kernels.triton_backend",
        Capability(("cuda", "cpu"), (LINEAR, LOGITS), (HOPPER_K16, FMA_CHAIN), needs="a GPU"),
        missing=_triton_missing,
        projection=_triton_projection,
        automatic=_triton_automatic,
        bit_knobs=("TRITON_KERNEL_OVERRIDE", "TRITON_OVERRIDE_ARCH", "PTXAS_OPTIONS"),
    ),
    Backend(
        "torch",
        "vocabshard.kernels.reference",
        Capability((), (LINEAR, LOGITS), (LIBRARY,)),
        missing=lambda site: "",
        projection=lambda site: LIBRARY,
        of_logits=LIBRARY,
    ),
)
NAMES = tuple(row.name for row in BACKENDS)
