"""Trains a small language model whose embedding and head are one matrix, sharded by vocabulary over the ranks.

    python examples/train/train.py --out one.jsonl
    torchrun --nproc-per-node 4 examples/train/train.py --out four.jsonl
    python examples/train/curves.py one.jsonl four.jsonl

What lies between embedding and head, a GRU, is whole on every rank: the ranks see the same tokens, and the gradients
that reach it are the same on all of them. Needs `pip install vocabshard[score]` for the tokenizer.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor, nn

from vocabshard import GradOptions, VocabParallelEmbedding, VocabParallelLMHead
from vocabshard.launching import init_from_env

TINY_LM = Path(__file__).resolve().parent.parent / "tiny_lm"


@dataclass(frozen=True)
class Recipe:
    """What the losses depend on; the number of ranks is not among it."""

    steps: int = 200
    batch: int = 8
    length: int = 64
    hidden_size: int = 64
    learning_rate: float = 5e-3
    seed: int = 0


class Model(nn.Module):
    """Embedding and head share this rank's rows of one matrix."""

    def __init__(self, vocab_size: int, hidden_size: int, tp_group: Any, grad_options: GradOptions) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(vocab_size, hidden_size, tp_group, init_std=0.3)
        self.trunk = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.norm = nn.LayerNorm(hidden_size)
        self.head = VocabParallelLMHead(
            hidden_size, vocab_size, tp_group, weight=self.embedding.weight, grad_options=grad_options
        )

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T + 1] -> logp fp32 [B, T] of ids[:, 1:], the same on every rank."""
        hidden = self.norm(self.trunk(self.embedding(ids[:, :-1]))[0])
        return self.head(hidden, ids[:, 1:])


def read_tokens(text: Path) -> tuple[Tensor, int]:
    """The ids int64 [T] of a text by tiny_lm's tokenizer, and the size of its vocabulary."""
    tokenizer = Tokenizer.from_file(str(TINY_LM / "tokenizer.json"))
    return torch.tensor(tokenizer.encode(text.read_text(encoding="utf-8")).ids), tokenizer.get_vocab_size()


def train(
    tokens: Tensor, vocab_size: int, recipe: Recipe, tp_group: Any, device: torch.device, grad_options: GradOptions
) -> list[float]:
    """The loss of every step, the same on every rank. Collective over the group."""
    torch.manual_seed(recipe.seed)
    model = Model(vocab_size, recipe.hidden_size, tp_group, grad_options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    generator = torch.Generator().manual_seed(recipe.seed)
    window, losses = torch.arange(recipe.length + 1), []
    for _ in range(recipe.steps):
        starts = torch.randint(len(tokens) - recipe.length, (recipe.batch, 1), generator=generator)
        loss = -model(tokens[starts + window].to(device)).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """The command line; rank 0 writes a line of JSON for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the losses go")
    parser.add_argument("--text", type=Path, default=TINY_LM / "text.txt")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument(
        "--reduce", choices=("sum", "ordered"), default="sum", help="how grad_hidden is added up over the ranks"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks = init_from_env()
    tokens, vocab_size = read_tokens(args.text)
    recipe = Recipe(steps=args.steps)
    losses = train(tokens, vocab_size, recipe, dist.group.WORLD, ranks.device, GradOptions(reduce=args.reduce))
    if ranks.rank == 0:
        lines = (json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses))
        args.out.write_text("".join(lines))
        print(f"{ranks.world_size} ranks, {len(losses)} steps: loss {losses[0]:.4f} to {losses[-1]:.4f}: {args.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
