"""The compiled kernels. Pointers are integers (tensor.data_ptr()), 0 for an absent one; strides count elements."""

from collections.abc import Sequence
from typing import Any, overload

F32: int
BF16: int
F16: int

class Matrix:
    def __init__(
        self, data: int = 0, dtype: int = 0, rows: int = 0, cols: int = 0, row_stride: int = 0, col_stride: int = 1
    ) -> None: ...

class Vector:
    def __init__(self, data: int = 0, dtype: int = 0, stride: int = 1) -> None: ...

class RowInputs:
    def __init__(
        self, target_ids: int, inv_temperature: int = 0, scalar_inv_temperature: float = 1.0, cut: int = 0
    ) -> None: ...

class SamplingBlock:
    def __init__(self, logits: Matrix, vocab_start: int, valid: int, scales: int = 0, scale: float = 1.0) -> None: ...

class Problem:
    def __init__(self, vocab_start: int, valid: int, softcap: float = 0.0, entropy: bool = False) -> None: ...

class RowGradients:
    def __init__(
        self, lse2_int: int, lse2_frac: int, row_entropy: int, target: int, softmax: int, entropy: int
    ) -> None: ...

class GradientPlan:
    def __init__(self, continue_hidden: bool, add_weight: bool, kept: Matrix) -> None: ...

class CpuRun:
    def __init__(self, threads: int = 1, isa: int = -1) -> None: ...

def contract() -> dict[str, Any]:
    """Every constant this extension was built from; vocabshard.contract.constants() has the same keys."""

def build_info() -> dict[str, Any]:
    """build (version and fingerprint), cuda, compiler, cpu_compiled, cpu_usable, cpu_chosen."""

def contraction_probe() -> bool:
    """True if a compiler fused a product with a sum: the bits can't be trusted then."""

def cpu_linear_forward(
    hidden: Matrix,
    weight: Matrix,
    bias: Vector,
    rows: RowInputs,
    problem: Problem,
    records: int,
    logits: Matrix,
    kept: Matrix,
    run: CpuRun,
) -> None: ...
def cpu_linear_backward(
    hidden: Matrix,
    weight: Matrix,
    bias: Vector,
    rows: RowInputs,
    problem: Problem,
    gradients: RowGradients,
    grad_hidden: Matrix,
    grad_weight: Matrix,
    grad_bias: Matrix,
    how: GradientPlan,
    run: CpuRun,
) -> None: ...
def cpu_logits_forward(
    logits: Matrix, source: int, outputs: int, rows: RowInputs, problem: Problem, records: int, run: CpuRun
) -> None: ...
def cpu_logits_backward(
    logits: Matrix,
    source: int,
    outputs: int,
    rows: RowInputs,
    problem: Problem,
    gradients: RowGradients,
    grad_logits: Matrix,
    run: CpuRun,
) -> None: ...
def cpu_sampling_maxima(block: SamplingBlock, out: int, run: CpuRun) -> None: ...
def cpu_sampling_histogram(
    block: SamplingBlock, k_max: int, cut: int, prefix: int, level: int, counts: int, masses: int, run: CpuRun
) -> None: ...
def cpu_sampling_floor(block: SamplingBlock, threshold: int, out: int, run: CpuRun) -> None: ...
def cpu_sampling_equal(block: SamplingBlock, order: int, nth: int, out: int, run: CpuRun) -> None: ...
def cpu_sampling_draw(
    block: SamplingBlock, cut: int, seed: int, row_keys: int, arrival: int, id: int, order: int, run: CpuRun
) -> None: ...
def cpu_sampling_best(block: SamplingBlock, count: int, out: int, run: CpuRun) -> None: ...
def cpu_sampling_before(block: SamplingBlock, place: int, out: int, run: CpuRun) -> None: ...
def spec_clock(x: int, second: int, count: int, out: int) -> None: ...
def spec_philox(counter: list[int], key: list[int]) -> list[int]: ...
def cpu_reciprocals(t: int, count: int, out: int) -> None: ...
def cpu_fold(
    gathered: int,
    world_size: int,
    words: int,
    rows: int,
    target_ids: int,
    ignore_index: int,
    real_vocab_size: int,
    invalid_is_nan: bool,
    logp: int,
    lse: int,
    entropy: int,
    lse2_int: int,
    lse2_frac: int,
    maximum: int,
) -> None: ...
def cpu_fingerprint(
    data: int, rows: int, row_bytes: int, row_stride_bytes: int, first_row: int, threads: int
) -> int: ...
def spec_exp(y: int, count: int, k: int, p: int) -> None:
    """contract.h's scalar exp_split over fp32 y: int32 k, fp32 p."""

def spec_log2(x: int, count: int, a: int, l: int) -> None:
    """contract.h's scalar log2_split over fp64 x: int32 a, fp64 l."""

def spec_softcap(z: int, count: int, cap: float, out: int) -> None: ...
def spec_fma_chain(hidden: Matrix, weight: Matrix, z: int) -> None:
    """fp32 [N, V], one scalar FMA after the other; both matrices fp32."""

def spec_partials(
    y: int,
    rows: int,
    columns: int,
    target: Sequence[int],
    tile_order: Sequence[int],
    splits: Sequence[int],
    entropy: bool,
    records: int,
) -> None:
    """Records of fp32 y [rows, columns] by the scalar text: tiles in tile_order, cut at positions `splits`, merged."""

# ---- with the CUDA side only: build_info()["cuda"] ----

SM90_PATHS: dict[str, int]

class FoldRows:
    """How rows are folded, and where their results go; 0: not wanted."""

    def __init__(
        self,
        ignore_index: int,
        real_vocab_size: int,
        invalid_is_nan: bool,
        logp: int,
        lse: int,
        entropy: int,
        lse2_int: int,
        lse2_frac: int,
        maximum: int,
    ) -> None: ...

class KeptRows:
    """Where a forward leaves codes and references of its first rows."""

    def __init__(
        self, codes: int, codes_row: int, references: int, references_group: int, rows: int, groups: int
    ) -> None: ...

class SamplingSteps:
    """Truncations (kind, number, scaled) of a program."""

    def __init__(self, steps: list[tuple[Any, ...]]) -> None: ...

class DrawRows:
    """What tokens are drawn with; row_keys 0: 0, 1, 2, ..."""

    def __init__(self, seed: int, row_keys: int) -> None: ...

class Sm90Forward:
    """A forward of `hidden` and `weight` on CUDA device `device`, to be planned and launched there."""

    def __init__(
        self,
        device: int,
        element: int,
        rows: int,
        depth: int,
        columns: int,
        hidden: int,
        hidden_row: int,
        hidden_column: int,
        weight: int,
        weight_row: int,
        weight_column: int,
        entropy: bool,
        path: int,
    ) -> None: ...
    def draw(self, draw: DrawRows, vocab_start: int, tokens: int, cut: int) -> bool:
        """Before the plan: tokens are to be drawn. Whether this forward can; records are then [6, rows]."""

    def sample_bytes(self, steps: SamplingSteps) -> int:
        """Of workspace."""

    def sample(
        self,
        steps: SamplingSteps,
        stream: int,
        workspace: int,
        vocab_start: int,
        valid: int,
        bias: int,
        bias_element: int,
        row_inv_temperature: int,
        inv_temperature: float,
        softcap: float,
        seed: int,
        row_keys: int,
        drawn: int,
        cut: int,
        fold: FoldRows,
    ) -> None:
        """Tokens of whole rows from their logits: arrivals, ids and orders [3, rows], cuts, folded rows."""

    def plan(self) -> tuple[int, int, int, int]:
        """Path, bytes of workspace, rows a launch, vocabulary splits."""

    def launch(
        self,
        stream: int,
        workspace: int,
        target_ids: int,
        vocab_start: int,
        valid: int,
        bias: int,
        bias_element: int,
        row_inv_temperature: int,
        inv_temperature: float,
        softcap: float,
        logits: int,
        logits_row: int,
        records: int,
        fold: FoldRows,
        cut: int = 0,
        kept: KeptRows = ...,
    ) -> None:
        """Records, or with records == 0 the folded rows; what is kept of the first rows."""

def sm90_fold_drawn(
    device: int, records: int, ranks: int, rows: int, fold: FoldRows, tokens: int, cut: int, stream: int
) -> None:
    """Folds [ranks, 6, rows] records with winners: tokens and their log-probs."""

SAMPLING_COLUMNS: int
SAMPLING_STREAM_BYTES: int
SAMPLING_STEPS: int
SAMPLING_BEST: int

def sm90_sampling_rows(
    *,
    device: int,
    stream: int,
    logits: int,
    row_stride: int,
    rows: int,
    valid: int,
    vocab_start: int,
    scales: int,
    scale: float,
    whole: bool = False,
    steps: list[tuple[str, float, bool]] = ...,
    given_cut: int = 0,
    cut: int = 0,
    draw: bool = False,
    seed: int = 0,
    row_keys: int = 0,
    drawn: int = 0,
    target_ids: int = 0,
    records: int = 0,
    records_there: bool = False,
    best_count: int = 0,
    best: int = 0,
    place: int = 0,
    before: int = 0,
    maxima: int = 0,
    uncut: int = 0,
    workspace: int = 0,
) -> None:
    """Cuts, tokens, truncated records, best columns and ranks, as far as there is memory for them. With the
    records of all columns and SAMPLING_STREAM_BYTES a row of workspace, by grids that stream rows, if they can."""

TOPK_MOST: int

def sm90_topk_fits(valid: int, n: int) -> bool: ...
def sm90_topk_scan(
    device: int,
    stream: int,
    logits: int,
    row_stride: int,
    rows: int,
    valid: int,
    vocab_start: int,
    n: int,
    target_ids: int,
    place: int,
    best: int,
    before: int,
) -> None:
    """The n best places of rows of logits, and how many are larger than the target's."""

def sm90_topk_target(
    device: int,
    stream: int,
    element: int,
    rows: int,
    depth: int,
    hidden: int,
    hidden_row: int,
    weight: int,
    weight_row: int,
    bias: int,
    bias_element: int,
    softcap: float,
    vocab_start: int,
    valid: int,
    target_ids: int,
    place: int,
) -> None:
    """The places of targets that are columns here, else -2^63."""

def sm90_topk_forward(
    device: int,
    stream: int,
    element: int,
    rows: int,
    depth: int,
    columns: int,
    hidden: int,
    hidden_row: int,
    weight: int,
    weight_row: int,
    bias: int,
    bias_element: int,
    target_ids: int,
    vocab_start: int,
    row_inv_temperature: int,
    inv_temperature: float,
    softcap: float,
    cut: int,
    records: int,
    n: int,
    place: int,
    best: int,
    before: int,
    workspace: int,
) -> int:
    """Records of columns that follow others, the best of both, and the count of better ones; the bytes it takes."""

def sm90_topk_finish(
    best: int,
    ranks: int,
    before: int,
    device: int,
    stream: int,
    records: int,
    parts: int,
    rows: int,
    entropy: bool,
    n: int,
    target_ids: int,
    scales: int,
    scale: float,
    cut: int,
    ids: int,
    logp: int,
    rank: int,
    fold: FoldRows,
) -> None:
    """Ids and log-probs of the best of all ranks, the target's rank, and its fold."""

def sm90_topk_rows(
    logits: int,
    row_stride: int,
    valid: int,
    vocab_start: int,
    device: int,
    stream: int,
    records: int,
    parts: int,
    rows: int,
    entropy: bool,
    n: int,
    target_ids: int,
    scales: int,
    scale: float,
    cut: int,
    ids: int,
    logp: int,
    rank: int,
    fold: FoldRows,
) -> None:
    """The same at once from logits that are whole rows."""

def sm90_sampling_histogram(
    *,
    device: int,
    stream: int,
    logits: int,
    row_stride: int,
    rows: int,
    valid: int,
    vocab_start: int,
    scales: int,
    scale: float,
    k_max: int,
    cut: int,
    prefix: int,
    level: int,
    counts: int,
    masses: int,
) -> None:
    """Adds to counts and masses [rows, bins]."""

def sm90_sampling_equal(
    *,
    device: int,
    stream: int,
    logits: int,
    row_stride: int,
    rows: int,
    valid: int,
    vocab_start: int,
    order: int,
    nth: int,
    out: int,
) -> None:
    """The nth column of an order in each row, or -1."""

def sm90_fold(
    *,
    device: int,
    records: int,
    ranks: int,
    rows: int,
    target_ids: int,
    ignore_index: int | None,
    real_vocab_size: int,
    invalid_is_nan: bool,
    entropy: bool,
    logp: int,
    lse: int,
    entropy_out: int = 0,
    lse2_int: int,
    lse2_frac: int,
    maximum: int,
    stream: int,
) -> None:
    """Folds [ranks, words, rows] records in ascending order of ranks."""

def sm90_grad_hidden(
    *,
    device: int,
    element: int,
    rows: int,
    depth: int,
    columns: int,
    dlogits: int,
    dlogits_row: int,
    weight: int,
    weight_row: int,
    row_active: int = 0,
    grad: int,
    grad_row: int,
    grad_element: int,
    go_on: bool,
    add: bool = False,
    stream: int,
) -> None:
    """grad [N, D] = (grad if go_on else 0) + dlogits [N, Vb] @ weight [Vb, D]; add: += a chain of its own."""

def sm90_grad_weight(
    *,
    device: int,
    element: int,
    rows: int,
    depth: int,
    columns: int,
    dlogits: int,
    dlogits_row: int,
    hidden: int,
    hidden_row: int,
    row_mask: int = 0,
    init: int = 0,
    init_row: int = 0,
    grad: int,
    grad_row: int,
    grad_element: int,
    add: bool = False,
    stream: int,
    turn: Sm90DlogitsKept | None = None,
) -> None:
    """grad [Vb, D] = or += (init or 0) + dlogits [N, Vb]^T @ hidden [N, D]."""

def sm90_backward_workspace(rows: int, width: int, bias: bool) -> int:
    """Bytes that Sm90Backward works in."""

class Sm90Backward:
    """A backward that makes its logits again, by blocks of columns that end at `ends`, the widest `width` columns."""

    def __init__(
        self,
        device: int,
        stream: int,
        element: int,
        rows: int,
        depth: int,
        hidden: int,
        hidden_row: int,
        weight: int,
        weight_row: int,
        bias: int,
        bias_element: int,
        softcap: float,
        row_inv_temperature: int,
        inv_temperature: float,
        plain: bool,
        target_ids: int,
        ignore_index: int,
        real_vocab_size: int,
        vocab_start: int,
        ends: list[int],
        width: int,
        workspace: int,
    ) -> None: ...
    def launch(
        self,
        lse2_int: int,
        lse2_frac: int,
        entropy: int,
        logp_grad: int,
        logp_stride: int,
        lse_grad: int,
        lse_stride: int,
        entropy_grad: int,
        entropy_stride: int,
        grad_hidden: int,
        hidden_rounded: bool,
        chain: int,
        grad_weight: int,
        grad_weight_row: int,
        weight_added: bool,
        grad_bias: int,
    ) -> None:
        """All but the last block's part of grad_weight and grad_bias."""

    def finish(self) -> None:
        """What launch left out."""

SM90_DLOGITS_ROW_BYTES: int

def sm90_row_grads(
    *,
    device: int,
    rows: int,
    logp: int = 0,
    logp_stride: int = 0,
    lse: int = 0,
    lse_stride: int = 0,
    entropy: int = 0,
    entropy_stride: int = 0,
    target_ids: int,
    ignore_index: int,
    real_vocab_size: int,
    grad_target: int,
    grad_softmax: int,
    grad_entropy: int = 0,
    stream: int,
) -> None:
    """Upstream gradients, fp32 [rows] of these strides or none, as coefficients of the target and the softmax."""

def sm90_dlogits_rows(
    *,
    device: int,
    rows: int,
    lse2_int: int,
    lse2_frac: int,
    entropy: int = 0,
    grad_target: int,
    grad_softmax: int,
    grad_entropy: int = 0,
    target_ids: int,
    vocab_start: int,
    valid: int,
    row_inv_temperature: int = 0,
    inv_temperature: float = 1.0,
    terms: int,
    active: int,
    broken: int = 0,
    element: int,
    depth: int,
    hidden: int = 0,
    hidden_row: int = 0,
    stream: int,
) -> None:
    """The rows' terms, SM90_DLOGITS_ROW_BYTES each; which rows count, which of the others hold infinities or NaN."""

def sm90_dlogits(
    *,
    device: int,
    element: int,
    rows: int,
    depth: int,
    columns: int,
    hidden: int,
    hidden_row: int,
    weight: int,
    weight_row: int,
    bias: int = 0,
    bias_element: int = 0,
    softcap: float = 0.0,
    plain: bool,
    first_column: int,
    row_terms: int,
    out: int,
    out_row: int,
    bias_sums: int = 0,
    cut: int = 0,
    first_id: int = 0,
    stream: int,
) -> None:
    """dlogits of a block of columns, rounded to the element, [rows, out_row]; 0 where `cut` leaves out."""

def sm90_add_fma_product(
    *,
    device: int,
    rows: int,
    depth: int,
    columns: int,
    a: int,
    a_row: int,
    a_column: int,
    b: int,
    b_row: int,
    out: int,
    out_row: int,
    stream: int,
) -> None:
    """out [rows, columns] fp32 goes on by a [rows, depth] @ b [depth, columns], one FMA at a time."""

class Sm90DlogitsKept:
    """dlogits of a block of columns from what the forward kept of them, in bf16, [rows, out_row]."""

    def __init__(
        self,
        *,
        device: int,
        rows: int,
        columns: int,
        codes: int,
        codes_row: int,
        references: int,
        references_group: int,
        target_y: int,
        plain: bool,
        first_column: int,
        row_terms: int,
        out: int,
        out_row: int,
        bias_sums: int = 0,
        sums_row: int = 0,
    ) -> None: ...
    def launch(self, stream: int) -> None:
        """A pass of its own."""

def sm90_bias_sums(
    *, device: int, sums: int, blocks: int, stride: int, columns: int, grad_bias: int, bias_element: int, stream: int
) -> None:
    """Adds up the sums of blocks of 128 rows."""

class LogitsUpstream:
    """Upstream gradients of logp, lse and entropy: pointers (0: none) and strides."""

    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(
        self,
        logp: int,
        logp_stride: int,
        lse: int,
        lse_stride: int,
        entropy: int,
        entropy_stride: int,
        ignore_index: int,
        real_vocab_size: int,
    ) -> None: ...

def cuda_logits_workspace(device: int) -> tuple[int, int]:
    """Bytes of workspace, and how many of them, the first, are zero before the first launch."""

def cuda_logits_forward(*args: int | float | bool) -> None:
    """Records, or folded rows; see csrc/sm90/bindings_logits.h for the arguments."""

def cuda_logits_backward(*args: int | float | RowGradients | LogitsUpstream) -> None:
    """Writes all of grad_logits; see csrc/sm90/bindings_logits.h for the arguments."""
