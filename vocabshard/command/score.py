"""`vocabshard score`: every token of a text, scored by a checkpoint's head sharded over the ranks of a group.

The hidden states are computed once, on rank 0, and sent to the others, so that the bytes of the records depend on the
head alone: one file is like another whatever the sharding and the batch.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vocabshard import ContractError, LogpOutput, VocabShard, linear_logp
from vocabshard.command.checkpoint import file_sha256
from vocabshard.command.errors import InputError, first_line, require
from vocabshard.command.hidden import hidden_states, load_base_model
from vocabshard.command.job import Job, choose_tp, prepare
from vocabshard.command.ranks import Place, agree, join_ranks, start_ranks
from vocabshard.command.records import FORMAT, token_record, write_records
from vocabshard.contract import Provenance

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SENT_ROWS = 1024  # hidden states reach the other ranks about so many at a time


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
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        try:
            tp = choose_tp(args, int(os.environ["WORLD_SIZE"]))
        except InputError as error:
            raise InputError(str(error), printed=os.environ["RANK"] != "0") from error
        join_ranks(lambda place: run_job(agree(place, lambda: prepare(args, tp)), place))
        return 0
    job = prepare(args, choose_tp(args, None))
    if len(job.sizes) > 1:
        return start_ranks(len(job.sizes), arguments)
    run_job(job, Place())
    return 0


def run_job(job: Job, place: Place) -> None:
    """Scores and, on rank 0, writes. Collective over the ranks of `place`."""
    started = time.perf_counter()
    hidden = agree(place, lambda: _hidden_on_first(job, place))
    hidden_seconds = time.perf_counter() - started
    start = sum(job.sizes[: place.rank])
    stop = start + job.sizes[place.rank]
    weight, bias = agree(place, lambda: job.checkpoint.head_shard(start, stop, TORCH_DTYPES[job.dtype]))
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
        print(_in_words(job, summary), file=sys.stderr)


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
    parts: list[torch.Tensor] = []
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
            assert isinstance(result, LogpOutput) and result.lse is not None and result.entropy is not None
            parts.append(torch.stack([result.logp, result.lse, result.entropy]).view(torch.int32))
            advance(len(batch))
    assert isinstance(result, LogpOutput) and result.provenance is not None
    return torch.cat(parts, dim=1), result.provenance


def _received(job: Job, place: Place, hidden: torch.Tensor | None, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(index of the first row, rows), some batches' worth of hidden states after the other, from rank 0 to all."""
    step = job.batch_rows * max(1, SENT_ROWS // job.batch_rows)
    for first in range(0, count, step):
        size = min(step, count - first)
        if hidden is not None:
            rows = hidden[first : first + size].contiguous()
        else:
            rows = torch.empty(size, job.checkpoint.head_shape[1], dtype=torch.float32)
        if place.group is not None:
            dist.broadcast(rows, 0, group=place.group)
        yield first, rows


def _header(job: Job, hidden: torch.Tensor, ran: Provenance) -> dict[str, Any]:
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


def _in_words(job: Job, summary: Mapping[str, Any]) -> str:
    numbers = (summary["mean_logp"], summary["perplexity"])
    mean, perplexity = ("not finite" if number is None else f"{number:.6g}" for number in numbers)
    return (
        f"{summary['tokens']} tokens, mean logp {mean}, perplexity {perplexity}, {summary['seconds']:.1f} s "
        f"(hidden states {summary['hidden_seconds']:.1f}, head {summary['head_seconds']:.1f}), "
        f"{summary['tokens_per_s']:.0f} tokens/s, tp {len(job.sizes)}: {job.out}"
    )


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
