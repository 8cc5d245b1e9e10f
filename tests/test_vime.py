"""The Vime provider, driven by a stand-in for the engine: values, bytes, masks, gradients, and every refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.integrations import vime
from vocabshard.integrations.vime_replay import mask_of_ids
from vocabshard.sampling import left_out
from vocabshard.testing import vime_engine as engine
from vocabshard.testing.compare import assert_same_bytes

T, D, REAL, PADDED = 9, 16, 100, 112
SIZES = {"real_vocab_size": REAL, "padded_vocab_size": PADDED}


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(T, D, generator=g).to(dtype), torch.randn(PADDED, D, generator=g).to(dtype)
    weight[REAL:] = float("nan")
    return hidden, weight, torch.randn(PADDED, generator=g), torch.randint(0, REAL, (T,), generator=g)


def from_hidden(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **changed: Any) -> engine.Request:
    partition = engine.Partition(0, PADDED, REAL, PADDED)
    context = engine.Context(hidden, engine.Projection(weight, bias), partition)
    return engine.Request(engine.NoLogits(), target, context=context, **changed)


def keep_mask(target: Tensor) -> Tensor:
    mask = torch.rand(T, PADDED, generator=torch.Generator().manual_seed(1)) < 0.3
    mask[torch.arange(T), target] = True
    mask[2, target[2]] = False  # a target that was not kept
    mask[3] = False  # nothing kept
    return mask


def never() -> Any:
    raise AssertionError("the engine fell back")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [None, 0.7, torch.tensor(0.7)])
def test_scores_are_those_of_linear_logp(dtype: torch.dtype, temperature: float | Tensor | None) -> None:
    hidden, weight, bias, target = tensors(dtype)
    want = vs.linear_logp(
        hidden, weight, target, bias, temperature=temperature, real_vocab_size=REAL, return_entropy=True,
        return_logits=True,
    )  # fmt: skip
    request = from_hidden(hidden, weight, bias, target, temperature=temperature, with_entropy=True)
    logp, entropy, result = engine.compute(request, vime.provider, "auto", never)
    assert_same_bytes(logp, want.logp[:, None])
    assert_same_bytes(entropy, want.entropy)
    assert result.backend_id == "vocabshard-cpu" and result.contract_id == "vocabshard-logp-v1"
    assert result.provenance["projection_id"] == "fma-chain" and result.provenance["reads_logits"] is False
    given = engine.Request(want.logits, target, temperature=temperature, with_entropy=True, metadata=SIZES)
    logp, entropy, result = engine.compute(given, vime.strict_provider, "strict", never)
    assert_same_bytes(logp, want.logp[:, None], "both entries")
    assert_same_bytes(entropy, want.entropy)
    assert result.provenance["projection_id"] == "given-logits" and result.provenance["mode"] == "strict"
    scaled = replace(
        given, logits=want.logits, temperature=7.0, metadata={**SIZES, "logits_are_temperature_scaled": True}
    )
    unscaled = vs.linear_logp(hidden, weight, target, bias, real_vocab_size=REAL)
    assert_same_bytes(engine.compute(scaled, vime.provider, "auto", never)[0], unscaled[:, None], "not twice")


@pytest.mark.parametrize("chunk_size", [-1, 1, 4])
@pytest.mark.parametrize("by_row", [False, True])
def test_a_keep_mask_is_honoured_to_the_byte(chunk_size: int, by_row: bool) -> None:
    hidden, weight, bias, target = tensors()
    mask = keep_mask(target)
    temperature = torch.linspace(0.5, 1.5, T) if by_row else 0.7
    full = vs.linear_logp(hidden, weight, target, bias, real_vocab_size=REAL, return_logits=True).logits
    masked = full.masked_fill(~mask, float("-inf"))
    want = vs.vocab_parallel_logp(masked, target, temperature=temperature, real_vocab_size=REAL).logp
    everything = vs.linear_logp(
        hidden, weight, target, bias, temperature=temperature, real_vocab_size=REAL, return_entropy=True
    )
    assert torch.isneginf(want[2:4]).all()
    changed = {"log_prob_keep_mask": mask, "temperature": temperature, "chunk_size": chunk_size, "with_entropy": True}
    for request in (
        from_hidden(hidden, weight, bias, target, **changed),
        engine.Request(full, target, metadata=SIZES, **changed),
    ):
        logp, entropy, result = engine.compute(request, vime.strict_provider, "strict", never)
        assert_same_bytes(logp, want[:, None], "kept columns alone")
        assert_same_bytes(entropy, everything.entropy, "the entropy is of the whole distribution")
        assert result.provenance["keep_mask"] is True
    no_entropy = from_hidden(hidden, weight, bias, target, **{**changed, "with_entropy": False})
    assert_same_bytes(engine.compute(no_entropy, vime.provider, "auto", never)[0], want[:, None])


PROGRAM = vs.SamplingProgram.of(temperature=0.7, top_p=0.9)


@pytest.mark.parametrize("in_program", [True, False])
def test_top_p_is_replayed_to_the_byte(in_program: bool) -> None:
    """By program and cut, by the program alone, and by the ids that were kept."""
    hidden, weight, bias, _ = tensors()
    drawn = vs.vocab_parallel_sample(hidden, weight, bias, program=PROGRAM, seed=3, real_vocab_size=REAL)
    target = drawn.token
    whole = vs.linear_logp(
        hidden, weight, target, bias, temperature=0.7, real_vocab_size=REAL, return_entropy=True, return_logits=True
    )
    assert not torch.equal(whole.logp, drawn.logp)
    program = PROGRAM if in_program else [["top_p", 0.9]]
    changed = {"temperature": 0.7, "with_entropy": True}
    replay = {"sampling": program, "sampling_cut": drawn.cut}
    ids = torch.full((T, 40), -1)
    for n, kept in enumerate(~left_out(whole.logits[:, :REAL], 0, drawn.cut)):
        where = kept.nonzero()[:, 0]
        ids[n, : len(where)] = where
    requests = {
        "hidden, cut": from_hidden(hidden, weight, bias, target, metadata=replay, **changed),
        "hidden, cut found": from_hidden(hidden, weight, bias, target, metadata={"sampling": program}, **changed),
        "logits, cut": engine.Request(whole.logits, target, metadata={**SIZES, **replay}, **changed),
        "hidden, ids": from_hidden(hidden, weight, bias, target, metadata={"top_p_sparse_token_ids": ids}, **changed),
        "logits, ids": engine.Request(
            whole.logits, target, metadata={**SIZES, "top_p_sparse_token_ids": ids}, **changed
        ),
    }
    for name, request in requests.items():
        logp, entropy, result = engine.compute(request, vime.strict_provider, "strict", never)
        assert_same_bytes(logp, drawn.logp[:, None], name)
        assert_same_bytes(entropy, whole.entropy, "the entropy is of the whole distribution")
        assert (result.provenance["replayed"] is not None) == ("cut" in name)
    leaf = hidden.clone().requires_grad_()
    logp, _, _ = engine.compute(
        from_hidden(leaf, weight, bias, target, metadata=replay, temperature=0.7), vime.provider, "auto", never
    )
    logp.sum().backward()
    assert torch.isfinite(leaf.grad).all() and leaf.grad.any()
    mask = mask_of_ids(ids, T, REAL, 0)
    assert torch.equal(mask, ~left_out(whole.logits[:, :REAL], 0, drawn.cut))
    assert torch.equal(torch.cat([mask_of_ids(ids, T, w, at) for at, w in ((0, 48), (48, 0), (48, 52))], 1), mask)
    none = from_hidden(hidden, weight, bias, target, metadata={"top_p_sparse_token_ids": ids * 0 - 1}, **changed)
    assert_same_bytes(engine.compute(none, vime.provider, "auto", never)[0], whole.logp[:, None], "nothing recorded")


@pytest.mark.parametrize(
    "metadata, match",
    [
        ({"sampling_cut": torch.zeros(T, dtype=torch.int64)}, "without the program"),
        ({"sampling": PROGRAM, "sampling_cut": torch.zeros(T)}, "int64"),
        ({"sampling": [["top_p", 2.0]]}, "top_p must be"),
        ({"sampling": vs.SamplingProgram.of(temperature=0.8)}, "one of the two"),
        ({"sampling": PROGRAM, "top_p_sparse_token_ids": torch.zeros(T, 3).long()}, "one of the two"),
        ({"top_p_sparse_token_ids": torch.zeros(T + 1, 3).long()}, "beyond the ids"),
        ({"top_p_sparse_token_ids": [[1]]}, "beyond the ids"),
    ],
)
def test_replays_that_cannot_be_honoured(metadata: dict[str, Any], match: str) -> None:
    hidden, weight, bias, target = tensors()
    with pytest.raises(vime.ProviderConfigurationError, match=match):
        vime.strict_provider(from_hidden(hidden, weight, bias, target, temperature=0.7, metadata=metadata))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_gradients_are_the_engines_own(masked: bool, entropy_grad: bool) -> None:
    hidden, weight, bias, target = tensors()
    mask = keep_mask(target)
    mask[2, target[2]] = mask[3, target[3]] = True
    upstream = torch.randn(T, generator=torch.Generator().manual_seed(3))
    upstream[5] = 0
    hidden[5] = float("nan")  # counts for nothing
    results = []
    for ours in (True, False):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        request = from_hidden(*leaves, target, temperature=0.7, with_entropy=True, with_entropy_grad=entropy_grad)
        if masked:
            request = replace(request, log_prob_keep_mask=mask, chunk_size=4)
        if ours:
            logp, entropy, _ = engine.compute(request, vime.provider, "auto", never)
            assert entropy.requires_grad == entropy_grad
        else:
            with torch.no_grad():
                leaves[0][5] = 0
            logits = (leaves[0] @ leaves[1][:REAL].T + leaves[2][:REAL]).float()
            own = replace(request, log_prob_keep_mask=mask[:, :REAL] if masked else None)
            logp, entropy = engine.native(logits, own)
        loss = (logp[:, 0] * upstream)[upstream != 0].sum()
        if entropy_grad:
            loss = loss + (entropy * upstream)[upstream != 0].sum()
        loss.backward()
        results.append([x.grad for x in leaves])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.nan_to_num(7.0), want.nan_to_num(7.0), rtol=1e-4, atol=1e-5)


def test_no_rows() -> None:
    hidden, weight, bias, target = tensors()
    for mask in (None, torch.ones(0, PADDED, dtype=torch.bool)):
        request = from_hidden(hidden[:0], weight, bias, target[:0], log_prob_keep_mask=mask, with_entropy=True)
        logp, entropy, _ = engine.compute(request, vime.provider, "auto", never)
        assert logp.shape == (0, 1) and entropy.shape == (0,)


@pytest.mark.parametrize(
    "layout", [engine.Layout(), engine.Layout(2, 1, "zigzag"), engine.Layout(4, 3, "allgather")], ids=str
)
def test_rows_of_context_parallelism_are_recorded_and_change_nothing(layout: engine.Layout) -> None:
    hidden, weight, bias, target = tensors()
    request = from_hidden(hidden, weight, bias, target, token_layout=layout)
    logp, _, result = engine.compute(request, vime.provider, "auto", never)
    assert_same_bytes(logp[:, 0], vs.linear_logp(hidden, weight, target, bias, real_vocab_size=REAL))
    assert result.provenance["token_layout"] == vars(layout)


WHOLE = engine.Partition(0, PADDED, REAL, PADDED)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no real size": ({"partition": replace(WHOLE, real_size=None)}, "real vocabulary size is not declared"),
    "no padded size": ({"partition": replace(WHOLE, padded_size=None)}, "padded vocabulary size is not declared"),
    "no partition": ({"partition": None}, "real vocabulary size is not declared"),
    "two real sizes": ({"metadata": {"real_vocab_size": 99}}, "must be one positive int"),
    "a size that is no int": ({"partition": replace(WHOLE, real_size=100.0)}, "must be one positive int"),
    "more real than padded": ({"partition": replace(WHOLE, real_size=113)}, "exceeds the padded"),
    "a part of the vocabulary": ({"partition": replace(WHOLE, padded_size=224)}, "global_vocab_size is 224"),
    "another local size": ({"partition": replace(WHOLE, local_size=56)}, "local_size = 112"),
    "another start": ({"partition": replace(WHOLE, local_start=16)}, "vocab_start_index is 16"),
    "TP rank": ({"metadata": {"tp_rank": 1}}, "tp_rank is 1"),
    "TP size": ({"metadata": {"tp_world_size": 2}}, "tp_world_size is 2"),
    "CP size": ({"metadata": {"cp_world_size": 2}}, "cp_world_size is 2"),
    "CP rank": ({"metadata": {"cp_rank": 1}, "token_layout": engine.Layout(2, 0, "zigzag")}, "cp_rank is 1"),
    "a layout of one": ({"token_layout": engine.Layout(2, 0, "single")}, "does not describe 2 ranks"),
    "an unknown layout": ({"token_layout": engine.Layout(2, 0, "ring")}, "does not describe"),
    "a rank outside": ({"token_layout": engine.Layout(2, 2, "zigzag")}, "0 <= rank < world_size"),
    "no layout": ({"token_layout": None}, "token_layout"),
    "another backend": ({"metadata": {"backend": "sm90"}}, "backend"),
    "the library": ({"metadata": {"backend": "torch"}}, "does not bear it"),
    "another contract": ({"metadata": {"contract_id": "v0"}}, "contract_id"),
    "sparse top-p": ({"metadata": {"top_p_sparse_token_ids": [1]}}, "top_p_sparse_token_ids must be integers"),
    "metadata that are none": ({"metadata": 7}, "must be a mapping"),
    "a mask of another shape": ({"log_prob_keep_mask": torch.ones(T, 7, dtype=torch.bool)}, "must be bool"),
    "a mask of numbers": ({"log_prob_keep_mask": torch.ones(T, PADDED)}, "must be bool"),
    "a bad temperature": ({"temperature": -1.0}, "temperature: asked for -1.0, found a positive"),
    "dtypes": ({"hidden": torch.zeros(T, D, dtype=torch.bfloat16)}, "bf16|bfloat16"),
    "targets that are no integers": ({"target": torch.zeros(T) + 0.5}, "target_ids must be integers"),
    "one target": ({"target": torch.tensor(3)}, r"target_ids must be integers \[T\]"),
    "a weight of one axis": ({"weight": torch.zeros(PADDED)}, r"weight must be \[V_local, D\]"),
    "a chunk that is no int": ({"chunk_size": "all"}, "chunk_size must be an int"),
    "a softer mode": ({"metadata": {"mode": "lenient"}}, 'must be "auto" or "strict"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    changed, said = dict(REFUSED[case][0]), REFUSED[case][1]
    hidden, weight, bias, target = tensors()
    hidden, partition = changed.pop("hidden", hidden), changed.pop("partition", WHOLE)
    weight, target = changed.pop("weight", weight), changed.pop("target", target)
    context = engine.Context(hidden, engine.Projection(weight, bias), partition)
    request = engine.Request(engine.NoLogits(), target, context=context, **changed)
    if case != "a softer mode":
        assert engine.compute(request, vime.provider, "auto", lambda: ("fell", "back")) == ("fell", "back", None)
    with pytest.raises(vime.ProviderConfigurationError, match=said) as caught:
        engine.compute(request, vime.strict_provider if case != "a softer mode" else vime.provider, "strict", never)
    assert not getattr(caught.value, "linear_logp_provider_unavailable", False)


def test_logits_without_sizes_are_refused() -> None:
    request = engine.Request(torch.zeros(T, PADDED), torch.zeros(T, dtype=torch.int64))
    with pytest.raises(vime.ProviderUnavailable, match="not declared"):
        vime.provider(request)
    with pytest.raises(vime.ProviderUnavailable, match="do not cover"):
        vime.provider(replace(request, metadata={**SIZES, "padded_vocab_size": 224}))
    with pytest.raises(vime.ProviderUnavailable, match="logits must be a torch"):
        vime.provider(replace(request, logits=None, metadata=SIZES))


def test_the_mode_may_come_with_the_metadata() -> None:
    hidden, weight, bias, target = tensors()
    request = from_hidden(hidden, weight, bias, target, metadata={"mode": "strict", "backend": "sm90"})
    with pytest.raises(vime.ProviderConfigurationError, match="sm90"):
        vime.provider(request)
    good = replace(request, metadata={"mode": "strict", "backend": "cpu", "tp_rank": 0, "cp_rank": 0, **SIZES})
    assert vime.provider(good).provenance["requested_backend"] == "cpu"
