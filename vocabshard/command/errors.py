"""The one kind of error that the command reports as a line instead of a traceback."""

from __future__ import annotations

import importlib
from types import ModuleType

EXIT_BAD_INPUT = 2


class InputError(Exception):
    """What the user gave cannot be used; its text is the whole message.

    `printed` says that another process prints this message, so that it appears once.
    """

    def __init__(self, message: str, *, printed: bool = False) -> None:
        super().__init__(message)
        self.printed = printed


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the name of its type when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def require(module: str, extra: str = "score") -> ModuleType:
    """Imports a module that only the optional dependencies named `extra` bring."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise InputError(
            f"this command needs {name} ({first_line(error)}): pip install 'vocabshard[{extra}]'"
        ) from error
