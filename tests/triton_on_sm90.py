"""Compiles for sm_90 what the Triton backend launches, with no GPU, and prints what came out as JSON.

{case: [{"name": kernel, "ptx": text, "registers": a thread's, "stack": a thread's bytes}]}; test_triton.py reads it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vocabshard.dist import triton_fold
from vocabshard.kernels import triton_backward, triton_linear, triton_logits
from vocabshard.kernels.problem import LocalProblem, Needs, RowGrads, SavedRows
from vocabshard.kernels.triton_config import CONFIGS, grad_launch, with_runs


class Hopper:
    """As much of a driver as a compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    assert found, usage.stdout
    return int(found[1]), int(found[2])


def linear(config: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    N, D, V = 4096, 64, 1000
    bias = torch.zeros(V, dtype=torch.bfloat16) if options.pop("bias", False) else None
    rows = torch.ones(N) if options.pop("temperature", None) == "rows" else None
    want_logits = options.pop("want_logits", False)
    problem = LocalProblem(0, V, options.pop("softcap", None), options.pop("entropy", False))
    launch = with_runs(CONFIGS[config], N, V, D, 132)
    hidden, weight = torch.zeros(N, D, dtype=dtype), torch.zeros(V, D, dtype=dtype)
    target_ids = torch.zeros(N, dtype=torch.int64)
    triton_linear.forward(
        hidden, weight, bias, target_ids, rows, problem, want_logits=want_logits, launch=launch, **options
    )


def fold() -> None:
    triton_fold.fold(torch.zeros(2, 7, 64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64), -100, 9, "nan")


def logits() -> None:
    N, V = 4, 5008
    x, rows, target_ids = torch.zeros(N, V, dtype=torch.bfloat16), torch.zeros(N), torch.zeros(N, dtype=torch.int64)
    problem = LocalProblem(0, V, None, True)
    triton_logits.logits_forward(x, target_ids, rows, problem, launch=(4, 2, 2))
    saved, grads = SavedRows(target_ids.int(), rows, rows), RowGrads(rows, rows, rows)
    triton_logits.logits_backward(x, target_ids, rows, problem, saved, grads, x)


def backward() -> None:
    N, D, V = 4096, 2048, 64
    hidden, weight = torch.zeros(N, D, dtype=torch.bfloat16), torch.zeros(V, D, dtype=torch.bfloat16)
    target_ids, rows = torch.zeros(N, dtype=torch.int64), torch.zeros(N)
    saved, grads = SavedRows(target_ids.int(), rows, None), RowGrads(rows, rows, None)
    launch = grad_launch(N, 131072, D, "descriptors", 2, False, False, 132)
    problem, needs = LocalProblem(0, V, None, False), Needs(True, True, False)
    triton_backward.backward(hidden, weight, None, target_ids, None, problem, saved, grads, needs, launch=launch)


EVERYTHING = {"entropy": True, "bias": True, "temperature": "rows"}
CASES = {
    "large": lambda: linear("large"),
    "large, everything": lambda: linear("large", **EVERYTHING),
    "large, logits": lambda: linear("large", want_logits=True, **EVERYTHING),
    "soft-cap": lambda: linear("soft-cap", softcap=30.0),
    "decode, everything": lambda: linear("decode", **EVERYTHING),
    "decode, soft-cap": lambda: linear("decode, soft-cap", softcap=30.0),
    "few": lambda: linear("few"),
    "fma": lambda: linear("fma", torch.float32),
    "logits": logits,
    "backward": backward,
    "fold": fold,
}


def main() -> None:
    kernels: list[Any] = []
    run = JITFunction.run

    def warm(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    driver.set_active(Hopper())
    JITFunction.run = warm
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    triton_backward.sm_count_of = lambda device: 132
    found = {}
    for case in sys.argv[1:] or CASES:
        kernels.clear()
        CASES[case]()
        found[case] = []
        for name, kernel in kernels:
            registers, stack = resources(kernel.asm["cubin"])
            found[case].append({"name": name, "ptx": kernel.asm["ptx"], "registers": registers, "stack": stack})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
