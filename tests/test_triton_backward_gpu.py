"""The Triton backward on a GPU at full sizes: bytes in every batch, block, tile and shard; accuracy; memory."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import vocabshard as vs
from vocabshard.kernels.problem import ORDINARY, GradPlan, LocalProblem, Needs, RowGrads, SavedRows
from vocabshard.testing.compare import assert_same_bytes

if importlib.util.find_spec("triton"):  # conftest.py says why, where there is none
    from vocabshard.dist import triton_fold
    from vocabshard.kernels import triton_backward, triton_linear
    from vocabshard.kernels.triton_config import DLOGITS, PRODUCTS, STRIDED, GradLaunch, grad_launch

pytestmark = [
    pytest.mark.needs("triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="full sizes are for a GPU"),
]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")


class Case:
    """Tensors of a backward on the GPU, saved rows from the forward itself."""

    def __init__(self, n, d, v, dtype=BF16, *, seed=0, bias=None, entropy=False, softcap=None, scale=None, idle=0.1):
        g = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=g)

        self.hidden = normal(n, d).to(dtype)
        self.weight = (normal(v, d) * 2 / d**0.5).to(dtype)
        self.bias = None if bias is None else normal(v) + bias
        self.target = torch.randint(0, v, (n,), device="cuda", generator=g)
        self.scale = normal(n).abs() + 0.5 if scale == "rows" else scale
        self.upstream = normal(3, n)
        self.upstream[:, (torch.rand(n, device="cuda", generator=g) < idle) & (n > 9)] = 0
        if not entropy:
            self.upstream[2] = 0
        self.problem = LocalProblem(0, v, softcap, entropy)

    @property
    def saved(self) -> SavedRows:
        records, _ = triton_linear.forward(self.hidden, self.weight, self.bias, self.target, self.scale, self.problem)
        folded = triton_fold.fold(records[None], self.target, -100, len(self.weight), "nan")
        return SavedRows(folded.lse2_int, folded.lse2_frac, folded.entropy)

    def run(self, how=ORDINARY, needs=None, launch=None, rows=slice(None), columns=slice(None), saved=None):
        saved = self.saved if saved is None else saved
        logp, lse, entropy = self.upstream[:, rows]
        start, stop, _ = columns.indices(len(self.weight))
        scale = self.scale[rows] if isinstance(self.scale, Tensor) else self.scale
        return triton_backward.backward(
            self.hidden[rows],
            self.weight[columns],
            None if self.bias is None else self.bias[columns],
            self.target[rows],
            scale,
            replace(self.problem, vocab_start=start, valid=stop - start),
            SavedRows(*(None if x is None else x[rows] for x in saved)),
            RowGrads(logp, lse - logp, entropy if self.problem.entropy else None),
            needs or Needs(True, True, self.bias is not None),
            how,
            launch=launch,
        )

    def exact(self) -> list[Tensor]:
        """fp64 gradients."""
        return self._composed(torch.float64)

    def library(self) -> list[Tensor]:
        """Those of torch's fp32 softmax over fp32 logits, with products in the operands' dtype."""
        dtype = self.hidden.dtype
        z = torch.mm(self.hidden, self.weight.t(), out_dtype=F32) if dtype != F32 else self.hidden @ self.weight.t()
        (dz,) = self._softmax([z.requires_grad_()], z if self.bias is None else z + self.bias)
        half = dz.to(dtype)
        grads = [half @ self.weight, half.t() @ self.hidden]
        return grads if self.bias is None else [*grads, dz.sum(0)]

    def _composed(self, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (self.hidden, self.weight, self.bias) if x is not None]
        z = leaves[0] @ leaves[1].t()
        return self._softmax(leaves, z if self.bias is None else z + leaves[2])

    def _softmax(self, leaves: list[Tensor], z: Tensor) -> list[Tensor]:
        if self.problem.softcap:
            z = self.problem.softcap * torch.tanh(z / self.problem.softcap)
        if self.scale is not None:
            z = z * (self.scale[:, None].to(z.dtype) if isinstance(self.scale, Tensor) else self.scale)
        logps = torch.log_softmax(z, -1)
        of = [logps.gather(1, self.target[:, None])[:, 0], torch.logsumexp(z, -1)]
        if self.problem.entropy:
            of.append(-(logps.exp() * logps).sum(-1))
        return list(torch.autograd.grad(of, leaves, list(self.upstream[: len(of)].to(z.dtype))))


def each(check: Callable[..., None], *arguments: Iterable) -> None:
    """check over the arguments in threads: most of the time goes into compilations, which then run side by side."""
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(check, *arguments))


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def no_worse(case: Case, where: str) -> None:
    got, want, theirs = case.run(), case.exact(), case.library()
    for name, g, w, t in zip(("hidden", "weight", "bias"), got, want, theirs, strict=False):
        # half precision is ruled by its roundings; fp32 by chains of one direction, and by the chain's own logits
        bar = max(4 * error(t, w), 5e-6) if case.hidden.dtype == F32 or name == "bias" else 1.02 * error(t, w)
        assert error(g, w) <= bar, f"{where}: grad_{name} {error(g, w):.2e}, torch {error(t, w):.2e}"


@pytest.mark.parametrize("v", [50257, 4096, 100])
def test_no_worse_than_torch(v: int) -> None:
    epilogues = [
        {},
        {"entropy": True, "bias": 0.0, "scale": "rows"},
        {"softcap": 30.0, "scale": 0.7, "bias": 0.0},
    ]
    sizes = [(1, 512), (17, 2048), (255, 100), (257, 8), (64, 17), (300, 1)]

    def check(n: int, d: int, options: dict) -> None:
        no_worse(Case(n, d, v, **options), f"{n} x {d} x {v}, {options}")

    cases = list(itertools.product(sizes, epilogues))
    each(check, *zip(*((n, d, o) for (n, d), o in cases), strict=True))


@pytest.mark.parametrize("dtype", [F16, F32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    no_worse(Case(130, 128, 3000, dtype, entropy=True, bias=0.0), str(dtype))


@pytest.mark.parametrize("offset", [1e4, 1e5])
def test_offsets(offset: float) -> None:
    no_worse(Case(100, 256, 3000, bias=offset, entropy=True), f"offset {offset}")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_row_is_the_same_in_every_batch(seed: int) -> None:
    case = Case(2049, 512, 5000, seed=seed, entropy=True)
    saved = case.saved
    whole = case.run(saved=saved)[0]
    sizes = sorted({*range(1, 10), *(2**k + i for k in range(4, 12) for i in (-1, 0, 1))})
    for size in sizes:
        for start in {0, (2049 - size) // 2, 2049 - size}:
            rows = slice(start, start + size)
            part = case.run(needs=Needs(True, False, False), rows=rows, saved=saved)[0]
            assert_same_bytes(part, whole[rows], f"rows {rows}")


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_configuration_and_block_gives_the_same_bytes(dtype: torch.dtype) -> None:
    case = Case(300, 520, 3001, dtype, entropy=True)
    saved = case.saved
    want = case.run(saved=saved)
    launches = [
        GradLaunch(300, 3072, config, PRODUCTS["narrow"][0], PRODUCTS["narrow"][0]) for config in DLOGITS.values()
    ]
    launches = [x for x in launches if x.dlogits.block_k > 1]
    products = [config for config, _ in PRODUCTS.values()]
    launches += [
        GradLaunch(300, 3072, DLOGITS["large"], a, b) for a, b in zip(products, reversed(products), strict=True)
    ]
    launches += [GradLaunch(300, c, DLOGITS["large"], products[0], products[0]) for c in (256, 1024)]
    launches += [GradLaunch(r, 1024, DLOGITS["few"], products[2], products[1]) for r in (64, 208)]

    def check(launch: GradLaunch) -> None:
        got = case.run(launch=launch, saved=saved)
        assert_same_bytes(got[0], want[0], f"hidden, {launch}")
        assert_same_bytes(got[1], want[1], f"weight, {launch}")

    each(check, launches)
    # operands that the copy engine can't address take pointers
    wide = torch.zeros(3001, 523, dtype=dtype, device="cuda")[:, 1:521]
    wide.copy_(case.weight)
    case.weight = wide
    pointers = GradLaunch(300, 3072, DLOGITS["pointers"], STRIDED, STRIDED)
    for launch in (None, replace(pointers, columns=512)):
        got = case.run(launch=launch, saved=saved)
        assert_same_bytes(got[0], want[0], "hidden, pointers")
        assert_same_bytes(got[1], want[1], "weight, pointers")


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_shards_go_on_and_own_their_slices(dtype: torch.dtype) -> None:
    case = Case(257, 256, 4000, dtype, bias=0.0, entropy=True)
    saved = case.saved
    want = case.run(saved=saved)
    for bounds in ([0, 2000, 4000], [0, 16, 1008, 1040, 4000], [0, 0, 1008, 2000, 3008, 4000]):
        total = torch.zeros(257, 256, device="cuda")
        for a, b in itertools.pairwise(bounds):
            shard = slice(a, b)
            _, weight, bias = case.run(GradPlan(grad_hidden=total), columns=shard, saved=saved)
            assert_same_bytes(weight, want[1][shard], f"weight of {shard}")
            assert_same_bytes(bias, want[2][shard], f"bias of {shard}")
        assert_same_bytes(total, want[0], f"hidden over {bounds}")


def test_idle_rows_may_hold_anything() -> None:
    for d in (256, 100):  # through the copy engine and through pointers
        case = Case(300, d, 2000, entropy=True)
        case.hidden[::7] = 0
        case.upstream[:, ::7] = 0
        saved = case.saved
        want = case.run(saved=saved)
        case.hidden[::7] = NAN
        got = case.run(saved=saved)
        assert (got[0][::7] == 0).all()
        for a, b in zip(got, want, strict=True):
            assert a is b is None or assert_same_bytes(a, b) is None


def test_main_grad_and_accumulation() -> None:
    for d in (slice(0, 512), slice(0, 509)):
        part = Case(300, 512, 3000)
        part.hidden, part.weight = part.hidden[:, d], part.weight[:, d]
        want, same = part.run()[1], None
        for rows in (300, 64):
            main = torch.full((3000, want.shape[1]), 2.0, device="cuda")
            launch = grad_launch(300, 3000, want.shape[1], "descriptors", 2, False, False, 132)
            launch = replace(launch, rows=rows) if d.stop == 512 else None
            none = part.run(GradPlan(main_grad=main), launch=launch)[1]
            assert none is None
            torch.testing.assert_close(main - 2, want.float(), rtol=1e-2, atol=1e-3)
            same = main if rows == 300 else same
            assert_same_bytes(main, same, "the sum over rows is made first")


def test_many_rows() -> None:
    """More rows than a step takes; offsets beyond 32 bits in dlogits; grad_weight accurate over many rows."""
    n, v = 70000, 40000
    case = Case(n, 64, v, idle=0.0)
    saved = case.saved
    got = case.run(saved=saved)
    last = case.run(rows=slice(n - 100, n), saved=saved)
    assert_same_bytes(got[0][-100:], last[0])
    want = torch.zeros(v, 64, dtype=torch.float64, device="cuda")
    library = torch.zeros(v, 64, device="cuda")
    for rows in torch.arange(n, device="cuda").split(4096):
        z = (case.hidden[rows].double() @ case.weight.double().t()).log_softmax(-1)
        logp, lse, _ = case.upstream[:, rows].double()
        dz = z.exp_() * (lse - logp)[:, None]
        dz[torch.arange(len(rows)), case.target[rows]] += logp
        want += dz.t() @ case.hidden[rows].double()
        library += torch.mm(dz.to(BF16).t(), case.hidden[rows], out_dtype=F32)
    assert error(got[1], want) <= 1.02 * error(library.to(BF16), want)


def test_memory_is_bounded() -> None:
    for n, d, v in ((65536, 128, 151936), (4096, 1024, 131072), (100000, 64, 50257)):
        case = Case(n, d, v)
        saved = case.saved
        for needs in (Needs(True, True, False), Needs(True, False, False)):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            grads = case.run(needs=needs, saved=saved)
            peak = torch.cuda.max_memory_allocated() - before
            kept = 4 * n * d + (2 * v * d if needs.weight else 0)
            assert peak - kept <= 256 << 20, f"{n} x {d} x {v}, {needs}: {(peak - kept) / 2**20:.0f} MiB"
            del grads


def test_graph_stream_and_no_synchronisation() -> None:
    case = Case(300, 512, 3000)
    other = Case(300, 512, 3000, seed=5)
    leaves = [x.clone().requires_grad_() for x in (case.hidden, case.weight)]
    target, upstream = case.target.clone(), case.upstream[0].clone()

    def step(hidden, weight, target, upstream):
        logp = vs.linear_logp(hidden, weight, target, backend="triton", validate=False)
        return torch.autograd.grad(logp, (hidden, weight), upstream)

    def of(x: Case):
        return step(x.hidden.requires_grad_(), x.weight.requires_grad_(), x.target, x.upstream[0])

    want = [of(case), of(other)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        of(case)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(*leaves, target, upstream)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step(*leaves, target, upstream)
    for x, expect in zip((case, other), want, strict=True):
        with torch.no_grad():
            for to, value in zip(
                (*leaves, target, upstream), (x.hidden, x.weight, x.target, x.upstream[0]), strict=True
            ):
                to.copy_(value)
        graph.replay()
        for a, b in zip(grads, expect, strict=True):
            assert_same_bytes(a, b, "replayed")
