"""The ranks of a command: starting them, joining them, agreeing on errors, and ending without a trace of the group."""

from __future__ import annotations

import gc
import importlib
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from vocabshard import launching
from vocabshard.command.errors import InputError, first_line

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """This process among the ranks; without a group it is alone."""

    rank: int = 0
    group: dist.ProcessGroup | None = None


def start_ranks(tp: int, arguments: Sequence[str]) -> int:
    """The exit code of `tp` ranks that run this command with the same package as this process.

    Not by `python -m vocabshard`: that would take the package in the working directory, if there is one, such as a
    source tree that nobody has built.
    """
    package = Path(launching.__file__).parent
    root = str(package.parent)
    before = os.environ.get("PYTHONPATH")
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        os.environ["PYTHONPATH"] = root if before is None else os.pathsep.join((root, before))
    try:
        return launching.run(tp, [str(package / "command" / "rank" / "__main__.py"), *arguments])
    finally:
        os.environ.pop("PYTHONPATH", None)
        if before is not None:
            os.environ["PYTHONPATH"] = before


def join_ranks(work: Callable[[Place], None]) -> None:
    """Runs `work` as one of the ranks of torchrun's environment, in a group of all of them.

    Raises InputError when it does so on any rank, or when another rank is lost.
    """
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if world_size == 1:
        work(Place())
        return
    # Its functions keep the group that exists when it is imported as a default argument, and transformers imports it.
    importlib.import_module("torch.distributed.nn.functional")
    # gloo, as all is on the CPU. The other ranks wait in a collective for as long as rank 0 computes hidden states;
    # a rank that dies is noticed at once, by its closed connections.
    dist.init_process_group("gloo", timeout=timedelta(days=1))
    failure = _as_member(work, Place(rank, dist.group.WORLD))
    # Nothing may hold the group any longer: its threads have to end before the interpreter does, or one of them may
    # abort the process when it frees the tensors of the last collective.
    dist.destroy_process_group()
    gc.collect()
    if failure is not None:
        raise failure


def _as_member(work: Callable[[Place], None], place: Place) -> InputError | None:
    """What went wrong, without the traceback that would keep the group alive."""
    try:
        work(place)
    except InputError as error:
        return InputError(str(error), printed=error.printed)
    except RuntimeError as error:
        if "gloo" not in str(error):
            raise
        return InputError(f"rank {place.rank} lost another rank: {first_line(error)}", printed=place.rank != 0)
    return None


def agree(place: Place, part: Callable[[], T]) -> T:
    """The result of `part`, or on every rank an InputError with the first rank's message that failed. Collective.

    Rank 0 prints it, the others stay silent.
    """
    result: T | None = None
    message: str | None = None
    try:
        result = part()
    except InputError as error:
        message = str(error)
    except (ValueError, OSError, MemoryError) as error:
        message = first_line(error)
    messages = [message]
    if place.group is not None:
        messages = [None] * place.group.size()
        dist.all_gather_object(messages, message, group=place.group)
    for rank, found in enumerate(messages):
        if found is not None:
            everywhere = messages.count(found) == len(messages)
            raise InputError(found if everywhere else f"rank {rank}: {found}", printed=place.rank != 0)
    return cast(T, result)


def from_first(place: Place, part: Callable[[], T]) -> T:
    """The result of `part` on rank 0, on every rank, or an InputError on every rank. Collective."""
    result = agree(place, lambda: part() if place.rank == 0 else None)
    if place.group is not None:
        results = [result]
        dist.broadcast_object_list(results, group=place.group, group_src=0)
        result = results[0]
    return cast(T, result)


def gather(place: Place, value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank. Collective."""
    if place.group is None:
        return [value]
    values = [value] * place.group.size()
    dist.all_gather_object(values, value, group=place.group)
    return values
