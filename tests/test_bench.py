"""`vocabshard bench`, and the timing that it shares with benchmarks/."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from vocabshard.command import main
from vocabshard.testing import timing
from vocabshard.testing.yardsticks import FOUR, HeadInputs, products, torch_logp

SMALL = ["bench", "--device", "cpu", "--shapes", "5,16,100;1,7,33", "--rounds", "3"]


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    assert main([*SMALL, "--out", str(out)]) == 0
    told = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert [(s["N"], s["D"], s["V"]) for s in report["shapes"]] == [(5, 16, 100), (1, 7, 33)]
    assert report["rounds"] == 3 and report["dtype"] == "fp32" and report["device"] == "cpu"
    for shape in report["shapes"]:
        assert f"{shape['N']} x {shape['D']} x {shape['V']}" in told
        passes = [(p["op"], p["pass"]) for p in shape["passes"]]
        assert passes == [
            (op, what) for op in ("linear_logp", "batch_invariant_logp") for what in ("forward", "forward + backward")
        ]
        for entry in shape["passes"]:
            for key in ("ms", "yardstick_ms", "torch_ms", "of_yardstick", "of_torch"):
                assert entry[key] > 0 and math.isfinite(entry[key])
            assert f"{entry['of_yardstick']:.2f} of {entry['yardstick']}" in told


def test_another_dtype_and_backend(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert main([*SMALL, "--dtype", "bf16", "--backend", "torch", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["dtype"] == "bf16" and set(report["backends"].values()) == {"torch"}


@pytest.mark.parametrize(
    "options, message",
    [
        (["--shapes", "1,2"], "expected positive N,D,V"),
        (["--shapes", "1,0,3"], "expected positive N,D,V"),
        (["--shapes", f"1,1,{10**24}"], "N,D,V below 2^31"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--backend", "nothing"], "--backend nothing: backend must be one of"),
        (["--device", "cpu", "--backend", "sm90"], "--backend sm90: "),
        (["--out", "/nowhere/at/all.json"], "the directory /nowhere/at does not exist"),
        (["--out", "/proc/bench.json"], "--out /proc/bench.json: "),
        ([*SMALL[1:], "--out", "/proc/version"], "--out /proc/version: "),  # a file that root may open, not write
    ],
)
def test_bad_input_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    told = capsys.readouterr()
    assert told.out == "" and message in told.err and told.err.count("\n") == 1


@pytest.mark.parametrize("shape", [f"{10**8},{10**8},2", f"{2**31 - 1},{2**31 - 1},2"])
def test_what_does_not_fit_into_memory_is_one_line(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", "--shapes", shape]) == 2
    told = capsys.readouterr().err
    assert f"--shapes: {shape} does not fit into memory: " in told and told.count("\n") == 1


def test_rounds_are_interleaved_and_the_ratio_is_taken_within_one() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    times = timing.milliseconds(calls, 20, gpu=False, before=lambda: order.append("before"))
    rounds = [order[i : i + 6] for i in range(0, 120, 6)]
    assert all(r[::2] == ["before"] * 3 and sorted(r[1::2]) == list("abc") for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1, "the order never changed"
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys("abc", 20)
    drifting = {"ours": [2.0, 20.0, 200.0], "theirs": [1.0, 10.0, 100.0]}
    assert timing.ratio(drifting, "ours", "theirs") == 2.0
    assert timing.medians(drifting) == {"ours": 20.0, "theirs": 10.0}


def test_before_is_not_timed() -> None:
    times = timing.milliseconds({"a": lambda: None}, 3, gpu=False, before=lambda: time.sleep(0.02))
    assert max(times["a"]) < 20


def test_yardsticks_are_what_they_say() -> None:
    """The four products are those of a forward + backward, of the same operands."""
    x = HeadInputs.make(5, 8, 33, torch.float32, "cpu")
    seen: list[str] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.mm:
                seen.append("x".join(map(str, (*args[0].shape, args[1].shape[1]))))
            return function(*args, **(kwargs or {}))

    run = products(x)
    with Watch():
        run(FOUR)()
    assert seen == ["5x8x33", "5x8x33", "5x33x8", "33x5x8"]
    exact = F.log_softmax(x.hidden.double() @ x.weight.double().t(), -1)
    expected = exact[torch.arange(5), x.target].float()
    torch.testing.assert_close(torch_logp(x.hidden, x.weight, x.target), expected)
    assert x.upstream.bfloat16().float().equal(x.upstream)
