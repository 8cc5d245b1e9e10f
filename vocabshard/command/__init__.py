"""The `vocabshard` command: one subcommand a module, imported only when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from vocabshard.command.errors import EXIT_BAD_INPUT, InputError


class _Parser(argparse.ArgumentParser):
    """Reports a bad argument as every other bad input: one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")


def _shard_sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers separated by commas, got {text!r}") from None


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; nothing heavy is imported for it."""
    parser = _Parser(prog="vocabshard", description="Log-probabilities of a language model's sharded head.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    score = commands.add_parser(
        "score",
        help="score every token of a text, or of completions, with a checkpoint's head",
        description="Score every token of FILE with the head of CHECKPOINT, sharded over N ranks. What an interrupted "
        "run has scored is kept in FILE.jsonl.partial, and the same command goes on from there.",
    )
    score.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="directory with config.json, safetensors and a tokenizer"
    )
    score.add_argument(
        "text", metavar="FILE", help="UTF-8 text, or prompts and completions in JSON Lines (*.jsonl, *.ndjson)"
    )
    score.add_argument("--out", metavar="FILE.jsonl", required=True, help="where the records go")
    score.add_argument("--plot", metavar="FILE.png", help="a picture of the log-probs, token by token and how many")
    score.add_argument(
        "--score",
        choices=("all", "completion"),
        help="which tokens of JSON Lines (default: completion; of a text all)",
    )
    score.add_argument("--tp", type=int, metavar="N", help="ranks to shard the head over (default: 1, or torchrun's)")
    score.add_argument(
        "--sizes",
        type=_shard_sizes,
        metavar="A,B,...",
        help="rows of the head on each rank; their sum is the head's rows, padded or real",
    )
    score.add_argument(
        "--batch-rows", type=int, default=64, metavar="R", help="tokens a call of the head scores (default: 64)"
    )
    score.add_argument(
        "--batch-windows",
        type=int,
        default=1,
        metavar="B",
        help="windows that the model sees in one call; its bits may depend on it (default: 1)",
    )
    score.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="what hidden states and head are cast to for the head (default: fp32)",
    )
    score.add_argument(
        "--real-vocab-size",
        type=int,
        metavar="V",
        help="rows of the head that are no padding (default: the config's, else all)",
    )
    score.add_argument("--window", type=int, metavar="C", help="tokens the model sees at once (default: the config's)")
    score.add_argument(
        "--stride", type=int, metavar="S", help="tokens from one window to the next (default: half a window)"
    )
    score.add_argument(
        "--threads",
        type=int,
        default=1,
        metavar="T",
        help="threads for the hidden states, whose bits may depend on it (default: 1)",
    )
    score.add_argument("--quiet", action="store_true", help="no progress bar and no summary")

    compare = commands.add_parser(
        "compare",
        help="compare two files of scores byte by byte",
        description="Compare two files that `vocabshard score` wrote. "
        "Exit code 0: same bytes; 1: they differ; 2: they cannot be compared.",
    )
    compare.add_argument("first", metavar="A")
    compare.add_argument("second", metavar="B")
    compare.add_argument("--plot", metavar="FILE.png", help="a picture of the ratios of probabilities")
    compare.add_argument("--json", action="store_true", help="print the result as one JSON object")

    doctor = commands.add_parser(
        "doctor",
        help="what is built, which backend serves what, and whether this machine gives the contract's bytes",
        description="Exit code 0: the contract holds on this machine; 1: it does not.",
    )
    doctor.add_argument("--all", action="store_true", help="check every golden of every backend, in a minute or more")

    validate = commands.add_parser(
        "validate",
        help="climb the ladder on this machine: repeat, batch and sharding, entries and backends, processes, an RL run",
        description="Counts rows whose bytes differ. Exit code 0: none did; 1: some did.",
    )
    validate.add_argument(
        "--levels", type=_levels, default=["L1", "L2", "L3", "L4", "L5"], metavar="L1,...", help="default: all five"
    )
    validate.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, where there is one")
    validate.add_argument("--rl-loop", metavar="LOOP.py", help="the script of L5 (default: examples/rl_loop/loop.py)")
    validate.add_argument("--out", metavar="FILE.json", help="where the result goes")
    validate.add_argument("--plot", metavar="FILE.png", help="a picture of it")

    bench = commands.add_parser(
        "bench",
        help="time the operators on this machine, beside the plain matrix products and torch's own log-probs",
        description="Medians over shuffled, interleaved rounds; ratios are medians of the ratios within a round.",
    )
    bench.add_argument(
        "--shapes", type=_shapes, metavar="N,D,V;...", help="rows, hidden size, vocabulary (default: small on a CPU)"
    )
    bench.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="of hidden and weight (default: bf16 on a GPU, fp32 on a CPU)"
    )
    bench.add_argument("--backend", default="auto", metavar="NAME", help="of ours (default: auto)")
    bench.add_argument("--rounds", type=int, metavar="R", help="default: 20 on a GPU, 5 on a CPU")
    bench.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, where there is one")
    bench.add_argument("--out", metavar="FILE.json", help="where the result goes")
    return parser


def _shapes(text: str) -> list[tuple[int, int, int]]:
    try:
        shapes = [tuple(map(int, shape.split(","))) for shape in text.split(";")]
    except ValueError:
        shapes = []
    if not shapes or any(len(shape) != 3 or min(shape) < 1 or max(shape) >= 2**31 for shape in shapes):
        raise argparse.ArgumentTypeError(
            f"expected positive N,D,V below 2^31, several separated by semicolons, got {text!r}"
        )
    return [(n, d, v) for n, d, v in shapes]


def _levels(text: str) -> list[str]:
    chosen = text.split(",")
    if wrong := [level for level in chosen if level not in ("L1", "L2", "L3", "L4", "L5")]:
        raise argparse.ArgumentTypeError(f"expected some of L1 ... L5 separated by commas, got {wrong[0]!r}")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 (`compare`, `validate`: different, `doctor`: broken) or 2.

    2 is bad input, one line on stderr.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = build_parser().parse_args(arguments)
        if args.command == "score":
            from vocabshard.command.score import score

            return score(args, arguments)
        if args.command == "doctor":
            from vocabshard.command.doctor import doctor

            return doctor(args.all)
        if args.command == "validate":
            from vocabshard.command.validate import validate

            return validate(args)
        if args.command == "bench":
            from vocabshard.command.bench import bench

            return bench(args)
        from vocabshard.command.compare import compare

        return compare(args)
    except InputError as error:
        if not error.printed:
            print(f"vocabshard: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return 130
