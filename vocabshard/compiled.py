"""linear_logp inside torch.compile: one node of the graph in the forward, one in the backward.

A graph holds tensors, numbers and texts: the group goes by its name, a VocabShard by its label, and what else is no
tensor in one text. Each node runs what an eager call runs, checks and agreement between ranks included.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vocabshard import checks
from vocabshard.kernels.problem import Needs, SavedRows
from vocabshard.options import GradOptions, LogpOutput
from vocabshard.passes import LinearOperands, linear_backward, linear_forward
from vocabshard.plan import Operands, Plan, Request, group_size, make_plan
from vocabshard.shard import VocabShard, labelled_shard

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def call_text(**said: Any) -> str:
    """A call's texts, numbers and switches; Dynamo takes the result for a constant."""
    return json.dumps(said, sort_keys=True)


def autocast_dtype(device_type: str) -> str:
    """The name of the dtype that autocast, on while Dynamo traces, gives; or an empty text."""
    return str(torch.get_autocast_dtype(device_type)).partition(".")[2] if checks.autocasting(device_type) else ""


# What torch.compiler.assume_constant_result does, which would import all of Dynamo here: seconds for every process.
call_text._dynamo_marked_constant = True  # type: ignore[attr-defined]
autocast_dtype._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=256)
def _said(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


def _plan(x: LinearOperands, temperature: float | Tensor | None, text: str) -> Plan:
    """x with the caller's shapes; what autograd thinks of the tensors is not known here, and not needed."""
    said = dict(_said(text))
    group, label = said.pop("group"), said.pop("shard")
    grad = GradOptions(reduce=said.pop("reduce"), wire_dtype=WIRES[said.pop("wire")])
    if label:
        said["shard"] = labelled_shard(label)
    elif group:
        said["tp_group"] = dist.distributed_c10d._resolve_process_group(group)
    request = Request(temperature=temperature, grad=grad, **said)

    def check() -> None:
        shards = group_size(request) if request.sequence_parallel else 1
        checks.linear(x.hidden, x.weight, x.target_ids, x.bias, shards)
        checks.grad_options(grad, x.weight)

    return make_plan(request, Operands(x.hidden, x.weight, x.target_ids, x.bias), check)


def _rows(x: LinearOperands, plan: Plan) -> LinearOperands:
    hidden = x.hidden.reshape(math.prod(x.hidden.shape[:-1]), x.hidden.shape[-1])
    return LinearOperands(hidden, x.weight, x.bias, plan.target_ids, plan.inv_temperature)


def _or_nothing(x: Tensor | None, like: Tensor) -> Tensor:
    """A node's results are tensors: an absent one is empty."""
    return like.new_empty(0, dtype=torch.float32) if x is None else x


@torch.library.custom_op("vocabshard::linear_logp", mutates_args=())
def forward_node(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    temperature: float | None,
    text: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> logp, lse, entropy, logits, and the lse2 pair for the backward."""
    x = LinearOperands(hidden, weight, bias, target_ids, None)
    plan = _plan(x, temperature if row_temperature is None else row_temperature, text)
    rows, logits, _ = linear_forward(plan.call, _rows(x, plan))
    shape = target_ids.shape
    return (
        rows.logp.view(shape),
        rows.lse.view(shape),
        _or_nothing(
            rows.entropy.view(shape) if plan.call.problem.entropy and rows.entropy is not None else None, hidden
        ),
        _or_nothing(None if logits is None else logits.view(*shape, weight.shape[0]), hidden),
        rows.lse2_int,
        rows.lse2_frac,
    )


@forward_node.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    temperature: float | None,
    text: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def new(*shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return hidden.new_empty(shape, dtype=dtype)

    said, shape, rows = _said(text), target_ids.shape, target_ids.numel()
    entropy = new(*shape) if said["entropy"] else new(0)
    logits = new(*shape, weight.shape[0]) if said["logits"] else new(0)
    return new(*shape), new(*shape), entropy, logits, new(rows, dtype=torch.int32), new(rows)


@torch.library.custom_op("vocabshard::linear_logp_backward", mutates_args=())
def backward_node(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    lse2_int: Tensor,
    lse2_frac: Tensor,
    entropy: Tensor,
    grad_logp: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float | None,
    text: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of hidden, weight and bias; empty where not needed."""
    x = LinearOperands(hidden, weight, bias, target_ids, None)
    plan = _plan(x, temperature if row_temperature is None else row_temperature, text)
    with_entropy = plan.call.problem.entropy
    flat = [None if g is None else g.reshape(-1) for g in (grad_logp, grad_lse, grad_entropy)]
    upstream = (flat[0], flat[1], flat[2] if with_entropy else None)
    saved = SavedRows(lse2_int, lse2_frac, entropy.reshape(-1) if with_entropy else None)
    gradients = linear_backward(plan.call, _rows(x, plan), saved, upstream, None, Needs(*needs))
    grad_hidden = None if gradients[0] is None else gradients[0].view(hidden.shape)
    return tuple(_or_nothing(g, hidden) for g in (grad_hidden, *gradients[1:]))  # type: ignore[return-value]


@backward_node.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    bias: Tensor | None,
    row_temperature: Tensor | None,
    lse2_int: Tensor,
    lse2_frac: Tensor,
    entropy: Tensor,
    grad_logp: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float | None,
    text: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    of = [x if need else None for x, need in zip((hidden, weight, bias), needs, strict=True)]
    return tuple(  # type: ignore[return-value]
        hidden.new_empty(0, dtype=torch.float32) if x is None else x.new_empty(x.shape) for x in of
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.temperature, ctx.text = inputs
    _, _, entropy, logits, lse2_int, lse2_frac = output
    ctx.save_for_backward(*tensors, lse2_int, lse2_frac, entropy)
    ctx.mark_non_differentiable(logits, lse2_int, lse2_frac)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = [bool(ctx.needs_input_grad[i]) for i in (0, 1, 3)]
    gradients = backward_node(*ctx.saved_tensors, *upstream[:3], ctx.temperature, ctx.text, needs)
    grad_hidden, grad_weight, grad_bias = (g if need else None for g, need in zip(gradients, needs, strict=True))
    return grad_hidden, grad_weight, None, grad_bias, None, None, None


forward_node.register_autograd(_backward, setup_context=_keep)


def one_node(weight: Tensor, bias: Tensor | None, contract: Any, grad: GradOptions | None) -> bool:
    """Whether a call can be a node of a compiled graph: tensors in, new tensors out, of shapes that can be told."""
    plain = all(not hasattr(t, "to_local") for t in (weight, bias) if t is not None)
    pure = grad is None or (grad.main_grad is None and grad.save_logits_budget == 0)
    return plain and pure and (contract is None or isinstance(contract, str))


def linear_logp(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    bias: Tensor | None,
    tp_group: Any,
    shard: VocabShard | None,
    temperature: float | Tensor | None,
    return_lse: bool,
    return_entropy: bool,
    return_logits: bool,
    grad_options: GradOptions | None,
    **options: Any,
) -> Tensor | LogpOutput:
    """What Dynamo traces of the public function. Its LogpOutput has no provenance: a graph returns tensors."""
    autocast = autocast_dtype(weight.device.type)
    if autocast:
        hidden, weight = hidden.to(getattr(torch, autocast)), weight.to(getattr(torch, autocast))
    grad = GradOptions() if grad_options is None else grad_options
    # Dynamo lets nobody ask a ProcessGroup for what it does not have
    group = tp_group if tp_group is None or isinstance(tp_group, dist.ProcessGroup) else tp_group.get_group()
    per_row = isinstance(temperature, Tensor)
    text = call_text(
        group="" if group is None or shard is not None else group.group_name,
        shard="" if shard is None else shard.label,
        entropy=return_entropy,
        logits=return_logits,
        reduce=grad.reduce,
        wire="bf16" if grad.wire_dtype == torch.bfloat16 else "fp32",
        **options,
    )
    logp, lse, entropy, logits, _, _ = forward_node(
        hidden, weight, target_ids, bias, temperature if per_row else None, None if per_row else temperature, text
    )
    if not (return_lse or return_entropy or return_logits):
        return logp
    return LogpOutput(
        logp, lse if return_lse else None, entropy if return_entropy else None, logits if return_logits else None
    )
