"""Starting the ranks of one machine, and joining them: which backend, which device, one clean end.

`run` starts them (through torch.distributed.run), `init_from_env` is what each of them calls first.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

GRACE_SECONDS = 5.0  # between asking the other ranks to end and killing them

# After a collective over NCCL has failed or timed out, torch sleeps four times this long (its default: 15 s, so a
# minute) before it ends the process; meanwhile its record of collectives is written, where that is asked for.
NCCL_DUMP = ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks: its rank of `world_size`, the backend's name and the device to compute on.

    It holds no process group: one that outlives destroy_process_group can abort the process at its exit.
    """

    rank: int
    world_size: int
    local_rank: int
    backend: str
    device: torch.device


def choose_backend(local_world_size: int, local_rank: int, gpus: int, nccl: bool) -> tuple[str, torch.device]:
    """NCCL when every rank of this machine has a GPU of its own; else gloo, on GPUs that ranks share, or on the CPU."""
    if nccl and gpus >= local_world_size:
        return "nccl", torch.device("cuda", local_rank)
    if gpus:
        return "gloo", torch.device("cuda", local_rank % gpus)
    return "gloo", torch.device("cpu")


def init_from_env(timeout: timedelta | None = None) -> Ranks:
    """Initialise the default process group as torchrun's environment says and set this rank's CUDA device.

    Collective over the world. Without such an environment the world is this process alone. `timeout` is that of the
    group's collectives (None: torch's default): a process that waits longer for another ends with an error, over NCCL
    within some 8 s more, where torch takes over a minute (NCCL_DUMP is set in the environment, unless the variable is
    there). Every machine of the job has to have the same number of GPUs and ranks.
    """
    if dist.is_initialized():
        raise RuntimeError("init_from_env found a process group: call it once, or destroy_process_group before")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    backend, device = choose_backend(local_world_size, local_rank, gpus, dist.is_nccl_available())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl":
        os.environ.setdefault(*NCCL_DUMP)
    # No device_id: of a group that has one, torch 2.11's new_group waits forever for a gloo group of some of the ranks.
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    return Ranks(rank, world_size, local_rank, backend, device)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run(nproc: int, argv: Sequence[str], *, module: bool = False) -> int:
    """Run a script (or, with `module`, a module) on `nproc` ranks of this machine.

    `argv` is the script's path or the module's name and its arguments. Returns 0, or the exit code of the rank that
    failed first, 128 + the signal's number for one that a signal ended. When a rank fails the others get SIGTERM and,
    after GRACE_SECONDS, SIGKILL. SIGINT, SIGTERM, SIGHUP and SIGQUIT to this process reach all ranks and end the run
    (128 + the number). Output goes where this process's goes.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, got {nproc}")
    if not argv:
        raise ValueError("argv must name a script or module to run, got nothing")
    # Slow to import, and needed by launchers alone.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    options = [f"--nproc-per-node={nproc}", f"--rdzv-id={uuid.uuid4()}", "--rdzv-backend=c10d"]
    options += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]  # 0: a port that is free
    options += ["--module"] if module else []
    with _environment(nproc), _quiet_agent(), _handlers_kept(), _killing_after_failure() as failed:
        config, entrypoint, arguments = config_from_args(parse_args([*options, *argv]))
        try:
            elastic_launch(config, entrypoint)(*arguments)
        except ChildFailedError as error:
            # Ranks that lost their peer may end before the agent looks: its idea of the first can be wrong.
            by_pid = {failure.pid: (rank, failure) for rank, failure in error.failures.items()}
            rank, failure = by_pid[failed[0]] if failed and failed[0] in by_pid else error.get_first_failure()
            code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
            print(f"rank {rank} of {nproc} failed with exit code {code}; the others were ended", file=sys.stderr)
            return code
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


@contextlib.contextmanager
def _environment(nproc: int) -> Iterator[None]:
    """OMP_NUM_THREADS for the ranks, unless the caller has set it: the cores divided among them.

    Restores the environment: torch's agent adds to it.
    """
    kept = dict(os.environ)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """The ranks' own output says what went wrong; the agent's log of its bookkeeping would bury it."""
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Torch's agent installs handlers of its own and leaves them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:  # None: not Python's
                signal.signal(number, handler)


@contextlib.contextmanager
def _killing_after_failure() -> Iterator[list[int]]:
    """Kill ranks that outlive a failed one by GRACE_SECONDS; torch's agent waits 30 s for those that ignore SIGTERM.

    The list fills with the process ids of failed ranks, the first to end first.
    """
    failed: list[int] = []
    if threading.current_thread() is not threading.main_thread() or not sys.platform.startswith("linux"):
        yield failed
        return
    spared = _children()
    timer = threading.Timer(GRACE_SECONDS, _kill_children, [spared])

    def on_child(_signal: int, _frame: FrameType | None) -> None:
        for child in _children() - spared - set(failed):
            with contextlib.suppress(ChildProcessError):  # reaped meanwhile
                ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # looks; the agent reaps
                if ended and (ended.si_code != os.CLD_EXITED or ended.si_status):
                    failed.append(child)
        if failed and timer.ident is None:  # not started yet
            timer.start()

    kept = signal.signal(signal.SIGCHLD, on_child)
    try:
        yield failed
    finally:
        timer.cancel()
        signal.signal(signal.SIGCHLD, kept or signal.SIG_DFL)


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.update(map(int, (task / "children").read_text().split()))
    return found


def _kill_children(spared: set[int]) -> None:
    for child in _children() - spared:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # each rank leads a process group of its own


def main(argv: Sequence[str] | None = None) -> int:
    """The launcher's command line: `[--nproc N] [-m] SCRIPT_OR_MODULE ARGS...`."""
    parser = argparse.ArgumentParser(
        prog="launch", description="Run a script or module on N ranks of this machine, through torch.distributed.run."
    )
    parser.add_argument("--nproc", "--nproc-per-node", type=int, default=1, metavar="N", help="ranks (default 1)")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("program", help="script, or module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(argv)
    if given.nproc < 1:
        parser.error(f"--nproc must be at least 1, got {given.nproc}")
    return run(given.nproc, [given.program, *given.args], module=given.module)
