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


def _sum(x: Tensor) -> Tensor:
    """Row sums [N, V] -> [N] by elementwise halves: a library's reduction may depend on the rows beside a row."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0])
    while x.shape[1] > 1:
        half = (x.shape[1] + 1) // 2
        rest = x[:, half:]
        x = torch.cat([x[:, : rest.shape[1]] + rest, x[:, rest.shape[1] : half]], 1)
    return x[:, 0]


def _records(y: Tensor, target_ids: Tensor, problem: LocalProblem) -> Tensor:
    rows = y.shape[0]
    local = target_ids - problem.vocab_start
    here = (local >= 0) & (local < problem.valid)
    minus = y.new_full((rows,), float("-inf"))
    if problem.valid == 0:
        return torch.stack([minus, minus, torch.zeros_like(minus), minus]).to(F64).view(torch.int64)
    maximum = y.amax(1).to(F64)
    base = torch.where(torch.isinf(maximum), 0.0, maximum)[:, None]
    e = torch.exp(y.to(F64) - base)
    total = _sum(e)
    lse = torch.log(total) + base[:, 0]
    target = torch.where(here, y.gather(1, torch.where(here, local, 0)[:, None])[:, 0], minus)
    mean = torch.zeros_like(lse)
    if problem.entropy:
        mean = _sum(torch.where(e > 0, e * y.to(F64), 0.0)) / total
        mean = torch.where(torch.isneginf(lse), 0.0, torch.where(torch.isnan(lse), lse, mean))
    return torch.stack([lse, target.to(F64), mean, maximum]).view(torch.int64)


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


WORKSPACE = 1 << 30  # bytes that rows of logits that exist may take at a time
_BYTES_PER_ELEMENT = 64  # of temporaries, fp64 for the most part


def _chunks(rows: int, problem: LocalProblem, chunk_rows: int | None) -> list[slice]:
    size = chunk_rows or max(1, WORKSPACE // (_BYTES_PER_ELEMENT * max(1, problem.valid)))
    return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


def _chosen(logits: Tensor, rows: Tensor | None, chunk: slice, problem: LocalProblem) -> Tensor:
    """fp32 [rows of the chunk, valid], contiguous: elementwise functions may differ elsewhere."""
    part = logits[chunk] if rows is None else logits[rows[chunk]]
    return part[:, : problem.valid].float().contiguous()


def _of_chunk(scale: float | Tensor | None, chunk: slice) -> float | Tensor | None:
    return scale[chunk] if isinstance(scale, Tensor) else scale


def logits_forward(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    rows: Tensor | None = None,
    *,
    chunk_rows: int | None = None,
) -> Tensor:
    """Some rows at a time, within WORKSPACE; chunk_rows, for tests, changes no byte."""
    records = [
        _records(
            _scaled(_chosen(logits, rows, chunk, problem), _of_chunk(inv_temperature, chunk)),
            target_ids[chunk],
            problem,
        )
        for chunk in _chunks(target_ids.shape[0], problem, chunk_rows)
    ]
    return torch.cat(records, 1) if records else torch.zeros(4, 0, dtype=torch.int64, device=logits.device)


def logits_backward(
    logits: Tensor,
    target_ids: Tensor,
    inv_temperature: float | Tensor | None,
    problem: LocalProblem,
    saved: SavedRows,
    grads: RowGrads,
    out: Tensor,
    rows: Tensor | None = None,
    *,
    chunk_rows: int | None = None,
) -> None:
    """The gradient of logits that exist, into `out`."""
    if problem.valid == 0:
        out.zero_()
        return
    active = active_rows(grads)
    if out.device.type == "cpu":
        chunk_rows = 1  # torch's loops there end in code of other bits, wherever the last element lies
    total = out if rows is None else torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for chunk in _chunks(target_ids.shape[0], problem, chunk_rows):
        scale = _of_chunk(inv_temperature, chunk)
        scale = scale[:, None] if isinstance(scale, Tensor) else scale
        z = _chosen(logits, rows, chunk, problem)
        dz = dlogits(z, scale, problem, 0, chunk, target_ids, saved, grads, active)
        if rows is None:
            out[chunk, : problem.valid] = dz
            out[chunk, problem.valid :] = 0
        else:
            total[:, : problem.valid].index_add_(0, rows[chunk], dz)
    if rows is not None:
        out.copy_(total)


def kept_bytes_per_row(columns: int, dtype: torch.dtype) -> int:
    """The product, as the library gave it."""
    return columns * dtype.itemsize


def new_kept(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> KeptLogits:
    """Room for the logits of `rows` rows."""
    return KeptLogits((torch.empty(rows, columns, dtype=dtype, device=device),))


__all__ = ["backward", "forward", "kept_bytes_per_row", "logits_backward", "logits_forward", "new_kept"]
