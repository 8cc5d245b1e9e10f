"""The operator as modules: stateless, or owning this rank's shard of the head or of the embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vocabshard import checks
from vocabshard.dist import agree
from vocabshard.dist.gather import sum_over_group
from vocabshard.functional import linear_logp
from vocabshard.options import LogpOutput, SampleOutput
from vocabshard.sample import vocab_parallel_sample
from vocabshard.sampling import SamplingProgram
from vocabshard.vocab_rows import VocabRows

_OPTIONS = set(linear_logp.__kwdefaults__ or ()) - {"tp_group"}
_OF_SAMPLING = {
    *("row_keys", "temperature", "softcap", "validate", "return_lse", "return_entropy", "topk"),
    *("backend", "strict", "contract"),
}
_OF_THE_SHARD = {"shard", "vocab_start_index", "global_vocab_size", "real_vocab_size"}


def _check_options(owner: str, options: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"{owner}: unknown option {unknown[0]!r}; expected one of {sorted(known)}")


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
        _check_options("VocabParallelLinearLogp", options, _OPTIONS)
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
        """The options, for print."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class VocabParallelLMHead(VocabRows):
    """A head that owns its padded shard: `weight` [V_local, D] and `bias` [V_local] or None; scores with `linear_logp`.

    Args:
        hidden_size, vocab_size: D and V, the real sizes. W ranks hold V_local = V_padded / W rows each, V_padded being
            V rounded up to a multiple of lcm(pad_to_multiple_of, 16 W).
        tp_group: the tensor-parallel ProcessGroup, or a one-dimensional DeviceMesh; None is this process alone.
        bias: whether the head has one. It starts at zero.
        pad_to_multiple_of: of the padded vocabulary (128 * W is Megatron's padding, 64 vLLM's).
        weight: a parameter [V_local, D] to use instead of its own: `VocabParallelEmbedding(...).weight` ties the two.
        init_std: of the normal initial values, which do not depend on W (`reset_parameters`).
        device, dtype: of the parameters. device="meta" leaves them without data until `to_empty(device=...)` and
            `reset_parameters()` or a load.
        options: keyword arguments of `linear_logp` that every call shall have (temperature, softcap, return_entropy,
            grad_options, ...). A call may override them.

    Collectives: object all-gathers when it is made (errors, arguments, ranges, seed); a call's are those of
    `linear_logp`.

    Loading: `load_state_dict` takes a whole weight [V, D] (padded or not; each rank keeps its rows) or this rank's own
    shard. `sharded_state_dict` with torch.distributed.checkpoint saves at one W and loads at another.

    Padding rows are zero and stay so in training. Parameters carry Megatron's tensor_model_parallel, partition_dim
    and partition_stride.

    Example:
        head = VocabParallelLMHead(4096, 151936, tp_group)
        logp = head(hidden, target_ids)
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        tp_group: Any = None,
        *,
        bias: bool = False,
        pad_to_multiple_of: int = 64,
        weight: nn.Parameter | None = None,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        _check_options("VocabParallelLMHead", options, _OPTIONS - _OF_THE_SHARD)
        super().__init__(
            vocab_size, hidden_size, tp_group, bias=bias, pad_to_multiple_of=pad_to_multiple_of, weight=weight,
            init_std=init_std, device=device, dtype=dtype,
        )  # fmt: skip
        self.options = options

    def forward(self, hidden: Tensor, target_ids: Tensor, **options: Any) -> Tensor | LogpOutput:
        """hidden [..., D], target_ids [...] of global ids -> fp32 [...] or LogpOutput, as `linear_logp`."""
        self._check_tie()
        return linear_logp(
            hidden, self.weight, target_ids, self.bias, **{**self.options, **options, "shard": self.shard}
        )

    def sample(self, hidden: Tensor, program: SamplingProgram, seed: int, **options: Any) -> SampleOutput:
        """hidden [..., D] -> tokens, their cuts and log-probs, as `vocab_parallel_sample`, whose options these are.

        Of the options that the head was made with those count that both have (temperature, softcap, backend, ...).
        """
        self._check_tie()
        _check_options("VocabParallelLMHead.sample", options, _OF_SAMPLING - _OF_THE_SHARD)
        kept = {name: value for name, value in self.options.items() if name in _OF_SAMPLING}
        return vocab_parallel_sample(
            hidden, self.weight, self.bias, program=program, seed=seed,
            **{**kept, **options, "shard": self.shard},
        )  # fmt: skip


class VocabParallelEmbedding(VocabRows):
    """Rows of an embedding [V, D] sharded as the head's: ids on every rank in, whole embeddings on every rank out.

    Args as VocabParallelLMHead; with the same sizes, group and pad_to_multiple_of the two can share one parameter
    (`weight=`).

    Determinism: the output is the same bytes whatever W (the one rank that holds a row sends its bits, the others
    zeros, added as integers). An id outside [0, V) is a ValueError on the CPU and a row of NaN, without a gradient, on
    GPUs and in compiled graphs, where looking would synchronise.

    Collectives: as the head's when it is made; one all-reduce of the output in the forward, on the CPU after an
    all-gather of a status (bad or different ids on one rank are an error on every rank); none in the backward, whose
    upstream gradient has to be the same on every rank.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp_group: Any = None,
        *,
        pad_to_multiple_of: int = 64,
        weight: nn.Parameter | None = None,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            vocab_size, hidden_size, tp_group, bias=False, pad_to_multiple_of=pad_to_multiple_of, weight=weight,
            init_std=init_std, device=device, dtype=dtype,
        )  # fmt: skip

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [...] int32 or int64 -> [..., D] of the weight's dtype."""
        self._check_tie()
        if self.weight.device.type == "cpu" and not torch.compiler.is_compiling():
            self._agree_on(input_ids)
        else:
            self._check(input_ids)
        outside = (input_ids < 0) | (input_ids >= self.vocab_size)
        local = input_ids.to(torch.int64) - self.shard.start
        held = (local >= 0) & (local < self.shard.valid)
        rows = F.embedding(torch.where(held, local, 0), self.weight)
        # a gradient of exactly zero reaches row 0 for what is not held
        rows = torch.where(held[..., None], rows, torch.zeros((), dtype=rows.dtype, device=rows.device))
        if self.shard.rank == 0:
            rows = rows.masked_fill(outside[..., None], float("nan"))
        return rows if self.shard.group is None else _SumOfHolders.apply(rows, self.shard.group)

    def _check(self, input_ids: Tensor) -> None:
        if not isinstance(input_ids, Tensor) or input_ids.dtype not in checks.INT_DTYPES:
            got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise TypeError(f"input_ids must be a tensor of int32 or int64, got {got}")

    def _agree_on(self, input_ids: Tensor) -> None:
        """All of it, the values too; an error of one rank is raised on all, of which none waits for the sum."""
        error: Exception | None = None
        try:
            self._check(input_ids)
            outside = (input_ids < 0) | (input_ids >= self.vocab_size)
            if bool(outside.any()):
                at = outside.nonzero()[0].tolist()
                raise ValueError(
                    f"input_ids{at} is {int(input_ids[tuple(at)])}: expected an id in [0, {self.vocab_size})"
                )
        except (TypeError, ValueError) as e:
            error = e
        if self.shard.group is not None:
            hashes = {} if error is not None else {"input_ids": agree.content_hash(input_ids)}
            agree.agree_call(error, hashes, self.shard.group, ("input_ids",))
        if error is not None:
            raise error


class _SumOfHolders(torch.autograd.Function):
    """Adds rows of which one rank at most holds anything; the gradient goes to every rank as it comes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        total = rows.contiguous().clone()
        whole = total.shape[-1] * total.element_size() % 4 == 0
        # as integers, which keeps every bit, that of -0 too
        sum_over_group(total.view(torch.int32 if whole else torch.uint8), group)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0], None
