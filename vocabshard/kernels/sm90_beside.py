"""Many rows' best columns on NVIDIA Hopper, found beside the fused forward: only some columns' logits are ever there.

The logits of the leading columns give the n best of them, which bound the n best of all from below. The forward over
the rest lists what is better than that bound in its epilogue, and counts what is better than the target, whose logit is
made first, by the same chain. Two records of a row come of it, which fold into the bytes of one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.kernels import truncated
from vocabshard.kernels.problem import LocalProblem
from vocabshard.kernels.sm90_inputs import ELEMENTS, addressable, for_tma, strides
from vocabshard.kernels.sm90_topk import topk_scan
from vocabshard.partials import identity_records, new_records
from vocabshard.sampling import KEEP_ALL, place_of

_SHARE, _LEAST, _EACH = 16, 1536, 160  # of the columns; columns; columns for each of the n best
_STEP = 384  # columns of the tiles that a pair of multiprocessors takes


class Operands:
    """What every function here takes: rows of hidden, as many as a launch takes, and this rank's columns."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        inv_temperature: float | Tensor | None,
        problem: LocalProblem,
        cut: Tensor | None,
    ) -> None:
        row, column = strides(hidden)
        self.hidden = hidden if addressable(hidden.data_ptr(), row, column) else for_tma(hidden)
        self.weight = weight
        self.bias = bias.contiguous() if bias is not None else None
        self.target_ids, self.inv_temperature = target_ids, inv_temperature
        self.problem, self.cut = problem, cut

    @property
    def rows(self) -> int:
        """N."""
        return self.target_ids.shape[0]

    @property
    def fast(self) -> bool:
        """Whether weight is as the copy engine reads it."""
        return addressable(self.weight.data_ptr(), *strides(self.weight))

    def forward(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Records and logits of some rows and columns, of which those of padding come last."""
        from vocabshard.kernels import sm90

        width = columns.stop - columns.start
        problem = replace(
            self.problem,
            vocab_start=self.problem.vocab_start + columns.start,
            valid=min(max(self.problem.valid - columns.start, 0), width),
        )
        scale = self.inv_temperature
        records, logits = sm90.forward(
            self.hidden[rows],
            self.weight[columns],
            None if self.bias is None else self.bias[columns],
            self.target_ids[rows],
            scale[rows] if isinstance(scale, Tensor) else scale,
            problem,
            want_logits=True,
            cut=None if self.cut is None else self.cut[rows],
        )
        assert logits is not None
        return records, logits


def leading_columns(rows: int, columns: int, n: int) -> int:
    """How many columns the bound is taken of; all of them where the rest would not be worth a launch."""
    wanted = max(columns // _SHARE, _LEAST, _EACH * n)
    some = min(wanted, truncated.LOGITS_BYTES // (4 * max(rows, 1))) // _STEP * _STEP
    return some if n <= some <= columns // 2 else columns


def topk_places(x: Operands) -> Tensor:
    """int64 [N]: the places of the targets that are columns here, else -2^63."""
    place = torch.empty(x.rows, dtype=torch.int64, device=x.hidden.device)
    problem = x.problem
    if not x.fast:
        local = x.target_ids - problem.vocab_start
        here = (local >= 0) & (local < problem.valid)
        for rows in truncated.row_blocks(x.rows, x.weight.shape[0]):
            _, logits = x.forward(rows, slice(0, x.weight.shape[0]))
            z = logits.gather(1, torch.where(here, local, 0)[rows, None])[:, 0]
            place[rows] = torch.where(here[rows], place_of(z, x.target_ids[rows]), KEEP_ALL)
        return place
    device = x.hidden.device.index
    _C.sm90_topk_target(
        device,
        torch._C._cuda_getCurrentRawStream(device),
        ELEMENTS[x.hidden.dtype],
        x.rows,
        x.hidden.shape[1],
        x.hidden.data_ptr(),
        strides(x.hidden)[0],
        x.weight.data_ptr(),
        strides(x.weight)[0],
        0 if x.bias is None else x.bias.data_ptr(),
        0 if x.bias is None else ELEMENTS[x.bias.dtype],
        problem.softcap or 0.0,
        problem.vocab_start,
        problem.valid,
        x.target_ids.data_ptr(),
        place.data_ptr(),
    )
    return place


def topk_forward(x: Operands, n: int, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Records int64 [2, R, N], the n best places here int64 [N, n], and how many are better than `place` int64 [N]."""
    problem, device = x.problem, x.hidden.device
    lead = leading_columns(x.rows, problem.valid, n) if x.fast else problem.valid
    work = None if lead == problem.valid else _Rest(x, lead, n)
    if work is None or work.bytes == 0:
        return _by_blocks(x, n, place)
    first, logits = x.forward(slice(0, x.rows), slice(0, lead))
    best, before = topk_scan(logits, replace(problem, valid=lead), n, x.target_ids, place)
    del logits
    records = torch.stack([first, new_records(x.rows, False, device)])
    work.run(records[1], place, best, before)
    return records, best, before


class _Rest:
    """The forward over the columns from `lead` on."""

    def __init__(self, x: Operands, lead: int, n: int) -> None:
        self._x, self._lead, self._n = x, lead, n
        self.bytes = self._call(0, 0, 0, 0, 0)  # 0: there is no kernel for it

    def run(self, records: Tensor, place: Tensor, best: Tensor, before: Tensor) -> None:
        """Fills records, and adds to best and before."""
        workspace = torch.empty(self.bytes, dtype=torch.uint8, device=self._x.hidden.device)
        self._call(*(t.data_ptr() for t in (records, place, best, before, workspace)))

    def _call(self, records: int, place: int, best: int, before: int, workspace: int) -> int:
        x, device = self._x, self._x.hidden.device.index
        per_row, scale = 0, 1.0
        if isinstance(x.inv_temperature, Tensor):
            per_row = x.inv_temperature.data_ptr()
        elif x.inv_temperature is not None:
            scale = x.inv_temperature
        weight = x.weight[self._lead : x.problem.valid]
        bias = None if x.bias is None else x.bias[self._lead :]
        return _C.sm90_topk_forward(
            device,
            torch._C._cuda_getCurrentRawStream(device),
            ELEMENTS[x.hidden.dtype],
            x.rows,
            x.hidden.shape[1],
            weight.shape[0],
            x.hidden.data_ptr(),
            strides(x.hidden)[0],
            weight.data_ptr(),
            strides(x.weight)[0],
            0 if bias is None else bias.data_ptr(),
            0 if bias is None else ELEMENTS[bias.dtype],
            x.target_ids.data_ptr(),
            x.problem.vocab_start + self._lead,
            per_row,
            scale,
            x.problem.softcap or 0.0,
            0 if x.cut is None else x.cut.data_ptr(),
            records,
            self._n,
            place,
            best,
            before,
            workspace,
        )


def _by_blocks(x: Operands, n: int, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same from all logits, some rows at a time."""
    records = torch.stack([identity_records(x.rows, False, x.hidden.device)] * 2)
    best = torch.full((x.rows, n), KEEP_ALL, dtype=torch.int64, device=x.hidden.device)
    before = torch.zeros(x.rows, dtype=torch.int64, device=x.hidden.device)
    columns = x.weight.shape[0]
    for rows in truncated.row_blocks(x.rows, columns):
        records[0, :, rows], logits = x.forward(rows, slice(0, columns))
        best[rows], before[rows] = topk_scan(logits, x.problem, n, x.target_ids[rows], place[rows])
    return records, best, before
