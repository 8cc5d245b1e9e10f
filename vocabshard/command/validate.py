"""`vocabshard validate`: climbs the ladder on this machine and counts the rows that differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import vocabshard
from vocabshard import kernels
from vocabshard.command.errors import InputError, first_line, require
from vocabshard.command.files import writable, write_text
from vocabshard.contract import CONTRACT_ID
from vocabshard.ladder import Rung, levels, record
from vocabshard.ladder.rl import find_loop, rl_run
from vocabshard.ladder.speed import head_speed

LEVELS = ("L1", "L2", "L3", "L4", "L5")
EXIT_DIFFERS = 1


def validate(args: argparse.Namespace) -> int:
    """Prints a line a rung; 0 when no row differed on any, 1 otherwise. Raises InputError for bad input."""
    device = _device(args.device)
    for option, name in (("--out", args.out), ("--plot", args.plot)):
        if name is not None:
            writable(option, name)
    if args.plot:
        require("matplotlib", "plot")
    loop = Path(args.rl_loop) if args.rl_loop else find_loop()
    if args.rl_loop and not Path(args.rl_loop).is_file():
        raise InputError(f"--rl-loop {args.rl_loop}: no such file")
    result: dict[str, Any] = {
        "contract": CONTRACT_ID,
        "version": vocabshard.__version__,
        "build": kernels.build_id(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "rungs": [],
        "rl": None,
    }
    print(f"vocabshard {vocabshard.__version__}, contract {CONTRACT_ID}, on {result['device']}", flush=True)
    for rung in _climb(args.levels, device, loop, result):
        result["rungs"].append(rung.as_dict())
        print(_in_words(rung), flush=True)
    result["speed"] = head_speed(device, device.type == "cuda")
    result["holds"] = bool(result["rungs"]) and all(rung["holds"] for rung in result["rungs"])
    print(_speed_in_words(result["speed"]))
    print("0 rows differ" if result["holds"] else "NOT the same bytes")
    if args.out:
        write_text("--out", args.out, json.dumps(result, indent=1) + "\n")
    if args.plot:
        from vocabshard.command.plot import plot_ladder

        plot_ladder(result, Path(args.plot))
    return 0 if result["holds"] else EXIT_DIFFERS


def _device(name: str | None) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: there is no GPU that this torch can use")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _climb(chosen: list[str], device: torch.device, loop: Path | None, result: dict[str, Any]) -> Iterator[Rung]:
    gpu = device.type == "cuda"
    shape = {"rows": 64, "depth": 2048, "columns": 50257} if gpu else {}
    rungs: dict[str, list[Callable[[], Rung]]] = {
        "L1": [lambda: levels.repeat(device, **shape)],
        "L2": [lambda: levels.invariance(device, 33, 512, 8003) if gpu else levels.invariance(device)],
        "L3": [
            lambda layout=layout: levels.entries(  # type: ignore[misc]
                device, layout, layout.rows if gpu else 16, layout.hidden_size if gpu else 8
            )
            for layout in levels.MODELS
        ],
        "L4": [lambda: record.across_processes(device, (1, 2, 4), **shape)],
        "L5": [lambda: _rl(loop, gpu, result)] if loop is not None else [],
    }
    for level in LEVELS:
        if level not in chosen:
            continue
        if not rungs[level]:
            print(f"{level}  not climbed: examples/rl_loop/loop.py is not here, name it with --rl-loop", flush=True)
        for climb in rungs[level]:
            try:
                yield climb()
            except RuntimeError as error:
                raise InputError(f"{level}: {first_line(error)}") from error


def _rl(loop: Path | None, gpu: bool, result: dict[str, Any]) -> Rung:
    assert loop is not None
    small = [] if gpu else ["--rollout-tp", "1", "--groups", "2", "--samples", "4", "--response", "6"]
    rung, result["rl"] = rl_run(loop, "--steps", "30" if gpu else "50", *small)
    return rung


def _in_words(rung: Rung) -> str:
    text = f"{rung.level}  {rung.differing} of {rung.rows} rows differ: {rung.what} ({rung.seconds:.1f} s"
    if rung.ordinary_rows:
        text += f"; an ordinary log_softmax: {rung.ordinary_differing} of {rung.ordinary_rows}"
    text += ")"
    return f"{text}; first: {rung.first}" if rung.first else text


def _speed_in_words(speed: dict[str, Any]) -> str:
    decode = ", ".join(f"{rate:.0f} at batch {batch}" for batch, rate in speed["decode_tokens_per_s"].items())
    return (
        f"head D {speed['D']}, V {speed['V']}, {speed['dtype']}: decode tokens/s {decode}; scoring "
        f"{speed['score_rows']} rows {speed['score_seconds'] * 1e3:.2f} ms"
    )
