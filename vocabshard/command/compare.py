"""`vocabshard compare A B`: are two files of scores the same, byte for byte, and if not, where and by how much."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from typing import Any

from vocabshard.command.errors import InputError
from vocabshard.command.records import FIELDS, Scores, as_float, read_scores


def compare(args: argparse.Namespace) -> int:
    """Prints the comparison; 0 when all bytes are equal, 1 when some differ.

    Raises InputError when a file is not whole or the two do not hold the same tokens.
    """
    result = compare_scores(read_scores(args.first), read_scores(args.second))
    print(json.dumps(result) if args.json else as_text(result))
    return 0 if result["equal"] else 1


def compare_scores(a: Scores, b: Scores) -> dict[str, Any]:
    """Counts what differs between the fp32 values of two scorings of the same tokens.

    The largest differences are of the values as fp64; null where a value is NaN or infinite on one side only.
    """
    _check_same_tokens(a, b)
    differing_bytes = differing_tokens = 0
    largest: dict[str, float] = dict.fromkeys(FIELDS, 0.0)
    first: dict[str, Any] | None = None
    for index, (x, y) in enumerate(zip(a.bits, b.bits, strict=True)):
        if x == y:
            continue
        differing_tokens += 1
        for name, p, q in zip(FIELDS, x, y, strict=True):
            if p == q:
                continue
            differing_bytes += 4 - (p ^ q).to_bytes(4, "big").count(0)
            largest[name] = max(largest[name], _distance(as_float(p), as_float(q)))
            if first is None:
                first = {
                    "index": index,
                    "id": a.ids[index],
                    "text": a.texts[index],
                    "field": name,
                    "a": _number(as_float(p)),
                    "b": _number(as_float(q)),
                    "a_bits": f"{p:08x}",
                    "b_bits": f"{q:08x}",
                }
    return {
        "equal": differing_bytes == 0,
        "tokens": len(a.ids),
        "differing_tokens": differing_tokens,
        "bytes": 4 * len(FIELDS) * len(a.ids),
        "differing_bytes": differing_bytes,
        "largest_difference": {name: _number(value) for name, value in largest.items()},
        "first_difference": first,
        "header_differences": _header_differences(a.header, b.header),
    }


def as_text(result: Mapping[str, Any]) -> str:
    """The comparison for people, a line a fact."""
    largest = "  ".join(
        f"{name} {'not finite' if value is None else format(value, '.3g')}"
        for name, value in result["largest_difference"].items()
    )
    lines = [
        f"tokens              {result['tokens']} ({result['differing_tokens']} differ)",
        f"differing bytes     {result['differing_bytes']} of {result['bytes']}",
        f"largest difference  {largest}",
    ]
    if (first := result["first_difference"]) is not None:
        lines.append(
            f"first difference    token {first['index']} (id {first['id']}, {first['text']!r}): {first['field']} "
            f"{first['a']} ({first['a_bits']}) and {first['b']} ({first['b_bits']})"
        )
    if result["header_differences"]:
        lines.append(f"headers differ in   {', '.join(result['header_differences'])}")
    lines.append("equal" if result["equal"] else "different")
    return "\n".join(lines)


def _check_same_tokens(a: Scores, b: Scores) -> None:
    for index, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)):
        if x != y:
            raise InputError(
                f"not the same tokens: token {index} is {x} ({a.texts[index]!r}) in A and {y} "
                f"({b.texts[index]!r}) in B: the text or the tokenizer differs"
            )
    if len(a.ids) != len(b.ids):
        raise InputError(f"not the same tokens: {len(a.ids)} in A and {len(b.ids)} in B: the text differs")


def _distance(x: float, y: float) -> float:
    if x == y:
        return 0.0  # +0 and -0
    if math.isnan(x) and math.isnan(y):
        return 0.0
    distance = abs(x - y)
    return math.inf if math.isnan(distance) else distance


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _header_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in {*a, *b} if a.get(key) != b.get(key))
