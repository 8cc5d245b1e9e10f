"""The JSON Lines file of scores: one header, one record a token, one summary.

A token's `bits` are the three fp32 values logp, lse and entropy as 8 hexadecimal digits each: the numbers beside them
are for reading, and null where they are not finite. `hidden`, `weight` and `target` are fingerprints of what the values
were computed from.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vocabshard.command.errors import InputError, first_line

FORMAT = "vocabshard-scores-2"
FIELDS = ("logp", "lse", "entropy")
FINGERPRINTS = {"hidden": 16, "weight": 32, "target": 16}  # and their hexadecimal digits


@dataclass(frozen=True)
class Scores:
    """A file that was read: `bits` holds three uint32 a token, in the order of FIELDS, `prints` the FINGERPRINTS."""

    header: Mapping[str, Any]
    ids: list[int]
    texts: list[str]
    bits: list[tuple[int, int, int]]
    prints: list[tuple[str, str, str]]
    summary: Mapping[str, Any]


def as_float(bits: int) -> float:
    """The fp32 value with these 32 bits."""
    return struct.unpack(">f", bits.to_bytes(4, "big"))[0]


def bits_of(record: Mapping[str, Any]) -> tuple[int, int, int]:
    """The three uint32 of a token's record."""
    return struct.unpack(">III", bytes.fromhex(record["bits"]))


def token_record(
    index: int, sequence: int, token: int, text: str, bits: Sequence[int], prints: Sequence[str]
) -> dict[str, Any]:
    """One token's record."""
    values = dict(zip(FIELDS, map(as_float, bits), strict=True))
    return {
        "type": "token",
        "index": index,
        "sequence": sequence,
        "id": token,
        "text": text,
        **{name: value if math.isfinite(value) else None for name, value in values.items()},
        "bits": "".join(f"{word:08x}" for word in bits),
        **dict(zip(FINGERPRINTS, prints, strict=True)),
    }


def as_line(record: Mapping[str, Any]) -> bytes:
    """A record as it stands in the file."""
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()


def is_token(record: Mapping[str, Any], index: int) -> bool:
    """Whether a record is whole and the one of the token `index`."""
    return (
        record.get("type") == "token"
        and record.get("index") == index
        and type(record.get("id")) is int
        and type(record.get("sequence")) is int
        and isinstance(record.get("text"), str)
        and _is_hexadecimal(record.get("bits"), 24)
        and all(_is_hexadecimal(record.get(name), digits) for name, digits in FINGERPRINTS.items())
    )


def read_scores(path: str | Path) -> Scores:
    """Reads a whole file of scores. Raises InputError that names the line which is not as expected."""
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
    if not isinstance(records[0].get("provenance", {}), dict):
        raise InputError(f"{path}:1: expected a JSON object as the header's provenance")
    if records[-1]["type"] != "summary":
        raise InputError(f"{path}:{len(records)}: expected the summary: the file is not whole")
    tokens = records[1:-1]
    for number, record in enumerate(tokens, 2):
        if not is_token(record, number - 2):
            raise InputError(
                f"{path}:{number}: expected the record of token {number - 2}, with its id, text, 24 hexadecimal "
                f"digits of bits, and the fingerprints {', '.join(FINGERPRINTS)}"
            )
    if records[-1].get("tokens") != len(tokens):
        raise InputError(
            f"{path}: the summary counts {records[-1].get('tokens')!r} tokens, the file holds {len(tokens)}"
        )
    return Scores(
        records[0],
        [record["id"] for record in tokens],
        [record["text"] for record in tokens],
        [bits_of(record) for record in tokens],
        [(record["hidden"], record["weight"], record["target"]) for record in tokens],
        records[-1],
    )


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}:{number}: not JSON: {first_line(error)}") from error
    if not isinstance(record, dict) or not isinstance(record.get("type"), str):
        raise InputError(f"{path}:{number}: expected a JSON object with a type")
    return record


def _is_hexadecimal(value: Any, digits: int) -> bool:
    return isinstance(value, str) and len(value) == digits and set(value) <= set("0123456789abcdef")
