"""backend="torch": ordinary F.linear and log_softmax, sharded by log-sum-exp. Never contract-bearing.

For devices without kernels and for comparisons. It holds the [N, V_local] logits. Its records are four fp64 words a
row, carried as int64 like the others: log-sum-exp of this shard, target logit, mean logit under this shard's
softmax, maximum; -inf and NaN mean what they do elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vocabshard.contract import LOG2E
from vocabshard.kernels.blockwise import without_autocast
from vocabshard.kernels.problem import LocalProblem, Needs, RowGrads, SavedRows

F64 = torch.float64


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, problem: LocalProblem) -> Tensor:
    """fp32 [N, valid] after soft-cap, before temperature."""
    weight = weight[: problem.valid]
    z = F.linear(hidden, weight).float()
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
) -> tuple[Tensor, Tensor | None]:
    z = _logits(hidden, weight, bias, problem)
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
    chosen = logits[:, : problem.valid] if rows is None else logits[rows, : problem.valid]
    return _records(_scaled(chosen.float(), inv_temperature), target_ids, problem)


def _dlogits(
    y: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    saved: SavedRows,
    grads: RowGrads,
) -> Tensor:
    """Gradient of the scaled logits' pre-image (before temperature), fp32 [N, valid]."""
    lse2 = saved.lse2_int.to(F64) + saved.lse2_frac.to(F64)
    log_p = (y.to(F64) - (lse2 / LOG2E)[:, None]).float()
    p = torch.where(torch.isneginf(y), 0.0, log_p.exp())
    inner = grads.softmax[:, None]
    if grads.entropy is not None and saved.entropy is not None:
        inner = inner - grads.entropy[:, None] * (log_p + saved.entropy[:, None])
    dy = torch.where(torch.isneginf(y), 0.0, p * inner)
    local = target_ids - problem.vocab_start
    here = (local >= 0) & (local < problem.valid)
    if problem.valid:
        index = torch.where(here, local, 0)[:, None]
        masked = torch.isneginf(y.gather(1, index)[:, 0])
        dy.scatter_add_(1, index, torch.where(here & ~masked, grads.target, 0.0)[:, None])
    active = _active(grads)
    dy = torch.where(torch.isnan(saved.lse2_frac)[:, None], float("nan"), dy)
    return torch.where(active[:, None], _scaled(dy, inv_temperature), 0.0)


def _active(grads: RowGrads) -> Tensor:
    active = (grads.target != 0) | (grads.softmax != 0)
    return active if grads.entropy is None else active | (grads.entropy != 0)


@without_autocast
def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    saved: SavedRows,
    grads: RowGrads,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    active = _active(grads)[:, None]
    hidden = torch.where(active, hidden, 0.0)  # a NaN in a row that counts for nothing must not reach grad_weight
    z = _logits(hidden, weight, bias, problem)
    dz = _dlogits(_scaled(z, inv_temperature), target_ids, inv_temperature, problem, saved, grads)
    if problem.softcap is not None:
        dz = torch.where(torch.isfinite(z), dz * (1 - (z / problem.softcap) ** 2), dz)
    padding = weight.shape[0] - problem.valid
    grad_hidden = dz @ weight[: problem.valid].float() if needs.hidden else None
    grad_weight = F.pad(dz.t() @ hidden.float(), (0, 0, 0, padding)).to(weight.dtype) if needs.weight else None
    grad_bias = None
    if needs.bias and bias is not None:
        grad_bias = F.pad(dz.sum(0), (0, padding)).to(bias.dtype)
    return grad_hidden, grad_weight, grad_bias


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
    chosen = logits[:, : problem.valid] if rows is None else logits[rows, : problem.valid]
    dz = _dlogits(_scaled(chosen.float(), inv_temperature), target_ids, inv_temperature, problem, saved, grads)
    if rows is None:
        out[:, : problem.valid] = dz
        out[:, problem.valid :] = 0
        return
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    total[:, : problem.valid].index_add_(0, rows, dz)
    out.copy_(total)


__all__ = ["backward", "forward", "logits_backward", "logits_forward"]
