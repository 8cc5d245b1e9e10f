"""verl's linear_cross_entropy: its values, shapes and gradients, and how it takes the place of verl's own."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.integrations import verl
from vocabshard.testing.compare import assert_same_bytes


def uniform(*shape: int, bound: float = 0.5, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed)).to(dtype)


def over_logits(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """What verl's own tests compare with, in the dtype of the inputs."""
    logp = torch.log_softmax(hidden.flatten(0, -2) @ weight.T / temperature, -1)
    return logp.gather(-1, labels.flatten()[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def test_verls_own_inputs_at_tighter_tolerances() -> None:
    """The first case of verl's test, fewer rows and columns: uniform bf16, T = 1.5, its upstream gradients.

    verl's tolerances are 1e-3 for log-probs, 5e-3 for entropies and 2e-2 for gradients.
    """
    rows, depth, vocabulary = 97, 896, 4736
    hidden = uniform(1, rows, depth).requires_grad_()
    weight = uniform(vocabulary, depth, seed=1).requires_grad_()
    labels = torch.randint(0, vocabulary, (1, rows), generator=torch.Generator().manual_seed(2))
    upstream = uniform(rows, bound=1.0, seed=3, dtype=torch.float32), uniform(rows, seed=4, dtype=torch.float32)
    logp, entropy = verl.linear_cross_entropy(hidden, weight, labels, 1.5)
    assert logp.shape == entropy.shape == (rows,)
    grads = torch.autograd.grad((logp, entropy), (hidden, weight), upstream)
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    want = over_logits(*exact, labels, 1.5)
    torch.testing.assert_close((logp, entropy), tuple(w.float() for w in want), atol=2e-5, rtol=2e-6)
    for grad, wanted in zip(grads, torch.autograd.grad(want, exact, [u.double() for u in upstream]), strict=True):
        torch.testing.assert_close(grad.double(), wanted, atol=4e-3, rtol=1e-2)


def test_it_is_linear_logp() -> None:
    hidden, weight = uniform(2, 5, 16), uniform(64, 16, seed=1)
    labels = torch.randint(0, 60, (2, 5))
    labels[1, 2] = -100
    logp, entropy = verl.linear_cross_entropy(hidden, weight, labels, 0.7, real_vocab_size=60)
    want = vs.linear_logp(hidden, weight, labels, temperature=0.7, real_vocab_size=60, return_entropy=True)
    assert_same_bytes(logp, want.logp.flatten())
    assert_same_bytes(entropy, want.entropy.flatten())
    assert logp[7] == 0
    per_row = torch.linspace(0.5, 2, 10)
    rows, _ = verl.linear_cross_entropy(hidden, weight, labels, per_row)
    assert_same_bytes(rows, vs.linear_logp(hidden, weight, labels, temperature=per_row.view(2, 5)).flatten())


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions_are_of_log_probs_alone(reduction: str) -> None:
    hidden, weight, labels = uniform(5, 16), uniform(64, 16, seed=1), torch.arange(5)
    rows, _ = verl.linear_cross_entropy(hidden, weight, labels)
    logp, entropy = verl.linear_cross_entropy(hidden, weight, labels, 1.0, reduction)
    torch.testing.assert_close(logp, getattr(rows, reduction)())
    assert entropy.shape == (5,)


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"reduction": "max"}, ValueError, "reduction"),
        ({"grad_hidden": "half"}, ValueError, "grad_hidden"),
        ({"return_logits": True}, NotImplementedError, "return_logits"),
        ({"tp_group": None}, NotImplementedError, "tp_group"),
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"temperature": torch.ones(4)}, ValueError, "one per row"),
    ],
)
def test_what_is_not_supported_is_named(options: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        verl.linear_cross_entropy(uniform(5, 16), uniform(64, 16, seed=1), torch.arange(5), **options)


def theirs(hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None) -> str:
    return "verl's own"


@pytest.fixture
def fake_verl() -> Iterator[types.ModuleType]:
    """The modules of verl 0.9.1 that have the function: its own, and one that imports it by name when imported."""
    if "verl" in sys.modules:
        pytest.skip("the real verl is imported here")
    packages = ["verl", "verl.utils", "verl.utils.kernel", verl.HOME, "verl.models", "verl.models.mcore.forward"]
    for name in packages:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[verl.HOME].linear_cross_entropy = theirs
    importer = sys.modules["verl.models.mcore.forward"]
    exec(f"from {verl.HOME} import linear_cross_entropy", vars(importer))
    yield importer
    verl.uninstall()
    for name in packages:
        del sys.modules[name]


def test_it_takes_the_place_of_verls(fake_verl: types.ModuleType) -> None:
    home = sys.modules[verl.HOME]
    for _ in range(2):
        verl.install()
        assert home.linear_cross_entropy is fake_verl.linear_cross_entropy is verl.linear_cross_entropy
    late = types.ModuleType("verl.late")
    exec(f"from {verl.HOME} import linear_cross_entropy", vars(late))
    sys.modules["verl.late"] = late
    try:
        verl.uninstall()
    finally:
        del sys.modules["verl.late"]
    assert home.linear_cross_entropy is fake_verl.linear_cross_entropy is late.linear_cross_entropy is theirs
    del home.linear_cross_entropy
    with pytest.raises(RuntimeError, match="not known"):
        verl.install()
    home.linear_cross_entropy = theirs


def test_the_signature_is_verls() -> None:
    wanted = inspect.signature(theirs).parameters
    ours = inspect.signature(verl.linear_cross_entropy).parameters
    assert [(p.name, p.default) for p in wanted.values()] == [(p.name, p.default) for p in ours.values()][: len(wanted)]


def test_the_real_one_has_the_signature() -> None:
    module = pytest.importorskip(verl.HOME)
    wanted = list(inspect.signature(module.LinearCrossEntropy.forward).parameters)[1:]
    assert wanted == list(inspect.signature(verl.linear_cross_entropy).parameters)[: len(wanted)]
