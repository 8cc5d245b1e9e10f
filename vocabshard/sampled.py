"""Passes over blocks of logits: the cut of each row, a token drawn of what is left, its log-prob, the best columns.

The same on every rank of the group. A block is as many rows as keep the widest shard's fp32 logits within
kernels/truncated.py's LOGITS_BYTES.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vocabshard import cuts, kernels
from vocabshard import sampling as S
from vocabshard.best import BESIDE_ROWS, Best, beside, goes_beside, of_logits
from vocabshard.cuts import Block, Over
from vocabshard.dist.fold import fold_scores
from vocabshard.dist.gather import gather_rows, gather_tensors
from vocabshard.kernels import sampling_torch, truncated
from vocabshard.kernels.problem import DrawnRows
from vocabshard.partials import Scores
from vocabshard.passes import Call, LinearOperands

_TEMPORARIES = 16  # that torch operations make of a block, of twice its size for the most part
_LEAST_COLUMNS = 16384  # a row's histograms take 32 KiB, and as much again as they are added up, however narrow it is


class Draw(NamedTuple):
    """What a token is drawn with."""

    seed: int
    row_keys: Tensor | None  # int64 [N], contiguous; None: 0, 1, 2, ...

    def keys_of(self, hidden: Tensor) -> Tensor:
        """int64 [N]: those of these rows."""
        return torch.arange(hidden.shape[0], device=hidden.device) if self.row_keys is None else self.row_keys


class Sampled(NamedTuple):
    """Of every row."""

    rows: Scores
    cut: Tensor | None  # int64 [N]
    tokens: Tensor  # int64 [N]: drawn, or the targets as they were given
    best: Best | None
    logits: Tensor | None  # fp32 [N, V_local]


def pass_over(call: Call, x: LinearOperands, draw: Draw | None = None) -> Sampled:
    """One product per row: finds the cut where x has none, draws where asked to, scores, and ranks if call.topk.

    Collectives a block: a word a row for the maxima, what cuts.find_cut says, three words a row for a draw, the
    records, and for the best n words a row, a word and a sum of a word. The best alone may come beside the fused
    forward.
    """
    if draw is not None:
        keys = draw.keys_of(x.hidden)
        draw, x = draw._replace(row_keys=keys), x._replace(target_ids=keys)  # any targets: the tokens replace them
    if call.sequence_parallel:
        ((_, hidden),) = gather_rows(x.hidden, call.group, pieces=False)
        x = x._replace(hidden=hidden)
    if draw is None and goes_beside(call, x):
        blocks = [slice(first, first + BESIDE_ROWS) for first in range(0, x.target_ids.shape[0], BESIDE_ROWS)]
        of_rows = [_rows_of(x, rows) for rows in blocks]
        found = [Sampled(rows, y.cut, y.target_ids, best, None) for y in of_rows for rows, best in [beside(call, y)]]
        return found[0] if len(found) == 1 else _joined(found)
    blocks = _row_blocks(call, x)
    if len(blocks) == 1:
        return _of_block(call, x, draw)
    return _joined([_of_block(call, _rows_of(x, rows), _draw_of(draw, rows)) for rows in blocks])


def draws_beside(call: Call, rows: int) -> bool:
    """Whether tokens are drawn beside the forward. By what the ranks have in common: their collectives depend on it."""
    whole = call.topk is None and not call.problem.entropy and (call.sampling is None or not call.sampling.truncates)
    return whole and 0 < rows <= getattr(call.kernel, "DRAWN_ROWS", 0)


def draw_at_once(call: Call, x: LinearOperands, draw: Draw, want_lse: bool) -> DrawnRows | None:
    """What kernels have in one call; None where there is more to do. Over a group tokens that are drawn beside the
    forward alone: a gather of six words a row."""
    rows = x.hidden.shape[0]
    operands = (x.hidden, x.weight, x.bias, x.inv_temperature, call.problem, draw.seed)
    rule = (call.ignore_index, call.real_vocab_size, call.invalid, want_lse)
    found: DrawnRows | None = None
    if draws_beside(call, rows):
        if call.group is not None:
            records = call.kernel.draw_records(*operands, draw.row_keys)
            if records is None:  # this rank's operands: the others need not know
                records = _records_of_draw(call, x, draw)
            return call.kernel.fold_draws(gather_tensors(records, call.group), *rule)
        found = call.kernel.draw_rows(*operands, draw.row_keys, *rule)
    one_block = 4 * rows * x.weight.shape[0] <= truncated.LOGITS_BYTES
    if found is None and call.group is None and call.topk is None and one_block and hasattr(call.kernel, "sample_rows"):
        steps = () if call.sampling is None else call.sampling.steps
        found = call.kernel.sample_rows(*operands, draw.keys_of(x.hidden), steps, *rule)
    return found


def _records_of_draw(call: Call, x: LinearOperands, draw: Draw) -> Tensor:
    """What a kernel's draw_records has, from logits."""
    n, device = x.hidden.shape[0], x.hidden.device
    targets = torch.full((n,), -1, device=device)
    operands = (x.hidden, x.weight, x.bias, targets, x.inv_temperature, call.problem)
    own, logits = call.kernel.forward(*operands, want_logits=True)
    cut = torch.full((n,), S.KEEP_ALL, device=device)
    kernel = sampling_torch.functions(call.kernel)
    arrival, ids, order = kernel.draw(logits, call.problem, x.inv_temperature, cut, draw.seed, draw.keys_of(x.hidden))
    y = sampling_torch.scaled(S.logit_of(order), x.inv_temperature)
    at = (ids << 32) + (y.contiguous().view(torch.int32).to(torch.int64) & sampling_torch.WORD)
    return torch.cat([own, arrival[None], torch.where(arrival == S.NO_ARRIVAL, S.NO_ARRIVAL, at)[None]])


def _row_blocks(call: Call, x: LinearOperands) -> list[slice]:
    width = max(call.widest, _LEAST_COLUMNS)
    if sampling_torch.functions(call.kernel).ran == sampling_torch.RAN_TORCH:
        width *= _TEMPORARIES
    return list(truncated.row_blocks(x.target_ids.shape[0], width)) or [slice(0, 0)]


def _rows_of(x: LinearOperands, rows: slice) -> LinearOperands:
    scale = x.inv_temperature[rows] if isinstance(x.inv_temperature, Tensor) else x.inv_temperature
    cut = None if x.cut is None else x.cut[rows]
    return LinearOperands(x.hidden[rows], x.weight, x.bias, x.target_ids[rows], scale, cut)


def _draw_of(draw: Draw | None, rows: slice) -> Draw | None:
    if draw is None:
        return None
    assert draw.row_keys is not None  # of a part of the rows they are not 0, 1, 2, ...
    return draw._replace(row_keys=draw.row_keys[rows])


def _of_block(call: Call, x: LinearOperands, draw: Draw | None) -> Sampled:
    kernel = sampling_torch.functions(call.kernel)
    over = Over(call.group)
    plain = replace(call.problem, entropy=False) if call.problem.entropy else call.problem
    uncut, logits = call.kernel.forward(*x[:5], plain, want_logits=True)
    blocks = [Block(logits, call.problem)]
    steps = () if call.sampling is None else call.sampling.steps
    cut, tokens, records = x.cut, x.target_ids, None
    looks = draw is not None or (steps and cut is None)
    at_once = None
    if looks and over.alone and kernel.rows is not None:
        at_once = kernel.rows(
            logits, call.problem, x.inv_temperature, steps if cut is None else (), cut, tokens, uncut,
            *(() if draw is None else draw),
        )  # fmt: skip
    if at_once is not None:
        cut, tokens, records = at_once
    elif looks:
        maxima = cuts.find_maxima(kernel, blocks, over)
        usable = cuts.usable_rows(maxima, x.inv_temperature, steps)
        if cut is None:
            cut = cuts.find_cut(kernel, blocks, x.inv_temperature, steps, maxima, usable, over)
        if draw is not None:
            assert draw.row_keys is not None
            tokens = cuts.draw(kernel, blocks, x.inv_temperature, cut, usable, draw.seed, draw.row_keys, over).ids
    if records is None and tokens is x.target_ids and cut is None and not call.problem.entropy:
        records = uncut
    if records is None:
        records = truncated.logits_forward(call.kernel, logits, tokens, x.inv_temperature, call.problem, cut)
    gathered = gather_tensors(records, call.group)
    best = None
    if call.topk is None:
        rows = fold_scores(call.backend, gathered, tokens, call.ignore_index, call.real_vocab_size, call.invalid)
    else:
        rows, best = of_logits(call, kernel, blocks[0], gathered, tokens, x.inv_temperature, cut, over)
    return Sampled(rows, cut, tokens, best, logits if call.want_logits else None)


def _joined(found: list[Sampled]) -> Sampled:
    def whole(parts: list[Tensor | None]) -> Tensor | None:
        there = [part for part in parts if part is not None]
        return torch.cat(there) if there else None

    rows = Scores(*(whole(list(parts)) for parts in zip(*(one.rows for one in found), strict=True)))  # type: ignore[arg-type]
    bests = [one.best for one in found if one.best is not None]
    best = Best(*(torch.cat(parts) for parts in zip(*bests, strict=True))) if bests else None
    return Sampled(
        rows,
        whole([one.cut for one in found]),
        torch.cat([one.tokens for one in found]),
        best,
        whole([one.logits for one in found]),
    )


def ran(backend: str) -> str:
    """Whose kernels do it, for provenance."""
    return sampling_torch.functions(kernels.module(backend)).ran
