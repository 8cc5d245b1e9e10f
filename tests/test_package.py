"""What is distributed: the source distribution holds the tree, and what is installed from it works elsewhere."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
FOLDERS = ("csrc", "launch", "tests", "docs", "examples", "benchmarks", "vocabshard")
TEXTS = ("README.md", "CHANGELOG.md", "LICENSE", "setup.py", "pyproject.toml", "MANIFEST.in")


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=environment.pop("cwd", ROOT), env={**kept, **environment},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    make = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    with open(ROOT / "pyproject.toml") as lock:  # it is put together in the tree, by one worker at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(sys.executable, "-c", make, folder)
    (found,) = folder.glob("*.tar.gz")
    return found


def test_the_sdist_holds_the_tree(sdist: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", *FOLDERS, *TEXTS], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode or not tracked.stdout:
        pytest.skip("not a git checkout: nothing says which files are the tree's")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert not set(tracked.stdout.splitlines()) - names, "in the tree, not in the sdist"
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o"))]


def test_what_is_installed_from_the_sdist_works_elsewhere(sdist: Path, tmp_path: Path) -> None:
    """In an environment of its own, from another folder; torch alone is lent by this one.

    So are objects that this tree's build has compiled from the same texts by the same commands.
    """
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip")
    apart = ("--no-index", "--no-deps", "--quiet", "--disable-pip-version-check")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.glob("vocabshard-*")
    (tree / "build" / "objects").mkdir(parents=True)
    for made in (ROOT / "build" / "objects").glob("*.o"):
        (tree / "build" / "objects" / made.name).symlink_to(made)
    wheel = (*pip, "wheel", *apart, "--no-build-isolation", "--wheel-dir", tmp_path, tree)
    run(*wheel, VOCABSHARD_CUDA="0")
    run(*pip, "--python", python, "install", *apart, *tmp_path.glob("*.whl"))
    (tmp_path / "smoke.py").write_text((ROOT / "launch" / "smoke.py").read_text())
    done = run(python, tmp_path / "smoke.py", packages, cwd=str(tmp_path))
    assert done.stdout.splitlines()[-1].startswith("works: vocabshard "), done.stdout
    assert "with CUDA" not in done.stdout
    told = run(tmp_path / "venv" / "bin" / "vocabshard", "--help", cwd=str(tmp_path))
    assert "bench" in told.stdout
