"""What the tests' own machinery promises: a skip can be made to fail, and one rank's failure is everybody's."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vocabshard.launching import run

pytest_plugins = "pytester"

TESTS = Path(__file__).parent
PLAIN = ["-q", "-p", "no:cacheprovider"]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def one_process(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest, without a GPU, on a test file's text; its exit code and output. In this process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    shutil.copy(TESTS / "conftest.py", pytester.path)

    def run_it(body: str, *options: str) -> tuple[int, str]:
        pytester.makepyfile(test_it=body)
        done = pytester.runpytest_inprocess(*PLAIN, "-rs", *options)
        return int(done.ret), f"{done.stdout}\n{done.stderr}"

    return run_it


@pytest.fixture
def on_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The same on ranks, which wait at most 5 s for one another."""
    (tmp_path / "ranks").mkdir()
    (tmp_path / "pytest.ini").touch()  # its folder's conftest.py counts too
    shutil.copy(TESTS / "conftest.py", tmp_path)
    shutil.copy(TESTS / "multigpu" / "conftest.py", tmp_path / "ranks")
    monkeypatch.chdir(tmp_path / "ranks")
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("MULTIGPU_TIMEOUT", "5")):
        monkeypatch.setenv(name, value)
    # what ranks need not load
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def run_it(count: int, body: str) -> tuple[int, str]:
        (tmp_path / "ranks" / "test_it.py").write_text(body)
        code = run(count, ["pytest", *PLAIN, str(tmp_path / "ranks")], module=True)
        return code, "".join(capfd.readouterr())

    return run_it


NEEDS = """
import pytest

@pytest.mark.needs({what!r})
def test_that_needs_it():
    pass
"""


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--require", "triton"), 0), (("--require=triton,sm90",), 1)])
def test_a_required_skip_fails(one_process: Run, options: tuple[str, ...], code: int) -> None:
    got, output = one_process(NEEDS.format(what="sm90"), *options)
    assert got == code, output
    assert ("--require sm90: no CUDA device" if code else "needs sm90: no CUDA device") in output


def test_unknown_hardware_is_an_error(one_process: Run) -> None:
    assert "got 'sm91'" in one_process(NEEDS.format(what="sm91"))[1]
    code, output = one_process(NEEDS.format(what="sm90"), "--require", "sm91")
    assert code != 0 and "--require takes sm90, triton, multigpu; got sm91" in output


RANKS = """
import torch
import torch.distributed as dist

def test_before(ranks):
    dist.barrier()

def test_one_fails(ranks):
    assert not ({where} == "first" and ranks.rank == 1), "deliberate"
    dist.all_reduce(torch.ones(3))
    assert not ({where} == "last" and ranks.rank == 1), "deliberate"

def test_after(ranks):
    dist.barrier()
"""


def test_a_failure_on_one_rank_fails_the_run(on_ranks: Run) -> None:
    """Before a collective, in which the other ranks then wait in vain: no test can follow."""
    code, output = on_ranks(3, RANKS.format(where="'first'"))
    assert code != 0, output
    assert "[rank 1] E   AssertionError: deliberate" in output
    assert "1 failed, 1 passed" in output and "the ranks disagree about" in output and "out of step" in output
    assert output.count(" passed in ") == 1, "one rank alone prints the report"


def test_a_failure_on_one_rank_in_step_is_one_failed_test(on_ranks: Run) -> None:
    """After the last collective: all ranks go on with the next test."""
    code, output = on_ranks(2, RANKS.format(where="'last'"))
    assert code != 0, output
    assert "[rank 1] E   AssertionError: deliberate" in output
    assert "1 failed, 2 passed" in output and "the ranks disagree" in output and "out of step" not in output


def test_an_import_that_fails_on_one_rank_fails_the_run(on_ranks: Run) -> None:
    body = "import os\nassert os.environ['RANK'] != '1', 'deliberate'\ndef test_it(): pass\n"
    code, output = on_ranks(2, body)
    assert code != 0 and "[rank 1] E   AssertionError: deliberate" in output, output


def test_ranks_that_agree_pass(on_ranks: Run) -> None:
    code, output = on_ranks(2, RANKS.format(where="'nowhere'"))
    assert code == 0 and "3 passed" in output and "[rank" not in output, output
