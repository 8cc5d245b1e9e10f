"""Log-probs under a mask over a group, however the call names its shards: one process's, and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import vocabshard as vs
from vocabshard import masked
from vocabshard.launching import Ranks
from vocabshard.testing.compare import assert_same_bytes

N, D, V, REAL = 13, 16, 416, 403


def run(operands: tuple[Tensor, ...], target: Tensor, keep: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in operands]
    logp = masked.masked_linear_logp(leaves[0], leaves[1], target, keep, leaves[2], **options)
    logp.backward(torch.linspace(-1, 2, N, device=logp.device))
    return logp.detach(), *(x.grad for x in leaves if x.grad is not None)


@pytest.mark.parametrize("named", ["shard", "group and start", "group"])
def test_masked_over_uneven_shards(ranks: Ranks, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g), torch.randn(V, generator=g)
    weight[REAL:] = float("nan")
    target, keep = torch.randint(0, REAL, (N,), generator=g), torch.rand(N, V, generator=g) < 0.4
    keep[torch.arange(N), target] = True
    hidden, weight, bias, target, keep = (x.to(ranks.device) for x in (hidden, weight, bias, target, keep))
    start = 16 * ranks.rank
    mine = slice(start, start + 16 if ranks.rank + 1 < ranks.world_size else V)
    sizes: dict[str, Any] = {"tp_group": dist.group.WORLD, "global_vocab_size": V, "real_vocab_size": REAL}
    if named == "group and start":
        sizes["vocab_start_index"] = start
    if named == "shard":
        sizes = {"shard": vs.VocabShard(start, mine.stop, REAL, V, dist.group.WORLD)}
    alone = run((hidden, weight, bias), target, keep, real_vocab_size=REAL, chunk_rows=N)
    # the widest shard's decides: 5 rows, though a narrow one's would fit many more
    monkeypatch.setattr(masked, "LOGITS_BYTES", 5 * 4 * (V - 16 * (ranks.world_size - 1)))
    logp, grad_hidden, grad_weight, grad_bias = run((hidden, weight[mine], bias[mine]), target, keep[:, mine], **sizes)
    assert_same_bytes(logp, alone[0])
    torch.testing.assert_close(grad_hidden, alone[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_weight, alone[2][mine], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_bias, alone[3][mine], rtol=1e-5, atol=1e-5)
