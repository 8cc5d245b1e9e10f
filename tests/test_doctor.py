"""`vocabshard doctor`: what it reports, in how long, and every way in which the contract may not hold."""

from __future__ import annotations

import sys
import time

import pytest
import torch

import vocabshard
from vocabshard import _C, contract, kernels
from vocabshard.command import main
from vocabshard.command.doctor import choices
from vocabshard.testing import goldens


def doctor(capsys, *options: str) -> tuple[int, str]:
    code = main(["doctor", *options])
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


@pytest.fixture(autouse=True)
def no_knobs(monkeypatch):
    for name in ("PTXAS_OPTIONS", "TRITON_KERNEL_OVERRIDE", "TRITON_OVERRIDE_ARCH"):
        monkeypatch.delenv(name, raising=False)


def test_this_machine(capsys) -> None:
    before = time.process_time()
    code, out = doctor(capsys)
    assert time.process_time() - before < 10
    assert code == 0, out
    assert out.endswith(f"The contract {contract.CONTRACT_ID} holds here.\n")
    assert _C.build_info()["build"] in out and f"torch {torch.__version__}" in out
    for backend in ("sm90", "triton", "torch"):
        assert out.count(f"\n    {backend:<8} ") >= 2  # a reason for each entry
    assert "cpu, linear_logp, fp32, bf16, fp16: cpu, projection fma-chain, bears the contract\n" in out
    assert "\n  cpu, backend cpu, projection fma-chain: 2 of 12 goldens hold; 10 not checked\n" in out
    assert "\n  cpu, backend cpu, projection given-logits: 1 of 9 goldens hold; 8 not checked\n" in out
    assert "  vocabshard doctor --all checks those too\n" in out


def test_all_goldens(capsys) -> None:
    code, out = doctor(capsys, "--all")
    assert code == 0 and "not checked" not in out and "--all" not in out, out
    assert "\n  cpu, backend cpu, projection fma-chain: 12 of 12 goldens hold\n" in out
    assert "\n  cpu, backend cpu, projection given-logits: 9 of 9 goldens hold\n" in out


def test_wrong_bytes(capsys, monkeypatch) -> None:
    recorded = goldens.recorded()
    recorded[contract.GIVEN_LOGITS]["fp32, everything"] = "0" * 64
    monkeypatch.setattr(goldens, "recorded", lambda: recorded)
    code, out = doctor(capsys)
    assert code == 1
    reason = "cpu, backend cpu, projection given-logits: WRONG BYTES in fp32, everything; 8 not checked"
    assert f"\n  {reason}\n" in out and f"\n  goldens: {reason}\n" in out


def test_an_extension_of_other_constants(capsys, monkeypatch) -> None:
    monkeypatch.setattr(contract, "SPAN", contract.SPAN + 1)
    code, out = doctor(capsys)
    assert code == 1
    assert "built from another contract (span: package 197, extension 196)" in out.splitlines()[-1]


def test_no_extension(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vocabshard._C", None)
    monkeypatch.delattr(vocabshard, "_C")
    code, out = doctor(capsys)
    assert code == 1
    assert "  extension    none\n" in out and "vocabshard._C cannot be imported" in out.splitlines()[-2]


def test_an_environment_that_may_change_bits(capsys, monkeypatch) -> None:
    monkeypatch.setenv("VOCABSHARD_FAST", "1")
    code, out = doctor(capsys)
    assert code == 1 and "environment variable VOCABSHARD_FAST" in out.splitlines()[-1]


def test_a_gpu_without_kernels_of_its_own(monkeypatch) -> None:
    """An unvalidated architecture is told, and is no failure."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    kernels.select_backend.cache_clear()
    broken: list[str] = []
    out = "\n".join(choices(broken))
    kernels.select_backend.cache_clear()
    assert broken == []
    assert "    sm90     it needs compute capability (9, 0), the GPU has (8, 0)" in out
    assert "does not bear the contract: " in out
