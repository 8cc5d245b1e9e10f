"""Operators by name, for engines that choose one at run time. Not available in this version."""

from __future__ import annotations

from typing import Any


def get_op(name: str) -> Any:
    """The operator of that name."""
    raise NotImplementedError(f"get_op({name!r}) is not available in this version; import the function from vocabshard")


def get_logprob_op(contract: Any, requested_backend: str = "auto") -> Any:
    """An operator that honours `contract`, with its capability and provenance."""
    raise NotImplementedError(
        "get_logprob_op is not available in this version; call linear_logp(..., strict=True, contract=...)"
    )
