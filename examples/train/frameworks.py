"""The same model trained with other projects' own heads and with ours in their place: losses side by side.

    python examples/train/frameworks.py --out frameworks.json --plot frameworks.png

A small language model (embedding, GRU, a head of its own) learns the text of tiny_lm from the same initial values and
batches, once with a project's own head and once with vocabshard's adapter for it: PyTorch's cross entropy; Liger's
scaled cross entropy with its entropy as a bonus; a Llama of Hugging Face transformers and a GPTModel of Megatron-Core
with their own losses. A project that is not installed is told and left out. In fp32, on the CPU, on one thread.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train import TINY_LM, read_tokens

HIDDEN, BATCH, LENGTH, RATE = 64, 8, 32, 5e-3
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of hidden [N, D], weight [V, D], target [N]


class Model(nn.Module):
    """Embedding, GRU, and the weight of a head that `loss` applies."""

    def __init__(self, vocab_size: int, loss: Loss) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, HIDDEN)
        self.trunk = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Parameter(torch.randn(vocab_size, HIDDEN) * HIDDEN**-0.5)
        self.loss = loss

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T + 1] -> the loss."""
        hidden, _ = self.trunk(self.embedding(ids[:, :-1]))
        return self.loss(hidden.flatten(0, 1), self.head, ids[:, 1:].flatten())


def _with_entropy(function: Any) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        nll, entropy = function.apply(hidden, weight, target, 0.8, -100, 1, True)
        return nll.mean() - 0.01 * entropy.mean()

    return loss


def of_torch(vocab_size: int) -> Iterator[nn.Module]:
    """F.cross_entropy over F.linear, and linear_cross_entropy."""
    from vocabshard.integrations.torch_native import linear_cross_entropy

    yield Model(vocab_size, lambda h, w, y: F.cross_entropy(F.linear(h, w), y, label_smoothing=0.1))
    yield Model(vocab_size, lambda h, w, y: linear_cross_entropy(h, w, y, label_smoothing=0.1))


def of_liger(vocab_size: int) -> Iterator[nn.Module]:
    """Its scaled cross entropy, and ours of its name."""
    from vocabshard.integrations import liger

    name = "LigerFusedLinearScaledCrossEntropyFunction"
    yield Model(vocab_size, _with_entropy(getattr(importlib.import_module("liger_kernel.ops"), name)))
    yield Model(vocab_size, _with_entropy(getattr(liger, name)))


def of_transformers(vocab_size: int) -> Iterator[nn.Module]:
    """A Llama with its own loss, and with a patched head."""
    from vocabshard.integrations.huggingface import patch_lm_head

    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip

    class Labelled(nn.Module):
        def __init__(self, patched: bool) -> None:
            super().__init__()
            self.model = transformers.AutoModelForCausalLM.from_config(config)
            if patched:
                patch_lm_head(self.model)

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(ids, labels=ids).loss

    yield Labelled(patched=False)
    yield Labelled(patched=True)


def of_megatron(vocab_size: int) -> Iterator[nn.Module]:
    """A GPTModel with its own output layer and cross entropy, and one whose output layer is fused."""
    from vocabshard.integrations.megatron import fuse_output_layer
    from vocabshard.testing import megatron_model

    class Labelled(nn.Module):
        def __init__(self, fused: bool) -> None:
            super().__init__()
            self.model = megatron_model.gpt(vocab_size=vocab_size, length=LENGTH, hidden_size=HIDDEN)
            if fused:
                fuse_output_layer(self.model)

        def forward(self, ids: Tensor) -> Tensor:
            positions = torch.arange(LENGTH).expand(len(ids), LENGTH)
            mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
            return self.model(ids[:, :-1], positions, mask, labels=ids[:, 1:]).mean()

    with megatron_model.groups():
        yield Labelled(fused=False)
        yield Labelled(fused=True)


PROJECTS: dict[str, Callable[[int], Iterator[nn.Module]]] = {
    "PyTorch, label smoothing": of_torch,
    "Liger, scaled, entropy bonus": of_liger,
    "transformers, Llama": of_transformers,
    "Megatron-Core, GPTModel": of_megatron,
}


def train(models: Iterator[nn.Module], tokens: Tensor, steps: int) -> list[list[float]]:
    """The losses of each model, from the same initial values and batches. ImportError where a project is missing."""
    found = []
    while True:
        torch.manual_seed(0)
        model = next(models, None)
        if model is None:
            return found
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        generator = torch.Generator().manual_seed(0)
        window, losses = torch.arange(LENGTH + 1), []
        for _ in range(steps):
            starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1), generator=generator)
            loss = model(tokens[starts + window])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)


def plot(curves: dict[str, list[list[float]]], path: Path) -> None:
    """Losses, and under them what ours differs by, relative."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for number, (name, (own, ours)) in enumerate(curves.items()):
        color = f"C{number}"
        above.plot(own, "-", color=color, label=f"{name}: its own head")
        above.plot(ours, ":", color=color, linewidth=3, label=f"{name}: vocabshard")
        below.plot([(y - x) / x for x, y in zip(own, ours, strict=True)], color=color)
    above.set(ylabel="loss [nats]")
    figure.legend(loc="outside upper center", ncols=2, fontsize=8)
    below.set(xlabel="step", ylabel="relative difference")
    figure.savefig(path, dpi=80)


def main() -> None:
    """Prints a line a project."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokens, vocab_size = read_tokens(TINY_LM / "text.txt")
    curves: dict[str, list[list[float]]] = {}
    for name, models in PROJECTS.items():
        try:
            curves[name] = own, ours = train(models(vocab_size), tokens, args.steps)
        except ImportError as error:
            print(f"{name}: left out ({error})")
            continue
        apart = max(abs(y - x) / abs(x) for x, y in zip(own, ours, strict=True))
        print(f"{name}: {len(own)} steps, loss {own[0]:.4f} to {own[-1]:.4f}, relative difference {apart:.1e} at most")
    if args.out is not None:
        args.out.write_text(json.dumps(curves, indent=1) + "\n")
    if args.plot is not None:
        plot(curves, args.plot)


if __name__ == "__main__":
    main()
