"""What the compiler made of the CUDA kernels, with no GPU: they compile, spill nothing, and round where they should."""

from __future__ import annotations

import functools
import re
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).parent.parent
# of those over logits one stands for all: they are many, for two architectures, and long to compile
SOURCES = [
    s
    for s in sorted((ROOT / "csrc" / "sm90").glob("*.cu"))
    if not s.stem.startswith("logits") or s.stem == "logits_forward_f32_sm80"
]
FUSED = [
    s for s in SOURCES if s.stem.startswith(("forward", "fold", "merge", "dlogits", "kept", "topk", "product_wgmma"))
]
KERNELS = {
    "forward_wgmma": 4,
    "forward_draw": 1,
    "forward_topk": 1,
    "dlogits_": 6,
}  # tile shapes, with entropy and without; of each kind
WGMMA = [s for s in SOURCES if s.stem.startswith(tuple(KERNELS))]
PRODUCTS = [s for s in SOURCES if s.stem.startswith("product_wgmma")]

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
by_source = pytest.mark.parametrize("source", FUSED, ids=lambda s: s.stem)


@functools.cache
def builder() -> dict[str, Any]:
    """setup.py's own functions: what it compiled already is not compiled again."""
    real, setuptools.setup = setuptools.setup, lambda **options: None
    try:
        return runpy.run_path(str(ROOT / "setup.py"))
    finally:
        setuptools.setup = real


def command(source: Path) -> list[str]:
    b = builder()
    flags = [*b["NVCC_FLAGS"], *b["SM90_FLAGS"], *b["suffix_flags"](source, b["CUDA_SUFFIXES"])]
    return [b["find_nvcc"](), *flags, "-Icsrc"]


@functools.cache
def objects() -> dict[Path, Path | Exception]:
    b = builder()
    b["OBJECTS"].mkdir(parents=True, exist_ok=True)
    version = b["call"]([b["find_nvcc"](), "--version"])

    def compile_one(source: Path) -> Path | Exception:
        try:
            return b["compile_one"](source, command(source), version)
        except setuptools.errors.CompileError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(SOURCES, pool.map(compile_one, SOURCES), strict=True))


def compiled(source: Path) -> Path:
    made = objects()[source]
    if isinstance(made, Exception):
        pytest.fail(f"{source.name} does not compile for sm_90a:\n{made}", pytrace=False)
    return made


def resources(source: Path) -> dict[str, tuple[int, ...]]:
    """Kernel -> bytes of stack frame, spill stores, spill loads, on sm_90a."""
    log = compiled(source).with_suffix(".log").read_text()
    found = re.findall(
        r"Compiling entry function '(\w+)' for 'sm_90a?'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads",
        log,
        re.DOTALL,
    )
    return {name: tuple(map(int, counts)) for name, *counts in found}


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        triton = pytest.importorskip("triton", reason=f"no {name} on PATH, and triton, which brings one, is missing")
        found = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)
    return found


def disassembly(source: Path) -> dict[str, str]:
    """Kernel -> SASS."""
    dump = [tool("cuobjdump"), "-arch", "sm_90a", "-sass", str(compiled(source))]
    text = subprocess.run(dump, capture_output=True, text=True, check=True, timeout=120).stdout
    parts = re.split(r"\n\s*Function : (\w+)\n", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.stem)
def test_compiles(source: Path) -> None:
    assert compiled(source).exists()


@by_source
def test_spills_nothing(source: Path) -> None:
    for kernel, counts in resources(source).items():
        assert counts == (0, 0, 0), f"{kernel} in {source.name}: stack frame, spill stores, spill loads are {counts}"
    if "__global__" in source.read_text() or source in WGMMA:
        assert resources(source), f"the log of {source.name} tells of no kernel"


@pytest.mark.parametrize("source", WGMMA, ids=lambda s: s.stem)
def test_wgmma_kernels_use_the_tensor_cores(source: Path) -> None:
    kernels = disassembly(source)
    assert len(kernels) == next(count for stem, count in KERNELS.items() if source.stem.startswith(stem))
    for kernel, sass in kernels.items():
        assert "HGMMA.64x" in sass, f"{kernel}: no HGMMA"
        assert "UTMALDG" in sass, f"{kernel}: no tensor copy"
        assert not re.search(r"\b(LDL|STL)\b", sass), f"{kernel} uses local memory"
        loop = sass[sass.index("HGMMA") : sass.rindex("HGMMA")]
        # a wait or arithmetic between them means that the compiler has put the products one behind the other
        assert not re.search(r"DEPBAR|F?MUL|FFMA", loop), f"{kernel}: the products are serialised"


@pytest.mark.parametrize("source", PRODUCTS, ids=lambda s: s.stem)
def test_product_kernels_keep_the_tensor_cores_busy(source: Path) -> None:
    log = compiled(source).with_suffix(".log").read_text()
    assert "serialized" not in log, "the products are put one behind the other"
    spills = resources(source)
    assert len(spills) == 8 and set(spills.values()) == {(0, 0, 0)}, spills
    for kernel, sass in disassembly(source).items():
        tile = re.search(
            r"Lb([01])ELb[01]ELi([123])ELi(\d+)E", kernel
        )  # of the tile 256 columns wide there is one kind
        transposed, products, columns = (tile[1] == "1", 4 * int(tile[2]), int(tile[3])) if tile else (False, 4, 256)
        assert "UTMALDG.2D.MULTICAST" in sass, f"{kernel}: no tensor copy into both CTAs"
        whole_stage = sass[sass.index("HGMMA") :].split("DEPBAR")[0]
        kind = "tnspA.tnspB" if transposed else "tnspB"
        found = re.findall(rf"HGMMA\.64x{columns}x16\.F32(?:\.BF16)? \w+, gdesc\[\w+\]\.{kind}", whole_stage)
        assert len(found) == products, f"{kernel}: {len(found)} products without a wait"


def test_mma_kernel_uses_the_tensor_cores() -> None:
    for kernel, sass in disassembly(ROOT / "csrc" / "sm90" / "forward_mma.cu").items():
        assert "HMMA.16816.F32" in sass, kernel


# the other 16-bit type is the same text, and long to compile
@pytest.mark.parametrize("source", [s for s in FUSED if not s.stem.endswith("_fp16")], ids=lambda s: s.stem)
def test_no_operation_is_left_to_be_contracted(source: Path, tmp_path: Path) -> None:
    """A compiler that may contract makes no other FMA than the build did, and finds every rounding spelled out."""
    may = tmp_path / "may.ptx"
    flags = ["-fmad=true" if f == "-fmad=false" else f for f in command(source) if not f.startswith("-Xptxas")]
    making = [*flags, "-ptx", str(source), "-o", str(may)]
    subprocess.run(making, cwd=ROOT, check=True, capture_output=True, timeout=300)
    fused: dict[str, list[str]] = {}
    for contract, ptx in (("-fmad=false", compiled(source).with_suffix(".ptx")), ("-fmad=true", may)):
        entry = ""
        for line in ptx.read_text().splitlines():
            if found := re.search(r"\.entry (\w+)", line):
                # the name of an unnamed namespace has the tree's place in it, and objects may come from another tree
                entry = re.sub(r"[0-9a-f]{8}_(\d+_\w+_cu)_[0-9a-f]{8}", r"\1", found[1])
            if re.search(r"\bfma\.rn\.f(32|64)\b", line):
                fused.setdefault(entry, []).append(contract)
            if contract == "-fmad=true":
                assert not re.match(r"\s*(@%p\d+ )?(mul|add|sub|div)(\.ftz)?\.f(32|64)\b", line), f"{entry}: {line}"
    for entry, seen in fused.items():
        explicit, made = seen.count("-fmad=false"), seen.count("-fmad=true")
        assert explicit == made, f"{entry}: {explicit} FMAs are written, {made} come out where contraction is allowed"
