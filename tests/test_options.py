"""GradOptions in one process, on the CPU: what they may change, what they may not, and how they compose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import vocabshard as vs
from vocabshard.dist import grad as dist_grad
from vocabshard.kernels import blockwise, cpu
from vocabshard.kernels.problem import GradPlan, LocalProblem, Needs, RowGrads, SavedRows
from vocabshard.testing.compare import assert_same_bytes, differing

N, D, V = 65, 24, 500


def problem(seed: int = 0, n: int = N, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(n, D, generator=g), torch.randn(V, D, generator=g) * 0.6
    upstream = torch.randn(3, n, generator=g)
    upstream[:, ::5] = 0
    return hidden.to(dtype), weight.to(dtype), torch.randint(0, V, (n,), generator=g), upstream


def run(
    hidden: Tensor, weight: Tensor, target: Tensor, upstream: Tensor, options: vs.GradOptions | None = None, **more
) -> tuple[vs.LogpOutput, Tensor, Tensor | None]:
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = vs.linear_logp(h, w, target, return_lse=True, return_entropy=True, grad_options=options, **more)
    assert isinstance(out, vs.LogpOutput)
    torch.autograd.backward(list(out[:3]), list(upstream))
    assert h.grad is not None
    return out, h.grad, w.grad


BYTES = 4 * V  # of a row that the CPU kernels keep


@pytest.mark.parametrize(
    "budget, rows", [(BYTES - 1, 0), (BYTES * 17 + 3, 17), (BYTES * N, N), (1 << 40, N), ("auto", N)]
)
def test_saved_logits_change_no_byte_and_are_in_the_provenance(budget: int | str, rows: int) -> None:
    arguments = problem()
    want, want_hidden, want_weight = run(*arguments)
    assert want.provenance.saved_rows == 0 and want.provenance.saved_reason == ""
    got, hidden, weight = run(*arguments, vs.GradOptions(save_logits_budget=budget))
    for a, b in zip(got[:3], want[:3], strict=True):
        assert_same_bytes(a, b)
    assert_same_bytes(hidden, want_hidden)
    assert_same_bytes(weight, want_weight)
    assert got.provenance.saved_rows == rows
    assert ("bytes hold" in got.provenance.saved_reason) == (rows < N)
    assert got.provenance.fingerprint == want.provenance.fingerprint


def test_saved_logits_spare_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what the backward reads, again and again, and nobody keeps them who needs none."""
    hidden, weight, target, upstream = problem()
    h = hidden.clone().requires_grad_()
    plans = []
    kernel = cpu.backward
    monkeypatch.setattr(cpu, "backward", lambda *a: plans.append(a[-1]) or kernel(*a))
    options = vs.GradOptions(save_logits_budget="auto")
    logp = vs.linear_logp(h, weight, target, grad_options=options)
    grads = [torch.autograd.grad(logp, h, upstream[0], retain_graph=True)[0] for _ in range(2)]
    assert_same_bytes(*grads, "retain_graph")
    assert [plan.kept.rows for plan in plans] == [N, N]
    with torch.no_grad():
        out = vs.linear_logp(h, weight, target, grad_options=options, return_lse=True)
    assert out.provenance.saved_rows == 0
    frozen = vs.linear_logp(hidden, weight, target, grad_options=options, return_lse=True)
    assert frozen.provenance.saved_rows == 0


def test_saved_logits_of_the_torch_backend() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        arguments = problem(dtype=dtype)
        want = run(*arguments, backend="torch", temperature=0.7, softcap=5.0)
        for rows in (9, N):
            options = vs.GradOptions(save_logits_budget=rows * V * dtype.itemsize)
            got = run(*arguments, options, backend="torch", temperature=0.7, softcap=5.0)
            assert got[0].provenance.saved_rows == rows
            assert_same_bytes(got[0].logp, want[0].logp)
            for a, b in zip(got[1:], want[1:], strict=True):
                assert (a - b).norm() < (1e-6 if dtype == torch.float32 else 2e-2) * b.norm()


def test_saved_logits_of_the_torch_backend_outlive_a_backward() -> None:
    """fp32 ones are read as they are, and a bias is not added to them in place."""
    hidden, weight, target, upstream = problem()
    leaves = [x.requires_grad_() for x in (hidden, weight, torch.linspace(-1, 1, V))]
    options = vs.GradOptions(save_logits_budget="auto")
    logp = vs.linear_logp(*leaves[:2], target, leaves[2], backend="torch", grad_options=options)
    first, second = (torch.autograd.grad(logp, leaves, upstream[0], retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same_bytes(a, b)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("can't allocate memory")])
def test_without_memory_it_recomputes(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    arguments = problem()
    want = run(*arguments)
    monkeypatch.setattr(cpu, "new_kept", fail)
    got = run(*arguments, vs.GradOptions(save_logits_budget="auto"))
    assert_same_bytes(got[0].logp, want[0].logp)
    assert_same_bytes(got[1], want[1])
    assert got[0].provenance.saved_rows == 0 and "could not be allocated" in got[0].provenance.saved_reason


def test_main_grad_takes_the_gradient() -> None:
    hidden, weight, target, upstream = problem()
    in_fp32 = run(hidden, weight, target, upstream)[2]
    w = weight.clone().requires_grad_()
    start = torch.randn(V, D)
    main_grad = start.clone()
    version = main_grad._version
    h = hidden.clone().requires_grad_()
    out = vs.linear_logp(h, w, target, return_lse=True, return_entropy=True,
                         grad_options=vs.GradOptions(main_grad=main_grad))  # fmt: skip
    torch.autograd.backward(list(out[:3]), list(upstream))
    assert w.grad is None and main_grad._version > version
    assert_same_bytes(main_grad, start + in_fp32)
    # frozen: nothing is added
    logp = vs.linear_logp(h, weight, target, grad_options=vs.GradOptions(main_grad=main_grad))
    logp.sum().backward()
    assert_same_bytes(main_grad, start + in_fp32)


@pytest.mark.parametrize("autocast", [False, True])
def test_megatrons_protocol(autocast: bool) -> None:
    """grad_added_to_main_grad becomes True and a gradient comes, so that hooks run; a hook adds nothing twice."""
    hidden, weight, target, _ = problem(dtype=torch.float32 if autocast else torch.bfloat16)
    w = torch.nn.Parameter(weight)
    w.main_grad = torch.zeros(V, D)
    seen = []

    def hook(parameter: torch.nn.Parameter) -> None:
        seen.append(parameter.grad_added_to_main_grad)
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    w.register_post_accumulate_grad_hook(hook)
    want = torch.zeros(V, D)
    for rows in (slice(0, 30), slice(30, N)):  # two micro-batches
        w.grad_added_to_main_grad = False
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logp = vs.linear_logp(hidden[rows], w, target[rows], grad_options=vs.GradOptions(main_grad=w.main_grad))
        logp.sum().backward()
        part = torch.zeros(V, D)
        low = weight.bfloat16().requires_grad_()
        vs.linear_logp(hidden[rows].bfloat16(), low, target[rows],
                       grad_options=vs.GradOptions(main_grad=part)).sum().backward()  # fmt: skip
        want += part
    assert seen == [True, True] and w.grad is None
    assert_same_bytes(w.main_grad, want)


def test_accumulation_over_micro_batches_with_and_without_main_grad() -> None:
    hidden, weight, target, upstream = problem()
    whole = run(hidden, weight, target, upstream)[2]
    plain, main_grad = weight.clone().requires_grad_(), torch.zeros(V, D)
    for first in range(0, N, 20):
        rows = slice(first, first + 20)
        for options in (None, vs.GradOptions(main_grad=main_grad)):
            out = vs.linear_logp(hidden[rows], plain, target[rows], return_lse=True, return_entropy=True,
                                 grad_options=options)  # fmt: skip
            torch.autograd.backward(list(out[:3]), [u[rows] for u in upstream])
    assert_same_bytes(plain.grad, main_grad)
    torch.testing.assert_close(main_grad, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [None, vs.GradOptions(save_logits_budget="auto"), vs.GradOptions(reduce="ordered")])
def test_activation_checkpointing(options: vs.GradOptions | None) -> None:
    hidden, weight, target, upstream = problem()
    want = run(hidden, weight, target, upstream, options)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

    def block(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = vs.linear_logp(h, w, target, return_lse=True, return_entropy=True, grad_options=options)
        return out.logp, out.lse, out.entropy

    torch.autograd.backward(list(checkpoint(block, h, w, use_reentrant=False)), list(upstream))
    assert_same_bytes(h.grad, want[1])
    assert_same_bytes(w.grad, want[2])


def test_ordered_is_one_chain_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = problem()
    options = vs.GradOptions(reduce="ordered", save_logits_budget=20 * BYTES)
    summed, want = run(*arguments), run(*arguments, options)
    assert differing(summed[1], want[1]), "the sum is cut in blocks, so the bytes tell which it was"
    torch.testing.assert_close(summed[1], want[1], rtol=1e-4, atol=1e-5)
    assert_same_bytes(summed[2], want[2], "grad_weight is the same")
    for rows, chunks in ((16, 8), (1, 1000), (7, 3)):
        monkeypatch.setattr(dist_grad, "CHUNK_ROWS", rows)
        monkeypatch.setattr(dist_grad, "CHUNKS", chunks)
        assert len(dist_grad.row_chunks(N)) == -(-N // max(rows, -(-N // chunks)))
        assert_same_bytes(run(*arguments, options)[1], want[1])
    frozen = vs.linear_logp(arguments[0].requires_grad_(), arguments[1], arguments[2], grad_options=options)
    frozen.sum().backward()


@pytest.mark.parametrize("reduce", ["sum", "ordered"])
def test_a_row_of_grad_hidden_is_the_same_in_every_batch(reduce: str) -> None:
    """Probe rows alone, and at front, middle and back of batches of many sizes."""
    sizes = [*range(1, 10), *(2**k + i for k in range(4, 12) for i in (-1, 0, 1) if 2**k + i <= 2048)]
    options = vs.GradOptions(reduce=reduce)
    for seed in range(3):
        hidden, weight, target, upstream = problem(seed, 2048)
        weight = weight[:200]
        target %= 200
        probes = slice(7, 10)

        def batch(
            index: Tensor, weight: Tensor = weight, case: tuple[Tensor, ...] = (hidden, target, upstream)
        ) -> Tensor:
            return run(case[0][index], weight, case[1][index], case[2][:, index], options)[1]

        alone = [batch(torch.tensor([row])) for row in range(7, 10)]
        for size in sizes:
            rest = torch.arange(100, 100 + size - 1) % 2048
            for row, want in zip(range(probes.start, probes.stop), alone, strict=True):
                place = (0, size // 2, size - 1)[row % 3]
                index = torch.cat([rest[:place], torch.tensor([row]), rest[place:]])
                assert_same_bytes(batch(index)[place : place + 1], want, f"seed {seed}, {size} rows, row {row}")


def test_what_needs_no_gradient_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, target, _ = problem()
    asked = []
    kernel = cpu.backward
    monkeypatch.setattr(cpu, "backward", lambda *a: asked.append(a[-2]) or kernel(*a))
    bias = torch.zeros(V)
    for reduce in ("sum", "ordered"):
        options = vs.GradOptions(reduce=reduce)
        for needs in (Needs(True, False, False), Needs(False, True, False), Needs(False, False, True)):
            leaves = [x.clone().requires_grad_(n) for x, n in zip((hidden, weight, bias), needs, strict=True)]
            vs.linear_logp(*leaves[:2], target, leaves[2], grad_options=options).sum().backward()
            assert asked == [needs], "one pass, for that alone"
            asked.clear()


def test_block_wise_hidden_is_ready_before_the_last_weight_block(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, target, upstream = problem()
    monkeypatch.setattr(blockwise, "SCRATCH_ELEMENTS", 1 << 12)
    monkeypatch.setattr(blockwise, "ROWS", 20)
    records = vs.linear_logp(hidden, weight, target, return_lse=True)
    lse2 = records.lse.double() / torch.log(torch.tensor(2.0)).double()
    saved = SavedRows(lse2.round().int(), (lse2 - lse2.round()).float(), None)
    grads = RowGrads(upstream[0], -upstream[0], None)
    main_grad, told = torch.zeros(V, D), []

    def ready(grad_hidden: Tensor) -> None:
        told.append((grad_hidden.clone(), main_grad.clone()))

    arguments = (hidden, weight, None, target, None, LocalProblem(0, V, None, False), saved, grads)
    how = GradPlan(main_grad=main_grad, hidden_ready=ready)
    got, none, _ = blockwise.backward(*arguments, Needs(True, True, False), how)
    assert none is None and len(told) == 1
    assert_same_bytes(told[0][0], got)
    last = V - V % blockwise.block(N, D)[1]
    assert (told[0][1][last:] == 0).all() and (told[0][1][:last] != 0).any() and (main_grad[last:] != 0).any()
    # called where there is nothing to do, and never where hidden needs nothing
    blockwise.backward(*arguments[:5], LocalProblem(0, 0, None, False), saved, grads, Needs(True, True, False), how)
    assert len(told) == 2
    blockwise.backward(*arguments, Needs(False, True, False), how)
    assert len(told) == 2


def test_sequence_parallel_alone_is_plain() -> None:
    arguments = problem()
    want, got = run(*arguments), run(*arguments, sequence_parallel=True)
    assert_same_bytes(got[0].logp, want[0].logp)
    assert_same_bytes(got[1], want[1])
