"""Times linear_logp's CPU kernels against F.linear + log_softmax + gather, in one run.

    python benchmarks/cpu_linear_logp.py --rows 512 --hidden 1024 --vocab 32768 --threads 2

Every round runs all variants once, in shuffled order. Figures are medians over rounds, ratios the median of the ratios
within a round. FLOPs: forward 2 N D V; forward + backward 8 N D V here (logits are made twice), 6 N D V there.
Memory is the peak resident size during the first call beyond what was there before it and the outputs and gradients it
leaves (Linux). The library's fp16 backward takes minutes on CPUs, so fp16 is compared with the library's fp32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

import vocabshard
from vocabshard import _C
from vocabshard.testing.timing import medians, milliseconds, ratio
from vocabshard.testing.yardsticks import torch_logp

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Logp = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(hidden: Tensor, weight: Tensor, target_ids: Tensor) -> Tensor:
    return vocabshard.linear_logp(hidden, weight, target_ids, validate=False)


class Case:
    """One function on one set of inputs, forward alone or with backward."""

    def __init__(self, logp: Logp, hidden: Tensor, weight: Tensor, target_ids: Tensor, backward: bool) -> None:
        self.logp, self.target_ids, self.backward = logp, target_ids, backward
        self.hidden, self.weight = (x.detach().requires_grad_(backward) for x in (hidden, weight))
        self.upstream = torch.randn(len(target_ids))
        self.peak_bytes = 0

    def run(self) -> int:
        """Runs once; bytes left behind."""
        self.hidden.grad = self.weight.grad = None
        out = self.logp(self.hidden, self.weight, self.target_ids)
        left = out.nbytes
        if self.backward:
            out.backward(self.upstream)
            left += self.hidden.grad.nbytes + self.weight.grad.nbytes
        return left

    def measure_memory(self) -> None:
        """The first call, so that nothing is reused from the heap."""
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        before = status_bytes("VmRSS")
        left = self.run()
        self.peak_bytes = status_bytes("VmHWM") - before - left


def status_bytes(field: str) -> int:
    """A size in /proc/self/status, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    hidden = torch.randn(args.rows, args.hidden)
    weight = torch.randn(args.vocab, args.hidden) / args.hidden**0.5
    target_ids = torch.randint(0, args.vocab, (args.rows,))

    cases: dict[tuple[str, str, bool], Case] = {}
    for name in args.dtypes:
        inputs = (hidden.to(DTYPES[name]), weight.to(DTYPES[name]), target_ids)
        for backward in (False, True):
            cases[name, "ours", backward] = Case(ours, *inputs, backward)
            theirs = (hidden, weight, target_ids) if name == "fp16" else inputs
            cases[name, "library", backward] = Case(torch_logp, *theirs, backward)
    for case in cases.values():
        case.measure_memory()
        case.run()
    names = {key: " ".join(map(str, key)) for key in cases}
    times = milliseconds({names[key]: case.run for key, case in cases.items()}, args.rounds, gpu=False)
    median = medians(times)

    flops = 2.0 * args.rows * args.hidden * args.vocab
    info = _C.build_info()
    print(f"N {args.rows}, D {args.hidden}, V {args.vocab}, {args.threads} threads, {args.rounds} rounds")
    print(f"torch {torch.__version__}, vocabshard {info['build']}, {info['compiler']}, {info['cpu_chosen']}")
    for name in args.dtypes:
        for backward in (False, True):
            pair = (name, "ours", backward), (name, "library", backward)
            ms = [median[names[key]] for key in pair]
            peak = [cases[key].peak_bytes / 2**20 for key in pair]
            print(
                f"{name} {'forward + backward' if backward else 'forward':18}  "
                f"ours {ms[0]:7.1f} ms ({(4 if backward else 1) * flops / ms[0] / 1e6:5.0f} GFLOP/s)  "
                f"library {ms[1]:7.1f} ms  ratio {ratio(times, *(names[key] for key in pair)):.2f}  "
                f"memory ours {peak[0]:6.1f} MiB, library {peak[1]:6.1f} MiB"
            )


if __name__ == "__main__":
    main()
