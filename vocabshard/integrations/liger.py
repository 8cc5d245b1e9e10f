"""Liger's fused heads by its names and signatures: scaled cross entropy (one rank, tensor parallel), the fused linear
loss and the vocabulary-parallel loss over logits.

It imports nothing of Liger. docs/integrations/liger.md has the tables of the arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from vocabshard import checks, together
from vocabshard.dist.gather import rank_and_size
from vocabshard.functional import linear_logp, vocab_parallel_logp
from vocabshard.integrations import losses
from vocabshard.options import LogpOutput
from vocabshard.shard import VocabShard

FORMULAS, MODES = ("pytorch", "megatron"), ("global", "partition")


class CrossEntropyOutput(NamedTuple):
    """What the fused linear loss gives when more than the loss is asked for; read by attribute, as Liger's is."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class LigerFusedLinearScaledCrossEntropyFunction:
    """The loss of each token and its entropy, at a temperature, in one process."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float = 1.0,
        ignore_index: int = -100,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
        selected_token_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """_input [M, H], weight [V, H], target [M] -> nll [M]; then entropy [M], then log-probs [M, K], as asked for.

        selected_token_ids: int64 [K]; their log-probs come from a library product of K columns in fp32 and our lse, so
        nll has the contract's bytes and these have not. All are fp32, differentiable, and 0 in ignored rows.
        m_tiles_per_cluster tunes a kernel that is not here: it is checked, and nothing else.
        """
        _positive("m_tiles_per_cluster", m_tiles_per_cluster)
        _check_scaled(weight, temperature, return_entropy)
        if selected_token_ids is not None:
            _check_ids(selected_token_ids, weight)
        return _scaled(_input, weight, target, temperature, ignore_index, return_entropy, selected_token_ids)


class LigerFusedLinearScaledCrossEntropyTPFunction:
    """The same over a tensor-parallel group."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        tp_group: Any,
        temperature: float = 1.0,
        ignore_index: int = -100,
        tiles_per_reduce: int = 1,
        return_entropy: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """weight: this rank's rows, as many as each rank's, in rank order; target: global ids.

        tp_group None is the world, as there.
        tiles_per_reduce (1, 2, 4) tunes a kernel that is not here. Collectives: those of `linear_logp`, and where that
        validates one agreement more.
        """

        def check() -> None:
            if tiles_per_reduce not in (1, 2, 4):
                raise ValueError(f"tiles_per_reduce must be one of 1, 2, or 4, got {tiles_per_reduce!r}")
            _check_scaled(weight, temperature, return_entropy)

        if tp_group is None:
            if not (dist.is_available() and dist.is_initialized()):
                raise RuntimeError("tp_group=None is the world, but torch.distributed is not initialized")
            tp_group = dist.group.WORLD
        together.checked(check, tp_group, (_input, weight, target))
        place = _even(tp_group, weight.shape[0])
        return _scaled(_input, weight, target, temperature, ignore_index, return_entropy, None, **place)


def liger_fused_linear_scaled_cross_entropy_tp(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    tp_group: Any,
    temperature: float = 1.0,
    ignore_index: int = -100,
    tiles_per_reduce: int = 1,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`LigerFusedLinearScaledCrossEntropyTPFunction.apply` as a function."""
    return LigerFusedLinearScaledCrossEntropyTPFunction.apply(
        input, weight, target, tp_group, temperature, ignore_index, tiles_per_reduce, return_entropy
    )


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of hidden states [BT, H] with weight [V, H], bias [V], class weights ce_weight [V]; fp32.

    lse_square_scale * lse^2 is part of the loss, averaged over all targets that count (not by ce_weight), and is
    returned beside it with return_z_loss. accum_dtype and chunk_mem_const say how Liger accumulates and chunks; here
    gradients accumulate in fp32 and nothing is chunked. Token accuracy and predictions need the argmax of logits that
    are never made: refused, and so is label_smoothing with softcap.
    """
    losses.check(reduction, label_smoothing, lse_square_scale)
    _positive("chunk_mem_const", chunk_mem_const)
    for name, asked in (
        ("return_token_accuracy", return_token_accuracy),
        ("return_predicted_tokens", return_predicted_tokens),
        ("label_smoothing with softcap", bool(label_smoothing) and softcap is not None),
    ):
        if asked:
            raise NotImplementedError(f"{name} is not supported: no logits are made that it could be read from")
    checks.with_width("weight", weight)
    if ce_weight is not None:
        losses.check_class_weight("ce_weight", ce_weight, weight.shape[0], "V")
    out = linear_logp(input, weight, target, bias, softcap=softcap, ignore_index=ignore_index, return_lse=True)
    assert isinstance(out, LogpOutput) and out.lse is not None
    sums = None
    if label_smoothing:
        shard = losses.shard_of(weight, weight.shape[0])
        sums = losses.column_sums_of_linear(input, weight, bias, shard, ce_weight)
    loss = losses.token_losses(
        out.logp, target, ignore_index=ignore_index, lse=out.lse, label_smoothing=label_smoothing, sums=sums,
        class_weight=ce_weight,
    )  # fmt: skip
    z_loss = (lse_square_scale * out.lse.square()).masked_fill(target == ignore_index, 0.0)
    if use_token_scaling:
        scale = out.logp.detach().exp()
        loss, z_loss = loss * scale, z_loss * scale
    z_loss = _reduced(z_loss, target, reduction, ignore_index, None)
    loss = _reduced(loss, target, reduction, ignore_index, ce_weight)
    if lse_square_scale:
        loss = loss + z_loss
    return CrossEntropyOutput(loss, z_loss) if return_z_loss else loss


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """`liger_fused_linear_cross_entropy` with its options kept: loss(lin_weight, _input, target, bias)."""

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        losses.check(reduction, label_smoothing, lse_square_scale)
        self.options: dict[str, Any] = {
            "ce_weight": ce_weight,
            "ignore_index": ignore_index,
            "lse_square_scale": lse_square_scale,
            "label_smoothing": label_smoothing,
            "reduction": reduction,
            "softcap": softcap,
            "return_z_loss": return_z_loss,
            "accum_dtype": accum_dtype,
            "use_token_scaling": use_token_scaling,
            "return_token_accuracy": return_token_accuracy,
            "return_predicted_tokens": return_predicted_tokens,
        }

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """lin_weight [V, H], _input [BT, H], target [BT], bias [V]."""
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **self.options)


class LigerVocabParallelCrossEntropy(nn.Module):
    """Cross entropy of each token from logits that exist, sharded over a group; label smoothing by either formula.

    label_smoothing_mode "partition" gives every rank another loss: refused where it would differ from "global".
    """

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "none",
        label_smoothing_formula: str = "pytorch",
        label_smoothing_mode: str = "global",
    ) -> None:
        super().__init__()
        if reduction != "none":
            raise ValueError(f'reduction must be "none": a loss a token is returned; got {reduction!r}')
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing!r}")
        for name, value, known in (
            ("label_smoothing_formula", label_smoothing_formula, FORMULAS),
            ("label_smoothing_mode", label_smoothing_mode, MODES),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.megatron, self.partition = label_smoothing_formula == "megatron", label_smoothing_mode == "partition"

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None) -> Tensor:
        """vocab_parallel_logits [S, B, V_local], target [S, B] of global ids -> fp32 [S, B]."""
        smoothing, sums = self.label_smoothing, None

        def check() -> None:
            checks.with_width("vocab_parallel_logits", vocab_parallel_logits)
            if smoothing and self.partition and rank_and_size(tp_group)[1] > 1:
                raise NotImplementedError('label_smoothing_mode="partition" is not supported over ranks; use "global"')

        tensors = (vocab_parallel_logits, target)
        together.checked(check, tp_group, tensors, stated=lambda: (smoothing, self.megatron))
        width = vocab_parallel_logits.shape[-1]
        place = _even(tp_group, width)
        out = vocab_parallel_logp(vocab_parallel_logits, target, ignore_index=self.ignore_index, **place)
        if smoothing:
            shard = losses.shard_of(vocab_parallel_logits, width, **place)
            sums = losses.column_sums_of_logits(vocab_parallel_logits, shard)
            smoothing = _effective(smoothing, self.megatron, shard)
        return losses.token_losses(
            out.logp, target, ignore_index=self.ignore_index, lse=out.lse, label_smoothing=smoothing, sums=sums
        )


def _reduced(loss: Tensor, target: Tensor, reduction: str, ignore_index: int, ce_weight: Tensor | None) -> Tensor:
    """As Liger's, which is 0 where every target is ignored, not 0 / 0."""
    if reduction != "mean":
        return losses.reduce(loss, target, reduction, ignore_index)
    counts = target != ignore_index
    of = counts.sum() if ce_weight is None else losses.weights_of(target, ce_weight, ignore_index).sum()
    return loss.sum() / torch.where(counts.any(), of, 1)


def _effective(smoothing: float, megatron: bool, shard: VocabShard) -> float:
    """The share of the uniform distribution over all classes; Megatron's own is over the others."""
    return losses.over_the_others(smoothing, shard.real_vocab_size) if megatron else smoothing


def _scaled(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: float,
    ignore_index: int,
    return_entropy: bool,
    selected: Tensor | None,
    **place: Any,
) -> Tensor | tuple[Tensor, ...]:
    out = linear_logp(
        hidden, weight, target, temperature=temperature, ignore_index=ignore_index, return_lse=True,
        return_entropy=return_entropy, **place,
    )  # fmt: skip
    assert isinstance(out, LogpOutput) and out.lse is not None
    ignored = target == ignore_index
    outputs = [-out.logp]
    if out.entropy is not None:  # ours is that of ignored rows too
        outputs.append(out.entropy.masked_fill(ignored, 0.0))
    if selected is not None:
        rows = F.embedding(selected, weight)
        if checks.autocasting(hidden.device.type):  # as linear_logp has cast them
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, rows = hidden.to(dtype), rows.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            logits = hidden.float() @ rows.float().t()
        chosen = logits / temperature - out.lse[..., None]
        outputs.append(chosen.masked_fill(ignored[..., None], 0.0))
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _even(tp_group: Any, width: int) -> dict[str, Any]:
    """Shards of one size, as Liger's are; the size tells one vocabulary of a group from another."""
    return {"tp_group": tp_group, "global_vocab_size": width * rank_and_size(tp_group)[1]}


def _check_scaled(weight: Any, temperature: Any, return_entropy: Any) -> None:
    checks.with_width("weight", weight)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature must be a real number, got {temperature!r}")
    if not isinstance(return_entropy, bool):
        raise TypeError(f"return_entropy must be a bool, got {return_entropy!r}")


def _check_ids(ids: Tensor, weight: Tensor) -> None:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
        raise TypeError("selected_token_ids must be int64 [K]")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < weight.shape[0]:
        raise ValueError(f"selected_token_ids must be in [0, {weight.shape[0]})")


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")
