"""Tokens from a sharded head: the public function."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vocabshard import checks
from vocabshard import strict as strict_mode
from vocabshard.functional import localise
from vocabshard.logprob_contract import LogprobContract
from vocabshard.options import SampleOutput
from vocabshard.passes import LinearOperands
from vocabshard.plan import Operands, Plan, Request, make_plan
from vocabshard.remembered import key_of, recall, remember
from vocabshard.sampled import Draw, draw_at_once, pass_over
from vocabshard.sampling import KEEP_ALL, SamplingProgram
from vocabshard.shard import VocabShard


def vocab_parallel_sample(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    program: SamplingProgram,
    seed: int,
    row_keys: Tensor | None = None,
    tp_group: Any = None,
    vocab_start_index: int | None = None,
    global_vocab_size: int | None = None,
    real_vocab_size: int | None = None,
    shard: VocabShard | None = None,
    temperature: float | Tensor | None = None,
    softcap: float | None = None,
    validate: bool | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    topk: int | None = None,
    backend: str = "auto",
    strict: bool = False,
    contract: str | LogprobContract | None = None,
) -> SampleOutput:
    """A token of every row, drawn under `program`, with the cut that replays it and the log-prob of that replay.

    Args:
        hidden, weight, bias, tp_group, sizes, shard, temperature, softcap, validate, topk, backend, strict, contract:
            as in `linear_logp`. hidden [..., D] is the same on every rank.
        program: what is drawn from. Greedy programs take the best column, the lowest id of equals.
        seed: an int of 64 bits, the same on every rank.
        row_keys: int64 [...], what tells a row's noise from another's: of request and position, say. Rows of one seed
            and one key draw with one noise, whatever their logits: no two tokens of a run should share both. By default
            rows have 0, 1, 2, ...: then a row's token depends on where in the batch it stands, and every step needs a
            seed of its own.

    Returns:
        SampleOutput. token and cut are what a trainer needs: linear_logp(hidden, weight, token, sampling=program,
        cut=cut) gives the bytes of logp at any W. A row without a distribution (NaN or all -inf) gives token -1 and
        logp NaN; a trainer sets such tokens to its ignore_index, as linear_logp refuses them where it validates.

    Determinism: token, cut and logp are the same at any W, shard boundary at a multiple of 16, batch and launch, for
    the same seed and row key. Nothing is differentiable.

    Collectives: those of vocabshard/sampled.py, for each block of rows whose fp32 logits take 256 MiB.

    Under torch.compile the call runs outside of the graph.

    Raises:
        ValueError, TypeError: bad shapes, dtypes, devices, values. ContractError: strict or contract not honoured.
    """
    if torch.compiler.is_compiling():
        options: dict[str, Any] = dict(
            program=program, seed=seed, row_keys=row_keys, tp_group=tp_group, vocab_start_index=vocab_start_index,
            global_vocab_size=global_vocab_size, real_vocab_size=real_vocab_size, shard=shard, temperature=temperature,
            softcap=softcap, validate=validate, return_lse=return_lse, return_entropy=return_entropy, topk=topk,
            backend=backend, strict=strict, contract=contract,
        )  # fmt: skip
        return _outside_the_graph(hidden, weight, bias, **options)
    key = None
    usual = weight is not None and tp_group is None and contract is None and not (validate or strict)
    if usual and type(seed) is int and -(1 << 63) <= seed < 1 << 63 and type(program) is SamplingProgram:
        per_row = isinstance(temperature, Tensor)
        key = key_of(
            (hidden, weight, bias, row_keys),
            ("drawn", vocab_start_index, global_vocab_size, real_vocab_size, None if per_row else temperature, per_row,
             softcap, validate, return_entropy, backend, program, topk),
            shard,
        )  # fmt: skip
        if key is not None and checks.autocasting(weight.device.type):
            key = None
    plan = recall(key, None)
    if plan is None:
        request = Request(
            tp_group, vocab_start_index, global_vocab_size, real_vocab_size, shard, temperature, softcap,
            validate=validate, entropy=return_entropy, backend=backend, strict=strict, contract=contract,
            sampling=program, topk=topk, seed=seed,
        )  # fmt: skip
        plan, hidden, weight, bias = _planned(request, hidden, weight, bias, row_keys)
        remember(key, plan)
    elif isinstance(temperature, Tensor):
        of_rows = checks.temperature_reciprocal(temperature, hidden[..., 0], validate=False)
        plan = plan._replace(inv_temperature=of_rows)
    shape = hidden.shape[:-1]
    rows = hidden if len(shape) == 1 else hidden.reshape(math.prod(shape), hidden.shape[-1])
    if row_keys is not None and (len(shape) != 1 or not row_keys.is_contiguous()):
        row_keys = row_keys.reshape(-1).contiguous()
    x = LinearOperands(rows, weight, bias, plan.target_ids, plan.inv_temperature)
    draw = Draw(seed, row_keys)
    drawn = draw_at_once(plan.call, x, draw, return_lse)
    if drawn is not None:
        told = plan.provenance(weight.device)
        if len(shape) == 1:
            return SampleOutput(drawn.tokens, drawn.logp, drawn.cut, drawn.lse, provenance=told)
        lse = None if drawn.lse is None else drawn.lse.view(shape)
        return SampleOutput(
            drawn.tokens.view(shape), drawn.logp.view(shape), drawn.cut.view(shape), lse, provenance=told
        )
    with torch.no_grad():
        found = pass_over(plan.call, x, draw)
    best = found.best
    cut = torch.full_like(found.tokens, KEEP_ALL) if found.cut is None else found.cut
    entropy = found.rows.entropy if return_entropy else None
    return SampleOutput(
        found.tokens.view(shape),
        found.rows.logp.view(shape),
        cut.view(shape),
        found.rows.lse.view(shape) if return_lse else None,
        None if entropy is None else entropy.view(shape),
        None if best is None else best.ids.view(*shape, best.ids.shape[1]),
        None if best is None else best.logp.view(*shape, best.logp.shape[1]),
        None if best is None else best.target_rank.view(shape),
        plan.provenance(weight.device),
    )


@torch._disable_dynamo  # torch.compiler.disable would import all of Dynamo here: seconds for every process
def _outside_the_graph(*operands: Any, **options: Any) -> SampleOutput:
    return vocab_parallel_sample(*operands, **options)


@torch.no_grad()
def _planned(
    request: Request, hidden: Tensor, weight: Tensor, bias: Tensor | None, row_keys: Tensor | None
) -> tuple[Plan, Tensor, Tensor, Tensor | None]:
    """A plan, and the operands on this rank and as autocast has them."""
    given_rows = isinstance(hidden, Tensor) and hidden.dim() > 0
    target_ids = torch.zeros(
        hidden.shape[:-1] if given_rows else (), dtype=torch.int64, device=hidden.device if given_rows else None
    )
    program, temperature = request.sampling, request.temperature
    given = {"hidden": hidden, "weight": weight}
    request, hidden, weight, bias = localise(request, hidden, weight, bias)

    def check() -> None:
        if request.admits_only_the_contract:
            strict_mode.check_cast(given, {"hidden": hidden, "weight": weight})
        if program is None:
            raise TypeError("program must be a SamplingProgram, got None")
        checks.sampling(program, temperature, request.topk, None, target_ids)
        checks.linear(hidden, weight, target_ids, bias)
        checks.draw(request.seed, row_keys, hidden)

    operands = Operands(hidden, weight, target_ids, bias, given["weight"], row_keys=row_keys)
    return make_plan(request, operands, check), hidden, weight, bias
