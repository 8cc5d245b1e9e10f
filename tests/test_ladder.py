"""L1 to L4 of the ladder: 0 differing rows, on inputs on which an ordinary log_softmax differs."""

from __future__ import annotations

import pytest
import torch

from vocabshard.ladder import Rung, levels, record
from vocabshard.options import LogpOutput
from vocabshard.testing.layouts import LLAMA3_8B, LLAMA3_70B, QWEN3_8B

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def check(rung: Rung, ordinary: bool = False) -> None:
    assert rung.holds, f"{rung.level} {rung.what}: {rung.differing} of {rung.rows} rows differ, first {rung.first}"
    assert rung.ordinary_differing or not ordinary, "an ordinary sum must differ on these inputs"


def test_a_differing_row_is_counted_and_placed() -> None:
    want = LogpOutput(torch.tensor([-1.0, float("nan"), -0.0, 2.0]), torch.ones(4))
    rung = Rung("L0", "a row's bytes")
    rung.compare(want, want[:3], "itself")
    assert rung.holds
    nan, zero = want.logp.clone(), want.logp.clone()
    nan.view(torch.int32)[1] += 1
    zero[2] = 0.0
    rung.compare(want._replace(logp=nan), want[:3], "another NaN")
    rung.compare(want._replace(logp=zero, lse=torch.zeros(4)), want[:3], "zeros")
    assert (rung.rows, rung.differing, rung.first) == (12, 5, "another NaN, row 1") and not rung.holds
    assert not Rung("L0", "nothing").holds


def test_l1_repeat() -> None:
    check(levels.repeat(CPU))


def test_l2_batch_position_padding_bucket_sharding() -> None:
    check(levels.invariance(CPU), ordinary=True)


@pytest.mark.parametrize("layout", [QWEN3_8B, LLAMA3_8B], ids=lambda layout: layout.name)
def test_l3_entries(layout) -> None:
    check(levels.entries(CPU, layout, 16, 8), ordinary=True)


def test_l4_across_processes() -> None:
    rung = record.across_processes(CPU, (1, 2))
    check(rung)
    assert rung.detail["largest_k3"] == 0.0


@pytest.mark.needs("sm90")
def test_l1_and_l2_on_a_gpu() -> None:
    check(levels.repeat(CUDA, rows=64, depth=2048, columns=50257))
    check(levels.invariance(CUDA, rows=33, depth=512, columns=8003), ordinary=True)


@pytest.mark.needs("sm90", "triton")
@pytest.mark.parametrize(
    "layout, dtype", [(QWEN3_8B, "bf16"), (QWEN3_8B, "fp16"), (LLAMA3_8B, "bf16"), (LLAMA3_70B, "bf16")], ids=str
)
def test_l3_on_a_gpu(layout, dtype: str) -> None:
    check(levels.entries(CUDA, layout, layout.rows, layout.hidden_size, dtype), ordinary=True)


@pytest.mark.needs("sm90")
def test_l4_on_a_gpu() -> None:
    check(record.across_processes(CUDA, (1, 3, 4), rows=256, depth=2048, columns=50257))
