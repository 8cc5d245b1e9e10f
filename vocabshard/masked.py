"""Log-probs under a mask that keeps some of the vocabulary in each row, from hidden states, some rows at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocabshard import checks, together
from vocabshard.dist.grad import HiddenSum
from vocabshard.functional import linear_logp, vocab_parallel_logp
from vocabshard.options import LogpOutput
from vocabshard.shard import VocabShard, known_shard, make_shard

LOGITS_BYTES = 1 << 28  # of the fp32 logits of a chunk, where the caller names no number of rows


def masked_linear_logp(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    keep: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor | None = None,
    chunk_rows: int | None = None,
    **options: Any,
) -> Tensor:
    """Log-prob of each target under the softmax over the kept columns alone, fp32 [N].

    Args:
        hidden, weight, target_ids, bias, temperature: [N, D], [V_local, D], [N], [V_local] as in `linear_logp`.
        keep: bool [N, V_local], this rank's columns. A target that is not kept has log-prob -inf, and so has every row
            of which nothing is kept on any rank.
        chunk_rows: rows whose fp32 logits are held at a time; by default as many as fit 256 MiB.
        options: of both operators (tp_group, sizes, backend, strict, ...).

    Differentiable in hidden, weight and bias: the backward makes the logits again. The log-probs are the bytes of
    `vocab_parallel_logp` over the masked logits. Collectives: for each chunk and pass two all-gathers of 32 bytes a
    row, and one sum of grad_hidden over the group.
    """

    def check() -> None:
        together.known("masked_linear_logp", linear_logp, options)
        checks.with_width("hidden", hidden)
        checks.with_width("weight", weight)
        checks.tensor("keep", keep, (torch.bool,))
        if hidden.dim() != 2 or keep.shape != (hidden.shape[0], weight.shape[0]):
            raise ValueError(
                f"hidden must be [N, D] and keep bool [N, V_local] = {[*hidden.shape[:-1], weight.shape[0]]}, got "
                f"{list(hidden.shape)} and {keep.dtype} {list(keep.shape)}"
            )
        if chunk_rows is not None and chunk_rows < 1:
            raise ValueError(f"chunk_rows must be at least 1 or None, got {chunk_rows!r}")

    together.checked(
        check, together.group_of(options.get("tp_group"), options.get("shard")), (hidden, weight, target_ids),
        validate=options.get("validate"), backend=options.get("backend", "auto"),
        stated=lambda: (chunk_rows, len(hidden), *map(options.get, ("global_vocab_size", "real_vocab_size"))),
    )  # fmt: skip
    options = {**options, "shard": _shard_of(len(weight), options)}
    widest = max(stop - start for start, stop in options["shard"].ranges)  # chunks are the same on every rank
    step = chunk_rows or max(1, LOGITS_BYTES // (4 * max(1, widest)))
    chunks = [slice(first, min(first + step, len(hidden))) for first in range(0, len(hidden), step)]
    return _Masked.apply(hidden, weight, bias, target_ids, keep, temperature, chunks, options)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        keep: Tensor,
        temperature: float | Tensor | None,
        chunks: list[slice],
        options: dict[str, Any],
    ) -> Tensor:
        per_row = temperature if isinstance(temperature, Tensor) else None
        ctx.temperature, ctx.chunks, ctx.options = None if per_row is not None else temperature, chunks, options
        ctx.save_for_backward(hidden, weight, bias, target_ids, keep, per_row)
        logp = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        for rows in chunks:
            logits = _logits(hidden[rows], weight, target_ids[rows], bias, keep[rows], options)
            logp[rows] = vocab_parallel_logp(
                logits, target_ids[rows], temperature=_of_rows(temperature, rows), **options
            ).logp
        return logp

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target_ids, keep, per_row = ctx.saved_tensors
        grad_logp = upstream[0]
        temperature = ctx.temperature if per_row is None else per_row
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        shard: VocabShard = ctx.options["shard"]
        valid = shard.valid
        grad_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32)
        grad_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if needs_weight else None
        grad_bias = weight.new_zeros(len(weight), dtype=torch.float32) if needs_bias else None
        for rows in ctx.chunks:
            logits = _logits(hidden[rows], weight, target_ids[rows], bias, keep[rows], ctx.options).requires_grad_()
            with torch.enable_grad():
                logp = vocab_parallel_logp(
                    logits, target_ids[rows], temperature=_of_rows(temperature, rows), **ctx.options
                ).logp
            (dz,) = torch.autograd.grad(logp, logits, grad_logp[rows])
            dz = dz[:, :valid]  # whatever padding rows hold must not be multiplied, not even by 0
            if needs_hidden:
                grad_hidden[rows] = dz @ weight[:valid].float()
            if grad_weight is not None:
                counted = torch.where((grad_logp[rows] != 0)[:, None], hidden[rows].float(), 0.0)
                grad_weight[:valid] += dz.t() @ counted
            if grad_bias is not None:
                grad_bias[:valid] += dz.sum(0)
        result = None
        if needs_hidden:
            over_group = HiddenSum(shard.group, torch.float32, own_rows=False)
            over_group.start(grad_hidden)
            result = over_group.result(grad_hidden).to(hidden.dtype)
        return (
            result,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


def _shard_of(columns: int, options: dict[str, Any]) -> VocabShard:
    """That of the call. Collective where linear_logp would make it."""
    if options.get("shard") is not None:
        given: VocabShard = options["shard"]
        return given
    group: Any = options.get("tp_group")
    if hasattr(group, "get_group"):
        group = group.get_group()
    start, whole, real = map(options.get, ("vocab_start_index", "global_vocab_size", "real_vocab_size"))
    return known_shard(columns, group, start, whole, real) or make_shard(columns, group, start, whole, real)


def _of_rows(temperature: float | Tensor | None, rows: slice) -> float | Tensor | None:
    return temperature[rows] if isinstance(temperature, Tensor) and temperature.dim() else temperature


def _logits(
    hidden: Tensor, weight: Tensor, target_ids: Tensor, bias: Tensor | None, keep: Tensor, options: dict[str, Any]
) -> Tensor:
    """The masked fp32 logits of some rows, before temperature."""
    with torch.no_grad():
        out = linear_logp(hidden, weight, target_ids, bias, return_logits=True, **options)
    assert isinstance(out, LogpOutput) and out.logits is not None
    return out.logits.masked_fill_(~keep, float("-inf"))
