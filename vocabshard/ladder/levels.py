"""L1, L2 and L3: one process, whatever W is asked about."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from vocabshard import kernels
from vocabshard.contract import fp32
from vocabshard.functional import linear_logp, vocab_parallel_logp
from vocabshard.kernels.backends import LINEAR, NAMES, Site
from vocabshard.ladder.inputs import (
    DTYPES,
    Inputs,
    make_inputs,
    ordinary_in_shards,
    scored_in_shards,
    shardings,
)
from vocabshard.ladder.rungs import Rung, ordinary_logp
from vocabshard.options import LogpOutput
from vocabshard.testing.layouts import LLAMA3_8B, QWEN3_8B, Layout

SEEDS = (0, 1, 2)


def everything(inputs: Inputs, backend: str = "auto", **options: Any) -> LogpOutput:
    """logp, lse and entropy in strict mode."""
    out = linear_logp(
        *inputs[:2], inputs.target_ids, inputs.bias, backend=backend, strict=True, validate=False, return_lse=True,
        return_entropy=True, **options,
    )  # fmt: skip
    assert isinstance(out, LogpOutput)
    return out


def repeat(device: torch.device, calls: int = 1000, rows: int = 33, depth: int = 64, columns: int = 1000) -> Rung:
    """L1: the same call again and again, nothing waited for in between."""
    rung = Rung("L1", f"{calls} unsynchronised calls")
    for dtype in DTYPES:
        inputs = make_inputs(rows, depth, columns, 0, dtype, device)
        want = everything(inputs, temperature=0.7)
        count = calls if dtype == "bf16" else calls // 10  # of the others a sample
        wrong = torch.zeros(rows, dtype=torch.int64, device=device)
        for _ in range(count):
            got = everything(inputs, temperature=0.7)
            for a, b in zip(got[:3], want[:3], strict=True):
                assert a is not None and b is not None
                wrong += a.view(torch.int32) != b.view(torch.int32)
        rung.rows += count * rows
        rung.differing += int(wrong.sum())
        if int(wrong.sum()):
            rung.first = f"{dtype}, row {int(wrong.nonzero()[0])}"
    return rung.done()


def batches(inputs: Inputs, want: LogpOutput, options: dict[str, Any], rung: Rung, where: str) -> None:
    """Rows alone, seven at a time, permuted, padded to buckets, without the ignored ones; in a graph on a GPU."""
    device, n = inputs.hidden.device, len(inputs.target_ids)
    every = torch.arange(n, device=device)
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(1)).to(device)
    active = every[inputs.target_ids >= 0]
    padding = torch.cat([every, every[:1].expand(64 - n % 64)])
    pieces = {
        "one row": [every[i : i + 1] for i in range(n)],
        "seven rows": list(every.split(7)),
        "permuted": [shuffled],
        "active rows alone": [active],
        "padded to a bucket": [padding],
    }
    for name, chosen in pieces.items():
        for rows in chosen:
            got = everything(inputs.take(rows), **options)
            rung.compare(got, tuple(None if x is None else x[rows] for x in want[:3]), f"{where}, {name}")
    if device.type == "cuda":
        rung.compare(_from_graph(inputs, options), want[:3], f"{where}, CUDA graph")


def _from_graph(inputs: Inputs, options: dict[str, Any]) -> LogpOutput:
    stream = torch.cuda.Stream(inputs.hidden.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # also another stream than the first call's
        everything(inputs, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = everything(inputs, **options)
    graph.replay()
    torch.cuda.synchronize(inputs.hidden.device)
    return out


def invariance(
    device: torch.device, rows: int = 17, depth: int = 40, columns: int = 1003, dtypes: tuple[str, ...] = tuple(DTYPES)
) -> Rung:
    """L2: batch, position, padding, bucket and sharding, for three seeds, the dtypes, T = 1 and 0.7, with masks."""
    rung = Rung("L2", "batch, position, padding, bucket, sharding")
    for seed, dtype, temperature in itertools.product(SEEDS, dtypes, (None, 0.7)):
        inputs = make_inputs(rows, depth, columns, seed, dtype, device)
        backend = kernels.select_backend("auto", device, DTYPES[dtype]).backend
        options: dict[str, Any] = {"temperature": temperature}
        want = everything(inputs, **options)
        where = f"seed {seed}, {dtype}, T {temperature or 1}"
        batches(inputs, want, options, rung, where)
        reciprocal = None if temperature is None else fp32(1 / fp32(temperature))
        logits = (inputs.hidden @ inputs.weight.T).float() + inputs.bias
        logits = logits / (temperature or 1)
        whole = ordinary_in_shards(logits, inputs.target_ids, [0, columns])
        for name, bounds in shardings(columns).items():
            rung.compare(scored_in_shards(inputs, bounds, backend, reciprocal), want[:3], f"{where}, {name}")
            rung.compare_ordinary(ordinary_in_shards(logits, inputs.target_ids, bounds), whole)
    return rung.done()


def entries(device: torch.device, layout: Layout, rows: int, depth: int, dtype: str = "bf16") -> Rung:
    """L3: hidden states, logits that were served, and every backend that has the projection, at a model's layout."""
    rung = Rung("L3", f"both entries and all backends, {layout.name}, {rows} rows, D {depth}")
    inputs = make_inputs(rows, depth, layout.real_vocab_size, 0, dtype, device)
    temperature = 0.7
    want = everything(inputs, temperature=temperature)
    served = everything(inputs, temperature=temperature, return_logits=True)
    assert served.logits is not None
    rung.compare(served, want[:3], "serving entry")
    with torch.enable_grad():
        leaf = inputs._replace(hidden=inputs.hidden.detach().requires_grad_())
        rung.compare(everything(leaf, temperature=temperature), want[:3], "with gradients")
    again = vocab_parallel_logp(
        served.logits, inputs.target_ids, temperature=temperature, return_entropy=True, strict=True, validate=False
    )
    rung.compare(again, want[:3], "from the logits that were served")
    parts = [layout.local_size * i for i in range(layout.tp + 1)]
    chosen = kernels.select_backend("auto", device, DTYPES[dtype])
    reciprocal = fp32(1 / fp32(temperature))
    for name in NAMES:
        if kernels.row(name).refusal(Site(device, DTYPES[dtype], LINEAR)):
            continue
        if kernels.select_backend(name, device, DTYPES[dtype]).projection != chosen.projection:
            continue
        rung.compare(everything(inputs, name, temperature=temperature), want[:3], f"backend {name}")
        rung.compare(scored_in_shards(inputs, parts, name, reciprocal), want[:3], f"backend {name}, TP {layout.tp}")
    if device.type != "cpu":
        rung.compare(_on_cpu(served.logits, inputs.target_ids, temperature), want[:3], "its logits on the CPU")
    ordinary = (inputs.hidden @ inputs.weight.T).float() + inputs.bias
    usable = torch.where(inputs.target_ids >= layout.real_vocab_size, 0, inputs.target_ids.clamp(min=0))
    rung.compare_ordinary(ordinary_in_shards(ordinary, usable, parts), ordinary_logp(ordinary, usable))
    return rung.done()


def _on_cpu(logits: Tensor, target_ids: Tensor, temperature: float) -> LogpOutput:
    return vocab_parallel_logp(
        logits.cpu(), target_ids.cpu(), temperature=temperature, return_entropy=True, strict=True, validate=False
    )


MODELS = (QWEN3_8B, LLAMA3_8B)
