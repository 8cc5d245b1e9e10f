"""Bad input: one clear error that says what was expected, what came and what to do."""

from __future__ import annotations

import pytest
import torch

import vocabshard as vs

H, W, T = torch.randn(4, 8), torch.randn(20, 8), torch.tensor([0, 1, 2, 3])
INF, NAN = float("inf"), float("nan")

GO = vs.GradOptions

BAD = {
    "hidden is no tensor": (TypeError, "hidden must be a torch.Tensor, got list", dict(hidden=[1.0])),
    "weight is no tensor": (TypeError, "weight must be a torch.Tensor, got NoneType", dict(weight=None)),
    "weight 1-D": (ValueError, r"weight must be \[V_local, D\]", dict(weight=W[0])),
    "D differs": (ValueError, r"hidden must be \[\.\.\., D\] with D = 8", dict(hidden=torch.randn(4, 7))),
    "targets too short": (ValueError, "target_ids must have hidden's leading shape", dict(target_ids=T[:3])),
    "targets transposed": (ValueError, "leading shape", dict(target_ids=T[:, None])),
    "bias too long": (ValueError, r"bias must be \[V_local\] = \[20\]", dict(bias=torch.zeros(21))),
    "float targets": (TypeError, "target_ids must be int32, int64, got float32", dict(target_ids=T.float())),
    "bool targets": (TypeError, "target_ids must be int32, int64", dict(target_ids=T.bool())),
    "fp64 hidden": (TypeError, "hidden must be float32, bfloat16, float16", dict(hidden=H.double())),
    "mixed dtypes": (TypeError, r"hidden is bfloat16 and weight is float32; cast one", dict(hidden=H.bfloat16())),
    "int bias": (TypeError, "bias must be float32", dict(bias=torch.zeros(20, dtype=torch.int32))),
    "meta hidden": (ValueError, "hidden is on the meta device", dict(hidden=H.to("meta"))),
    "meta weight": (ValueError, "weight is on the meta device", dict(weight=W.to("meta"))),
    "sparse weight": (TypeError, "weight must be a dense", dict(weight=W.to_sparse())),
    "target out of range": (ValueError, r"target_ids\[1\] is 20", dict(target_ids=torch.tensor([0, 20, 2, 3]))),
    "target in padding": (ValueError, r"target_ids\[3\] is 3", dict(real_vocab_size=3)),
    "temperature 0": (ValueError, "temperature must be positive", dict(temperature=0.0)),
    "temperature negative": (ValueError, "temperature must be positive", dict(temperature=-1)),
    "temperature inf": (ValueError, "temperature must be positive and finite", dict(temperature=INF)),
    "temperature nan": (ValueError, "temperature must be positive and finite", dict(temperature=NAN)),
    "temperature tiny": (ValueError, "reciprocal overflows", dict(temperature=1e-40)),
    "temperature 0-dim": (ValueError, "temperature must be positive", dict(temperature=torch.tensor(0.0))),
    "temperature text": (TypeError, "temperature must be a number", dict(temperature="hot")),
    "temperature int tensor": (TypeError, "floating-point", dict(temperature=torch.ones(4, dtype=torch.int64))),
    "temperature wrong shape": (ValueError, "one per row", dict(temperature=torch.ones(5))),
    "temperature with grad": (NotImplementedError, "detach", dict(temperature=torch.ones(4, requires_grad=True))),
    "bad row of temperature": (ValueError, "in row 2", dict(temperature=torch.tensor([1.0, 1.0, 0.0, 1.0]))),
    "softcap 0": (ValueError, "softcap must be a finite positive", dict(softcap=0.0)),
    "softcap negative": (ValueError, "softcap must be", dict(softcap=-3.0)),
    "softcap bool": (ValueError, "softcap must be", dict(softcap=True)),
    "softcap nan": (ValueError, "softcap must be", dict(softcap=NAN)),
    "ignore_index float": (TypeError, "ignore_index must be an int", dict(ignore_index=1.5)),
    "invalid": (ValueError, "invalid must be", dict(invalid="drop")),
    "validate": (TypeError, "validate must be", dict(validate=1)),
    "backend": (ValueError, "backend must be one of auto", dict(backend="tpu")),
    "start without group": (ValueError, "vocab_start_index is 16 without", dict(vocab_start_index=16)),
    "size without group": (ValueError, "global_vocab_size is 40", dict(global_vocab_size=40)),
    "real too large": (ValueError, "real_vocab_size must lie", dict(real_vocab_size=21)),
    "shard is no shard": (TypeError, "shard must be a VocabShard", dict(shard=(0, 20))),
    "shard of another size": (ValueError, "24 columns, but 20 came", dict(shard=vs.VocabShard(0, 24, 24, 24))),
    "group without torch.distributed": (ValueError, "not initialised", dict(tp_group=object())),
    "sampling": (TypeError, "SamplingProgram", dict(sampling=object())),
    "cut": (ValueError, "without the program", dict(cut=torch.zeros(4))),
    "ordered torch": (NotImplementedError, "one chain", dict(grad_options=GO(reduce="ordered"), backend="torch")),
    "budget": (ValueError, "at least 0 bytes, got -1", dict(grad_options=GO(save_logits_budget=-1))),
    "budget type": (TypeError, "number of bytes or", dict(grad_options=GO(save_logits_budget=1.5))),
    "reduce": (ValueError, "reduce must be", dict(grad_options=GO(reduce="tree"))),
    "wire_dtype": (ValueError, "wire_dtype must be", dict(grad_options=GO(wire_dtype=torch.float16))),
    "wire of ordered": (
        ValueError,
        "leave wire_dtype",
        dict(grad_options=GO(reduce="ordered", wire_dtype=torch.bfloat16)),
    ),
    "main_grad dtype": (TypeError, "main_grad must be float32", dict(grad_options=GO(main_grad=W.bfloat16()))),
    "main_grad shape": (ValueError, "main_grad must be contiguous", dict(grad_options=GO(main_grad=W[1:].clone()))),
    "main_grad strides": (
        ValueError,
        "main_grad must be contiguous",
        dict(grad_options=GO(main_grad=W.t().contiguous().t())),
    ),
    "main_grad of a graph": (
        ValueError,
        "must not require a gradient",
        dict(grad_options=GO(main_grad=W.clone().requires_grad_())),
    ),
    "grad_options type": (TypeError, "grad_options must be", dict(grad_options="ordered")),
}


@pytest.mark.parametrize("name", BAD)
def test_linear_logp(name: str) -> None:
    kind, message, change = BAD[name]
    with pytest.raises(kind, match=message) as caught:
        vs.linear_logp(**{"hidden": H, "weight": W, "target_ids": T, **change})
    assert "\n" not in str(caught.value)


def test_the_good_call_behind_the_bad_ones_works() -> None:
    assert vs.linear_logp(H, W, T, grad_options=vs.GradOptions()).shape == (4,)


def test_logits_entries() -> None:
    logits = torch.randn(4, 20)
    for function in (vs.vocab_parallel_logp, vs.batch_invariant_logp):
        with pytest.raises(TypeError, match="logits must be float32"):
            function(logits.double(), T)
        with pytest.raises(ValueError, match="leading shape"):
            function(logits, T[:2])
        with pytest.raises(ValueError, match=r"target_ids\[0\] is 20"):
            function(logits, T + 20)
        with pytest.raises(ValueError, match="temperature must be positive"):
            function(logits, T, temperature=0)
        with pytest.raises(ValueError, match="scalar"):
            function(torch.tensor(1.0), torch.tensor(0))
    with pytest.raises(TypeError, match="rows must be int32, int64"):
        vs.batch_invariant_logp(logits, T, rows=torch.ones(4))


def test_module_refuses_unknown_options() -> None:
    with pytest.raises(TypeError, match="unknown option 'temprature'"):
        vs.VocabParallelLinearLogp(temprature=0.7)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 20, 21, 20), "real_vocab_size must lie"),
        ((4, 2, 20, 20), "0 <= start <= stop"),
        ((0, 16, 20, 20), "shards end at 16"),
        ((4, 20, 20, 20), "leave a gap"),
        ((0, 30, 20, 20), "0 <= start <= stop"),
    ],
)
def test_vocab_shard(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vs.VocabShard(*arguments)
    with pytest.raises(TypeError, match="must be an int"):
        vs.VocabShard(0, 20.0, 20, 20)  # type: ignore[arg-type]
