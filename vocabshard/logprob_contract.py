"""LogprobContract: what a trainer and an engine each say of their log-probs, compared field by field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, TypeGuard

from vocabshard import contract as C
from vocabshard.contract import ContractError, breach, fp32
from vocabshard.sampling import SamplingProgram

ROLES = ("trainer", "rollout", "reference")
ENTRIES = ("linear_logp", "logits that exist")
MASKS = ("ignore_index", "keep_mask")
OUTPUTS = ("logp", "lse", "entropy", "logits", "top")
DTYPES = ("fp32", "bf16", "fp16")

# What the two sides may differ in without a byte of logp changing.
FREE = ("role", "shard_ranges", "padded_vocab_size", "outputs", "mask")


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, float) or _is_int(value)


@dataclass(frozen=True, kw_only=True)
class LogprobContract:
    """What log-probs are made of. Both sides build one; `check_same` says whether their bytes can be compared.

    Given to an operator as `contract=`, it implies `strict=True`, and a call that is not as it says raises
    ContractError naming the field. Fields that are None are not fixed, those of the numeric contract's constants
    cannot be anything else.

    Raises ContractError, whose `field` is the field's name, for a value that no contract of this build has.
    """

    role: str  # trainer, rollout, reference
    weight_dtype: str  # fp32, bf16, fp16: of the head, or of the logits
    hidden_dtype: str | None = None  # None: as weight_dtype; without meaning where the logits exist
    bias_dtype: str | None = None  # None: no bias
    entry: str = "linear_logp"  # or "logits that exist"
    projection_id: str | None = None
    real_vocab_size: int | None = None
    padded_vocab_size: int | None = None
    shard_ranges: tuple[tuple[int, int], ...] | None = None  # [start, stop) by group rank
    softcap: float | None = None
    temperature: float | str | None = None  # a number (kept as fp32), "per-row", or None for 1
    sampling: tuple[tuple[str, float], ...] | None = None  # a SamplingProgram's transforms, or the program; None: none
    ignore_index: int = -100
    invalid: str = "nan"
    mask: str = "ignore_index"  # how tokens that do not count are told
    reduction: str = "none"
    outputs: tuple[str, ...] = ("logp",)
    contract_id: str = C.CONTRACT_ID
    tile: int = C.TILE
    exp_id: str = C.EXP_ID
    tree_id: str = C.TREE_ID
    sum_id: str = C.SUM_ID
    log_id: str = C.LOG_ID

    def __post_init__(self) -> None:
        self._check_numbers()
        constants = ("contract_id", "tile", "exp_id", "tree_id", "sum_id", "log_id")
        for name, value in [(name, getattr(C, name.upper())) for name in constants] + [("reduction", "none")]:
            if getattr(self, name) != value:
                raise breach(name, repr(getattr(self, name)), f"{value!r} in this build", "it cannot be overridden")
        choices: dict[str, tuple[Any, ...]] = {
            "role": ROLES,
            "weight_dtype": DTYPES,
            "hidden_dtype": (None, *DTYPES),
            "bias_dtype": (None, *DTYPES),
            "entry": ENTRIES,
            "projection_id": (None, *sorted(C.CONTRACT_PROJECTIONS)),
            "mask": MASKS,
            "invalid": ("nan", "zero"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise breach(name, repr(getattr(self, name)), f"one of {list(allowed)}", "state one of them")
        if isinstance(self.outputs, str) or not isinstance(self.outputs, Sequence):
            raise breach("outputs", repr(self.outputs), f"a tuple of some of {list(OUTPUTS)}", "state one")
        for output in self.outputs:
            if output not in OUTPUTS:
                raise breach("outputs", repr(output), f"some of {list(OUTPUTS)}", "leave it out")
        self._set("outputs", tuple(self.outputs))
        if self.entry != "linear_logp":
            self._set("hidden_dtype", None)
        elif self.hidden_dtype is None:
            self._set("hidden_dtype", self.weight_dtype)
        if self.sampling is not None:
            self._set("sampling", self._program().transforms)
        self._check_ranges()

    def _program(self) -> SamplingProgram:
        if isinstance(self.sampling, SamplingProgram):
            return self.sampling
        try:
            program = SamplingProgram(self.sampling or ())
        except (TypeError, ValueError) as error:
            raise breach("sampling", repr(self.sampling), str(error), "state a SamplingProgram") from error
        if program.temperature is not None and self.temperature is not None:
            raise breach(
                "sampling", repr(self.sampling), f"temperature {self.temperature!r} too", "state one of the two"
            )
        return program

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        """Numbers as the operators take them, in one form, so that 30 and 30.0 have one fingerprint."""
        if self.temperature is not None and self.temperature != "per-row":
            rounded = fp32(self.temperature) if _is_number(self.temperature) else 0.0
            if not (rounded > 0 and math.isfinite(rounded)):
                raise breach(
                    "temperature", repr(self.temperature), "a positive finite number in fp32, 'per-row' or None",
                    "state one of them",
                )  # fmt: skip
            self._set("temperature", None if rounded == 1.0 else rounded)
        if self.softcap is not None:
            if not (_is_number(self.softcap) and 1e-30 < self.softcap < 1e30):
                raise breach("softcap", repr(self.softcap), "a finite positive number or None", "state one of them")
            self._set("softcap", float(self.softcap))
        if not _is_int(self.ignore_index) or not -(2**63) <= self.ignore_index < 2**63:
            raise breach("ignore_index", repr(self.ignore_index), "an int of 64 bits", "state one")
        for name in ("real_vocab_size", "padded_vocab_size"):
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and value > 0):
                raise breach(name, repr(value), "a positive int or None", "state one of them")
        real, padded = self.real_vocab_size, self.padded_vocab_size
        if real is not None and padded is not None and real > padded:
            raise breach(
                "real_vocab_size", real, f"no more than padded_vocab_size = {padded}", "state the real columns"
            )

    def _check_ranges(self) -> None:
        if self.shard_ranges is None:
            return
        try:
            ranges = tuple((start, stop) for start, stop in self.shard_ranges)
        except (TypeError, ValueError):
            ranges = ()
        if not ranges or not all(_is_int(start) and _is_int(stop) and start <= stop for start, stop in ranges):
            raise breach(
                "shard_ranges", repr(self.shard_ranges), "a pair of ints, [start, stop), a rank", "state them so"
            )
        self._set("shard_ranges", ranges)
        if any(before[1] != after[0] for before, after in pairwise(self.shard_ranges)) or self.shard_ranges[0][0]:
            raise breach("shard_ranges", "ranges that follow each other from 0", self.shard_ranges, "close the gaps")
        if any(start % C.TILE for start, stop in self.shard_ranges if stop > start):
            raise breach(
                "shard_ranges", f"boundaries at multiples of {C.TILE}", self.shard_ranges, "pad or cut the shards there"
            )
        if self.padded_vocab_size not in (None, self.shard_ranges[-1][1]):
            raise breach("padded_vocab_size", self.padded_vocab_size, self.shard_ranges[-1][1], "state the ranges' end")

    def differences(self, other: LogprobContract) -> dict[str, tuple[Any, Any]]:
        """{field: (ours, theirs)} of what keeps the two sides' bytes from being comparable. A None fits anything in
        projection_id and real_vocab_size; role, sharding, mask and outputs are each side's own affair."""
        if not isinstance(other, LogprobContract):
            raise TypeError(f"expected a LogprobContract, got {type(other).__name__}")
        found = {}
        for f in fields(self):
            ours, theirs = getattr(self, f.name), getattr(other, f.name)
            unstated = f.name in ("projection_id", "real_vocab_size") and None in (ours, theirs)
            if f.name not in FREE and ours != theirs and not unstated:
                found[f.name] = (ours, theirs)
        return found

    def check_same(self, other: LogprobContract) -> None:
        """Raises ContractError that names the fields in which the two sides differ."""
        found = self.differences(other)
        if found:
            detail = "; ".join(f"{name}: {self.role} has {a!r}, {other.role} {b!r}" for name, (a, b) in found.items())
            raise ContractError(f"{detail}; both sides have to be built alike", next(iter(found)))

    def check_call(self, found: Mapping[str, Any]) -> None:
        """Raises ContractError for the first field in which a call, described by the same names, is another one."""
        free = ("projection_id", "real_vocab_size", "padded_vocab_size", "shard_ranges")
        for name, value in found.items():
            asked = getattr(self, name)
            if name == "outputs":
                extra = [output for output in value if output not in asked]
                if extra:
                    raise breach(name, asked, f"a call for {extra[0]!r}", "state it in the contract or leave it out")
            elif asked != value and not (asked is None and name in free):
                raise breach(name, repr(asked), repr(value), "make the call as the contract says, or state another one")

    @property
    def fingerprint(self) -> str:
        """Of the fields that bytes depend on: what two sides may exchange instead of the whole object."""
        stated = {name: value for name, value in asdict(self).items() if name not in FREE}
        return C.digest({**stated, "constants": C.constants()})

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stated: Mapping[str, Any]) -> LogprobContract:
        """Of what `as_dict` gave, also after JSON. Raises ContractError naming a field that this build lacks."""
        known = {f.name for f in fields(cls)}
        for name in stated:
            if name not in known:
                raise ContractError(
                    f"{name}: no field of a LogprobContract of this build; it has {sorted(known)}", name
                )
        values = dict(stated)
        values["outputs"] = tuple(values.get("outputs", ("logp",)))
        if values.get("shard_ranges") is not None:
            values["shard_ranges"] = tuple((start, stop) for start, stop in values["shard_ranges"])
        return cls(**values)
