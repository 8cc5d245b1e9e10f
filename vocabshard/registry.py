"""Operators by name, for engines that choose one at run time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vocabshard import checks, kernels, strict
from vocabshard.contract import CONTRACT_ID, ContractError
from vocabshard.functional import batch_invariant_logp, linear_logp, vocab_parallel_logp
from vocabshard.kernels import Rejection
from vocabshard.kernels.backends import Capability
from vocabshard.logprob_contract import LogprobContract
from vocabshard.plan import architecture
from vocabshard.sample import vocab_parallel_sample

_OPS: dict[str, Callable[..., Any]] = {
    "linear_logp": linear_logp,
    "vocab_parallel_logp": vocab_parallel_logp,
    "batch_invariant_logp": batch_invariant_logp,
    "vocab_parallel_sample": vocab_parallel_sample,
}
_DTYPES = {name: dtype for dtype, name in strict.DTYPE_NAMES.items()}


class OpProvenance(NamedTuple):
    """What an operator will run. A LogpOutput's provenance says it of one call."""

    contract_id: str
    contract_fingerprint: str | None  # of a LogprobContract, equal on both sides of a comparison
    projection_id: str
    backend: str
    device: str
    architecture: str
    compute_capability: str
    build: str
    rejected: tuple[Rejection, ...]  # every other backend, and why


class LogprobOp(NamedTuple):
    """An operator that honours a contract: what `get_logprob_op` found."""

    op: Callable[..., Any]
    capability: Capability  # declared by the backend
    provenance: OpProvenance


def get_op(name: str) -> Callable[..., Any]:
    """The public operator of that name; each accepts `backend=`, `strict=` and `contract=`. ValueError otherwise."""
    if name not in _OPS:
        raise ValueError(f"get_op: expected one of {', '.join(_OPS)}, got {name!r}")
    return _OPS[name]


def get_logprob_op(
    contract: str | LogprobContract,
    requested_backend: str = "auto",
    *,
    device: torch.device | str | None = None,
) -> LogprobOp:
    """An operator whose every call is checked against `contract`, in strict mode, on the backend that serves it here.

    Args:
        contract: a LogprobContract, or a contract id (then for linear_logp in bf16).
        requested_backend: "auto" or a name; no other is taken in its stead.
        device: where the tensors will be; by default the current GPU where there is one, else the CPU.

    The operator is `linear_logp`, or `vocab_parallel_logp` when contract.entry is "logits that exist". Not collective.

    Raises: ContractError, naming the field, when this machine cannot honour the contract so.
    """
    checks.contract(contract)
    stated = contract if isinstance(contract, LogprobContract) else None
    if contract is None:
        raise TypeError(f"contract must be {CONTRACT_ID!r} or a LogprobContract, got None")
    given_logits = stated is not None and stated.entry != "linear_logp"
    dtype = _DTYPES[stated.weight_dtype] if stated else torch.bfloat16
    where = torch.device(device) if device is not None else _default_device()
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ContractError(
            f"device: asked for {str(where)!r}, found no GPU that this torch can use; name another", "device"
        )
    try:
        choice = kernels.select_backend(requested_backend, where, dtype, given_logits)
    except ValueError as error:
        raise ContractError(f"backend: {error}", "backend") from error
    strict.check_machine(choice)
    if stated is not None:
        stated.check_call({"projection_id": choice.projection})
    op = functools.partial(
        vocab_parallel_logp if given_logits else linear_logp, backend=choice.backend, strict=True, contract=contract
    )
    provenance = OpProvenance(
        CONTRACT_ID,
        stated.fingerprint if stated else None,
        choice.projection,
        choice.backend,
        where.type,
        *architecture(where),
        kernels.build_id(),
        choice.rejected,
    )
    return LogprobOp(op, kernels.row(choice.backend).capability, provenance)


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
