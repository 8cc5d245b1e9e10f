"""What a Vime request says of a truncation that its tokens were drawn under."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vocabshard.sampling import SamplingProgram

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def mask_of_ids(ids: Any, rows: int, width: int, start: int) -> Tensor:
    """This rank's columns of a keep mask, from the kept ids of each row; a row without any keeps everything."""
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS or ids.dim() != 2 or ids.shape[0] != rows:
        found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(
            f"top_p_sparse_token_ids must be integers [T, K] = [{rows}, K], -1 beyond the ids, got {found}"
        )
    local = ids.long() - start
    here = (ids >= 0) & (local >= 0) & (local < width)
    counts = torch.zeros(rows, width + 1, dtype=torch.bool, device=ids.device)
    counts.scatter_(1, torch.where(here, local, width), True)  # what is another rank's lands beside
    return counts[:, :width] | ~(ids >= 0).any(1, keepdim=True)


def read_replay(
    request: Any, metadata: Mapping[str, Any], rows: int, given_logits: bool
) -> tuple[SamplingProgram | None, Tensor | None]:
    """The program that tokens were drawn with, and what it kept of each row."""
    program, cut = metadata.get("sampling"), metadata.get("sampling_cut")
    if program is None:
        if cut is not None:
            raise ValueError("metadata sampling_cut came without the program that made it; give sampling too")
        return None, None
    if not isinstance(program, SamplingProgram):
        program = SamplingProgram(program)
    if request.log_prob_keep_mask is not None or metadata.get("top_p_sparse_token_ids") is not None:
        raise ValueError("a replay by metadata sampling and a keep mask were given; give one of the two")
    if cut is not None and (
        not isinstance(cut, Tensor) or cut.dtype != torch.int64 or cut.dim() != 1 or cut.shape[0] != rows
    ):
        raise ValueError(f"metadata sampling_cut must be int64 [T] = [{rows}]")
    if given_logits and metadata.get("logits_are_temperature_scaled", False):
        raise ValueError("a cut is of logits before temperature; give those, or hidden states")
    if given_logits and program.truncates and cut is None:
        raise ValueError("logits are replayed by their cut; give metadata sampling_cut, or hidden states")
    return program, cut


def one_temperature(program: SamplingProgram, temperature: float | Tensor | None) -> float | None:
    """The program's own, None where that is greedy. A temperature beside it has to be the same."""
    if isinstance(temperature, Tensor) and temperature.numel() > 1:
        raise ValueError("the program has a temperature, and one a row came; give one of the two")
    number = number_of(temperature)
    if number is not None and SamplingProgram.of(temperature=float(number)).temperature != program.temperature:
        raise ValueError(f"temperature is {number!r}, the program's is {program.temperature!r}; give one of the two")
    return program.temperature or None


def number_of(temperature: float | Tensor | None) -> float | None:
    """Of one element on a GPU nothing is read back: 1 stands for it in the stated contract."""
    if isinstance(temperature, Tensor):
        return float(temperature) if temperature.device.type == "cpu" else None
    return temperature
