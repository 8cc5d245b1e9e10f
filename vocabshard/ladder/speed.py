"""How fast the head serves and scores here: what stands beside the ladder's counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from vocabshard.functional import linear_logp
from vocabshard.ladder.inputs import make_inputs
from vocabshard.testing.layouts import QWEN3_8B


def _seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median of some calls after a first one, each waited for."""
    found = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])


def head_speed(device: torch.device, full: bool) -> dict[str, Any]:
    """Tokens a second of decode steps that serve logits, seconds to score a batch; bf16, full: Qwen3-8B's head."""
    depth, columns = (QWEN3_8B.hidden_size, QWEN3_8B.real_vocab_size) if full else (256, 16000)
    rows = 4096 if full else 256
    inputs = make_inputs(rows, depth, columns, 0, "bf16", device, masked=False)
    found: dict[str, Any] = {"D": depth, "V": columns, "dtype": "bf16", "decode_tokens_per_s": {}}
    with torch.no_grad():
        for batch in (1, 8, 64):
            some = inputs.take(torch.arange(batch, device=device))

            def serve(some=some) -> Any:  # type: ignore[no-untyped-def]
                return linear_logp(some.hidden, some.weight, some.target_ids, return_logits=True, validate=False)

            found["decode_tokens_per_s"][batch] = batch / _seconds(serve, device, 20 if full else 5)
        found["score_rows"] = rows
        found["score_seconds"] = _seconds(
            lambda: linear_logp(inputs.hidden, inputs.weight, inputs.target_ids, validate=False), device, 5
        )
    return found
