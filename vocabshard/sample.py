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
from vocabshard.plan import Operands, Request, make_plan
from vocabshard.sampled import Draw, pass_over
from vocabshard.sampling import KEEP_ALL, SamplingProgram
from vocabshard.shard import VocabShard


@torch._disable_dynamo  # torch.compiler.disable would import all of Dynamo here: seconds for every process
@torch.no_grad()
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
    given_rows = isinstance(hidden, Tensor) and hidden.dim() > 0
    target_ids = torch.zeros(
        hidden.shape[:-1] if given_rows else (), dtype=torch.int64, device=hidden.device if given_rows else None
    )
    request = Request(
        tp_group, vocab_start_index, global_vocab_size, real_vocab_size, shard, temperature, softcap,
        validate=validate, entropy=return_entropy, backend=backend, strict=strict, contract=contract, sampling=program,
        topk=topk, seed=seed,
    )  # fmt: skip
    given = {"hidden": hidden, "weight": weight}
    request, hidden, weight, bias = localise(request, hidden, weight, bias)

    def check() -> None:
        if request.admits_only_the_contract:
            strict_mode.check_cast(given, {"hidden": hidden, "weight": weight})
        if program is None:
            raise TypeError("program must be a SamplingProgram, got None")
        checks.sampling(program, temperature, topk, None, target_ids)
        checks.linear(hidden, weight, target_ids, bias)
        checks.draw(seed, row_keys, hidden)

    operands = Operands(hidden, weight, target_ids, bias, given["weight"], row_keys=row_keys)
    plan = make_plan(request, operands, check)
    rows = hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1])
    if row_keys is None:
        keys = torch.arange(rows.shape[0], device=rows.device)
    else:
        keys = row_keys.reshape(-1).contiguous()
    x = LinearOperands(rows, weight, bias, plan.target_ids, plan.inv_temperature)
    found = pass_over(plan.call, x, Draw(seed, keys))
    shape, best = target_ids.shape, found.best
    cut = torch.full_like(keys, KEEP_ALL) if found.cut is None else found.cut
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
