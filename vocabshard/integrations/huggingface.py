"""Hugging Face transformers, PEFT and TRL: log-probs and entropies from a causal LM, without its logits.

    patch_lm_head(model)
    out = model(input_ids, attention_mask=mask, labels=input_ids)  # out.loss, out.log_probs, out.entropy

docs/integrations/huggingface.md has the tables of arguments. Nothing is imported from those projects.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from vocabshard import checks, together
from vocabshard.contract import TILE
from vocabshard.dist.gather import gather_tensors, rank_and_size
from vocabshard.functional import batch_invariant_logp, linear_logp
from vocabshard.options import LogpOutput
from vocabshard.shard import VocabShard

_PATCH = "_vocabshard_head"
_OPTIONS = {"real_vocab_size", "grad_options", "backend", "strict", "contract", "validate", "invalid"}


class CausalLMLogp(NamedTuple):
    """What a patched model returns for labels: [B, S - 1], of the positions before them, or [B, S] of shift_labels."""

    loss: Tensor  # minus the mean of log_probs over labels that are not ignored (or their sum / num_items_in_batch)
    log_probs: Tensor  # fp32, 0 where the label is ignored
    entropy: Tensor | None  # fp32, nats, 0 where the label is ignored; None with return_entropy=False
    lse: Tensor  # fp32, log of the sum of exponentials, after temperature
    label_mask: Tensor  # bool: the label is not ignored
    hidden_states: Any = None  # of the backbone, where asked for
    attentions: Any = None
    aux_loss: None = None
    logits: None = None

    @property
    def is_top1(self) -> NoReturn:
        """What TRL's SFTTrainer reads for its accuracy."""
        raise NotImplementedError("is_top1 is not computed by vocabshard's head; leave an SFTTrainer's model as it is")

    @property
    def mean_logits(self) -> NoReturn:
        """What TRL's KTOTrainer reads."""
        raise NotImplementedError("mean_logits is not computed by vocabshard's head; leave a KTOTrainer's as it is")


@dataclass
class _Head:
    """How a patched model scores. Copies of the model share it: a process group cannot be copied."""

    before: Callable[..., Any] | None  # the forward that the model had as an attribute of its own
    tp_group: Any
    temperature: float
    entropy: bool
    options: Mapping[str, Any]
    shard: VocabShard | None = None  # of a weight that every rank holds whole

    def __deepcopy__(self, memo: dict[int, Any]) -> _Head:
        return self


def patch_lm_head(
    model: nn.Module, tp_group: Any = None, *, temperature: float = 1.0, return_entropy: bool = True, **options: Any
) -> nn.Module:
    """Makes `model(..., labels=labels)` return a CausalLMLogp and never the [B, S, V] logits. In place.

    Args:
        model: a loaded causal LM of transformers, or a PeftModel around one. Without labels its forward stays what it
            is, so generation does. Its config's final_logit_softcapping (Gemma) and logit scales (Cohere, Granite,
            ...) are honoured; tied embeddings and frozen heads need nothing.
        tp_group: ranks that divide the vocabulary. Where every rank holds the head's whole weight, each takes its
            rows and gets the whole gradient; where the weight is a DTensor of transformers' tensor parallelism or a
            VocabParallelLMHead, it brings its own group and this stays None.
        temperature: that the logits are divided by.
        return_entropy: whether to make entropies; they are differentiable.
        options: real_vocab_size, grad_options, backend, strict, contract, validate, invalid of `linear_logp`.

    Of the call: labels [B, S] are shifted by one, shift_labels [B, S] are not; ignore_index (-100) and
    num_items_in_batch are those of transformers' loss. logits_to_keep, output_router_logits, return_dict=False and a
    loss function of the model's own are refused with labels, and so is a head that LoRA adapts.

    Returns: the model. Collectives of a call: those of `linear_logp`; where it validates one agreement more, before the
    backbone; with whole weights that need a gradient one all-gather of it. Raises: TypeError, ValueError,
    NotImplementedError, naming what is not supported.
    """
    causal = _causal_lm(model)
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise TypeError(f"patch_lm_head: unknown option {unknown[0]!r}; expected one of {sorted(_OPTIONS)}")
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float, Tensor)):
        raise TypeError(f"patch_lm_head: temperature must be a number, got {temperature!r}")
    if hasattr(causal, _PATCH):
        raise ValueError("this model's head is patched already; call unpatch_lm_head(model) first")
    _output_scale(causal)
    before = causal.__dict__.get("forward")
    setattr(causal, _PATCH, _Head(before, tp_group, temperature, return_entropy, dict(options)))

    # with the signature of the original, against which `generate` checks its arguments
    @functools.wraps(type(causal).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool | None = None, **kwargs: Any) -> Any:
        given = _by_name(self, args, kwargs)
        if fused_lm_head is False or (given.get("labels") is None and given.get("shift_labels") is None):
            head: _Head = getattr(self, _PATCH)
            original = head.before if head.before is not None else types.MethodType(type(self).forward, self)
            return original(*args, **kwargs)
        return _score(self, given)

    causal.forward = types.MethodType(forward, causal)
    return model


def unpatch_lm_head(model: nn.Module) -> nn.Module:
    """Undoes `patch_lm_head`: the model's forward is what it was. Without a patch it does nothing."""
    causal = _causal_lm(model)
    head: _Head | None = getattr(causal, _PATCH, None)
    if head is not None:
        delattr(causal, _PATCH)
        if head.before is None:
            del causal.forward
        else:
            causal.forward = head.before
    return model


def _causal_lm(model: Any) -> Any:
    if hasattr(model, "get_base_model"):  # PEFT's
        model = model.get_base_model()
    for name in ("get_output_embeddings", "base_model", "config"):
        if not hasattr(model, name):
            raise TypeError(f"expected a causal LM of transformers, got {type(model).__name__} without {name}")
    if model.base_model is model or model.get_output_embeddings() is None:
        raise TypeError(f"{type(model).__name__} has no language model head")
    return model


def _by_name(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return kwargs
    bound = inspect.signature(type(model).forward).bind_partial(model, *args).arguments
    bound.pop("self", None)
    return {**bound, **kwargs}


def _score(model: Any, given: dict[str, Any]) -> CausalLMLogp:
    how: _Head = getattr(model, _PATCH)
    given = dict(given)
    labels, shifted = given.pop("labels", None), given.pop("shift_labels", None)
    items, ignore_index = given.pop("num_items_in_batch", None), given.pop("ignore_index", -100)

    def check() -> None:
        _refuse(model, given)
        for name, ids in (("labels", labels), ("shift_labels", shifted)):
            if ids is not None and not (isinstance(ids, Tensor) and ids.dim() == 2):
                raise ValueError(f"{name} must be a tensor [B, S], got {list(getattr(ids, 'shape', [])) or ids!r}")
        if items is not None and (isinstance(items, bool) or not isinstance(items, (int, float, Tensor))):
            raise TypeError(f"num_items_in_batch must be a number, got {items!r}")
        _linear_of(model.get_output_embeddings())
        _output_scale(model)

    # before the backbone, which may communicate too
    together.checked(
        check, _group_of(model, how), (labels, shifted, next(model.parameters(), None)),
        validate=how.options.get("validate"), backend=how.options.get("backend", "auto"),
        stated=lambda: shifted is None,
    )  # fmt: skip
    given.pop("logits_to_keep", None)
    outputs = model.base_model(**{"use_cache": False, **given})
    hidden = outputs.last_hidden_state
    if shifted is None:
        hidden, labels = hidden[:, :-1], labels[:, 1:]
    else:
        labels = shifted
    found = _of_head(model, how, hidden, labels, ignore_index)
    mask = labels != ignore_index
    mask = mask.to(found.logp.device)
    total = -found.logp.sum()
    if items is None:
        loss = total / mask.sum()
    else:
        loss = total / (items.to(total.device) if isinstance(items, Tensor) else items)
    entropy = None if found.entropy is None else found.entropy.masked_fill(~mask, 0.0)
    assert found.lse is not None
    return CausalLMLogp(
        loss, found.logp, entropy, found.lse, mask, getattr(outputs, "hidden_states", None),
        getattr(outputs, "attentions", None),
    )  # fmt: skip


def _refuse(model: Any, given: dict[str, Any]) -> None:
    keep = given.get("logits_to_keep")
    if keep is not None and not (isinstance(keep, int) and keep == 0):
        raise NotImplementedError("logits_to_keep with labels is not supported: mask labels with -100 instead")
    if given.get("return_dict") is False:
        raise NotImplementedError("return_dict=False with labels is not supported: the result is a named tuple")
    router = given.get("output_router_logits")
    if router or (router is None and getattr(model.config.get_text_config(), "output_router_logits", False)):
        raise NotImplementedError("output_router_logits with labels is not supported: no auxiliary loss is made")
    if hasattr(model, "_loss_function"):
        raise NotImplementedError("a loss_function of the model's own is not supported: it takes logits")


def _output_scale(model: Any) -> tuple[float, float | None]:
    """What the logits are multiplied by before temperature, and the soft-cap, of the model's config."""
    config = model.config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if value is not None:
            scale = float(value)
            break
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:
        scale = float(divisor) if config.model_type == "hyperclovax" else 1 / float(divisor)
    cap = getattr(config, "final_logit_softcapping", None)
    if scale <= 0 or (cap is not None and scale != 1.0):
        raise NotImplementedError(f"a logit scale of {scale} with a soft-cap of {cap} is not supported")
    return scale, cap


def _linear_of(head: Any) -> Any:
    """The module whose weight counts: that of an active modules_to_save, or below an adapter that is off."""
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        active = [name for name in head.active_adapters if name in head.modules_to_save]
        return head.original_module if head.disable_adapters or not active else head.modules_to_save[active[0]]
    if hasattr(head, "base_layer"):
        adapts = any(name in getattr(head, "lora_A", {}) for name in getattr(head, "active_adapters", ()))
        if adapts and not head.disable_adapters and not head.merged:
            raise NotImplementedError(
                "a head that LoRA adapts is not supported: leave lm_head out of target_modules (modules_to_save is "
                "supported), or merge_adapter()"
            )
        return head.base_layer
    return head


def _of_head(model: Any, how: _Head, hidden: Tensor, labels: Tensor, ignore_index: int) -> LogpOutput:
    head = _linear_of(model.get_output_embeddings())
    scale, cap = _output_scale(model)
    options = {
        **how.options, "temperature": how.temperature / scale, "softcap": cap, "ignore_index": ignore_index,
        "return_lse": True, "return_entropy": how.entropy,
    }  # fmt: skip

    def score(hidden: Tensor) -> LogpOutput:
        weight, bias = head.weight, getattr(head, "bias", None)
        weight, bias, of_the_shard = _shard(model, how, head, weight, bias)
        device = weight.device  # of a model spread over devices
        found = linear_logp(hidden.to(device), weight, labels.to(device), bias, **of_the_shard, **options)
        assert isinstance(found, LogpOutput)
        return found

    if not _gathers_in_its_call(head):
        return score(hidden)
    # FSDP2 and ZeRO-3 make the weight whole in the hooks of the module's own call
    own = head.__dict__.get("forward")
    head.forward = score
    try:
        return LogpOutput(*head(hidden))
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own


def _group_of(model: Any, how: _Head) -> Any:
    """That the head's ranks agree over; None for a process alone, and for a head that cannot be looked into."""
    head = model.get_output_embeddings()
    for name in ("original_module", "base_layer"):
        head = getattr(head, name, head)
    weight = getattr(head, "weight", None)
    shard = head.shard if isinstance(getattr(head, "shard", None), VocabShard) else None
    # FSDP's DTensors are of another mesh
    matrix = None if isinstance(head, nn.Module) and _gathers_in_its_call(head) else weight
    return together.group_of(how.tp_group, shard, matrix)


def _gathers_in_its_call(head: nn.Module) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(head).__mro__) or hasattr(head.weight, "ds_id")


def _shard(
    model: Any, how: _Head, head: Any, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    if isinstance(getattr(head, "shard", None), VocabShard):
        return weight, bias, {"shard": head.shard}
    if hasattr(weight, "to_local"):
        if how.tp_group is not None:
            raise ValueError("the head's weight is a DTensor, which brings its own group; pass tp_group=None")
        return weight, bias, {}
    if how.tp_group is None:
        return weight, bias, {}
    size, real = rank_and_size(how.tp_group)[1], how.options.get("real_vocab_size")
    vocabulary = model.config.get_text_config().vocab_size
    if weight.shape[0] < vocabulary:  # this rank's rows
        return weight, bias, {"tp_group": how.tp_group}
    shard = how.shard
    if shard is None or shard.padded_vocab_size != weight.shape[0]:
        step = -(-weight.shape[0] // (TILE * size)) * TILE
        bounds = [min(step * rank, weight.shape[0]) for rank in range(size + 1)]
        sizes = [bounds[rank + 1] - bounds[rank] for rank in range(size)]
        shard = how.shard = VocabShard.from_sizes(sizes, how.tp_group, real_vocab_size=real)
    rows = _OwnRows.apply(weight, shard)
    return rows, None if bias is None else _OwnRows.apply(bias, shard), {"shard": shard}


class _OwnRows(torch.autograd.Function):
    """This rank's rows of a weight that every rank holds; the gradient is that of all rows, on every rank."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, shard: VocabShard) -> Tensor:
        """A view."""
        ctx.shard = shard
        return whole[shard.start : shard.stop]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        """Gathered in rank order."""
        shard: VocabShard = ctx.shard
        own = upstream[0]
        most = max(stop - start for start, stop in shard.ranges)
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: shard.size] = own
        everyone = gather_tensors(padded, shard.group)
        sizes = [stop - start for start, stop in shard.ranges]
        return torch.cat([part[:size] for part, size in zip(everyone, sizes, strict=True)]), None


# ---- TRL, where logits exist ----


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """TRL's function of that name: log-probs of `index` [...] or [..., K] under logits [..., V], in fp32.

    row_mask [...] (or as index): rows of 0 give 0 and no gradient, whatever index holds there. options: those of
    `batch_invariant_logp`. The same bytes whatever the batch around a row.
    """
    checks.with_width("logits", logits)
    checks.tensor("index", index, checks.INT_DTYPES)
    if index.dim() != logits.dim():
        return _selected(logits, index, temperature, row_mask, **options)
    if index.shape[:-1] != logits.shape[:-1]:
        raise ValueError(
            f"index must be [...] or [..., K] with the leading shape {list(logits.shape[:-1])} of logits, got "
            f"{list(index.shape)}"
        )
    if row_mask is not None and row_mask.shape in (index.shape[:-1], (*index.shape[:-1], 1)):
        row_mask = row_mask.reshape(*index.shape[:-1], 1).expand_as(index)
    index = _unmasked(index, row_mask, **options)
    count, width = index.shape[-1], logits.shape[-1]
    rows = torch.arange(index.numel() // count if count else 0, device=logits.device).repeat_interleave(count)
    found = batch_invariant_logp(
        logits.reshape(-1, width), index.flatten(), rows=rows, temperature=temperature, **options
    )
    assert isinstance(found, Tensor)
    return found.view(index.shape)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """TRL's function of that name: log-probs and entropies [...] in one pass over the logits, in fp32."""
    found = _selected(logits, index, temperature, row_mask, return_entropy=True, **options)
    assert isinstance(found, LogpOutput) and found.entropy is not None
    entropy = found.entropy if row_mask is None else found.entropy.masked_fill(row_mask == 0, 0.0)
    return found.logp, entropy if entropy_requires_grad else entropy.detach()


def _selected(
    logits: Tensor, index: Tensor, temperature: float | Tensor | None, row_mask: Tensor | None, **options: Any
) -> Any:
    return batch_invariant_logp(logits, _unmasked(index, row_mask, **options), temperature=temperature, **options)


def _unmasked(index: Tensor, row_mask: Tensor | None, ignore_index: int = -100, **options: Any) -> Tensor:
    """What row_mask leaves out is ignored, whatever id stands there."""
    if row_mask is None:
        return index
    if row_mask.shape != index.shape:
        raise ValueError(f"row_mask must be shaped as index {list(index.shape)}, got {list(row_mask.shape)}")
    return index.masked_fill(row_mask == 0, ignore_index)
