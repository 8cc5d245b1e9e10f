"""From the arguments of a call to what it runs: checks, agreement between ranks, choice of backend, provenance."""

from __future__ import annotations

import functools
import logging
import platform
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocabshard import checks, kernels, strict
from vocabshard import contract as C
from vocabshard.contract import ContractError, Provenance, fp32
from vocabshard.dist import agree
from vocabshard.dist.gather import rank_and_size
from vocabshard.kernels.problem import LocalProblem
from vocabshard.kernels.sampling_torch import functions
from vocabshard.kernels.truncated import takes_cut
from vocabshard.logprob_contract import LogprobContract
from vocabshard.options import GradOptions
from vocabshard.passes import Call
from vocabshard.sampling import SamplingProgram
from vocabshard.shard import VocabShard, check_fits, known_shard, make_shard
from vocabshard.strict import dtype_name

_log = logging.getLogger("vocabshard")
_told: set[str] = set()


class Request(NamedTuple):
    """The arguments that the public functions share."""

    tp_group: Any = None
    vocab_start_index: int | None = None
    global_vocab_size: int | None = None
    real_vocab_size: int | None = None
    shard: VocabShard | None = None
    temperature: float | Tensor | None = None
    softcap: float | None = None
    ignore_index: int = -100
    invalid: str = "nan"
    validate: bool | None = None
    entropy: bool = False
    logits: bool = False
    inplace_backward: bool = False
    backend: str = "auto"
    strict: bool = False
    contract: str | LogprobContract | None = None
    grad: GradOptions = GradOptions()
    sequence_parallel: bool = False
    sampling: SamplingProgram | None = None
    cut_given: bool = False
    topk: int | None = None
    seed: int | None = None  # tokens are drawn

    @property
    def own_temperature(self) -> float | Tensor | None:
        """The call's, or the program's; None where that is greedy."""
        program = self.sampling
        if program is None or program.temperature is None:
            return self.temperature
        return None if program.greedy else program.temperature

    @property
    def looks_at_logits(self) -> bool:
        """Whether logits are gone through in blocks: a cut to be found, a token to be drawn, columns to be ranked."""
        finds = self.sampling is not None and self.sampling.truncates and not self.cut_given
        return finds or self.topk is not None or self.seed is not None

    @property
    def admits_only_the_contract(self) -> bool:
        """A LogprobContract says what the bytes must be, so it implies strict mode."""
        return self.strict or isinstance(self.contract, LogprobContract)


class Operands(NamedTuple):
    """The tensors of a call. `matrix` holds this rank's share: weight [V_local, D], or logits [..., V_local]."""

    hidden: Tensor | None
    matrix: Tensor
    target_ids: Tensor
    bias: Tensor | None = None
    given: Any = None  # the weight as the caller gave it
    cut: Tensor | None = None  # of a truncation
    row_keys: Tensor | None = None  # of a draw

    @property
    def differentiable(self) -> bool:
        """Whether a gradient may be asked for."""
        leaves = (self.hidden, self.matrix, self.bias)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in leaves)

    @property
    def local_size(self) -> int:
        """V_local."""
        return self.matrix.shape[-1] if self.hidden is None else self.matrix.shape[0]

    @property
    def dtypes(self) -> tuple[str | None, str, str | None]:
        """Names of hidden's, of weight's or the logits', and of bias's."""
        return dtype_name(self.hidden), str(dtype_name(self.matrix)), dtype_name(self.bias)

    @property
    def same_on_every_rank(self) -> dict[str, Tensor]:
        """The tensors that the ranks of a group have to have in common, by name."""
        given = {"hidden": self.hidden, "target_ids": self.target_ids, "cut": self.cut, "row_keys": self.row_keys}
        return {name: t for name, t in given.items() if t is not None}


class Plan(NamedTuple):
    """What a call will run: decided once, read by the call and by its provenance."""

    call: Call
    shard: VocabShard
    choice: kernels.Choice
    inv_temperature: float | Tensor | None
    target_ids: Tensor  # int64 [N]
    dtypes: tuple[str | None, str, str | None]  # of hidden, of weight or logits, of bias
    outputs: tuple[str, ...] = ()
    cut: str = ""
    sampling_kernels: str = ""
    by_looks: bool = False  # whether the next call that looks the same can have it too

    def without_tensors(self) -> Plan:
        """To be kept: holds nothing of the call that it was made for."""
        per_row = isinstance(self.inv_temperature, Tensor)
        return self._replace(
            call=replace(self.call, weight=None),
            inv_temperature=None if per_row else self.inv_temperature,
            target_ids=self.target_ids.new_empty(0),
        )

    def provenance(self, device: torch.device) -> Provenance:
        """What the call runs with, on this device."""
        if not self.by_looks:
            return self._provenance(device)
        outcome = self.call.outcome  # shared by the calls that look alike
        scale = "per-row" if isinstance(self.inv_temperature, Tensor) else self.inv_temperature
        told = outcome.told
        if told is None or told[0] != scale:
            told = outcome.told = (scale, self._provenance(device))
        return told[1]

    def _provenance(self, device: torch.device) -> Provenance:
        call, choice, shard = self.call, self.choice, self.shard
        per_row = isinstance(self.inv_temperature, Tensor)
        bearing, reason = strict.bearing(choice, shard)
        processor, capability = architecture(device)
        return Provenance(
            contract_id=C.CONTRACT_ID,
            projection_id=choice.projection,
            backend=choice.backend,
            device=device.type,
            architecture=processor,
            compute_capability=capability,
            contract_bearing=bearing,
            reason=choice.reason or reason,
            hidden_dtype=self.dtypes[0],
            weight_dtype=self.dtypes[1],
            bias_dtype=self.dtypes[2],
            real_vocab_size=call.real_vocab_size,
            padded_vocab_size=shard.padded_vocab_size,
            shard_ranges=shard.ranges,
            softcap=call.problem.softcap,
            temperature="per-row" if per_row else "none" if self.inv_temperature is None else "scalar",
            inv_temperature=None if isinstance(self.inv_temperature, Tensor) else self.inv_temperature,
            ignore_index=call.ignore_index,
            invalid=call.invalid,
            outputs=self.outputs,
            sampling=() if call.sampling is None else call.sampling.transforms,
            cut=self.cut,
            sampling_kernels=self.sampling_kernels,
            build=kernels.build_id(),
            k_step=C.K_STEPS.get(choice.projection),
            saved_rows=call.outcome.saved_rows,
            saved_reason=call.outcome.saved_reason,
        )


@functools.cache
def architecture(device: torch.device) -> tuple[str, str]:
    """The processor, and the compute capability of a GPU."""
    if device.type != "cuda":
        return platform.machine(), ""
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName, ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}", f"{major}.{minor}"


def make_plan(request: Request, operands: Operands, check: Callable[[], None]) -> Plan:
    """Checks the arguments, lets the ranks agree, and chooses. Collective when a group is given (see linear_logp).

    Everything that can be found wrong without asking the others is found before the first collective, which a rank
    that found something joins all the same.
    """
    group = _group_of(request)
    rank_and_size(group)
    tensors = (operands.hidden, operands.matrix, operands.target_ids)
    validate = validates(request.validate, request.backend, tensors)
    shard: VocabShard | None = request.shard
    error: Exception | None = None
    hashes: dict[str, int] = {}
    try:
        checks.scalar_options(request.softcap, request.ignore_index, request.invalid, request.validate)
        if request.softcap is not None:
            request = request._replace(softcap=float(request.softcap))  # 30 and 30.0 are one, in fingerprints too
        checks.contract(request.contract)
        check()
        choice = _choose(request, operands)
        if request.admits_only_the_contract:
            strict.check_machine(choice)
        inv_temperature = checks.temperature_reciprocal(request.own_temperature, operands.target_ids, validate)
        if isinstance(request.contract, LogprobContract):
            request.contract.check_call(_described(request, operands, choice, inv_temperature))
        if request.grad.reduce == "ordered":
            dtype = operands.matrix.dtype
            checks.ordered(choice.backend, dtype, _continues_chain(request, choice, dtype))
        if shard is None:
            shard = known_shard(
                operands.local_size,
                group,
                request.vocab_start_index,
                request.global_vocab_size,
                request.real_vocab_size,
            )
        if shard is not None:
            _check_shard_arguments(request, shard)
            check_fits(shard, operands.local_size, request.vocab_start_index)
            _check_sharding(request, shard)
        if group is not None and validate:
            hashes = _hashes(request, operands)
    except (TypeError, ValueError, NotImplementedError, ContractError) as e:
        error = e
    if group is not None and validate:
        agree.agree_call(error, hashes, group)
    if error is not None:
        raise error

    if shard is None:
        shard = make_shard(
            operands.local_size, group, request.vocab_start_index, request.global_vocab_size, request.real_vocab_size
        )
        _check_sharding(request, shard)
    shard.agree_first_use(_first_use(request, operands, choice), operands.matrix)
    if request.seed is not None and shard.real_vocab_size == 0:
        raise ValueError("there is no token to draw: real_vocab_size is 0, the vocabulary is empty")
    if validate and request.seed is None:  # who draws has no targets
        # the ranks have agreed on target_ids, cut and the real size: all raise the same
        checks.target_values(operands.target_ids, request.ignore_index, shard.real_vocab_size)
        if operands.cut is not None:
            checks.cut_values(operands.cut)
    problem = LocalProblem(shard.start, shard.valid, request.softcap, request.entropy)
    call = Call(
        kernel=kernels.module(choice.backend),
        backend=choice.backend,
        problem=problem,
        group=group,
        ignore_index=request.ignore_index,
        real_vocab_size=shard.real_vocab_size,
        invalid=request.invalid,
        want_logits=request.logits,
        inplace_backward=request.inplace_backward,
        grad=request.grad,
        differentiable=operands.differentiable,
        sequence_parallel=request.sequence_parallel and rank_and_size(group)[1] > 1,
        weight=operands.given,
        sampling=request.sampling,
        topk=request.topk,
        widest=max(stop - start for start, stop in shard.ranges),
    )
    flat = operands.target_ids.reshape(-1).to(torch.int64).contiguous()
    cut = ""
    if request.sampling is not None and (request.sampling.truncates or request.cut_given):
        cut = "given" if request.cut_given else "found"
    looked = functions(call.kernel).ran if request.looks_at_logits else ""
    given = request.grad.main_grad is not None  # a tensor of one call
    by_looks = not (validate or given or request.contract is not None or request.strict)
    return Plan(call, shard, choice, inv_temperature, flat, operands.dtypes, _outputs(request), cut, looked, by_looks)


def _continues_chain(request: Request, choice: kernels.Choice, dtype: torch.dtype) -> bool:
    truncates = request.sampling is not None and (request.sampling.truncates or request.cut_given)
    whole = not truncates or takes_cut(kernels.module(choice.backend), "backward")
    return whole and kernels.continues_chain(choice.backend, dtype)


def _outputs(request: Request) -> tuple[str, ...]:
    """What is computed beside logp and lse."""
    named = {"entropy": request.entropy, "logits": request.logits, "top": request.topk is not None}
    return tuple(name for name, wanted in named.items() if wanted)


def group_size(request: Request) -> int:
    """W of the group that a call names."""
    return rank_and_size(_group_of(request))[1]


def _group_of(request: Request) -> Any:
    """The ProcessGroup of a call; a one-dimensional DeviceMesh stands for its group."""
    group = request.tp_group
    if group is not None and hasattr(group, "get_group"):
        group = group.get_group()
    if request.shard is not None:
        if not isinstance(request.shard, VocabShard):
            raise TypeError(f"shard must be a VocabShard, got {type(request.shard).__name__}")
        if group is not None and group != request.shard.group:
            raise ValueError("shard and tp_group name different groups; give one of the two")
        return request.shard.group
    return group


def _check_shard_arguments(request: Request, shard: VocabShard) -> None:
    for name, given, has in (
        ("global_vocab_size", request.global_vocab_size, shard.padded_vocab_size),
        ("real_vocab_size", request.real_vocab_size, shard.real_vocab_size),
    ):
        if given is not None and given != has:
            raise ValueError(f"{name} is {given}, but shard says {has}; give one of the two")


def _choose(request: Request, operands: Operands) -> kernels.Choice:
    matrix = operands.matrix
    choice = kernels.select_backend(request.backend, matrix.device, matrix.dtype, operands.hidden is None)
    if request.backend == "auto" and choice.reason and choice.reason not in _told:
        _told.add(choice.reason)
        _log.warning('backend="auto" chose %r: %s', choice.backend, choice.reason)
    return choice


def validates(validate: bool | None, backend: str, tensors: Iterable[Any]) -> bool:
    """By what the ranks share, not by the one tensor that may be wrong on one of them."""
    if isinstance(validate, bool):
        return validate
    on_gpu = any(isinstance(t, Tensor) and t.device.type not in ("cpu", "meta") for t in tensors)
    return not on_gpu or backend == "torch"


def _hashes(request: Request, operands: Operands) -> dict[str, int]:
    """What the ranks of a group must have in common, as int64s."""
    tensors = operands.same_on_every_rank
    if request.sequence_parallel and operands.hidden is not None:  # every rank has rows of its own, as many
        hidden = tensors.pop("hidden")
        hashes = {"hidden": agree.text_hash(f"{list(hidden.shape)} {hidden.dtype}")}
    else:
        hashes = {}
    hashes |= {name: agree.content_hash(t) for name, t in tensors.items()}
    temperature = request.temperature
    if isinstance(temperature, Tensor):
        hashes["temperature"] = agree.content_hash(temperature.detach().float())
        temperature = None
    needs_grad = operands.hidden is not None and operands.hidden.requires_grad and torch.is_grad_enabled()
    options = (
        request.real_vocab_size,
        request.global_vocab_size,
        request.softcap,
        request.ignore_index,
        request.invalid,
        request.entropy,
        request.backend,
        request.strict,
        temperature,
        needs_grad,
        request.grad.reduce,
        request.grad.wire_dtype,
        request.sequence_parallel,
        request.sampling,
        request.cut_given,
        request.topk,
        request.seed,
    )
    hashes["options"] = agree.text_hash(repr(options))
    return hashes


def _first_use(request: Request, operands: Operands, choice: kernels.Choice) -> dict[str, Any]:
    described: dict[str, Any] = {
        "contract": C.CONTRACT_ID,
        "projection": choice.projection,
        "dtype": str(operands.matrix.dtype),
        "softcap": request.softcap,
    }
    if operands.hidden is not None:
        described["D"] = operands.hidden.shape[-1]
        described["use of a bias"] = operands.bias is not None
    return described


def _described(
    request: Request, operands: Operands, choice: kernels.Choice, inv_temperature: float | Tensor | None
) -> dict[str, Any]:
    """A call in the words of a LogprobContract."""
    hidden, weight, bias = operands.dtypes
    if inv_temperature is None:
        temperature: float | str | None = None
    else:
        temperature = "per-row" if isinstance(inv_temperature, Tensor) else fp32(float(request.temperature or 1))
    if request.sampling is not None and request.sampling.temperature is not None:
        temperature = None  # it is the program's
    return {
        "entry": "logits that exist" if operands.hidden is None else "linear_logp",
        "weight_dtype": weight,
        "hidden_dtype": hidden,
        "bias_dtype": bias,
        "projection_id": choice.projection,
        "softcap": request.softcap,
        "temperature": temperature,
        "ignore_index": request.ignore_index,
        "invalid": request.invalid,
        "outputs": _outputs(request),
        "sampling": None if request.sampling is None else request.sampling.transforms,
    }


def _check_sharding(request: Request, shard: VocabShard) -> None:
    if request.admits_only_the_contract:
        strict.check_shard(shard)
    if isinstance(request.contract, LogprobContract):
        names = ("real_vocab_size", "padded_vocab_size", "shard_ranges")
        request.contract.check_call(
            {name: getattr(shard, name if name != "shard_ranges" else "ranges") for name in names}
        )
