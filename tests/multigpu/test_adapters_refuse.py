"""One rank gives an adapter what it refuses: every rank raises that rank's error, and nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import vocabshard as vs
from vocabshard.integrations import liger, megatron, rl_kernel, torch_native, verl
from vocabshard.integrations.vllm import HeadSampler
from vocabshard.launching import Ranks
from vocabshard.masked import masked_linear_logp

N, D, V = 12, 16, 256
Call = Callable[..., Any]


class Place:
    """The operands of a rank, and what is wrong on one."""

    def __init__(self, ranks: Ranks) -> None:
        if ranks.world_size == 1:
            pytest.skip("needs several ranks")
        if ranks.device.type != "cpu":
            pytest.skip("some adapters validate on the CPU alone")
        g = torch.Generator().manual_seed(0)
        self.ranks, self.group = ranks, dist.group.WORLD
        self.hidden, weight = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g)
        self.weight = weight.chunk(ranks.world_size)[ranks.rank].clone()
        self.target = torch.randint(0, V, (N,), generator=g)
        self.logits = self.hidden @ self.weight.T
        self.bad = ranks.world_size - 1

    def refused(self, said: str, good: Call, wrong: Call) -> None:
        """wrong() on the last rank and good() on the others: one error on all, soon. Then all are in step again."""
        mine, began = "no error", time.monotonic()
        try:
            wrong() if self.ranks.rank == self.bad else good()
        except (TypeError, ValueError, NotImplementedError, vs.ContractError) as error:
            mine = str(error)
        everyone: list[str] = [""] * self.ranks.world_size
        dist.all_gather_object(everyone, mine)
        assert said in mine, everyone
        assert len(set(everyone)) == 1, everyone
        assert time.monotonic() - began < 30

    def each(self, call: Call, wrongs: list[tuple[str, dict[str, Any]]]) -> None:
        """`call` takes what is changed by keyword."""
        call()
        for said, changed in wrongs:
            named = said if said.startswith("different") else f"rank {self.bad} of the group: {said}"
            self.refused(named, call, lambda changed=changed: call(**changed))
        call()


@pytest.fixture
def place(ranks: Ranks) -> Place:
    return Place(ranks)


COMMON: list[tuple[str, dict[str, Any]]] = [
    ("reduction must be", {"reduction": "median"}),
    ("return_lse is not", {"return_lse": True}),
    ("linear_cross_entropy: 'tempreature' is not an option of linear_logp", {"tempreature": 1.0}),
]


def test_torch_native(place: Place) -> None:
    def call(**changed: Any) -> Tensor:
        weight = changed.pop("linear_weight", place.weight)
        given = {"tp_group": place.group, "global_vocab_size": V, **changed}
        return torch_native.linear_cross_entropy(place.hidden, weight, place.target, **given)

    wrongs = [
        *COMMON,
        ("label_smoothing must lie in", {"label_smoothing": 2.0}),
        ("z_loss must be a number", {"z_loss": "much"}),
        ("options (torch's chunking)", {"options": 4}),
        ("linear_weight must be", {"linear_weight": None}),
        ("different options", {"label_smoothing": 0.1}),
    ]
    place.each(call, wrongs)

    def smooth(**changed: Any) -> Tensor:
        return call(**{"label_smoothing": 0.1, "weight": torch.ones(V), **changed})

    place.each(
        smooth,
        [
            ("label_smoothing with softcap", {"softcap": 3.0}),
            ("weight must be [V_real]", {"weight": torch.ones(V - 1)}),
            ("weight must be a torch.Tensor", {"weight": 1.0}),
            ("different options", {"weight": None}),
            ("different options", {"real_vocab_size": V - 1}),
            ("temperature", {"temperature": -1.0}),
        ],
    )


def test_verl(place: Place) -> None:
    def call(**changed: Any) -> Any:
        hidden = changed.pop("hidden", place.hidden)
        given = {"dist_process_group": place.group, "global_vocab_size": V, **changed}
        return verl.linear_cross_entropy(hidden, place.weight, place.target, **given)

    wrongs = [
        *COMMON,
        ("grad_hidden must be", {"grad_hidden": "some"}),
        ("hidden must be a torch.Tensor", {"hidden": None}),
        ("temperature", {"temperature": "hot"}),
    ]
    place.each(call, wrongs)


def test_megatron(place: Place) -> None:
    def call(**changed: Any) -> Tensor:
        given = {"weight": place.weight, "labels": place.target, "tp_group": place.group, **changed}
        return megatron.linear_cross_entropy(place.hidden, **given)

    place.each(
        call,
        [
            *COMMON,
            ("weight must be a torch.Tensor", {"weight": None}),
            ("labels must be given", {"labels": None}),
            (
                "gradient_accumulation_fusion needs",
                {"gradient_accumulation_fusion": True, "weight": place.weight.clone().requires_grad_()},
            ),
        ],
    )

    def of_logits(**changed: Any) -> Tensor:
        given = {"vocab_parallel_logits": place.logits, "target": place.target, "tp_group": place.group, **changed}
        return megatron.vocab_parallel_cross_entropy(**given)

    wrongs: list[tuple[str, dict[str, Any]]] = [
        ("label_smoothing must lie in", {"label_smoothing": 1.0}),
        ("label_smoothing must be a number", {"label_smoothing": None}),
        ("return_entropy is not part", {"return_entropy": True}),
        ("vocab_parallel_cross_entropy: 'softcap' is not an option", {"softcap": 3.0}),
        ("vocab_parallel_logits must be", {"vocab_parallel_logits": None}),
        ("different options", {"label_smoothing": 0.3}),
    ]
    place.each(of_logits, wrongs)
    few = {"vocab_parallel_logits": place.logits[:5], "target": place.target[:5]}
    place.each(lambda **changed: of_logits(**{"label_smoothing": 0.2, **changed}), [("different", few)])


def test_liger(place: Place) -> None:
    def call(**changed: Any) -> Any:
        given = {"weight": place.weight, "target": place.target, "tp_group": place.group, **changed}
        return liger.liger_fused_linear_scaled_cross_entropy_tp(place.hidden, **given)

    place.each(
        call,
        [
            ("tiles_per_reduce must be", {"tiles_per_reduce": 3}),
            ("temperature must be a real", {"temperature": torch.ones(N)}),
            ("return_entropy must be a bool", {"return_entropy": 1}),
            ("weight must be a torch.Tensor", {"weight": None}),
        ],
    )

    def of_logits(partition: bool = False, **changed: Any) -> Tensor:
        mode = "partition" if partition else "global"
        loss = liger.LigerVocabParallelCrossEntropy(label_smoothing=0.1, label_smoothing_mode=mode)
        given = {"vocab_parallel_logits": place.logits, "target": place.target, **changed}
        return loss(tp_group=place.group, **given)

    place.each(
        of_logits,
        [
            ('label_smoothing_mode="partition"', {"partition": True}),
            ("vocab_parallel_logits must be", {"vocab_parallel_logits": [1.0]}),
            ("different", {"vocab_parallel_logits": place.logits[:5], "target": place.target[:5]}),
        ],
    )


def test_rl_kernel(place: Place) -> None:
    def call(**changed: Any) -> Tensor:
        given = {"lm_head_weight": place.weight, "target_ids": place.target, **changed}
        start = place.ranks.rank * len(place.weight)
        return rl_kernel.linear_logp(place.hidden, tp_group=place.group, vocab_start_index=start, **given)

    place.each(
        call,
        [
            ("weight must be a torch.Tensor", {"lm_head_weight": None}),
            ("target_ids must be int32, int64", {"target_ids": place.target.float()}),
        ],
    )


def test_masked(place: Place) -> None:
    def call(rows: int = N, **changed: Any) -> Tensor:
        keep = torch.ones(rows, len(place.weight), dtype=torch.bool)
        given = {"keep": keep, "tp_group": place.group, "chunk_rows": 5, **changed}
        return masked_linear_logp(place.hidden[:rows], place.weight, place.target[:rows], **given)

    place.each(
        call,
        [
            ("keep must be bool", {"keep": torch.ones(N, len(place.weight))}),
            ("hidden must be [N, D] and keep bool", {"keep": torch.ones(N, 3, dtype=torch.bool)}),
            ("chunk_rows must be", {"chunk_rows": 0}),
            ("different options", {"chunk_rows": 3}),
            ("different options", {"rows": 0}),
        ],
    )


def test_vllm(place: Place) -> None:
    def step(**changed: Any) -> Any:
        of = dict(
            temperature=torch.full((N,), 0.7), all_greedy=False, all_random=True, top_k=None, top_p=None,
            generators={}, max_num_logprobs=3, no_penalties=True, allowed_token_ids_mask=None, bad_words_token_ids={},
            logitsprocs=SimpleNamespace(argmax_invariant=[], non_argmax_invariant=[]), logprob_token_ids=None,
        )  # fmt: skip
        given = {name: changed.pop(name) for name in list(changed) if name not in of}
        hidden = given.pop("hidden", place.hidden)
        head = SimpleNamespace(weight=place.weight, org_vocab_size=V, num_embeddings_padded=V)
        sampler = HeadSampler(head, None, place.group, validate=True)
        return sampler(hidden, SimpleNamespace(**of | changed), **given)

    place.each(
        step,
        [
            ("presence, frequency and repetition penalties", {"no_penalties": False}),
            ("max_num_logprobs = 100000", {"max_num_logprobs": 100000}),
            ("logprobs_mode must be", {"logprobs_mode_override": "logits"}),
            ("different options", {"logprobs_mode_override": "processed_logprobs"}),
            ("different options", {"hidden": place.hidden[:0]}),
            ("row_keys must be", {"row_keys": torch.zeros(3, dtype=torch.int64)}),
            ("hidden must be", {"hidden": place.hidden[:, :3]}),
            ("different options", {"max_num_logprobs": None}),
        ],
    )


def test_huggingface(place: Place) -> None:
    transformers = pytest.importorskip("transformers")
    from vocabshard.integrations import huggingface as hf

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=203, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, attn_implementation="eager",
    )  # fmt: skip
    model = hf.patch_lm_head(transformers.AutoModelForCausalLM.from_config(config), place.group)
    ids = torch.randint(0, 203, (2, 7), generator=torch.Generator().manual_seed(1))

    def call(**changed: Any) -> Any:
        return model(**{"input_ids": ids, "labels": ids, **changed})

    place.each(
        call,
        [
            ("logits_to_keep with labels", {"logits_to_keep": 1}),
            ("return_dict=False with labels", {"return_dict": False}),
            ("labels must be a tensor [B, S]", {"labels": ids[0]}),
            ("num_items_in_batch must be", {"num_items_in_batch": "many"}),
        ],
    )


def test_an_empty_vocabulary(place: Place) -> None:
    with pytest.raises(ValueError, match="no token to draw"):
        vs.vocab_parallel_sample(
            place.hidden, place.weight[:0], program=vs.SamplingProgram(), seed=1, tp_group=dist.new_group()
        )
