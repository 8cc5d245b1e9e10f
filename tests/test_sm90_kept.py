"""What the Hopper forward keeps of logits: the code on the host, sizes and refusals, and gradients on the GPU."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.kernels import sm90_kept, sm90_turned
from vocabshard.kernels.problem import LocalProblem
from vocabshard.testing.compare import assert_same_bytes
from vocabshard.testing.dlogits import dlogits

CSRC = Path(__file__).parent.parent / "csrc"

PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include "sm90/kept_code.h"
using namespace vocabshard;
using namespace vocabshard::sm90;

double uniform() { return (std::rand() + 0.5) / (RAND_MAX + 1.0); }

uint32_t code_at(float y, float reference) { return kept_code(y, kept_scale(reference)) & 0xffff; }

int main() {
  const float inf = HUGE_VALF;
  for (double offset : {0.0, 1.0, -7.0, 100.0, 1e4, -1e4, 1e5, -1e5, 1048576.0, -1048000.0}) {
    for (int i = 0; i < 400000; ++i) {
      const float top = static_cast<float>(offset + (i % 3 == 0 ? 0.0 : -20 * uniform()));
      const float reference = kept_reference(top);
      const double above = static_cast<double>(reference) - static_cast<double>(top) * kLog2e;
      if (reference != std::floor(reference) || above < 0.18 || above > 1.32)
        return std::printf("reference of %a: %a\n", top, reference), 1;
      const float y = i % 2 == 0 ? top : static_cast<float>(top - 60 * uniform() * uniform());
      const double depth = reference - static_cast<double>(y) * kLog2e;
      const uint32_t code = code_at(y, reference);
      if ((kept_code(y, kept_scale(reference)) >> 16) != 0x4b40) return std::printf("%a leaves 16 bits\n", y), 1;
      // base 0: log2 p is then the depth itself, negative
      const double error = kept_log2_p(code, 0.0f) + depth, bound = depth <= 12 ? 0x1p-13 : 0x1p-9;
      if (depth < 75.9 && std::fabs(error) > bound + 1e-5) return std::printf("%a: depth off by %g\n", y, error), 1;
    }
    const float reference = kept_reference(static_cast<float>(offset));
    for (float y : {-inf, static_cast<float>(offset - 80.0), NAN})
      if (code_at(y, reference) != 0) return std::printf("%a has a code\n", y), 1;
  }
  for (float y : {-inf, NAN})  // a group without a logit
    if (kept_reference(y) != kLeastReference || code_at(y, kept_reference(y)) != 0) return std::puts("empty group"), 1;
  if (kept_log2_p(0, 50.0f) != -200.0f) return std::puts("code 0"), 1;
  float before = -1e9f;
  for (uint32_t code = 1; code < 65536; ++code) {
    const float l = kept_log2_p(code, 3.25f);
    if (!(l > before)) return std::printf("code %u is not above the one before\n", code), 1;
    before = l;
  }
  return 0;
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no c++ on PATH")
def test_codes(tmp_path: Path) -> None:
    source, program = tmp_path / "codes.cpp", tmp_path / "codes"
    source.write_text(PROGRAM)
    subprocess.run(
        ["c++", "-std=c++17", "-O2", "-ffp-contract=off", f"-I{CSRC}", str(source), "-o", str(program)], check=True
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("columns", [1, 64, 65, 50257, 151936])
def test_bytes_of_a_row(columns: int) -> None:
    kept = sm90_kept.new_kept(3, columns, torch.bfloat16, torch.device("cpu"))
    assert sum(t.numel() * t.element_size() for t in kept.tensors) == 3 * sm90_kept.kept_bytes_per_row(
        columns, torch.bfloat16
    )
    assert kept.rows == 3 and all(t.shape[0] == 3 for t in kept.tensors)
    part = kept.part(1, 9)
    assert part is not None and part.rows == 2 and part.tensors[1].stride() == kept.tensors[1].stride()
    assert part.tensors[1].data_ptr() == kept.tensors[1].data_ptr() + 4
    # 16 bits a column of whole groups, and one fp32 a group
    assert kept.tensors[0].shape == (3, -(-columns // 64) * 64) and kept.tensors[0].element_size() == 2
    assert sm90_kept.kept_bytes_per_row(columns, torch.float16) == 0


def test_what_is_not_kept_says_why() -> None:
    plain, capped = (LocalProblem(0, 100, cap, False) for cap in (None, 30.0))
    hidden, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(100, 64, dtype=torch.bfloat16)
    assert sm90_kept.why_not_kept(hidden, weight, plain) == ""
    assert "soft-cap" in sm90_kept.why_not_kept(hidden, weight, capped)
    assert "float16" in sm90_kept.why_not_kept(hidden.half(), weight.half(), plain)
    assert "16 bytes" in sm90_kept.why_not_kept(hidden[:, :9], torch.zeros(100, 9, dtype=torch.bfloat16), plain)
    # its codes would be [N, 0], whose rows are no multiple of 8 elements apart: an error of one rank of a group
    assert "padding alone" in sm90_kept.why_not_kept(hidden, weight, LocalProblem(100, 0, None, False))


@pytest.mark.parametrize(
    "budget, rows", [(0, 0), (127, 0), (128, 128), (300, 256), (511, 384), (512, 512), (9999, 512)]
)
def test_budgets_in_whole_blocks_of_rows(budget: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any backend's budget is cut to multiples of KEPT_ROWS, unless it holds all."""
    from vocabshard.kernels import cpu

    monkeypatch.setattr(cpu, "KEPT_ROWS", sm90_kept.KEPT_ROWS, raising=False)
    hidden, weight = torch.randn(512, 8).requires_grad_(), torch.randn(40, 8)
    options = vs.GradOptions(save_logits_budget=budget * cpu.kept_bytes_per_row(40, torch.float32))
    out = vs.linear_logp(
        hidden, weight, torch.zeros(512, dtype=torch.int64), grad_options=options, return_lse=True, backend="cpu"
    )
    assert out.provenance.saved_rows == rows
    assert ("bytes hold" in out.provenance.saved_reason) == (0 < budget < 512)


def test_a_refusal_is_in_the_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    from vocabshard.kernels import cpu

    monkeypatch.setattr(cpu, "why_not_kept", lambda *_: "not of these", raising=False)
    hidden, weight = torch.randn(5, 8).requires_grad_(), torch.randn(40, 8)
    out = vs.linear_logp(
        hidden,
        weight,
        torch.zeros(5, dtype=torch.int64),
        grad_options=vs.GradOptions(save_logits_budget="auto"),
        return_lse=True,
        backend="cpu",
    )
    assert (out.provenance.saved_rows, out.provenance.saved_reason) == (0, "not of these")


def test_the_last_backward_may_overwrite_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from vocabshard.kernels import cpu

    plans: list[Any] = []
    kernel = cpu.backward
    monkeypatch.setattr(cpu, "backward", lambda *a: plans.append(a[-1]) or kernel(*a))
    hidden, weight = torch.randn(5, 8).requires_grad_(), torch.randn(40, 8)
    target = torch.zeros(5, dtype=torch.int64)
    logp = vs.linear_logp(hidden, weight, target, grad_options=vs.GradOptions(save_logits_budget="auto"))
    for retain in (True, True, False):
        logp.sum().backward(retain_graph=retain)
    assert [plan.last_use for plan in plans] == [False, False, True]
    assert all(plan.rounded_hidden for plan in plans)  # there is no group
    plans.clear()
    ordered = vs.GradOptions(save_logits_budget="auto", reduce="ordered")
    vs.linear_logp(hidden, weight.requires_grad_(), target, grad_options=ordered).sum().backward()
    assert len(plans) == 2 and not any(plan.last_use or plan.rounded_hidden for plan in plans)


# ---- on the GPU ----

on_hopper = pytest.mark.needs("sm90")
INF = float("inf")


def problem(n: int, d: int, v: int, seed: int = 0, spread: float = 3.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(n, d, generator=g, device="cuda").bfloat16()
    weight = (torch.randn(v, d, generator=g, device="cuda") * (spread / d**0.5)).bfloat16()
    bias = torch.randn(v, generator=g, device="cuda")
    return hidden, weight, bias, torch.randint(0, v, (n,), generator=g, device="cuda")


def upstream(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Different in every row, some exactly 0, some negative."""
    g = torch.Generator("cuda").manual_seed(99)
    gs = torch.randn(3, n, generator=g, device="cuda")
    gs[:, ::5] = 0
    return gs[0], gs[1], gs[2]


def run(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, gs: Any, kept: int | str, **options: Any
) -> tuple[vs.LogpOutput, list[Tensor | None]]:
    """`kept`: rows; gradients of hidden, weight and bias."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    budget = kept if isinstance(kept, str) else kept * sm90_kept.kept_bytes_per_row(len(weight), weight.dtype)
    grad = vs.GradOptions(save_logits_budget=budget, **options.pop("grad", {}))
    out = vs.linear_logp(
        leaves[0], leaves[1], target, leaves[2], return_lse=True, return_entropy=True, backend="sm90",
        grad_options=grad, **options,
    )  # fmt: skip
    pairs = [(o, g) for o, g in zip(out[:3], gs, strict=True) if g is not None]
    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return out, [None if x is None else x.grad for x in leaves]


def check(hidden, weight, bias, target, gs, kept: int | str, **options) -> list[Tensor | None]:
    """No gradient is further from fp64 than that of fp32 softmax with bf16 products; logp, lse, entropy keep their
    bytes."""
    out, got = run(hidden, weight, bias, target, gs, kept, **options)
    want_out, _ = run(hidden, weight, bias, target, gs, 0, **options)
    for a, b in zip(out[:3], want_out[:3], strict=True):
        assert_same_bytes(a, b)
    exact = dlogits(hidden, weight, bias, target, gs, torch.float64, **options)
    rounded = dlogits(hidden, weight, bias, target, gs, torch.float32, **options).bfloat16()
    want = (exact @ weight.double(), exact.T @ hidden.double(), exact.sum(0))
    theirs = (rounded @ weight, rounded.T @ hidden, rounded.float().sum(0))
    for g, t, w, name in zip(got, theirs, want, ("hidden", "weight", "bias"), strict=True):
        if g is None:
            continue
        error, bar = (g.double() - w).norm(), (t.double() - w).norm()
        assert error <= 1.01 * bar, f"grad_{name}: {error:.4e}, torch {bar:.4e}, of {w.norm():.4e}"
    return got


SHAPES = [(257, 64, 777), (128, 256, 384), (129, 64, 50257), (1000, 512, 4097), (1100, 256, 50257), (4200, 128, 3000)]


@on_hopper
@pytest.mark.parametrize("n, d, v", [*SHAPES, (33, 104, 1000), (64, 128, 5000)])
def test_against_fp64(n: int, d: int, v: int) -> None:
    hidden, weight, bias, target = problem(n, d, v)
    check(hidden, weight, None, target, upstream(n), "auto")
    check(hidden, weight, bias, target, upstream(n), n // 2 + 64)
    check(hidden, weight, bias, target, (upstream(n)[0], None, None), n)


@on_hopper
@pytest.mark.parametrize("temperature", [0.7, "rows"])
def test_temperature(temperature) -> None:
    hidden, weight, bias, target = problem(400, 128, 5003)
    t = torch.rand(400, device="cuda") + 0.5 if temperature == "rows" else temperature
    check(hidden, weight, bias, target, upstream(400), 400, temperature=t)
    check(hidden, weight, None, target, (upstream(400)[0], None, None), 128, temperature=t)


@on_hopper
@pytest.mark.parametrize("offset", [100.0, 1e4, -1e4, 1e5])
def test_offsets(offset: float) -> None:
    hidden, weight, bias, target = problem(300, 128, 5003)
    check(hidden, weight, bias + offset, target, upstream(300), "auto")
    check(hidden, weight, bias + offset, target, (upstream(300)[0], None, None), 256)


@on_hopper
@pytest.mark.parametrize("spread", [0.5, 12.0, 40.0])
def test_flat_and_peaked_rows(spread: float) -> None:
    hidden, weight, _, target = problem(500, 128, 5003, spread=spread)
    check(hidden, weight, None, target, upstream(500), "auto")
    likely = vs.linear_logp(hidden, weight, target, return_logits=True, backend="sm90").logits.argmax(1)
    check(hidden, weight, None, likely, (upstream(500)[0], None, None), "auto")  # p near 1


@on_hopper
def test_near_certain_targets_keep_their_gradient() -> None:
    weight = torch.zeros(4, 8, dtype=torch.bfloat16, device="cuda")
    weight[:, 0] = torch.tensor([0.0, -14.0, -15.0, -16.5])
    h = torch.ones(1, 8, dtype=torch.bfloat16, device="cuda").requires_grad_()
    w = weight.clone().requires_grad_()
    options = vs.GradOptions(save_logits_budget="auto")
    vs.linear_logp(h, w, torch.tensor([0], device="cuda"), backend="sm90", grad_options=options).sum().backward()
    hd, wd = torch.ones(1, 8, device="cuda").double().requires_grad_(), weight.double().requires_grad_()
    torch.log_softmax(hd @ wd.T, -1)[0, 0].backward()
    assert w.grad[0, 0] != 0
    torch.testing.assert_close(w.grad.double(), wd.grad, rtol=0.05, atol=1e-9)


@on_hopper
@pytest.mark.parametrize("columns", [(100, 3), (5003, 77), (1024, 0)])
def test_padding_masked_ignored_and_broken(columns: tuple[int, int]) -> None:
    v, pad = columns
    n = 150
    hidden, weight, bias, target = problem(n, 64, v)
    weight[v - pad :] = float("nan")
    bias[v - pad :] = INF
    bias[10:20] = -INF
    rows = torch.arange(n, device="cuda")
    target = torch.where((target >= v - pad) | ((target >= 10) & (target < 20)), 0, target)
    target[7] = 12  # its own logit is -inf
    ignored = rows % 3 == 0
    target[ignored] = -100
    broken = hidden.clone()
    broken[ignored] = float("nan")
    broken[ignored & (rows % 2 == 0)] = INF
    options = vs.GradOptions(save_logits_budget="auto")
    for retain in (True, False):
        h, w, b = (x.clone().requires_grad_() for x in (broken, weight, bias))
        out = vs.linear_logp(
            h, w, target, b, real_vocab_size=v - pad, backend="sm90", grad_options=options, return_lse=True
        )
        assert out.provenance.saved_rows == n
        out.logp[~ignored & (rows != 7)].sum().backward(retain_graph=retain)
        assert (h.grad[ignored] == 0).all() and (h.grad[7] == 0).all()
        assert torch.isfinite(h.grad).all() and torch.isfinite(w.grad).all() and torch.isfinite(b.grad).all()
        assert (w.grad[10:20] == 0).all() and (b.grad[10:20] == 0).all()
        assert (w.grad[v - pad :] == 0).all() and (b.grad[v - pad :] == 0).all()
    # a NaN in a row that counts is seen, in its own row
    h, w = broken.clone().requires_grad_(), weight[: v - pad].clone().requires_grad_()
    h.data[1, 3] = float("nan")
    vs.linear_logp(h, w, target, backend="sm90", grad_options=options).sum().backward()
    assert torch.isnan(h.grad[1]).all() and torch.isfinite(h.grad[2:]).all() and torch.isnan(w.grad).all()
    # every logit -inf
    h = hidden.clone().requires_grad_()
    all_masked = torch.full((v - pad,), -INF, device="cuda")
    vs.linear_logp(h, weight[: v - pad], target, all_masked, backend="sm90", grad_options=options).sum().backward()
    assert (h.grad == 0).all()


@on_hopper
def test_neither_place_nor_blocks_nor_batch_change_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, in blocks, twice, in part, with one operand frozen, and row by row."""
    from vocabshard.kernels import sm90_backward

    n = 600
    hidden, weight, bias, target = problem(n, 64, 5003)
    gs = upstream(n)
    _, want = run(hidden, weight, bias, target, gs, n)
    names = ("hidden", "weight", "bias")

    def same(got: list[Tensor | None], what: str) -> None:
        for a, b, name in zip(got, want, names, strict=True):
            if a is not None and b is not None:
                assert_same_bytes(a, b, f"{what}, grad_{name}")

    same(run(hidden, weight, bias, target, gs, n)[1], "again")
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    options = vs.GradOptions(save_logits_budget="auto")
    out = vs.linear_logp(
        *leaves[:2], target, leaves[2], return_lse=True, return_entropy=True, backend="sm90", grad_options=options
    )
    for retain in (True, True, False):
        grads = torch.autograd.grad(list(out[:3]), leaves, list(gs), retain_graph=retain)
        same(list(grads), f"retain_graph={retain}")
    for needs in ((True, False, False), (False, True, False)):
        some = [x.clone().requires_grad_(need) for x, need in zip((hidden, weight, bias), needs, strict=True)]
        out = vs.linear_logp(
            *some[:2], target, some[2], return_lse=True, return_entropy=True, backend="sm90", grad_options=options
        )
        torch.autograd.backward(list(out[:3]), list(gs))
        same([x.grad for x in some], str(needs))
    for count in (1, 17, 64, 127, 128, 257):
        for first in (0, 5, n - count):
            rows = slice(first, first + count)
            got = run(hidden[rows], weight, bias, target[rows], tuple(g[rows] for g in gs), count)[1]
            assert_same_bytes(got[0], want[0][rows], f"{count} rows from {first}")
    monkeypatch.setattr(sm90_backward, "WORKSPACE", 1 << 21)
    monkeypatch.setattr(sm90_backward, "MOST_ROWS", 256)
    out = vs.linear_logp(
        *leaves[:2], target, leaves[2], return_lse=True, return_entropy=True, backend="sm90", grad_options=options
    )
    same(list(torch.autograd.grad(list(out[:3]), leaves, list(gs), retain_graph=True)), "blocks")


@on_hopper
@pytest.mark.parametrize("n, d", [(4096, 2048), (1300, 1024), (2048, 200)])
def test_rounded_on_its_way_out(n: int, d: int) -> None:
    """In place grad_hidden leaves its product in bf16; in blocks it is rounded from fp32. Tiles of each width."""
    hidden, weight, _, target = problem(n, d, 3000)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    options = vs.GradOptions(save_logits_budget="auto")
    logp = vs.linear_logp(h, w, target, backend="sm90", grad_options=options)
    in_blocks, in_place = (
        torch.autograd.grad(logp, (h, w), upstream(n)[0], retain_graph=retain) for retain in (True, False)
    )
    for a, b, name in zip(in_place, in_blocks, ("hidden", "weight"), strict=True):
        assert_same_bytes(a, b, name)


@pytest.mark.parametrize("columns", [37984, 131072, 151936])
def test_blocks_of_what_is_turned(columns: int) -> None:
    """In whole rounds of tiles of 192 columns on 66 pairs, none of them small."""
    ends = sm90_turned.ends_of_blocks(columns, 66)
    widths = [b - a for a, b in itertools.pairwise([0, *ends])]
    assert ends[-1] == columns and all(width % (33 * 192) == 0 for width in widths[:-1])
    assert max(widths) < 2 * min(widths) and 3 <= len(widths) <= 7
    assert sm90_turned.pays(32768, 2048, columns, 66) and not sm90_turned.pays(4096, 2048, columns, 66)
    assert sm90_turned.turned_rows(32768, 2048) == 12416 and sm90_turned.turned_rows(4096, 8192) == 4096


@on_hopper
@pytest.mark.parametrize("keeps_up", [1.0, 300.0])
@pytest.mark.parametrize("of_entropy", [False, True])
@pytest.mark.parametrize("n, d, v", [(1300, 192, 30001), (1024, 512, 50304), (4099, 128, 20000)])
def test_turned_beside_the_product(
    n: int, d: int, v: int, of_entropy: bool, keeps_up: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows or some by idle warps: the bytes of codes that are turned in a pass of their own, in blocks."""
    for name, value in (("KEEPS_UP", keeps_up), ("ROWS_FROM", 1024), ("ELEMENTS_FROM", 0)):
        monkeypatch.setattr(sm90_turned, name, value)
    assert sm90_turned.pays(n, d, v - 60, 66) and sm90_turned.turned_rows(n, d) > 0
    hidden, weight, _, target = problem(n, d, v)
    target[:64] = torch.arange(64, device="cuda") * 397
    target.clamp_(max=v - 61)
    target[::3] = -100
    hidden[3::6] = float("nan")  # in rows that count for nothing
    gs = [g.clone() for g in upstream(n)]
    gs[2][target == -100] = 0
    options = vs.GradOptions(save_logits_budget=1 << 34)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    out = vs.linear_logp(
        h, w, target, backend="sm90", grad_options=options, return_entropy=of_entropy, return_lse=True,
        real_vocab_size=v - 60, temperature=0.9,
    )  # fmt: skip
    outs = [out.logp, out.entropy] if of_entropy else [out.logp]
    upstreams = [gs[0], gs[2]][: len(outs)]
    in_blocks, in_place = (
        torch.autograd.grad(outs, (h, w), upstreams, retain_graph=retain) for retain in (True, False)
    )
    for a, b, name in zip(in_place, in_blocks, ("hidden", "weight"), strict=True):
        assert torch.isfinite(a).all()
        assert_same_bytes(a, b, name)


@on_hopper
def test_ordered_and_main_grad() -> None:
    n = 1300
    hidden, weight, _, target = problem(n, 64, 5003)
    gs = upstream(n)
    _, want = run(hidden, weight, None, target, gs, n)
    _, got = run(hidden, weight, None, target, gs, n, grad={"reduce": "ordered"})
    assert_same_bytes(got[0], want[0])
    assert_same_bytes(got[1], want[1])
    main_grad = torch.zeros(5003, 64, device="cuda")
    _, got = run(hidden, weight, None, target, gs, n, grad={"main_grad": main_grad})
    assert got[1] is None
    assert_same_bytes(main_grad.bfloat16(), want[1])


@on_hopper
def test_memory_of_everything_kept() -> None:
    """What was kept becomes the gradient in its place: beside it and the gradients there are 53 bytes a row.

    Bytes are counted as asked for: what they take in the allocator's blocks depends on the tests before, by up
    to 1 MiB for each of the large tensors.
    """
    n, d, v = 4096, 256, 50304
    hidden, weight, _, target = problem(n, d, v)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    options = vs.GradOptions(save_logits_budget="auto")
    # RowTerms, the coefficients of two upstream gradients, and what is held of the fold: logp and the pair of lse2
    per_row = (32 + 1 + 1 / 8) + 2 * 4 + 3 * 4
    for warm in (True, False):
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        logp = vs.linear_logp(h, w, target, backend="sm90", grad_options=options)
        grads = torch.autograd.grad(logp.sum(), (h, w))
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        del logp, grads
        if not warm:
            kept = n * sm90_kept.kept_bytes_per_row(v, torch.bfloat16)
            beside = peak - kept - 2 * (h.numel() + w.numel())
            assert beside <= per_row * n + 64, f"{beside / n:.3f} bytes a row, not {per_row:.3f}"  # and two scalars


@on_hopper
def test_what_cannot_be_kept_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from vocabshard.kernels import sm90

    hidden, weight, _, target = problem(300, 64, 5003)
    gs = upstream(300)
    for options, why in (({"softcap": 30.0}, "soft-cap"),):
        out, got = run(hidden, weight, None, target, gs, "auto", **options)
        assert out.provenance.saved_rows == 0 and why in out.provenance.saved_reason
        _, want = run(hidden, weight, None, target, gs, 0, **options)
        assert_same_bytes(got[0], want[0])
        assert_same_bytes(got[1], want[1])

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(sm90, "new_kept", fail)
    out, got = run(hidden, weight, None, target, gs, "auto")
    assert out.provenance.saved_rows == 0 and "could not be allocated" in out.provenance.saved_reason
    _, want = run(hidden, weight, None, target, gs, 0)
    assert_same_bytes(got[0], want[0])


@on_hopper
def test_captured_in_a_graph() -> None:
    hidden, weight, _, target = problem(300, 128, 5003)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    options = vs.GradOptions(save_logits_budget=1 << 30)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(vs.linear_logp(h, w, target, backend="sm90", grad_options=options).sum(), (h, w))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(2):
        graph.replay()
        for g, x in zip(got, want, strict=True):
            assert_same_bytes(g, x)
