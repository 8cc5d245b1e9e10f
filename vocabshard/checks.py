"""Validation of arguments: what was expected, what came, what to do. Nothing here communicates.

Checks of values (targets, temperatures) run only where asked for: on a GPU they would synchronise.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vocabshard.contract import CONTRACT_ID, ContractError, fp32
from vocabshard.logprob_contract import LogprobContract
from vocabshard.options import GradOptions
from vocabshard.sampling import SamplingProgram, cut_parts

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT_DTYPES = (torch.int32, torch.int64)
MOST_BEST = 1024  # columns that topk may ask for


def _name(value: Any) -> str:
    return type(value).__name__


def with_width(name: str, value: Any) -> None:
    """A tensor whose width can be read; what else it has to be is found later, by all ranks."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {_name(value)}")
    if value.dim() == 0:
        raise ValueError(f"{name} must have a dimension of the vocabulary, got a scalar")


def tensor(name: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    """A dense tensor with data, of one of `dtypes`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {_name(value)}")
    if value.dtype not in dtypes:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} must be {allowed}, got {str(value.dtype).removeprefix('torch.')}; cast it first")
    if hasattr(value, "to_local"):
        raise TypeError(f"{name} is a DTensor; pass {name}.to_local() (only weight and bias may be DTensors)")
    if value.is_nested:
        raise TypeError(f"{name} is a nested tensor; pass a padded or concatenated one")
    if value.is_meta:
        raise ValueError(f"{name} is on the meta device and holds no data; materialise it first")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {value.layout}; call .to_dense() first")
    if value.numel() and address(value) == 0:
        raise ValueError(f"{name} has no storage (a fake, freed or symbolic-zero tensor); materialise it first")


def autocasting(device_type: str) -> bool:
    """Whether torch.autocast is on for tensors there."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def address(value: Tensor) -> int:
    """Of the first element, 0 where there is no storage."""
    if type(value).__name__ == "FakeTensor":  # stands for a tensor; its address is an error to ask for
        return 0
    try:
        return value.data_ptr()
    except RuntimeError:
        return 0


def linear(hidden: Tensor, weight: Tensor, target_ids: Tensor, bias: Tensor | None, row_shards: int = 1) -> None:
    """The tensors of linear_logp. row_shards: in how many parts sequence parallelism has hidden's first dimension."""
    tensor("hidden", hidden, FLOAT_DTYPES)
    tensor("weight", weight, FLOAT_DTYPES)
    tensor("target_ids", target_ids, INT_DTYPES)
    if bias is not None:
        tensor("bias", bias, FLOAT_DTYPES)
    _same_device(hidden=hidden, weight=weight, target_ids=target_ids, bias=bias)
    if weight.dim() != 2:
        raise ValueError(f"weight must be [V_local, D], got {list(weight.shape)}")
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [..., D] with D = {weight.shape[1]} as in weight {list(weight.shape)}, "
            f"got {list(hidden.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias must be [V_local] = [{weight.shape[0]}] as in weight {list(weight.shape)}, got {list(bias.shape)}"
        )
    if row_shards == 1:
        _targets_match(target_ids, "hidden", hidden)
    else:
        _targets_match_parts(target_ids, hidden, row_shards)
    if hidden.dtype != weight.dtype:
        h, w = (str(t.dtype).removeprefix("torch.") for t in (hidden, weight))
        raise TypeError(
            f"hidden is {h} and weight is {w}; cast one (hidden.to(weight.dtype)) or run under torch.autocast"
        )


def logits(
    logits: Tensor,
    target_ids: Tensor,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    validate: bool | None = None,
    inplace: bool = False,
) -> None:
    """The tensors of vocab_parallel_logp and batch_invariant_logp."""
    tensor("logits", logits, FLOAT_DTYPES)
    tensor("target_ids", target_ids, INT_DTYPES)
    _same_device(logits=logits, target_ids=target_ids, rows=rows, out=out)
    if logits.dim() == 0:
        raise ValueError("logits must be [..., V], got a scalar")
    steps = zip(logits.shape[:-1], logits.stride()[:-1], strict=True)
    if inplace and logits.stride(-1) == 1 and any(n > 1 and step < logits.shape[-1] for n, step in steps):
        raise ValueError(
            "inplace_backward=True needs logits whose rows do not overlap in memory; pass a contiguous copy"
        )
    if rows is None:
        _targets_match(target_ids, "logits", logits)
    else:
        _rows(rows, logits, target_ids, validate)
    if out is not None:
        tensor("out", out, (torch.float32,))
        if out.shape != target_ids.shape:
            raise ValueError(f"out must be shaped as target_ids {list(target_ids.shape)}, got {list(out.shape)}")
        if torch.is_grad_enabled() and (logits.requires_grad or out.requires_grad):
            raise ValueError("out= cannot be differentiated; leave it out, or call under torch.no_grad()")


def _rows(rows: Tensor, logits: Tensor, target_ids: Tensor, validate: bool | None) -> None:
    tensor("rows", rows, INT_DTYPES)
    if logits.dim() != 2:
        raise ValueError(f"with rows= logits must be [N, V], got {list(logits.shape)}")
    if rows.dim() != 1 or target_ids.shape != rows.shape:
        raise ValueError(
            f"rows must be [M] and target_ids as long, got rows {list(rows.shape)}, target_ids {list(target_ids.shape)}"
        )
    # on the CPU always: memory outside is never touched, and looking costs next to nothing
    if rows.numel() and (validate is not False or rows.device.type == "cpu"):
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= logits.shape[0]:
            raise ValueError(f"rows must lie in [0, {logits.shape[0]}), got {low if low < 0 else high}")


def _same_device(**tensors: Tensor | None) -> None:
    first, device = "", None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if device is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            raise ValueError(
                f"all tensors must be on one device: {first} is on {device}, {name} on {tensor.device}; move one"
            )


def _targets_match(target_ids: Tensor, name: str, rows: Tensor) -> None:
    if target_ids.shape != rows.shape[:-1]:
        raise ValueError(
            f"target_ids must have {name}'s leading shape {list(rows.shape[:-1])} ({name} is {list(rows.shape)}), "
            f"got {list(target_ids.shape)}"
        )


def _targets_match_parts(target_ids: Tensor, hidden: Tensor, row_shards: int) -> None:
    if hidden.dim() < 2 or list(target_ids.shape) != [row_shards * hidden.shape[0], *hidden.shape[1:-1]]:
        raise ValueError(
            f"sequence_parallel=True: hidden must be this rank's [S / {row_shards}, ..., D] of a group of {row_shards} "
            f"and target_ids all rows [S, ...], the first dimension in equal parts; got hidden {list(hidden.shape)}, "
            f"target_ids {list(target_ids.shape)} (pad the sequence to a multiple of {row_shards}, with ignore_index)"
        )


def scalar_options(softcap: float | None, ignore_index: int, invalid: str, validate: bool | None) -> None:
    """The options of a call that are numbers or names."""
    if softcap is not None and not (
        isinstance(softcap, (int, float))
        and not isinstance(softcap, bool)
        and math.isfinite(softcap)
        and 1e-30 < softcap < 1e30
    ):
        raise ValueError(f"softcap must be a finite positive number or None, got {softcap!r}")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must fit in 64 bits, got {ignore_index}")
    if invalid not in ("nan", "zero"):
        raise ValueError(f'invalid must be "nan" or "zero", got {invalid!r}')
    if not (validate is None or isinstance(validate, bool)):
        raise TypeError(f"validate must be None, True or False, got {validate!r}")


def contract(requested: Any) -> None:
    """An id, or a LogprobContract, which holds what this build can do by having been made."""
    if requested is None or isinstance(requested, LogprobContract):
        return
    if requested != CONTRACT_ID:
        raise ContractError(f"contract {requested!r} was asked for; this build has {CONTRACT_ID!r}", "contract_id")


def sampling(program: Any, temperature: Any, topk: Any, cut: Any, target_ids: Any, draws: bool = False) -> None:
    """A program and what goes with it."""
    if program is not None and not isinstance(program, SamplingProgram):
        raise TypeError(f"sampling must be a SamplingProgram, got {_name(program)}")
    if program is not None and program.temperature is not None and temperature is not None:
        raise ValueError(f"temperature is {temperature!r}, and the program has one; give one of the two")
    if topk is not None and (isinstance(topk, bool) or not isinstance(topk, int)):
        raise TypeError(f"topk must be an int or None, got {topk!r}")
    if topk is not None and not 1 <= topk <= MOST_BEST:
        raise ValueError(f"topk must be in [1, {MOST_BEST}], got {topk}")
    if cut is None or draws:
        return
    if program is None:
        raise ValueError("cut was given without the program that made it; give sampling= too")
    tensor("cut", cut, (torch.int64,))
    if cut.shape != target_ids.shape:
        raise ValueError(f"cut must be shaped as target_ids {list(target_ids.shape)}, got {list(cut.shape)}")
    _same_device(target_ids=target_ids, cut=cut)


def draw(seed: Any, row_keys: Any, hidden: Tensor, row_shards: int = 1) -> None:
    """What a token is drawn with."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {_name(seed)}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must fit in 64 bits, got {seed}")
    if row_keys is None:
        return
    tensor("row_keys", row_keys, (torch.int64,))
    _same_device(hidden=hidden, row_keys=row_keys)
    if row_keys.shape != hidden.shape[:-1]:
        raise ValueError(f"row_keys must be {list(hidden.shape[:-1])}, one a row of hidden, got {list(row_keys.shape)}")


def grad_options(options: GradOptions, weight: Tensor) -> None:
    """Against this rank's part of the weight."""
    if not isinstance(options, GradOptions):
        raise TypeError(f"grad_options must be a GradOptions, got {_name(options)}")
    budget = options.save_logits_budget
    if budget != "auto" and (isinstance(budget, bool) or not isinstance(budget, int)):
        raise TypeError(f'GradOptions: save_logits_budget must be a number of bytes or "auto", got {budget!r}')
    if budget != "auto" and int(budget) < 0:
        raise ValueError(f"GradOptions: save_logits_budget must be at least 0 bytes, got {budget}")
    if options.reduce not in ("sum", "ordered"):
        raise ValueError(f'GradOptions: reduce must be "sum" or "ordered", got {options.reduce!r}')
    if options.wire_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"GradOptions: wire_dtype must be torch.float32 or torch.bfloat16, got {options.wire_dtype!r}")
    if options.reduce == "ordered" and options.wire_dtype != torch.float32:
        raise ValueError('GradOptions: reduce="ordered" passes fp32 accumulators on; leave wire_dtype at torch.float32')
    main_grad = options.main_grad
    if main_grad is None:
        return
    tensor("GradOptions: main_grad", main_grad, (torch.float32,))
    if main_grad.shape != weight.shape or not main_grad.is_contiguous():
        raise ValueError(
            f"GradOptions: main_grad must be contiguous and as this rank's weight {list(weight.shape)}, got "
            f"{list(main_grad.shape)} with strides {list(main_grad.stride())}"
        )
    if main_grad.requires_grad:
        raise ValueError("GradOptions: main_grad is written to in place; it must not require a gradient")
    _same_device(weight=weight, main_grad=main_grad)


def ordered(backend: str, dtype: torch.dtype, continues_chain: bool) -> None:
    """Whether a backend's grad_hidden can go on from another rank's."""
    if not continues_chain:
        raise NotImplementedError(
            f'reduce="ordered" needs a backend whose grad_hidden is one chain over the vocabulary; {backend!r} has '
            f'none for {dtype}, use reduce="sum"'
        )


def temperature_reciprocal(
    temperature: float | Tensor | None, target_ids: Tensor, validate: bool
) -> float | Tensor | None:
    """fp32(1 / double(fp32(T))) as a float, or fp32 [N] for one temperature a row (NaN where T is not usable).

    A tensor of one element counts as a number; on a GPU it is spread over the rows, so that nothing is read back.
    """
    if temperature is None:
        return None
    if isinstance(temperature, Tensor):
        if temperature.requires_grad:
            raise NotImplementedError("no gradient flows to temperature; pass temperature.detach()")
        if not temperature.is_floating_point() or temperature.is_meta:
            raise TypeError(f"temperature must be a floating-point tensor with data, got {temperature.dtype}")
        single = temperature.numel() == 1 and temperature.dim() <= 1 and temperature.shape != target_ids.shape
        if not single and temperature.shape != target_ids.shape:
            raise ValueError(
                f"temperature must be a number or one per row {list(target_ids.shape)}, got {list(temperature.shape)}"
            )
        if temperature.device != target_ids.device and not (single and temperature.device.type == "cpu"):
            raise ValueError(f"temperature is on {temperature.device}, target_ids on {target_ids.device}; move one")
        if not (single and temperature.device.type == "cpu"):
            return _reciprocal_rows(temperature.reshape(-1).expand(target_ids.numel()), validate)
        temperature = float(temperature.float().item())
    elif isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature must be a number, a tensor or None, got {_name(temperature)}")
    rounded = fp32(temperature)
    if not (math.isfinite(rounded) and rounded > 0):
        raise ValueError(f"temperature must be positive and finite (in fp32), got {temperature!r}")
    reciprocal = fp32(1.0 / rounded)
    if not math.isfinite(reciprocal):
        raise ValueError(f"temperature {temperature!r} is too small: its reciprocal overflows fp32")
    return None if reciprocal == 1.0 else reciprocal


def _reciprocal_rows(temperature: Tensor, validate: bool) -> Tensor:
    t = temperature.float().contiguous()
    if t.device.type == "cpu":
        from vocabshard import _C

        reciprocal = torch.empty_like(t)
        _C.cpu_reciprocals(t.data_ptr(), t.numel(), reciprocal.data_ptr())
    else:
        usable = (t > 0) & (t < math.inf)  # torch.isfinite would be four launches
        reciprocal = torch.where(usable, t.double().reciprocal_().float(), math.nan)
    if validate and not bool(torch.isfinite(reciprocal).all()):
        row = int((~torch.isfinite(reciprocal)).nonzero()[0])
        raise ValueError(
            f"temperature must be positive and finite, and its reciprocal too, got {float(t[row])} in row {row}"
        )
    return reciprocal


def cut_values(cut: Tensor) -> None:
    """Raises for the first cut that is the place of a NaN: kernels, which compare logits, would keep everything there.
    Reads the tensor back."""
    bad = torch.isnan(cut_parts(cut)[0])
    if bool(bad.any()):
        position = bad.nonzero()[0].tolist()
        raise ValueError(
            f"cut{position if position else ''} is {int(cut[tuple(position)])}, where no logit can be: expected what a "
            "program kept, as LogpOutput.cut and SampleOutput.cut have it"
        )


def target_values(target_ids: Tensor, ignore_index: int, real_vocab_size: int) -> None:
    """Raises for the first target that is neither ignored nor a real token id. Reads the tensor back."""
    bad = (target_ids != ignore_index) & ((target_ids < 0) | (target_ids >= real_vocab_size))
    if bool(bad.any()):
        position = bad.nonzero()[0].tolist()
        value = int(target_ids[tuple(position)])
        raise ValueError(
            f"target_ids{position if position else ''} is {value}: expected an id in [0, {real_vocab_size}) "
            f'or ignore_index = {ignore_index} (validate=False with invalid="nan" or "zero" scores on)'
        )
