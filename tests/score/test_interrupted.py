"""`vocabshard score` that is stopped: what was scored is kept, and the same command goes on from there."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from vocabshard import launching
from vocabshard.command import main
from vocabshard.command import score as score_module
from vocabshard.command.records import is_token, read_scores
from vocabshard.testing.scoring import assert_refused, score, token_lines

TINY = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny_lm"


def after_bytes(monkeypatch, room, fail):
    """Lets os.write put `room` bytes into files, the last of them a part of what was asked, and then calls `fail`."""
    left, write = [room], os.write

    def limited(descriptor, content):
        if left[0] <= 0:
            fail()
        left[0] -= (count := write(descriptor, content[: left[0]]))
        return count

    monkeypatch.setattr(os, "write", limited)


def no_space():
    raise OSError(28, "No space left on device")


def count_rows(monkeypatch):
    """The list of how many rows each call of the operator has."""
    calls, real = [], score_module.linear_logp

    def counting(rows, *arguments, **options):
        calls.append(len(rows))
        return real(rows, *arguments, **options)

    monkeypatch.setattr(score_module, "linear_logp", counting)
    return calls


@pytest.mark.parametrize("batch_windows", ["1", "2"])
def test_disk_full_and_going_on(text, out, capsys, monkeypatch, batch_windows):
    """What was scored is kept as whole records, and not scored again; the end is as if nothing had happened."""
    options = ["--batch-rows", "20", "--batch-windows", batch_windows]
    assert score(TINY, text, out.parent / "whole", *options) == 0
    with monkeypatch.context() as full:
        after_bytes(full, 60_000, no_space)
        assert score(TINY, text, out, *options) == 2
    partial = out.with_name("old.jsonl.partial")
    printed, err = capsys.readouterr()
    lines = partial.read_bytes().split(b"\n")
    assert lines.pop() == b""
    records = [json.loads(line) for line in lines]
    kept = len(records) - 1
    assert 100 < kept < 300 and kept % 20 == 0
    assert all(is_token(record, index) for index, record in enumerate(records[1:]))
    assert printed == "" and err.count("\n") == 1
    assert f"cannot be written: No space left on device; {kept} tokens are kept in {partial}, and the same" in err
    assert out.read_text() == "old"

    with partial.open("ab") as file:
        file.write(lines[-1][:50])  # as if a machine had died
    calls = count_rows(monkeypatch)
    assert score(TINY, text, out, *options) == 0
    assert token_lines(out) == token_lines(out.parent / "whole")
    summary = read_scores(out).summary
    assert summary["resumed"] == kept == summary["tokens"] - sum(calls)
    whole = read_scores(out.parent / "whole").summary
    assert (summary["tokens"], summary["mean_logp"]) == (whole["tokens"], whole["mean_logp"])
    assert not partial.exists()


def test_disk_full_before_the_first_record(text, out, capsys, monkeypatch):
    after_bytes(monkeypatch, 100, no_space)
    assert_refused(capsys, score(TINY, text, out), out, "No space left on device; nothing is kept")


def test_disk_full_at_the_end(text, out, capsys, monkeypatch):
    """All is scored: what is left to do is to write the summary again."""
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda descriptor: no_space())
        assert score(TINY, text, out) == 2
    assert "tokens are kept" in capsys.readouterr().err
    assert out.read_text() == "old"
    calls = count_rows(monkeypatch)
    assert score(TINY, text, out) == 0
    assert calls == [] and read_scores(out).summary["resumed"] == len(token_lines(out))


def test_what_another_run_left(text, out, capsys, monkeypatch):
    with monkeypatch.context() as full:
        after_bytes(full, 60_000, no_space)
        assert score(TINY, text, out) == 2
    partial = out.with_name("old.jsonl.partial")
    left = partial.read_bytes()
    capsys.readouterr()
    assert score(TINY, text, out, "--dtype", "bf16") == 2
    assert "is what another run left, with other dtype, provenance; repeat that run" in capsys.readouterr().err
    assert partial.read_bytes() == left
    with partial.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert score(TINY, text, out) == 2
        assert "another run is writing" in capsys.readouterr().err
    partial.write_bytes(left[:300])  # not even the header is whole
    assert score(TINY, text, out) == 0
    assert read_scores(out).summary["resumed"] == 0


KILLED_RANK = """
import os, signal, sys
from vocabshard.command import main, score

if os.environ["RANK"] == "1":
    real, calls = score.linear_logp, []
    def last(*arguments, **options):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    score.linear_logp = last
raise SystemExit(main(sys.argv[1:]))
"""


def test_ranks_one_is_killed(scored, text, out, tmp_path, capfd, monkeypatch):
    """Nobody waits for it, what was finished is kept, and the same command goes on from there.

    More layouts in multigpu/test_score.py; here the command starts the ranks itself.
    """
    script = tmp_path / "killed.py"
    script.write_text(KILLED_RANK)
    started = time.monotonic()
    with monkeypatch.context() as killing:

        def start(tp, arguments):  # as by torchrun, which says how many there are
            assert arguments[-2:] == ["--tp", "2"]
            return launching.run(tp, [str(script), *arguments[:-2]])

        killing.setattr(score_module, "start_ranks", start)
        assert score(TINY, text, out, "--tp", "2") == 128 + 9
    err = capfd.readouterr().err
    assert "rank 1 of 2 failed with exit code 137; the others were ended" in err
    assert f"what was scored is kept in {out}.partial, and the same command goes on from there" in err
    assert "Traceback" not in err
    assert out.read_text() == "old"
    kept = [json.loads(line) for line in out.with_name("old.jsonl.partial").read_text().splitlines()[1:]]
    assert len(kept) == 3 * 64 and all(is_token(record, index) for index, record in enumerate(kept))
    assert time.monotonic() - started < 100
    assert score(TINY, text, out, "--tp", "2") == 0
    assert token_lines(out) == token_lines(scored)
    assert read_scores(out).summary["resumed"] == len(kept)
    header = read_scores(out).header
    assert header["tp"] == 2 == len(header["sizes"])
    assert header["model"] == read_scores(scored).header["model"]
    assert capfd.readouterr() == ("", "")
    assert main(["compare", str(scored), str(out)]) == 0
    assert capfd.readouterr().out.endswith("equal\n")


FAILING_RANK = """
import sys
from vocabshard.command import checkpoint, main
from vocabshard.command.errors import InputError
import os

if os.environ["RANK"] == "1":
    def fail(self, start, stop):
        raise InputError("the disk went away")
    checkpoint.Checkpoint.head_shard = fail
raise SystemExit(main(sys.argv[1:]))
"""


def test_ranks_one_fails(text, out, tmp_path, capfd):
    """Every rank ends, the message of the one that failed appears once, and nothing is written."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING_RANK)
    code = launching.run(2, [str(script), "score", str(TINY), str(text), "--out", str(out), "--quiet"])
    printed, err = capfd.readouterr()
    assert (code, printed) == (2, "")
    assert err.count("vocabshard: error: ") == 1
    assert "vocabshard: error: rank 1: the disk went away\n" in err
    assert "Traceback" not in err
    assert [path.name for path in out.parent.iterdir()] == ["old.jsonl"]
    assert out.read_text() == "old"
