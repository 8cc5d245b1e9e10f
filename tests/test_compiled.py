"""linear_logp under torch.compile: one node, forward and backward, with the bytes of an eager call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard import compiled
from vocabshard.testing.compare import assert_same_bytes

N, D, V = 12, 16, 100


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, D, generator=g).to(dtype), torch.randn(V, D, generator=g).to(dtype)
    return hidden, weight, torch.randn(V, generator=g), torch.randint(0, V, (N,), generator=g)


def both(function: Callable[..., Tensor], *operands: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in operands]
    loss = function(*leaves)
    loss.backward()
    return loss.detach(), *(x.grad for x in leaves if x.grad is not None)


def nodes_of(function: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], list[str]]:
    """The function compiled without graph breaks, and the names of our nodes in its graphs as they are made."""
    from torch._dynamo.backends.common import aot_autograd

    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.extend(str(node.target) for node in graph.graph.nodes if "vocabshard" in str(node.target))
        return graph.forward

    backend = aot_autograd(fw_compiler=look, bw_compiler=look)
    return torch.compile(function, backend=backend, fullgraph=True), seen


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "softcap": 5.0, "real_vocab_size": 90}, {"rows": True}])
def test_one_node_and_the_bytes_of_an_eager_call(options: dict) -> None:
    hidden, weight, bias, target = inputs()
    more = dict(options)
    if more.pop("rows", False):
        more["temperature"] = torch.rand(3, 4) + 0.5

    def loss(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        out = vs.linear_logp(torch.tanh(h).view(3, 4, D), w, target.view(3, 4) % 90, b, return_lse=True,
                             return_entropy=True, **more)  # fmt: skip
        return (out.logp * 2 + out.lse - out.entropy).square().sum()

    want = both(loss, hidden, weight, bias)
    function, seen = nodes_of(loss)
    for a, b in zip(both(function, hidden, weight, bias), want, strict=True):
        assert_same_bytes(a, b)
    assert seen == ["vocabshard.linear_logp.default", "vocabshard.linear_logp_backward.default"]


def test_frozen_weight_autocast_logits_and_other_sizes() -> None:
    hidden, weight, _, target = inputs()

    def loss(h: Tensor, t: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = vs.linear_logp(h, weight, t, return_logits=True, grad_options=vs.GradOptions(reduce="ordered"))
        return out.logp.sum() + 0 * out.logits.sum()

    function, _ = nodes_of(loss)
    for rows in (N, 5, 7):  # the later ones of one graph with symbolic sizes
        want = both(loss, hidden[:rows], target[:rows])
        for a, b in zip(both(function, hidden[:rows], target[:rows]), want, strict=True):
            assert_same_bytes(a, b, f"{rows} rows")


def test_what_is_no_node_runs_outside_of_the_graph() -> None:
    hidden, weight, _, target = inputs()
    main_grad = torch.zeros(V, D)

    def loss(h: Tensor, w: Tensor) -> Tensor:
        options = vs.GradOptions(main_grad=main_grad, save_logits_budget="auto")
        return vs.linear_logp(h * 2, w, target, grad_options=options).sum()

    want = both(loss, hidden, weight)
    added = main_grad.clone()
    main_grad.zero_()
    for a, b in zip(both(torch.compile(loss, backend="aot_eager"), hidden, weight), want, strict=True):
        assert_same_bytes(a, b)
    assert_same_bytes(main_grad, added)


def test_errors_come_as_in_an_eager_call() -> None:
    hidden, weight, _, target = inputs()
    function, _ = nodes_of(lambda h: vs.linear_logp(h, weight, target + 95).sum())
    with pytest.raises(ValueError, match="expected an id in"):
        function(hidden)


def test_the_nodes_keep_torchs_rules() -> None:
    """Fake results, aliasing, mutation and autograd as torch.library checks them."""
    hidden, weight, bias, target = inputs()
    text = compiled.call_text(group="", shard="", entropy=True, logits=True, reduce="sum", wire="fp32")
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    arguments = (leaves[0], leaves[1], target, leaves[2], None, 0.7, text)
    # linear_logp has no second derivative, and data-dependent checks, so symbolic tracing is left to the tests above
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(compiled.forward_node, arguments, test_utils=tests)
