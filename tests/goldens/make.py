"""Goldens of the projection `hopper-k16`: SHA-256 of records, logits and folded rows, for every launch configuration.

    python tests/goldens/make.py [--out tests/goldens/hopper_k16.json]

Inputs are built of integers, so they are the same on every machine. A digest that changes is a new contract or a new
projection id; test_triton_gpu.py compares.
"""

from __future__ import annotations

import argparse
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vocabshard.contract import CONTRACT_ID
from vocabshard.dist import triton_fold
from vocabshard.kernels import triton_linear
from vocabshard.kernels.problem import LocalProblem
from vocabshard.kernels.triton_config import CONFIGS, LaunchConfig
from vocabshard.testing.compare import sha256
from vocabshard.testing.inputs import integer_logits

N, D, V, VALID = 193, 1104, 3016, 3011
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, logits": {"logits": True},
    "bf16, entropy": {"entropy": True},
    "bf16, everything": {"logits": True, "entropy": True, "bias": True, "rows": True, "softcap": 30.0},
    "fp16": {},
    "fp16, everything": {"logits": True, "entropy": True, "bias": True, "rows": True, "softcap": 30.0},
}


def matrix(rows: int, columns: int, seed: int, scale: float, dtype: torch.dtype) -> Tensor:
    return (integer_logits(rows, columns, seed) * scale).to(dtype).cuda()


def digest(case: str, launch: LaunchConfig) -> str:
    dtype, options = DTYPES[case.split(",")[0]], CASES[case]
    hidden, weight = matrix(N, D, 1, 2.0**-2, dtype), matrix(V, D, 2, 2.0**-6, dtype)
    weight[VALID:] = float("nan")
    target_ids = (torch.arange(N) * 61 % VALID).cuda()
    bias = matrix(1, V, 3, 2.0**-3, torch.float32)[0] if options.get("bias") else None
    inv_temperature = matrix(N, 1, 4, 2.0**-6, torch.float32)[:, 0].abs() + 0.5 if options.get("rows") else None
    problem = LocalProblem(0, VALID, options.get("softcap"), options.get("entropy", False))
    want_logits = options.get("logits", False)
    records, logits = triton_linear.forward(
        hidden, weight, bias, target_ids, inv_temperature, problem, want_logits=want_logits, launch=launch
    )
    folded = triton_fold.fold(records[None], target_ids, -100, VALID, "nan")
    return sha256(records, logits, *folded)


def goldens() -> dict[str, Any]:
    """{case: {launch configuration: digest}}: within a case, all have to be the same."""
    names = [name for name, config in CONFIGS.items() if config.block_k > 1]

    def all_runs(case: str, name: str) -> dict[str, str]:
        return {f"{name}, {runs} runs": digest(case, replace(CONFIGS[name], runs=runs)) for runs in (1, 5)}

    with ThreadPoolExecutor(12) as pool:  # compilations run side by side
        found = list(pool.map(lambda pair: all_runs(*pair), itertools.product(CASES, names)))
    cases: dict[str, dict[str, str]] = {case: {} for case in CASES}
    for (case, _), digests in zip(itertools.product(CASES, names), found, strict=True):
        cases[case] |= digests
    projection = triton_linear.projection_id(torch.bfloat16, torch.device("cuda"))
    return {"contract": CONTRACT_ID, "projection": projection, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write them; otherwise the standard output")
    out = parser.parse_args().out
    text = json.dumps(goldens(), indent=1) + "\n"
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)


if __name__ == "__main__":
    main()
