"""Gradients over a real group under every option: rank by rank against one rank's, and a step of training."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import vocabshard as vs
from vocabshard.dist import gather
from vocabshard.dist import grad as dist_grad
from vocabshard.launching import Ranks
from vocabshard.testing.compare import assert_same_bytes
from vocabshard.testing.dlogits import dlogits

N, D, V = 64, 48, 1000


def problem(device: torch.device, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """hidden, weight, bias, target and the upstream gradients of logp, lse and entropy, some rows of which are zero."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=g).to(dtype)
    weight = (torch.randn(V, D, generator=g) * 0.4).to(dtype)
    bias, target = torch.randn(V, generator=g), torch.randint(0, V, (N,), generator=g)
    target[4] = -100
    upstream = torch.randn(3, N, generator=g)
    upstream[:, ::5] = 0
    return tuple(x.to(device) for x in (hidden, weight, bias, target, upstream))


def bounds_of(layout: str, size: int) -> list[int]:
    if layout == "even":
        step = -(-V // (16 * size)) * 16
        return [min(step * i, V) for i in range(size)] + [V]
    if layout == "uneven":
        return [16 * (3 * i * i + i) for i in range(size)] + [V]
    if layout == "uneven in 64s":
        return [64 * i * i for i in range(size)] + [V]
    return [min(16 * 20 * i, V) for i in range(size - 1)] + [V, V] if size > 1 else [0, V]


def gradients(
    case: tuple[Tensor, ...], options: vs.GradOptions | None = None, rows: slice = slice(None), **more
) -> tuple[vs.LogpOutput, Tensor, Tensor, Tensor]:
    """The outputs and the gradients of hidden and of this rank's `rows` of weight and bias."""
    hidden, weight, bias, target, upstream = case
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight[rows], bias[rows])]
    out = vs.linear_logp(leaves[0], leaves[1], target, leaves[2], return_lse=True, return_entropy=True,
                         grad_options=options, **more)  # fmt: skip
    torch.autograd.backward(list(out[:3]), [u.view(target.shape) for u in upstream])
    return out, *(leaf.grad for leaf in leaves)


def chained(device: torch.device) -> torch.dtype:
    """A dtype whose chain is the device's own: of FMAs on the CPU, of the tensor core on a GPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def in_order(case: tuple[Tensor, ...], **more) -> tuple[vs.LogpOutput, Tensor, Tensor, Tensor]:
    return gradients(case, vs.GradOptions(reduce="ordered"), **more)


def shard_of(layout: str, ranks: Ranks, group) -> tuple[vs.VocabShard, slice]:
    bounds = bounds_of(layout, dist.get_world_size(group))
    rank = dist.get_rank(group)
    shard = vs.VocabShard(bounds[rank], bounds[rank + 1], V, V, group)
    return shard, slice(shard.start, shard.stop)


def of_every_rank(tensor: Tensor, group) -> list[Tensor]:
    """Collective; a test does it before its assertions, so that a failure leaves no rank waiting."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor, group=group)
    return everyone


def all_the_same(everyone: list[Tensor], what: str) -> None:
    for other in everyone[1:]:
        assert_same_bytes(other, everyone[0], what)


def slices_of(got: tuple, want: tuple, rows: slice, on_cpu: bool) -> None:
    """grad_weight is this rank's part of the single-rank one, whose chain over the rows does not see W; grad_bias too,
    on GPUs to the rounding of a sum in fp32 whose order is that of a library where the operands are fp32."""
    assert_same_bytes(got[2], want[2][rows], "grad_weight")
    if on_cpu:
        assert_same_bytes(got[3], want[3][rows], "grad_bias")
    else:
        torch.testing.assert_close(got[3], want[3][rows], rtol=1e-5, atol=1e-5)


def no_worse_than_recomputed(got: tuple, want: tuple, rows: slice, case: tuple[Tensor, ...]) -> None:
    """Logits that Hopper keeps are 16-bit codes, and a rank may keep rows that a single rank makes again: gradients of
    this rank's `rows` are held against fp64, beside those of a single rank that keeps nothing."""
    hidden, weight, bias, target, upstream = case
    scored = target != -100
    gs = (upstream[0].where(scored, 0), *upstream[1:])
    exact = dlogits(hidden, weight, bias, target.where(scored, 0), gs, torch.float64)[:, rows]
    weight_error, bar = ((g.double() - exact.T @ hidden.double()).norm() for g in (got[2], want[2][rows]))
    # A code is off by 8.5e-5 of p and so moves a few of the roundings to bf16 (2e-3), each by little: by chance either
    # way, some tenths of a percent over a shard.
    assert weight_error <= 1.02 * bar, f"grad_weight: {weight_error:.3e}, recomputed {bar:.3e}"
    # grad_bias is a sum of codes before that rounding
    bias_error = (got[3].double() - exact.sum(0)).norm()
    bar = (exact.bfloat16().double().sum(0) - exact.sum(0)).norm()
    assert bias_error <= bar, f"grad_bias: {bias_error:.3e}, of dlogits in bf16 {bar:.3e}"


OPTIONS = {
    "plain": {},
    "saved": {"save_logits_budget": 20 * 4 * 300},
    "all saved": {"save_logits_budget": "auto"},
    "bf16 wire": {"wire_dtype": torch.bfloat16},
    "main_grad": {"main_grad": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(OPTIONS))
def test_options_rank_by_rank(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    case = problem(ranks.device, dtype=dtype)
    # codes are made in groups of 64 columns from a shard's first on
    shard, rows = shard_of("uneven in 64s" if name == "all saved" else "uneven", ranks, dist.group.WORLD)
    options, alone = dict(OPTIONS[name]), {}
    if name == "main_grad":
        options["main_grad"] = torch.zeros(shard.size, D, device=ranks.device)
        alone["main_grad"] = torch.zeros(V, D, device=ranks.device)
    if name == "all saved":
        alone = options
    want = gradients(case, vs.GradOptions(**alone))
    got = gradients(case, vs.GradOptions(**options), rows, shard=shard)
    again = gradients(case, vs.GradOptions(**{**options, **({"main_grad": None} if name == "main_grad" else {})}), rows,
                      shard=shard)  # fmt: skip
    grad_hidden = of_every_rank(got[1], dist.group.WORLD)
    codes = got[0].provenance.backend == "sm90" and dtype == torch.bfloat16  # kept there; else nothing or fp32
    for a, b in zip(got[0][:3], want[0][:3], strict=True):
        assert_same_bytes(a, b, "the forward")
    coarse = dtype == torch.bfloat16 or name == "bf16 wire"
    torch.testing.assert_close(got[1], want[1], rtol=2e-2 if coarse else 1e-5, atol=2e-2 if coarse else 1e-6)
    all_the_same(grad_hidden, "grad_hidden")
    assert_same_bytes(again[1], got[1], "run to run")
    if name == "main_grad":
        assert got[2] is None and want[2] is None
        got, want = (*got[:2], options["main_grad"], got[3]), (*want[:2], alone["main_grad"], want[3])
    if name == "all saved" and (codes or ranks.device.type == "cpu"):
        assert got[0].provenance.saved_rows == want[0].provenance.saved_rows == N
    if name == "saved" and codes:
        no_worse_than_recomputed(got, want, rows, case)
    else:
        slices_of(got, want, rows, ranks.device.type == "cpu")


@pytest.mark.parametrize("reduce", ["sum", "ordered"])
def test_half_precision_is_summed_in_fp32_and_rounded_once(ranks: Ranks, reduce: str) -> None:
    if ranks.device.type != "cpu":
        pytest.skip("there dlogits are rounded before the products")
    low = problem(ranks.device, dtype=torch.bfloat16)
    high = (low[0].float(), low[1].float(), *low[2:])
    shard, rows = shard_of("uneven", ranks, dist.group.WORLD)
    options = vs.GradOptions(reduce=reduce)
    got, want = (gradients(case, options, rows, shard=shard) for case in (low, high))
    assert_same_bytes(got[1], want[1].bfloat16(), "grad_hidden")
    assert_same_bytes(got[2], want[2].bfloat16(), "grad_weight")


@pytest.mark.parametrize("offset", [1e4, 1e5])
def test_offsets_lose_no_digits(ranks: Ranks, offset: float) -> None:
    hidden, weight, bias, target, upstream = problem(ranks.device)
    case = (hidden, weight, bias + offset, target, upstream)
    shard, rows = shard_of("uneven", ranks, dist.group.WORLD)
    got = gradients(case, rows=rows, shard=shard)
    z = vs.linear_logp(hidden, weight, target, case[2], return_logits=True).logits.double().requires_grad_()
    logps = torch.log_softmax(z, -1)  # of the logits that were computed, whose own rounding is the offset's
    scored = target != -100
    logp = torch.where(scored, logps.gather(1, target.clamp(min=0)[:, None])[:, 0], 0.0)
    entropy = -(logps.exp() * logps).sum(-1)
    torch.autograd.backward([logp, torch.logsumexp(z, -1), entropy], list(upstream.double()))
    for g, want in ((got[1], z.grad @ weight.double()), (got[2], (z.grad.T @ hidden.double())[rows])):
        assert (g.double() - want).norm() < 2e-6 * want.norm() + 1e-12


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_graph_of_forward_and_backward(ranks: Ranks, sequence_parallel: bool) -> None:
    """A CUDA graph with the group's collectives in it, replayed on other values."""
    if ranks.backend != "nccl":
        pytest.skip("gloo's collectives cannot be captured")
    if sequence_parallel and N % ranks.world_size:
        pytest.skip(f"{N} rows in {ranks.world_size} parts")
    shard, rows = shard_of("uneven", ranks, dist.group.WORLD)

    def run(case: tuple[Tensor, ...]) -> list[Tensor]:
        hidden, weight, bias, target, upstream = case
        hidden = hidden.chunk(ranks.world_size)[ranks.rank] if sequence_parallel else hidden
        leaves = [x.detach().requires_grad_() for x in (hidden, weight[rows], bias[rows])]
        out = vs.linear_logp(leaves[0], leaves[1], target, leaves[2], shard=shard, return_lse=True, return_entropy=True,
                             sequence_parallel=sequence_parallel, validate=False)  # fmt: skip
        return [*(x.detach() for x in out[:3]), *torch.autograd.grad(list(out[:3]), leaves, list(upstream))]

    case = problem(ranks.device, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(case)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(case)
    for seed in (1, 2):
        other = problem(ranks.device, seed, torch.bfloat16)
        for to, value in zip(case, other, strict=True):
            to.copy_(value)
        graph.replay()
        for a, b in zip(captured, run(other), strict=True):
            assert_same_bytes(a, b, f"replay on seed {seed}")


@pytest.mark.parametrize("layout", ["even", "uneven", "empty last"])
def test_ordered_grad_hidden_is_the_single_ranks(ranks: Ranks, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist_grad, "CHUNK_ROWS", 10)  # 7 chunks
    shard, rows = shard_of(layout, ranks, dist.group.WORLD)
    found = []
    for seed in range(3):
        case = problem(ranks.device, seed, chained(ranks.device))
        got = in_order(case, rows=rows, shard=shard)
        found.append((got, in_order(case), of_every_rank(got[1], dist.group.WORLD)))
    for got, want, everyone in found:
        all_the_same([want[1], *everyone], "grad_hidden")
        slices_of(got, want, rows, ranks.device.type == "cpu")


def test_ordered_in_groups_of_every_size(ranks: Ranks) -> None:
    case = problem(ranks.device, dtype=chained(ranks.device))
    want = in_order(case)
    for size in range(1, ranks.world_size + 1):
        group = dist.new_group(list(range(ranks.world_size - size, ranks.world_size)))
        if ranks.rank < ranks.world_size - size:
            continue
        shard, rows = shard_of("even", ranks, group)
        assert_same_bytes(in_order(case, rows=rows, shard=shard)[1], want[1], f"{size} ranks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=lambda d: f"{d} wire")
def test_the_sum_in_parts(ranks: Ranks, wire: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem(ranks.device, dtype=dtype)
    shard, rows = shard_of("uneven", ranks, dist.group.WORLD)
    options = vs.GradOptions(wire_dtype=wire)
    want = gradients(case, options, rows, shard=shard)
    monkeypatch.setattr(dist_grad, "PART_ELEMENTS", 10 * D)
    got = gradients(case, options, rows, shard=shard)
    all_the_same(of_every_rank(got[1], dist.group.WORLD), "grad_hidden")
    close = {"rtol": 2e-2, "atol": 2e-2} if torch.bfloat16 in (wire, dtype) else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(got[1], want[1], **close)
    for a, b in zip(got[2:], want[2:], strict=True):
        assert_same_bytes(a, b, "gradients of the shard")


@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("reduce", ["sum", "ordered"])
def test_sequence_parallel(ranks: Ranks, reduce: str, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if N % ranks.world_size:
        pytest.skip(f"{N} rows in {ranks.world_size} parts")
    if pieces:
        monkeypatch.setattr(gather, "PIECES_FROM", 0)
        monkeypatch.setattr(dist_grad, "PART_ELEMENTS", D)
    case = problem(ranks.device, dtype=chained(ranks.device) if reduce == "ordered" else torch.float32)
    shard, rows = shard_of("uneven", ranks, dist.group.WORLD)
    hidden, weight, bias, target, upstream = case
    batch = N // ranks.world_size  # rows [S, batch, D]: Megatron's layout, S in parts
    scores = (weight, bias, target.view(-1, batch), upstream)
    plain = (hidden.view(-1, batch, D), *scores)
    mine = (hidden.view(-1, batch, D).chunk(ranks.world_size)[ranks.rank], *scores)
    temperature = torch.rand(N, generator=torch.Generator().manual_seed(3)).to(ranks.device) + 0.5
    more = {"shard": shard, "rows": rows, "temperature": temperature.view(-1, batch)}
    go = in_order if reduce == "ordered" else gradients
    want, got = go(plain, **more), go(mine, sequence_parallel=True, **more)
    own = want[1].chunk(ranks.world_size)[ranks.rank]
    call = {"shard": shard, "temperature": more["temperature"], "return_lse": True}
    whole = vs.linear_logp(plain[0], weight[rows], plain[3], bias[rows], return_logits=True, **call)
    others = [
        vs.linear_logp(
            mine[0].clone().requires_grad_(),
            weight[rows],
            mine[3],
            bias[rows],
            sequence_parallel=True,
            **call,
            **options,
        )
        for options in ({"return_logits": True}, {"grad_options": vs.GradOptions(save_logits_budget="auto")})
    ]
    for a, b in zip(got[0][:3], want[0][:3], strict=True):
        assert_same_bytes(a, b, "the forward of all rows, the same as without")
    if reduce == "ordered":
        assert_same_bytes(got[1], own, "grad_hidden of this rank's rows")
    else:
        torch.testing.assert_close(got[1], own, rtol=1e-5, atol=1e-6)
    for a, b in zip(got[2:], want[2:], strict=True):
        assert_same_bytes(a, b, "gradients of the shard")
    for out, what in zip(others, ("with logits", "with kept logits"), strict=True):
        assert_same_bytes(out.logp, want[0].logp, what)
    assert_same_bytes(others[0].logits, whole.logits, "logits of all rows")


def test_what_one_rank_alone_keeps_does_not_change_how_rows_travel(ranks: Ranks, monkeypatch) -> None:
    """Logits that a rank asks for, or has the memory to keep."""
    if N % ranks.world_size:
        pytest.skip(f"{N} rows in {ranks.world_size} parts")
    monkeypatch.setattr(gather, "PIECES_FROM", 0)
    hidden, weight, bias, target, _ = problem(ranks.device)
    shard, rows = shard_of("uneven", ranks, dist.group.WORLD)
    own, first = hidden.chunk(ranks.world_size)[ranks.rank], ranks.rank == 0
    call = {"shard": shard, "sequence_parallel": True}
    want = vs.linear_logp(hidden, weight[rows], target, bias[rows], shard=shard, return_logits=True)
    assert isinstance(want, vs.LogpOutput)
    for options in (
        {"return_logits": first},
        {"grad_options": vs.GradOptions(save_logits_budget="auto" if first else 0)},
    ):
        out = vs.linear_logp(own.clone().requires_grad_(), weight[rows], target, bias[rows], **call, **options)
        logp = out.logp if isinstance(out, vs.LogpOutput) else out
        assert_same_bytes(logp, want.logp, str(options))
        logp.sum().backward()
        if isinstance(out, vs.LogpOutput):
            assert_same_bytes(out.logits, want.logits, "logits of all rows")


def raised(call) -> str:
    try:
        call()
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    return "no error"


def test_bad_options_are_everybodys_error(ranks: Ranks) -> None:
    if ranks.world_size == 1:
        pytest.skip("one rank")
    hidden, weight, _, target, _ = problem(ranks.device)
    shard, rows = shard_of("even", ranks, dist.group.WORLD)
    last = ranks.rank == ranks.world_size - 1

    def call(rows_here: int = N // ranks.world_size, **more) -> Tensor:
        part = hidden[:rows_here] if more.get("sequence_parallel") else hidden
        return vs.linear_logp(part, weight[rows], target, shard=shard, validate=True, **more)

    wrong = vs.GradOptions(main_grad=torch.zeros(3, D, device=ranks.device))
    for message, bad in {
        "sequence_parallel=True: hidden must be": lambda: call(
            N // ranks.world_size + (1 if last else 0), sequence_parallel=True
        ),
        "different options": lambda: call(grad_options=vs.GradOptions(wire_dtype=torch.bfloat16) if last else None),
        "main_grad must be contiguous": lambda: call(grad_options=wrong if last else None),
    }.items():
        everyone: list[str] = [""] * ranks.world_size
        dist.all_gather_object(everyone, raised(bad))
        assert message in everyone[0] and len(set(everyone)) == 1, everyone
    call(sequence_parallel=True)  # nobody is out of step


def test_composes_with_checkpointing_accumulation_and_retained_graphs(ranks: Ranks) -> None:
    from torch.utils.checkpoint import checkpoint

    case = problem(ranks.device)
    hidden, weight, bias, target, upstream = case
    shard, rows = shard_of("uneven", ranks, dist.group.WORLD)
    want = gradients(case, rows=rows, shard=shard)
    h, w, b = (x.detach().clone().requires_grad_() for x in (hidden, weight[rows], bias[rows]))

    def block(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return vs.linear_logp(h, w, target, b, shard=shard, return_lse=True, return_entropy=True)[:3]

    out = checkpoint(block, h, w, b, use_reentrant=False)
    torch.autograd.backward(list(out), list(upstream))
    for leaf, g in zip((h, w, b), want[1:], strict=True):
        assert_same_bytes(leaf.grad, g, "checkpointed")
        leaf.grad = None
    out = block(h, w, b)
    for _ in range(2):
        torch.autograd.backward(list(out), list(upstream), retain_graph=True)
    for leaf, g in zip((h, w, b), want[1:], strict=True):
        assert_same_bytes(leaf.grad, g + g, "twice from a graph that was kept")


@pytest.mark.parametrize("by_shard", [False, True], ids=["group", "shard"])
def test_compiled_over_a_group(ranks: Ranks, by_shard: bool) -> None:
    case = problem(ranks.device)
    shard, rows = shard_of("uneven", ranks, dist.group.WORLD)
    options = {"shard": shard} if by_shard else {"tp_group": dist.new_group(), "global_vocab_size": V}
    want = gradients(case, rows=rows, **options)
    hidden, weight, bias, target, upstream = case
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight[rows], bias[rows])]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        out = vs.linear_logp(h, w, target, b, return_lse=True, return_entropy=True, **options)
        return (torch.stack(out[:3]) * upstream).sum()

    loss(*leaves).backward()
    for leaf, g in zip(leaves, want[1:], strict=True):
        assert_same_bytes(leaf.grad, g, "one node of a graph, on every rank")


class Head(torch.nn.Module):
    """A head that is called through its module, as FSDP wants it."""

    def __init__(self, weight: Tensor, **options) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())
        self.options = options

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return vs.linear_logp(hidden, self.weight, target, **self.options)


def test_fsdp_weights_and_dtensor_weights(ranks: Ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard

    hidden, weight, _, target, _ = problem(ranks.device)
    target = target % V
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    # FSDP: the parameter is whole during forward and backward, each rank has a batch of its own
    head = Head(weight)
    fully_shard(head, mesh=mesh)
    share = slice(ranks.rank, None, ranks.world_size)
    head(hidden[share], target[share]).mean().backward()
    whole = weight.clone().requires_grad_()
    total = sum(
        vs.linear_logp(hidden[i :: ranks.world_size], whole, target[i :: ranks.world_size]).mean()
        for i in range(ranks.world_size)
    )
    (total / ranks.world_size).backward()
    mine = whole.grad.chunk(ranks.world_size)[ranks.rank]  # compared by shards: gloo gathers no CUDA tensors of DTensor
    torch.testing.assert_close(head.weight.grad.to_local(), mine, rtol=1e-4, atol=1e-6)
    # DTensor: the parameter's shards are the vocabulary's (of a size that no other test gives the mesh's group)
    fewer, target = weight[: V - 40], target % (V - 40)
    part = fewer.chunk(ranks.world_size)[ranks.rank]
    sharded = torch.nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], shape=fewer.shape, stride=fewer.stride()))
    vs.linear_logp(hidden, sharded, target).mean().backward()
    assert isinstance(sharded.grad, DTensor) and list(sharded.grad.placements) == [Shard(0)]
    alone = fewer.clone().requires_grad_()
    vs.linear_logp(hidden, alone, target).mean().backward()
    mine = alone.grad.chunk(ranks.world_size)[ranks.rank]
    torch.testing.assert_close(sharded.grad.to_local(), mine, rtol=1e-4, atol=1e-7)


def ppo_loss(out: vs.LogpOutput, old: Tensor, reference: Tensor, advantage: Tensor) -> Tensor:
    """PPO's clipped ratio, an entropy bonus and the k3 estimate of KL, as a mean over rows."""
    ratio = torch.exp(out.logp - old)
    policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    gap = reference - out.logp
    return (policy - 0.01 * out.entropy + 0.05 * (gap.exp() - 1 - gap)).mean()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_step_of_reinforcement_learning(ranks: Ranks, sequence_parallel: bool) -> None:
    """A body and a sharded head on all ranks, PPO with entropy and KL: the same step as on one rank."""
    if N % ranks.world_size:
        pytest.skip(f"{N} rows in {ranks.world_size} parts")
    inputs, weight, bias, target, _ = problem(ranks.device)
    target = target % V
    g = torch.Generator().manual_seed(9)
    body = (torch.randn(D, D, generator=g) * D**-0.5).to(ranks.device)
    advantage = torch.randn(N, generator=g).to(ranks.device)
    shard, rows = shard_of("uneven", ranks, dist.group.WORLD)

    def steps(head: Tensor, offset: Tensor, part: slice, **more) -> tuple[Tensor, Tensor, list[float]]:
        parameters = [torch.nn.Parameter(body.clone()), torch.nn.Parameter(head.clone())]
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        losses: list[float] = []
        old = reference = None
        for _ in range(3):
            hidden = torch.tanh(inputs[part] @ parameters[0])
            out = vs.linear_logp(hidden, parameters[1], target, offset, return_entropy=True, **more)
            if old is None:
                old, reference = out.logp.detach(), out.logp.detach() - 0.1
            loss = ppo_loss(out, old, reference, advantage)
            assert losses or (torch.exp(out.logp - old) == 1).all(), "the first ratio is exactly 1"
            optimizer.zero_grad()
            loss.backward()
            if more.get("sequence_parallel"):  # each rank's body saw its rows alone
                dist.all_reduce(parameters[0].grad)
            optimizer.step()
            losses.append(float(loss.detach()))
        return parameters[0].detach(), parameters[1].detach(), losses

    want = steps(weight, bias, slice(None))
    size = N // ranks.world_size
    part = slice(ranks.rank * size, (ranks.rank + 1) * size) if sequence_parallel else slice(None)
    got = steps(weight[rows], bias[rows], part, shard=shard, sequence_parallel=sequence_parallel)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1], want[1][rows], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[2], want[2], rtol=1e-6, atol=1e-7)
    assert want[2][2] < want[2][0]
