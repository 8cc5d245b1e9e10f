"""The numeric contract: its constants, ids, and what a call says of itself.

`csrc/contract.h` holds the same constants for C++ and CUDA; they are compared when the extension is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
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
    """Strict mode, or a named contract, met something that would change bits."""


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
        raise ContractError(f"vocabshard._C was built from another contract ({detail}); reinstall vocabshard")


@dataclass(frozen=True)
class Provenance:
    """What ran. Everything that can change bits is here, and nothing that cannot."""

    contract_id: str
    projection_id: str
    backend: str
    device: str
    contract_bearing: bool
    reason: str  # why it is not contract-bearing, or empty
    tile: int
    exp_id: str
    tree_id: str
    sum_id: str
    real_vocab_size: int
    shard_ranges: tuple[tuple[int, int], ...]  # [start, stop) by group rank
    softcap: float | None
    temperature: str  # "none", "scalar", "per-row"
    build: str

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


EXP_ID = f"exp2-poly{len(EXP_COEFFICIENTS)}-fma"
TREE_ID = f"adjacent-pairwise-{TILE}"
SUM_ID = f"exact-limbs-{LIMB_BITS}x{LIMBS}"
