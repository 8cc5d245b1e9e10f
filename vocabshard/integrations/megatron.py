"""Megatron-Core: its cross entropies by their signatures, a GPTModel's loss without logits, a head for its checkpoints.

    fuse_output_layer(model)  # model(..., labels=labels) gives the same [B, S] losses

docs/integrations/megatron.md has the tables of arguments. megatron.core is imported when something of it is needed.
"""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from vocabshard import checks, together
from vocabshard.dist.gather import rank_and_size
from vocabshard.functional import linear_logp, vocab_parallel_logp
from vocabshard.integrations import losses
from vocabshard.modules import VocabParallelLMHead
from vocabshard.options import GradOptions

_PATCH = "_vocabshard_output"
_REFUSED = ("return_lse", "return_entropy", "return_logits", "topk")
_OF_THE_LAYER = {
    "tp_group",
    "shard",
    "vocab_start_index",
    "global_vocab_size",
    "ignore_index",
    "sequence_parallel",
    "cut",
}


def tensor_model_parallel_group() -> Any:
    """The group of megatron.core's parallel_state."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: Any = None,
    *,
    real_vocab_size: int | None = None,
    ignore_index: int = -100,
    **options: Any,
) -> Tensor:
    """megatron.core.tensor_parallel.vocab_parallel_cross_entropy: fp32 losses shaped as target.

    Args:
        vocab_parallel_logits: [..., V_local], usually [S, B, V / tp]; never written to.
        target: [...] global ids. ignore_index gives 0 without a gradient.
        label_smoothing: in [0, 1), Megatron's: spread over the V - 1 others, of the whole vocabulary at any W.
        tp_group: None is that of Megatron's parallel_state.
        real_vocab_size: leaves padding out; without it every column counts, as in Megatron.
        options: temperature, inplace_backward, backend, strict, validate, ... of `vocab_parallel_logp`.

    Collectives: one all-gather of 32 bytes a row (Megatron: three all-reduces); with smoothing an all-reduce of 4 more;
    where the call validates, agreements of some words, so that what one rank refuses raises on all.
    """
    group = tensor_model_parallel_group() if tp_group is None else tp_group

    def check() -> None:
        losses.check("none", label_smoothing)
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must lie in [0, 1), got {label_smoothing!r}")
        if label_smoothing and options.get("temperature") is not None:
            raise NotImplementedError("label_smoothing with temperature is not supported; divide the logits first")
        for name in _REFUSED:
            if options.get(name):
                raise NotImplementedError(f"{name} is not part of a loss; call vocab_parallel_logp for it")
        together.known("vocab_parallel_cross_entropy", vocab_parallel_logp, options)
        checks.with_width("vocab_parallel_logits", vocab_parallel_logits)

    together.checked(
        check, group, (vocab_parallel_logits, target), validate=options.get("validate"),
        backend=options.get("backend", "auto"), stated=lambda: label_smoothing,
    )  # fmt: skip
    width = vocab_parallel_logits.shape[-1]
    place = {
        "tp_group": group,
        "global_vocab_size": width * rank_and_size(group)[1],
        "real_vocab_size": real_vocab_size,
    }
    # first, as its ranks agree on the rows that the sums are of
    out = vocab_parallel_logp(vocab_parallel_logits, target, ignore_index=ignore_index, **place, **options)
    sums, smoothing = None, 0.0
    if label_smoothing:
        sums = losses.column_sums_of_logits(
            vocab_parallel_logits, losses.shard_of(vocab_parallel_logits, width, **place)
        )
        smoothing = losses.over_the_others(label_smoothing, sums.columns)
    return losses.token_losses(
        out.logp, target, ignore_index=ignore_index, lse=out.lse, label_smoothing=smoothing, sums=sums
    )


def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any, **options: Any
) -> Tensor:
    """megatron.core.fusions.fused_cross_entropy's: `vocab_parallel_cross_entropy` without smoothing."""
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, 0.0, tp_group, **options)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: Any = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    sequence_parallel: bool = False,
    *,
    bias: Tensor | None = None,
    gradient_accumulation_fusion: bool = False,
    **options: Any,
) -> Tensor:
    """Megatron-Core's fused linear cross entropy: minus the log-probs of labels, from hidden states, without logits.

    Args:
        hidden: [..., D], usually [S, B, D]; with sequence_parallel this rank's [S / W, B, D].
        weight: [V_local, D], this rank's rows.
        labels: [...] global ids, of all rows, the same on every rank.
        tp_group: None is this process alone, as in Megatron's.
        reduction: "none" (shaped as labels), "sum" or "mean" (over labels that are not ignored).
        bias: [V_local] or None.
        gradient_accumulation_fusion: adds the weight's gradient to weight.main_grad (fp32) in place, and sets
            weight.grad_added_to_main_grad as Megatron does.
        options: real_vocab_size, temperature, softcap, grad_options, backend, strict, ... of `linear_logp`.

    Returns: fp32. Collectives: those of `linear_logp`, and where the call validates one agreement more; the gradient of
    hidden is complete on every rank (its rows, with sequence_parallel): copy_to_tensor_model_parallel_region or a
    gather before the call would sum it again.
    """

    def check() -> None:
        losses.check(reduction, 0.0)
        if labels is None:
            raise ValueError("labels must be given for a loss")
        checks.with_width("weight", weight)
        for name in _REFUSED:
            if options.get(name):
                raise NotImplementedError(f"{name} is not part of a loss; call linear_logp for it")
        together.known("linear_cross_entropy", linear_logp, options)
        if gradient_accumulation_fusion and weight.requires_grad:
            options["grad_options"] = _with_main_grad(options.get("grad_options"), getattr(weight, "main_grad", None))

    together.checked(
        check, tp_group, (hidden, weight, labels), validate=options.get("validate"),
        backend=options.get("backend", "auto"), stated=lambda: (reduction, sequence_parallel),
    )  # fmt: skip
    logp = linear_logp(
        hidden, weight, labels, bias, tp_group=tp_group, global_vocab_size=weight.shape[0] * rank_and_size(tp_group)[1],
        ignore_index=ignore_index, sequence_parallel=sequence_parallel, **options,
    )  # fmt: skip
    assert isinstance(logp, Tensor)
    return losses.reduce(-logp, labels, reduction, ignore_index)


def _with_main_grad(given: GradOptions | None, main_grad: Tensor | None) -> GradOptions:
    if main_grad is None:
        raise ValueError(
            "gradient_accumulation_fusion needs weight.main_grad, which Megatron's DistributedDataParallel makes; "
            "pass False without it"
        )
    given = GradOptions() if given is None else given
    if not isinstance(given, GradOptions):
        raise TypeError(f"grad_options must be a GradOptions, got {type(given).__name__}")
    return GradOptions(given.save_logits_budget, given.reduce, given.wire_dtype, main_grad)


# ---- a GPTModel's own loss ----


class _Pending(NamedTuple):
    """What the output layer gives in place of logits, to compute_language_model_loss and to nothing else."""

    hidden: Tensor
    weight: Tensor


@dataclass
class _Output:
    options: dict[str, Any]
    scoring: bool = False  # the call under way has labels


def fuse_output_layer(model: nn.Module, **options: Any) -> nn.Module:
    """Makes a GPTModel's `model(..., labels=labels)` compute its [B, S] losses without [S, B, V / tp] logits. In place.

    Args:
        model: a GPTModel, or another model whose output_layer is a ColumnParallelLinear that its
            compute_language_model_loss follows; Float16Module and DistributedDataParallel around it are looked
            through. A pipeline stage without an output layer stays as it is.
        options: real_vocab_size, temperature, softcap, grad_options, backend, strict, ... of `linear_logp`.

    The layer's tp_group, sequence_parallel, gradient_accumulation_fusion, bias and shared embedding weight are
    honoured; multi-token prediction's losses go the same way. Without labels logits are what they were. Parameters,
    their attributes and sharded checkpoints stay Megatron's.

    Returns: the model. Raises: NotImplementedError for defer_embedding_wgrad_compute, disable_grad_reduce, experts,
    MuP's scaled logits and output layers of other kinds. `unfuse_output_layer` undoes it.
    """
    unknown = sorted(set(options) - (set(linear_logp.__kwdefaults__ or ()) - _OF_THE_LAYER - {*_REFUSED}))
    if unknown:
        raise TypeError(f"fuse_output_layer: {unknown[0]!r} is not an option of linear_logp for an output layer")
    inner = _unwrapped(model)
    layer = getattr(inner, "output_layer", None)
    if layer is None or not getattr(inner, "post_process", True):
        return model
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    if not isinstance(layer, ColumnParallelLinear) or not hasattr(inner, "compute_language_model_loss"):
        raise NotImplementedError(f"an output layer of {type(layer).__name__} is not supported")
    for owner, name in (
        (layer.config, "defer_embedding_wgrad_compute"), (layer, "disable_grad_reduce"), (layer, "is_expert"),
        (layer.config, "use_mup"), (layer, "gather_output"),
    ):  # fmt: skip
        if getattr(owner, name, False):
            raise NotImplementedError(f"an output layer with {name} is not supported; turn it off or keep Megatron's")
    if hasattr(inner, _PATCH):
        raise ValueError("this model's output layer is fused already; call unfuse_output_layer(model) first")
    state = _Output(dict(options))
    setattr(inner, _PATCH, state)
    setattr(layer, _PATCH, state)

    @functools.wraps(type(inner).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(type(self).forward).bind_partial(self, *args, **kwargs).arguments
        how: _Output = getattr(self, _PATCH)
        how.scoring = given.get("labels") is not None
        try:
            return type(self).forward(self, *args, **kwargs)
        finally:
            how.scoring = False

    def output(
        self: Any,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        output_cross_entropy_loss: bool = False,
        labels: Tensor | None = None,
        reduction: str = "none",
        ignore_index: int = -100,
    ) -> Any:
        how: _Output = getattr(self, _PATCH)
        pending = _Pending(input_, self.weight if weight is None else weight)
        if output_cross_entropy_loss:
            return _loss(self, how, pending, labels, reduction, ignore_index)
        if how.scoring and not runtime_gather_output:
            return pending, None
        return type(self).forward(self, input_, weight, runtime_gather_output)

    def loss(self: Any, labels: Tensor, logits: Any) -> Tensor:
        if not isinstance(logits, _Pending):
            found: Tensor = type(self).compute_language_model_loss(self, labels, logits)
            return found
        return _loss(self.output_layer, getattr(self, _PATCH), logits, labels, "none", -100)

    inner.forward = types.MethodType(forward, inner)
    layer.forward = types.MethodType(output, layer)
    inner.compute_language_model_loss = types.MethodType(loss, inner)
    return model


def unfuse_output_layer(model: nn.Module) -> nn.Module:
    """Undoes `fuse_output_layer`. Without it it does nothing."""
    inner = _unwrapped(model)
    if hasattr(inner, _PATCH):
        delattr(inner, _PATCH)
        delattr(inner.output_layer, _PATCH)
        del inner.forward, inner.compute_language_model_loss, inner.output_layer.forward
    return model


def _loss(
    layer: Any, state: _Output, pending: _Pending, labels: Tensor | None, reduction: str, ignore_index: int
) -> Tensor:
    """labels [B, S] -> [B, S], or a scalar."""
    # what is no [B, S] is refused there, on all ranks
    rows: Any = labels.transpose(0, 1).contiguous() if isinstance(labels, Tensor) and labels.dim() == 2 else labels
    found = linear_cross_entropy(
        pending.hidden, pending.weight, rows, layer.tp_group, reduction, ignore_index,
        layer.sequence_parallel, bias=None if layer.skip_bias_add else layer.bias,
        gradient_accumulation_fusion=layer.gradient_accumulation_fusion, **state.options,
    )  # fmt: skip
    return found.transpose(0, 1).contiguous() if reduction == "none" else found


def _unwrapped(model: Any) -> Any:
    while not hasattr(model, "output_layer") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


# ---- a head of ours in a Megatron model ----


class MegatronLMHead(VocabParallelLMHead):
    """A VocabParallelLMHead whose sharded_state_dict is Megatron's, for torch_dist checkpoints of Megatron models.

    Args as VocabParallelLMHead, tp_group None being that of Megatron's parallel_state; pad_to_multiple_of is Megatron's
    make-vocab-size-divisible-by times W where checkpoints are exchanged with a ColumnParallelLinear (another padding
    loads too).
    """

    def __init__(self, hidden_size: int, vocab_size: int, tp_group: Any = None, **options: Any) -> None:
        group = tensor_model_parallel_group() if tp_group is None else tp_group
        super().__init__(hidden_size, vocab_size, group, **options)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """ShardedTensors [V_padded, ...] cut along the vocabulary, which load at any W and any padding."""
        return sharded_state_dict(self, prefix, sharded_offsets, metadata)


def sharded_state_dict(
    head: VocabParallelLMHead,
    prefix: str = "",
    sharded_offsets: tuple[tuple[int, int, int], ...] = (),
    metadata: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Megatron's ShardedTensors of a head (or embedding) of ours, by the keys that a ColumnParallelLinear would have.

    metadata["dp_cp_group"] is used where given, else that of Megatron's parallel_state.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

    replicas = (metadata or {}).get("dp_cp_group") or parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {
        prefix + name: make_tp_sharded_tensor_for_checkpoint(
            tensor=parameter, key=prefix + name, allow_shape_mismatch=True, prepend_offsets=sharded_offsets,
            tp_group=head.shard.group, dp_cp_group=replicas,
        )
        for name, parameter in head.named_parameters(recurse=False)
    }  # fmt: skip
