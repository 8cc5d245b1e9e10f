"""A module that owns one rank's rows of a vocabulary matrix [V, D]: padding, initial values, loading, checkpoints.

The head and the embedding are the two; everything here is the same for both, so that they can share one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vocabshard.checks import FLOAT_DTYPES
from vocabshard.contract import TILE
from vocabshard.dist import agree
from vocabshard.dist.gather import gather_objects, rank_and_size
from vocabshard.reshardable import ReshardableRows
from vocabshard.shard import VocabShard

SEEDS = 1 << 32  # what torch's CPU generator tells apart


class VocabRows(nn.Module):
    """`weight` [V_local, D]: rows [shard.start, shard.stop) of a vocabulary padded to lcm(pad_to_multiple_of, 16 W).

    Padding rows are zero after construction, loading and `reset_parameters`, and an optimiser leaves them so: their
    gradient is exactly zero. `bias` is [V_local] or None.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp_group: Any,
        *,
        bias: bool,
        pad_to_multiple_of: int,
        weight: nn.Parameter | None,
        init_std: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if tp_group is not None and hasattr(tp_group, "get_group"):
            tp_group = tp_group.get_group()
        own = torch.empty(0, device=device, dtype=dtype) if weight is None else weight
        stated = {"hidden_size": hidden_size, "vocab_size": vocab_size, "pad_to_multiple_of": pad_to_multiple_of}
        self._agree_on_arguments(
            tp_group,
            stated,
            {"bias": bias, "a weight given": weight is not None, "meta device": own.is_meta},
            own.dtype,
        )
        self.hidden_size, self.vocab_size, self.init_std = hidden_size, vocab_size, init_std
        self.shard = VocabShard.split(vocab_size, tp_group, pad_to_multiple_of=pad_to_multiple_of)
        self._tied = self._tie_lost = False
        if weight is None:
            self.weight = nn.Parameter(torch.empty(self.shard.size, hidden_size, device=device, dtype=dtype))
        else:
            self.tie(weight)
        self.register_parameter("bias", nn.Parameter(self.weight.new_empty(self.shard.size)) if bias else None)
        self._mark()
        if not self.weight.is_meta:
            self.reset_parameters()

    def _agree_on_arguments(
        self, group: Any, sizes: dict[str, int], others: dict[str, bool], dtype: torch.dtype
    ) -> None:
        """Arguments that are good and the same on every rank, or an error on every rank. Collective."""
        owner = type(self).__name__
        error: Exception | None = None
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                error = error or ValueError(f"{owner}: {name} must be a positive int, got {value!r}")
        if dtype not in FLOAT_DTYPES:
            error = error or TypeError(f"{owner}: dtype must be float32, bfloat16 or float16, got {dtype}")
        rank_and_size(group)
        agree.raise_together(error, group)
        agree.compare(gather_objects({**sizes, **others}, group), f"{owner} has to be made alike on every rank")

    def tie(self, weight: nn.Parameter) -> None:
        """Uses `weight` [V_local, D], another module's parameter, instead of its own.

        Also what restores a tie after `to_empty` or `load_state_dict(assign=True)`, which give every module a
        parameter of its own.
        """
        if not isinstance(weight, nn.Parameter):
            raise TypeError(f"{type(self).__name__}: weight must be an nn.Parameter, got {type(weight).__name__}")
        expected = (self.shard.size, self.hidden_size)
        if tuple(weight.shape) != expected:
            raise ValueError(
                f"{type(self).__name__}: expected a weight of {list(expected)}, this rank's padded shard, got "
                f"{list(weight.shape)}; give both modules the same sizes, group and pad_to_multiple_of"
            )
        self.weight = weight
        self._tied, self._tie_lost = True, False

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal values of deviation `init_std`, the same for a row whatever W, device and padding; a bias of zeros.

        Collective on the group (one object all-gather): the seed is drawn from torch's default CPU generator on every
        rank, and rank 0's counts. Values are made in fp32 on the CPU, 16 rows from one generator. A weight that
        belongs to another module is left to it.
        """
        self._check_tie()
        if not self._tied:
            seed = gather_objects(int(torch.randint(SEEDS, ())), self.shard.group)[0]
            valid = self.shard.valid
            for first in range(0, valid, TILE):
                rows = torch.empty(TILE, self.hidden_size)
                generator = torch.Generator().manual_seed((seed + (self.shard.start + first) // TILE) % SEEDS)
                rows.normal_(0.0, self.init_std, generator=generator)
                count = min(TILE, valid - first)
                self.weight[first : first + count] = rows[:count].to(self.weight.dtype)
        if self.bias is not None:
            self.bias.zero_()
        self._clear_padding()

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """The real rows, for `torch.distributed.checkpoint`: saved at one W, they load at any other, in place.

        What is stored is [vocab_size, D] (and [vocab_size]) without padding, so neither W nor the padding is in the
        checkpoint. Without a group the values are ordinary tensors. Not collective.
        """
        named = {prefix + name: parameter.detach() for name, parameter in self.named_parameters(recurse=False)}
        if self.shard.group is None:
            return {name: tensor[: self.vocab_size] for name, tensor in named.items()}
        start, valid = self.shard.start, self.shard.valid
        return {name: ReshardableRows(tensor[:valid], start, self.vocab_size) for name, tensor in named.items()}

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes this rank's rows of whole matrices, [vocab_size, D] with any padding, or this rank's own shard."""
        fitted = dict(state_dict)
        for name, parameter in self.named_parameters(recurse=False):
            given = fitted.get(prefix + name)
            if isinstance(given, Tensor) and given.shape[1:] == parameter.shape[1:] and given.dim():
                rows = self._own_rows(given)
                if rows is None:
                    error_msgs.append(
                        f"{prefix + name}: expected [{self.vocab_size} or more, ...], the whole vocabulary, or "
                        f"[{self.shard.size}, ...], this rank's shard, got {list(given.shape)}; what was saved at "
                        "another number of ranks is loaded through sharded_state_dict and torch.distributed.checkpoint"
                    )
                    return
                fitted[prefix + name] = rows
        before = self.weight
        super()._load_from_state_dict(fitted, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if self._tied and prefix + "weight" in missing_keys:
            missing_keys.remove(prefix + "weight")  # it comes with the module that it belongs to
        self._tie_lost |= self._tied and self.weight is not before
        self._mark()

    def _own_rows(self, given: Tensor) -> Tensor | None:
        """[V_local, ...] with zeros in the padding; None where `given` is neither the whole nor this rank's shard."""
        valid = self.shard.valid
        if given.shape[0] >= self.vocab_size:
            given = given[self.shard.start : self.shard.start + valid]
        elif given.shape[0] == self.shard.size:
            given = given[:valid]
        else:
            return None
        if valid == self.shard.size:
            return given
        return torch.cat([given, given.new_zeros(self.shard.size - valid, *given.shape[1:])])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> VocabRows:
        before = self.weight
        super()._apply(fn, recurse)
        if before.is_meta and not self.weight.is_meta:
            self._tie_lost = self._tied
            self._clear_padding()
        self._mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()  # a parameter's copy does not have the attributes of the original

    def _mark(self) -> None:
        """The attributes by which Megatron knows a sharded parameter (clipping and counting of norms, checkpoints)."""
        for parameter in self.parameters(recurse=False):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim = 0  # type: ignore[attr-defined]
            parameter.partition_stride = 1  # type: ignore[attr-defined]

    @torch.no_grad()
    def _clear_padding(self) -> None:
        for parameter in self.parameters(recurse=False):
            parameter[self.shard.valid :] = 0

    def _check_tie(self) -> None:
        if self._tie_lost:
            raise RuntimeError(
                f"{type(self).__name__}: its tied weight became a parameter of its own (to_empty or "
                "load_state_dict(assign=True) did that); call tie(other.weight) on it again"
            )

    def extra_repr(self) -> str:
        """Sizes and range, for print."""
        return (
            f"hidden_size={self.hidden_size}, vocab_size={self.vocab_size}, rows=[{self.shard.start}, "
            f"{self.shard.stop}) of {self.shard.padded_vocab_size}, bias={self.bias is not None}, tied={self._tied}"
        )
