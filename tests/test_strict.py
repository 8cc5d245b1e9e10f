"""Strict mode, contracts and provenance: what would change bits is refused, and the error names the field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard import contract as C
from vocabshard import kernels
from vocabshard.testing.compare import assert_same_bytes

D, V = 16, 100


@pytest.fixture(autouse=True)
def fresh_table():
    kernels.select_backend.cache_clear()
    yield
    kernels.select_backend.cache_clear()


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return (
        torch.randn(5, D, generator=g).to(dtype),
        torch.randn(V, D, generator=g).to(dtype),
        torch.randint(0, V, (5,), generator=g),
    )


def stated(**changed: Any) -> vs.LogprobContract:
    return vs.LogprobContract(**{"role": "trainer", "weight_dtype": "fp32", "real_vocab_size": V, **changed})


def refused(field: str, **options: Any) -> str:
    hidden, weight, target = problem()
    with pytest.raises(vs.ContractError) as caught:
        vs.linear_logp(hidden, weight, target, **options)
    assert caught.value.field == field and field in str(caught.value)
    return str(caught.value)


def test_contract_bearing_calls_pass_and_keep_their_bytes() -> None:
    hidden, weight, target = problem()
    want = vs.linear_logp(hidden, weight, target, temperature=0.7)
    contract = stated(temperature=0.7, projection_id="fma-chain", shard_ranges=((0, V),))
    for options in ({"strict": True}, {"contract": C.CONTRACT_ID}, {"contract": contract}):
        assert_same_bytes(vs.linear_logp(hidden, weight, target, temperature=0.7, **options), want)


def test_library_products_are_refused() -> None:
    text = refused("backend", strict=True, backend="torch")
    assert "F.linear" in text and "strict=False" in text and "cpu: " in text


def test_unvalidated_projections_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = kernels.row("cpu")
    monkeypatch.setitem(kernels._ROWS, "cpu", replace(cpu, projection=lambda site: "triton-sm80"))
    assert "no goldens" in refused("projection", strict=True)


def test_constants_cannot_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(C, "SPAN", 150)
    assert "reinstall" in refused("span", strict=True)


@pytest.mark.parametrize("name", ["VOCABSHARD_TILE", "PTXAS_OPTIONS"])
def test_environment_knobs_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "32")
    hidden, weight, target = problem()
    vs.linear_logp(hidden, weight, target)
    if name == "PTXAS_OPTIONS":  # the CPU kernels know nothing of it
        vs.linear_logp(hidden, weight, target, strict=True)
        monkeypatch.setitem(kernels._ROWS, "cpu", replace(kernels.row("cpu"), bit_knobs=(name,)))
    assert "unset it" in refused(f"environment variable {name}", strict=True)


def test_a_head_that_autocast_casts_is_refused() -> None:
    hidden, weight, target = problem()
    with torch.autocast("cpu", torch.bfloat16):
        assert "bf16 under torch.autocast" in refused("hidden_dtype", strict=True)
        vs.linear_logp(hidden.bfloat16(), weight.bfloat16(), target, strict=True)


@pytest.mark.parametrize(
    "changed, field",
    [
        ({"weight_dtype": "bf16"}, "weight_dtype"),
        ({"bias_dtype": "fp32"}, "bias_dtype"),
        ({"projection_id": "hopper-k16"}, "projection_id"),
        ({"real_vocab_size": 96}, "real_vocab_size"),
        ({"padded_vocab_size": 112}, "padded_vocab_size"),
        ({"shard_ranges": ((0, 48), (48, V))}, "shard_ranges"),
        ({"softcap": 30.0}, "softcap"),
        ({"temperature": 0.7}, "temperature"),
        ({"temperature": "per-row"}, "temperature"),
        ({"ignore_index": 0}, "ignore_index"),
        ({"invalid": "zero"}, "invalid"),
        ({"entry": "logits that exist"}, "entry"),
    ],
)
def test_a_call_unlike_its_contract_is_refused(changed: dict[str, Any], field: str) -> None:
    refused(field, contract=stated(**changed))


def test_outputs_that_the_contract_does_not_list() -> None:
    refused("outputs", contract=stated(), return_entropy=True)
    hidden, weight, target = problem()
    vs.linear_logp(hidden, weight, target, contract=stated(outputs=("logp", "entropy")), return_entropy=True)


@pytest.mark.parametrize(
    "changed, field",
    [
        ({"role": "critic"}, "role"),
        ({"weight_dtype": "fp8"}, "weight_dtype"),
        ({"projection_id": "library"}, "projection_id"),
        ({"reduction": "mean"}, "reduction"),
        ({"mask": "weights"}, "mask"),
        ({"outputs": ("hidden",)}, "outputs"),
        ({"tile": 128}, "tile"),
        ({"exp_id": "ex2.approx"}, "exp_id"),
        ({"tree_id": "any"}, "tree_id"),
        ({"sum_id": "fp32"}, "sum_id"),
        ({"contract_id": "vocabshard-logp-v0"}, "contract_id"),
        ({"shard_ranges": ((0, 40), (40, V))}, "shard_ranges"),
        ({"shard_ranges": ((0, 32), (48, V))}, "shard_ranges"),
        ({"shard_ranges": ((0, V),), "padded_vocab_size": 112}, "padded_vocab_size"),
        ({"shard_ranges": ()}, "shard_ranges"),
        ({"shard_ranges": ((0, 16), (16,))}, "shard_ranges"),
        ({"shard_ranges": ((0, 16), (16, 0))}, "shard_ranges"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": 1e60}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"softcap": -30.0}, "softcap"),
        ({"softcap": float("nan")}, "softcap"),
        ({"ignore_index": None}, "ignore_index"),
        ({"real_vocab_size": 0}, "real_vocab_size"),
        ({"real_vocab_size": 100, "padded_vocab_size": 96}, "real_vocab_size"),
        ({"outputs": "logp"}, "outputs"),
    ],
)
def test_contracts_that_no_build_has(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(vs.ContractError) as caught:
        stated(**changed)
    assert caught.value.field == field and str(caught.value).startswith(field)


def test_trainer_and_engine_compare_what_they_built() -> None:
    trainer = stated(temperature=0.7, shard_ranges=((0, 48), (48, V)), outputs=("logp", "entropy"))
    engine = replace(trainer, role="rollout", shard_ranges=None, outputs=("logp", "logits"), mask="keep_mask")
    trainer.check_same(engine)
    assert trainer.fingerprint == engine.fingerprint
    sent = vs.LogprobContract.from_dict(json.loads(json.dumps(engine.as_dict())))
    assert sent == engine and vs.LogprobContract.from_dict(json.loads(json.dumps(trainer.as_dict()))) == trainer
    for changed, field in (
        ({"temperature": 1.0}, "temperature"),
        ({"weight_dtype": "bf16", "hidden_dtype": "fp32"}, "weight_dtype"),
        ({"ignore_index": -1}, "ignore_index"),
        ({"softcap": 50.0}, "softcap"),
    ):
        other = replace(engine, **changed)
        with pytest.raises(vs.ContractError, match=r"trainer has .*, rollout") as caught:
            trainer.check_same(other)
        assert caught.value.field == field and trainer.fingerprint != other.fingerprint
    one_form = stated(temperature=1, softcap=30, outputs=["logp"], shard_ranges=[[0, V]])
    other_form = stated(softcap=30.0, shard_ranges=((0, V),))
    assert one_form == other_form and one_form.fingerprint == other_form.fingerprint
    with pytest.raises(vs.ContractError, match="kernel: no field"):
        vs.LogprobContract.from_dict({**trainer.as_dict(), "kernel": "cpu"})


def test_provenance_says_what_ran() -> None:
    hidden, weight, target = problem(torch.bfloat16)
    p = vs.provenance(hidden, weight, target, torch.zeros(V), temperature=0.5, return_entropy=True, real_vocab_size=90)
    said = json.loads(json.dumps(p.as_dict()))
    assert said["projection_id"] == "fma-chain" and said["k_step"] == 1 and said["tile"] == 16
    assert (said["hidden_dtype"], said["weight_dtype"], said["bias_dtype"]) == ("bf16", "bf16", "fp32")
    assert said["temperature"] == "scalar" and said["inv_temperature"] == 2.0
    assert said["real_vocab_size"] == 90 and said["padded_vocab_size"] == V and said["outputs"] == ["entropy"]
    assert said["architecture"] and said["compute_capability"] == "" and said["build"].startswith(vs.__version__)


def test_the_fingerprint_holds_what_bits_depend_on_and_nothing_else() -> None:
    hidden, weight, target = problem()
    p = vs.provenance(hidden, weight, target)
    neutral = {"backend": "sm90", "device": "cuda", "architecture": "sm_90", "compute_capability": "9.0"}
    neutral |= {"build": "other", "shard_ranges": ((0, 48), (48, V)), "padded_vocab_size": 128, "outputs": ("entropy",)}
    assert replace(p, **neutral).fingerprint == p.fingerprint
    for changed in (
        {"projection_id": "hopper-k16"},
        {"weight_dtype": "bf16"},
        {"softcap": 30.0},
        {"inv_temperature": 2.0, "temperature": "scalar"},
        {"real_vocab_size": 99},
        {"ignore_index": 0},
        {"tile": 32},
    ):
        assert replace(p, **changed).fingerprint != p.fingerprint, changed
    capped = [vs.provenance(hidden, weight, target, softcap=softcap) for softcap in (30, 30.0)]
    assert capped[0].fingerprint == capped[1].fingerprint
    ordinary = vs.provenance(hidden, weight, target, backend="torch")
    assert replace(ordinary, build="other").fingerprint != ordinary.fingerprint, "without the contract all counts"


def test_operators_by_name() -> None:
    assert vs.get_op("linear_logp") is vs.linear_logp
    with pytest.raises(ValueError, match=r"expected one of linear_logp, .*got 'cross_entropy'"):
        vs.get_op("cross_entropy")
    hidden, weight, target = problem()
    for name, arguments in (
        ("linear_logp", (hidden, weight, target)),
        ("vocab_parallel_logp", (hidden @ weight.T, target)),
        ("batch_invariant_logp", (hidden @ weight.T, target)),
    ):
        with pytest.raises(vs.ContractError, match="was asked for"):
            vs.get_op(name)(*arguments, contract="vocabshard-logp-v0")
        vs.get_op(name)(*arguments, contract=C.CONTRACT_ID, strict=True)


def test_get_logprob_op() -> None:
    hidden, weight, target = problem()
    found = vs.get_logprob_op(stated(temperature=0.7), device="cpu")
    want = vs.linear_logp(hidden, weight, target, temperature=0.7)
    assert_same_bytes(found.op(hidden, weight, target, temperature=0.7), want)
    with pytest.raises(vs.ContractError, match="temperature: asked for"):
        found.op(hidden, weight, target)
    assert found.provenance.backend == "cpu" and found.provenance.projection_id == "fma-chain"
    assert dict(found.provenance.rejected).keys() == {"sm90", "triton", "torch"}
    assert found.provenance.contract_fingerprint == stated(temperature=0.7, role="rollout").fingerprint
    assert "linear_logp" in found.capability.entries and found.capability.devices == ("cpu",)
    logits = vs.get_logprob_op(stated(entry="logits that exist"), device="cpu").op
    full = vs.linear_logp(hidden, weight, target, return_logits=True)
    assert_same_bytes(logits(full.logits, target).logp, full.logp)
    by_id = vs.get_logprob_op(C.CONTRACT_ID, "cpu", device="cpu")
    assert_same_bytes(by_id.op(hidden, weight, target), full.logp)


@pytest.mark.parametrize("backend, said", [("torch", "F.linear"), ("sm90", "needs an NVIDIA GPU"), ("cudnn", "one of")])
def test_get_logprob_op_takes_no_other_backend(backend: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(vs.ContractError, match="device: asked for 'cuda', found no"):
        patch.setattr("torch.cuda.is_available", lambda: False)
        vs.get_logprob_op(stated(), device="cuda")
    with pytest.raises(vs.ContractError, match=said) as caught:
        vs.get_logprob_op(stated(), backend, device="cpu")
    assert caught.value.field == "backend"
    with pytest.raises(vs.ContractError, match="projection_id: asked for 'hopper-k16'"):
        vs.get_logprob_op(stated(projection_id="hopper-k16"), device="cpu")
