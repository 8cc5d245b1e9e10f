"""linear_cross_entropy beside F.cross_entropy over logits in fp64, argument by argument; and what the style refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vocabshard as vs
from vocabshard.integrations import torch_native
from vocabshard.integrations.torch_native import linear_cross_entropy
from vocabshard.testing.compare import assert_same_bytes

N, D, V = 23, 32, 201


def problem(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, D, generator=g).to(dtype), torch.randn(V, D, generator=g).to(dtype)
    target = torch.randint(0, V, (N,), generator=g)
    target[4] = -100
    return hidden, weight, torch.randn(V, generator=g).to(dtype), target


def reference(leaves: list[Tensor], target: Tensor, z_loss: float, **options) -> Tensor:
    hidden, weight, bias = leaves
    logits = F.linear(hidden, weight, bias)
    loss = F.cross_entropy(logits, target, **options)
    if z_loss:
        kept = target != options.get("ignore_index", -100)
        extra = z_loss * torch.where(kept, logits.logsumexp(-1).square(), 0.0)
        loss = loss + {"none": extra, "sum": extra.sum(), "mean": extra.sum() / kept.sum()}[options["reduction"]]
    return loss


@pytest.mark.parametrize("reduction, smoothing", list(itertools.product(["none", "sum", "mean"], [0.0, 0.1, 1.0])))
@pytest.mark.parametrize("weighted, z_loss", [(False, 0.0), (True, 0.0), (False, 1e-3)])
def test_arguments_are_those_of_cross_entropy(reduction: str, smoothing: float, weighted: bool, z_loss: float) -> None:
    """Error against fp64 at most twice that of torch's own in fp32, for the loss and each gradient."""
    *tensors, target = problem()
    class_weight = torch.rand(V, generator=torch.Generator().manual_seed(1)) if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing}
    found: list[list[Tensor]] = []
    for kind in ("exact", "torch", "ours"):
        leaves = [t.to(torch.float64 if kind == "exact" else torch.float32).requires_grad_() for t in tensors]
        c = class_weight if class_weight is None else class_weight.to(leaves[0].dtype)
        if kind == "ours":
            loss = linear_cross_entropy(
                leaves[0], leaves[1], target, linear_bias=leaves[2], weight=c, z_loss=z_loss, **options
            )
        else:
            loss = reference(leaves, target, z_loss, weight=c, **options)
        loss.sum().backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for name, exact, theirs, ours in zip(("loss", "hidden", "weight", "bias"), *found, strict=True):
        bound = 2 * (theirs - exact).abs().max() + 2e-6 * exact.abs().max()
        assert (ours - exact).abs().max() <= bound, (name, (ours - exact).abs().max(), bound)


def test_without_smoothing_the_bytes_are_the_contracts() -> None:
    hidden, weight, bias, target = problem(torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, target, linear_bias=bias, reduction="none", temperature=0.7)
    assert_same_bytes(-loss, vs.linear_logp(hidden, weight, target, bias, temperature=0.7))


def test_padding_is_no_class() -> None:
    """Padding rows of NaN, forward and backward, with everything on."""
    hidden, weight, bias, target = problem()
    padded = torch.cat([weight, torch.full((7, D), float("nan"))]).requires_grad_()
    padded_bias = torch.cat([bias, torch.full((7,), float("nan"))])
    options = {"label_smoothing": 0.2, "weight": torch.rand(V), "z_loss": 1e-4}
    loss = linear_cross_entropy(hidden, padded, target, linear_bias=padded_bias, real_vocab_size=V, **options)
    whole = weight.clone().requires_grad_()
    want = linear_cross_entropy(hidden, whole, target, linear_bias=bias, **options)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    loss.backward()
    want.backward()
    torch.testing.assert_close(padded.grad[:V], whole.grad)
    assert (padded.grad[V:] == 0).all()


def test_temperature_smooths_what_it_divides() -> None:
    hidden, weight, bias, target = problem()
    loss = linear_cross_entropy(hidden, weight, target, linear_bias=bias, label_smoothing=0.1, temperature=0.5)
    want = F.cross_entropy(F.linear(hidden, weight, bias) / 0.5, target, label_smoothing=0.1)
    torch.testing.assert_close(loss, want)


def test_an_id_of_its_own_is_ignored() -> None:
    hidden, weight, _, target = problem()
    target[4], target[7] = 3, 3
    loss = linear_cross_entropy(hidden, weight, target, ignore_index=3, label_smoothing=0.1, reduction="none")
    want = F.cross_entropy(hidden @ weight.T, target, ignore_index=3, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    assert (loss[[4, 7]] == 0).all()


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no F.linear_cross_entropy")
def test_the_signature_is_torchs() -> None:
    import inspect

    theirs, ours = (inspect.signature(f).parameters for f in (F.linear_cross_entropy, linear_cross_entropy))
    assert list(theirs) == list(ours)[: len(theirs)]
    for name, parameter in theirs.items():
        assert (parameter.kind, parameter.default) == (ours[name].kind, ours[name].default), name
    hidden, weight, bias, target = problem()
    torch.testing.assert_close(
        linear_cross_entropy(hidden, weight, target, linear_bias=bias, label_smoothing=0.1),
        F.linear_cross_entropy(hidden, weight, target, linear_bias=bias, label_smoothing=0.1),
    )


@pytest.mark.parametrize(
    "changed, error, text",
    [
        ({"reduction": "batchmean"}, ValueError, "reduction"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing"),
        ({"z_loss": -1.0}, ValueError, "z_loss"),
        ({"options": object()}, NotImplementedError, "options"),
        ({"target": torch.rand(N, V)}, NotImplementedError, "class probabilities"),
        ({"label_smoothing": "0.1"}, TypeError, "label_smoothing must be a number"),
        ({"weight": [1.0] * V}, TypeError, "weight must be a torch.Tensor"),
        ({"linear_weight": None, "label_smoothing": 0.1}, TypeError, "linear_weight must be a torch.Tensor"),
        ({"weight": torch.ones(V + 1)}, ValueError, r"\[V_real\] = \[201\]"),
        ({"label_smoothing": 0.1, "softcap": 3.0}, NotImplementedError, "softcap"),
        ({"label_smoothing": 0.1, "sequence_parallel": True}, NotImplementedError, "sequence_parallel"),
        (
            {"label_smoothing": 0.1, "grad_options": vs.GradOptions(main_grad=torch.zeros(V, D))},
            NotImplementedError,
            "main_grad",
        ),
        ({"return_entropy": True}, NotImplementedError, "return_entropy"),
        ({"tempreature": 1.0}, TypeError, "tempreature"),
    ],
)
def test_what_is_not_supported_is_named(changed: dict, error: type[Exception], text: str) -> None:
    hidden, weight, _, target = problem()
    given = {"input": hidden, "linear_weight": weight, "target": target, **changed}
    with pytest.raises(error, match=text):
        linear_cross_entropy(**given)


def test_the_style_refuses_by_name() -> None:
    with pytest.raises(TypeError, match="tempreature"):
        torch_native.VocabParallelHeadStyle(tempreature=1.0)
    with pytest.raises(NotImplementedError, match="Conv1d"):
        torch_native.VocabParallelHeadStyle()._apply(nn.Conv1d(1, 1, 1), None)
