"""A text, tiny_lm and its scores, for the tests of `vocabshard score`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vocabshard import launching
from vocabshard.testing.scoring import score, token_lines

TINY = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny_lm"
PACKAGE = Path(launching.__file__).resolve().parent


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch, tmp_path):
    """Not a rank; and processes import the package that this one has, whatever the working directory holds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """About 330 tokens: more than one window."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((TINY / "text.txt").read_text()[:1100])
    return path


@pytest.fixture
def model(tmp_path):
    """A copy of tiny_lm to damage."""
    copy = tmp_path / "model"
    copy.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, copy)
    return copy


@pytest.fixture(scope="session")
def scored(text, tmp_path_factory):
    """The records of one process with the default options."""
    out = tmp_path_factory.mktemp("scored") / "scores.jsonl"
    assert score(TINY, text, out) == 0
    return out


@pytest.fixture(scope="session")
def scored_whole(tmp_path_factory):
    """The same of the whole held-out text."""
    out = tmp_path_factory.mktemp("whole") / "scores.jsonl"
    assert score(TINY, TINY / "text.txt", out) == 0
    assert len(token_lines(out)) >= 5000
    return out


@pytest.fixture
def out(tmp_path):
    directory = tmp_path / "out"
    directory.mkdir()
    (directory / "old.jsonl").write_text("old")
    return directory / "old.jsonl"
