"""`vocabshard compare`: exit codes, counts, what is bad input, and the file format it reads."""

import json
import math
import struct
from pathlib import Path

import pytest

from vocabshard.command import main
from vocabshard.command.compare import ratio_statistics
from vocabshard.command.records import FORMAT, as_float, as_line, read_scores, token_record


def bits_of(*values):
    return struct.unpack(">III", struct.pack(">3f", *values))


PRINTS = ("0" * 16, "1" * 32, "2" * 16)


def records(tokens, header=None, prints=None):
    """The records of a file of scores; `tokens` are (id, (logp, lse, entropy) or their bits)."""
    yield {"type": "header", "format": FORMAT, "tp": 1, **(header or {})}
    for index, (token, values) in enumerate(tokens):
        bits = values if isinstance(values[0], int) else bits_of(*values)
        yield token_record(index, 0, token, f"t{token}", bits, (prints or {}).get(index, PRINTS))
    yield {"type": "summary", "tokens": len(tokens)}


TOKENS = [(5, (-1.5, 4.0, 2.0)), (7, (-0.25, 3.0, 1.0)), (5, (-8.0, 5.0, 0.5))]


@pytest.fixture
def write(tmp_path):
    def write(name, tokens, header=None, prints=None):
        (tmp_path / name).write_bytes(b"".join(map(as_line, records(tokens, header, prints))))
        return str(tmp_path / name)

    return write


def compare(capsys, *arguments):
    code = main(["compare", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_equal(write, capsys):
    code, out, err = compare(capsys, write("a", TOKENS), write("b", TOKENS, {"tp": 4}))
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "tokens              3 (0 differ)",
        "differing bytes     0 of 36",
        "largest difference  logp 0  lse 0  entropy 0",
        "ratio of B to A     mean 1  min 1  max 1  (0 not 1, 0 not finite)",
        "K3                  mean 0  max 0",
        "headers differ in   tp",
        "equal",
    ]


def test_one_bit(write, capsys):
    changed = list(TOKENS)
    logp, lse, entropy = bits_of(*TOKENS[1][1])
    changed[1] = (7, (logp ^ 1, lse, entropy))
    a, b = write("a", TOKENS), write("b", changed)
    code, out, _ = compare(capsys, a, b, "--json")
    result = json.loads(out)
    assert code == 1
    assert not result["equal"]
    assert (result["tokens"], result["differing_tokens"]) == (3, 1)
    assert (result["bytes"], result["differing_bytes"]) == (36, 1)
    assert result["largest_difference"] == {"logp": 2.0**-25, "lse": 0.0, "entropy": 0.0}
    first = result["first_difference"]
    assert (first["index"], first["id"], first["field"], first["a"]) == (1, 7, "logp", -0.25)
    assert (first["a_bits"], first["b_bits"]) == ("be800000", "be800001")
    code, out, _ = compare(capsys, a, b)
    assert code == 1
    assert out.splitlines()[-1] == "different"
    assert "first difference    token 1 (id 7, 't7'): logp -0.25 (be800000)" in out


def test_counts_over_all_fields(write, capsys):
    changed = [(5, (-1.5, 4.5, 2.0)), TOKENS[1], (5, (-8.0, -5.0, 1000.0))]
    code, out, _ = compare(capsys, write("a", TOKENS), write("b", changed), "--json")
    result = json.loads(out)
    assert code == 1
    # 4 -> 4.5: 40800000 -> 40900000; 5 -> -5: one byte; 0.5 -> 1000: 3f000000 -> 447a0000
    assert result["differing_bytes"] == 1 + 1 + 2
    assert result["differing_tokens"] == 2
    assert result["largest_difference"] == {"logp": 0.0, "lse": 10.0, "entropy": 999.5}
    assert result["first_difference"]["field"] == "lse"


def test_not_finite_and_signed_zero(write, capsys):
    """NaN beside a number is a difference without a size; -0 beside +0 one of size 0; NaNs of equal bits are equal."""
    a = [(1, (math.nan, -math.inf, 0.0)), (2, (-1.0, 1.0, 1.0))]
    same = write("a", a), write("same", a)
    assert compare(capsys, *same)[0] == 0
    b = [(1, (math.nan, -math.inf, -0.0)), (2, (math.nan, 1.0, 1.0))]
    code, out, _ = compare(capsys, same[0], write("b", b), "--json")
    result = json.loads(out, parse_constant=pytest.fail)
    assert code == 1
    assert result["largest_difference"] == {"logp": None, "lse": 0.0, "entropy": 0.0}
    assert result["first_difference"]["field"] == "entropy"
    assert result["differing_tokens"] == 2
    assert "logp not finite" in compare(capsys, same[0], str(same[0]).replace("/a", "/b"))[1]


def test_values_survive_the_file(write):
    awkward = [(3, (-1e-45, 3.4028234663852886e38, 1e-40)), (4, (-math.inf, math.inf, math.nan))]
    read = read_scores(write("a", awkward))
    assert read.bits == [bits_of(*values) for _, values in awkward]
    assert as_float(read.bits[0][0]) == struct.unpack(">f", struct.pack(">f", -1e-45))[0]
    path = write("b", awkward)
    for line in Path(path).read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{path} holds {name}, which is not JSON"))


def test_other_tokens(write, capsys):
    """Another token is a difference, whatever its bits; its ratio says nothing. Another number of them is an error."""
    other = [(5, (-1.25, 4.0, 2.0)), (8, TOKENS[1][1]), TOKENS[2]]
    code, out, _ = compare(capsys, write("a", TOKENS), write("b", other), "--json")
    result = json.loads(out)
    assert code == 1
    assert result["differing_tokens"] == 2
    assert result["explained_by"] == {"hidden states": 0, "weights": 0, "targets": 1, "head": 1}
    assert result["ratio"]["mean"] == pytest.approx((math.exp(0.25) + 1) / 2)
    _, out, _ = compare(capsys, write("a", TOKENS), write("b", [TOKENS[0], other[1], TOKENS[2]]))
    assert "first difference    token 1 (id 7, 't7')" in out and "in B id 8 ('t8')" in out
    code, out, err = compare(capsys, write("a", TOKENS), write("b", TOKENS[:2]))
    assert (code, out) == (2, "")
    assert err == "vocabshard: error: not the same tokens: 3 in A and 2 in B: the input differs\n"


def test_ratios_and_k3(write, capsys):
    """rho = exp(B - A) and rho - 1 - log rho, also where it is far below the rounding of rho."""
    tiny = struct.unpack(">f", struct.pack(">f", -0.25 * (1 + 2**-23)))[0]
    b = [(5, (-1.0, 4.0, 2.0)), (7, (tiny, 3.0, 1.0)), (5, (-8.5, 5.0, 0.5))]
    _, out, _ = compare(capsys, write("a", TOKENS), write("b", b), "--json")
    ratio = json.loads(out)["ratio"]
    logs = [0.5, tiny + 0.25, -0.5]
    k3 = [math.exp(0.5) - 1.5, (tiny + 0.25) ** 2 / 2, math.exp(-0.5) - 0.5]
    assert (ratio["not_1"], ratio["not_finite"]) == (3, 0)
    assert ratio["mean"] == pytest.approx(sum(map(math.exp, logs)) / 3)
    assert (ratio["min"], ratio["max"]) == (math.exp(-0.5), math.exp(0.5))
    assert (ratio["k3_mean"], ratio["k3_max"]) == (pytest.approx(sum(k3) / 3), pytest.approx(k3[0]))
    assert all(value >= 0 for value in map(lambda x: ratio_statistics([x])["k3_max"], (tiny + 0.25, 1e-12, -1e-12)))
    far = ratio_statistics([1e4, -1e4, math.nan, math.inf])
    assert far["not_finite"] == 2 and math.isfinite(far["max"]) and far["min"] == 0


@pytest.mark.parametrize("cause", range(3))
def test_what_explains_a_difference(write, capsys, cause):
    """The fingerprint that differs at the tokens that do; what differs at tokens that do not explains nothing."""
    changed = [(5, (-1.5, 4.0, 2.5)), TOKENS[1], TOKENS[2]]
    other = tuple("f" * len(p) if i == cause else p for i, p in enumerate(PRINTS))
    _, out, _ = compare(capsys, write("a", TOKENS), write("b", changed, prints={0: other}), "--json")
    name = ("hidden states", "weights", "targets")[cause]
    assert {key: count for key, count in json.loads(out)["explained_by"].items() if count} == {name: 1}
    assert json.loads(out)["first_difference"]["causes"] == [name]
    _, out, _ = compare(capsys, write("a", TOKENS), write("b", changed, prints={1: other}))
    assert "tokens explained by head 1\nhead                nothing that is recorded\n" in out


def test_the_head_explains_by_what_can_change_bits(write, capsys):
    """What the contract says does not matter only where it is not borne, or where nothing else differs."""
    changed = [(5, (-1.5, 4.0, 2.5)), TOKENS[1], TOKENS[2]]

    def head(bearing=True, ranges=((0, 2),), cap=None):
        ran = {"contract_bearing": bearing, "shard_ranges": ranges, "softcap": cap, "fingerprint": str(cap)}
        return {"provenance": ran}

    moved, cap = "shard_ranges [[0, 2]] and [[0, 3]]", "softcap None and 30.0"
    for other, expected in (
        (head(ranges=((0, 3),), cap=30.0), cap),
        (head(ranges=((0, 3),)), moved),
        (head(False, ((0, 3),), 30.0), f"contract_bearing True and False; {moved}; {cap}"),
    ):
        _, out, _ = compare(capsys, write("a", TOKENS, head()), write("b", changed, other))
        assert f"head                {expected}\n" in out


def test_plot(write, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    a = write("a", [*TOKENS, (1, (math.nan, 1.0, 1.0))])
    pictures = []
    for name, tokens in (("same", TOKENS), ("other", [(5, (-1.0, 4.0, 2.0)), *TOKENS[1:]])):
        b = write(name, [*tokens, (1, (-1.0, 1.0, 1.0))])
        assert compare(capsys, a, b, "--plot", tmp_path / f"{name}.png")[0] == 1
        pictures.append((tmp_path / f"{name}.png").read_bytes())
        assert pictures[-1].startswith(b"\x89PNG")
    assert pictures[0] != pictures[1]
    code, out, err = compare(capsys, a, a, "--plot", tmp_path / "nowhere" / "x.png")
    assert (code, out) == (2, "") and "--plot" in err and err.count("\n") == 1


def break_lines(change):
    def apply(path):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(change(lines)))

    return apply


BROKEN = {
    "missing": (lambda path: path.unlink(), "cannot be read: No such file"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "cannot be read: Is a directory"),
    "empty": (lambda path: path.write_text(""), ":1: expected the header"),
    "binary": (lambda path: path.write_bytes(b"\xff\xfe\0"), "not UTF-8"),
    "no header": (break_lines(lambda lines: lines[1:]), ":1: expected the header"),
    "another format": (break_lines(lambda lines: ['{"type": "header"}\n', *lines[1:]]), ":1: expected the header"),
    "a provenance that is none": (
        break_lines(lambda lines: [lines[0].replace('"tp": 1', '"provenance": [1]'), *lines[1:]]),
        ":1: expected a JSON object as the header's provenance",
    ),
    "no summary": (break_lines(lambda lines: lines[:-1]), ":4: expected the summary: the file is not whole"),
    "cut in a line": (break_lines(lambda lines: [*lines[:2], lines[2][:20]]), ":3: not JSON"),
    "a token left out": (break_lines(lambda lines: [*lines[:2], *lines[3:]]), ":3: expected the record of token 1"),
    "last token left out": (
        break_lines(lambda lines: [*lines[:3], lines[4]]),
        "summary counts 3 tokens, the file holds 2",
    ),
    "no bits": (break_lines(lambda lines: [s.replace('"bits"', '"bats"') for s in lines]), ":2: expected the record"),
    "bad bits": (break_lines(lambda lines: [s.replace("bfc0", "zzzz") for s in lines]), ":2: expected the record"),
    "no fingerprint": (
        break_lines(lambda lines: [s.replace('"weight"', '"wait"') for s in lines]),
        ":2: expected the record",
    ),
    "a list": (break_lines(lambda lines: [lines[0], "[1]\n", *lines[2:]]), ":2: expected a JSON object"),
}


def test_ratios_beyond_a_double(write, capsys):
    """Of a score that was nearly impossible: a sum of the ratios would overflow."""
    low, high = ([(7, (logp, 0.0, 0.0))] * 20_000 for logp in (-1e4, 0.0))
    code, out, err = compare(capsys, write("a", low), write("b", high), "--json")
    assert (code, err) == (1, "") and json.loads(out)["ratio"]["mean"] > 1e250


@pytest.mark.parametrize("side", [0, 1])
def test_picture_over_the_input(write, capsys, side):
    files = [write("a", TOKENS), write("b", TOKENS)]
    code, _, err = compare(capsys, *files, "--plot", files[side])
    assert code == 2 and "is the input" in err
    assert compare(capsys, *files)[0] == 0


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("kind", BROKEN)
def test_bad_file(write, tmp_path, capsys, kind, side):
    damage, message = BROKEN[kind]
    files = [write("good", TOKENS), write("bad", TOKENS)]
    damage(tmp_path / "bad")
    code, out, err = compare(capsys, *(files if side else files[::-1]))
    assert (code, out) == (2, "")
    assert err.startswith("vocabshard: error: ")
    assert err.count("\n") == 1
    assert message in err
