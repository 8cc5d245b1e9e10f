"""examples/train: the losses of W ranks are those of one, within rounding, and with ordered sums to the byte."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vocabshard import GradOptions, kernels
from vocabshard.launching import Ranks

pytest.importorskip("tokenizers")
SCRIPT = Path(__file__).resolve().parent.parent.parent / "examples" / "train" / "train.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("reduce", ["sum", "ordered"])
def test_losses_do_not_depend_on_the_number_of_ranks(ranks: Ranks, example, reduce: str) -> None:
    torch.set_num_threads(1)
    tokens, vocab_size = example.read_tokens(example.TINY_LM / "text.txt")
    recipe = example.Recipe(steps=12, batch=4, length=32)
    backend = kernels.select_backend("auto", ranks.device, torch.float32).backend
    if reduce == "ordered" and not getattr(kernels.module(backend), "CONTINUES_CHAIN", False):
        pytest.skip(f"grad_hidden of {backend} is no one chain")

    def losses(group):
        return example.train(tokens, vocab_size, recipe, group, ranks.device, GradOptions(reduce=reduce))

    together, alone = losses(dist.group.WORLD), losses(None)
    assert together[0] == alone[0]  # before any gradient: the same bytes
    assert together[-1] < together[0] - 0.5  # it learns
    if reduce == "ordered" and ranks.device.type == "cpu":
        assert together == alone
    else:
        assert max(abs(a - b) for a, b in zip(together, alone, strict=True)) < 2e-5 * alone[0]
    everyone = [None] * ranks.world_size
    dist.all_gather_object(everyone, together)
    assert everyone.count(together) == ranks.world_size
