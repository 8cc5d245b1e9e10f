"""A provider for Vime's `--linear-logp-provider`: log-probs and entropy of local tokens, with the contract's bytes.

    --linear-logp-provider vocabshard.integrations.vime.provider
    --linear-logp-provider-mode strict

It reads the request's attributes and imports nothing of Vime. docs/integrations/vime.md has the table of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from vocabshard.contract import CONTRACT_ID, ContractError, Provenance
from vocabshard.dist import agree
from vocabshard.dist.gather import rank_and_size
from vocabshard.functional import linear_logp, provenance, vocab_parallel_logp
from vocabshard.integrations.vime_replay import INTEGERS, mask_of_ids, number_of, one_temperature, read_replay
from vocabshard.logprob_contract import LogprobContract
from vocabshard.masked import masked_linear_logp
from vocabshard.options import LogpOutput
from vocabshard.registry import get_logprob_op
from vocabshard.sampling import SamplingProgram, left_out
from vocabshard.strict import dtype_name

LAYOUTS = ("single", "zigzag", "allgather")
_REFUSALS = (ContractError, TypeError, ValueError, NotImplementedError)


class ProviderUnavailable(RuntimeError):
    """In mode auto: asks Vime to take its own implementation, on every rank of the group alike."""

    linear_logp_provider_unavailable = True


class ProviderConfigurationError(ValueError):
    """In mode strict: the request is not one that can be honoured, and nothing may be taken in its stead."""


@dataclass(frozen=True)
class ProviderResult:
    """What Vime takes by attribute."""

    logp: Tensor  # fp32 [T, 1]
    entropy: Tensor | None  # fp32 [T]
    backend_id: str
    contract_id: str
    provenance: Mapping[str, Any]


class _Vocabulary(NamedTuple):
    start: int
    real: int
    padded: int


class _Job(NamedTuple):
    """A request that was read and found good."""

    hidden: Tensor | None  # None: the logits are scored
    matrix: Tensor
    bias: Tensor | None
    target_ids: Tensor
    keep: Tensor | None
    temperature: float | Tensor | None
    program: SamplingProgram | None  # of a replay, with the cut or None
    cut: Tensor | None
    options: dict[str, Any]
    stated: dict[str, Any]  # for the provenance


def provider(request: Any) -> ProviderResult:
    """Scores `request`. The mode is metadata["mode"], auto without one; `strict_provider` is strict by itself.

    Given hidden states and a projection the logits are never read. Collective over the tensor-parallel group: an
    all-gather of a status, then those of `linear_logp`; either all ranks score or all get the same error.

    Raises: ProviderUnavailable (auto) or ProviderConfigurationError (strict) for sizes that are not declared, metadata
    that does not match the groups, a backend other than the one asked for, and whatever the contract does not bear.
    """
    return _provide(request, None)


def strict_provider(request: Any) -> ProviderResult:
    """`provider` in mode strict, whatever the metadata says."""
    return _provide(request, "strict")


def _provide(request: Any, mode: str | None) -> ProviderResult:
    metadata = getattr(request, "metadata", None)
    mode = mode or (metadata.get("mode", "auto") if isinstance(metadata, Mapping) else "auto")
    refusal = ProviderUnavailable if mode == "auto" else ProviderConfigurationError
    group = getattr(request, "tensor_parallel_group", None)
    try:
        job = _agree_on(request, mode, group)
        return _score(job, bool(request.with_entropy), bool(request.with_entropy_grad))
    except _REFUSALS as error:
        raise refusal(f"vocabshard's linear_logp provider: {error}") from error


def _agree_on(request: Any, mode: str, group: Any) -> _Job:
    """The request read, on every rank, or the first rank's error on every rank."""
    rank_and_size(group)
    job: _Job | None = None
    error: Exception | None = None
    try:
        job = _read(request, mode, group)
    except _REFUSALS as e:
        error = e
    except (AttributeError, IndexError, OverflowError, RuntimeError) as e:
        error = ValueError(f"the request cannot be read: {type(e).__name__}: {e}")
        error.__cause__ = e
    if group is not None:
        entropy = bool(getattr(request, "with_entropy", False)), bool(getattr(request, "with_entropy_grad", False))
        same = "" if job is None else repr((mode, entropy, job.stated, job.options["backend"]))
        agree.agree_call(error, {"options": agree.text_hash(same)}, group)
    if error is not None:
        raise error
    assert job is not None
    return job


def _read(request: Any, mode: str, group: Any) -> _Job:
    if mode not in ("auto", "strict"):
        raise ValueError(f'mode must be "auto" or "strict", got {mode!r}')
    metadata = getattr(request, "metadata", None) or {}
    if not isinstance(metadata, Mapping):
        raise TypeError(f"request.metadata must be a mapping, got {type(metadata).__name__}")
    if metadata.get("contract_id", CONTRACT_ID) != CONTRACT_ID:
        raise ContractError(f"contract_id: asked for {metadata['contract_id']!r}, found {CONTRACT_ID!r}", "contract_id")
    target_ids = _tensor("target_ids", request.target_ids)
    if target_ids.dim() != 1 or target_ids.dtype not in INTEGERS:
        raise ValueError(f"target_ids must be integers [T], got {target_ids.dtype} {list(target_ids.shape)}")
    hidden, matrix, bias = _operands(request)
    if matrix.dim() != 2:
        name = "logits must be [T, V_local]" if hidden is None else "context.projection.weight must be [V_local, D]"
        raise ValueError(f"{name}, got {list(matrix.shape)}")
    rows, width = target_ids.shape[0], matrix.shape[0] if hidden is not None else matrix.shape[1]
    if request.chunk_size is not None and not _is_int(request.chunk_size):
        raise TypeError(f"chunk_size must be an int, not positive for the default, got {request.chunk_size!r}")
    layout = _token_layout(request.token_layout, metadata)
    kept_ids = metadata.get("top_p_sparse_token_ids")
    if kept_ids is not None and request.log_prob_keep_mask is not None:
        raise ValueError("log_prob_keep_mask and metadata top_p_sparse_token_ids were given; give one of the two")
    masks = request.log_prob_keep_mask is not None or kept_ids is not None
    vocabulary = _vocabulary(request, metadata, width, rank_and_size(group))
    backend = metadata.get("backend", "auto")
    temperature = request.temperature
    if hidden is None and metadata.get("logits_are_temperature_scaled", False):
        temperature = None
    program, cut = read_replay(request, metadata, rows, hidden is None)
    own_temperature = program is not None and program.temperature is not None
    if program is not None and own_temperature:
        temperature = one_temperature(program, temperature)
    per_row = isinstance(temperature, Tensor) and temperature.numel() > 1
    outputs = ("logp", "entropy") if request.with_entropy else ("logp",)
    contract = LogprobContract(
        role="trainer",
        entry="logits that exist" if hidden is None else "linear_logp",
        weight_dtype=str(dtype_name(matrix)),
        bias_dtype=dtype_name(bias),
        real_vocab_size=vocabulary.real,
        padded_vocab_size=vocabulary.padded,
        temperature=None if own_temperature else "per-row" if per_row else number_of(temperature),
        sampling=None if program is None or hidden is None else program.transforms,
        mask="keep_mask" if masks else "ignore_index",
        outputs=outputs,
    )
    found = get_logprob_op(contract, backend, device=matrix.device)
    options = {
        "tp_group": group,
        "vocab_start_index": vocabulary.start,
        "global_vocab_size": vocabulary.padded,
        "real_vocab_size": vocabulary.real,
        "backend": found.provenance.backend,
        "strict": True,
    }
    stated = {
        "mode": mode,
        "requested_backend": backend,
        "token_layout": layout,
        "contract_fingerprint": contract.fingerprint,
        "keep_mask": masks,
        "replayed": None if program is None else program.as_list(),
        "reads_logits": hidden is None,
        "chunk_size": request.chunk_size,
    }
    keep = _keep_mask(request.log_prob_keep_mask, rows, width)
    if kept_ids is not None:
        keep = mask_of_ids(kept_ids, rows, width, vocabulary.start)
    if request.with_entropy_grad not in (True, False):
        raise TypeError(f"with_entropy_grad must be True or False, got {request.with_entropy_grad!r}")
    if target_ids.dtype not in (torch.int32, torch.int64):
        target_ids = target_ids.long()
    return _Job(hidden, matrix, bias, target_ids, keep, temperature, program, cut, options, stated)


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"request.{name} must be a torch.Tensor, got {type(value).__name__}")
    return value


def _operands(request: Any) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """hidden, weight, bias; or None, logits, None where the request has no context."""
    context = getattr(request, "context", None)
    if context is None:
        return None, _tensor("logits", request.logits), None
    projection = getattr(context, "projection", None)
    hidden = _tensor("context.hidden", getattr(context, "hidden", None))
    weight = _tensor("context.projection.weight", getattr(projection, "weight", None))
    return hidden, weight, getattr(projection, "bias", None)


def _token_layout(layout: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Which rows this rank owns: recorded, and nothing else. The same on every rank of a tensor-parallel group."""
    size, rank, kind = (getattr(layout, name, None) for name in ("world_size", "rank", "layout"))
    if not _is_int(size) or not _is_int(rank) or not 0 <= rank < size:
        raise ValueError(f"token_layout: expected 0 <= rank < world_size, got rank {rank!r} of {size!r}")
    if kind not in LAYOUTS or (kind == "single") != (size == 1):
        raise ValueError(f"token_layout: {kind!r} does not describe {size} ranks; expected one of {LAYOUTS}")
    for name, has in (("cp_world_size", size), ("cp_rank", rank)):
        if metadata.get(name, has) != has:
            raise ValueError(f"metadata {name} is {metadata[name]!r}, token_layout says {has}")
    return {"world_size": size, "rank": rank, "layout": kind}


def _vocabulary(request: Any, metadata: Mapping[str, Any], width: int, place: tuple[int, int]) -> _Vocabulary:
    for name, has in (("tp_rank", place[0]), ("tp_world_size", place[1])):
        if metadata.get(name, has) != has:
            raise ValueError(f"metadata {name} is {metadata[name]!r}, the tensor-parallel group says {has}")
    partition = getattr(getattr(request, "context", None), "vocab_partition", None)
    sizes = {}
    for size in ("real", "padded"):
        stated = [getattr(partition, f"{size}_size", None), metadata.get(f"{size}_vocab_size")]
        given = [value for value in stated if value is not None]
        if not given:
            raise ValueError(f"the {size} vocabulary size is not declared, in vocab_partition.{size}_size or metadata")
        if len(set(given)) > 1 or not _is_int(given[0]) or given[0] <= 0:
            raise ValueError(f"the {size} vocabulary size must be one positive int, got {given}")
        sizes[size] = given[0]
    if sizes["real"] > sizes["padded"]:
        raise ValueError(f"real vocabulary size {sizes['real']} exceeds the padded one, {sizes['padded']}")
    if width * place[1] != sizes["padded"] and partition is None:
        raise ValueError(f"{place[1]} ranks of {width} columns do not cover padded_vocab_size = {sizes['padded']}")
    start = getattr(partition, "local_start", None) if partition is not None else place[0] * width
    if not _is_int(start) or getattr(partition, "local_size", width) != width:
        raise ValueError(f"vocab_partition: expected an int local_start and local_size = {width}, got {partition!r}")
    return _Vocabulary(start, sizes["real"], sizes["padded"])


def _keep_mask(mask: Any, rows: int, width: int) -> Tensor | None:
    if mask is None:
        return None
    if _tensor("log_prob_keep_mask", mask).dtype != torch.bool or mask.shape != (rows, width):
        raise ValueError(
            f"log_prob_keep_mask must be bool [T, V_local] = {[rows, width]}, got {mask.dtype} {list(mask.shape)}"
        )
    return mask


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _score(job: _Job, with_entropy: bool, with_entropy_grad: bool) -> ProviderResult:
    """A keep mask is for the log-prob; the entropy is that of the whole distribution, as Vime's own is."""
    temperature = job.temperature
    scores_all = job.keep is None and job.program is None
    entropy, ran = None, None
    if scores_all or with_entropy:
        with torch.set_grad_enabled(torch.is_grad_enabled() and (scores_all or with_entropy_grad)):
            if job.hidden is None:
                out = vocab_parallel_logp(
                    job.matrix, job.target_ids, temperature=temperature, return_entropy=with_entropy, **job.options
                )
            else:
                found = linear_logp(
                    job.hidden, job.matrix, job.target_ids, job.bias, temperature=temperature, return_lse=True,
                    return_entropy=with_entropy, **job.options,
                )  # fmt: skip
                assert isinstance(found, LogpOutput)
                out = found
        logp, entropy, ran = out.logp, out.entropy, out.provenance
    if job.program is not None:
        logp, ran = _replayed(job)
    elif job.keep is not None and job.hidden is None:
        masked = job.matrix.masked_fill(~job.keep, float("-inf"))
        out = vocab_parallel_logp(masked, job.target_ids, temperature=temperature, **job.options)
        logp, ran = out.logp, out.provenance
    elif job.keep is not None and job.hidden is not None:
        chunk = job.stated["chunk_size"]
        logp = masked_linear_logp(
            job.hidden, job.matrix, job.target_ids, job.keep, job.bias, temperature=temperature,
            chunk_rows=chunk if chunk and chunk > 0 else None, **job.options,
        )  # fmt: skip
        ran = ran or provenance(
            job.hidden, job.matrix, job.target_ids, job.bias, temperature=temperature, **job.options
        )
    if entropy is not None and not with_entropy_grad:
        entropy = entropy.detach()
    assert ran is not None
    return ProviderResult(
        logp[:, None], entropy, f"vocabshard-{ran.backend}", ran.contract_id, {**ran.as_dict(), **job.stated}
    )


def _replayed(job: _Job) -> tuple[Tensor, Provenance | None]:
    """Log-probs under what the program kept."""
    assert job.program is not None
    if job.hidden is not None:
        beside = job.temperature if job.program.temperature is None else None
        found = linear_logp(
            job.hidden, job.matrix, job.target_ids, job.bias, temperature=beside,
            return_lse=True, sampling=job.program, cut=job.cut, **job.options,
        )  # fmt: skip
        assert isinstance(found, LogpOutput)
        return found.logp, found.provenance
    logits = job.matrix
    if job.cut is not None:
        start = job.options["vocab_start_index"]
        logits = logits.masked_fill(left_out(logits.detach().float(), start, job.cut), float("-inf"))
    out = vocab_parallel_logp(logits, job.target_ids, temperature=job.temperature, **job.options)
    return out.logp, out.provenance
