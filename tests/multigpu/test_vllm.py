"""vLLM's sampling step over ranks: the tokens and log-probs of one rank, on every rank, with vLLM's padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vocabshard.integrations.vllm import HeadSampler
from vocabshard.launching import Ranks
from vocabshard.testing.compare import assert_same_bytes

V, D, N = 1000, 24, 7


def metadata(device: torch.device, wanted: int | None) -> Any:
    return SimpleNamespace(
        temperature=torch.tensor([0.7, 0.0, 1.0, 1.3, 0.7, 1.0, 0.7], device=device),
        all_greedy=False,
        all_random=False,
        top_k=torch.tensor([V, V, 5, V, 40, 1, V], device=device),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.8, 0.9, 1.0, 1.0], device=device),
        generators={6: torch.Generator().manual_seed(3)},
        max_num_logprobs=wanted,
        no_penalties=True,
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=SimpleNamespace(argmax_invariant=[], non_argmax_invariant=[]),
        logprob_token_ids=None,
    )


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_every_rank_has_what_one_has(ranks: Ranks, mode: str) -> None:
    torch.manual_seed(0)
    padded = -(-V // (64 * ranks.world_size)) * 64 * ranks.world_size
    whole, hidden = torch.randn(padded, D).to(ranks.device), torch.randn(N, D).to(ranks.device)
    whole[V:] = float("nan")
    width = padded // ranks.world_size
    own = whole[width * ranks.rank : width * (ranks.rank + 1)]

    def told(weight: torch.Tensor, group: Any) -> list[torch.Tensor]:
        lm_head = SimpleNamespace(weight=weight, org_vocab_size=V, num_embeddings_padded=padded)
        sampler = HeadSampler(lm_head, SimpleNamespace(soft_cap=5.0, scale=1.0), group, logprobs_mode=mode, seed=5)
        found = []
        for step in range(3):
            out = sampler(hidden + step, metadata(ranks.device, 4))
            found += [out.sampled_token_ids, *out.logprobs_tensors]
        return found

    for over_ranks, alone in zip(told(own, dist.group.WORLD), told(whole, None), strict=True):
        assert_same_bytes(over_ranks, alone)
