"""The public functions: check, agree, flatten, apply, shape back."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vocabshard import checks, compiled
from vocabshard import strict as strict_mode
from vocabshard.autograd import LinearLogp, LogitsLogp
from vocabshard.best import Best
from vocabshard.contract import Provenance
from vocabshard.logprob_contract import LogprobContract
from vocabshard.options import GradOptions, LogpOutput
from vocabshard.passes import LinearOperands, linear_scores
from vocabshard.plan import Operands, Plan, Request, group_size, make_plan
from vocabshard.remembered import key_of, recall, remember
from vocabshard.sampled import pass_over
from vocabshard.sampling import SamplingProgram
from vocabshard.shard import VocabShard


def linear_logp(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    bias: Tensor | None = None,
    *,
    tp_group: Any = None,
    vocab_start_index: int | None = None,
    global_vocab_size: int | None = None,
    real_vocab_size: int | None = None,
    shard: VocabShard | None = None,
    temperature: float | Tensor | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    invalid: str = "nan",
    validate: bool | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_logits: bool = False,
    sampling: SamplingProgram | None = None,
    cut: Tensor | None = None,
    topk: int | None = None,
    grad_options: GradOptions | None = None,
    sequence_parallel: bool = False,
    backend: str = "auto",
    strict: bool = False,
    contract: str | LogprobContract | None = None,
) -> Tensor | LogpOutput:
    """Log-prob of each target under softmax(cap(hidden @ weight.T + bias) / temperature), weight sharded by vocabulary.

    Never holds the [N, V_local] logits, forward or backward (unless return_logits asks for them).

    Args:
        hidden: [..., D] fp32, bf16 or fp16; the same on every rank of the group (but see sequence_parallel). [D] is a
            single row.
        weight: [V_local, D], this rank's rows, hidden's dtype (torch.autocast casts both). A DTensor with Shard(0)
            brings its own group and range.
        target_ids: [...] int32 or int64, GLOBAL ids, the same on every rank.
        bias: [V_local], any of the three dtypes, or None.
        tp_group: the tensor-parallel ProcessGroup; None is this process alone.
        vocab_start_index, global_vocab_size: this shard's first id and the sum of all V_local, checked when given.
            Ranges are the prefix sums of V_local in group-rank order.
        real_vocab_size: ids from here on are padding: excluded whatever they hold, NaN too. Padded weights MUST say
            it; without it every column counts as real vocabulary.
        shard: a VocabShard instead of the four above.
        temperature: a number, a tensor with one element, or one value a row ([...]). y = z * fp32(1 / T). In a
            per-row tensor an unusable value gives a NaN row (a ValueError under validate).
        softcap: z becomes softcap * tanh(z / softcap), before temperature.
        ignore_index: rows with this target give 0 and no gradient through logp; may be a valid id.
        invalid: what a target that is neither ignored nor in [0, real_vocab_size) gives: "nan" or "zero".
        validate: check target and temperature values, and with a group that all ranks called alike (one small
            collective; every rank gets the same error). None: on for the CPU and torch backends, off on GPUs, where
            it synchronises.
        return_lse, return_entropy, return_logits: more parts, in a LogpOutput. Entropy in nats. Logits are fp32
            [..., V_local], before temperature, -inf in padding, not differentiable.
        sampling: the log-prob under this program's truncated, renormalised distribution (docs/operators/sampling.md);
            lse and entropy too. A target that it leaves out has log-prob -inf, and its column no gradient. Its
            temperature, if it has one, stands for `temperature`.
        cut: int64 [...], what the program kept, as a LogpOutput or vocab_parallel_sample gave it: the call is then one
            pass. Without it the cut is found first, from logits in blocks of at most 256 MiB; a LogpOutput has it.
        topk: n: the n best ids, their log-probs and the target's rank, from logits in such blocks, or with many rows on
            Hopper from those of few columns; not differentiable.
        grad_options: how gradients are made: GradOptions(save_logits_budget, reduce, wire_dtype, main_grad).
        sequence_parallel: hidden is this rank's [S / W, ..., D] of [S, ..., D], in group-rank order along the first
            dimension, and so is its gradient. target_ids [S, ...], a temperature a row, results and upstream gradients
            are those of all rows, the same on every rank, as Megatron's labels and losses are. S is a multiple of W.
        backend: "auto", or a name; there is no silent fallback, see `provenance`.
        strict: raise ContractError, naming the field, unless the bytes are those of the contract.
        contract: the contract id that is expected, or a LogprobContract that the call has to be as; or None.

    Returns:
        fp32 [...], or LogpOutput(logp, lse, entropy, logits, maximum, provenance, cut, top_ids, top_logp, target_rank)
        when anything more was asked for.

    Differentiable in hidden, weight and bias through logp, lse and entropy, a different upstream gradient in every
    row. Upstream gradients must be the same on every rank. grad_hidden is summed over the group in fp32 and rounded
    once; weight and bias gradients stay on the rank that holds the shard. docs/gradients.md has all of it.

    Collectives: one all-gather of 32 (56 with entropy) bytes a row in the forward, one all-reduce of fp32 grad_hidden
    in the backward when hidden needs a gradient (reduce="ordered": sends from rank to rank and a broadcast; sequence
    parallel: a reduce-scatter, and all-gathers of hidden in both passes); plus, once per shard, the agreement of
    VocabShard. A cut that is found and topk: those of vocabshard/sampled.py, for each block.

    Determinism: logp, lse and entropy are the same bytes for any W, shard boundary at a multiple of 16, batch,
    padding, launch and grad_options, sequence parallel or not (csrc/contract.h). Gradients are the same bytes from run
    to run.

    Under torch.compile the call is one node of the graph, forward and backward; with main_grad, kept logits,
    DTensors or a LogprobContract it runs outside of the graph. A LogpOutput from a node has no provenance.

    Raises:
        ValueError, TypeError: bad shapes, dtypes, devices, values. ContractError: strict or contract not honoured.
        NotImplementedError: an option that this version does not have.
    """
    if torch.compiler.is_compiling():
        apart: dict[str, Any] = dict(tp_group=tp_group, shard=shard, temperature=temperature, return_lse=return_lse,
                     return_entropy=return_entropy, return_logits=return_logits, grad_options=grad_options)  # fmt: skip
        options: dict[str, Any] = dict(
            vocab_start_index=vocab_start_index, global_vocab_size=global_vocab_size, real_vocab_size=real_vocab_size,
            softcap=softcap, ignore_index=ignore_index, invalid=invalid, validate=validate,
            sequence_parallel=sequence_parallel, backend=backend, strict=strict, contract=contract,
        )  # fmt: skip
        if (
            sampling is None
            and cut is None
            and topk is None
            and compiled.one_node(weight, bias, contract, grad_options)
        ):
            return compiled.linear_logp(hidden, weight, target_ids, bias, **apart, **options)
        apart |= {"sampling": sampling, "cut": cut, "topk": topk}
        return _outside_the_graph(hidden, weight, target_ids, bias, **apart, **options)
    key = None
    if weight is not None and tp_group is None and contract is None and not (validate or strict):
        per_row = isinstance(temperature, Tensor)
        key = key_of(
            (hidden, weight, target_ids, bias, cut),
            (vocab_start_index, global_vocab_size, real_vocab_size, None if per_row else temperature, per_row, softcap,
             ignore_index, invalid, validate, return_entropy, return_logits, sequence_parallel, backend, sampling,
             topk),
            shard,
            grad_options,
        )  # fmt: skip
        if key is not None and checks.autocasting(weight.device.type):
            key = None
    plan = recall(key, target_ids)
    if plan is None:
        request = Request(
            tp_group, vocab_start_index, global_vocab_size, real_vocab_size, shard, temperature, softcap, ignore_index,
            invalid, validate, return_entropy, return_logits, False, backend, strict, contract,
            GradOptions() if grad_options is None else grad_options, sequence_parallel, sampling, cut is not None, topk,
        )  # fmt: skip
        given = {"hidden": hidden, "weight": weight}
        request, hidden, weight, bias = localise(request, hidden, weight, bias)
        operands = Operands(hidden, weight, target_ids, bias, given["weight"], cut)

        def check() -> None:
            if request.admits_only_the_contract:
                strict_mode.check_cast(given, {"hidden": hidden, "weight": weight})
            checks.sampling(sampling, temperature, topk, cut, target_ids)
            checks.linear(hidden, weight, target_ids, bias, group_size(request) if sequence_parallel else 1)
            checks.grad_options(request.grad, weight)

        plan = make_plan(request, operands, check)
        remember(key, plan)
    elif isinstance(temperature, Tensor):
        inv_temperature = checks.temperature_reciprocal(temperature, target_ids, validate=False)
        plan = plan._replace(inv_temperature=inv_temperature)
    shape = target_ids.shape
    rows = hidden if hidden.dim() == 2 else hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1])
    operands_of_rows = LinearOperands(
        rows, weight, bias, plan.target_ids, plan.inv_temperature, None if cut is None else cut.reshape(-1).contiguous()
    )
    best: Best | None = None
    lse: Tensor | None
    if topk is not None or (sampling is not None and cut is None and sampling.truncates):
        with torch.no_grad():
            found = pass_over(plan.call, operands_of_rows)
        operands_of_rows, best = operands_of_rows._replace(cut=found.cut), found.best
        logp, lse, entropy, logits = found.rows.logp, found.rows.lse, found.rows.entropy, found.logits
    elif not plan.call.differentiable:  # without autograd's own time, which a decoding step would notice
        logp, lse, entropy, logits = linear_scores(plan.call, operands_of_rows, return_lse)
    if plan.call.differentiable:
        logp, lse, entropy, logits, _ = LinearLogp.apply(*operands_of_rows, plan.call)
    if not (return_lse or return_entropy or return_logits or best):
        return logp if len(shape) == 1 else logp.view(shape)
    if len(shape) != 1:
        logp = logp.view(shape)
        lse = None if lse is None else lse.view(shape)
        entropy = None if entropy is None else entropy.view(shape)
    return LogpOutput(
        logp,
        lse if return_lse else None,
        entropy if return_entropy else None,
        logits.view(*shape, weight.shape[0]) if return_logits and logits is not None else None,
        provenance=plan.provenance(weight.device),
        cut=None if operands_of_rows.cut is None else operands_of_rows.cut.view(shape),
        top_ids=None if best is None else best.ids.view(*shape, best.ids.shape[1]),
        top_logp=None if best is None else best.logp.view(*shape, best.logp.shape[1]),
        target_rank=None if best is None else best.target_rank.view(shape),
    )


@torch._disable_dynamo  # torch.compiler.disable would import all of Dynamo here: seconds for every process
def _outside_the_graph(*operands: Any, **options: Any) -> Tensor | LogpOutput:
    return linear_logp(*operands, **options)


def vocab_parallel_logp(
    local_logits: Tensor,
    target_ids: Tensor,
    *,
    tp_group: Any = None,
    vocab_start_index: int | None = None,
    global_vocab_size: int | None = None,
    real_vocab_size: int | None = None,
    shard: VocabShard | None = None,
    temperature: float | Tensor | None = None,
    ignore_index: int = -100,
    invalid: str = "nan",
    validate: bool | None = None,
    return_lse: bool = True,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str = "auto",
    strict: bool = False,
    contract: str | LogprobContract | None = None,
) -> LogpOutput:
    """Log-prob of each target from logits that exist, [..., V_local] on each rank of the group.

    The same softmax layer as `linear_logp`, so the same bytes for the same logits. Arguments mean what they mean
    there; local_logits is fp32, bf16 or fp16. The gradient with respect to local_logits stays on its rank, in the
    logits' dtype. inplace_backward=True lets the backward overwrite the logits with it (they are lost; the backward
    can then run once).

    Returns: LogpOutput, [0] logp and [1] lse (None with return_lse=False).
    Collectives: one all-gather of 32 (56 with entropy) bytes a row in the forward, none in the backward.
    """
    request = Request(
        tp_group, vocab_start_index, global_vocab_size, real_vocab_size, shard, temperature, None, ignore_index,
        invalid, validate, return_entropy, False, inplace_backward, backend, strict, contract,
    )  # fmt: skip
    operands = Operands(None, local_logits, target_ids)
    plan = make_plan(request, operands, lambda: checks.logits(local_logits, target_ids, inplace=inplace_backward))
    logp, lse, entropy, _ = _apply_logits(local_logits, plan, None, return_lse)
    shape = target_ids.shape
    return LogpOutput(
        logp.view(shape),
        lse.view(shape) if return_lse and lse is not None else None,
        entropy.view(shape) if entropy is not None else None,
        provenance=plan.provenance(local_logits.device),
    )


def batch_invariant_logp(
    logits: Tensor,
    target_ids: Tensor,
    ignore_index: int = -100,
    validate: bool | None = None,
    *,
    temperature: float | Tensor | None = None,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    invalid: str = "nan",
    return_lse: bool = False,
    return_max: bool = False,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str = "auto",
    strict: bool = False,
    contract: str | LogprobContract | None = None,
) -> Tensor | LogpOutput:
    """Log-prob of each target from unsharded logits [..., V], the same bytes whatever the batch around a row.

    Args:
        rows: int32 or int64 [M]: which rows of logits [N, V] to score, in any order; target_ids is then [M] and so
            is the result. Rows left out get exactly zero gradient, repeated ones add up. Out of range: ValueError
            (which reads the index back on a GPU unless validate=False).
        out: fp32 tensor of the result's shape that logp is written into; not with logits that require grad.
        return_lse, return_max, return_entropy: more parts, in a LogpOutput (max: of the logits after temperature).
        Others as in `linear_logp` and `vocab_parallel_logp`.

    Returns: fp32 logp shaped as target_ids, or a LogpOutput when more was asked for.
    """
    key = None
    if rows is None and out is None and contract is None and not (validate or inplace_backward or strict):
        options = (temperature, ignore_index, invalid, validate, return_entropy, backend)
        key = key_of((logits, target_ids), options)
    plan = recall(key, target_ids)
    if plan is None:
        request = Request(
            temperature=temperature, ignore_index=ignore_index, invalid=invalid, validate=validate,
            entropy=return_entropy, inplace_backward=inplace_backward, backend=backend, strict=strict,
            contract=contract,
        )  # fmt: skip
        operands = Operands(None, logits, target_ids)
        plan = make_plan(
            request, operands, lambda: checks.logits(logits, target_ids, rows, out, validate, inplace_backward)
        )
        remember(key, plan)
    logp, lse, entropy, maximum = _apply_logits(logits, plan, rows, return_lse, return_max)
    shape = target_ids.shape
    result = logp if len(shape) == 1 else logp.view(shape)
    if out is not None:
        result = out.copy_(result)
    if not (return_lse or return_max or return_entropy):
        return result
    return LogpOutput(
        result,
        lse.view(shape) if return_lse and lse is not None else None,
        entropy.view(shape) if entropy is not None else None,
        maximum=maximum.view(shape) if return_max and maximum is not None else None,
        provenance=plan.provenance(logits.device),
    )


def provenance(
    hidden: Tensor, weight: Tensor, target_ids: Tensor, bias: Tensor | None = None, **options: Any
) -> Provenance:
    """What `linear_logp` with these arguments would run, without running it. Collective as that call would be.

    The choice is a pure function of the arguments, so this is also what such a call did run; a LogpOutput carries it.
    """
    options.pop("return_lse", None)  # it does not change what runs
    options["grad_options"] = options.get("grad_options") or GradOptions()
    cut = options.pop("cut", None)
    options["cut_given"] = cut is not None
    renamed = {"return_entropy": "entropy", "return_logits": "logits", "grad_options": "grad"}
    request = Request(**{renamed.get(name, name): value for name, value in options.items()})
    request, hidden, weight, bias = localise(request, hidden, weight, bias)
    operands = Operands(hidden, weight, target_ids, bias, cut=cut)
    shards = group_size(request) if request.sequence_parallel else 1

    def check() -> None:
        checks.sampling(request.sampling, request.temperature, request.topk, cut, target_ids)
        checks.linear(hidden, weight, target_ids, bias, shards)

    return make_plan(request, operands, check).provenance(weight.device)


def localise(
    request: Request, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Request, Tensor, Tensor, Tensor | None]:
    """Autocast's casts, and the local part of a DTensor, both seen by autograd."""
    if isinstance(hidden, Tensor) and isinstance(weight, Tensor) and checks.autocasting(weight.device.type):
        dtype = torch.get_autocast_dtype(weight.device.type)
        if hidden.dtype in checks.FLOAT_DTYPES and weight.dtype in checks.FLOAT_DTYPES:
            hidden, weight = hidden.to(dtype), weight.to(dtype)
    if isinstance(weight, Tensor) and hasattr(weight, "to_local"):
        shard = request.shard
        if shard is None:
            shard = VocabShard.of_dtensor(weight, real_vocab_size=request.real_vocab_size)
            request = request._replace(shard=shard)
        weight = weight.to_local()
    if isinstance(bias, Tensor) and hasattr(bias, "to_local"):
        bias = bias.to_local()
    hidden, weight = _plain(hidden), _plain(weight)
    return request, hidden, weight, None if bias is None else _plain(bias)


def _plain(tensor: Tensor) -> Tensor:
    """Without torch's lazy negation, which the memory does not show."""
    return tensor.resolve_neg() if isinstance(tensor, Tensor) and tensor.is_neg() else tensor


def _apply_logits(
    logits: Tensor, plan: Plan, rows: Tensor | None, want_lse: bool, want_maximum: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """logp, lse, entropy, maximum, flat; of those that are not wanted some may be None."""
    logits = _plain(logits)
    flat = logits if logits.dim() == 2 else logits.reshape(math.prod(logits.shape[:-1]), logits.shape[-1])
    if flat.stride(-1) != 1 and flat.shape[-1] > 1:
        flat = flat.contiguous()
    index = None if rows is None else rows.to(torch.int64).contiguous()
    if torch.is_grad_enabled() and flat.requires_grad:
        return LogitsLogp.apply(flat, plan.target_ids, plan.inv_temperature, index, plan.call)
    return plan.call.score_logits(flat, plan.target_ids, plan.inv_temperature, index, want_lse, want_maximum)
