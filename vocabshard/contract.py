"""The numeric contract: its constants, ids, and what a call says of itself.

`csrc/contract.h` holds the same constants for C++ and CUDA; they are compared when the extension is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

CONTRACT_ID = "vocabshard-logp-v1"

# One ascending fp32 chain per logit; the id says which hardware step makes it.
FMA_CHAIN = "fma-chain"  # correctly rounded fp32 FMA, any device
HOPPER_K16 = "hopper-k16"  # tensor core, k = 16, compute capability 9.0
GIVEN_LOGITS = "given-logits"  # the caller's own logits
LIBRARY = "library"  # whatever the framework's matrix product does
CONTRACT_PROJECTIONS = frozenset({FMA_CHAIN, HOPPER_K16, GIVEN_LOGITS})

TILE = 16
LIMB_BITS = 32
LIMBS = 3
SCALE = 96
SPAN = 196
HEADROOM = 4
ENTROPY_HEADROOM = 26
EMPTY_K = -(1 << 25)
LOGIT_LIMIT = 1048576.0
MAGIC = 12582912.0

LOG2E = float.fromhex("0x1.715476p+0")  # fp32(log2 e)
INV_LOG2E = float.fromhex("0x1.62e4303f1ff27p-1")  # fp64(1 / LOG2E)
LN2 = float.fromhex("0x1.62e42fefa39efp-1")
SQRT2 = float.fromhex("0x1.6a09e667f3bcdp+0")

# 2^f = 1 + c1 f + ... + c6 f^6 on [-1/2, 1/2], fp32
EXP_COEFFICIENTS = tuple(
    float.fromhex(c)
    for c in ("0x1.62e430p-1", "0x1.ebfbdcp-3", "0x1.c6af7cp-5", "0x1.3b2de0p-7", "0x1.5f0830p-10", "0x1.416b5cp-13")
)
# tanh(u) = u + u^3 (t1 + t2 u^2 + t3 u^4) below TANH_SMALL, fp32
TANH_COEFFICIENTS = tuple(float.fromhex(c) for c in ("-0x1.555516p-2", "0x1.10e0f4p-3", "-0x1.a5380ep-5"))
TANH_SMALL = 0.25
TANH_ONE = 16.0
# log2 r = s (l0 + l1 s^2 + ...), s = (r - 1) / (r + 1), fp64
LOG2_COEFFICIENTS = tuple(
    float.fromhex(c)
    for c in (
        "0x1.71547652b82fep+1",
        "0x1.ec709dc3a03fdp-1",
        "0x1.2776c50ef9bfep-1",
        "0x1.a61762a7aded9p-2",
        "0x1.484b13d7c02a9p-2",
        "0x1.0c9a84994022dp-2",
        "0x1.c68f568d31760p-3",
        "0x1.89f3b1694cffep-3",
        "0x1.5b9ac9b743f0dp-3",
        "0x1.3703c1f4d0ffep-3",
        "0x1.1964ec6fc9491p-3",
    )
)

NAN_BITS = 0x7FC00000
RECORD_WORDS = 1 + LIMBS
RECORD_WORDS_ENTROPY = 1 + 2 * LIMBS


class ContractError(RuntimeError):
    """Strict mode, or a named contract, met something that would change bits; `field` says what, as the text does."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def breach(field: str, asked: Any, found: Any, change: str) -> ContractError:
    """The error of one field: what was asked for, what was found, and what to change."""
    return ContractError(f"{field}: asked for {asked}, found {found}; {change}", field)


def constants() -> dict[str, Any]:
    """Everything that fixes bits, in the form in which the compiled extension reports its own."""
    return {
        "contract_id": CONTRACT_ID,
        "tile": TILE,
        "limb_bits": LIMB_BITS,
        "limbs": LIMBS,
        "scale": SCALE,
        "span": SPAN,
        "headroom": HEADROOM,
        "entropy_headroom": ENTROPY_HEADROOM,
        "empty_k": EMPTY_K,
        "logit_limit": LOGIT_LIMIT,
        "magic": MAGIC,
        "log2e": LOG2E,
        "inv_log2e": INV_LOG2E,
        "ln2": LN2,
        "sqrt2": SQRT2,
        "exp": list(EXP_COEFFICIENTS),
        "tanh": list(TANH_COEFFICIENTS),
        "tanh_small": TANH_SMALL,
        "tanh_one": TANH_ONE,
        "log2": list(LOG2_COEFFICIENTS),
        "record_words": RECORD_WORDS,
        "record_words_entropy": RECORD_WORDS_ENTROPY,
    }


def check_constants(compiled: dict[str, Any]) -> None:
    """Raises ContractError when a compiled extension was built from other constants than this package's."""
    ours = constants()
    wrong = [name for name in ours if compiled.get(name) != ours[name]]
    if wrong:
        detail = ", ".join(f"{name}: package {ours[name]!r}, extension {compiled.get(name)!r}" for name in wrong)
        raise ContractError(f"vocabshard._C was built from another contract ({detail}); reinstall vocabshard", wrong[0])


EXP_ID = f"exp2-poly{len(EXP_COEFFICIENTS)}-fma"
TANH_ID = f"tanh-poly{len(TANH_COEFFICIENTS)}-exp2"
TREE_ID = f"adjacent-pairwise-{TILE}"
SUM_ID = f"exact-limbs-{LIMB_BITS}x{LIMBS}"
LOG_ID = f"log2-poly{len(LOG2_COEFFICIENTS)}-fp64"
SPLIT_POLICY = "K in one chain, vocabulary in any split"
TEMPERATURE_POINT = "y = fp32(z * fp32(1 / fp32(T))), after bias and soft-cap"
PADDING = "columns from real_vocab_size on are left out by selection"
K_STEPS = {FMA_CHAIN: 1, HOPPER_K16: 16}

# Whose difference cannot change a byte of logp, lse and entropy as long as the contract is borne.
BIT_NEUTRAL = (
    *("backend", "device", "architecture", "compute_capability", "contract_bearing", "reason", "build"),
    *("padded_vocab_size", "shard_ranges", "outputs", "cut", "sampling_kernels"),
)
_OF_THE_BACKWARD = ("saved_rows", "saved_reason")


@dataclass(frozen=True)
class Provenance:
    """What a call ran with: everything that can change bits, and where it ran. The same on every rank of a group."""

    contract_id: str
    projection_id: str
    backend: str
    device: str  # torch device type
    architecture: str  # the processor's: x86_64, sm_90
    compute_capability: str  # of a GPU, such as 9.0; else empty
    contract_bearing: bool
    reason: str  # why it is not contract-bearing, or empty
    hidden_dtype: str | None  # None where the logits existed
    weight_dtype: str  # of the logits, where they existed
    bias_dtype: str | None
    real_vocab_size: int
    padded_vocab_size: int
    shard_ranges: tuple[tuple[int, int], ...]  # [start, stop) by group rank
    softcap: float | None
    temperature: str  # "none", "scalar", "per-row"
    inv_temperature: float | None  # fp32(1 / T) of a scalar
    ignore_index: int
    invalid: str
    outputs: tuple[str, ...]  # what was computed beside logp and lse: entropy, logits
    build: str
    tile: int = TILE
    k_step: int | None = None  # of the projection; None where it is not ours
    split_policy: str = SPLIT_POLICY
    exp_id: str = EXP_ID
    tanh_id: str = TANH_ID
    tree_id: str = TREE_ID
    sum_id: str = SUM_ID
    log_id: str = LOG_ID
    temperature_point: str = TEMPERATURE_POINT
    padding: str = PADDING
    sampling: tuple[tuple[str, float], ...] = ()  # the program that tokens are drawn, and log-probs taken, under
    cut: str = ""  # "given" or "found" where the program truncates
    sampling_kernels: str = ""  # whose kernels looked for cuts, drew or ranked
    # Of the backward, and of this rank alone: how many rows' logits the forward kept, and why no more.
    saved_rows: int = 0
    saved_reason: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """Of all that is bit-relevant: equal for two calls, on any ranks and machines, that must give equal bytes for
        equal tensors. Without the contract everything is relevant."""
        neutral = (*_OF_THE_BACKWARD, *(BIT_NEUTRAL if self.contract_bearing else ()))
        stated = {name: value for name, value in self._stated().items() if name not in neutral}
        return digest({**stated, "constants": constants()})

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self._stated(), "fingerprint": self.fingerprint}

    def _stated(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def digest(described: dict[str, Any]) -> str:
    """32 hexadecimal digits of a JSON-able description."""
    text = json.dumps(described, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def fp32(value: float) -> float:
    """Rounds to fp32; what does not fit becomes inf. A flush-to-zero mode of the processor must not change it."""
    try:
        value = float(value)
        if abs(value) < 2.0**-126:  # subnormal in fp32
            return round(value * 2.0**149) * 2.0**-149
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf if value > 0 else -math.inf
