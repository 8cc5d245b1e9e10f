"""Files that a command is asked to write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from vocabshard.command.errors import InputError


def writable(option: str, name: str, *inputs: str) -> Path:
    """The file that an option names, if it can be written or replaced, and is none of `inputs`. Raises InputError."""
    if "\0" in name:
        raise InputError(f"{option} {name!r}: expected the name of a file, which has no zero byte")
    path = Path(name).resolve()  # a symbolic link stays one: what it names is written
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: the directory {path.parent} does not exist")
    if path.is_dir():
        raise InputError(f"{option} {path}: is a directory, expected the name of a file")
    if path.exists() and not path.is_file():
        raise InputError(f"{option} {path}: is no regular file, expected one or a new name")
    for given in inputs:
        if path.exists() and Path(given).exists() and path.samefile(given):
            raise InputError(f"{option} {path}: is the input {given}, which would be lost; choose another name")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{option} {path}: the directory {path.parent} is not writable")
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # /proc lets root write, and has no room for a file
            pass
    except OSError as error:
        raise InputError(f"{option} {path}: no file can be made in {path.parent}: {error.strerror}") from error
    return path


def write_text(option: str, name: str, text: str) -> None:
    """Writes the file that an option names. Raises InputError."""
    try:
        Path(name).write_text(text)
    except OSError as error:
        raise InputError(f"{option} {name}: cannot be written: {error.strerror}") from error
