"""backend="torch": ordinary F.linear and log_softmax, sharded by log-sum-exp. Never contract-bearing.

For devices without kernels and for comparisons. It holds the [N, V_local] logits. Its records are four fp64 words a
row, carried as int64 like the others: log-sum-exp of this shard, target logit, mean logit under this shard's
softmax, maximum; -inf and NaN mean what they do elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vocabshard.kernels.blockwise import active_rows, backward, dlogits, without_autocast
from vocabshard.kernels.problem import KeptLogits, LocalProblem, RowGrads, SavedRows

F64 = torch.float64


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: LocalProblem, keep: KeptLogits | None
) -> Tensor:
    """fp32 [N, valid] after soft-cap, before temperature."""
    product = F.linear(hidden, weight[: problem.valid])
    if keep is not None:
        keep.tensors[0].copy_(product[: keep.rows])
    z = product.float()
    if bias is not None:
        z = z + bias[: problem.valid].float()
    if problem.softcap is not None:
        z = torch.where(torch.isfinite(z), problem.softcap * torch.tanh(z / problem.softcap), z)
    return z


def _scaled(z: Tensor, inv_temperature: float | Tensor | None) -> Tensor:
    if inv_temperature is None:
        return z
    return z * (inv_temperature[:, None] if isinstance(inv_temperature, Tensor) else inv_temperature)


def _records(y: Tensor, target_ids: Tensor, problem: LocalProblem) -> Tensor:
    rows = y.shape[0]
    local = target_ids - problem.vocab_start
    here = (local >= 0) & (local < problem.valid)
    minus = y.new_full((rows,), float("-inf"))
    if problem.valid == 0:
        return torch.stack([minus, minus, torch.zeros_like(minus), minus]).to(F64).view(torch.int64)
    y64 = y.to(F64)
    lse = torch.logsumexp(y64, 1)
    target = torch.where(here, y.gather(1, torch.where(here, local, 0)[:, None])[:, 0], minus)
    mean = torch.zeros_like(lse)
    if problem.entropy:
        p = torch.softmax(y64, 1)
        mean = torch.where(torch.isneginf(lse), 0.0, torch.where(p > 0, p * y64, 0.0).sum(1))
        mean = torch.where(torch.isnan(lse), lse, mean)
    return torch.stack([lse, target.to(F64), mean, y64.amax(1)]).view(torch.int64)


@without_autocast
def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    *,
    want_logits: bool = False,
    keep: KeptLogits | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Records int64 [R, N] and logits of a library product: the kernel interface, not the contract's bytes."""
    z = _logits(hidden, weight, bias, problem, keep)
    logits = None
    if want_logits:
        logits = F.pad(z, (0, weight.shape[0] - problem.valid), value=float("-inf"))
    return _records(_scaled(z, inv_temperature), target_ids, problem), logits


def logits_forward(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    rows: Tensor | None = None,
) -> Tensor:
    """Records int64 [R, M] of logits that exist."""
    chosen = logits[:, : problem.valid] if rows is None else logits[rows, : problem.valid]
    return _records(_scaled(chosen.float(), inv_temperature), target_ids, problem)


def logits_backward(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    saved: SavedRows,
    grads: RowGrads,
    out: Tensor,
    rows: Tensor | None = None,
) -> None:
    """The gradient of logits that exist, into `out`."""
    if problem.valid == 0:
        out.zero_()
        return
    chosen = logits[:, : problem.valid] if rows is None else logits[rows, : problem.valid]
    scale = inv_temperature[:, None] if isinstance(inv_temperature, Tensor) else inv_temperature
    every = slice(0, chosen.shape[0])
    dz = dlogits(chosen.float(), scale, problem, 0, every, target_ids, saved, grads, active_rows(grads))
    if rows is None:
        out[:, : problem.valid] = dz
        out[:, problem.valid :] = 0
        return
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    total[:, : problem.valid].index_add_(0, rows, dz)
    out.copy_(total)


def kept_bytes_per_row(columns: int, dtype: torch.dtype) -> int:
    """The product, as the library gave it."""
    return columns * dtype.itemsize


def new_kept(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> KeptLogits:
    """Room for the logits of `rows` rows."""
    return KeptLogits((torch.empty(rows, columns, dtype=dtype, device=device),))


__all__ = ["backward", "forward", "kept_bytes_per_row", "logits_backward", "logits_forward", "new_kept"]
