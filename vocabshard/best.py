"""The n best columns of each row over all ranks, their log-probs, and the place of the target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from vocabshard import cuts
from vocabshard import sampling as S
from vocabshard.cuts import Block, Over
from vocabshard.dist.fold import fold, set_targets
from vocabshard.kernels import sampling_torch
from vocabshard.partials import FoldedRows
from vocabshard.passes import Call


class Best(NamedTuple):
    """The n best columns of each row, and the place of its target among all."""

    ids: Tensor  # int64 [N, n], -1 where there are fewer columns
    logp: Tensor  # fp32 [N, n]
    target_rank: Tensor  # int64 [N], from 1; 0 where the target is no column


def of_logits(
    call: Call,
    kernel: SimpleNamespace,
    block: Block,
    gathered: Tensor,
    tokens: Tensor,
    scale: float | Tensor | None,
    cut: Tensor | None,
    over: Over,
) -> tuple[FoldedRows, Best]:
    """The fold of the gathered records, and the best of a block. A gather or two, and a sum of a word a row."""
    assert call.topk is not None
    rule = (call.ignore_index, call.real_vocab_size, call.invalid)
    scan, finish = getattr(call.kernel, "topk_scan", None), getattr(call.kernel, "topk_finish", None)
    if scan is None or finish is None or not call.kernel.topk_fits(call.widest, call.topk):  # the same on every rank
        rows = fold(call.backend, gathered, tokens, *rule)
        places = cuts.best_places(kernel, [block], call.topk, over)
        rank = cuts.rank_of(kernel, [block], tokens, over)
        return rows, _scored(call, gathered, places, rank, scale, cut)
    place = None if over.alone else cuts.target_places([block], tokens, over)
    best, before = scan(*block, call.topk, tokens, place)
    everyone = over.gather([best])
    rows, ids, logp, rank = finish(gathered, everyone, over.sum([before]), tokens, scale, cut, *rule)
    return rows, Best(ids, logp, rank)


def _scored(
    call: Call, gathered: Tensor, places: Tensor, rank: Tensor, scale: float | Tensor | None, cut: Tensor | None
) -> Best:
    some = places != S.KEEP_ALL
    z, ids = S.place_parts(torch.where(some, places, 0))
    kept = some if cut is None else some & (places >= cut[:, None])
    y = torch.where(kept, sampling_torch.scaled(z, scale), float("-inf"))
    many = set_targets(call.backend, gathered, y)
    ids = torch.where(some, ids, -1)
    scored = fold(call.backend, many, torch.where(some, ids, 0).reshape(-1), -1, call.real_vocab_size, "nan")
    logp = torch.where(some, scored.logp.view(ids.shape), float("-inf"))
    return Best(ids, logp, rank)
