"""For plain PyTorch: `linear_cross_entropy` with F.linear_cross_entropy's arguments, and a parallel style for the head.

docs/integrations/torch_native.md has the tables of arguments.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from vocabshard import checks, together
from vocabshard.functional import linear_logp
from vocabshard.integrations import losses
from vocabshard.options import LogpOutput

_OF_THE_SHARD = ("shard", "tp_group", "vocab_start_index", "global_vocab_size", "real_vocab_size")


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: None = None,
    z_loss: float = 0.0,
    **of_linear_logp: Any,
) -> Tensor:
    """F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...) without the logits.

    Args:
        input: [..., D].
        linear_weight: [V_local, D]: this rank's rows, or a DTensor with Shard(0), or all of it without a group.
        target: [...] class ids, int32 or int64.
        linear_bias: [V_local] or None.
        weight: [V_real] fp32, of each class of the whole vocabulary, the same on every rank; or None.
        reduction: "none", "sum" or "mean" (over targets that are not ignored, weighted by their classes).
        ignore_index: -100 when None.
        label_smoothing: in [0, 1], over the real vocabulary. Its share of each logit comes from the sum of the
            weight's rows, so that nothing of size [N, V] is made. Not with softcap, sequence_parallel or main_grad.
        options: torch's chunks; there are none here, so only None.
        z_loss: adds z_loss * lse^2 to each row that is not ignored.
        of_linear_logp: tp_group, real_vocab_size, shard, temperature, softcap, grad_options, ... of `linear_logp`.

    Returns: fp32, [...] or a scalar. The same on every rank.
    Collectives: those of `linear_logp`; with label_smoothing an all-reduce of [D + 2] fp32 more; where the call
    validates, an agreement of some words more, so that what one rank refuses raises on all.
    Determinism: rows of reduction="none" without smoothing are -logp, with its bytes; sums are torch's.
    Raises: as `linear_logp`; NotImplementedError naming an argument that is not supported.
    """

    def check() -> None:
        losses.check(reduction, label_smoothing, z_loss)
        together.known("linear_cross_entropy", linear_logp, of_linear_logp)
        _refuse(input, target, label_smoothing, options, of_linear_logp)
        checks.with_width("linear_weight", linear_weight)

    given = (of_linear_logp.get("tp_group"), of_linear_logp.get("shard"), linear_weight)
    agreed = functools.partial(
        together.checked, group=together.group_of(*given), tensors=(input, linear_weight, target),
        validate=of_linear_logp.get("validate"), backend=of_linear_logp.get("backend", "auto"),
    )  # fmt: skip
    sizes = [of_linear_logp.get(name) for name in ("global_vocab_size", "real_vocab_size")]  # a shard is known by these
    agreed(check, stated=lambda: (reduction, label_smoothing, z_loss, weight is None, given[1] is None, *sizes))
    ignored = -100 if ignore_index is None else ignore_index
    shard = None
    if label_smoothing or weight is not None:
        width = linear_weight.shape[0]
        stated = {name: of_linear_logp.pop(name) for name in _OF_THE_SHARD if name in of_linear_logp}
        shard = of_linear_logp["shard"] = losses.shard_of(linear_weight, width, **stated)
        if weight is not None:
            classes = shard.real_vocab_size
            agreed(lambda: losses.check_class_weight("weight", weight, classes, "V_real"))
    out = linear_logp(
        input, linear_weight, target, linear_bias, ignore_index=ignored, return_lse=True, **of_linear_logp
    )
    assert isinstance(out, LogpOutput)
    sums = None
    if label_smoothing:
        assert shard is not None
        sums = losses.column_sums_of_linear(input, linear_weight, linear_bias, shard, weight)
        temperature = of_linear_logp.get("temperature")
        if temperature is not None:
            sums = sums._replace(logits=sums.logits / temperature)
    loss = losses.token_losses(
        out.logp, target, ignore_index=ignored, lse=out.lse, label_smoothing=label_smoothing, sums=sums, z_loss=z_loss,
        class_weight=weight,
    )  # fmt: skip
    return losses.reduce(loss, target, reduction, ignored, weight)


def _refuse(input: Tensor, target: Tensor, label_smoothing: float, options: Any, more: dict[str, Any]) -> None:
    if options is not None:
        raise NotImplementedError("options (torch's chunking) is not supported: nothing here is chunked; pass None")
    if isinstance(target, Tensor) and target.is_floating_point():
        raise NotImplementedError("target as class probabilities is not supported; pass class ids (int32 or int64)")
    for name in ("return_lse", "return_entropy", "return_logits", "topk"):
        if more.get(name):
            raise NotImplementedError(f"{name} is not part of a loss; call linear_logp for it")
    if not label_smoothing:
        return
    main_grad = getattr(more.get("grad_options"), "main_grad", None)
    for name, asked in (
        ("softcap", more.get("softcap")),
        ("sequence_parallel", more.get("sequence_parallel")),
        ("sampling", more.get("sampling")),
        ("grad_options.main_grad", main_grad is not None),
    ):
        if asked:
            raise NotImplementedError(f"label_smoothing with {name} is not supported; use one of them")


class VocabParallelHeadStyle(ParallelStyle):
    """`parallelize_module(model, tp_mesh, {"lm_head": VocabParallelHeadStyle()})` for an nn.Linear head.

    Its weight [V, D] (and bias) become DTensors with Shard(0) over the mesh. Then `lm_head(hidden, target_ids)` is
    `linear_logp` over the mesh's group, and `lm_head(hidden)` still gives the whole logits. `fully_shard` may be
    applied afterwards, over another dimension of the mesh, to the head or a module that it is in.

    Args:
        input_layouts: of a hidden state that is a plain tensor: Replicate() or Shard(dim). Shard(0) is
            sequence_parallel of `linear_logp`; other dimensions are gathered. A DTensor brings its own.
        options: keyword arguments of `linear_logp` that every call shall have: real_vocab_size, temperature, softcap,
            return_entropy, strict, ...; a call may override them.

    Shard(0) cuts by torch.chunk: results are the contract's bytes where V / W is a multiple of 16. A weight that is
    tied to an embedding is no longer so (as under ColwiseParallel); VocabParallelLMHead ties.
    """

    def __init__(self, *, input_layouts: Placement | None = None, **options: Any) -> None:
        super().__init__()
        unknown = sorted(set(options) - (set(linear_logp.__kwdefaults__ or ()) - {"tp_group", "shard"}))
        if unknown:
            raise TypeError(f"VocabParallelHeadStyle: {unknown[0]!r} is not an option of linear_logp for a style")
        self.input_layouts = Replicate() if input_layouts is None else input_layouts
        self.options = options
        if not isinstance(self.input_layouts, (Replicate, Shard)):
            raise NotImplementedError(f"input_layouts must be Replicate() or Shard(dim), got {input_layouts!r}")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise NotImplementedError(f"VocabParallelHeadStyle takes an nn.Linear, got {type(module).__name__}")
        distribute_module(module, device_mesh, _shard_rows)
        layout, kept = self.input_layouts, self.options

        def forward(head: nn.Linear, hidden: Tensor, target_ids: Tensor | None = None, **options: Any) -> Any:
            if target_ids is None:
                return _logits(head, _whole(hidden, device_mesh, layout), device_mesh)
            options = {**kept, **options}
            if not isinstance(hidden, DTensor) and layout == Shard(0):
                options.setdefault("sequence_parallel", True)
            else:
                hidden = _whole(hidden, device_mesh, layout)
            return linear_logp(hidden, head.weight, target_ids, head.bias, **options)

        module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]
        return module


def _shard_rows(name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        rows = distribute_tensor(parameter, device_mesh, [Shard(0)])
        module.register_parameter(key, nn.Parameter(rows, requires_grad=parameter.requires_grad))


def _whole(hidden: Tensor, mesh: DeviceMesh, layout: Placement) -> Tensor:
    """This tensor on every rank; its gradient, complete on every rank, goes back to where the parts came from."""
    if not isinstance(hidden, DTensor):
        if isinstance(layout, Replicate):
            return hidden
        hidden = DTensor.from_local(hidden, mesh, [layout])
    return hidden.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Replicate()])


def _logits(head: nn.Linear, hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    logits = F.linear(whole, head.weight, head.bias)
    assert isinstance(logits, DTensor)
    return logits.redistribute(mesh, [Replicate()]).to_local()
