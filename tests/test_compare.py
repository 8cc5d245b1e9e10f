"""`vocabshard compare`: exit codes, counts, what is bad input, and the file format it reads."""

import json
import math
import struct
from pathlib import Path

import pytest

from vocabshard.command import main
from vocabshard.command.errors import InputError
from vocabshard.command.records import FORMAT, as_float, read_scores, token_record, write_records


def bits_of(*values):
    return struct.unpack(">III", struct.pack(">3f", *values))


def records(tokens, header=None):
    """The records of a file of scores; `tokens` are (id, (logp, lse, entropy) or their bits)."""
    yield {"type": "header", "format": FORMAT, "tp": 1, **(header or {})}
    for index, (token, values) in enumerate(tokens):
        bits = values if isinstance(values[0], int) else bits_of(*values)
        yield token_record(index, token, f"t{token}", bits)
    yield {"type": "summary", "tokens": len(tokens)}


TOKENS = [(5, (-1.5, 4.0, 2.0)), (7, (-0.25, 3.0, 1.0)), (5, (-8.0, 5.0, 0.5))]


@pytest.fixture
def write(tmp_path):
    def write(name, tokens, header=None):
        write_records(tmp_path / name, records(tokens, header))
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


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([(5, TOKENS[0][1]), (8, TOKENS[1][1]), TOKENS[2]], "token 1 is 7 ('t7') in A and 8 ('t8') in B"),
        (TOKENS[:2], "3 in A and 2 in B"),
    ],
)
def test_other_tokens(write, capsys, other, message):
    code, out, err = compare(capsys, write("a", TOKENS), write("b", other))
    assert (code, out) == (2, "")
    assert err.startswith("vocabshard: error: not the same tokens: ")
    assert message in err
    assert err.count("\n") == 1


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
    "no summary": (break_lines(lambda lines: lines[:-1]), ":4: expected the summary: the file is not whole"),
    "cut in a line": (break_lines(lambda lines: [*lines[:2], lines[2][:20]]), ":3: not JSON"),
    "a token left out": (break_lines(lambda lines: [*lines[:2], *lines[3:]]), ":3: expected the record of token 1"),
    "last token left out": (
        break_lines(lambda lines: [*lines[:3], lines[4]]),
        "summary counts 3 tokens, the file holds 2",
    ),
    "no bits": (break_lines(lambda lines: [s.replace('"bits"', '"bats"') for s in lines]), ":2: expected the record"),
    "bad bits": (break_lines(lambda lines: [s.replace("bfc0", "zzzz") for s in lines]), ":2: expected the record"),
    "a list": (break_lines(lambda lines: [lines[0], "[1]\n", *lines[2:]]), ":2: expected a JSON object"),
}


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


def test_nothing_is_left_of_a_failed_write(tmp_path):
    """The old file stays, and no other appears, when the records end in an error."""
    path = tmp_path / "scores"
    path.write_text("old")

    def failing():
        yield {"type": "header"}
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        write_records(path, failing())
    assert [file.name for file in tmp_path.iterdir()] == ["scores"]
    assert path.read_text() == "old"
