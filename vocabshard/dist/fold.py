"""The fold: gathered records [W, R, N] -> results of each row, in ascending rank order, by a kernel of ours."""

from __future__ import annotations

import torch
from torch import Tensor

from vocabshard.contract import LOG2E
from vocabshard.partials import FoldedRows, Scores


def fold(
    backend: str, gathered: Tensor, target_ids: Tensor, ignore_index: int, real_vocab_size: int, invalid: str
) -> FoldedRows:
    """gathered int64 [W, R, N] and target_ids int64 [N] of global ids -> FoldedRows, [N] each.

    An ignored row's logp is 0; a target that is no real id gives NaN or 0 by `invalid`. No host synchronisation.
    """
    if backend == "torch":
        return _fold_library(gathered, target_ids, ignore_index, real_vocab_size, invalid)
    if gathered.device.type == "cpu":
        return _fold_cpu(gathered, target_ids, ignore_index, real_vocab_size, invalid)
    if backend == "triton":
        from vocabshard.dist import triton_fold

        return triton_fold.fold(gathered, target_ids, ignore_index, real_vocab_size, invalid)
    if backend == "sm90":
        return _fold_cuda(gathered, target_ids, ignore_index, real_vocab_size, invalid)
    raise ValueError(f"no fold kernel for backend {backend!r} and device {gathered.device.type!r}")


def fold_scores(
    backend: str, gathered: Tensor, target_ids: Tensor, ignore_index: int, real_vocab_size: int, invalid: str
) -> Scores:
    """The same where no backward follows."""
    if backend != "sm90" or gathered.device.type == "cpu":
        return Scores(*fold(backend, gathered, target_ids, ignore_index, real_vocab_size, invalid)[:3])
    logp = torch.empty(gathered.shape[2], dtype=torch.float32, device=gathered.device)
    out = Scores(logp, torch.empty_like(logp), torch.empty_like(logp) if gathered.shape[1] > 4 else None)
    _enqueue_fold(gathered, target_ids, ignore_index, real_vocab_size, invalid, out)
    return out


def set_targets(backend: str, gathered: Tensor, y: Tensor) -> Tensor:
    """gathered [W, R, N] and y fp32 [N, n] -> [W, R, N * n]: the same rows once for each of n targets of that y."""
    gathered = gathered[..., None].repeat(1, 1, 1, y.shape[1]).flatten(2)  # its own memory also where n is 1
    y = y.reshape(-1)
    if backend == "torch":
        targets = gathered.view(torch.float64)[:, 1]
        targets[0], targets[1:] = y.double(), float("-inf")
    else:  # the first rank's that is no NaN is taken
        targets = gathered[:, 0].view(torch.float32).unflatten(1, (-1, 2))[..., 1]
        targets[0], targets[1:] = y, float("nan")
    return gathered


def _new_rows(gathered: Tensor, entropy: bool) -> FoldedRows:
    rows = gathered.shape[2]

    def new(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, dtype=dtype, device=gathered.device)

    return FoldedRows(new(), new(), new() if entropy else None, new(torch.int32), new(), new())


def _fold_cpu(
    gathered: Tensor, target_ids: Tensor, ignore_index: int, real_vocab_size: int, invalid: str
) -> FoldedRows:
    from vocabshard import _C

    gathered = gathered.contiguous()
    world_size, words, rows = gathered.shape
    entropy = words > 4
    out = _new_rows(gathered, entropy)
    _C.cpu_fold(
        gathered.data_ptr(),
        world_size,
        words,
        rows,
        target_ids.data_ptr(),
        ignore_index,
        real_vocab_size,
        invalid == "nan",
        out.logp.data_ptr(),
        out.lse.data_ptr(),
        out.entropy.data_ptr() if out.entropy is not None else 0,
        out.lse2_int.data_ptr(),
        out.lse2_frac.data_ptr(),
        out.maximum.data_ptr(),
    )
    return out


def _fold_cuda(
    gathered: Tensor, target_ids: Tensor, ignore_index: int, real_vocab_size: int, invalid: str
) -> FoldedRows:
    out = _new_rows(gathered, gathered.shape[1] > 4)
    _enqueue_fold(gathered, target_ids, ignore_index, real_vocab_size, invalid, out)
    return out


def _enqueue_fold(
    gathered: Tensor,
    target_ids: Tensor,
    ignore_index: int,
    real_vocab_size: int,
    invalid: str,
    out: FoldedRows | Scores,
) -> None:
    """On the caller's stream of the records' device."""
    from vocabshard import _C

    gathered = gathered.contiguous()
    world_size, words, rows = gathered.shape
    device = gathered.device.index
    more = (
        (out.lse2_int.data_ptr(), out.lse2_frac.data_ptr(), out.maximum.data_ptr())
        if isinstance(out, FoldedRows)
        else (0, 0, 0)
    )
    _C.sm90_fold(
        device=device,
        records=gathered.data_ptr(),
        ranks=world_size,
        rows=rows,
        target_ids=target_ids.data_ptr(),
        ignore_index=ignore_index,
        real_vocab_size=real_vocab_size,
        invalid_is_nan=invalid == "nan",
        entropy=words > 4,
        logp=out.logp.data_ptr(),
        lse=out.lse.data_ptr(),
        entropy_out=0 if out.entropy is None else out.entropy.data_ptr(),
        lse2_int=more[0],
        lse2_frac=more[1],
        maximum=more[2],
        stream=torch._C._cuda_getCurrentRawStream(device),
    )


def _fold_library(
    gathered: Tensor, target_ids: Tensor, ignore_index: int, real_vocab_size: int, invalid: str
) -> FoldedRows:
    """For backend="torch": records of four fp64 words (vocabshard/kernels/reference.py)."""
    lses, targets, means, maxima = gathered.view(torch.float64).unbind(1)
    lse = torch.logsumexp(lses, 0)
    empty = torch.isneginf(lse)
    share = torch.where(empty, 0.0, (lses - lse).exp())
    entropy = torch.where(empty, 0.0, lse - torch.where(share == 0, 0.0, share * means).sum(0)).clamp(min=0)
    entropy = torch.where(torch.isnan(lse), lse, entropy)
    poisoned = torch.isnan(lse) | (lse == float("inf"))
    nan = torch.full_like(lse, float("nan"))
    logp = torch.where(empty, lse, (targets.amax(0) - lse).clamp(max=0))
    logp, lse, entropy = (torch.where(poisoned, nan, x) for x in (logp, lse, entropy))
    valid = (target_ids >= 0) & (target_ids < real_vocab_size)
    logp = torch.where(valid, logp, nan if invalid == "nan" else torch.zeros_like(nan))
    logp = torch.where(target_ids == ignore_index, 0.0, logp)
    lse2 = torch.where(empty, 0.0, lse * LOG2E)
    whole = torch.where(poisoned, 0.0, lse2.round())
    return FoldedRows(
        logp.float(), lse.float(), entropy.float(), whole.int(), (lse2 - whole).float(), maxima.amax(0).float()
    )
