"""Launch configurations of the Triton kernels: pure functions of shapes. They change times, never bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class LaunchConfig:
    """Block shape and schedule of the fused forward."""

    block_m: int  # rows of a program
    block_n: int  # vocabulary columns of a step, a multiple of 64
    block_k: int
    warps: int
    stages: int
    residents: int = 1  # programs that an SM holds at a time: registers and shared memory decide it
    group_rows: int = 32  # row blocks that share strips of weight at a time
    flatten: bool = False  # one pipeline across the blocks of a run: loads run ahead during the epilogue
    max_registers: int | None = None
    runs: int = 1  # parts that the vocabulary is cut into

    def merge_block(self, N: int) -> tuple[int, int]:
        """Rows and runs that a program of the merge kernel takes at a time."""
        BS = min(1 << (self.runs - 1).bit_length(), 1024)
        BR = max(1, min(32, 1024 // BS, 1 << (N - 1).bit_length()))
        return BR, BS


def with_runs(config: LaunchConfig, N: int, columns: int, sm_count: int) -> LaunchConfig:
    """Cuts the vocabulary so that the programs fill whole waves of the chip."""
    blocks = -(-columns // config.block_n)
    row_blocks = -(-N // config.block_m)
    slots = sm_count * config.residents
    # one group of row blocks at a time fills the chip: more rows of hidden would not stay in the L2
    fewest = 1 if row_blocks <= config.group_rows else min(blocks, -(-slots // config.group_rows))
    best, best_cost = fewest, float("inf")
    for runs in range(fewest, min(blocks, max(fewest, 6 * slots // row_blocks)) + 1):
        waves = -(-row_blocks * runs // slots)
        # a run costs its blocks, and about half a block to start and to store
        cost = waves * (-(-blocks // runs) + 0.5)
        if cost < best_cost * 0.999:
            best, best_cost = runs, cost
    return replace(config, runs=best)


@lru_cache(maxsize=1024)
def launch_config(N: int, columns: int, D: int, chain: str, epilogue: int, sm_count: int) -> LaunchConfig:
    """The configuration for N rows, `columns` columns to walk and hidden size D.

    epilogue: 0 plain, 1 with a bias or the entropy, 2 with a soft-cap or stored logits: what it needs in registers.
    """
    if chain == "fma":
        config = LaunchConfig(block_m=64 if N > 32 else 16, block_n=64, block_k=1, warps=4, stages=1, residents=2)
    elif N <= 64:
        config = LaunchConfig(block_m=64, block_n=128, block_k=64, warps=4, stages=3, residents=2)
        if epilogue == 0:
            config = replace(config, residents=3, max_registers=168)
    elif epilogue == 0:
        # two programs an SM: the epilogue of one runs beside the matrix work of the other
        config = LaunchConfig(block_m=128, block_n=128, block_k=64, warps=8, stages=3, residents=2, max_registers=128)
    elif epilogue == 1:
        config = LaunchConfig(block_m=128, block_n=128, block_k=64, warps=4, stages=3, residents=2)
    else:
        config = LaunchConfig(block_m=128, block_n=128, block_k=64, warps=8, stages=3)
    return with_runs(config, N, columns, sm_count)
