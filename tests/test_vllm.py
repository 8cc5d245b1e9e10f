"""vLLM's sampling step from the head, against what its Sampler does with whole logits.

`Sampler` restates vllm/v1/sample/sampler.py and ops/topk_topp_sampler.py of vLLM 0.33 (forward, sample, forward_native,
gather_logprobs, gather_specific_token_logprobs) for what the adapter takes, in plain torch; vLLM itself does not
install where there is no accelerator, and where it is installed its own runs too. Noise differs by design, so tokens
are compared where they are certain, and by their frequencies where they are not.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.integrations import vllm
from vocabshard.testing.compare import assert_same_bytes

V, PADDED, D = 1000, 1024, 24


@dataclass
class Metadata:
    """SamplingMetadata, the fields that are read."""

    temperature: Tensor | None = None
    all_greedy: bool = True
    all_random: bool = False
    top_p: Tensor | None = None
    top_k: Tensor | None = None
    generators: dict[int, torch.Generator] = field(default_factory=dict)
    max_num_logprobs: int | None = None
    no_penalties: bool = True
    allowed_token_ids_mask: Tensor | None = None
    bad_words_token_ids: dict[int, Any] = field(default_factory=dict)
    output_token_ids: list[list[int]] = field(default_factory=list)
    logitsprocs: Any = None
    logprob_token_ids: dict[int, list[int]] | None = None
    spec_token_ids: Any = None
    thinking_budget_state_holder: Any = None

    def __post_init__(self) -> None:
        self.logitsprocs = self.logitsprocs or processors()


class LogitBiasLogitsProcessor:
    """As there without a request that has any."""

    def __init__(self, biases: dict[int, Any] | None = None) -> None:
        self.biases = biases or {}

    def apply(self, logits: Tensor) -> Tensor:
        return logits


class MinPLogitsProcessor:
    """As there: min_p by row on the host, a count of rows that have one."""

    def __init__(self, min_p: list[float]) -> None:
        self.min_p_cpu, self.min_p_count = min_p, sum(p > 0 for p in min_p)

    def apply(self, logits: Tensor) -> Tensor:
        if not self.min_p_count:
            return logits
        probs = logits.softmax(-1)
        least = probs.amax(-1, keepdim=True) * torch.tensor(self.min_p_cpu)[: len(logits), None]
        return logits.masked_fill(probs < least, float("-inf"))


def processors(min_p: list[float] | None = None, more: list[Any] | None = None) -> Any:
    return SimpleNamespace(
        argmax_invariant=[MinPLogitsProcessor(min_p or [0.0] * 64)],
        non_argmax_invariant=[
            SimpleNamespace(min_toks={}, apply=lambda x: x),
            LogitBiasLogitsProcessor(),
            *(more or []),
        ],
    )


class Sampler:
    """logits [N, V] in, (token if certain, probabilities [N, V], log-probs that are told [N, V]) out."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def probabilities(self, logits: Tensor, of: Metadata) -> tuple[Tensor, Tensor]:
        raw = logits.log_softmax(-1)
        if of.all_greedy:
            return torch.zeros_like(raw).scatter(1, logits.argmax(-1, keepdim=True), 1.0), raw
        assert of.temperature is not None
        greedy = of.temperature < 1e-5
        x = logits / torch.where(greedy, 1.0, of.temperature)[:, None]
        for processor in of.logitsprocs.argmax_invariant:
            x = processor.apply(x)
        ordered, ids = x.sort(-1)
        if of.top_k is not None:
            kth = ordered.gather(1, (V - of.top_k.long())[:, None])
            ordered = ordered.masked_fill(ordered < kth, float("-inf"))
        if of.top_p is not None:
            out = ordered.softmax(-1).cumsum(-1) <= 1 - of.top_p[:, None]
            out[:, -1] = False
            ordered = ordered.masked_fill(out, float("-inf"))
        x = torch.empty_like(x).scatter(1, ids, ordered)
        probs = x.softmax(-1)
        probs[greedy] = torch.zeros_like(probs[greedy]).scatter(1, logits[greedy].argmax(-1, keepdim=True), 1.0)
        return probs, x.log_softmax(-1) if self.mode == "processed_logprobs" else raw

    def told(self, logprobs: Tensor, tokens: Tensor, of: Metadata) -> tuple[Tensor, Tensor, Tensor] | None:
        own = logprobs.gather(1, tokens[:, None])
        ranks = (logprobs >= own).sum(-1)
        if of.logprob_token_ids:
            widest = max(map(len, of.logprob_token_ids.values()))
            ids, found = torch.zeros(len(tokens), widest + 1, dtype=torch.long), torch.full_like(own, -torch.inf)
            found = found.expand(-1, widest + 1).clone()
            ids[:, 0], found[:, 0] = tokens, own[:, 0]
            for row, chosen in of.logprob_token_ids.items():
                ids[row, 1 : len(chosen) + 1] = torch.tensor(chosen)
                found[row, 1 : len(chosen) + 1] = logprobs[row, chosen]
            return ids, found, ranks
        if of.max_num_logprobs is None:
            return None
        best, ids = logprobs.topk(of.max_num_logprobs, -1)
        return torch.cat([tokens[:, None], ids], 1), torch.cat([own, best], 1), ranks


def head(rows: int = 6, dtype: torch.dtype = torch.float32, soft_cap: float | None = None, scale: float = 1.0) -> Any:
    """vLLM's padded head, its padding not to be read; hidden states; their logits as LogitsProcessor makes them."""
    torch.manual_seed(1)
    weight, hidden = torch.randn(PADDED, D).mul_(0.5).to(dtype), torch.randn(rows, D).to(dtype)
    logits = hidden.float() @ weight[:V].float().t()
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    weight[V:] = float("nan")
    lm_head = SimpleNamespace(weight=weight, org_vocab_size=V, num_embeddings_padded=PADDED, num_added_embeddings=0)
    return lm_head, SimpleNamespace(soft_cap=soft_cap, scale=scale), hidden, logits * scale


def assert_told(found: Any, expected: tuple[Tensor, ...]) -> None:
    assert found.logprob_token_ids.dtype == torch.int32 and found.logprobs.dtype == torch.float32
    counts = expected[1] > -torch.inf  # of -inf any ids may stand there
    assert torch.equal(found.logprob_token_ids.long().where(counts, 0), expected[0].where(counts, 0))
    torch.testing.assert_close(found.logprobs, expected[1], atol=2e-5, rtol=1e-5)
    assert torch.equal(found.selected_token_ranks, expected[2])


MIXED = {
    "all_greedy": False,
    "temperature": torch.tensor([0.7, 0.0, 1.0, 1.3, 0.7, 1.0]),
    "top_k": torch.tensor([V, V, 5, V, 40, 1]),
    "top_p": torch.tensor([1.0, 1.0, 1.0, 0.8, 0.9, 1.0]),
}


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("wanted", [None, 0, 5])
@pytest.mark.parametrize("options", [{}, {"soft_cap": 3.0}, {"scale": 0.6}, {"dtype": torch.bfloat16}], ids=str)
def test_a_mixed_batch(options: dict[str, Any], wanted: int | None, mode: str) -> None:
    lm_head, processor, hidden, logits = head(**options)
    of = Metadata(**MIXED, max_num_logprobs=wanted, logitsprocs=processors([0, 0, 0, 0.05, 0, 0, 0]))
    sampler, reference = vllm.HeadSampler(lm_head, processor, logprobs_mode=mode), Sampler(mode)
    out = sampler(hidden, of)
    assert out.sampled_token_ids.dtype == torch.int32 and out.sampled_token_ids.shape == (6, 1)
    tokens = out.sampled_token_ids[:, 0].long()
    probs, told = reference.probabilities(logits, of)
    assert (probs.gather(1, tokens[:, None]) > 0).all(), "a token that vLLM would have cut"
    assert tokens[1] == logits[1].argmax() and tokens[5] == logits[5].argmax()
    if wanted is None:
        assert out.logprobs_tensors is None
    else:
        assert_told(out.logprobs_tensors, reference.told(told, tokens, of))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_all_greedy(mode: str) -> None:
    lm_head, processor, hidden, logits = head()
    of = Metadata(max_num_logprobs=3)
    out = vllm.HeadSampler(lm_head, processor, logprobs_mode=mode)(hidden, of)
    assert torch.equal(out.sampled_token_ids[:, 0].long(), logits.argmax(-1))
    assert_told(out.logprobs_tensors, Sampler(mode).told(logits.log_softmax(-1), logits.argmax(-1), of))


def test_no_rows() -> None:
    lm_head, processor, hidden, _ = head()
    none = torch.empty(0)
    for of in (Metadata(), Metadata(all_greedy=False, temperature=none, top_k=none.long(), max_num_logprobs=2)):
        out = vllm.HeadSampler(lm_head, processor)(hidden[:0], of)
        assert out.sampled_token_ids.shape == (0, 1)


def test_log_probs_are_the_trainers() -> None:
    """What the engine records is what `linear_logp` gives for it, to the byte."""
    lm_head, processor, hidden, _ = head(dtype=torch.bfloat16)
    of = Metadata(all_greedy=False, all_random=True, temperature=torch.full((6,), 0.8), max_num_logprobs=0)
    out = vllm.HeadSampler(lm_head, processor)(hidden, of)
    trainer = vs.linear_logp(hidden, lm_head.weight, out.sampled_token_ids[:, 0], real_vocab_size=V)
    assert_same_bytes(out.logprobs_tensors.logprobs[:, 0], trainer)


@pytest.mark.parametrize(
    "changed", [{}, {"top_k": 4}, {"top_p": 0.7}, {"top_k": 30, "top_p": 0.8}, {"min_p": 0.1}], ids=str
)
def test_frequencies(changed: dict[str, float]) -> None:
    """8000 draws of one row against the probabilities of vLLM's."""
    lm_head, processor, hidden, logits = head(1)
    draws = 8000
    of = Metadata(all_greedy=False, all_random=True, temperature=torch.full((draws,), 1.5))
    if "top_k" in changed:
        of.top_k = torch.full((draws,), int(changed["top_k"]))
    if "top_p" in changed:
        of.top_p = torch.full((draws,), changed["top_p"])
    of.logitsprocs = processors([changed.get("min_p", 0.0)] * draws)
    out = vllm.HeadSampler(lm_head, processor, seed=7)(hidden.expand(draws, D), of)
    counts = torch.bincount(out.sampled_token_ids[:, 0].long(), minlength=V)
    probs, _ = Sampler("raw_logprobs").probabilities(logits.expand(draws, V), of)
    expected = probs[0] * draws
    assert not counts[probs[0] == 0].any()
    often = expected >= 5
    chi2 = ((counts - expected).square() / expected)[often].sum()
    degrees = int(often.sum())
    assert degrees > 2 and chi2 < degrees + 5 * (2 * degrees) ** 0.5, (chi2, degrees)


def test_each_step_draws_anew_and_a_seeded_request_does_not_see_the_batch() -> None:
    lm_head, processor, hidden, _ = head(1)
    of = Metadata(all_greedy=False, all_random=True, temperature=torch.ones(64))
    sampler = vllm.HeadSampler(lm_head, processor)
    first, second = (sampler(hidden.expand(64, D), of).sampled_token_ids for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(vllm.HeadSampler(lm_head, processor)(hidden.expand(64, D), of).sampled_token_ids, first)
    assert not torch.equal(
        vllm.HeadSampler(lm_head, processor, seed=1)(hidden.expand(64, D), of).sampled_token_ids, first
    )
    drawn = []
    for rows, place in ((64, 3), (5, 0)):
        generator = torch.Generator().manual_seed(11)
        of = Metadata(all_greedy=False, all_random=True, temperature=torch.ones(rows), generators={place: generator})
        fresh = vllm.HeadSampler(lm_head, processor)
        drawn.append([int(fresh(hidden.expand(rows, D), of).sampled_token_ids[place]) for _ in range(20)])
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 3


def test_log_probs_of_given_ids_and_of_a_prompt() -> None:
    lm_head, processor, hidden, logits = head()
    of = Metadata(max_num_logprobs=2, logprob_token_ids={0: [5, 9], 4: [999], 2: []})
    out = vllm.HeadSampler(lm_head, processor)(hidden, of)
    assert_told(out.logprobs_tensors, Sampler("raw_logprobs").told(logits.log_softmax(-1), logits.argmax(-1), of))
    tokens = torch.randint(V, (6,))
    found = vllm.HeadSampler(lm_head, processor).gather_logprobs(hidden, 4, tokens)
    assert_told(found, Sampler("raw_logprobs").told(logits.log_softmax(-1), tokens, Metadata(max_num_logprobs=4)))


def test_refused_by_name() -> None:
    lm_head, processor, hidden, _ = head()
    sampler = vllm.HeadSampler(lm_head, processor)

    class Custom:
        pass

    for name, of in (
        ("penalties", Metadata(no_penalties=False)),
        ("allowed_token_ids_mask", Metadata(allowed_token_ids_mask=torch.zeros(6, V, dtype=torch.bool))),
        ("bad_words_token_ids", Metadata(bad_words_token_ids={0: [[1]]})),
        ("LogitBiasLogitsProcessor", Metadata(logitsprocs=processors(more=[LogitBiasLogitsProcessor({0: {1: 2.0}})]))),
        ("Custom", Metadata(logitsprocs=processors(more=[Custom()]))),
        ("max_num_logprobs = -1", Metadata(max_num_logprobs=-1)),
        ("max_num_logprobs = 1025", Metadata(max_num_logprobs=1025)),
        (
            "thinking_budget_state_holder",
            Metadata(thinking_budget_state_holder=SimpleNamespace(has_tracked_requests=lambda: True)),
        ),
    ):
        with pytest.raises(NotImplementedError, match=name):
            sampler(hidden, of)
    with pytest.raises(NotImplementedError, match="raw_logits"):
        vllm.HeadSampler(lm_head, processor, logprobs_mode="raw_logits")
    with pytest.raises(NotImplementedError, match="logprob_token_ids"):
        sampler(hidden, Metadata(logprob_token_ids={0: [1]}), logprobs_mode_override="processed_logprobs")
    with pytest.raises(NotImplementedError, match="num_logprobs = -1"):
        sampler.gather_logprobs(hidden, -1, torch.zeros(6, dtype=torch.int64))
    with pytest.raises(TypeError, match="'temperature'; expected backend or strict"):
        vllm.HeadSampler(lm_head, processor, temperature=0.5)
    with pytest.raises(NotImplementedError, match="quantised"):
        vllm.HeadSampler(SimpleNamespace(qweight=torch.zeros(1)))
    lm_head.num_added_embeddings = 64
    with pytest.raises(NotImplementedError, match="added"):
        vllm.HeadSampler(lm_head, processor)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_vllms_own_sampler(mode: str) -> None:
    """Where vLLM is installed: tokens that are certain, and what is told of them."""
    try:
        real = importlib.import_module("vllm.v1.sample.sampler").Sampler(mode)
    except ImportError as error:
        pytest.skip(f"no vLLM: {error}")
    lm_head, processor, hidden, logits = head()
    certain = {**MIXED, "top_k": torch.tensor([1, V, 1, 1, 1, 1])}
    for of in (Metadata(max_num_logprobs=5), Metadata(**certain, max_num_logprobs=5), Metadata(max_num_logprobs=0)):
        theirs = real.forward(logits.clone(), of)
        ours = vllm.HeadSampler(lm_head, processor, logprobs_mode=mode)(hidden, of)
        assert torch.equal(ours.sampled_token_ids, theirs.sampled_token_ids)
        ids, logprobs, ranks = theirs.logprobs_tensors[:3]
        assert_told(ours.logprobs_tensors, (ids.long(), logprobs, ranks))
