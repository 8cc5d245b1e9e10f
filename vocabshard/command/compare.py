"""`vocabshard compare A B`: are two files of scores the same, byte for byte; if not, where, by how much, and why."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vocabshard.command.errors import InputError, require
from vocabshard.command.files import writable
from vocabshard.command.records import FIELDS, Scores, as_float, read_scores
from vocabshard.contract import BIT_NEUTRAL

# What a token's values come from, in the order of FINGERPRINTS, and the operator, where all of them are the same.
INPUTS = ("hidden states", "weights", "targets")
HEAD = "head"
LARGEST = 600.0  # of a log ratio: a sum of any number of exponentials of it fits a double


def compare(args: argparse.Namespace) -> int:
    """Prints the comparison; 0 when all bytes are equal, 1 when some differ.

    Raises InputError when a file is not whole, or when the two do not hold the same number of tokens.
    """
    plot = None if args.plot is None else writable("--plot", args.plot, args.first, args.second)
    if plot is not None:
        require("matplotlib", "plot")
    a, b = read_scores(args.first), read_scores(args.second)
    result = compare_scores(a, b)
    if plot is not None:
        from vocabshard.command.plot import plot_ratios

        plot_ratios(log_ratios(a, b), plot, f"{Path(args.second).name} to {Path(args.first).name}")
    print(json.dumps(result) if args.json else as_text(result))
    return 0 if result["equal"] else 1


def compare_scores(a: Scores, b: Scores) -> dict[str, Any]:
    """What differs between the fp32 values of two scorings, token by token, and which of their inputs did.

    The largest differences are of the values as fp64; null where a value is NaN or infinite on one side only.
    """
    if len(a.ids) != len(b.ids):
        raise InputError(f"not the same tokens: {len(a.ids)} in A and {len(b.ids)} in B: the input differs")
    differing_bytes = differing_tokens = 0
    largest: dict[str, float] = dict.fromkeys(FIELDS, 0.0)
    explained = dict.fromkeys((*INPUTS, HEAD), 0)
    first: dict[str, Any] | None = None
    for index, (x, y) in enumerate(zip(a.bits, b.bits, strict=True)):
        if x == y and a.ids[index] == b.ids[index]:
            continue
        differing_tokens += 1
        causes = _causes(a, b, index)
        for cause in causes:
            explained[cause] += 1
        for name, p, q in zip(FIELDS, x, y, strict=True):
            differing_bytes += 4 - (p ^ q).to_bytes(4, "big").count(0)
            largest[name] = max(largest[name], _distance(p, q))
        if first is None:
            first = _difference(a, b, index, causes)
    return {
        "equal": differing_tokens == 0,
        "tokens": len(a.ids),
        "differing_tokens": differing_tokens,
        "bytes": 4 * len(FIELDS) * len(a.ids),
        "differing_bytes": differing_bytes,
        "largest_difference": {name: _number(value) for name, value in largest.items()},
        "ratio": ratio_statistics(log_ratios(a, b)),
        "explained_by": explained,
        "head_differences": _head_differences(a.header, b.header),
        "first_difference": first,
        "header_differences": sorted(key for key in {*a.header, *b.header} if a.header.get(key) != b.header.get(key)),
    }


def log_ratios(a: Scores, b: Scores) -> list[float]:
    """logp of B less logp of A in fp64, of the tokens whose ids are the same: 0 where the bits are, NaN for NaN."""
    found = []
    for p, q, id_a, id_b in zip(a.bits, b.bits, a.ids, b.ids, strict=True):
        if id_a == id_b:
            found.append(0.0 if p[0] == q[0] else as_float(q[0]) - as_float(p[0]))
    return found


def ratio_statistics(found: Sequence[float]) -> dict[str, Any]:
    """Of the ratios rho = exp(log ratio), and of K3 = rho - 1 - log rho, which is 0 for rho = 1 and positive elsewhere.

    K3 is the estimator of the divergence of two policies whose samples these are (Schulman, "Approximating KL
    divergence"). Over the finite ratios; null where there are none.
    """
    finite = [value for value in found if math.isfinite(value)]
    ratios = [math.exp(min(value, LARGEST)) for value in finite]
    k3 = [math.expm1(min(value, LARGEST)) - value for value in finite]
    count = len(finite)
    return {
        "mean": math.fsum(ratios) / count if count else None,
        "min": min(ratios, default=None),
        "max": max(ratios, default=None),
        "not_1": sum(value != 0 for value in found),
        "not_finite": len(found) - count,
        "k3_mean": math.fsum(k3) / count if count else None,
        "k3_max": max(k3, default=None),
    }


def as_text(result: Mapping[str, Any]) -> str:
    """The comparison for people, a line a fact."""
    largest = "  ".join(
        f"{name} {'not finite' if value is None else format(value, '.3g')}"
        for name, value in result["largest_difference"].items()
    )
    ratio = {name: "none" if value is None else format(value, ".7g") for name, value in result["ratio"].items()}
    lines = [
        f"tokens              {result['tokens']} ({result['differing_tokens']} differ)",
        f"differing bytes     {result['differing_bytes']} of {result['bytes']}",
        f"largest difference  {largest}",
        f"ratio of B to A     mean {ratio['mean']}  min {ratio['min']}  max {ratio['max']}  "
        f"({ratio['not_1']} not 1, {ratio['not_finite']} not finite)",
        f"K3                  mean {ratio['k3_mean']}  max {ratio['k3_max']}",
    ]
    if (first := result["first_difference"]) is not None:
        causes = (f"{name} {count}" for name, count in result["explained_by"].items() if count)
        lines.append(f"tokens explained by {', '.join(causes)}")
        if result["explained_by"][HEAD]:
            lines.append(f"head                {'; '.join(result['head_differences']) or 'nothing that is recorded'}")
        lines.append(
            f"first difference    token {first['index']} (id {first['id']}, {first['text']!r}): {first['field']} "
            f"{first['a']} ({first['a_bits']}) and {first['b']} ({first['b_bits']}), by {', '.join(first['causes'])}"
        )
        if first["id"] != first["b_id"]:
            lines.append(f"                    in B id {first['b_id']} ({first['b_text']!r})")
    if result["header_differences"]:
        lines.append(f"headers differ in   {', '.join(result['header_differences'])}")
    lines.append("equal" if result["equal"] else "different")
    return "\n".join(lines)


def _causes(a: Scores, b: Scores, index: int) -> list[str]:
    """Which of a token's inputs differ; the head where none does."""
    pairs = zip(INPUTS, a.prints[index], b.prints[index], strict=True)
    differing = [name for name, x, y in pairs if x != y]
    if a.ids[index] != b.ids[index] and INPUTS[2] not in differing:
        differing.append(INPUTS[2])
    return differing or [HEAD]


def _difference(a: Scores, b: Scores, index: int, causes: list[str]) -> dict[str, Any]:
    """The first field of a token that differs; logp where only the id does."""
    at = next((i for i, (p, q) in enumerate(zip(a.bits[index], b.bits[index], strict=True)) if p != q), 0)
    p, q = a.bits[index][at], b.bits[index][at]
    return {
        "index": index,
        "id": a.ids[index],
        "text": a.texts[index],
        "b_id": b.ids[index],
        "b_text": b.texts[index],
        "field": FIELDS[at],
        "a": _number(as_float(p)),
        "b": _number(as_float(q)),
        "a_bits": f"{p:08x}",
        "b_bits": f"{q:08x}",
        "causes": causes,
    }


def _head_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What the headers say of the operator, where they differ: "projection_id fma-chain and library".

    What the contract says cannot change a byte is named only where nothing else differs.
    """
    x, y = (dict(header.get("provenance") or {}) for header in (a, b))
    differing = [name for name in {**x, **y} if x.get(name) != y.get(name) and name != "fingerprint"]
    borne = bool(x.get("contract_bearing")) and bool(y.get("contract_bearing"))
    relevant = [name for name in differing if not (borne and name in BIT_NEUTRAL)]
    return [f"{name} {x.get(name)} and {y.get(name)}" for name in relevant or differing]


def _distance(p: int, q: int) -> float:
    """Of two fp32 values given by their bits; infinite where one side alone is not finite."""
    x, y = as_float(p), as_float(q)
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0  # +0 and -0 too
    distance = abs(x - y)
    return math.inf if math.isnan(distance) else distance


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
