"""The n best columns of each row over all ranks, their log-probs, and the place of the target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from vocabshard import cuts
from vocabshard import sampling as S
from vocabshard.cuts import Block, Over
from vocabshard.dist.fold import fold_scores, set_targets
from vocabshard.dist.gather import gather_tensors
from vocabshard.kernels import sampling_torch
from vocabshard.partials import Scores
from vocabshard.passes import Call, LinearOperands

BESIDE_ROWS = 4096  # of a launch of the fused forward
BESIDE_FROM, BESIDE_MOST = 257, 100  # rows; best columns: else logits are faster


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
) -> tuple[Scores, Best]:
    """The fold of the gathered records, and the best of a block. A gather or two, and a sum of a word a row."""
    assert call.topk is not None
    rule = (call.ignore_index, call.real_vocab_size, call.invalid)
    module = call.kernel
    if not hasattr(module, "topk_scan") or not module.topk_fits(call.widest, call.topk):  # the same on every rank
        rows = fold_scores(call.backend, gathered, tokens, *rule)
        places = cuts.best_places(kernel, [block], call.topk, over)
        rank = cuts.rank_of(kernel, [block], tokens, over)
        return rows, _scored(call, gathered, places, rank, scale, cut)
    if call.group is None:
        rows, *top = module.topk_rows(*block, call.topk, gathered, tokens, scale, cut, rule)
    else:
        best, before = module.topk_scan(*block, call.topk, tokens, cuts.target_places([block], tokens, over))
        everyone, before = over.gather([best]), over.sum([before])
        rows, *top = module.topk_finish(gathered, everyone, before, tokens, scale, cut, rule)
    return rows, Best(*top)


def goes_beside(call: Call, x: LinearOperands) -> bool:
    """Whether the best are found beside the fused forward: by what all ranks know alike."""
    n, kernel = call.topk, call.kernel
    if n is None or not hasattr(kernel, "topk_forward") or call.want_logits or call.problem.entropy:
        return False
    finds = x.cut is None and call.sampling is not None and call.sampling.truncates
    half = x.hidden.dtype in (torch.bfloat16, torch.float16) and x.hidden.shape[1] % 8 == 0
    many = x.target_ids.shape[0] >= BESIDE_FROM and n <= BESIDE_MOST
    return not finds and half and many and kernel.topk_fits(call.widest, n)


def beside(call: Call, x: LinearOperands) -> tuple[Scores, Best]:
    """The folded rows and their best. Two gathers, a sum of a word a row, and the records'."""
    assert call.topk is not None
    over, kernel = Over(call.group), call.kernel
    operands = kernel.TopkOperands(*x[:5], call.problem, x.cut)
    place = over.gather([kernel.topk_places(operands)])
    place = place[0] if over.alone else place.amax(0)
    records, best, before = kernel.topk_forward(operands, call.topk, place)
    gathered = gather_tensors(records, call.group).flatten(0, 1)
    everyone, before = over.gather([best]), over.sum([before])
    rule = (call.ignore_index, call.real_vocab_size, call.invalid)
    rows, *top = kernel.topk_finish(gathered, everyone, before, x.target_ids, x.inv_temperature, x.cut, rule)
    return rows, Best(*top)


def _scored(
    call: Call, gathered: Tensor, places: Tensor, rank: Tensor, scale: float | Tensor | None, cut: Tensor | None
) -> Best:
    some = places != S.KEEP_ALL
    z, ids = S.place_parts(torch.where(some, places, 0))
    kept = some if cut is None else some & (places >= cut[:, None])
    y = torch.where(kept, sampling_torch.scaled(z, scale), float("-inf"))
    many = set_targets(call.backend, gathered, y)
    ids = torch.where(some, ids, -1)
    scored = fold_scores(call.backend, many, torch.where(some, ids, 0).reshape(-1), -1, call.real_vocab_size, "nan")
    logp = torch.where(some, scored.logp.view(ids.shape), float("-inf"))
    return Best(ids, logp, rank)
