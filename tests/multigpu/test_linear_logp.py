"""linear_logp over a real group: the same bytes as on one rank, gradients rank by rank, errors on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import vocabshard as vs
from vocabshard.launching import Ranks
from vocabshard.testing.compare import assert_same_bytes

D, V = 48, 1000
DTYPES = [torch.float32, torch.bfloat16]


def problem(device: torch.device, n: int = 33, v: int = V, dtype: torch.dtype = torch.float32, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, D, generator=g).to(dtype)
    weight = (torch.randn(v, D, generator=g) * 0.4).to(dtype)
    bias, target = torch.randn(v, generator=g), torch.randint(0, v, (n,), generator=g)
    return tuple(x.to(device) for x in (hidden, weight, bias, target))


def layouts(world_size: int, v: int) -> dict[str, list[int]]:
    """Bounds of W shards at multiples of 16: even as far as it goes, uneven, with an empty last shard."""
    even = -(-v // (16 * world_size)) * 16
    uneven = [16 * (3 * i * i + i) for i in range(world_size)]
    early = [min(16 * 20 * i, v) for i in range(world_size - 1)] + [v]
    return {
        "even": [min(even * i, v) for i in range(world_size)] + [v],
        "uneven": [*uneven, v],
        "empty last": [*early, v] if world_size > 1 else [0, v],
    }


def everything(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options) -> vs.LogpOutput:
    out = vs.linear_logp(hidden, weight, target, bias, return_lse=True, return_entropy=True, **options)
    assert isinstance(out, vs.LogpOutput)
    return out


def shard_of(bounds: list[int], rank: int, group, real: int | None = None) -> vs.VocabShard:
    return vs.VocabShard(bounds[rank], bounds[rank + 1], bounds[-1] if real is None else real, bounds[-1], group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["even", "uneven", "empty last"])
def test_same_bytes_as_one_rank(ranks: Ranks, layout: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        hidden, weight, bias, target = problem(ranks.device, dtype=dtype, seed=seed)
        want = everything(hidden, weight, target, bias, temperature=0.7)
        bounds = layouts(ranks.world_size, V)[layout]
        shard = shard_of(bounds, ranks.rank, dist.group.WORLD)
        start, stop = shard.start, shard.stop
        got = everything(hidden, weight[start:stop], target, bias[start:stop], shard=shard, temperature=0.7)
        for a, b, what in zip(got[:3], want[:3], ("logp", "lse", "entropy"), strict=True):
            assert_same_bytes(a, b, f"{what}, {layout}, seed {seed}")
        strict = shard.aligned
        assert got.provenance.contract_bearing == strict


@pytest.mark.parametrize("pad_to", [64, 128])
def test_padded_vocabularies(ranks: Ranks, pad_to: int) -> None:
    hidden, weight, bias, target = problem(ranks.device)
    want = everything(hidden, weight, target, bias)
    shard = vs.VocabShard.split(V, dist.group.WORLD, pad_to_multiple_of=pad_to)
    fill = shard.padded_vocab_size - V
    weight = torch.cat([weight, torch.full((fill, D), float("nan"), device=ranks.device)])
    bias = torch.cat([bias, torch.full((fill,), float("inf"), device=ranks.device)])
    rows = slice(shard.start, shard.stop)
    for options in ({"shard": shard}, {"tp_group": dist.new_group(), "real_vocab_size": V}):
        got = everything(hidden, weight[rows], target, bias[rows], **options)
        for a, b in zip(got[:3], want[:3], strict=True):
            assert_same_bytes(a, b)


@pytest.mark.parametrize("layout", ["even", "uneven", "empty last"])
def test_gradients_rank_by_rank(ranks: Ranks, layout: str) -> None:
    hidden, weight, bias, target = problem(ranks.device)
    target[4] = -100
    g = torch.Generator().manual_seed(7)
    gs = [torch.randn(33, generator=g).to(ranks.device) for _ in range(3)]
    gs[0][::5] = 0

    def grads(h: Tensor, w: Tensor, b: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in (h, w, b)]
        out = everything(leaves[0], leaves[1], target, leaves[2], **options)
        torch.autograd.backward([out.logp, out.lse, out.entropy], gs)
        return tuple(x.grad for x in leaves)

    want = grads(hidden, weight, bias)
    bounds = layouts(ranks.world_size, V)[layout]
    shard = shard_of(bounds, ranks.rank, dist.group.WORLD)
    rows = slice(shard.start, shard.stop)
    got = grads(hidden, weight[rows], bias[rows], shard=shard)
    again = grads(hidden, weight[rows], bias[rows], shard=shard)
    everyone = [torch.empty_like(got[0]) for _ in range(ranks.world_size)]
    dist.all_gather(everyone, got[0])
    assert_same_bytes(got[1], want[1][rows], "grad_weight is the slice of the single-rank one")
    if ranks.device.type == "cpu":
        assert_same_bytes(got[2], want[2][rows], "grad_bias")
    else:  # of fp32 operands it is a library's sum
        torch.testing.assert_close(got[2], want[2][rows], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    for other in everyone:
        assert_same_bytes(other, got[0], "grad_hidden is equal on all ranks")
    for a, b in zip(again, got, strict=True):
        assert_same_bytes(a, b, "run to run")


def test_logits_sharded(ranks: Ranks) -> None:
    hidden, weight, bias, target = problem(ranks.device)
    full = everything(hidden, weight, target, bias, return_logits=True)
    bounds = layouts(ranks.world_size, V)["uneven"]
    rows = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
    local = full.logits[:, rows].clone().requires_grad_()
    out = vs.vocab_parallel_logp(local, target, tp_group=dist.group.WORLD, global_vocab_size=V, return_entropy=True)
    for a, b in zip(out[:3], full[:3], strict=True):
        assert_same_bytes(a, b)
    out.logp.sum().backward()
    whole = full.logits.clone().requires_grad_()
    vs.vocab_parallel_logp(whole, target).logp.sum().backward()
    assert_same_bytes(local.grad, whole.grad[:, rows], "the gradient stays on its rank")
    got = everything(hidden, weight[rows], target, bias[rows], return_logits=True, tp_group=dist.group.WORLD,
                     global_vocab_size=V)  # fmt: skip
    assert_same_bytes(got.logits, full.logits[:, rows], "return_logits")
    assert_same_bytes(got.logp, full.logp)


def test_group_orders_subgroups_and_turns(ranks: Ranks) -> None:
    """Group ranks that are not the world's, two groups in turn, a group this process is not in."""
    hidden, weight, bias, target = problem(ranks.device)
    want = everything(hidden, weight, target, bias)
    size = ranks.world_size
    backwards = dist.new_group(list(range(size))[::-1], sort_ranks=False) if _has_sort_ranks() else dist.group.WORLD
    some = dist.new_group(list(range(1, size)))
    for _ in range(2):
        for group in (backwards, dist.group.WORLD):
            rank = dist.get_rank(group)
            bounds = layouts(size, V)["uneven"]
            rows = slice(bounds[rank], bounds[rank + 1])
            got = everything(hidden, weight[rows], target, bias[rows], tp_group=group, global_vocab_size=V)
            assert_same_bytes(got.logp, want.logp)
            assert_same_bytes(got.entropy, want.entropy)
    if ranks.rank == 0:
        with pytest.raises(ValueError, match="not a member"):
            vs.linear_logp(hidden, weight, target, tp_group=some)
    elif size > 1:
        bounds = layouts(size - 1, V)["even"]
        rows = slice(bounds[ranks.rank - 1], bounds[ranks.rank])
        got = everything(hidden, weight[rows], target, bias[rows], tp_group=some)
        assert_same_bytes(got.lse, want.lse)


def _has_sort_ranks() -> bool:
    import inspect

    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def test_dtensor_weight(ranks: Ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    hidden, weight, bias, target = problem(ranks.device, v=1001)  # an uneven last shard, inner bounds off 16
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    w = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    b = distribute_tensor(bias, mesh, [Shard(0)])
    got = everything(hidden, w, target, b)
    want = everything(hidden, weight, target, bias)
    torch.testing.assert_close(got.logp, want.logp, rtol=1e-6, atol=1e-6)
    aligned = ranks.world_size == 1
    assert got.provenance.contract_bearing == aligned
    if not aligned:
        with pytest.raises(vs.ContractError, match="not multiples of 16"):
            vs.linear_logp(hidden, w, target, b, strict=True)
    got.logp.sum().backward()
    single = weight.clone().requires_grad_()
    everything(hidden, single, target, bias).logp.sum().backward()
    start = dist.get_rank() * -(-1001 // ranks.world_size)
    local = w.grad.to_local()
    torch.testing.assert_close(local, single.grad[start : start + len(local)], rtol=1e-4, atol=1e-6)


def test_unaligned_boundaries_are_correct_and_flagged(ranks: Ranks) -> None:
    hidden, weight, bias, target = problem(ranks.device)
    bounds = [0, *(100 * i + 7 for i in range(1, ranks.world_size)), V]
    rows = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
    got = everything(hidden, weight[rows], target, bias[rows], tp_group=dist.new_group(), global_vocab_size=V)
    torch.testing.assert_close(got.logp, everything(hidden, weight, target, bias).logp, rtol=1e-6, atol=2e-6)
    assert got.provenance.contract_bearing == (ranks.world_size == 1)


def on_all_ranks(ranks: Ranks, message: str, call) -> None:
    """The call raises on every rank, with one message."""
    try:
        call()
        mine = "no error"
    except (ValueError, TypeError, NotImplementedError, vs.ContractError) as e:
        mine = str(e)
    everyone: list[str] = [""] * ranks.world_size
    dist.all_gather_object(everyone, mine)
    assert message in mine, everyone
    assert len(set(everyone)) == 1, everyone


def test_everybody_gets_the_same_error(ranks: Ranks) -> None:
    if ranks.world_size == 1:
        pytest.skip("one rank")
    hidden, weight, bias, target = problem(ranks.device)
    bounds = layouts(ranks.world_size, V)["even"]
    rows = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
    w, b = weight[rows], bias[rows]
    group = dist.new_group()
    last = ranks.rank == ranks.world_size - 1

    def call(**change):
        arguments = {"hidden": hidden, "weight": w, "target_ids": target, "bias": b, **change}
        return vs.linear_logp(**arguments, tp_group=group, real_vocab_size=V, validate=True)

    call()
    bad = f"rank {ranks.world_size - 1} of the group"
    on_all_ranks(ranks, f"{bad}: hidden must be", lambda: call(hidden=hidden[:, :5] if last else hidden))
    on_all_ranks(ranks, f"{bad}: target_ids must be", lambda: call(target_ids=target.float() if last else target))
    on_all_ranks(ranks, "different target_ids", lambda: call(target_ids=target.flip(0) if last else target))
    on_all_ranks(ranks, "different hidden", lambda: call(hidden=hidden + 1 if last else hidden))
    on_all_ranks(ranks, "different options", lambda: call(temperature=0.5 if last else 0.6))
    rows_less = 3 if last else 33
    on_all_ranks(ranks, "different", lambda: call(hidden=hidden[:rows_less], target_ids=target[:rows_less]))
    on_all_ranks(ranks, "target_ids[5] is 1000", lambda: call(target_ids=torch.where(
        torch.arange(33, device=ranks.device) == 5, 1000, target)))  # fmt: skip
    call()


def test_errors_found_on_one_rank_alone_reach_all(ranks: Ranks) -> None:
    """Each of these is wrong on the last rank only; the others must not be left waiting."""
    if ranks.world_size == 1:
        pytest.skip("one rank")
    hidden, weight, _, target = problem(ranks.device)
    group = dist.new_group()
    bounds = layouts(ranks.world_size, V)["even"]
    shard = shard_of(bounds, ranks.rank, group)
    w = weight[shard.start : shard.stop]
    last = ranks.rank == ranks.world_size - 1
    who = f"rank {ranks.world_size - 1} of the group"

    def call(**change):
        arguments = {"hidden": hidden, "weight": w, "target_ids": target, "validate": True, **change}
        return vs.linear_logp(**arguments)

    for known in ({"shard": shard}, {"tp_group": group, "global_vocab_size": V}):
        call(**known)
        fewer = w[:-1] if last else w
        on_all_ranks(ranks, f"{who}: this rank's shard is", lambda k=known, f=fewer: call(weight=f, **k))
        start = {"vocab_start_index": 16} if last else {}
        on_all_ranks(ranks, f"{who}: vocab_start_index is 16", lambda k=known, s=start: call(**s, **k))
        on_all_ranks(ranks, f"{who}: contract", lambda k=known: call(contract="another" if last else None, **k))
        strict = {"strict": True, "backend": "torch"}
        on_all_ranks(ranks, "does not bear it", lambda k=known, s=strict: call(**s, **k))
        on_all_ranks(ranks, "different options", lambda k=known: call(strict=last, **k))
        on_all_ranks(ranks, f"{who}: weight must be", lambda k=known: call(weight=None if last else w, **k))
        meta = w.to("meta") if last else w
        on_all_ranks(ranks, f"{who}: weight is on the meta", lambda k=known, m=meta: call(weight=m, **k))
        cut = {"cut": target} if last else {}
        on_all_ranks(ranks, f"{who}: cut was given without the program", lambda k=known, c=cut: call(**c, **k))
        hot = torch.ones(33, device="meta" if last else ranks.device)
        on_all_ranks(ranks, f"{who}: temperature must be", lambda k=known, t=hot: call(temperature=t, **k))
        call(**known)


def test_full_logits_with_a_group_are_noticed(ranks: Ranks) -> None:
    if ranks.world_size == 1:
        pytest.skip("one rank")
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(ranks.device)
    target = torch.arange(5, device=ranks.device)
    on_all_ranks(ranks, "the full logits", lambda: vs.vocab_parallel_logp(logits, target, tp_group=dist.new_group()))


def test_a_mesh_stands_for_its_group(ranks: Ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    hidden, weight, bias, target = problem(ranks.device)
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    bounds = layouts(ranks.world_size, V)["uneven"]
    rows = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
    got = vs.linear_logp(hidden, weight[rows], target, bias[rows], tp_group=mesh, global_vocab_size=V)
    assert_same_bytes(got, vs.linear_logp(hidden, weight, target, bias))


def test_a_destroyed_group_is_not_kept_alive(ranks: Ranks) -> None:
    import gc
    import weakref

    group = dist.new_group()
    hidden, weight, bias, target = problem(ranks.device)
    bounds = layouts(ranks.world_size, V)["even"]
    rows = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
    vs.linear_logp(hidden, weight[rows], target, bias[rows], tp_group=group)
    alive = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert alive() is None


def test_shards_must_agree(ranks: Ranks) -> None:
    if ranks.world_size == 1:
        pytest.skip("one rank")
    group, rank, size = dist.group.WORLD, ranks.rank, ranks.world_size
    hidden, weight, _, target = problem(ranks.device)
    make = vs.VocabShard
    on_all_ranks(ranks, "leave a gap", lambda: make(32 * rank, 32 * rank + 16, 1000, 1000, group))
    on_all_ranks(ranks, "overlap", lambda: make(16 * rank, 16 * rank + 32, 1000, 1000, group))
    on_all_ranks(ranks, "shards end at", lambda: make(16 * rank, 16 * rank + 16, 1000, 1000, group))
    odd = 16 * size - 14 + rank
    on_all_ranks(ranks, "do not agree on real", lambda: make(16 * rank, 16 * rank + 16, odd, 16 * size, group))
    on_all_ranks(ranks, "0 <= start <= stop", lambda: make(16 * rank, 16 * rank + (16 if rank else -1), 60,
                                                           16 * size, group))  # fmt: skip
    on_all_ranks(ranks, "every rank holds the same weight", lambda: vs.linear_logp(
        hidden, weight, target, tp_group=dist.new_group()))  # fmt: skip
    on_all_ranks(ranks, "is a full weight given with a group", lambda: vs.linear_logp(
        hidden, weight, target, tp_group=dist.new_group(), global_vocab_size=V))  # fmt: skip
    zeros = torch.zeros(16, D, device=ranks.device)  # constant shards are not taken for a full weight
    vs.linear_logp(hidden, zeros, target % (16 * size), tp_group=dist.new_group())
    wide = [torch.ones(n, 5 + rank, device=ranks.device) for n in (3, 16)]
    three = torch.zeros(3, dtype=torch.int64, device=ranks.device)
    on_all_ranks(
        ranks,
        "do not agree on D",
        lambda: vs.linear_logp(*wide, three, validate=False, tp_group=dist.new_group()),
    )
    if rank:
        with pytest.raises(ValueError, match="but 24 came"):  # a group used for two vocabularies says so
            vs.linear_logp(hidden, torch.zeros(24, D, device=ranks.device), target, tp_group=_two(group, ranks),
                           validate=False)  # fmt: skip
    else:
        _two(group, ranks)


def _two(group, ranks: Ranks):
    """A group that has already been used for shards of 16 columns."""
    other = dist.new_group()
    zeros = torch.zeros(16, D, device=ranks.device)
    vs.linear_logp(torch.ones(2, D, device=ranks.device), zeros, torch.zeros(2, dtype=torch.int64, device=ranks.device),
                   tp_group=other)  # fmt: skip
    return other


def test_module_in_model_code(ranks: Ranks) -> None:
    hidden, weight, bias, target = problem(ranks.device)
    bounds = layouts(ranks.world_size, V)["even"]
    rows = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
    op = vs.VocabParallelLinearLogp(dist.new_group(), global_vocab_size=V, real_vocab_size=V)
    assert_same_bytes(op(hidden, weight[rows], target, bias[rows]), vs.linear_logp(hidden, weight, target, bias))


def test_empty_batches_and_ignored_batches(ranks: Ranks) -> None:
    hidden, weight, _, target = problem(ranks.device)
    bounds = layouts(ranks.world_size, V)["even"]
    w = weight[bounds[ranks.rank] : bounds[ranks.rank + 1]].clone().requires_grad_()
    group = dist.new_group()
    for n, t in ((0, target[:0]), (33, torch.full_like(target, -100))):
        h = hidden[:n].clone().requires_grad_()
        logp = vs.linear_logp(h, w, t, tp_group=group, global_vocab_size=V)
        logp.sum().backward()
        assert (logp == 0).all() and (w.grad == 0).all() and (h.grad == 0).all()
