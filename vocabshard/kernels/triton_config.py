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
    short_runs: int = 0  # the last of them, which share short_blocks: they fill the SMs that the long ones leave idle
    short_blocks: int = 0


def merge_block(runs: int, N: int) -> tuple[int, int]:
    """Rows and runs that a program of the merge kernel takes at a time."""
    BS = min(1 << (runs - 1).bit_length(), 1024)
    return max(1, min(32, 1024 // BS, 1 << (N - 1).bit_length())), BS


# Every configuration that launch_config chooses from; tests run them all. None spills with the epilogues it is for.
CONFIGS = {
    "large": LaunchConfig(block_m=128, block_n=256, block_k=64, warps=8, stages=4, flatten=True),
    # two programs an SM: the long epilogue of one runs beside the matrix work of the other
    "soft-cap": LaunchConfig(block_m=128, block_n=128, block_k=64, warps=4, stages=3, residents=2, flatten=True),
    "decode": LaunchConfig(block_m=64, block_n=128, block_k=64, warps=4, stages=3, residents=3, max_registers=168),
    "decode, soft-cap": LaunchConfig(block_m=64, block_n=128, block_k=64, warps=4, stages=3, residents=3),
    "few": LaunchConfig(block_m=16, block_n=128, block_k=128, warps=8, stages=4, residents=2),
    "pointers": LaunchConfig(block_m=64, block_n=128, block_k=64, warps=4, stages=3, residents=2),
    "fma": LaunchConfig(block_m=64, block_n=64, block_k=1, warps=4, stages=1, residents=2),
    "fma few": LaunchConfig(block_m=16, block_n=64, block_k=1, warps=4, stages=1, residents=2),
}


def with_runs(config: LaunchConfig, N: int, columns: int, D: int, sm_count: int) -> LaunchConfig:
    """Cuts the vocabulary so that the programs fill the chip and end together."""
    blocks = -(-columns // config.block_n)
    row_blocks = -(-N // config.block_m)
    slots = sm_count * config.residents
    # one group of row blocks at a time fills the chip: more rows of hidden would not stay in the L2
    fewest = 1 if row_blocks <= config.group_rows else min(blocks, -(-slots // config.group_rows))
    # what a run costs to start and to store, in blocks: some 8 us
    start = 600 * 128 * 256 / (config.block_m * config.block_n * config.residents * max(D, 64))
    best, best_cost = replace(config, runs=fewest), float("inf")
    for wave in range(1, 13 + 2 * (row_blocks * fewest // slots)):
        runs = min(blocks, max(fewest, wave * slots // row_blocks))
        waves = -(-row_blocks * runs // slots)
        # every program of a slot takes the mean number of blocks, but the last may be one of the longer ones
        mean = blocks / runs
        cost = waves * (mean + start) + (-(-blocks // runs) - mean)
        if cost < best_cost * 0.999:
            best, best_cost = replace(config, runs=runs), cost
    # or one wave of long runs, a block shorter than they might be, and runs of one block that fill what is left
    long_runs = slots // row_blocks if row_blocks <= config.group_rows else 0
    mean = row_blocks * blocks / slots
    short = blocks - long_runs * (int(mean) - 1)
    if long_runs and 0 < short < blocks and mean + (1 + row_blocks * short / slots) * start < best_cost * 0.999:
        best = replace(config, runs=long_runs + short, short_runs=short, short_blocks=short)
    return best


@lru_cache(maxsize=1024)
def launch_config(N: int, columns: int, D: int, chain: str, softcap: bool, sm_count: int) -> LaunchConfig:
    """The configuration for N rows, `columns` columns to walk and hidden size D; chain as in triton_linear.py."""
    if chain == "fma":
        name = "fma" if N > 32 else "fma few"
    elif N <= 16:
        name = "few"
    elif chain == "pointers":
        name = "pointers"
    elif N <= 128:
        name = "decode, soft-cap" if softcap else "decode"
    else:
        name = "soft-cap" if softcap else "large"
    return with_runs(CONFIGS[name], N, columns, D, sm_count)


@lru_cache(maxsize=4096)
def logits_launch(outputs: int, columns: int, sm_count: int) -> tuple[int, int, int]:
    """(warps, tiles a lane takes in a step, runs of columns) for `outputs` rows of logits that exist."""
    warps, unroll = 4, 2
    if outputs * columns < 2 * sm_count * 16 * 32 * warps * unroll:
        warps, unroll = 2, 1  # few rows: small steps, so that there is one for every SM
    steps = -(-columns // (16 * 32 * warps * unroll))
    slots = 20 * sm_count // warps  # 96 registers
    best, best_cost = 1, float("inf")
    for runs in range(1, min(steps, -(-2 * slots // outputs)) + 1):
        waves = -(-outputs * runs // slots)
        cost = waves * (-(-steps // runs) + 1.0)  # to start and to store takes about a step
        if cost < best_cost * 0.98:
            best, best_cost = runs, cost
    return warps, unroll, best


@dataclass(frozen=True)
class ProductConfig:
    """Block shape and schedule of one of the backward's products."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    residents: int = 1
    flatten: bool = False


@dataclass(frozen=True)
class GradLaunch:
    """How the backward cuts its work: blocks of rows and columns, and what each of its kernels runs with."""

    rows: int
    columns: int
    dlogits: LaunchConfig
    of_hidden: ProductConfig
    of_weight: ProductConfig


# Of a backward: dlogits of a block of columns, their sums and the fp32 sum of grad_weight where rows are cut too.
SCRATCH_BYTES = 248 << 20
SCRATCH_ROWS = 65536  # fewer columns than these rows leave would make grad_hidden's chain a matter of memory traffic

DLOGITS = {
    "large": LaunchConfig(block_m=128, block_n=256, block_k=64, warps=8, stages=3, flatten=True),
    "soft-cap": LaunchConfig(block_m=128, block_n=128, block_k=64, warps=8, stages=4, flatten=True),
    "few": LaunchConfig(block_m=64, block_n=128, block_k=64, warps=4, stages=3, residents=2, flatten=True),
    "pointers": LaunchConfig(block_m=64, block_n=128, block_k=64, warps=4, stages=3, residents=2),
    "fma": LaunchConfig(block_m=64, block_n=64, block_k=1, warps=4, stages=1, residents=2),
}
# dlogits from logits that were kept: only memory counts
KEPT = LaunchConfig(block_m=32, block_n=256, block_k=1, warps=4, stages=1, residents=8)
# widest first; the second number is what a tile of it costs beside its share of the work
PRODUCTS = {
    "large": (ProductConfig(block_m=128, block_n=256, block_k=64, warps=8, stages=3, flatten=True), 1.0),
    "middle": (ProductConfig(block_m=128, block_n=128, block_k=64, warps=8, stages=4, flatten=True), 1.2),
    "narrow": (ProductConfig(block_m=64, block_n=128, block_k=64, warps=4, stages=4, residents=2, flatten=True), 1.4),
    "small": (ProductConfig(block_m=64, block_n=64, block_k=128, warps=4, stages=6, flatten=True), 2.0),
}
STRIDED = ProductConfig(block_m=64, block_n=64, block_k=32, warps=4, stages=2, residents=4)


def product_cost(config: ProductConfig, weight: float, m: int, n: int, sm_count: int) -> float:
    """Of a step of k, in elements of the output that an SM makes."""
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    waves = -(-tiles // (sm_count * config.residents))
    return waves * config.residents * config.block_m * config.block_n * weight


def product_launch(m: int, n: int, maps: bool, sm_count: int) -> ProductConfig:
    """The configuration for an output [m, n]."""
    if not maps:
        return STRIDED
    return min(PRODUCTS.values(), key=lambda entry: product_cost(entry[0], entry[1], m, n, sm_count))[0]


def column_step(N: int, columns: int, D: int, most: int, dlogits: LaunchConfig, maps: bool, sm_count: int) -> int:
    """Columns of a block, at most `most`: few blocks, whose tiles fill the chip's last wave."""
    best, best_cost = most, float("inf")
    fewest = -(-columns // most)
    for count in range(fewest, fewest + 5):
        step = -(-columns // (count * dlogits.block_n)) * dlogits.block_n
        if step > most:
            continue
        cost = 0.0
        for width in [step] * (columns // step) + [columns % step] * (columns % step > 0):
            tiles = -(-N // dlogits.block_m) * -(-width // dlogits.block_n)
            waves = -(-tiles // (sm_count * dlogits.residents))
            cost += waves * dlogits.residents * dlogits.block_m * dlogits.block_n * D
            config = product_launch(width, D, maps, sm_count)
            weight = next((w for c, w in PRODUCTS.values() if c is config), 1.0)
            cost += product_cost(config, weight, width, D, sm_count) * N
        if cost < best_cost * 0.998:
            best, best_cost = step, cost
    return best


def most_parts(rows: int, dlogits: LaunchConfig) -> int:
    """Row blocks of a step, some of which may be rows that were kept."""
    return -(-rows // min(dlogits.block_m, KEPT.block_m)) + 1


@lru_cache(maxsize=1024)
def grad_launch(
    N: int, columns: int, D: int, chain: str, item: int, softcap: bool, bias: bool, sm_count: int
) -> GradLaunch:
    """For N rows and `columns` columns; item: bytes of an element; bias: its gradient is wanted."""
    rows = min(N, SCRATCH_ROWS)
    maps = chain == "descriptors"
    name = "few" if N <= 64 else "soft-cap" if softcap else "large"
    dlogits = DLOGITS[name if maps else chain]
    parts = most_parts(rows, dlogits) + 1  # sums for grad_bias, and theirs
    a_column = rows * item + (4 * parts if bias else 0) + (4 * D if rows < N else 0)
    most = max(SCRATCH_BYTES // a_column // 256, 1) * 256
    step = column_step(rows, columns, D, most, dlogits, maps, sm_count)
    of_hidden = product_launch(rows, D, maps, sm_count)
    return GradLaunch(rows, step, dlogits, of_hidden, product_launch(min(step, columns), D, maps, sm_count))
