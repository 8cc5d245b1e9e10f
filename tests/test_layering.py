"""Data flows one way: what may import what, and who may name a collective."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vocabshard"


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("folder, other", [("kernels", "dist"), ("dist", "kernels")])
def test_kernels_and_dist_do_not_know_each_other(folder: str, other: str) -> None:
    files = list((PACKAGE / folder).glob("*.py"))
    assert files
    for path in files:
        wrong = [name for name in imports(path) if name.startswith(f"vocabshard.{other}")]
        assert not wrong, f"{path.name} imports {wrong}"


def test_only_the_passes_import_both() -> None:
    for path in PACKAGE.glob("*.py"):
        names = imports(path)
        both = [any(n.startswith(f"vocabshard.{part}") for n in names) for part in ("kernels", "dist")]
        # plan.py takes the choice and the agreement from them, not the kernels; fingerprint.py adds up integers
        allowed = (
            "fingerprint.py",
            "passes.py",
            "plan.py",
            "cuts.py",
            "best.py",
            "sampled.py",
        )  # the last three are sampling's passes
        assert not all(both) or path.name in allowed, path.name


def test_only_gather_names_collectives() -> None:
    collective = re.compile(
        r"\b(dist|distributed)\.(all_|reduce|broadcast|gather|scatter|send|recv|isend|irecv|barrier)\w*\("
    )
    for path in PACKAGE.rglob("*.py"):
        if path.name in ("gather.py",) or "testing" in path.parts or "command" in path.parts:
            continue
        assert not collective.search(path.read_text()), path


def test_package_imports_nothing_heavy() -> None:
    heavy = ("transformers", "triton", "safetensors", "tokenizers", "matplotlib", "numpy")
    for path in PACKAGE.rglob("*.py"):
        top = {
            name.split(".")[0]
            for node in ast.parse(path.read_text()).body
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        }
        if path.name.startswith("triton_"):
            continue
        assert not top & set(heavy), f"{path} imports {top & set(heavy)} when it is imported"


def test_importing_the_package_imports_no_compiler() -> None:
    """Torch's own decorators for torch.compile do, for seconds in every process."""
    code = "import sys, vocabshard; print([m for m in ('torch._dynamo', 'triton', 'sympy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
