"""linear_logp over a tensor-parallel group: time a rank, what the group costs, scaling from one rank to W.

    torchrun --nproc-per-node 4 benchmarks/multigpu.py --json out/tp4.json
    torchrun --nproc-per-node 2 benchmarks/multigpu.py --heads 4096,128256 --rows 4096,8192 --peers materialised,verl

A head is D,V; its vocabulary is padded as Megatron pads, to a multiple of 128 W. bf16. Within a round the order is
shuffled, the same on every rank; times are medians over rounds, of the slowest rank. All ranks work at a time, also on
what needs no group: one rank alone (`one rank`: the whole weight on each) is what scaling is held against.

* gather + fold: alone, as a share of the forward that ends with them.
* dH not hidden: forward + backward, minus the same without the sum of grad_hidden, as a share of the backward.
* efficiency: time of one rank / (W x time over the group).
* materialised: cross entropy over logits that exist, vocabulary-parallel: products of the library, three all-reduces a
  row in the forward, fp32 softmax in place, grad_hidden summed in bf16.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from linear_logp import BOTH, DTYPES, FORWARD, GPU, environment
from torch import Tensor
from torch.nn import functional as F

import vocabshard as vs
from vocabshard import passes
from vocabshard.dist.fold import fold
from vocabshard.dist.gather import Pending, gather_tensors
from vocabshard.dist.grad import HiddenSum
from vocabshard.launching import Ranks, init_from_env
from vocabshard.partials import identity_records
from vocabshard.testing.timing import medians, milliseconds

HEADS = "4096,151936;4096,128256;8192,128256"
ROWS = "4096,8192,32768"
PEERS = ("materialised", "verl")


class Materialised(torch.autograd.Function):
    """logp of target [N] from hidden [N, D] and weight [V_local, D], the ids from rank * V_local on."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        first = dist.get_rank() * len(weight)
        logits = F.linear(hidden, weight).float()
        top = logits.amax(1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        logits -= top[:, None]
        here = (target >= first) & (target < first + len(weight))
        index = torch.where(here, target - first, 0)[:, None]
        chosen = torch.where(here, logits.gather(1, index)[:, 0], 0.0)
        dist.all_reduce(chosen)
        total = logits.exp_().sum(1)
        dist.all_reduce(total)
        softmax = logits.div_(total[:, None])
        ctx.save_for_backward(hidden, weight, softmax, here, index)
        return chosen - total.log()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, softmax, here, index = ctx.saved_tensors
        gradient = softmax.mul_(-upstream[:, None])
        gradient.scatter_add_(1, index, torch.where(here, upstream, 0.0)[:, None])
        gradient = gradient.to(hidden.dtype)
        grad_hidden = gradient @ weight
        work = dist.all_reduce(grad_hidden, async_op=True)
        grad_weight = gradient.t() @ hidden
        work.wait()
        return grad_hidden, grad_weight, None


def peer(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """ImportError where its package is missing."""
    if name == "materialised":
        return Materialised.apply
    if name == "verl":
        verl = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
        return lambda h, w, t: verl(h, w, t, 1.0, "none", dist.group.WORLD)[0]
    raise SystemExit(f"--peers takes {', '.join(PEERS)}; got {name!r}")


class NoSum(HiddenSum):
    """Leaves each rank its own share."""

    def start(self, grad_hidden: Tensor) -> None:
        share = self._own_rows and self._parts == 1  # of several parts one is this rank's as it is
        rows = grad_hidden.shape[0] // self._size if share else grad_hidden.shape[0]
        self._pending.append(Pending(grad_hidden[:rows]))


@contextmanager
def without_sum() -> Any:
    passes.HiddenSum = NoSum
    try:
        yield
    finally:
        passes.HiddenSum = HiddenSum


class Head:
    """The operands of one head and number of rows on this rank; the same hidden and targets on every rank."""

    def __init__(self, ranks: Ranks, rows: int, depth: int, vocab: int, dtype: torch.dtype, backend: str) -> None:
        g = torch.Generator(ranks.device).manual_seed(0)
        self.shard = vs.VocabShard.split(vocab, dist.group.WORLD, pad_to_multiple_of=128 * ranks.world_size)
        self.whole = torch.empty(self.shard.padded_vocab_size, depth, device=ranks.device, dtype=dtype)
        for part in self.whole.split(16384):
            part.copy_(torch.randn(part.shape, device=ranks.device, generator=g) * depth**-0.5)
        self.weight = self.whole[self.shard.start : self.shard.stop]
        self.hidden = torch.randn(rows, depth, device=ranks.device, generator=g).to(dtype)
        self.own_rows = self.hidden.chunk(ranks.world_size)[ranks.rank]
        self.target = torch.randint(0, vocab, (rows,), device=ranks.device, generator=g)
        self.upstream = torch.randn(rows, device=ranks.device, generator=g)
        self.vocab, self.backend = vocab, backend

    def over_group(self, hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
        return vs.linear_logp(hidden, weight, target, shard=self.shard, validate=False, backend=self.backend, **options)

    def alone(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return vs.linear_logp(hidden, weight, target, real_vocab_size=self.vocab, validate=False, backend=self.backend)

    def gather_and_fold(self) -> None:
        records = identity_records(len(self.hidden), False, self.hidden.device)
        gathered = gather_tensors(records, dist.group.WORLD)
        fold(self.resolved, gathered, self.target, -100, self.vocab, "nan")

    @property
    def resolved(self) -> str:
        if self.backend != "auto":
            return self.backend
        return vs.provenance(self.hidden[:1], self.whole[:128], self.target[:1] % 128, validate=False).backend


def forward(logp: Callable[..., Tensor], *operands: Tensor) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return logp(*operands)

    return call


def both(
    logp: Callable[..., Tensor], hidden: Tensor, weight: Tensor, target: Tensor, upstream: Tensor
) -> Callable[[], Any]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()

    def call() -> Any:
        out = logp(hidden, weight, target)
        return torch.autograd.grad(out, (hidden, weight), upstream.to(out.dtype))

    return call


def calls_of(head: Head, peers: dict[str, Callable[..., Tensor]]) -> dict[str, Callable[[], Any]]:
    operands = (head.hidden, head.weight, head.target)
    parallel = (head.own_rows, head.weight, head.target)

    def with_(**options: Any) -> Callable[..., Tensor]:
        return lambda *x: head.over_group(*x, **options)

    ordered = with_(grad_options=vs.GradOptions(reduce="ordered"))
    sequence = with_(sequence_parallel=True)
    silent = both(head.over_group, *operands, head.upstream)

    def no_sum() -> None:
        with without_sum():
            silent()

    calls = {
        f"group {FORWARD}": forward(head.over_group, *operands),
        "gather + fold": head.gather_and_fold,
        f"group {BOTH}": both(head.over_group, *operands, head.upstream),
        f"no sum {BOTH}": no_sum,
        f"sequence parallel {FORWARD}": forward(sequence, *parallel),
        f"sequence parallel {BOTH}": both(sequence, *parallel, head.upstream),
        f"ordered {BOTH}": both(ordered, *operands, head.upstream),
        f"one rank {FORWARD}": forward(head.alone, head.hidden, head.whole, head.target),
        f"one rank {BOTH}": both(head.alone, head.hidden, head.whole, head.target, head.upstream),
    }
    for name, logp in peers.items():
        calls[f"{name} {FORWARD}"] = forward(logp, *operands)
        calls[f"{name} {BOTH}"] = both(logp, *operands, head.upstream)
    return calls


def measure(calls: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, Any]:
    """Medians in ms of the slowest rank, and the shares that follow from them."""
    report: dict[str, Any] = {}
    for name, call in list(calls.items()):
        try:
            call()
            call()
        except (NotImplementedError, torch.OutOfMemoryError) as error:  # of sizes and options: on every rank alike
            report[f"{name} failed"] = f"{type(error).__name__}: {str(error)[:150]}"
            del calls[name]
    random.seed(0)
    slowest = torch.tensor(list(medians(milliseconds(calls, rounds, gpu=GPU)).values()), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    report |= dict(zip(calls, slowest.tolist(), strict=True))
    size = dist.get_world_size()
    group, one = report[f"group {BOTH}"], report[f"one rank {BOTH}"]
    report["share of gather + fold"] = report["gather + fold"] / report[f"group {FORWARD}"]
    report["share of dH not hidden"] = (group - report[f"no sum {BOTH}"]) / (group - report[f"group {FORWARD}"])
    report["efficiency forward"] = report[f"one rank {FORWARD}"] / (size * report[f"group {FORWARD}"])
    report["efficiency"] = one / (size * group)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default=HEADS, help="D,V;D,V;...")
    parser.add_argument("--rows", default=ROWS, help="N,N,...")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--peers", default="materialised", help=f"from {','.join(PEERS)}")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=12, help="of small sizes; large ones get fewer, at least 3")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ranks = init_from_env()
    peers = {name: peer(name) for name in filter(None, args.peers.split(","))}
    report: dict[str, Any] = {
        "environment": {**environment([], args.dtype), "ranks": ranks.world_size, "collectives": ranks.backend},
        "configs": {},
    }
    for d, v in (map(int, head.split(",")) for head in args.heads.split(";")):
        for n in map(int, args.rows.split(",")):
            head = Head(ranks, n, d, v, DTYPES[args.dtype], args.backend)
            rounds = max(3, min(args.rounds, int(args.rounds * 1e12 / (n * head.weight.numel()))))
            entry = report["configs"][f"{n} x {d} x {v}"] = measure(calls_of(head, peers), rounds, ranks.device)
            if ranks.rank == 0:
                print(f"{n} x {d} x {v}, {ranks.world_size} ranks, {rounds} rounds", flush=True)
                for name, value in entry.items():
                    unit = "" if isinstance(value, str) else "%" if name.startswith("share") else "ms"
                    unit = "" if name.startswith("efficiency") else unit
                    text = value if isinstance(value, str) else f"{value * 100 if unit == '%' else value:.3f} {unit}"
                    print(f"  {name:36} {text}", flush=True)
                if args.json:  # after each, so that a run that is ended leaves what it has
                    args.json.parent.mkdir(parents=True, exist_ok=True)
                    args.json.write_text(json.dumps(report, indent=1) + "\n")
            del head
            if GPU:
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
