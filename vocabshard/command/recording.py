"""Writing a file of scores while they are made: `FILE.partial` grows by whole records and becomes FILE at the end.

What stops a run, a full disk or a signal, leaves a `.partial` of whole records, from which the same command goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vocabshard.command.errors import InputError
from vocabshard.command.records import as_float, as_line, bits_of, is_token


def partial_of(path: Path) -> Path:
    """Where the records of a file of scores are until it is whole."""
    return path.with_name(path.name + ".partial")


class Recording:
    """`done` records of this run's tokens are in `partial`; `add` appends more, `finish` makes it the file `path`."""

    def __init__(self, path: Path, header: Mapping[str, Any], ids: Sequence[int]) -> None:
        """Reads what an interrupted run of the same header left. Raises InputError when it was another run's."""
        self.path, self.partial = path, partial_of(path)
        self.done, self.sum_logp = 0, 0.0
        self._header = as_line(header)
        self._length = 0  # bytes that are whole records
        self._file: int | None = None
        try:
            if self.partial.exists():
                self._lock()
                self._read(ids)
        except OSError as error:
            raise InputError(f"--out {path}: {self.partial} cannot be read: {error.strerror}") from error
        except InputError:
            self.close()
            raise

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Appends the records of the next tokens, by one write."""
        self._write((b"" if self._length else self._header) + b"".join(map(as_line, records)))
        for record in records:
            self._count(record)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Appends the summary and gives the file its name; what had that name before is replaced."""
        self._write((b"" if self._length else self._header) + as_line(summary))
        try:
            assert self._file is not None
            os.fsync(self._file)
            os.replace(self.partial, self.path)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Lets go of the file, finished or not."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _count(self, record: Mapping[str, Any]) -> None:
        self.done += 1
        self.sum_logp += as_float(bits_of(record)[0])

    def _lock(self) -> None:
        """Opens the file for this process alone; never through a symbolic link, which may lead to anybody's file."""
        self._file = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"--out {self.path}: another run is writing {self.partial}") from error

    def _read(self, ids: Sequence[int]) -> None:
        """Takes the longest run of whole records from the beginning."""
        lines = self.partial.read_bytes().split(b"\n")[:-1]
        found = [_parse(line) for line in lines]
        if not found or found[0].get("type") != "header":
            return
        expected = json.loads(self._header)
        if found[0] != expected:
            differing = sorted(key for key in {*expected, *found[0]} if found[0].get(key) != expected.get(key))
            raise InputError(
                f"--out {self.path}: {self.partial} is what another run left, with other {', '.join(differing)}; "
                "repeat that run to finish it, remove the file, or choose another --out"
            )
        self._length = len(lines[0]) + 1
        for line, record in zip(lines[1:], found[1:], strict=True):
            if self.done == len(ids) or not is_token(record, self.done) or record["id"] != ids[self.done]:
                break
            self._length += len(line) + 1
            self._count(record)

    def _write(self, content: bytes) -> None:
        try:
            if self._file is None:
                self._lock()
            assert self._file is not None
            os.ftruncate(self._file, self._length)
            os.lseek(self._file, self._length, os.SEEK_SET)
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
            self._length += len(content)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> InputError:
        if self._file is not None and self.done:
            with contextlib.suppress(OSError):  # else the next run does it
                os.ftruncate(self._file, self._length)  # without the part of a record that found room
            kept = f"{self.done} tokens are kept in {self.partial}, and the same command goes on from there"
        else:
            if self._file is not None:
                self.partial.unlink(missing_ok=True)
            kept = "nothing is kept"
        return InputError(f"--out {self.path}: cannot be written: {error.strerror}; {kept}")


def _parse(line: bytes) -> dict[str, Any]:
    """A record, or an empty one of a line that is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
