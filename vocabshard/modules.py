"""Modules over the public functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vocabshard.functional import linear_logp
from vocabshard.options import LogpOutput


class VocabParallelLinearLogp(nn.Module):
    """`linear_logp` with its options kept: stateless, no parameters.

    Args:
        tp_group: the tensor-parallel ProcessGroup; None is this process alone.
        options: keyword arguments of `linear_logp` that every call shall have (global_vocab_size, real_vocab_size,
            shard, temperature, softcap, return_entropy, ...). A call may override them.

    Example:
        op = VocabParallelLinearLogp(tp_group, global_vocab_size=152064, real_vocab_size=151936)
        logp = op(hidden, weight_shard, target_ids, bias_shard)
    """

    def __init__(self, tp_group: Any = None, **options: Any) -> None:
        super().__init__()
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise TypeError(
                f"VocabParallelLinearLogp: unknown option {unknown[0]!r}; expected one of {sorted(_OPTIONS)}"
            )
        self.tp_group = tp_group
        self.options = options

    def forward(
        self, hidden: Tensor, weight: Tensor, target_ids: Tensor, bias: Tensor | None = None, **options: Any
    ) -> Tensor | LogpOutput:
        """hidden [..., D], weight [V_local, D], target_ids [...], bias [V_local] or None; see `linear_logp`."""
        return linear_logp(hidden, weight, target_ids, bias, **{"tp_group": self.tp_group, **self.options, **options})

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabParallelLinearLogp:
        """The copy works over the same group: a process group cannot be copied."""
        return type(self)(self.tp_group, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


_OPTIONS = set(linear_logp.__kwdefaults__ or ()) - {"tp_group"}


class VocabParallelLMHead(nn.Module):
    """A head that owns its padded shard of the weight. Not available in this version."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        raise NotImplementedError(
            "VocabParallelLMHead is not available in this version; hold the weight shard yourself and use "
            "VocabParallelLinearLogp"
        )
