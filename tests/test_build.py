"""The build: no torch in it, clear errors, flags that keep the bits, and what the compiled module says of itself."""

import ast
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools

import vocabshard

ROOT = Path(__file__).parent.parent
CXX = shutil.which(os.environ.get("CXX", "c++"))


def test_setup_imports_no_torch() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {module.partition(".")[0] for module in modules}
    assert roots - set(sys.stdlib_module_names) == {"pybind11", "setuptools"}


def test_no_source_includes_torch() -> None:
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".h", ".cuh", ".cpp", ".cu"):
            assert not re.search(r"#include\s*[<\"](torch|ATen|c10)/", path.read_text()), path


def test_flags_fix_the_bits() -> None:
    text = (ROOT / "setup.py").read_text()
    for flag in "-ffp-contract=off -fno-fast-math -fmad=false -ftz=false -prec-div=true -prec-sqrt=true".split():
        assert flag in text
    for flag in ("-ffast-math", "-Ofast", "-march=", "use_fast_math", "-DNDEBUG"):
        assert flag not in text


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Its functions."""
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    return runpy.run_path(str(ROOT / "setup.py"))


@pytest.mark.skipif(CXX is None, reason="no C++ compiler")
def test_what_a_source_includes_is_known(setup_py: dict[str, Any]) -> None:
    """Whatever the preprocessor reads of csrc: without the system's headers, which it then takes for granted."""
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".cu")]
    for source in sources:
        for define in ("-D__CUDACC__", "-U__CUDACC__"):
            flags = ["-std=c++17", "-MM", "-MG", "-nostdinc", "-Icsrc", define, "-x", "c++"]
            command = [str(CXX), *flags, source.relative_to(ROOT).as_posix()]
            made = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout
            read = {ROOT / name for name in made.split() if name.startswith("csrc/")} - {source}
            assert read <= set(setup_py["included"](source)), source.name
    backward = setup_py["included"](ROOT / "csrc" / "sm90" / "backward.cpp")
    assert ROOT / "csrc" / "sm90" / "dlogits.h" in backward and not [p for p in backward if p.parent.name == "cpu"]


def test_a_changed_header_compiles_what_includes_it(
    setup_py: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(command: list[str]) -> str:
        Path(command[-1]).touch()
        return ""

    compile_one = setup_py["compile_one"]
    for name, value in (("ROOT", tmp_path), ("CSRC", tmp_path), ("OBJECTS", tmp_path), ("call", call)):
        monkeypatch.setitem(compile_one.__globals__, name, value)
    texts = {"one.cpp": '#include "a.h"\n', "two.cpp": "", "a.h": '#pragma once\n #  include "b.h"\n', "b.h": ""}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)

    def objects() -> list[Path]:
        return [compile_one(tmp_path / name, ["c++"], "1") for name in ("one.cpp", "two.cpp")]

    before = objects()
    assert objects() == before
    (tmp_path / "b.h").write_text("int b;\n")
    after = objects()
    assert after[0] != before[0] and after[1] == before[1] and all(path.exists() for path in before + after)


def setup_error(cuda: str) -> str:
    """What setup.py says with VOCABSHARD_CUDA and no nvcc in sight."""
    environment = {**os.environ, "VOCABSHARD_CUDA": cuda, "CUDA_HOME": "", "PATH": "/nonexistent"}
    command = [sys.executable, "setup.py", "--name"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


def test_cuda_asked_for_without_nvcc_is_an_error() -> None:
    assert re.search(
        r"VOCABSHARD_CUDA=1 asks for .* there is no nvcc in \$CUDA_HOME/bin or on PATH: ", setup_error("1")
    )


def test_a_wrong_choice_of_cuda_is_an_error() -> None:
    assert "VOCABSHARD_CUDA must be 0, 1 or unset, got 'yes'" in setup_error("yes")


def test_the_module_says_what_was_built() -> None:
    from vocabshard import _C

    info = _C.build_info()
    assert re.fullmatch(re.escape(vocabshard.__version__) + r"\+[0-9a-f]{16}", info["build"])
    assert isinstance(info["cuda"], bool)
    assert _C.contract()["id"] == vocabshard.contract.CONTRACT_ID


def test_the_module_needs_no_torch() -> None:
    from vocabshard import _C

    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("vocabshard._C", {_C.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.build_info()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_nothing_was_contracted() -> None:
    from vocabshard import _C

    assert _C.contraction_probe() is False


# a * a = 1 + 2^-11 + 2^-24 rounds to -c = 1 + 2^-11; contracted, the 2^-24 would survive.
CONTRACTION = """
#include <cstdio>
#include "contract.h"
int main() {
  volatile float a = 1.0f + 0x1p-12f, c = -(1.0f + 0x1p-11f);
  float x = a, y = c;
  std::printf("%d", vocabshard::add(vocabshard::mul(x, x), y) != 0.0f);
}
"""


def contracts(tmp_path: Path, *flags: str) -> bool:
    source, program = tmp_path / "probe.cpp", tmp_path / "probe"
    source.write_text(CONTRACTION)
    command = [str(CXX), "-std=c++17", "-O3", *flags, f"-I{ROOT / 'csrc'}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=60)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=60).stdout == "1"


@pytest.mark.skipif(CXX is None, reason="no C++ compiler")
def test_contraction_would_be_noticed(tmp_path: Path) -> None:
    """The compiler contracts the contract's own operations where it may, and not under the build's flags."""
    fma = ["-mfma"] if platform.machine() in ("x86_64", "AMD64") else []
    assert contracts(tmp_path, *fma, "-ffp-contract=fast")
    assert not contracts(tmp_path, *fma, "-ffp-contract=off")
