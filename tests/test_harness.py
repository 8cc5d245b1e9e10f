"""What the tests' own machinery promises: a skip can be made to fail, and one rank's failure is everybody's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LAUNCH = TESTS.parent / "launch" / "run.py"


def pytest_in(folder: Path, *options: str, launcher: tuple[str, ...] = (), **environment: str) -> tuple[int, str]:
    """Run pytest on `folder`, without a GPU; its exit code and output."""
    plain = ["-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]  # the second takes a second to load
    command = [sys.executable, *launcher, "-m", "pytest", *plain, *options, str(folder)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    pipe = subprocess.PIPE
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, timeout=90
    )
    return done.returncode, done.stdout


def one_process(folder: Path, body: str, *options: str) -> tuple[int, str]:
    (folder / "test_it.py").write_text(body)
    shutil.copy(TESTS / "conftest.py", folder)
    return pytest_in(folder, "-rs", *options)


def on_ranks(count: int, folder: Path, body: str) -> tuple[int, str]:
    """Ranks that wait at most 5 s for one another."""
    (folder / "ranks").mkdir()
    (folder / "ranks" / "test_it.py").write_text(body)
    (folder / "pytest.ini").touch()  # its folder's conftest.py counts too
    shutil.copy(TESTS / "conftest.py", folder)
    shutil.copy(TESTS / "multigpu" / "conftest.py", folder / "ranks")
    return pytest_in(folder / "ranks", launcher=(str(LAUNCH), "--nproc", str(count)), MULTIGPU_TIMEOUT="5")


NEEDS = """
import pytest

@pytest.mark.needs({what!r})
def test_that_needs_it():
    pass
"""


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--require", "triton"), 0), (("--require=triton,sm90",), 1)])
def test_a_required_skip_fails(tmp_path: Path, options: tuple[str, ...], code: int) -> None:
    got, output = one_process(tmp_path, NEEDS.format(what="sm90"), *options)
    assert got == code, output
    assert ("--require sm90: no CUDA device" if code else "needs sm90: no CUDA device") in output


def test_unknown_hardware_is_an_error(tmp_path: Path) -> None:
    assert "got 'sm91'" in one_process(tmp_path, NEEDS.format(what="sm91"))[1]
    code, output = one_process(tmp_path, NEEDS.format(what="sm90"), "--require", "sm91")
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


def test_a_failure_on_one_rank_fails_the_run(tmp_path: Path) -> None:
    """Before a collective, in which the other ranks then wait in vain: no test can follow."""
    code, output = on_ranks(3, tmp_path, RANKS.format(where="'first'"))
    assert code != 0, output
    assert "[rank 1] E   AssertionError: deliberate" in output
    assert "1 failed, 1 passed" in output and "the ranks disagree about" in output and "out of step" in output
    assert output.count(" passed in ") == 1, "one rank alone prints the report"


def test_a_failure_on_one_rank_in_step_is_one_failed_test(tmp_path: Path) -> None:
    """After the last collective: all ranks go on with the next test."""
    code, output = on_ranks(3, tmp_path, RANKS.format(where="'last'"))
    assert code != 0, output
    assert "[rank 1] E   AssertionError: deliberate" in output
    assert "1 failed, 2 passed" in output and "the ranks disagree" in output and "out of step" not in output


def test_an_import_that_fails_on_one_rank_fails_the_run(tmp_path: Path) -> None:
    body = "import os\nassert os.environ['RANK'] != '1', 'deliberate'\ndef test_it(): pass\n"
    code, output = on_ranks(2, tmp_path, body)
    assert code != 0 and "[rank 1] E   AssertionError: deliberate" in output, output


def test_ranks_that_agree_pass(tmp_path: Path) -> None:
    code, output = on_ranks(2, tmp_path, RANKS.format(where="'nowhere'"))
    assert code == 0 and "3 passed" in output and "[rank" not in output, output
