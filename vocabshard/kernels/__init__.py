"""Local kernels, and the choice among them (backends.py has the table). Nothing here knows of ranks."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from vocabshard.contract import CONTRACT_PROJECTIONS
from vocabshard.kernels.backends import BACKENDS, LINEAR, LOGITS, NAMES, Backend, Site

_ROWS = {row.name: row for row in BACKENDS}


class Rejection(NamedTuple):
    """A backend that was not taken, and why."""

    backend: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """A backend for one input, and whether its bytes are those of the contract."""

    backend: str
    projection: str
    contract_bearing: bool
    reason: str  # why not contract-bearing; with "auto" also why a faster backend was not taken
    rejected: tuple[Rejection, ...]  # every other backend, in the table's order


def row(backend: str) -> Backend:
    """The row of a backend that exists."""
    return _ROWS[backend]


def module(backend: str) -> ModuleType:
    """The kernel module of a chosen backend."""
    return importlib.import_module(_ROWS[backend].module)


def continues_chain(backend: str, dtype: torch.dtype) -> bool:
    """Whether that backend's grad_hidden is one ascending chain over the columns, whatever the shards."""
    return dtype in getattr(module(backend), "CONTINUES_CHAIN", ())


@functools.lru_cache(maxsize=256)
def select_backend(backend: str, device: torch.device, dtype: torch.dtype, given_logits: bool = False) -> Choice:
    """Pure in its arguments and in what is installed. ValueError when the named backend cannot serve the input."""
    if backend != "auto" and backend not in _ROWS:
        raise ValueError(f"backend must be one of {', '.join(('auto', *NAMES))}, got {backend!r}")
    site = Site(device, dtype, LOGITS if given_logits else LINEAR)
    refusals = {row.name: row.refusal(site) for row in BACKENDS}
    if backend != "auto":
        if refusals[backend]:
            raise ValueError(
                f'backend="{backend}" does not serve tensors on {device.type!r}: {refusals[backend]}; '
                'move them or use backend="auto"'
            )
        others = [Rejection(name, why or f'backend="{backend}" was asked for') for name, why in refusals.items()]
        return _chosen(backend, site, [other for other in others if other.backend != backend])
    verdicts = {row.name: refusals[row.name] or row.automatic(site) for row in BACKENDS}
    taken = next(name for name, why in verdicts.items() if not why)  # torch serves everything
    rejected = [Rejection(name, why or f"{taken} comes first") for name, why in verdicts.items() if name != taken]
    # a fast path that this input might have taken on another machine is worth a word
    before = rejected[: NAMES.index(taken)]
    missed = [f"{name} was not taken: {why}" for name, why in before if _might_serve(_ROWS[name], site)]
    if taken == "torch" and not missed:
        missed = [f"no kernels for {device.type!r}"]
    return _chosen(taken, site, rejected, missed)


def _might_serve(row: Backend, site: Site) -> bool:
    declared = row.capability
    return site.entry in declared.entries and (not declared.devices or site.device.type in declared.devices)


def _chosen(name: str, site: Site, rejected: Sequence[Rejection], missed: Sequence[str] = ()) -> Choice:
    projection = _ROWS[name].projection_id(site)
    bearing = projection in CONTRACT_PROJECTIONS
    if name == "torch":
        why = ['backend="torch" is ordinary F.linear and log_softmax']
    elif bearing:
        why = []
    else:
        why = [f"projection {projection!r} has not been validated: there are no goldens for it"]
    return Choice(name, projection, bearing, "; ".join([*missed, *why]), tuple(rejected))


@functools.cache
def build_id() -> str:
    """Version and fingerprint of the compiled kernels."""
    from vocabshard import _C

    return str(_C.build_info()["build"])
