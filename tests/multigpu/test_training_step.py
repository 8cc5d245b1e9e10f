"""One optimiser step of examples/tiny_lm with its head sharded over the ranks, against the step on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import vocabshard as vs
from vocabshard.launching import Ranks
from vocabshard.testing.compare import assert_same_bytes

TINY = Path(__file__).parents[2] / "examples" / "tiny_lm"


def step(device: torch.device, ordered: bool, group=None) -> tuple[dict[str, Tensor], Tensor, float]:
    """The body's parameters and this rank's part of the head after a step, and the loss; in fp32."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32).to(device)
    ids = torch.arange(2 * 65, device=device).view(2, 65) * 17 % model.config.real_vocab_size
    padded = len(model.lm_head.weight)
    shard = vs.VocabShard.split(model.config.real_vocab_size, group, pad_to_multiple_of=512)
    assert shard.padded_vocab_size == padded
    head = torch.nn.Parameter(model.lm_head.weight.detach()[shard.start : shard.stop].clone())
    body = dict(model.model.named_parameters())
    # one chain: the same bytes at any W, so even Adam's signs are; a sum: the same to rounding
    optimizer = (torch.optim.AdamW if ordered else torch.optim.SGD)([*body.values(), head], lr=0.01)
    hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
    options = vs.GradOptions(reduce="ordered" if ordered else "sum")
    loss = -vs.linear_logp(hidden, head, ids[:, 1:], shard=shard, grad_options=options).mean()
    loss.backward()
    optimizer.step()
    return {name: p.detach() for name, p in body.items()}, head.detach(), float(loss.detach())


@pytest.mark.parametrize("ordered", [False, True], ids=["sum", "ordered"])
def test_a_step_is_the_single_ranks(ranks: Ranks, ordered: bool) -> None:
    try:
        want = step(ranks.device, ordered)
        got = step(ranks.device, ordered, dist.group.WORLD)
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert got[2] == want[2], "the loss is made of equal bytes"
    size = len(got[1])
    mine = want[1][ranks.rank * size : (ranks.rank + 1) * size]
    exact = ordered and ranks.device.type == "cpu"
    for a, b, what in [*((got[0][name], p, name) for name, p in want[0].items()), (got[1], mine, "head")]:
        if exact:
            assert_same_bytes(a, b, what)
        else:
            torch.testing.assert_close(
                a, b, rtol=1e-5, atol=2e-4 if ordered else 1e-7, msg=lambda m, w=what: f"{w}: {m}"
            )
