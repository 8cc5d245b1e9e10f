"""`vocabshard score`: every token of a text or of completions, by a checkpoint's head sharded over a group of ranks.

The hidden states are computed on rank 0, some windows at a time, and sent to the others, so that the bytes of the
records depend on the head alone: one file is like another whatever the sharding and the batch.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vocabshard import ContractError, LogpOutput, VocabShard, linear_logp, provenance, weight_fingerprint
from vocabshard.command.checkpoint import file_sha256
from vocabshard.command.errors import EXIT_BAD_INPUT, InputError, first_line, require
from vocabshard.command.fingerprints import row_fingerprints, target_fingerprints
from vocabshard.command.hidden import hidden_states, in_chunks, load_base_model
from vocabshard.command.job import Job, choose_tp, prepare
from vocabshard.command.ranks import Place, agree, from_first, gather, join_ranks, start_ranks
from vocabshard.command.recording import Recording, partial_of
from vocabshard.command.records import FORMAT, token_record
from vocabshard.contract import Provenance, digest

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Head:
    """This rank's part of the head: `weight` [V_local, D], `bias` [V_local] or None, both of the dtype asked for."""

    shard: VocabShard
    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None

    @property
    def options(self) -> dict[str, Any]:
        """What every call of the operator gets."""
        return {"shard": self.shard, "softcap": self.softcap, "return_entropy": True, "return_lse": True}


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
        code = start_ranks(len(job.sizes), arguments)
        partial = partial_of(job.out)
        if code not in (0, EXIT_BAD_INPUT) and partial.exists():  # a rank was killed: none of them could say it
            print(f"what was scored is kept in {partial}, and the same command goes on from there", file=sys.stderr)
        return code
    run_job(job, Place())
    return 0


def run_job(job: Job, place: Place) -> None:
    """Scores and, on rank 0, writes. Collective over the ranks of `place`."""
    clock = Clock()
    model = agree(place, lambda: load_base_model(job.checkpoint) if place.rank == 0 else None)
    head, weight_print = _load_head(job, place)
    with _of_the_head(place):
        # of inputs like those to come: the ranks agree on the shard, and the header says what will run
        probe = torch.zeros(1, job.checkpoint.head_shape[1], dtype=head.weight.dtype)
        ran = provenance(probe, head.weight, torch.zeros(1, dtype=torch.int64), head.bias, **head.options)
    targets = job.targets
    header = _header(job, weight_print, ran)
    recording = agree(place, lambda: Recording(job.out, header, targets) if place.rank == 0 else None)
    with contextlib.nullcontext() if recording is None else contextlib.closing(recording):
        _fill(recording, job, place, model, head, weight_print, targets, clock)
    if recording is not None and job.plot is not None:
        from vocabshard.command.plot import plot_scores

        plot_scores(job.out, job.plot)


def _fill(
    recording: Recording | None,
    job: Job,
    place: Place,
    model: torch.nn.Module | None,
    head: Head,
    weight_print: str,
    targets: list[int],
    clock: Clock,
) -> None:
    """Scores what is not recorded yet; rank 0 alone has the recording and the model. Collective."""
    resumed = from_first(place, lambda: recording.done if recording is not None else 0)
    with _progress(job, place, len(targets), resumed) as advance:
        rows = _rows(job, place, model, resumed, len(targets), clock)
        records = _Records(job, weight_print)
        for first, batch in zip(range(resumed, len(targets), job.batch_rows), rows, strict=True):
            ids = torch.tensor(targets[first : first + len(batch)])
            with clock.counting("head"), _of_the_head(place):
                words = _score(batch, ids, head, validate=None if first == resumed else False)
            if recording is not None:
                recording.add(records.of(first, batch, words))
            advance(len(batch))
    memory = max(gather(place, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    if recording is not None:
        summary = _summary(recording, resumed, clock, memory)
        recording.finish(summary)
        if not job.quiet:
            print(_in_words(job, summary), file=sys.stderr)


class Clock:
    """Seconds since it was made, and those spent in each of its parts."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.parts = {"hidden": 0.0, "head": 0.0}

    @contextlib.contextmanager
    def counting(self, part: str) -> Iterator[None]:
        """Adds the time that the block takes."""
        began = time.perf_counter()
        yield
        self.parts[part] += time.perf_counter() - began


def _load_head(job: Job, place: Place) -> tuple[Head, str]:
    """This rank's part of the head, and the fingerprint of all its real rows as stored. Collective."""
    start = sum(job.sizes[: place.rank])
    weight, bias = agree(place, lambda: job.checkpoint.head_shard(start, start + job.sizes[place.rank]))
    rows = sum(job.sizes)
    shard = agree(place, lambda: VocabShard(start, start + len(weight), job.real_vocab_size, rows, place.group))
    stored = weight_fingerprint(weight, shard)
    if bias is not None:
        stored = digest({"weight": stored, "bias": weight_fingerprint(bias, shard)})
    dtype = TORCH_DTYPES[job.dtype]
    head = Head(shard, weight.to(dtype), None if bias is None else bias.to(dtype), job.checkpoint.softcap)
    return head, stored


def _rows(
    job: Job, place: Place, model: torch.nn.Module | None, first: int, count: int, clock: Clock
) -> Iterator[torch.Tensor]:
    """Hidden states fp32 [batch_rows, D] from the token `first` on, on every rank. Collective."""
    if model is not None:
        blocks = hidden_states(model, job.sequences, job.spans, job.batch_windows, job.threads, first)
        own = in_chunks(blocks, job.batch_rows)
    for start in range(first, count, job.batch_rows):
        if model is not None:
            with clock.counting("hidden"):
                rows = next(own)
            if rows.shape[1] != job.checkpoint.head_shape[1]:
                raise InputError(
                    f"checkpoint {job.checkpoint.path}: the model gives hidden states of {rows.shape[1]}, its head "
                    f"takes {job.checkpoint.head_shape[1]}"
                )
        else:
            rows = torch.empty(min(job.batch_rows, count - start), job.checkpoint.head_shape[1])
        if place.group is not None:
            dist.broadcast(rows, group=place.group, group_src=0)
        yield rows


@torch.no_grad()
def _score(rows: torch.Tensor, ids: torch.Tensor, head: Head, validate: bool | None) -> torch.Tensor:
    """The bits of logp, lse and entropy, int32 [3, rows]. Collective.

    The ranks check that they agree at the first batch; the others differ in nothing that could go wrong.
    """
    result = linear_logp(rows.to(head.weight.dtype), head.weight, ids, head.bias, validate=validate, **head.options)
    assert isinstance(result, LogpOutput) and result.lse is not None and result.entropy is not None
    return torch.stack([result.logp, result.lse, result.entropy]).view(torch.int32)


@contextlib.contextmanager
def _of_the_head(place: Place) -> Iterator[None]:
    """What the operator raises, which it does on every rank alike, said once."""
    try:
        yield
    except (ValueError, TypeError, ContractError) as error:
        raise InputError(f"the head: {first_line(error)}", printed=place.rank != 0) from error


class _Records:
    """Makes the records of tokens from what was scored."""

    def __init__(self, job: Job, weight_print: str) -> None:
        self._weight = weight_print
        self._tokens = [  # of each: sequence, id, text, fingerprint
            (number, *described)
            for number, tokens in enumerate(job.sequences)
            for described in zip(
                tokens.ids[tokens.context :],
                tokens.texts[tokens.context :],
                target_fingerprints(tokens.ids, tokens.context),
                strict=True,
            )
        ]

    def of(self, first: int, rows: torch.Tensor, words: torch.Tensor) -> list[Mapping[str, Any]]:
        """Of the tokens from `first` on, whose hidden states and bits these are."""
        found: list[Mapping[str, Any]] = []
        for index, (hidden, signed) in enumerate(zip(row_fingerprints(rows), words.t().tolist(), strict=True), first):
            sequence, token, text, target = self._tokens[index]
            bits = [word & 0xFFFFFFFF for word in signed]
            found.append(token_record(index, sequence, token, text, bits, (hidden, self._weight, target)))
        return found


def _header(job: Job, weight_print: str, ran: Provenance) -> dict[str, Any]:
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
        "score": job.scope,
        "checkpoint": {"name": job.checkpoint.path.resolve().name, "sha256": job.checkpoint.fingerprints()},
        "text": {"name": job.text.name, "sha256": file_sha256(job.text), "sequences": len(job.sequences)},
        "model": {
            "model_type": job.checkpoint.config.get("model_type"),
            "hidden_size": width,
            "head_rows": rows,
            "real_vocab_size": job.real_vocab_size,
            "head": job.checkpoint.head_name,
            "bias": job.checkpoint.bias_name,
            "softcap": job.checkpoint.softcap,
            "weight": weight_print,
        },
        "hidden": {
            "window": job.windows.length,
            "stride": job.windows.stride,
            "batch_windows": job.batch_windows,
            "threads": job.threads,
            "torch": torch.__version__,
            "transformers": require("transformers").__version__,
        },
    }


def _summary(recording: Recording, resumed: int, clock: Clock, memory: int) -> dict[str, Any]:
    mean = recording.sum_logp / recording.done
    seconds = time.perf_counter() - clock.started
    finite = math.isfinite(mean)
    return {
        "type": "summary",
        "tokens": recording.done,
        "resumed": resumed,
        "mean_logp": mean if finite else None,
        "perplexity": math.exp(-mean) if finite else None,
        "seconds": seconds,
        "hidden_seconds": clock.parts["hidden"],
        "head_seconds": clock.parts["head"],
        "tokens_per_s": (recording.done - resumed) / seconds,
        "memory_bytes": memory,
    }


def _in_words(job: Job, summary: Mapping[str, Any]) -> str:
    numbers = (summary["mean_logp"], summary["perplexity"])
    mean, perplexity = ("not finite" if number is None else f"{number:.6g}" for number in numbers)
    resumed = f" ({summary['resumed']} from before)" if summary["resumed"] else ""
    return (
        f"{summary['tokens']} tokens{resumed}, mean logp {mean}, perplexity {perplexity}, {summary['seconds']:.1f} s "
        f"(hidden states {summary['hidden_seconds']:.1f}, head {summary['head_seconds']:.1f}), "
        f"{summary['tokens_per_s']:.0f} tokens/s, at most {summary['memory_bytes'] / 2**20:.0f} MiB a rank, "
        f"tp {len(job.sizes)}: {job.out}"
    )


@contextlib.contextmanager
def _progress(job: Job, place: Place, total: int, done: int) -> Iterator[Callable[[int], Any]]:
    """Gives a function to call with the number of tokens done; a bar on rank 0's stderr unless --quiet."""
    if job.quiet or place.rank != 0:
        yield lambda done: None
        return
    with require("tqdm").tqdm(total=total, initial=done, desc="tokens", unit="token", file=sys.stderr) as bar:
        yield bar.update
