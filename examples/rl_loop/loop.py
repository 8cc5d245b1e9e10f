"""A small RL run: a rollout samples from the sharded head at one tensor-parallel degree, a trainer learns at another.

    python examples/rl_loop/loop.py [--steps 60] [--trainer-tp 4] [--rollout-tp 2] [--out run.json]

Ranks 0 ... trainer_tp - 1 train, the others roll out; each side shards the head in its own way. In every step the
rollout draws responses from its sharded head with temperature and top-p, and records each token, its log-prob under
what was kept, and the cut. The trainer recomputes the log-prob from hidden states, tokens and cuts, at its own degree
and in another batch; before the update K3 = rho - 1 - log rho of every token has to be exactly 0. A GRPO update
follows, and weights go to the rollout. Beside it runs an ordinary scorer (F.linear and log_softmax, no top-p) of the
same hidden states, whose K3 is not 0. The reward of a response is the share of its tokens with the letter e.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import Body
from torch import Tensor
from torch.nn import functional as F

from vocabshard import (
    LogprobContract,
    SamplingProgram,
    VocabShard,
    launching,
    linear_logp,
    vocab_parallel_sample,
    weight_fingerprint,
)

HERE = Path(__file__).parent
PROMPT = 4
MARGIN = 0.1  # by which the mean reward of the last ten steps has to exceed that of the first ten


@dataclass(frozen=True)
class Options:
    """What a run depends on, beside the checkpoint."""

    steps: int
    trainer_tp: int
    rollout_tp: int
    groups: int  # prompts a step
    samples: int  # responses to a prompt
    response: int  # tokens
    temperature: float
    top_p: float
    learning_rate: float
    seed: int

    @property
    def rows(self) -> int:
        """Responses of a step."""
        return self.groups * self.samples

    @property
    def program(self) -> SamplingProgram:
        """What tokens are drawn, and scored, under."""
        return SamplingProgram.of(temperature=self.temperature, top_p=self.top_p)


@dataclass
class Side:
    """This rank's part: the whole body and a shard of the head."""

    options: Options
    body: Body
    head: torch.nn.Parameter  # fp32 [V_local, D]
    shard: VocabShard
    trains: bool
    good: Tensor  # bool [V]: tokens with the letter

    @property
    def contract(self) -> LogprobContract:
        """Built alike on both sides; each call is held to it."""
        return LogprobContract(
            role="trainer" if self.trains else "rollout",
            weight_dtype="bf16",
            real_vocab_size=self.shard.real_vocab_size,
            sampling=self.options.program.transforms,
        )

    def hidden(self, tokens: Tensor) -> Tensor:
        """bf16 [B, L, D], by the one path of both sides."""
        return self.body.hidden_states(tokens).bfloat16()


def token_texts(checkpoint: Path) -> list[str]:
    """The tokenizer's entries, by id."""
    vocabulary: dict[str, int] = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(vocabulary, key=vocabulary.__getitem__)


@torch.no_grad()
def rollout(side: Side, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [B, PROMPT + R], cuts [B, R], and log-probs of the responses [2, B, R]: ours and the ordinary scorer's."""
    options, device = side.options, side.head.device
    g = torch.Generator().manual_seed((options.seed << 32) + step)
    prompts = torch.randint(1, side.shard.real_vocab_size, (options.groups, PROMPT), generator=g)
    prompts[:, 0] = 0  # BOS
    tokens = torch.zeros(options.rows, PROMPT + options.response, dtype=torch.int64)
    tokens[:, :PROMPT] = prompts.repeat_interleave(options.samples, 0)
    tokens = tokens.to(device)
    weight = side.head.bfloat16()
    rows = torch.arange(options.rows, device=device) + step * options.rows
    cuts, ours, ordinary = [], [], []
    for position in range(PROMPT, tokens.shape[1]):
        last = side.hidden(tokens)[:, position - 1]
        drawn = vocab_parallel_sample(
            last, weight, program=options.program, seed=options.seed, row_keys=(rows << 16) + position,
            shard=side.shard, contract=side.contract,
        )  # fmt: skip
        tokens[:, position] = drawn.token
        cuts.append(drawn.cut)
        ours.append(drawn.logp)
        ordinary.append(ordinary_logp(side, last, weight, tokens[:, position]))
    return tokens, torch.stack(cuts, 1), torch.stack([torch.stack(ours, 1), torch.stack(ordinary, 1)])


def ordinary_logp(side: Side, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What a vocabulary-parallel trainer or engine ordinarily does: a library product, then log_softmax over ranks."""
    logits = F.linear(hidden, weight).float() / side.options.temperature
    logits = logits[:, : side.shard.valid]
    group = side.shard.group
    maximum = logits.amax(1)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    total = (logits - maximum[:, None]).exp().sum(1)
    local = targets - side.shard.start
    here = (local >= 0) & (local < side.shard.valid)
    found = torch.where(here, logits.gather(1, torch.where(here, local, 0)[:, None])[:, 0], 0.0)
    both = torch.stack([total, found])
    dist.all_reduce(both, group=group)
    return both[1] - maximum - both[0].log()


def k3(new: Tensor, old: Tensor) -> Tensor:
    """rho - 1 - log rho of each token, fp64."""
    difference = new.double() - old.double()
    return difference.exp() - 1 - difference


def score(side: Side, tokens: Tensor, cuts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs [B, R] of the responses, differentiable; their hidden states and targets."""
    hidden = side.hidden(tokens)[:, PROMPT - 1 : -1]
    targets = tokens[:, PROMPT:]
    logp = linear_logp(
        hidden, side.head.bfloat16(), targets, shard=side.shard, sampling=side.options.program, cut=cuts,
        contract=side.contract,
    )  # fmt: skip
    assert isinstance(logp, Tensor)
    return logp, hidden, targets


class Adam:
    """Adam without its options: torch's imports all of torch.compile, for seconds in each of the ranks."""

    def __init__(self, parameters: list[torch.nn.Parameter], learning_rate: float) -> None:
        self.parameters, self.learning_rate, self.steps = parameters, learning_rate, 0
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Updates the parameters from their gradients, and drops those."""
        self.steps += 1
        for parameter, (mean, square) in zip(self.parameters, self.moments, strict=True):
            if parameter.grad is None:
                continue
            mean.lerp_(parameter.grad, 0.1)
            square.lerp_(parameter.grad.square(), 0.001)
            scale = (square / (1 - 0.999**self.steps)).sqrt_().add_(1e-8)
            parameter.addcdiv_(mean, scale, value=-self.learning_rate / (1 - 0.9**self.steps))
            parameter.grad = None


def update(side: Side, logp: Tensor, old: Tensor, rewards: Tensor, optimizer: Adam) -> None:
    """GRPO: advantages within a prompt's samples, the clipped ratio of PPO."""
    grouped = rewards.view(side.options.groups, side.options.samples)
    advantage = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)
    advantage = advantage.view(-1, 1)
    ratio = (logp - old).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def send_weights(side: Side, bounds: list[tuple[int, int]]) -> None:
    """From the trainer's ranks to the rollout's, which cut the head elsewhere. Collective over the world."""
    flat = torch.cat([p.reshape(-1) for p in side.body.parameters()])
    dist.broadcast(flat, 0)
    pieces = flat.split([p.numel() for p in side.body.parameters()])
    for parameter, piece in zip(side.body.parameters(), pieces, strict=True):
        parameter.copy_(piece.view_as(parameter))
    width = side.head.shape[1]
    rows = []
    for rank, (start, stop) in enumerate(bounds):
        own = side.trains and side.shard.start == start and side.shard.stop == stop
        piece = side.head.detach().clone() if own else side.head.new_empty(stop - start, width)
        dist.broadcast(piece, rank)
        rows.append(piece)
    if not side.trains:
        side.head.copy_(torch.cat(rows)[side.shard.start : side.shard.stop])


def train_step(side: Side, step: int, bounds: list[tuple[int, int]], optimizer: Adam | None) -> dict[str, Any] | None:
    """One step of this rank; the first trainer's rank returns what is recorded. Collective over the world."""
    options, device, first_rollout = side.options, side.head.device, side.options.trainer_tp
    send_weights(side, bounds)
    version = weight_fingerprint(side.head, side.shard)
    versions: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(versions, version)
    assert len(set(versions)) == 1, f"the sides hold different versions of the head: {versions}"
    started = time.perf_counter()
    shape = (options.rows, options.response)
    tokens = torch.zeros(options.rows, PROMPT + options.response, dtype=torch.int64, device=device)
    cuts = torch.zeros(shape, dtype=torch.int64, device=device)
    scores = torch.zeros(2, *shape, device=device)
    if not side.trains:
        tokens, cuts, scores = rollout(side, step)
    dist.broadcast(tokens, first_rollout)
    dist.broadcast(cuts, first_rollout)
    dist.broadcast(scores, first_rollout)
    rollout_seconds = time.perf_counter() - started
    if optimizer is None:
        return None
    started = time.perf_counter()
    logp, hidden, targets = score(side, tokens, cuts)
    ours, ordinary = scores
    with torch.no_grad():
        wrong = int((logp.view(torch.int32) != ours.view(torch.int32)).sum())
        largest = float(k3(logp, ours).abs().max())
        again = ordinary_logp(side, hidden.flatten(0, 1), side.head.bfloat16(), targets.flatten()).view(shape)
        rewards = side.good[targets].float().mean(1)
    score_seconds = time.perf_counter() - started
    update(side, logp, ours, rewards, optimizer)
    if side.shard.rank:
        return None
    return {
        "step": step,
        "reward": float(rewards.mean()),
        "differing": wrong,
        "k3_max": largest,
        "ordinary_differing": int((again.view(torch.int32) != ordinary.view(torch.int32)).sum()),
        "ordinary_k3_mean": float(k3(again, ordinary).mean()),
        "ordinary_k3_max": float(k3(again, ordinary).max()),
        "weight": version,
        "rollout_tokens_per_s": options.rows * options.response / rollout_seconds,
        "score_seconds": score_seconds,
        "update_seconds": time.perf_counter() - started - score_seconds,
    }


def _in_words(step: dict[str, Any]) -> str:
    return (
        f"step {step['step']:3d}  reward {step['reward']:.3f}  K3 {step['k3_max']:g}, {step['differing']} tokens differ"
        f"  (ordinary K3 {step['ordinary_k3_mean']:.2e}, {step['ordinary_differing']} differ)"
    )


def summarise(options: Options, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The run in a few numbers."""
    first, last = (sum(s["reward"] for s in part) / len(part) for part in (steps[:10], steps[-10:]))
    tokens = len(steps) * options.rows * options.response
    return {
        "steps": len(steps),
        "tokens": tokens,
        "trainer_tp": options.trainer_tp,
        "rollout_tp": options.rollout_tp,
        "differing_tokens": sum(s["differing"] for s in steps),
        "k3_max": max(s["k3_max"] for s in steps),
        "ordinary_differing_tokens": sum(s["ordinary_differing"] for s in steps),
        "ordinary_k3_mean": sum(s["ordinary_k3_mean"] for s in steps) / len(steps),
        "ordinary_k3_max": max(s["ordinary_k3_max"] for s in steps),
        "reward_first_10": first,
        "reward_last_10": last,
        "margin": MARGIN,
        "versions": len({s["weight"] for s in steps}),
        "rollout_tokens_per_s": sum(s["rollout_tokens_per_s"] for s in steps) / len(steps),
        "score_seconds": sum(s["score_seconds"] for s in steps) / len(steps),
    }


def run_rank(options: Options, checkpoint: Path, out: Path | None, quiet: bool) -> None:
    """All steps of one rank; the first one prints and writes."""
    ranks = launching.init_from_env()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    sides = [list(range(options.trainer_tp)), list(range(options.trainer_tp, ranks.world_size))]
    groups = [dist.new_group(side) for side in sides]
    trains = ranks.rank < options.trainer_tp
    body = Body(checkpoint).to(ranks.device)
    texts = token_texts(checkpoint)
    real = body.config.get("real_vocab_size", body.config["vocab_size"])
    # each side pads to its own degree, as trainers and engines do
    shard = VocabShard.split(real, groups[0 if trains else 1], pad_to_multiple_of=128)
    padded = torch.zeros(shard.padded_vocab_size, body.head.shape[1])
    padded[:real] = body.head[:real]
    head = torch.nn.Parameter(padded[shard.start : shard.stop].to(ranks.device))
    good = torch.zeros(shard.padded_vocab_size, dtype=torch.bool)
    good[: len(texts)] = torch.tensor(["e" in text for text in texts])
    side = Side(options, body, head, shard, trains, good.to(ranks.device))
    everyone: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everyone, (shard.start, shard.stop))
    bounds = everyone[: options.trainer_tp]
    optimizer = Adam([*body.parameters(), head], options.learning_rate) if trains else None
    steps = []
    for step in range(options.steps):
        found = train_step(side, step, bounds, optimizer)
        if found is not None:
            steps.append(found)
            if not quiet:
                print(_in_words(found), flush=True)
    if ranks.rank == 0:
        summary = summarise(options, steps)
        if not quiet:
            print(json.dumps(summary, indent=1))
        if out is not None:
            out.write_text(json.dumps({"summary": summary, "steps": steps}) + "\n")
    del side, shard, groups
    dist.destroy_process_group()


def main() -> int:
    """Starts the ranks; in one of them, runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--trainer-tp", type=int, default=4)
    parser.add_argument("--rollout-tp", type=int, default=2)
    parser.add_argument("--groups", type=int, default=4, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--response", type=int, default=12, help="tokens of a response")
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=HERE.parent / "tiny_lm")
    parser.add_argument("--out", type=Path, help="where the record of the run goes, JSON")
    parser.add_argument("--quiet", action="store_true")
    args = vars(parser.parse_args())
    checkpoint, out, quiet = args.pop("checkpoint"), args.pop("out"), args.pop("quiet")
    options = Options(**args)
    if "RANK" not in os.environ:
        return launching.run(options.trainer_tp + options.rollout_tp, [__file__, *sys.argv[1:]])
    run_rank(options, checkpoint, out, quiet)
    return 0


if __name__ == "__main__":
    sys.exit(main())
