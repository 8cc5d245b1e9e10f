"""From log-probs to the losses other projects take: reductions, label smoothing, class weights, z-loss. No [N, V]."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocabshard.dist.gather import sum_over_group
from vocabshard.shard import VocabShard, known_shard, make_shard

REDUCTIONS = ("none", "sum", "mean")
BLOCK = 4096  # rows that are converted at a time


class ColumnSums(NamedTuple):
    """What label smoothing needs of the columns: sum_v c_v y_v a row, sum_v c_v, and how many columns there are."""

    logits: Tensor  # fp32, shaped as the targets
    weights: Tensor | float
    columns: int


def check(reduction: str, label_smoothing: float, z_loss: float = 0.0) -> None:
    """Raises ValueError for what no loss is defined for."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {label_smoothing!r}")
    if not z_loss >= 0.0:
        raise ValueError(f"z_loss must be 0 or more, got {z_loss!r}")


def check_class_weight(name: str, value: Any, classes: int, size: str) -> None:
    """Raises TypeError, ValueError for what is no weight of each class."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if tuple(value.shape) != (classes,):
        raise ValueError(f"{name} must be [{size}] = [{classes}], got {list(value.shape)}")


def over_the_others(smoothing: float, columns: int) -> float:
    """The share of the uniform distribution over all columns that Megatron's, over the others alone, comes to."""
    if columns < 2:
        raise ValueError(f"label_smoothing over the other columns needs at least 2, got a vocabulary of {columns}")
    return smoothing * columns / (columns - 1)


def shard_of(
    matrix: Tensor,
    width: int,
    *,
    shard: VocabShard | None = None,
    tp_group: Any = None,
    vocab_start_index: int | None = None,
    global_vocab_size: int | None = None,
    real_vocab_size: int | None = None,
) -> VocabShard:
    """The VocabShard of a call that describes it in `linear_logp`'s words. Collective where that call would be."""
    if shard is not None:
        return shard
    if hasattr(matrix, "to_local"):
        return VocabShard.of_dtensor(matrix, real_vocab_size=real_vocab_size)
    stated = (width, tp_group, vocab_start_index, global_vocab_size, real_vocab_size)
    return known_shard(*stated) or make_shard(*stated)


def column_sums_of_linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabShard, class_weight: Tensor | None = None
) -> ColumnSums:
    """sum_v c_v (hidden @ weight[v] + bias[v]) as hidden @ (sum_v c_v weight[v]) + sum_v c_v bias[v], in fp32.

    Collective: one all-reduce of [D + 2]. Differentiable in hidden, weight and bias; upstream gradients must be the
    same on every rank.
    """
    weight = _real(weight, shard)
    own = None
    if class_weight is not None:
        own = class_weight.detach()[shard.start : shard.start + shard.valid].to(weight.device, torch.float32)
    with torch.autocast(weight.device.type, enabled=False):
        parts = [_SumOfRows.apply(weight, own)]
        parts.append(parts[0].new_zeros(1) if bias is None else _SumOfRows.apply(_real(bias, shard)[:, None], own))
        parts.append(torch.full_like(parts[1], shard.valid) if own is None else own.sum()[None])
        total = torch.cat(parts)
        if shard.group is not None:
            total = SumOverGroup.apply(total, shard.group)
        of_logits = hidden.float() @ total[:-2] + total[-2]
    return ColumnSums(of_logits, total[-1].detach(), shard.real_vocab_size)


def _real(rows: Tensor, shard: VocabShard) -> Tensor:
    """This rank's, without padding."""
    local: Tensor = rows.to_local() if hasattr(rows, "to_local") else rows
    return local if shard.valid == shard.size else local[: shard.valid]


def column_sums_of_logits(logits: Tensor, shard: VocabShard) -> ColumnSums:
    """The same from this rank's logits [..., V_local]. Collective: one all-reduce of 4 bytes a row."""
    total = logits[..., : shard.valid].sum(-1, dtype=torch.float32)
    if shard.group is not None:
        total = SumOverGroup.apply(total, shard.group)
    return ColumnSums(total, float(shard.real_vocab_size), shard.real_vocab_size)


def token_losses(
    logp: Tensor,
    target_ids: Tensor,
    *,
    ignore_index: int,
    lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    sums: ColumnSums | None = None,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
) -> Tensor:
    """fp32, shaped as the targets; 0 in ignored rows. lse for z_loss and smoothing, sums for smoothing.

    (1 - e) c_t (-logp) + e / V sum_v c_v (lse - y_v) + z_loss lse^2, e being label_smoothing.
    """
    loss = -logp
    if class_weight is not None:
        loss = loss * weights_of(target_ids, class_weight, ignore_index)
    if label_smoothing:
        assert lse is not None and sums is not None
        smooth = (sums.weights * lse - sums.logits) / sums.columns
        loss = (1 - label_smoothing) * loss + label_smoothing * smooth
    if z_loss:
        assert lse is not None
        loss = loss + z_loss * lse.square()
    if label_smoothing or z_loss:
        loss = loss.masked_fill(target_ids == ignore_index, 0.0)
    return loss


def weights_of(target_ids: Tensor, class_weight: Tensor, ignore_index: int) -> Tensor:
    """c of each target, fp32; 0 for ignored ones, and 1 for those outside, whose loss is not a number anyway."""
    inside = (target_ids >= 0) & (target_ids < class_weight.shape[0])
    found = class_weight.float()[torch.where(inside, target_ids, 0).long()]
    return torch.where(inside, found, 1.0).masked_fill(target_ids == ignore_index, 0.0)


def reduce(
    loss: Tensor, target_ids: Tensor, reduction: str, ignore_index: int, class_weight: Tensor | None = None
) -> Tensor:
    """[...] for "none", else a scalar: "mean" is over targets that are not ignored (weighted, as torch's is)."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if class_weight is not None:
        return loss.sum() / weights_of(target_ids, class_weight, ignore_index).sum()
    return loss.sum() / (target_ids != ignore_index).sum()


class SumOverGroup(torch.autograd.Function):
    """Adds over the group. The upstream gradient, the same on every rank, is that of each rank's own part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        """Any shape; the same bytes on every rank."""
        return sum_over_group(part.clone(), group)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        """As it comes."""
        return upstream[0], None


class _SumOfRows(torch.autograd.Function):
    """rows [n, D], factors fp32 [n] or None -> fp32 [D]; neither copies rows to fp32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factors: Tensor | None) -> Tensor:
        """By blocks where rows are converted."""
        ctx.save_for_backward(factors)
        ctx.rows = rows.shape[0], rows.dtype
        if factors is None:
            return rows.sum(0, dtype=torch.float32)
        total = factors.new_zeros(rows.shape[1])
        for start in range(0, rows.shape[0], BLOCK):
            total += factors[start : start + BLOCK] @ rows[start : start + BLOCK].float()
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        """Every row's is the upstream gradient times its factor."""
        (factors,), (count, dtype) = ctx.saved_tensors, ctx.rows
        if factors is None:
            return upstream[0].to(dtype).expand(count, -1), None
        out = torch.empty(count, upstream[0].shape[0], dtype=dtype, device=factors.device)
        return torch.mul(factors[:, None], upstream[0], out=out), None
