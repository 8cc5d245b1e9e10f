"""What a function around the library's own checks, before its first collective, on every rank of the group.

`linear_logp` lets its ranks agree after its own checks. One that raised on the way there would leave the others
waiting, so whoever checks arguments before calling it, or communicates by itself, does that in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from vocabshard.contract import ContractError
from vocabshard.dist import agree
from vocabshard.dist.gather import rank_and_size
from vocabshard.plan import validates

T = TypeVar("T")


def checked(
    check: Callable[[], T],
    group: Any,
    tensors: Iterable[Any],
    *,
    validate: bool | None = None,
    backend: Any = "auto",
    stated: Callable[[], Any] = lambda: None,
) -> T:
    """check()'s result; where the call validates, only if no rank's raised and `stated` is the same on all.

    tensors, validate, backend: of the call: whether it validates is known by them, as `linear_logp` knows it. stated():
    what decides which collectives the call will make; asked for where check has passed.

    Collective over the group where the call validates: one all-gather of some words. Every rank then raises the error
    of the lowest rank that failed. Else an error is raised at once, on its own rank.
    """
    if hasattr(group, "get_group"):
        group = group.get_group()
    # a graph has the agreement of the call within it, and no room for another
    if torch.compiler.is_compiling() or rank_and_size(group)[1] == 1 or not validates(validate, backend, tensors):
        return check()
    found, error, said = None, None, ""
    try:
        found = check()
        said = repr(stated())
    except (TypeError, ValueError, NotImplementedError, ContractError) as e:
        error = e
    agree.agree_call(error, {"options": agree.text_hash(said)}, group)
    return found  # type: ignore[return-value]


def known(where: str, function: Callable[..., Any], options: Iterable[str]) -> None:
    """Raises TypeError for a name that is no keyword of `function`."""
    unknown = sorted(set(options) - set(getattr(function, "__kwdefaults__", None) or ()))
    if unknown:
        raise TypeError(f"{where}: {unknown[0]!r} is not an option of {getattr(function, '__name__', function)}")


def group_of(tp_group: Any = None, shard: Any = None, matrix: Any = None) -> Any:
    """The group of a call that names it so: by itself, by its shard, or by a weight that is a DTensor of one mesh."""
    if shard is not None:
        return getattr(shard, "group", None)
    if tp_group is None and isinstance(matrix, Tensor) and hasattr(matrix, "to_local"):
        mesh = matrix.device_mesh  # type: ignore[attr-defined]
        return mesh.get_group() if mesh.ndim == 1 else None
    return tp_group
