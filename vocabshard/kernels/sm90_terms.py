"""What the Hopper backward makes of rows and of blocks of their logits' gradient, one launch each.

A row's terms are all that its gradient needs beside a logit; dlogits of a block come from them and from logits that are
made again, or from what the forward kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.kernels.problem import KeptLogits, LocalProblem, RowGrads, SavedRows, Upstream
from vocabshard.kernels.sm90_cut import ROWS
from vocabshard.kernels.sm90_inputs import ELEMENTS
from vocabshard.kernels.sm90_kept import GROUP

_SUMS_BYTES = 16 << 20  # of the sums for grad_bias where dlogits take no room of their own


def row_grads(upstream: Upstream, target_ids: Tensor, ignore_index: int, real_vocab_size: int) -> RowGrads:
    """The kernel interface's row_grads: one launch, where torch takes eight."""
    n, device = target_ids.shape[0], target_ids.device
    flows = [None if g is None else g.float() for g in upstream]
    made = torch.empty(2 if flows[2] is None else 3, n, dtype=torch.float32, device=device)
    grads = RowGrads(made[0], made[1], None if flows[2] is None else made[2])
    _C.sm90_row_grads(
        device=device.index,
        rows=n,
        logp=_pointer(flows[0]),
        logp_stride=0 if flows[0] is None else flows[0].stride(0),
        lse=_pointer(flows[1]),
        lse_stride=0 if flows[1] is None else flows[1].stride(0),
        entropy=_pointer(flows[2]),
        entropy_stride=0 if flows[2] is None else flows[2].stride(0),
        target_ids=target_ids.data_ptr(),
        ignore_index=ignore_index,
        real_vocab_size=real_vocab_size,
        grad_target=grads.target.data_ptr(),
        grad_softmax=grads.softmax.data_ptr(),
        grad_entropy=_pointer(grads.entropy),
        stream=torch.cuda.current_stream(device).cuda_stream,
    )
    return grads


class RowTerms:
    """What the gradient of a row's logits is made of besides them, and the launch that makes it."""

    def __init__(
        self,
        hidden: Tensor,
        target_ids: Tensor,
        inv_temperature: float | Tensor | None,
        problem: LocalProblem,
        saved: SavedRows,
        grads: RowGrads,
        look_for_broken: bool,
        cut: Tensor | None = None,
    ) -> None:
        n, device = hidden.shape[0], hidden.device
        self.hidden, self.softcap, self.vocab_start = hidden, problem.softcap, problem.vocab_start
        self.cut = None if cut is None else cut.contiguous()
        self.without_entropy = grads.entropy is None
        self.plain = problem.softcap is None and inv_temperature is None and self.without_entropy and cut is None
        self.terms = torch.empty(n, _C.SM90_DLOGITS_ROW_BYTES, dtype=torch.uint8, device=device)
        self.active = torch.empty(n, dtype=torch.uint8, device=device)
        # rows that count for nothing and yet would make NaN of grad_weight: one bit each
        self.broken = torch.empty(-(-n // 64), dtype=torch.int64, device=device)
        per_row = inv_temperature if isinstance(inv_temperature, Tensor) else None
        scale = 1.0 if inv_temperature is None or isinstance(inv_temperature, Tensor) else inv_temperature
        entropy = saved.entropy if grads.entropy is not None else None
        _C.sm90_dlogits_rows(
            device=device.index,
            rows=n,
            lse2_int=saved.lse2_int.data_ptr(),
            lse2_frac=saved.lse2_frac.data_ptr(),
            entropy=_pointer(entropy),
            grad_target=grads.target.data_ptr(),
            grad_softmax=grads.softmax.data_ptr(),
            grad_entropy=_pointer(grads.entropy),
            target_ids=target_ids.data_ptr(),
            vocab_start=problem.vocab_start,
            valid=problem.valid,
            row_inv_temperature=_pointer(per_row),
            inv_temperature=scale,
            terms=self.terms.data_ptr(),
            active=self.active.data_ptr(),
            broken=self.broken.data_ptr(),
            element=ELEMENTS[hidden.dtype],
            depth=hidden.shape[1],
            hidden=hidden.data_ptr() if look_for_broken else 0,
            hidden_row=hidden.stride(0),
            stream=torch.cuda.current_stream(device).cuda_stream,
        )

    @property
    def bytes(self) -> int:
        """Memory they take."""
        return sum(t.numel() * t.element_size() for t in (self.terms, self.active, self.broken))

    def block(
        self,
        rows: slice,
        start: int,
        weight: Tensor,
        bias: Tensor | None,
        kept: KeptLogits | None,
        out: Tensor,
        sums: Tensor | None,
    ) -> Tensor:
        """dL/dz of `rows` and the columns of `weight`, which begin at `start`, in `out`; their sums for grad_bias in
        `sums`. Leading rows that were kept are read, the others' logits made again."""
        first = rows.start if kept is None else min(max(rows.start, kept.rows), rows.stop)
        if kept is not None and first > rows.start:
            self.of_kept(kept, slice(rows.start, first), start, start + weight.shape[0], out, sums)
        if first < rows.stop:
            self._made_again(slice(first, rows.stop), start, weight, bias, out[first - rows.start :], sums)
        return out[: rows.stop - rows.start, : weight.shape[0]]

    def of_all_kept(self, kept: KeptLogits, columns: int, grad_bias: Tensor | None) -> Tensor:
        """dL/dz of all rows where their codes are, [N, whole groups]; its sums in grad_bias."""
        n, device = kept.rows, self.hidden.device
        out = kept.tensors[0].view(self.hidden.dtype)
        step, sums = columns, None
        if grad_bias is not None:
            blocks = -(-n // ROWS)
            step = max(_SUMS_BYTES // (4 * blocks) // GROUP, 1) * GROUP
            sums = torch.empty(blocks, step, dtype=torch.float32, device=device)
        for start in range(0, columns, step):
            stop = min(start + step, columns)
            self.of_kept(kept, slice(0, n), start, stop, out[:, start:], sums)
            if sums is not None and grad_bias is not None:
                add_up_sums(sums, grad_bias[start:stop])
        return out

    def kept_call(
        self, kept: KeptLogits, rows: slice, start: int, stop: int, out: Tensor, sums: Tensor | None
    ) -> _C.Sm90DlogitsKept:
        """What turns the codes of those rows and columns into dlogits, in `out`; kept.tensors[1] lies as new_kept's."""
        codes, references, target_y = (t[rows] for t in kept.tensors)
        return _C.Sm90DlogitsKept(
            device=codes.device.index,
            rows=codes.shape[0],
            columns=stop - start,
            codes=codes[:, start:].data_ptr(),
            codes_row=codes.stride(0),
            references=references[:, start // GROUP :].data_ptr(),
            references_group=references.stride(1),
            target_y=target_y.data_ptr(),
            plain=self.without_entropy,
            first_column=start,
            row_terms=self.terms[rows].data_ptr(),
            out=out.data_ptr(),
            out_row=out.stride(0),
            bias_sums=0 if sums is None else sums[rows.start // ROWS :].data_ptr(),
            sums_row=0 if sums is None else sums.stride(0),
        )

    def of_kept(self, kept: KeptLogits, rows: slice, start: int, stop: int, out: Tensor, sums: Tensor | None) -> None:
        """The same as a pass of its own."""
        stream = torch.cuda.current_stream(out.device).cuda_stream
        self.kept_call(kept, rows, start, stop, out, sums).launch(stream)

    def _made_again(
        self, rows: slice, start: int, weight: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor | None
    ) -> None:
        hidden, cut = self.hidden[rows], None if self.cut is None else self.cut[rows]
        _C.sm90_dlogits(
            device=hidden.device.index,
            element=ELEMENTS[hidden.dtype],
            rows=hidden.shape[0],
            depth=hidden.shape[1],
            columns=weight.shape[0],
            hidden=hidden.data_ptr(),
            hidden_row=hidden.stride(0),
            weight=weight.data_ptr(),
            weight_row=weight.stride(0),
            bias=0 if bias is None else bias[start:].data_ptr(),
            bias_element=0 if bias is None else ELEMENTS[bias.dtype],
            softcap=self.softcap or 0.0,
            plain=self.plain,
            first_column=start,
            row_terms=self.terms[rows].data_ptr(),
            out=out.data_ptr(),
            out_row=out.stride(0),
            bias_sums=0 if sums is None else sums[rows.start // ROWS :].data_ptr(),
            cut=_pointer(cut),
            first_id=self.vocab_start + start,
            stream=torch.cuda.current_stream(hidden.device).cuda_stream,
        )


def add_up_sums(sums: Tensor, grad_bias: Tensor) -> None:
    """Sums of blocks of 128 rows, in ascending order; columns of `sums` beyond grad_bias's are left alone."""
    _C.sm90_bias_sums(
        device=sums.device.index,
        sums=sums.data_ptr(),
        blocks=sums.shape[0],
        stride=sums.stride(0),
        columns=grad_bias.shape[0],
        grad_bias=grad_bias.data_ptr(),
        bias_element=ELEMENTS[grad_bias.dtype],
        stream=torch.cuda.current_stream(sums.device).cuda_stream,
    )


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
