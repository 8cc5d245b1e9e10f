"""Heads and parallel layouts of models that people train: what tests and benchmarks take their shapes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """A head [padded_vocab_size, hidden_size] over `tp` ranks, and rows over `cp` ranks."""

    name: str
    hidden_size: int
    real_vocab_size: int
    padded_vocab_size: int
    tp: int
    cp: int
    rows: int  # a rank's tokens in a micro-batch

    @property
    def local_size(self) -> int:
        """V_local: columns of a rank."""
        return self.padded_vocab_size // self.tp

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.tp * self.cp

    def tp_ranks(self, cp_rank: int) -> list[int]:
        """World ranks of one tensor-parallel group: neighbours, as Megatron places them."""
        return list(range(cp_rank * self.tp, (cp_rank + 1) * self.tp))

    def zigzag_rows(self, cp_rank: int, total: int) -> list[int]:
        """The rows of a sequence that a context-parallel rank owns: chunk r and its mirror image, of 2 cp chunks."""
        size = total // (2 * self.cp)
        mirror = 2 * self.cp - 1 - cp_rank
        return [*range(cp_rank * size, (cp_rank + 1) * size), *range(mirror * size, (mirror + 1) * size)]


# Megatron pads a vocabulary to a multiple of 128 tp: 151936 = 128 * 1187 becomes 152064 at tp 2, 128256 stays.
QWEN3_8B = Layout("Qwen3-8B", 4096, 151936, 152064, tp=2, cp=2, rows=256)
LLAMA3_8B = Layout("Llama-3-8B", 4096, 128256, 128256, tp=2, cp=2, rows=256)
LLAMA3_70B = Layout("Llama-3-70B", 8192, 128256, 128256, tp=4, cp=1, rows=256)
LAYOUTS = (QWEN3_8B, LLAMA3_8B, LLAMA3_70B)
