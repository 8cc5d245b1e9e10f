"""The extension takes the arguments that its stub names, in their order and of their types; no GPU is needed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from vocabshard import _C

STUB = ast.parse((Path(_C.__file__).parent / "_C.pyi").read_text())
VALUES = {"int": 0, "float": 0.0, "bool": False, "list[int]": [64, 100]}


def arguments(name: str, method: str) -> tuple[list[object], dict[str, object]]:
    """Nothing's values, positional and by name, of the stub's types."""
    (owner,) = (node for node in STUB.body if isinstance(node, ast.ClassDef) and node.name == name)
    (function,) = (node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == method)

    def value(argument: ast.arg) -> object:
        assert argument.annotation is not None
        return VALUES[ast.unparse(argument.annotation)]

    named = {argument.arg: value(argument) for argument in function.args.kwonlyargs}
    return [value(argument) for argument in function.args.args[1:]], named


@pytest.mark.parametrize("name", ["Sm90Backward", "Sm90DlogitsKept", "Sm90Forward"])
def test_constructors(name: str) -> None:
    if not hasattr(_C, name):
        pytest.skip("built without CUDA")
    positional, named = arguments(name, "__init__")
    made = getattr(_C, name)(*positional, **named)
    with pytest.raises(TypeError, match="incompatible"):
        getattr(_C, name)(*positional, **named, more=0)
    if name == "Sm90Backward":  # of no rows: it asks for the device, or refuses operands that are nowhere
        positional, named = arguments(name, "launch")
        try:
            made.launch(*positional, **named)
            made.finish()
        except (RuntimeError, ValueError) as error:
            assert "cuda" in str(error) or "TMA" in str(error)
