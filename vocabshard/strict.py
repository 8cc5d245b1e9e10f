"""What strict mode and a LogprobContract admit: only calls whose bytes are those of the contract, field by field."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from vocabshard import contract as C
from vocabshard import kernels
from vocabshard.contract import ContractError, breach
from vocabshard.shard import VocabShard

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_BUILD_TIME = ("VOCABSHARD_CUDA",)  # read by setup.py alone


def dtype_name(tensor: Tensor | None) -> str | None:
    """fp32, bf16, fp16, or torch's name of another."""
    return None if tensor is None else DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))


def bearing(choice: kernels.Choice, shard: VocabShard) -> tuple[bool, str]:
    """Whether a call's bytes are those of the contract, and why not."""
    if not choice.contract_bearing:
        return False, choice.reason
    if not shard.aligned:
        return False, f"shard boundaries {list(shard.ranges)} are not multiples of {C.TILE}"
    return True, ""


def check_environment(backend: str) -> None:
    """Raises ContractError for a variable that may change this backend's bits: knobs are for neutral things alone."""
    for name in os.environ:
        if name.startswith("VOCABSHARD_") and name not in _BUILD_TIME:
            raise breach(
                f"environment variable {name}", "none", repr(os.environ[name]), "unset it: no such knob exists"
            )
    for name in kernels.row(backend).bit_knobs:
        if os.environ.get(name):
            raise breach(f"environment variable {name}", "none", repr(os.environ[name]), "unset it: it can change bits")


def check_machine(choice: kernels.Choice) -> None:
    """Raises ContractError unless the chosen kernels, as they are here and now, bear the contract."""
    if choice.backend != "torch":
        from vocabshard import _C

        C.check_constants(_C.contract())  # also finds a constant that somebody changed in this process
    check_environment(choice.backend)
    if not choice.contract_bearing:
        field = "backend" if choice.projection == C.LIBRARY else "projection"
        others = "; ".join(f"{name}: {why}" for name, why in choice.rejected)
        raise ContractError(
            f"{field}: strict=True asked for contract {C.CONTRACT_ID}; backend {choice.backend!r} with projection "
            f"{choice.projection!r} does not bear it: {choice.reason}; change that, or score with strict=False "
            f"(other backends: {others})",
            field,
        )


def check_shard(shard: VocabShard) -> None:
    """Raises ContractError for shards that tile from their own start."""
    if not shard.aligned:
        raise ContractError(
            f"shard_ranges: strict=True asked for contract {C.CONTRACT_ID}; these shards do not bear it: boundaries "
            f"{list(shard.ranges)} are not multiples of {C.TILE}; pad or cut the shards there, or score with "
            "strict=False",
            "shard_ranges",
        )


def check_cast(given: Mapping[str, Tensor | None], used: Mapping[str, Tensor | None]) -> None:
    """Raises ContractError where autocast gave the head another dtype than the caller's tensors have."""
    for name, tensor in given.items():
        before, after = dtype_name(tensor), dtype_name(used[name])
        if before != after:
            raise breach(
                f"{name}_dtype", f"the tensor's own {before}", f"{after} under torch.autocast",
                f"cast {name} yourself, or call outside of autocast",
            )  # fmt: skip
