"""Where a program cuts each row, the token that is drawn of what is left, and the best of it, over all ranks.

Every function takes this rank's block of logits, or, so that any W can be had in one process, those of all ranks, and
`Over`, which adds and gathers what the ranks found. All of it is integers: no order of ranks, rows or columns shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocabshard import sampling as S
from vocabshard.contract import LOGIT_LIMIT
from vocabshard.dist.gather import gather_tensors, rank_and_size, sum_over_group
from vocabshard.kernels.problem import LocalProblem
from vocabshard.kernels.sampling_torch import exp_k, scaled

Scale = float | Tensor | None


class Block(NamedTuple):
    """One rank's fp32 logits [N, V_local] before temperature, and which of them count."""

    logits: Tensor
    problem: LocalProblem


class Over:
    """The ranks: a group's, of which this process has one block, or as many as there are blocks."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank, size = rank_and_size(group)
        self.alone = size == 1

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """[W, ...] in rank order."""
        return torch.stack(list(parts)) if len(parts) > 1 else gather_tensors(parts[0], self._group)

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """Of integers."""
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return sum_over_group(total.contiguous(), self._group)


class Maxima(NamedTuple):
    """What is known of each row before anything is cut."""

    place: Tensor  # int64 [N], of the best column
    logit: Tensor  # fp32 [N], its z
    known: Tensor  # bool [N]: finite


def find_maxima(kernel: SimpleNamespace, blocks: Sequence[Block], over: Over) -> Maxima:
    """One gather of a word a row."""
    place = over.gather([kernel.maxima(*block) for block in blocks]).amax(0)
    ordinary = (place != S.NO_ARRIVAL) & (place != S.KEEP_ALL)
    logit, _ = S.place_parts(torch.where(ordinary, place, 0))
    return Maxima(place, logit, ordinary & torch.isfinite(logit))


def usable_rows(maxima: Maxima, scale: Scale, steps: Sequence[S.Step]) -> Tensor:
    """bool [N]: rows whose largest y, at every scale that takes part, is one that the softmax layer can take."""
    usable = maxima.known
    used = [scale] if all(step.scaled for step in steps) else [scale, None]
    for one in used:
        y = scaled(maxima.logit, one)
        usable = usable & (y <= LOGIT_LIMIT) & (y > -LOGIT_LIMIT)
    return usable


def find_cut(
    kernel: SimpleNamespace,
    blocks: Sequence[Block],
    scale: Scale,
    steps: Sequence[S.Step],
    maxima: Maxima,
    usable: Tensor,
    over: Over,
) -> Tensor:
    """int64 [N]. Over the ranks a top_k takes three sums of histograms, a top_p two gathers more, a min_p a gather."""
    cut = torch.full_like(maxima.place, S.KEEP_ALL)
    for step in steps:
        at = scale if step.scaled else None
        if step.kind == "greedy":
            found = maxima.place
        elif step.kind == "min_p":
            threshold = (scaled(maxima.logit, at).double() + step.number).float()
            lowest = over.gather([kernel.floor(*block, at, threshold) for block in blocks]).amin(0)
            found = lowest << 32
        else:
            found = _Radix(kernel, blocks, at, step, maxima, cut, over).found()
        cut = torch.where(usable, torch.maximum(cut, found), S.KEEP_ALL)
    return cut


class _Radix:
    """The last kept column of a top_k or top_p, a digit of its order at a time."""

    def __init__(
        self,
        kernel: SimpleNamespace,
        blocks: Sequence[Block],
        scale: Scale,
        step: S.Step,
        maxima: Maxima,
        cut: Tensor,
        over: Over,
    ) -> None:
        self._kernel, self._blocks, self._scale, self._over = kernel, blocks, scale, over
        self._by_mass, self._number = step.kind == "top_p", int(step.number)
        self._k_max = exp_k(scaled(maxima.logit, scale))
        self._cut = cut if self._by_mass else torch.full_like(cut, S.KEEP_ALL)  # the k best of the row
        self._prefix = torch.zeros_like(cut)
        self._above = torch.zeros_like(cut)  # count or mass of what is better than the columns looked at

    def found(self) -> Tensor:
        """int64 [N]: the cut."""
        goal = None
        for level in range(len(S.RADIX)):
            mine = [
                self._kernel.histogram(*block, self._scale, self._k_max, self._cut, self._prefix, level, self._by_mass)
                for block in self._blocks
            ]
            last = level == len(S.RADIX) - 1
            local = [part[0].clone() for part in mine] if last else []  # a sum over a group is in place
            total = self._over.sum(mine)
            weights = total[1] if self._by_mass else total[0]
            if goal is None:
                goal = self._goal(weights.sum(1))
            chosen = self._choose(weights, goal, level)
        order = self._prefix - (1 << 31)
        if not self._by_mass:
            return order << 32
        count, mass = (part.gather(1, chosen[:, None])[:, 0] for part in total)
        each = (mass // count.clamp(min=1)).clamp(min=1)
        assert goal is not None
        kept = (goal - self._above + each - 1) // each
        return (order << 32) + self._tie(order, kept, count, [part.gather(1, chosen[:, None])[:, 0] for part in local])

    def _goal(self, total: Tensor) -> Tensor:
        """The count or mass at which the last kept column is reached."""
        if not self._by_mass:
            return total.clamp(max=self._number)
        high, low = total >> S.SHARE_BITS, total & ((1 << S.SHARE_BITS) - 1)
        return self._number * high + ((self._number * low + (1 << S.SHARE_BITS) - 1) >> S.SHARE_BITS)

    def _choose(self, weights: Tensor, goal: Tensor, level: int) -> Tensor:
        """The bin in which the goal is reached, from the highest down; int64 [N]."""
        bins = weights.shape[1]
        descending = weights.flip(1)
        reached = self._above[:, None] + descending.cumsum(1)
        index = (reached < goal[:, None]).sum(1).clamp(max=bins - 1)[:, None]
        self._above = (reached.gather(1, index) - descending.gather(1, index))[:, 0]
        chosen = bins - 1 - index[:, 0]
        self._prefix = (self._prefix << S.RADIX[level][1]) | chosen
        return chosen

    def _tie(self, order: Tensor, kept: Tensor, count: Tensor, local: Sequence[Tensor]) -> Tensor:
        """The low word of the cut: which of `count` equals is the last of the `kept` lowest ids."""
        split = kept < count
        if split.device.type == "cpu" and not bool(split.any()):  # the same answer on every rank
            return torch.zeros_like(order)
        by_rank = self._over.gather(local)
        before = by_rank.cumsum(0) - by_rank
        # every rank looks for it: where it is another's, the number is out of the range of its own
        ids = [
            self._kernel.equal(*block, order, torch.where(split, kept - self._lower(before, by_rank, i), 0))
            for i, block in enumerate(self._blocks)
        ]
        last = self._over.gather(ids).amax(0)
        return torch.where(split, S.EVERY_TIE - last, 0)

    def _lower(self, before: Tensor, by_rank: Tensor, index: int) -> Tensor:
        """How many equals lie on lower ranks."""
        return before[index if len(self._blocks) > 1 else self._over.rank]


class Winners(NamedTuple):
    """What was drawn in each row."""

    ids: Tensor  # int64 [N], -1 where nothing could be
    logits: Tensor  # fp32 [N], their z


def draw(
    kernel: SimpleNamespace,
    blocks: Sequence[Block],
    scale: Scale,
    cut: Tensor,
    usable: Tensor,
    seed: int,
    row_keys: Tensor,
    over: Over,
) -> Winners:
    """The column whose clock goes off first; one gather of three words a row."""
    arrival, ids, order = over.gather([kernel.draw(*block, scale, cut, seed, row_keys) for block in blocks]).unbind(1)
    best = arrival.amin(0)
    first = (arrival == best) & (ids >= 0)
    winner = torch.where(first, ids, S.EVERY_TIE).amin(0)
    mine = first & (ids == winner)
    order = torch.where(mine, order, torch.full_like(order, -(1 << 31))).amax(0)
    some = usable & (best != S.NO_ARRIVAL)
    return Winners(torch.where(some, winner, -1), S.logit_of(order))


def best_places(kernel: SimpleNamespace, blocks: Sequence[Block], n: int, over: Over) -> Tensor:
    """int64 [N, n]: the places of the n best columns, descending; -2^63 where there are fewer. One gather."""
    everyone = over.gather([kernel.best(*block, n) for block in blocks])
    return everyone.transpose(0, 1).flatten(1).topk(n, dim=1, sorted=True).values


def target_places(blocks: Sequence[Block], target_ids: Tensor, over: Over) -> Tensor:
    """int64 [N]: the targets' places, -2^63 where a target is no column. A gather."""
    places = []
    for logits, problem in blocks:
        local = target_ids - problem.vocab_start
        here = (local >= 0) & (local < problem.valid)
        if problem.valid == 0:
            places.append(torch.full_like(target_ids, S.KEEP_ALL))
            continue
        z = logits.gather(1, torch.where(here, local, 0)[:, None])[:, 0]
        places.append(torch.where(here, S.place_of(z, target_ids), S.KEEP_ALL))
    return over.gather(places).amax(0)


def rank_of(kernel: SimpleNamespace, blocks: Sequence[Block], target_ids: Tensor, over: Over) -> Tensor:
    """int64 [N]: 1 + the columns better than the target, 0 where the target is no column. A gather and a sum."""
    place = target_places(blocks, target_ids, over)
    before = over.sum([kernel.before(*block, place) for block in blocks])
    return torch.where(place == S.KEEP_ALL, 0, before + 1)
