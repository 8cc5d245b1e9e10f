"""The Hopper backward: the gradient of the logits for a block of the vocabulary at a time, and its products.

For a block of columns, logits are recomputed by the forward's own main loop and their gradient is formed in fp32 from
the saved lse2 pair, rounded once to the operands' dtype and stored; two products take it to grad_hidden and
grad_weight. Of rows that the forward kept (sm90_kept.py) it is formed from what was kept, and where all were and nobody
will read them again, in their place and as one block: a truncation is in them. Scratch memory is bounded by
WORKSPACE, whatever N and V. No byte depends on how the blocks are cut, and a row of grad_hidden not on the batch.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from vocabshard import _C
from vocabshard.kernels import blockwise, sm90_turned
from vocabshard.kernels.problem import (
    ORDINARY,
    GradPlan,
    KeptLogits,
    LocalProblem,
    Needs,
    RowGrads,
    SavedRows,
    Upstream,
)
from vocabshard.kernels.sm90_cut import COLUMNS, ROWS, Blocks
from vocabshard.kernels.sm90_cut import MOST_ROWS as MOST_ROWS
from vocabshard.kernels.sm90_cut import cut as cut_into_blocks
from vocabshard.kernels.sm90_fma import FMA_CHAIN
from vocabshard.kernels.sm90_inputs import ELEMENTS, for_tma, plain_strides, readable_by_tma
from vocabshard.kernels.sm90_kept import GROUP
from vocabshard.kernels.sm90_products import grad_hidden as add_grad_hidden
from vocabshard.kernels.sm90_products import grad_weight as add_grad_weight

WORKSPACE = 256 << 20  # bytes beside the gradients
# The tensor core cuts every sum off at fp32, always towards zero: over a whole vocabulary that adds up to as much as
# fp16's own rounding (bf16's is eight times that). So grad_hidden of fp16 is a sum of chains of so many columns, unless
# it has to go on from another rank's.
SHORT_CHAIN = 10 * COLUMNS
_ROUNDED_FROM = 1024  # rows
_SUMS_BYTES = 16 << 20  # of the sums for grad_bias where dlogits take no room of their own


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
    how: GradPlan = ORDINARY,
    *,
    cut: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The kernel interface's backward (vocabshard/kernels/problem.py). fp32 is taken by blockwise.py with products of
    FMA chains, and with a cut by sm90.py; 16-bit operands that TMA can't read are copied to where it can, the weight a
    block at a time. cut int64 [N]: what a truncation keeps (vocabshard/sampling.py); other columns get and give
    nothing."""
    hidden, weight = plain_strides(hidden), plain_strides(weight)
    n, d = hidden.shape
    columns = problem.valid
    if hidden.dtype == torch.float32 or n == 0 or columns == 0:
        products = FMA_CHAIN if hidden.dtype == torch.float32 else None
        return blockwise.backward(
            hidden, weight, bias, target_ids, inv_temperature, problem, saved, grads, needs, how, products=products
        )
    device = hidden.device
    how = _in_columns(how)
    if not readable_by_tma(hidden):
        hidden = for_tma(hidden)
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    grad_hidden = grad_weight = grad_bias = None
    if needs.weight:
        grad_weight = how.main_grad
        if grad_weight is None:
            grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            if columns < len(weight):
                grad_weight[columns:].zero_()
    if needs.bias and bias is not None:
        grad_bias = torch.zeros_like(bias)

    terms = RowTerms(hidden, target_ids, inv_temperature, problem, saved, grads, needs.weight, cut)
    pairs = max(torch.cuda.get_device_properties(device).multi_processor_count // 2, 1)
    # columns of a chain of grad_hidden's, 0: all
    chains = SHORT_CHAIN if hidden.dtype == torch.float16 and how.grad_hidden is None else 0
    in_place = how.kept is not None and how.last_use and how.kept.rows == n
    turned = in_place and grad_weight is not None and grad_bias is None and sm90_turned.pays(n, d, columns, pairs)
    if in_place and how.kept is not None:
        blocks = Blocks(n, (0, columns))
        if turned:
            dlogits = how.kept.tensors[0].view(hidden.dtype)
        else:
            dlogits = terms.of_all_kept(how.kept, columns, grad_bias)
    else:
        # so few rows at a time that a block holds a chain
        most_rows, step = (16384 if d <= 8192 else 2048, SHORT_CHAIN) if chains else (MOST_ROWS, COLUMNS)
        blocks = cut_into_blocks(
            n, d, columns, WORKSPACE - terms.bytes, pairs, most_rows, not readable_by_tma(weight), step
        )
        width = max(-(-(b - a) // 64) * 64 for a, b in itertools.pairwise(blocks.columns))
        dlogits = torch.empty(blocks.rows, width, dtype=hidden.dtype, device=device)
    width = dlogits.shape[1]
    sums = None
    if grad_bias is not None and not in_place:
        sums = torch.empty(-(-n // ROWS), width, dtype=torch.float32, device=device)
    if needs.hidden:
        grad_hidden = how.grad_hidden
        if grad_hidden is None:
            # where its fp32 would be much memory beside what was kept
            at_once = how.rounded_hidden and in_place and n >= _ROUNDED_FROM
            grad_hidden = torch.empty(n, d, dtype=hidden.dtype if at_once else torch.float32, device=device)
    if turned and grad_weight is not None and how.kept is not None:

        def complete(dz: Tensor) -> None:
            if grad_hidden is None:
                return
            for part in how.ready_rows or (slice(0, n),):
                to = grad_hidden[part]
                add_grad_hidden(dz[part], weight[:columns], to, go_on=False, row_active=terms.active[part])
                if how.hidden_ready is not None:
                    how.hidden_ready(to)

        add = how.main_grad is not None
        sm90_turned.grad_weight_in_blocks(terms, how.kept, grad_weight, columns, pairs, add, complete)
        return grad_hidden, None if add else grad_weight, grad_bias
    in_pieces = blocks.rows < n
    chain = torch.empty(width, d, dtype=torch.float32, device=device) if in_pieces and needs.weight else None
    for start, stop in itertools.pairwise(blocks.columns):
        block_weight = weight[start:stop]
        if not readable_by_tma(block_weight):
            block_weight = for_tma(block_weight)
        for first in range(0, n, blocks.rows):
            rows = slice(first, min(first + blocks.rows, n))
            last = rows.stop == n
            if in_place:
                dz = dlogits[:, :columns]
            else:
                dz = terms.block(rows, start, block_weight, bias, how.kept, dlogits, sums)
            if grad_hidden is not None:
                go_on = start > 0 or how.grad_hidden is not None
                in_parts = stop == columns and not in_pieces and how.hidden_ready is not None and how.ready_rows
                for part in how.ready_rows if in_parts else (rows,):
                    to = grad_hidden[part]
                    of_part = dz if part is rows else dz[part]
                    if chains == 0:
                        add_grad_hidden(of_part, block_weight, to, go_on=go_on, row_active=terms.active[part])
                    for v in range(0, stop - start, chains) if chains else ():
                        one, its_weight = of_part[:, v : v + chains], block_weight[v : v + chains]
                        add = start + v > 0
                        add_grad_hidden(one, its_weight, to, go_on=False, add=add, row_active=terms.active[part])
                    if in_parts and how.hidden_ready is not None:
                        how.hidden_ready(to)
                if last and stop == columns and not in_parts:
                    how.announce(grad_hidden)
            if grad_weight is not None:
                so_far = None if chain is None else chain[: stop - start]
                add_grad_weight(
                    dz,
                    hidden[rows],
                    grad_weight[start:stop] if last or so_far is None else so_far,
                    go_on_from=so_far if first > 0 else None,
                    add=last and how.main_grad is not None,
                    row_mask=terms.broken[first // 64 :],
                )
        if sums is not None and grad_bias is not None:
            _add_up(sums, grad_bias[start:stop])
    return grad_hidden, None if how.main_grad is not None else grad_weight, grad_bias


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
                _add_up(sums, grad_bias[start:stop])
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


def _in_columns(how: GradPlan) -> GradPlan:
    """References that were saved elsewhere and brought back may lie by rows: they are laid as new_kept lays them."""
    if how.kept is None or how.kept.rows == 1 or how.kept.tensors[1].stride(0) == 1:
        return how
    codes, references, target_y = how.kept.tensors
    return replace(how, kept=KeptLogits((codes, references.t().contiguous().t(), target_y)))


def _add_up(sums: Tensor, grad_bias: Tensor) -> None:
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
