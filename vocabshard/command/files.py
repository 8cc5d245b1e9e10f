"""Files that a command is asked to write."""

from __future__ import annotations

import os
from pathlib import Path

from vocabshard.command.errors import InputError


def writable(option: str, name: str) -> Path:
    """The file that an option names, if it can be written or replaced. Raises InputError otherwise."""
    path = Path(name).resolve()  # a symbolic link stays one: what it names is written
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: the directory {path.parent} does not exist")
    if path.is_dir():
        raise InputError(f"{option} {path}: is a directory, expected the name of a file")
    if path.exists() and not path.is_file():
        raise InputError(f"{option} {path}: is no regular file, expected one or a new name")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{option} {path}: the directory {path.parent} is not writable")
    return path
