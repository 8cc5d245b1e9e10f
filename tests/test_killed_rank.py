"""A rank that dies in the middle: the others end with an error within the timeout of the collectives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vocabshard.launching import free_port

TIMEOUT = 15
LATER = 15  # seconds: over NCCL torch ends a process some 8 s after the timeout; machines under test are busy
SCRIPT = """
import os, signal, sys
from datetime import timedelta
import torch
import vocabshard as vs
from vocabshard import passes
from vocabshard.launching import init_from_env

when, timeout = sys.argv[1], int(sys.argv[2])
ranks = init_from_env(timedelta(seconds=timeout))
g = torch.Generator().manual_seed(0)
hidden = torch.randn(64, 32, generator=g).to(ranks.device).requires_grad_()
weight = torch.randn(96 * ranks.world_size, 32, generator=g).to(ranks.device).chunk(ranks.world_size)[ranks.rank]
target = torch.arange(64, device=ranks.device)
options = vs.GradOptions(reduce="ordered" if when == "ordered" else "sum")

def step():
    logp = vs.linear_logp(hidden, weight, target, tp_group=torch.distributed.group.WORLD, grad_options=options)
    logp.sum().backward()
    return float(logp.detach().sum() + hidden.grad.sum())

step()  # everything is set up, and works
if ranks.rank == 0:
    def die(*args, **options):
        os.kill(os.getpid(), signal.SIGKILL)
    # after the local work of that pass and before what the others wait for
    place = {"backward": "HiddenSum", "ordered": "continue_over_group"}
    setattr(passes, place[when], die)
step()
print("went on")
"""


@pytest.mark.parametrize("when, ranks", [("backward", 2), ("ordered", 3)])
def test_the_others_end_with_an_error(when: str, ranks: int, tmp_path: Path) -> None:
    if when == "ordered" and torch.cuda.is_available():
        from vocabshard import kernels

        choice = kernels.select_backend("auto", torch.device("cuda", 0), torch.float32)
        if not kernels.continues_chain(choice.backend, torch.float32):
            pytest.skip(f"backend {choice.backend} has no chain to go on with")
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
                   "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py"), when, str(TIMEOUT)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        first = processes[0].communicate(timeout=120)[0]
        assert processes[0].returncode == -signal.SIGKILL, first
        died = time.monotonic()
        for rank, process in enumerate(processes[1:], start=1):
            said = process.communicate(timeout=max(1.0, died + TIMEOUT + LATER - time.monotonic()))[0]
            assert process.returncode != 0 and "went on" not in said, f"rank {rank}: {said}"
            assert "Error" in said or process.returncode == -signal.SIGABRT, f"rank {rank}: {said}"
    finally:
        for process in processes:
            process.kill()
