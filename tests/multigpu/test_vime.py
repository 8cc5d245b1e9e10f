"""The Vime provider at tensor parallel 2 and context parallel 2: the bytes of one rank, and one outcome for a group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import vocabshard as vs
from vocabshard.integrations import vime
from vocabshard.launching import Ranks
from vocabshard.testing import vime_engine as engine
from vocabshard.testing.compare import assert_same_bytes
from vocabshard.testing.layouts import LLAMA3_8B, QWEN3_8B, Layout

ON_GPU = torch.cuda.is_available()


class Place:
    """This rank's part of a layout: its group, its columns and its rows."""

    def __init__(self, ranks: Ranks, layout: Layout) -> None:
        if ranks.world_size != layout.ranks:
            pytest.skip(f"needs {layout.ranks} ranks")
        groups = [dist.new_group(layout.tp_ranks(cp_rank)) for cp_rank in range(layout.cp)]
        self.cp_rank, self.tp_rank = divmod(ranks.rank, layout.tp)
        self.group, self.layout, self.device = groups[self.cp_rank], layout, ranks.device
        start = self.tp_rank * layout.local_size
        self.columns = slice(start, start + layout.local_size)
        total = layout.cp * layout.rows
        self.rows = torch.tensor(layout.zigzag_rows(self.cp_rank, total), device=ranks.device)
        self.total = total

    def request(self, hidden: Tensor, weight: Tensor, target: Tensor, **changed: Any) -> engine.Request:
        layout = self.layout
        partition = engine.Partition(
            self.columns.start, layout.local_size, layout.real_vocab_size, layout.padded_vocab_size
        )
        context = engine.Context(hidden[self.rows], engine.Projection(weight[self.columns]), partition)
        tokens = engine.Layout(layout.cp, self.cp_rank, "zigzag")
        return engine.Request(
            engine.NoLogits(),
            target[self.rows],
            self.group,
            tokens,
            context=context,
            **{"with_entropy": True, **changed},
        )


def inputs(place: Place, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator(place.device).manual_seed(0)  # a whole head takes a CPU tens of seconds
    layout, where = place.layout, {"generator": g, "device": place.device}
    hidden = torch.randn(place.total, depth, **where).to(dtype)
    weight = torch.randn(layout.padded_vocab_size, depth, **where).to(dtype)
    weight[layout.real_vocab_size :] = float("nan")
    return hidden, weight, torch.randint(0, layout.real_vocab_size, (place.total,), **where)


def never() -> Any:
    raise AssertionError("the engine fell back")


@pytest.mark.parametrize("layout", [QWEN3_8B, LLAMA3_8B], ids=lambda layout: layout.name)
def test_both_entries_at_a_models_layout(ranks: Ranks, layout: Layout) -> None:
    if layout is not QWEN3_8B and not ON_GPU:
        layout = replace(layout, rows=16)
    place = Place(ranks, layout)
    # whole on a GPU; a head that is less deep on a CPU
    hidden, weight, target = inputs(place, layout.hidden_size if ON_GPU else 8, torch.bfloat16)
    options = {"real_vocab_size": layout.real_vocab_size, "temperature": 0.7, "strict": True}
    own, own_target = hidden[place.rows], target[place.rows]
    want = vs.linear_logp(own, weight, own_target, return_entropy=True, return_lse=True, **options)
    request = place.request(hidden, weight, target, temperature=0.7, metadata={"tp_world_size": layout.tp})
    logp, entropy, result = engine.compute(request, vime.strict_provider, "strict", never)
    assert_same_bytes(logp[:, 0], want.logp, "trainer entry")
    assert_same_bytes(entropy, want.entropy)
    assert result.provenance["token_layout"] == {"world_size": 2, "rank": place.cp_rank, "layout": "zigzag"}
    served = vs.linear_logp(
        own, weight[place.columns], own_target, tp_group=place.group, global_vocab_size=layout.padded_vocab_size,
        return_logits=True, return_lse=True, **options,
    )  # fmt: skip
    assert served.logits.shape == (layout.rows, layout.local_size)
    assert_same_bytes(served.logp, want.logp, "serving entry")
    assert_same_bytes(served.lse, want.lse)
    metadata = {"real_vocab_size": layout.real_vocab_size, "padded_vocab_size": layout.padded_vocab_size}
    given = replace(request, logits=served.logits, context=None, metadata=metadata)
    logp, entropy, result = engine.compute(given, vime.strict_provider, "strict", never)
    assert_same_bytes(logp[:, 0], want.logp, "from the logits that were served")
    assert_same_bytes(entropy, want.entropy)


SMALL = Layout("small", 16, 250, 256, tp=2, cp=2, rows=12)


def test_masks_and_gradients(ranks: Ranks) -> None:
    place = Place(ranks, SMALL)
    hidden, weight, target = inputs(place, SMALL.hidden_size, torch.float32)
    mask = torch.rand(place.total, 256, generator=torch.Generator().manual_seed(1)) < 0.3
    mask = mask.to(place.device)
    mask[torch.arange(place.total), target] = True
    upstream = torch.randn(SMALL.rows, generator=torch.Generator().manual_seed(2)).to(place.device)

    def whole() -> tuple[Tensor, Tensor, Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden[place.rows], weight)]
        alone = engine.Partition(0, 256, 250, 256)
        context = engine.Context(leaves[0], engine.Projection(leaves[1]), alone)
        request = engine.Request(
            engine.NoLogits(), target[place.rows], context=context, log_prob_keep_mask=mask[place.rows], chunk_size=5
        )
        logp = vime.provider(request).logp[:, 0]
        (logp * upstream).sum().backward()
        return logp, leaves[0].grad, leaves[1].grad

    want = whole()
    request = place.request(hidden, weight, target, log_prob_keep_mask=mask[place.rows][:, place.columns], chunk_size=5)
    leaf_hidden = request.context.hidden.clone().requires_grad_()
    leaf_weight = request.context.projection.weight.clone().requires_grad_()
    context = replace(request.context, hidden=leaf_hidden, projection=engine.Projection(leaf_weight))
    logp, _, _ = engine.compute(replace(request, context=context), vime.provider, "auto", never)
    assert_same_bytes(logp[:, 0], want[0])
    (logp[:, 0] * upstream).sum().backward()
    torch.testing.assert_close(leaf_hidden.grad, want[1], rtol=1e-5, atol=1e-6)
    own, real = want[2][place.columns], max(0, 250 - place.columns.start)
    torch.testing.assert_close(leaf_weight.grad[:real], own[:real], rtol=1e-5, atol=1e-6)
    assert not leaf_weight.grad[real:].any()


def test_a_group_scores_or_falls_back_together(ranks: Ranks) -> None:
    place = Place(ranks, SMALL)
    hidden, weight, target = inputs(place, SMALL.hidden_size, torch.float32)
    for wrong, said in (
        ({"metadata": {"tp_rank": 5}}, "tp_rank is 5"),
        ({"metadata": {"backend": "torch"}}, "does not bear it"),
        ({"token_layout": engine.Layout(2, place.cp_rank, "single")}, "does not describe 2 ranks"),
        ({"temperature": 0.5}, "different options"),
        ({"target_ids": torch.tensor(3)}, "target_ids must be integers"),
        ({"token_layout": None}, "token_layout"),
        ({"with_entropy": False}, "different options"),
    ):
        request = place.request(hidden, weight, target)
        if ranks.rank == 0:  # its tensor-parallel group hears of it, the other scores
            request = replace(request, **wrong)
        fallback = ("fell", "back")
        outcome = engine.compute(request, vime.provider, "auto", lambda back=fallback: back)
        assert (outcome[0] == "fell") is (place.cp_rank == 0), said
        if place.cp_rank == 0:
            with pytest.raises(vime.ProviderConfigurationError, match=said):
                engine.compute(request, vime.strict_provider, "strict", never)


def test_top_p_is_replayed(ranks: Ranks) -> None:
    """Drawn by one process, scored at tensor parallel 2: by the cut, by the program alone, by the ids."""
    place = Place(ranks, SMALL)
    hidden, weight, _ = inputs(place, SMALL.hidden_size, torch.float32)
    program = vs.SamplingProgram.of(temperature=0.8, top_p=0.9)
    drawn = vs.vocab_parallel_sample(hidden, weight, program=program, seed=1, real_vocab_size=250, topk=250)
    ids = torch.where(torch.isneginf(drawn.top_logp), -1, drawn.top_ids)[place.rows]
    cut = drawn.cut[place.rows]
    for metadata in (
        {"sampling": program, "sampling_cut": cut},
        {"sampling": program.as_list()},
        {"top_p_sparse_token_ids": ids},
    ):
        request = place.request(hidden, weight, drawn.token, temperature=0.8, metadata=metadata)
        logp, entropy, _ = engine.compute(request, vime.strict_provider, "strict", never)
        assert_same_bytes(logp[:, 0], drawn.logp[place.rows], str(list(metadata)))
        whole = vs.linear_logp(
            hidden[place.rows], weight, drawn.token[place.rows], temperature=0.8, real_vocab_size=250,
            return_entropy=True,
        )  # fmt: skip
        assert_same_bytes(entropy, whole.entropy, "of the whole distribution")
