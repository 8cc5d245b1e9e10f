"""Seeded inputs of the ladder, and how a vocabulary is cut into shards."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from vocabshard import kernels
from vocabshard.dist.fold import fold
from vocabshard.kernels.problem import LocalProblem

IGNORE = -100
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Inputs(NamedTuple):
    """hidden [N, D], weight [V, D] and bias [V] of a real vocabulary, target_ids [N]: ignored and unusable ones too."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    target_ids: Tensor

    def take(self, rows: Tensor) -> Inputs:
        """Some of the rows."""
        return self._replace(hidden=self.hidden[rows], target_ids=self.target_ids[rows])


def make_inputs(
    rows: int, depth: int, columns: int, seed: int, dtype: str, device: torch.device, masked: bool = True
) -> Inputs:
    """Of one generator on the CPU, so that every machine has the same; logits ~ N(0, 1), peaked in every fourth row."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, depth, generator=g)
    hidden[::4] *= 4
    weight = torch.randn(columns, depth, generator=g) * depth**-0.5
    bias = torch.randn(columns, generator=g) * 0.1
    target_ids = torch.randint(0, columns, (rows,), generator=g)
    if masked:
        target_ids[::5] = IGNORE
        target_ids[1::11] = columns  # in the padding, where there is one
    to = DTYPES[dtype]
    return Inputs(hidden.to(device, to), weight.to(device, to), bias.to(device), target_ids.to(device))


def shardings(columns: int) -> dict[str, list[int]]:
    """{name: bounds} at W = 1, 2, 3, 4, 8: even, uneven, with an empty shard, as Megatron and as vLLM pad."""
    found = {"W 1": [0, columns]}
    for W in (2, 3, 4, 8):
        even = -(-columns // (16 * W)) * 16
        found[f"W {W}, even"] = [min(even * i, columns) for i in range(W)] + [columns]
        steps = [16 * (i * i + 1) for i in range(W - 1)]
        bounds = [0]
        for step in steps:
            bounds.append(min(bounds[-1] + step, columns))
        found[f"W {W}, uneven"] = [*bounds, columns]
        for name, unit in (("Megatron", 128 * W), ("vLLM", math.lcm(64, 16 * W))):
            padded = -(-columns // unit) * unit
            found[f"W {W}, {name}"] = [padded // W * i for i in range(W + 1)]
    found["W 3, one empty"] = [0, 16, 16, columns]
    return found


def scored_in_shards(
    inputs: Inputs, bounds: list[int], backend: str, inv_temperature: float | None
) -> tuple[Tensor | None, ...]:
    """logp, lse, entropy of W ranks in one process: their kernels one after the other, and the fold of all records.

    Bounds may go beyond the vocabulary: padding rows hold NaN.
    """
    columns, module = inputs.weight.shape[0], kernels.module(backend)
    fill = max(0, bounds[-1] - columns)
    weight = torch.cat([inputs.weight, inputs.weight.new_full((fill, inputs.weight.shape[1]), math.nan)])
    bias = torch.cat([inputs.bias, inputs.bias.new_full((fill,), math.nan)])
    records = []
    for start, stop in pairwise(bounds):
        problem = LocalProblem(start, max(0, min(stop, columns) - start), None, True)
        records.append(
            module.forward(
                inputs.hidden, weight[start:stop], bias[start:stop], inputs.target_ids, inv_temperature, problem
            )[0]
        )
    folded = fold(backend, torch.stack(records), inputs.target_ids, IGNORE, columns, "nan")
    return folded.logp, folded.lse, folded.entropy


def ordinary_in_shards(logits: Tensor, target_ids: Tensor, bounds: list[int]) -> Tensor:
    """The log-prob as vocabulary-parallel cross entropies have it: maximum, sum and target over the ranks, in fp32."""
    pieces = [logits[:, start:stop].float() for start, stop in pairwise(bounds) if min(stop, logits.shape[1]) > start]
    maximum = torch.stack([piece.amax(1) for piece in pieces]).amax(0)
    total = torch.stack([(piece - maximum[:, None]).exp().sum(1) for piece in pieces]).sum(0)
    target = logits.float().gather(1, target_ids.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    return target - maximum - total.log()
