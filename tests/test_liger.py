"""Liger's heads by its signatures: against Liger itself where it is installed, and against what its docs define.

Of Liger on a CPU: scaled cross entropy has a fallback in torch; the fused linear loss is Triton, so it runs where
Triton's interpreter does (TRITON_INTERPRET=1), without soft-cap and class weights, which its kernel cannot be
interpreted with. The definitions restate liger-kernel 0.8.5, and stand alone where it is missing. Inputs and tolerances
are those of its own tests.
"""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import vocabshard as vs
from vocabshard.integrations import liger
from vocabshard.testing.compare import assert_same_bytes

ScaledCE = liger.LigerFusedLinearScaledCrossEntropyFunction


def theirs(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(f"liger_kernel.{module}"), name)
    except ImportError as error:
        pytest.skip(f"no liger-kernel: {error}")


def scaled_definition(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, ignore_index: int, ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logp = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    counts = target != ignore_index
    nll = -logp.gather(-1, target.where(counts, 0)[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    return nll.where(counts, 0), entropy.where(counts, 0), logp[:, ids].where(counts[:, None], 0)


def scaled_inputs() -> tuple[Tensor, ...]:
    """521 x 7 x 13 with every eleventh row ignored, upstream gradients of each sign."""
    torch.manual_seed(42)
    hidden, weight, target = torch.randn(521, 7), torch.randn(13, 7), torch.randint(13, (521,))
    target[::11] = -100
    return hidden, weight, target, torch.rand(521), torch.rand(521) - 0.5


def test_scaled_matches_the_definition() -> None:
    hidden, weight, target, of_nll, of_entropy = scaled_inputs()
    ids, of_ids = torch.tensor([3, 3, 0, 12]), torch.randn(521, 4)
    found = []
    for function in (ScaledCE.apply, None):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        if function is None:
            outputs = scaled_definition(*leaves, target, 0.7, -100, ids)
        else:
            outputs = function(*leaves, target, 0.7, -100, 2, True, ids)
        found.append((outputs, torch.autograd.grad(outputs, leaves, (of_nll, of_entropy, of_ids))))
    (ours, our_gradients), (expected, gradients) = found
    for mine, wanted in zip(ours, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, wanted)
    for mine, wanted in zip(our_gradients, gradients, strict=True):
        torch.testing.assert_close(mine, wanted, atol=2e-5, rtol=2e-5)
    assert not ours[0][::11].any() and not ours[1][::11].any() and not our_gradients[0][::11].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_matches_liger(dtype: torch.dtype) -> None:
    real = theirs("ops", "LigerFusedLinearScaledCrossEntropyFunction")
    hidden, weight, target, of_nll, of_entropy = scaled_inputs()
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    ids, of_ids = torch.tensor([1, 12]), torch.randn(521, 2)
    # its fallback rounds logits, entropy and gradients of logits to bf16
    tolerance = {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.06, "rtol": 0.05}
    found = []
    for function in (ScaledCE, real):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        outputs = function.apply(*leaves, target, 0.7, -100, 1, True, ids)
        upstream = (of_nll, of_entropy.to(outputs[1].dtype), of_ids)
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, upstream)])
    for mine, wanted in zip(*found, strict=True):
        assert mine.shape == wanted.shape
        if dtype == torch.float32 or len(mine) == 521:  # a column's gradient in bf16 adds 521 rounded terms there
            torch.testing.assert_close(mine.float(), wanted.float(), **tolerance)
    for shared in ({}, {"return_entropy": True}, {"selected_token_ids": ids}):
        kinds = [type(f.apply(hidden, weight, target, **shared)) for f in (ScaledCE, real)]
        assert kinds[0] is kinds[1]


def test_scaled_is_our_logp() -> None:
    hidden, weight, target, *_ = scaled_inputs()
    logp = vs.linear_logp(hidden, weight, target, temperature=0.7)
    assert_same_bytes(-ScaledCE.apply(hidden, weight, target, 0.7), logp)


def test_selected_tokens_under_autocast() -> None:
    """The target's own log-prob among them, from the same cast operands."""
    hidden, weight, target, *_ = scaled_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        nll, chosen = ScaledCE.apply(hidden, weight, target, 0.7, selected_token_ids=torch.arange(13))
    counts = target != -100
    torch.testing.assert_close(chosen[counts].gather(1, target[counts, None])[:, 0], -nll[counts], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("module", ["ours", "theirs"])
def test_scaled_refusals_are_of_the_same_type(module: str) -> None:
    function = ScaledCE if module == "ours" else theirs("ops", "LigerFusedLinearScaledCrossEntropyFunction")
    hidden, weight, target, *_ = scaled_inputs()
    for error, changed in (
        (TypeError, {"temperature": torch.tensor(1.0)}),
        (TypeError, {"temperature": True}),
        (ValueError, {"temperature": 0.0}),
        (ValueError, {"m_tiles_per_cluster": 0}),
        (TypeError, {"return_entropy": 1}),
        (TypeError, {"selected_token_ids": torch.tensor([1], dtype=torch.int32)}),
        (ValueError, {"selected_token_ids": torch.tensor([13])}),
        (ValueError, {"ignore_index": -1}),
    ):
        with pytest.raises(error):
            function.apply(hidden, weight, target, **changed)


def ce_definition(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: dict[str, Any]) -> Any:
    """What Liger's docstrings and kernel define, in fp64: torch's loss, a z-loss, scaling by the probability."""
    logits = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    cap, kind = options.get("softcap"), options.get("reduction", "mean")
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    ce_weight = options.get("ce_weight")
    class_weight = None if ce_weight is None else ce_weight.double()
    smoothing = options.get("label_smoothing", 0.0)
    each = F.cross_entropy(logits, target, class_weight, reduction="none", label_smoothing=smoothing)
    counts = target != -100
    lse = torch.logsumexp(logits, -1)
    z = (options.get("lse_square_scale", 0.0) * lse.square()).where(counts, 0)
    if options.get("use_token_scaling"):
        scale = (logits.gather(1, target.where(counts, 0)[:, None])[:, 0] - lse).exp().where(counts, 0).detach()
        each, z = each * scale, z * scale
    if kind == "mean":
        of = counts.sum() if class_weight is None else class_weight[target[counts]].sum()
        each, z = each.sum() / of, z.sum() / counts.sum()
    elif kind == "sum":
        each, z = each.sum(), z.sum()
    return each + z, z


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"lse_square_scale": 1e-3},
    {"label_smoothing": 0.1, "lse_square_scale": 1e-3},
    {"label_smoothing": 0.1, "reduction": "none"},
    {"use_token_scaling": True, "lse_square_scale": 1e-3},
    {"accum_dtype": torch.float32},
    {"softcap": 3.0},
    {"ce_weight": True},
    {"ce_weight": True, "label_smoothing": 0.1, "lse_square_scale": 1e-3, "reduction": "mean"},
    {"ce_weight": True, "reduction": "none"},
]


@pytest.mark.parametrize("reference", ["definition", "liger"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_fused_linear_loss(options: dict[str, Any], reference: str) -> None:
    """8 rows of its shape 2 x 4 x 512 x 512, at its fp32 tolerances; some targets ignored."""
    with_bias = options.get("reduction") != "sum"
    hidden, weight, bias = torch.randn(8, 512), torch.rand(512, 512), torch.rand(512) if with_bias else None
    target = torch.randint(512, (8,))
    target[2] = -100
    if options.get("ce_weight"):
        options = {**options, "ce_weight": torch.rand(512)}
    upstream = torch.randn(8) if options.get("reduction") == "none" else torch.tensor(1.7)
    if reference == "liger":
        if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
            pytest.skip("Liger's kernel needs a GPU or Triton's interpreter")
        if not torch.cuda.is_available() and {"softcap", "ce_weight"} & set(options):
            pytest.skip("Liger's kernel cannot be interpreted with these")
        real = theirs("transformers", "LigerFusedLinearCrossEntropyLoss")(**options, return_z_loss=True)
    ours = liger.LigerFusedLinearCrossEntropyLoss(**options, return_z_loss=True)
    device = "cuda" if reference == "liger" and torch.cuda.is_available() else "cpu"
    found = []
    for mine in (True, False):
        leaves = [x.to(device, copy=True).requires_grad_() for x in (hidden, weight, bias) if x is not None]
        y = target.to(device)
        if mine or reference == "liger":
            given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
            module = ours if mine else real
            if device == "cuda":
                kind = type(module)
                module = kind(**given, return_z_loss=True)
            out = module(leaves[1], leaves[0], y, leaves[2] if with_bias else None)
            loss, z = out.loss, out.z_loss
        else:
            loss, z = ce_definition(leaves[0], leaves[1], y, leaves[2] if with_bias else None, options)
        gradients = torch.autograd.grad(loss, leaves, upstream.to(loss))
        found.append([loss.float(), z.float(), *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=5e-4)


def test_fused_linear_loss_without_a_target_that_counts() -> None:
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    for options in ({}, {"ce_weight": torch.rand(20)}, {"lse_square_scale": 0.1}):
        loss = liger.LigerFusedLinearCrossEntropyLoss(**options)(weight, hidden, torch.full((3,), -100))
        loss.backward()
        assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


def test_fused_linear_loss_refuses_by_name() -> None:
    hidden, weight, target = torch.randn(3, 8), torch.randn(20, 8), torch.tensor([1, 2, 3])
    for name, options in (
        ("return_token_accuracy", {"return_token_accuracy": True}),
        ("return_predicted_tokens", {"return_predicted_tokens": True}),
        ("label_smoothing with softcap", {"label_smoothing": 0.1, "softcap": 3.0}),
    ):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
            liger.LigerFusedLinearCrossEntropyLoss(**options)(weight, hidden, target)
    with pytest.raises(ValueError, match="reduction"):
        liger.LigerFusedLinearCrossEntropyLoss(reduction="batchmean")
    with pytest.raises(ValueError, match=r"ce_weight must be \[V\]"):
        liger.liger_fused_linear_cross_entropy(hidden, weight, target, ce_weight=torch.rand(19))
    with pytest.raises(TypeError, match="ce_weight must be a"):
        liger.liger_fused_linear_cross_entropy(hidden, weight, target, ce_weight=[1.0] * 20)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight must be a"):
        liger.liger_fused_linear_cross_entropy(hidden, None, target)  # type: ignore[arg-type]


@pytest.mark.parametrize("formula", ["pytorch", "megatron"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_vocab_parallel_loss(smoothing: float, formula: str) -> None:
    """One process; over ranks in tests/multigpu/test_liger.py. Megatron's uniform is over the other classes."""
    logits, target = torch.randn(5, 2, 33), torch.randint(33, (5, 2))
    target[1, 1] = -100
    share = smoothing * 33 / 32 if formula == "megatron" else smoothing
    found = []
    for mine in (True, False):
        leaf = logits.clone().requires_grad_()
        if mine:
            loss = liger.LigerVocabParallelCrossEntropy(label_smoothing=smoothing, label_smoothing_formula=formula)(
                leaf, target
            )
        else:
            each = F.cross_entropy(leaf.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=share)
            loss = each.view(5, 2)
        found.append([loss, *torch.autograd.grad(loss, leaf, torch.arange(10.0).view(5, 2))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_vocab_parallel_loss_refuses_by_name() -> None:
    for options in ({"reduction": "mean"}, {"label_smoothing": 1.0}, {"label_smoothing_mode": "rank"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            liger.LigerVocabParallelCrossEntropy(**options)
    alone = liger.LigerVocabParallelCrossEntropy(label_smoothing=0.1, label_smoothing_formula="megatron")
    with pytest.raises(ValueError, match="at least 2"):
        alone(torch.randn(2, 1, 1), torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(TypeError, match="vocab_parallel_logits must be"):
        alone(None, torch.zeros(2, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    "name, place",
    [
        ("LigerFusedLinearScaledCrossEntropyFunction.apply", "ops"),
        ("LigerFusedLinearScaledCrossEntropyTPFunction.apply", "ops"),
        ("liger_fused_linear_scaled_cross_entropy_tp", "transformers.functional"),
        ("liger_fused_linear_cross_entropy", "transformers.functional"),
        ("LigerFusedLinearCrossEntropyLoss", "transformers"),
        ("LigerFusedLinearCrossEntropyLoss.forward", "transformers"),
        ("LigerVocabParallelCrossEntropy", "transformers.vocab_parallel_cross_entropy"),
        ("LigerVocabParallelCrossEntropy.forward", "transformers.vocab_parallel_cross_entropy"),
    ],
)
def test_signatures(name: str, place: str) -> None:
    """Every argument in its place, by its name, with its default."""
    first, _, rest = name.partition(".")
    real, mine = theirs(place, first), getattr(liger, first)
    if rest:
        real, mine = getattr(real, rest), getattr(mine, rest)
    told = [[(p.name, p.default) for p in inspect.signature(f).parameters.values()] for f in (mine, real)]
    assert told[0] == told[1]
