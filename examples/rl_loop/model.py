"""The body of a small Llama, from a Hugging Face style directory, in plain torch operations: one path for both sides.

Rollout and trainer call `hidden_states` with the same shapes, so each row's bits are the same on both, whatever tokens
come later in it: what lies behind a position is masked before it can count.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A safetensors file: 8 bytes of length, a JSON header, the data."""
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    data, tensors = memoryview(content)[8 + length :], {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            tensors[name] = torch.frombuffer(data[start:stop], dtype=DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors


class Body(nn.Module):
    """Embedding, layers and the last norm, fp32. `parameters()` are those of the checkpoint, by its names."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self.config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
        tensors = read_tensors(checkpoint / "model.safetensors")
        self.head = tensors.pop("lm_head.weight").float()  # [padded vocabulary, D]: the ranks take their shards of it
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(w.float()) for name, w in tensors.items()}
        )
        rope = self.config.get("rope_parameters") or self.config
        self.theta = float(rope.get("rope_theta", 10000.0))

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """int64 [B, L] -> fp32 [B, L, D]; row t has seen the tokens 0 ... t."""
        x = F.embedding(tokens, self._weight("model.embed_tokens"))
        cos, sin = self._rotation(tokens.shape[1], tokens.device)
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self._attention(f"{name}.self_attn", self._norm(f"{name}.input_layernorm", x), cos, sin)
            y = self._norm(f"{name}.post_attention_layernorm", x)
            gate, up = (F.linear(y, self._weight(f"{name}.mlp.{part}_proj")) for part in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self._weight(f"{name}.mlp.down_proj"))
        return self._norm("model.norm", x)

    def _weight(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight".replace(".", "/")]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self._weight(name)

    def _rotation(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        size = self.config["hidden_size"] // self.config["num_attention_heads"]
        frequency = self.theta ** -(torch.arange(0, size, 2, device=device) / size)
        angle = torch.outer(torch.arange(length, device=device).float(), frequency).repeat(1, 2)
        return angle.cos(), angle.sin()

    def _attention(self, name: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, L, D = x.shape
        heads, shared = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size = D // heads
        q, k, v = (
            F.linear(x, self._weight(f"{name}.{part}_proj")).view(B, L, count, size).transpose(1, 2)
            for part, count in (("q", heads), ("k", shared), ("v", shared))
        )
        q, k = (y * cos + torch.cat([-y[..., size // 2 :], y[..., : size // 2]], -1) * sin for y in (q, k))
        k, v = (y.repeat_interleave(heads // shared, 1) for y in (k, v))
        later = torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(2, 3) * size**-0.5).masked_fill(later, float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, L, D)
        return F.linear(y, self._weight(f"{name}.o_proj"))
