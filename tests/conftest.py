"""Skips for hardware that isn't there, decided in one place, and `--require` that turns them into failures."""

import contextlib
import functools
import os
from typing import Any

import pytest
import torch


def missing_sm90() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device that this torch can use"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"the GPU is of compute capability {torch.cuda.get_device_capability()}, not (9, 0)"
    from vocabshard import _C

    return "" if _C.build_info()["cuda"] else "vocabshard._C was built without its CUDA side"


def missing_triton() -> str:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton can't be imported ({error})"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "" if interpreted or torch.cuda.is_available() else "no GPU for triton, and TRITON_INTERPRET=1 is not set"


def missing_multigpu() -> str:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < 2:
        return f"{gpus} GPUs, two or more are needed"
    return "" if torch.distributed.is_nccl_available() else "this torch has no NCCL"


MISSING = {"sm90": missing_sm90, "triton": missing_triton, "multigpu": missing_multigpu}
REQUIRED = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        action="append",
        default=[],
        metavar="WHAT",
        help=f"fail, not skip, where this is missing: {', '.join(MISSING)} (repeat it, or separate by commas)",
    )


def pytest_configure(config: pytest.Config) -> None:
    required = {what for option in config.getoption("--require") for what in option.split(",")}
    if unknown := required - set(MISSING):
        raise pytest.UsageError(f"--require takes {', '.join(MISSING)}; got {', '.join(sorted(unknown))}")
    config.stash[REQUIRED] = required
    if os.environ.get("TRITON_INTERPRET") == "1":
        with contextlib.suppress(
            ImportError, AttributeError
        ):  # no triton, or one with other insides: it only takes longer
            quicken_interpreter()


def quicken_interpreter() -> None:
    """Triton's interpreter spends a third of its time on what it has done or found before.

    Whenever a kernel calls a function it patches the language that the function sees, through the kernel's own module
    most often: once a launch is enough. And for every value it builds the table of numpy's types.
    """
    from triton.language import pointer_type
    from triton.runtime import interpreter

    patch, nothing, launch = interpreter._patch_lang, interpreter._LangPatchScope, interpreter.GridExecutor.__call__
    numpy_type = interpreter._get_np_dtype
    of_scalar = functools.cache(numpy_type)
    patched: set[int] = set()

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) in patched:
            return nothing()
        patched.add(id(fn.__globals__))
        return patch(fn)

    def launch_and_forget(self: Any, *args: Any, **options: Any) -> None:
        try:
            launch(self, *args, **options)
        finally:
            patched.clear()

    def numpy_type_of(kind: Any) -> Any:
        scalar = kind.scalar
        return numpy_type(scalar) if isinstance(scalar, pointer_type) else of_scalar(scalar)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_and_forget
    interpreter._get_np_dtype = numpy_type_of


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for what in mark.args:
            if what not in MISSING:
                pytest.fail(f"needs() takes {', '.join(MISSING)}; got {what!r}", pytrace=False)
            reason = MISSING[what]()
            if reason and what in item.config.stash[REQUIRED]:
                pytest.fail(f"--require {what}: {reason}", pytrace=False)
            if reason:
                pytest.skip(f"needs {what}: {reason}")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same inputs in every run, also where a test draws without a generator of its own."""
    torch.manual_seed(0)
