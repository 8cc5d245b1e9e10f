"""Builds vocabshard._C with pybind11 and a C++17 compiler, and its CUDA side where nvcc is found.

Neither torch nor a GPU takes part. `VOCABSHARD_CUDA=0` leaves the CUDA side out, `VOCABSHARD_CUDA=1` makes a missing
nvcc an error. `CXX` and `CUDA_HOME` choose the compilers.
"""

import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
OBJECTS = ROOT / "build" / "objects"  # compiled once per content; safe to delete

# The bits depend on these: no contraction, no fast-math, no -march that differs from builder to builder.
CXX_FLAGS = "-std=c++17 -O3 -fno-fast-math -ffp-contract=off -fvisibility=hidden -fPIC -pthread -Wall -Wextra".split()
NVCC_FLAGS = (
    "-std=c++17 -O3 -fmad=false -ftz=false -prec-div=true -prec-sqrt=true -cudart static "
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off -Xptxas=-v"
).split()
SM90_FLAGS = ["-gencode=arch=compute_90a,code=sm_90a"]
CUDA_SUFFIXES = {"_sm80": ["-gencode=arch=compute_80,code=sm_80"]}
X86_SUFFIXES = {
    # The warning is g++ 12's, about its own header.
    "_avx512": (
        "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512 "
        "-Wno-unknown-warning-option -Wno-maybe-uninitialized -Wno-uninitialized"
    ).split(),
    "_avx2": "-mavx2 -mfma -mf16c".split(),
}
IS_X86 = platform.machine().lower() in ("x86_64", "amd64") and sys.maxsize > 2**32


def suffix_flags(source: Path, table: dict[str, list[str]]) -> list[str]:
    return next((flags for suffix, flags in table.items() if source.stem.endswith(suffix)), [])


def cpu_sources() -> list[Path]:
    sources = sorted((CSRC / "cpu").glob("*.cpp"))
    if not IS_X86:
        sources = [s for s in sources if not suffix_flags(s, X86_SUFFIXES)]
    return [CSRC / "bindings.cpp", CSRC / "build.cpp", *sources]


def headers() -> list[Path]:
    return sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cuh"))


def included(source: Path) -> list[Path]:
    """The headers of csrc that `source` includes, and those that they include, whatever the preprocessor leaves out."""
    found: set[Path] = set()
    left = [source]
    while left:
        names = re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', left.pop().read_text(), re.MULTILINE)
        new = {path for name in names if (path := CSRC / name).is_file()} - found
        found |= new
        left += new
    return sorted(found)


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return (shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None) or shutil.which("nvcc")


def cuda_sources() -> tuple[str | None, list[Path]]:
    """nvcc and what it is to compile; (None, []) when the CUDA side is left out."""
    wish = os.environ.get("VOCABSHARD_CUDA", "")
    if wish not in ("", "0", "1"):
        raise PlatformError(f"VOCABSHARD_CUDA must be 0, 1 or unset, got {wish!r}")
    nvcc = find_nvcc()
    # nvcc takes the .cpp too: it knows where CUDA's headers are
    sources = sorted(p for p in (CSRC / "sm90").glob("*") if p.suffix in (".cu", ".cpp"))
    if wish == "1" and nvcc is None:
        raise PlatformError(
            "VOCABSHARD_CUDA=1 asks for the CUDA kernels, but there is no nvcc in $CUDA_HOME/bin or on PATH: "
            "install the CUDA toolkit, set CUDA_HOME, or unset VOCABSHARD_CUDA to build for the CPU alone"
        )
    if wish == "1" and not sources:
        raise PlatformError("VOCABSHARD_CUDA=1 asks for the CUDA kernels, but csrc/sm90 holds no source")
    return (nvcc, sources) if wish != "0" and nvcc and sources else (None, [])


def call(command: list[str]) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError:
        raise CompileError(f"{command[0]} not found: install a C++17 compiler, or set CXX to one") from None
    if done.returncode:
        raise CompileError(f"{shlex.join(command)}\n{done.stdout}")
    return done.stdout


def compile_one(source: Path, command: list[str], compiler_version: str) -> Path:
    """Compile unless an object of the same command, text, headers and compiler is there already.

    Builds that run at the same time share the work: one compiles a source, the others wait for it. Commands name no
    folder of this tree, so that its objects are those of a copy too.
    """
    texts = b"".join(path.read_bytes() for path in [source, *included(source)])
    key = hashlib.sha256(repr([command, compiler_version, pybind11.__version__]).encode() + texts).hexdigest()[:16]
    target = OBJECTS / f"{source.stem}-{key}.o"
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_suffix(".partial.o")
            compiling = [*command, "-c", source.relative_to(ROOT).as_posix()]
            with tempfile.TemporaryDirectory(dir=OBJECTS) as folder:
                keep = ["--keep", "--keep-dir", folder] if source.suffix == ".cu" else []
                output = call([*compiling, *keep, "-o", str(partial)])
                for ptx in sorted(Path(folder).glob("*.ptx"))[:1]:  # of several architectures the first; tests read it
                    shutil.move(ptx, target.with_suffix(".ptx"))
            target.with_suffix(".log").write_text(output)
            quiet = source.suffix == ".cu" and "warning" not in output  # ptxas reports registers each time
            print(shlex.join(compiling), "" if quiet else output, sep="\n", end="", flush=True)
            partial.replace(target)
    return target


class BuildExtension(build_ext):
    def build_extension(self, ext: Extension) -> None:
        cxx = shlex.split(os.environ.get("CXX", "c++"))
        nvcc, kernels = cuda_sources()
        defines = ["-DVOCABSHARD_X86=1"] if IS_X86 else []

        # (source, compiler, flags that decide the code): the fingerprint is made of these and of every text under csrc.
        plan = [(s, cxx, [*CXX_FLAGS, *defines, *suffix_flags(s, X86_SUFFIXES)]) for s in cpu_sources()]
        if nvcc:
            host = ["-ccbin", cxx[0]] if "CXX" in os.environ and len(cxx) == 1 else []
            plan += [(s, [nvcc, *host], [*NVCC_FLAGS, *SM90_FLAGS, *suffix_flags(s, CUDA_SUFFIXES)]) for s in kernels]
        digest = hashlib.sha256()
        for path in sorted({*headers(), *CSRC.rglob("*.cpp"), *CSRC.rglob("*.cu")}):
            digest.update(path.relative_to(CSRC).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
        digest.update(repr([(s.relative_to(CSRC).as_posix(), flags) for s, _, flags in plan]).encode())
        build = f"{self.distribution.get_version()}+{digest.hexdigest()[:16]}"
        told = [f'-DVOCABSHARD_BUILD="{build}"', f"-DVOCABSHARD_CUDA={int(bool(kernels))}"]
        python = ["-isystem", pybind11.get_include(), "-isystem", sysconfig.get_path("include")]

        OBJECTS.mkdir(parents=True, exist_ok=True)
        versions = {tuple(compiler): call([*compiler, "--version"]) for _, compiler, _ in plan}

        def build_one(entry: tuple[Path, list[str], list[str]]) -> str:
            source, compiler, flags = entry
            extra = told if source.name == "build.cpp" else python if source.name.startswith("bindings") else []
            return str(compile_one(source, [*compiler, *flags, *extra, "-Icsrc"], versions[tuple(compiler)]))

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(build_one, plan))

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        if nvcc:  # nvcc knows where its static runtime lies
            link = [*plan[-1][1], "-shared", "-cudart", "static", *SM90_FLAGS, "-Xcompiler=-pthread"]
        else:
            mac = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
            link = [*cxx, "-shared", "-pthread", *mac]
        call([*link, *objects, "-o", str(target), *(["-ldl", "-lpthread", "-lrt"] if nvcc else [])])
        print(f"built {target.name}: {build}, CUDA {'on' if kernels else 'off'}", flush=True)


def relative(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


extension = Extension("vocabshard._C", relative([*cpu_sources(), *cuda_sources()[1]]), depends=relative(headers()))
setup(ext_modules=[extension], cmdclass={"build_ext": BuildExtension})
