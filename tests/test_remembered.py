"""Plans that are remembered: a call that looks like one before gives what it would have given first."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard import plan, remembered
from vocabshard.testing.compare import assert_same_bytes


@pytest.fixture(autouse=True)
def none_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_plans", {})


def problem(seed: int = 0, n: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 40, (n,), generator=g)
    return torch.randn(n, 24, generator=g), torch.randn(48, 24, generator=g), target


def first(*operands: Tensor, **options) -> Tensor:
    """The call as if there had been none before."""
    kept = dict(remembered._plans)
    remembered._plans.clear()
    result = vs.linear_logp(*operands, validate=False, **options)
    remembered._plans.clear()
    remembered._plans.update(kept)
    return result


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made = [0]
    original = plan.make_plan

    def counting(*args):
        made[0] += 1
        return original(*args)

    monkeypatch.setattr("vocabshard.functional.make_plan", counting)
    return made


@pytest.mark.parametrize("options", [{}, {"real_vocab_size": 41, "softcap": 3.0, "temperature": 0.7}], ids=str)
def test_other_values_in_tensors_that_look_the_same(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_plans(monkeypatch)
    for seed in range(3):
        operands = problem(seed)
        assert_same_bytes(vs.linear_logp(*operands, validate=False, **options), first(*operands, **options))
    assert made[0] == 1 + 3  # one, and that of `first` three times


def test_temperatures_of_rows_are_read_every_time() -> None:
    hidden, weight, target = problem()
    for value in (0.5, 2.0, float("nan")):
        rows = torch.full((5,), value)
        got = vs.linear_logp(hidden, weight, target, temperature=rows, validate=False)
        assert_same_bytes(got, first(hidden, weight, target, temperature=rows))
    assert got.isnan().all()
    with pytest.raises(ValueError, match="one per row"):
        vs.linear_logp(hidden, weight, target, temperature=rows[:4], validate=False)


def test_gradients_of_remembered_calls() -> None:
    grads = []
    for _ in range(2):
        hidden, weight, target = problem()
        vs.linear_logp(hidden, weight, target, validate=False)  # looks the same but for what requires a gradient
        weight.requires_grad_()
        vs.linear_logp(hidden, weight, target, validate=False).sum().backward()
        with torch.no_grad():
            assert not vs.linear_logp(hidden, weight, target, validate=False).requires_grad
        grads.append(weight.grad)
    assert_same_bytes(*grads)


@pytest.mark.parametrize(
    "other, error",
    [
        ({"ignore_index": True}, TypeError),
        ({"temperature": True}, TypeError),
        ({"softcap": True}, ValueError),
        ({"backend": "none"}, ValueError),
        ({"sampling": 1}, TypeError),
        ({"cut": torch.ones(5)}, (TypeError, ValueError)),
        ({"topk": -1}, ValueError),
        ({"global_vocab_size": 47}, ValueError),
        ({"contract": "another"}, vs.ContractError),
    ],
    ids=str,
)
def test_bad_options_after_good_ones_that_equal_them(other: dict, error) -> None:
    good = {"ignore_index": 1, "temperature": 1.0, "softcap": 1.0, "global_vocab_size": 48}
    vs.linear_logp(*problem(), validate=False, **good)
    with pytest.raises(error):
        vs.linear_logp(*problem(), validate=False, **{**good, **other})


def test_bad_tensors_after_good_ones() -> None:
    hidden, weight, target = problem()
    vs.linear_logp(hidden, weight, target, validate=False)
    for bad in ((hidden[:4], weight, target), (hidden, weight[:, :8], target), (hidden, weight.bfloat16(), target)):
        with pytest.raises((ValueError, TypeError)):
            vs.linear_logp(*bad, validate=False)
    freed = hidden.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no storage"):
        vs.linear_logp(freed, weight, target, validate=False)


def test_values_are_looked_at_in_every_call_that_validates() -> None:
    hidden, weight, target = problem()
    vs.linear_logp(hidden, weight, target)
    with pytest.raises(ValueError, match="target_ids"):
        vs.linear_logp(hidden, weight, target + 1000)
    vs.linear_logp(hidden, weight, target, validate=False)
    with pytest.raises(ValueError, match="target_ids"):
        vs.linear_logp(hidden, weight, target + 1000, validate=True)


def test_autocast_and_lazy_negation_are_seen() -> None:
    hidden, weight, target = problem()
    plain = vs.linear_logp(hidden, weight, target, validate=False)
    with torch.autocast("cpu", torch.bfloat16):
        cast = vs.linear_logp(hidden, weight, target, validate=False)
    assert_same_bytes(cast, first(hidden.bfloat16(), weight.bfloat16(), target))
    negative = torch.complex(torch.zeros_like(hidden), -hidden).conj().imag
    assert negative.is_neg()
    assert_same_bytes(vs.linear_logp(negative, weight, target, validate=False), plain)


def test_nothing_of_a_call_is_kept_alive() -> None:
    hidden, weight, target = problem()
    weight = torch.nn.Parameter(weight)
    rows = torch.full((5,), 0.5)
    for temperature in (None, rows):
        vs.linear_logp(hidden, weight, target, temperature=temperature, validate=False)
    assert len(remembered._plans) == 2
    gone = [weakref.ref(t) for t in (hidden, weight, target, rows)]
    del hidden, weight, target, rows, temperature
    gc.collect()
    assert [r() for r in gone] == [None] * 4


def test_provenance_of_remembered_calls() -> None:
    for options in ({}, {"temperature": 0.5}, {"temperature": torch.full((5,), 0.5)}, {"softcap": 3.0}):
        told = []
        for _ in range(2):
            for entropy in (False, True):
                out = vs.linear_logp(*problem(), return_lse=True, return_entropy=entropy, validate=False, **options)
                told.append(out.provenance)
        assert told[0] == told[2] == vs.provenance(*problem(), validate=False, **options)
        assert told[1] == told[3] == vs.provenance(*problem(), validate=False, return_entropy=True, **options)
        assert told[0] != told[1]


def test_provenance_has_the_temperature_of_its_own_call() -> None:
    hidden, weight, target = problem()
    for temperature in (torch.tensor(0.5), torch.tensor(2.0), torch.full((5,), 2.0), torch.tensor(1.0)):
        expected = vs.provenance(hidden, weight, target, temperature=temperature, validate=False)
        scored = vs.linear_logp(hidden, weight, target, temperature=temperature, return_lse=True, validate=False)
        drawn = vs.vocab_parallel_sample(
            hidden, weight, program=vs.SamplingProgram(), seed=1, temperature=temperature, validate=False
        )
        for told in (scored.provenance, drawn.provenance):
            assert (told.temperature, told.inv_temperature) == (expected.temperature, expected.inv_temperature)


def test_plans_of_a_shard_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_plans(monkeypatch)
    hidden, weight, target = problem()
    shards = vs.VocabShard(0, 48, 48, 48), vs.VocabShard(0, 48, 40, 48)
    results = [[vs.linear_logp(hidden, weight, target, shard=s, validate=False) for s in shards] for _ in range(3)]
    assert made[0] == 2 and not remembered._plans
    assert_same_bytes(results[0][0], results[2][0])
    assert_same_bytes(results[0][1], results[2][1])
    assert not torch.equal(*results[0])
    gone = weakref.ref(shards[0])
    del shards
    gc.collect()
    assert gone() is None


def test_a_shard_goes_with_its_last_reference() -> None:
    """Without a collection: what outlives destroy_process_group can abort a process at its exit."""
    shard, operands = vs.VocabShard(0, 48, 48, 48), problem()
    gc.disable()
    try:
        for _ in range(2):
            vs.linear_logp(*operands, shard=shard, validate=False)
        assert shard.plans
        gone = weakref.ref(shard)
        del shard
        assert gone() is None
    finally:
        gc.enable()


def test_grad_options_are_part_of_what_a_plan_is_kept_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_plans(monkeypatch)
    hidden, weight, target = problem()
    weight.requires_grad_()

    def call(**options) -> vs.LogpOutput:
        grad_options = vs.GradOptions(**options)
        return vs.linear_logp(hidden, weight, target, validate=False, return_lse=True, grad_options=grad_options)

    outs = [call(save_logits_budget=budget) for budget in (0, 1 << 20, "auto", 0, 1 << 20, "auto")]
    assert made[0] == 3 and [out.provenance.saved_rows for out in outs] == [0, 5, 5, 0, 5, 5]
    monkeypatch.setattr("vocabshard.passes.free_bytes", lambda device: 0)
    assert call(save_logits_budget="auto").provenance.saved_rows == 0  # each call tells what it kept itself
    assert outs[-1].provenance.saved_rows == 5 and made[0] == 3
    with pytest.raises(TypeError, match="save_logits_budget"):
        call(save_logits_budget=True)
    with pytest.raises(ValueError, match="wire_dtype"):
        call(wire_dtype="torch.float32")
    before = made[0]
    for _ in range(2):  # a tensor of one call is not remembered
        main_grad = torch.zeros_like(weight)
        call(main_grad=main_grad).logp.sum().backward()
        assert main_grad.any()
    assert made[0] == before + 2
