"""The JSON Lines file of scores: one header, one record a token, one summary.

A token's `bits` are the three fp32 values logp, lse and entropy as 8 hexadecimal digits each: the numbers beside them
are for reading, and null where they are not finite.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vocabshard.command.errors import InputError, first_line

FORMAT = "vocabshard-scores-1"
FIELDS = ("logp", "lse", "entropy")


@dataclass(frozen=True)
class Scores:
    """A file that was read: `bits` holds three uint32 a token, in the order of FIELDS."""

    header: Mapping[str, Any]
    ids: list[int]
    texts: list[str]
    bits: list[tuple[int, int, int]]
    summary: Mapping[str, Any]


def as_float(bits: int) -> float:
    """The fp32 value with these 32 bits."""
    return struct.unpack(">f", bits.to_bytes(4, "big"))[0]


def token_record(index: int, token: int, text: str, bits: tuple[int, int, int]) -> dict[str, Any]:
    """One token's record."""
    values = dict(zip(FIELDS, map(as_float, bits), strict=True))
    return {
        "type": "token",
        "index": index,
        "id": token,
        "text": text,
        **{name: value if math.isfinite(value) else None for name, value in values.items()},
        "bits": "".join(f"{word:08x}" for word in bits),
    }


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes the whole file under another name beside `path` and renames it: `path` is complete or untouched."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"--out {path}: cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read_scores(path: str | Path) -> Scores:
    """Reads a file that `write_records` wrote whole. Raises InputError that names the line which is not as expected."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8: not a file of scores") from error
    if lines[-1] == "":
        lines.pop()
    records = [_parse(path, number, line) for number, line in enumerate(lines, 1)]
    if not records or records[0]["type"] != "header" or records[0].get("format") != FORMAT:
        raise InputError(f"{path}:1: expected the header of {FORMAT}")
    if records[-1]["type"] != "summary":
        raise InputError(f"{path}:{len(records)}: expected the summary: the file is not whole")
    tokens = records[1:-1]
    for number, record in enumerate(tokens, 2):
        if not _is_token(record, number - 2):
            raise InputError(
                f"{path}:{number}: expected the record of token {number - 2}, with its id, text and 24 "
                "hexadecimal digits of bits"
            )
    if records[-1].get("tokens") != len(tokens):
        raise InputError(
            f"{path}: the summary counts {records[-1].get('tokens')!r} tokens, the file holds {len(tokens)}"
        )
    bits = [struct.unpack(">III", bytes.fromhex(record["bits"])) for record in tokens]
    return Scores(records[0], [r["id"] for r in tokens], [r["text"] for r in tokens], bits, records[-1])


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}:{number}: not JSON: {first_line(error)}") from error
    if not isinstance(record, dict) or not isinstance(record.get("type"), str):
        raise InputError(f"{path}:{number}: expected a JSON object with a type")
    return record


def _is_token(record: Mapping[str, Any], index: int) -> bool:
    bits = record.get("bits")
    return (
        record["type"] == "token"
        and record.get("index") == index
        and type(record.get("id")) is int
        and isinstance(record.get("text"), str)
        and isinstance(bits, str)
        and len(bits) == 24
        and set(bits) <= set("0123456789abcdef")
    )
