"""The table that chooses a backend: pure, and telling why."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch

from vocabshard import _C, kernels
from vocabshard.kernels import backends

CUDA, BF16 = torch.device("cuda:0"), torch.bfloat16


@pytest.fixture(autouse=True)
def fresh_table() -> Iterator[None]:
    kernels.select_backend.cache_clear()
    yield
    kernels.select_backend.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(_C, "build_info", lambda: {"cuda": built})


def test_hopper_takes_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0), True)
    for backend in ("auto", "sm90"):
        choice = kernels.select_backend(backend, CUDA, BF16)
        assert (choice.backend, choice.projection) == ("sm90", "hopper-k16")
        assert choice.contract_bearing and not choice.reason
    assert kernels.select_backend("sm90", CUDA, torch.float32).projection == "fma-chain"
    choice = kernels.select_backend("auto", CUDA, BF16, True)
    assert (choice.backend, choice.projection, choice.reason) == ("sm90", "given-logits", "")


def test_a_build_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0), False)
    with pytest.raises(ValueError, match="built without CUDA: install nvcc"):
        kernels.select_backend("sm90", CUDA, BF16)
    pytest.importorskip("triton")
    choice = kernels.select_backend("auto", CUDA, BF16)
    assert choice.backend == "triton" and "built without CUDA" in choice.reason


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_other_gpus_are_named(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    pretend(monkeypatch, capability, True)
    with pytest.raises(ValueError, match=r"compute capability \(9, 0\), the GPU has"):
        kernels.select_backend("sm90", CUDA, BF16)
    assert kernels.select_backend("auto", CUDA, BF16).backend != "sm90"


def test_logits_that_exist_take_the_cuda_kernels_on_older_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, taken in (((8, 0), True), ((8, 9), True), ((10, 0), False), ((7, 5), False)):
        pretend(monkeypatch, capability, True)
        kernels.select_backend.cache_clear()
        if taken:
            assert kernels.select_backend("auto", CUDA, BF16, True).backend == "sm90"
        else:
            with pytest.raises(ValueError, match=r"compute capability \(8, x\) or \(9, 0\), the GPU has"):
                kernels.select_backend("sm90", CUDA, BF16, True)


def test_no_gpu() -> None:
    with pytest.raises(ValueError, match=r'backend="sm90" does not serve tensors on \'cpu\': it needs an NVIDIA GPU'):
        kernels.select_backend("sm90", torch.device("cpu"), BF16)
    assert kernels.select_backend("auto", torch.device("cpu"), BF16).backend == "cpu"


def test_every_backend_that_was_not_taken_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    pretend(monkeypatch, (9, 0), True)
    for arguments, taken, said in (
        (("auto", CUDA, BF16), "sm90", {"cpu": "needs tensors on the CPU", "triton": "sm90 comes first"}),
        (("triton", CUDA, BF16), "triton", {"sm90": 'backend="triton" was asked for', "cpu": "needs tensors on"}),
        (("auto", torch.device("cpu"), BF16), "cpu", {"sm90": "needs an NVIDIA GPU", "torch": "cpu comes first"}),
    ):
        choice = kernels.select_backend(*arguments)
        assert choice.backend == taken
        reasons = dict(choice.rejected)
        assert {taken, *reasons} == set(kernels.NAMES) and taken not in reasons
        for backend, reason in said.items():
            assert reason in reasons[backend]


def test_unvalidated_architectures_bear_no_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from vocabshard.kernels import triton_linear

    monkeypatch.setattr(triton_linear, "INTERPRETED", False)
    pretend(monkeypatch, (10, 0), True)
    choice = kernels.select_backend("auto", CUDA, BF16)
    assert (choice.backend, choice.projection, choice.contract_bearing) == ("triton", "triton-sm100", False)
    assert "no goldens" in choice.reason and "sm90 was not taken" in choice.reason
    assert kernels.select_backend("auto", CUDA, torch.float32).contract_bearing


@pytest.mark.parametrize("name", kernels.NAMES)
def test_a_row_declares_what_it_does(name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    if name == "sm90" and not _C.build_info()["cuda"]:
        pytest.skip("its module takes constants from the CUDA build")
    row = kernels.row(name)
    served = importlib.import_module(row.module)
    assert hasattr(served, "forward") and hasattr(served, "backward")
    assert hasattr(served, "logits_forward") == (backends.LOGITS in row.capability.entries)
