"""The launcher: ranks, exit codes, and no rank left behind when one fails or the launcher is told to stop."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vocabshard import launching
from vocabshard.launching import choose_backend, free_port, run

LAUNCH = Path(__file__).parent.parent / "launch" / "run.py"

PROGRAM = """
import os, signal, sys, time

what, folder = sys.argv[1:]
if what in ("sum", "lost"):  # torch takes longer to import than all else here
    import torch, torch.distributed as dist
    from vocabshard.launching import init_from_env

    ranks = init_from_env()
if what == "sum":
    total = torch.tensor([ranks.rank + 1], device=ranks.device)
    dist.all_reduce(total)
    print(f"sum {int(total)} threads {os.environ['OMP_NUM_THREADS']}", flush=True)
    dist.destroy_process_group()
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if what == "stubborn" else signal.SIG_DFL)
    open(f"{folder}/{os.getpid()}", "w").close()
    while sum(name.isdigit() for name in os.listdir(folder)) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    if os.environ["RANK"] == "1" and what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["RANK"] == "1" and what != "sleep":
        open(f"{folder}/failed", "w").close()
        sys.exit(7)
    if what == "lost":
        dist.barrier()  # ends with an error as soon as rank 1 is gone
    time.sleep(300)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    (tmp_path / "pids").mkdir()
    return path


def start(program: Path, what: str, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(LAUNCH), *options, str(program), what, str(program.parent / "pids")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def pids(program: Path) -> list[int]:
    return [int(p.name) for p in (program.parent / "pids").iterdir() if p.name.isdigit()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_runs_a_script_on_all_ranks(program: Path) -> None:
    process = start(program, "sum", "--nproc-per-node", "3")  # as torchrun has it; the other tests say --nproc
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 3)))
    assert output.count(f"sum 6 threads {threads}") == 3, output


@pytest.mark.parametrize(
    ("what", "ranks", "code"), [("fail", 2, 7), ("lost", 3, 7), ("killed", 2, 128 + signal.SIGKILL), ("stubborn", 3, 7)]
)
def test_a_failed_rank_ends_the_others(
    program: Path, what: str, ranks: int, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    returned = run(ranks, [str(program), what, str(program.parent / "pids")])
    ended = time.time()
    output = "".join(capfd.readouterr())
    assert returned == code, output
    assert f"rank 1 of {ranks} failed with exit code {code}" in output
    if what != "lost":  # its other ranks may end by an error of their own
        assert "Traceback" not in output
    assert len(pids(program)) == ranks and not any(map(alive, pids(program)))
    if what == "stubborn":
        assert ended - (program.parent / "pids" / "failed").stat().st_mtime < 10


def test_a_signal_to_the_launcher_ends_all_ranks(program: Path) -> None:
    process = start(program, "sleep", "--nproc", "2")
    deadline = time.time() + 60
    while len(pids(program)) < 2 and time.time() < deadline:
        time.sleep(0.1)
    process.terminate()
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert len(pids(program)) == 2 and not any(map(alive, pids(program)))


def test_one_process_without_a_launcher(program: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), "sum", "."]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert output == "sum 1 threads 1\n"


def test_run_leaves_handlers_and_environment_as_they_were(tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)
    before = dict(os.environ), [signal.getsignal(n) for n in numbers]
    script = tmp_path / "exit.py"
    script.write_text("import sys; sys.exit(3)")
    assert run(1, [str(script)]) == 3
    assert (dict(os.environ), [signal.getsignal(n) for n in numbers]) == before


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="nproc must be at least 1, got 0"):
        run(0, ["script.py"])
    with pytest.raises(ValueError, match="argv must name a script or module"):
        run(1, [])


@pytest.mark.parametrize(
    ("ranks", "rank", "gpus", "nccl", "expected"),
    [
        (4, 3, 4, True, ("nccl", "cuda:3")),
        (4, 3, 8, True, ("nccl", "cuda:3")),
        (4, 3, 4, False, ("gloo", "cuda:3")),
        (4, 3, 1, True, ("gloo", "cuda:0")),
        (4, 3, 2, True, ("gloo", "cuda:1")),
        (4, 3, 0, True, ("gloo", "cpu")),
    ],
)
def test_backend_choice(ranks: int, rank: int, gpus: int, nccl: bool, expected: tuple[str, str]) -> None:
    assert choose_backend(ranks, rank, gpus, nccl) == (expected[0], torch.device(expected[1]))


def test_free_ports_can_be_bound() -> None:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", free_port()))


def test_an_nccl_group_is_not_bound_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one that is, torch's new_group waits forever for a gloo group of some of the ranks."""
    given: dict[str, object] = {}
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(launching.NCCL_DUMP[0], "")  # to be restored
    monkeypatch.delenv(launching.NCCL_DUMP[0])
    monkeypatch.setattr(launching, "choose_backend", lambda *_: ("nccl", torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(launching.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(launching.dist, "init_process_group", lambda backend, **options: given.update(options))
    assert launching.init_from_env().backend == "nccl"
    assert given and given.get("device_id") is None
    assert os.environ[launching.NCCL_DUMP[0]] == "1000"
    monkeypatch.setenv(launching.NCCL_DUMP[0], "7000")
    launching.init_from_env()
    assert os.environ[launching.NCCL_DUMP[0]] == "7000", "the caller's own"
