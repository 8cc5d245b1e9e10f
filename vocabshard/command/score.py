"""`vocabshard score`: every token of a text, scored by a checkpoint's head sharded over the ranks of a group.

The hidden states are computed once, on rank 0, and sent to the others, so that the bytes of the records depend on the
head alone: one file is like another whatever the sharding and the batch.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vocabshard.command.checkpoint import file_sha256
from vocabshard.command.errors import InputError, first_line, require
from vocabshard.command.hidden import hidden_states, load_base_model
from vocabshard.command.job import Job, choose_tp, prepare
from vocabshard.command.records import FORMAT, token_record, write_records

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from vocabshard import VocabShard
    from vocabshard.contract import Provenance

T = TypeVar("T")
TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SENT_ROWS = 1024  # hidden states reach the other ranks about so many at a time


@dataclass(frozen=True)
class Place:
    """This process among the ranks; without a group it is alone."""

    rank: int = 0
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Head:
    """This rank's part of the head: `weight` [V_local, D], `bias` [V_local] or None, both of the dtype asked for."""

    shard: VocabShard
    weight: torch.Tensor
    bias: torch.Tensor | None


def score(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Runs the subcommand; `arguments` is the command line it came from, which its own ranks get again.

    Raises InputError for bad input, before any rank is started where that can be found out before.
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched:
        return _score_as_rank(args)
    job = prepare(args, choose_tp(args, None))
    if len(job.sizes) == 1:
        run_job(job, Place())
        return 0
    return _start_ranks(len(job.sizes), arguments)


def _start_ranks(tp: int, arguments: Sequence[str]) -> int:
    """The exit code of `tp` ranks that run this command with the same package as this process.

    Not by `python -m vocabshard`: that would take the package in the working directory, if there is one, such as a
    source tree that nobody has built.
    """
    from vocabshard import launching

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


def run_job(job: Job, place: Place) -> None:
    """Scores and, on rank 0, writes. Collective over the ranks of `place`."""
    torch = require("torch")
    from vocabshard import VocabShard

    started = time.perf_counter()
    hidden = agree(place, lambda: _hidden_on_first(job, place))
    hidden_seconds = time.perf_counter() - started
    start = sum(job.sizes[: place.rank])
    stop = start + job.sizes[place.rank]
    dtype = getattr(torch, TORCH_DTYPES[job.dtype])
    weight, bias = agree(place, lambda: job.checkpoint.head_shard(start, stop, dtype))
    shard = agree(place, lambda: VocabShard(start, stop, job.real_vocab_size, sum(job.sizes), place.group))
    head = Head(shard, weight, bias)
    targets = torch.tensor(job.tokens.ids[job.tokens.context :])
    with _progress(job, place, "head", len(targets)) as advance:
        words, ran = _score_rows(job, place, hidden, targets, head, advance)
    if place.rank != 0:
        return
    head_seconds = time.perf_counter() - started - hidden_seconds
    assert hidden is not None
    summary = _summary(words, hidden_seconds, head_seconds)
    write_records(job.out, _records(job, _header(job, hidden, ran), words, summary))
    if not job.quiet:
        print(
            f"{summary['tokens']} tokens, mean logp {summary['mean_logp']}, perplexity {summary['perplexity']}, "
            f"{summary['seconds']:.1f} s (hidden states {hidden_seconds:.1f}, head {head_seconds:.1f}), "
            f"{summary['tokens_per_s']:.0f} tokens/s, tp {len(job.sizes)}: {job.out}",
            file=sys.stderr,
        )


def agree(place: Place, part: Callable[[], T]) -> T:
    """The result of `part`, or on every rank an InputError with the first rank's message that failed. Collective.

    Rank 0 prints it, the others stay silent.
    """
    result, message = None, None
    try:
        result = part()
    except InputError as error:
        message = str(error)
    except (ValueError, OSError, MemoryError) as error:
        message = first_line(error)
    messages = [message]
    if place.group is not None:
        dist = require("torch.distributed")
        messages = [None] * place.group.size()
        dist.all_gather_object(messages, message, group=place.group)
    for rank, found in enumerate(messages):
        if found is not None:
            everywhere = messages.count(found) == len(messages)
            raise InputError(found if everywhere else f"rank {rank}: {found}", printed=place.rank != 0)
    return result  # type: ignore[return-value]  # not None: the part came to its end


def _score_as_rank(args: argparse.Namespace) -> int:
    """As one of the ranks that torchrun, or this command itself, has started."""
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    try:
        tp = choose_tp(args, world_size)
    except InputError as error:
        raise InputError(str(error), printed=rank != 0) from error
    if world_size == 1:
        run_job(prepare(args, tp), Place())
        return 0
    dist = require("torch.distributed")
    # Its functions keep the group that exists when it is imported as a default argument, and transformers imports it.
    require("torch.distributed.nn.functional")
    # gloo, as all is on the CPU. The other ranks wait in a collective for as long as rank 0 computes hidden states;
    # a rank that dies is noticed at once, by its closed connections.
    dist.init_process_group("gloo", timeout=timedelta(days=1))
    failure = _as_member(args, tp, Place(rank, dist.group.WORLD))
    # Nothing may hold the group any longer: its threads have to end before the interpreter does, or one of them may
    # abort the process when it frees the tensors of the last collective.
    dist.destroy_process_group()
    gc.collect()
    if failure is not None:
        raise failure
    return 0


def _as_member(args: argparse.Namespace, tp: int, place: Place) -> InputError | None:
    """What went wrong, without the traceback that would keep the group alive."""
    try:
        run_job(agree(place, lambda: prepare(args, tp)), place)
    except InputError as error:
        return InputError(str(error), printed=error.printed)
    except RuntimeError as error:
        if "gloo" not in str(error):
            raise
        return InputError(f"rank {place.rank} lost another rank: {first_line(error)}", printed=place.rank != 0)
    return None


def _hidden_on_first(job: Job, place: Place) -> torch.Tensor | None:
    """fp32 [tokens, D] on rank 0, None on the others."""
    if place.rank != 0:
        return None
    model = load_base_model(job.checkpoint)
    with _progress(job, place, "hidden states", len(job.tokens.ids) - 1) as advance:
        hidden = hidden_states(model, job.tokens.ids[:-1], job.windows, job.threads, advance)[job.tokens.context - 1 :]
    if hidden.shape[1] != job.checkpoint.head_shape[1]:
        raise InputError(
            f"checkpoint {job.checkpoint.path}: the model gives hidden states of {hidden.shape[1]}, its head "
            f"takes {job.checkpoint.head_shape[1]}"
        )
    return hidden


def _score_rows(
    job: Job,
    place: Place,
    hidden: torch.Tensor | None,
    targets: torch.Tensor,
    head: Head,
    advance: Callable[[int], Any],
) -> tuple[torch.Tensor, Provenance]:
    """The bits of logp, lse and entropy, int32 [3, tokens], and what computed them. Collective.

    The ranks check that they agree at the first batch; the others differ in nothing that could go wrong.
    """
    torch = require("torch")
    from vocabshard import ContractError, linear_logp

    parts = []
    for first, rows in _received(job, place, hidden, len(targets)):
        for start in range(0, len(rows), job.batch_rows):
            batch = rows[start : start + job.batch_rows].to(head.weight.dtype)
            try:
                with torch.no_grad():
                    result = linear_logp(
                        batch,
                        head.weight,
                        targets[first + start : first + start + len(batch)],
                        head.bias,
                        shard=head.shard,
                        softcap=job.checkpoint.softcap,
                        validate=None if not parts else False,
                        return_lse=True,
                        return_entropy=True,
                    )
            except (ValueError, TypeError, ContractError) as error:  # raised on every rank alike
                raise InputError(f"the head: {first_line(error)}", printed=place.rank != 0) from error
            parts.append(torch.stack([result.logp, result.lse, result.entropy]).view(torch.int32))
            advance(len(batch))
    return torch.cat(parts, dim=1), result.provenance


def _received(job: Job, place: Place, hidden: torch.Tensor | None, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(index of the first row, rows), some batches' worth of hidden states after the other, from rank 0 to all."""
    torch = require("torch")
    step = job.batch_rows * max(1, SENT_ROWS // job.batch_rows)
    for first in range(0, count, step):
        size = min(step, count - first)
        if hidden is not None:
            rows = hidden[first : first + size].contiguous()
        else:
            rows = torch.empty(size, job.checkpoint.head_shape[1], dtype=torch.float32)
        if place.group is not None:
            require("torch.distributed").broadcast(rows, 0, group=place.group)
        yield first, rows


def _header(job: Job, hidden: torch.Tensor, ran: Provenance) -> dict[str, Any]:
    torch = require("torch")
    rows, width = job.checkpoint.head_shape
    return {
        "type": "header",
        "format": FORMAT,
        "contract": ran.contract_id,
        "projection": ran.projection_id,
        "backend": ran.backend,
        "provenance": ran.as_dict(),
        "tp": len(job.sizes),
        "sizes": job.sizes,
        "batch_rows": job.batch_rows,
        "dtype": job.dtype,
        "checkpoint": {"name": job.checkpoint.path.resolve().name, "sha256": job.checkpoint.fingerprints()},
        "text": {"name": job.text.name, "sha256": file_sha256(job.text)},
        "model": {
            "model_type": job.checkpoint.config.get("model_type"),
            "hidden_size": width,
            "head_rows": rows,
            "real_vocab_size": job.real_vocab_size,
            "head": job.checkpoint.head_name,
            "bias": job.checkpoint.bias_name,
            "softcap": job.checkpoint.softcap,
        },
        "hidden": {
            "sha256": hashlib.sha256(hidden.numpy().tobytes()).hexdigest(),
            "window": job.windows.length,
            "stride": job.windows.stride,
            "threads": job.threads,
            "torch": torch.__version__,
            "transformers": require("transformers").__version__,
        },
    }


def _summary(words: torch.Tensor, hidden_seconds: float, head_seconds: float) -> dict[str, Any]:
    torch = require("torch")
    mean = words[0].view(torch.float32).double().mean().item()
    seconds = hidden_seconds + head_seconds
    finite = math.isfinite(mean)
    return {
        "type": "summary",
        "tokens": words.shape[1],
        "mean_logp": mean if finite else None,
        "perplexity": math.exp(-mean) if finite else None,
        "seconds": seconds,
        "hidden_seconds": hidden_seconds,
        "head_seconds": head_seconds,
        "tokens_per_s": words.shape[1] / seconds,
    }


def _records(
    job: Job, header: Mapping[str, Any], words: torch.Tensor, summary: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    yield header
    context = job.tokens.context
    for index, bits in enumerate(words.t().tolist()):
        logp, lse, entropy = (word & 0xFFFFFFFF for word in bits)
        yield token_record(
            index, job.tokens.ids[context + index], job.tokens.texts[context + index], (logp, lse, entropy)
        )
    yield summary


@contextmanager
def _progress(job: Job, place: Place, name: str, total: int) -> Iterator[Callable[[int], Any]]:
    """Gives a function to call with the number of tokens done; a bar on rank 0's stderr unless --quiet."""
    if job.quiet or place.rank != 0:
        yield lambda done: None
        return
    with require("tqdm").tqdm(total=total, desc=name, unit="token", file=sys.stderr) as bar:
        yield bar.update
