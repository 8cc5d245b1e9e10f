"""`vocabshard score`: bad input, what the records hold, checkpoints, and one answer whatever the sharding and batch.

Tests that start processes of their own have `ranks` in their names.
"""

import fcntl
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("safetensors")
pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

from vocabshard import launching, weight_fingerprint
from vocabshard.command import checkpoint as checkpoint_module
from vocabshard.command import main
from vocabshard.command import score as score_module
from vocabshard.command.checkpoint import Checkpoint
from vocabshard.command.errors import InputError
from vocabshard.command.hidden import Windows, hidden_states, in_chunks, load_base_model, spans_of
from vocabshard.command.job import choose_sizes, split_rows
from vocabshard.command.plot import plot_scores
from vocabshard.command.records import as_float, as_line, is_token, read_scores, token_record
from vocabshard.command.tokens import ALL, Encoded, load_tokenizer, tokenize

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(launching.__file__).resolve().parent
TINY = ROOT / "examples" / "tiny_lm"
ROWS, REAL = 2560, 2251


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch, tmp_path):
    """Not a rank; and processes import the package that this one has, whatever the working directory holds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """About 330 tokens: more than one window."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((TINY / "text.txt").read_text()[:1100])
    return path


@pytest.fixture
def model(tmp_path):
    """A copy of tiny_lm to damage."""
    copy = tmp_path / "model"
    copy.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, copy)
    return copy


def score(checkpoint, text, out, *options):
    return main(["score", str(checkpoint), str(text), "--out", str(out), "--quiet", *map(str, options)])


@pytest.fixture(scope="module")
def scored(text, tmp_path_factory):
    """The records of one process with the default options."""
    out = tmp_path_factory.mktemp("scored") / "scores.jsonl"
    assert score(TINY, text, out) == 0
    return out


@pytest.fixture(scope="module")
def scored_whole(tmp_path_factory):
    """The same of the whole held-out text."""
    out = tmp_path_factory.mktemp("whole") / "scores.jsonl"
    assert score(TINY, TINY / "text.txt", out) == 0
    assert len(token_lines(out)) >= 5000
    return out


def tokens_of(checkpoint, text):
    return tokenize(load_tokenizer(checkpoint), text.read_text(), "", ALL)


def token_lines(path):
    return Path(path).read_text().splitlines()[1:-1]


def edit_config(**changes):
    def apply(directory):
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


def edit_weights(change):
    def apply(directory):
        weights = load_file(directory / "model.safetensors")
        change(weights)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    return apply


def overwrite(name, content):
    return lambda directory: (directory / name).write_bytes(content)


def remove(*names):
    return lambda directory: [(directory / name).unlink() for name in names]


def cut(name, share):
    def apply(directory):
        path = directory / name
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    return apply


def index(files):
    content = json.dumps({"weight_map": dict.fromkeys(("lm_head.weight",), files)}).encode()
    return overwrite("model.safetensors.index.json", content)


def head_of(value):
    return edit_weights(lambda weights: weights.update({"lm_head.weight": value}))


BAD_CHECKPOINTS = {
    "nothing there": (shutil.rmtree, "expected a directory, found nothing"),
    "a file": (lambda d: (shutil.rmtree(d), d.write_text("x")), "expected a directory, found a file"),
    "no config": (remove("config.json"), "config.json: cannot be read: No such file"),
    "config cut": (cut("config.json", 0.5), "config.json: not JSON"),
    "config not text": (overwrite("config.json", b"\xff\xfe\0"), "config.json: not JSON"),
    "config a list": (overwrite("config.json", b"[]"), "expected a JSON object, got list"),
    "no weights": (remove("model.safetensors"), "found neither"),
    "weights empty": (overwrite("model.safetensors", b""), "not a whole safetensors file"),
    "weights cut": (cut("model.safetensors", 0.9), "not a whole safetensors file"),
    "weights cut in the header": (cut("model.safetensors", 0.0003), "not a whole safetensors file"),
    "weights not safetensors": (overwrite("model.safetensors", b"PK\3\4" * 100), "not a whole safetensors file"),
    "weights are text": (overwrite("model.safetensors", b"version https://git-lfs"), "not a whole safetensors file"),
    "index not JSON": (overwrite("model.safetensors.index.json", b"{"), "index.json: not JSON"),
    "index without map": (overwrite("model.safetensors.index.json", b"{}"), "expected a weight_map"),
    "index names a lost file": (index("model-2.safetensors"), "model-2.safetensors: not found"),
    "index names a lost tensor": (
        overwrite("model.safetensors.index.json", b'{"weight_map": {"head": "model.safetensors"}}'),
        "says that head is in model.safetensors, but it is not",
    ),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "no tokenizer.json, and no other tokenizer"),
    "tokenizer cut": (cut("tokenizer.json", 0.7), "tokenizer.json: not a tokenizer"),
    "tokenizer of another model": (edit_config(real_vocab_size=100), "it belongs to another model"),
    "no head": (edit_weights(lambda weights: weights.pop("lm_head.weight")), "no head"),
    "head of integers": (head_of(torch.zeros(ROWS, 128, dtype=torch.int32)), "expected 2 axes of F32, F16, BF16"),
    "head a vector": (head_of(torch.zeros(ROWS)), "expected 2 axes"),
    "head too narrow": (head_of(torch.zeros(ROWS, 64)), "hidden_size is 128, but lm_head.weight is 2560 x 64"),
    "head too short": (head_of(torch.zeros(2304, 128)), "vocab_size is 2560, but lm_head.weight is 2304 x 128"),
    "no real rows": (edit_config(real_vocab_size=0), "expected 1 to 2560"),
    "too many real rows": (edit_config(real_vocab_size=2561), "expected 1 to 2560"),
    "scaled logits": (edit_config(logits_scaling=8.0), "logits_scaling = 8.0 scales the logits"),
    "no context length": (edit_config(max_position_embeddings=None), "say it with --window"),
    "a context length in words": (edit_config(max_position_embeddings="x"), "expected a positive number of positions"),
    "config nested deeply": (overwrite("config.json", b"[" * 200_000), "config.json: not JSON"),
    "a lost weight": (edit_weights(lambda weights: weights.pop("model.norm.weight")), "missing or of another shape"),
    "a weight of another shape": (
        edit_weights(lambda weights: weights.update({"model.norm.weight": torch.zeros(64)})),
        "missing or of another shape",
    ),
    "an unknown model": (edit_config(model_type="no such model"), "the model cannot be loaded"),
}

BAD_TEXTS = {
    "missing": (lambda path: path.unlink(), "cannot be read: No such file"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "cannot be read: Is a directory"),
    "empty": (lambda path: path.write_bytes(b""), ": empty"),
    "blank": (lambda path: path.write_bytes(b" \n\t\n"), ": empty"),
    "binary": (lambda path: path.write_bytes(b"abc\0def"), "binary: a zero byte at position 3"),
    "not UTF-8": (lambda path: path.write_bytes(b"caf\xe9 noir"), "not UTF-8: byte 0xe9 at position 3"),
}

BAD_OPTIONS = {
    "--tp 0": "--tp: expected 1 to 64 ranks, got 0",
    "--tp 200": "--tp: expected 1 to 64 ranks, got 200",
    "--tp -2": "--tp: expected 1 to 64 ranks, got -2",
    "--tp two": "argument --tp: invalid int value: 'two'",
    "--sizes 1280,1264": "add up to the head's 2560 rows, or 2251 without the padding, got 1280,1264 = 2544",
    "--sizes 2576,-16": "expected sizes of 0 or more",
    "--sizes 1280;1280": "expected integers separated by commas",
    "--tp 3 --sizes 1280,1280": "expected one number of ranks, got 3 by --tp, 2 by --sizes",
    "--batch-rows 0": "--batch-rows: expected 1 or more, got 0",
    "--threads 0": "--threads: expected 1 or more, got 0",
    "--window 0": "--window: expected 1 to 256, got 0",
    "--window 257": "--window: expected 1 to 256, got 257",
    "--stride 0": "--stride: expected 1 to the window's 256, got 0",
    "--window 64 --stride 65": "--stride: expected 1 to the window's 64, got 65",
    "--real-vocab-size 0": "real vocabulary size: expected 1 to 2560",
    "--real-vocab-size 2561": "real vocabulary size: expected 1 to 2560",
    "--real-vocab-size 40": "--real-vocab-size is too small",
    "--dtype fp64": "argument --dtype: invalid choice",
    "--frobnicate": "unrecognized arguments: --frobnicate",
}


def assert_refused(capsys, code, out, message):
    """Exit code 2, one line, no output at all; what was at the output's place before is untouched."""
    printed, err = capsys.readouterr()
    assert (code, printed) == (2, "")
    assert err.startswith("vocabshard: error: "), err
    assert err.count("\n") == 1, err
    assert message in err
    assert sorted(path.name for path in out.parent.iterdir()) == ["old.jsonl"]
    assert (out.parent / "old.jsonl").read_text() == "old"


@pytest.fixture
def out(tmp_path):
    directory = tmp_path / "out"
    directory.mkdir()
    (directory / "old.jsonl").write_text("old")
    return directory / "old.jsonl"


@pytest.mark.parametrize("kind", BAD_CHECKPOINTS)
def test_bad_checkpoint(model, text, out, capsys, kind):
    damage, message = BAD_CHECKPOINTS[kind]
    damage(model)
    assert_refused(capsys, score(model, text, out), out, message)


@pytest.mark.parametrize("kind", BAD_TEXTS)
def test_bad_text(text, tmp_path, out, capsys, kind):
    damage, message = BAD_TEXTS[kind]
    copy = tmp_path / "copy.txt"
    shutil.copy(text, copy)
    damage(copy)
    assert_refused(capsys, score(TINY, copy, out), out, message)


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_bad_options(text, out, capsys, options):
    assert_refused(capsys, score(TINY, text, out, *options.split()), out, BAD_OPTIONS[options])


def test_bad_output(text, out, capsys):
    code = score(TINY, text, out.parent / "nowhere" / "x.jsonl")
    assert_refused(capsys, code, out, "nowhere does not exist")
    assert_refused(capsys, score(TINY, text, out.parent), out, "is a directory, expected the name of a file")


def test_output_over_the_input(text, out, tmp_path, capsys):
    """Neither the records nor the picture may take the place of what is read."""
    content = text.read_bytes()
    assert_refused(capsys, score(TINY, text, text), out, "is the input")
    assert_refused(capsys, score(TINY, text, out, "--plot", text), out, "is the input")
    (tmp_path / "link").symlink_to(text)
    assert_refused(capsys, score(TINY, text, tmp_path / "link"), out, "is the input")
    assert text.read_bytes() == content
    partial = text.rename(out.with_name(out.name + ".partial"))
    assert score(TINY, partial, out) == 2 and "is the input" in capsys.readouterr().err
    assert partial.read_bytes() == content
    text = partial.rename(text)
    assert_refused(capsys, score(TINY, text, "a\0b"), out, "which has no zero byte")


def test_output_that_is_no_regular_file(text, tmp_path, out, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert_refused(capsys, score(TINY, text, pipe), out, "is no regular file")
    assert pipe.is_fifo()


def test_output_through_a_link(text, out, tmp_path):
    link = tmp_path / "link.jsonl"
    link.symlink_to(out)
    assert score(TINY, text, link) == 0
    assert link.is_symlink() and out.read_text().startswith("{")


def after_bytes(monkeypatch, room, fail):
    """Lets os.write put `room` bytes into files, the last of them a part of what was asked, and then calls `fail`."""
    left, write = [room], os.write

    def limited(descriptor, content):
        if left[0] <= 0:
            fail()
        left[0] -= (count := write(descriptor, content[: left[0]]))
        return count

    monkeypatch.setattr(os, "write", limited)


def no_space():
    raise OSError(28, "No space left on device")


def count_rows(monkeypatch):
    """The list of how many rows each call of the operator has."""
    calls, real = [], score_module.linear_logp

    def counting(rows, *arguments, **options):
        calls.append(len(rows))
        return real(rows, *arguments, **options)

    monkeypatch.setattr(score_module, "linear_logp", counting)
    return calls


@pytest.mark.parametrize("batch_windows", ["1", "2"])
def test_disk_full_and_going_on(text, out, capsys, monkeypatch, batch_windows):
    """What was scored is kept as whole records, and not scored again; the end is as if nothing had happened."""
    options = ["--batch-rows", "20", "--batch-windows", batch_windows]
    assert score(TINY, text, out.parent / "whole", *options) == 0
    with monkeypatch.context() as full:
        after_bytes(full, 60_000, no_space)
        assert score(TINY, text, out, *options) == 2
    partial = out.with_name("old.jsonl.partial")
    printed, err = capsys.readouterr()
    lines = partial.read_bytes().split(b"\n")
    assert lines.pop() == b""
    records = [json.loads(line) for line in lines]
    kept = len(records) - 1
    assert 100 < kept < 300 and kept % 20 == 0
    assert all(is_token(record, index) for index, record in enumerate(records[1:]))
    assert printed == "" and err.count("\n") == 1
    assert f"cannot be written: No space left on device; {kept} tokens are kept in {partial}, and the same" in err
    assert out.read_text() == "old"

    with partial.open("ab") as file:
        file.write(lines[-1][:50])  # as if a machine had died
    calls = count_rows(monkeypatch)
    assert score(TINY, text, out, *options) == 0
    assert token_lines(out) == token_lines(out.parent / "whole")
    summary = read_scores(out).summary
    assert summary["resumed"] == kept == summary["tokens"] - sum(calls)
    whole = read_scores(out.parent / "whole").summary
    assert (summary["tokens"], summary["mean_logp"]) == (whole["tokens"], whole["mean_logp"])
    assert not partial.exists()


def test_disk_full_before_the_first_record(text, out, capsys, monkeypatch):
    after_bytes(monkeypatch, 100, no_space)
    assert_refused(capsys, score(TINY, text, out), out, "No space left on device; nothing is kept")


def test_disk_full_at_the_end(text, out, capsys, monkeypatch):
    """All is scored: what is left to do is to write the summary again."""
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda descriptor: no_space())
        assert score(TINY, text, out) == 2
    assert "tokens are kept" in capsys.readouterr().err
    assert out.read_text() == "old"
    calls = count_rows(monkeypatch)
    assert score(TINY, text, out) == 0
    assert calls == [] and read_scores(out).summary["resumed"] == len(token_lines(out))


def test_what_another_run_left(text, out, capsys, monkeypatch):
    with monkeypatch.context() as full:
        after_bytes(full, 60_000, no_space)
        assert score(TINY, text, out) == 2
    partial = out.with_name("old.jsonl.partial")
    left = partial.read_bytes()
    capsys.readouterr()
    assert score(TINY, text, out, "--dtype", "bf16") == 2
    assert "is what another run left, with other dtype, provenance; repeat that run" in capsys.readouterr().err
    assert partial.read_bytes() == left
    with partial.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert score(TINY, text, out) == 2
        assert "another run is writing" in capsys.readouterr().err
    partial.write_bytes(left[:300])  # not even the header is whole
    assert score(TINY, text, out) == 0
    assert read_scores(out).summary["resumed"] == 0


def test_tp_other_than_torchruns(text, out, capsys, monkeypatch):
    """Known before the ranks meet, so none waits for another; rank 0 alone says it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert_refused(capsys, score(TINY, text, out, "--tp", "3"), out, "got 3 by --tp, 2 by torchrun")
    monkeypatch.setenv("RANK", "1")
    assert score(TINY, text, out, "--sizes", "848,848,864") == 2
    assert capsys.readouterr() == ("", "")


def test_nothing_to_score(model, tmp_path, out, capsys):
    """Without a BOS token the first token of a text has nothing before it."""
    path = model / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
    short = tmp_path / "short.txt"
    short.write_text("a")
    assert_refused(capsys, score(model, short, out), out, "there is none to score")


def test_missing_extra(text, out, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert_refused(capsys, score(TINY, text, out), out, "pip install 'vocabshard[score]'")


def test_no_arguments_and_help(capsys):
    assert main([]) == 2
    assert re.fullmatch(r"vocabshard: error: .*COMMAND.*\n", capsys.readouterr().err)
    with pytest.raises(SystemExit) as end:
        main(["score", "--help"])
    assert end.value.code == 0


PAIRS = [
    ("A call calls a callable", " object with a possibly empty series of arguments"),
    ("", "The import statement"),
    ("x", " y"),
    ("import " * 300, "module, and what follows"),
]


def write_pairs(path, pairs, tail="\n"):
    lines = (json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in pairs)
    path.write_text("\n".join(lines) + tail)
    return path


def test_prompts_and_completions(tmp_path, monkeypatch):
    """The completions' tokens, each after its own prompt and nothing else; windows of a prompt alone are spared."""
    pairs, encode = write_pairs(tmp_path / "pairs.jsonl", PAIRS), load_tokenizer(TINY)
    seen = []
    real = score_module.hidden_states

    def watched(model, sequences, spans, *rest):
        seen.extend(spans)
        return real(model, sequences, spans, *rest)

    monkeypatch.setattr(score_module, "hidden_states", watched)
    assert score(TINY, pairs, tmp_path / "pairs") == 0
    records = [json.loads(line) for line in token_lines(tmp_path / "pairs")]
    assert [record["index"] for record in records] == list(range(len(records)))
    for number, (_, completion) in enumerate(PAIRS):
        assert "".join(r["text"] for r in records if r["sequence"] == number) == completion
    assert [span.sequence for span in seen] == [0, 1, 2, 3]
    assert seen[3].start > 0 and len(seen[3]) == len(encode(PAIRS[3][1], False).ids)

    # the same tokens as one text
    for number, (prompt, completion) in enumerate(PAIRS[:3]):
        tokens = tokenize(encode, prompt, completion, "completion")
        alone = write_pairs(tmp_path / "alone.jsonl", [(prompt, completion)], tail="")
        assert score(TINY, alone, tmp_path / "alone", "--score", "all") == 0
        whole = read_scores(tmp_path / "alone")
        assert whole.ids == tokens.ids[1:]
        mine = [record for record in records if record["sequence"] == number]
        assert [record["bits"] for record in mine] == [
            record["bits"] for record in map(json.loads, token_lines(tmp_path / "alone")[tokens.context - 1 :])
        ]
        assert [record["target"] for record in mine] == [prints[2] for prints in whole.prints[tokens.context - 1 :]]


@pytest.mark.parametrize("batch", ["2", "3", "100"])
def test_batches_of_windows(tmp_path, batch):
    """Rows of filled-up windows are those of the windows alone, but for rounding; none of the filling is scored."""
    pairs = write_pairs(tmp_path / "pairs.jsonl", PAIRS)
    assert score(TINY, pairs, tmp_path / "one", "--score", "all") == 0
    assert score(TINY, pairs, tmp_path / "more", "--score", "all", "--batch-windows", batch) == 0
    one, more = read_scores(tmp_path / "one"), read_scores(tmp_path / "more")
    assert more.ids == one.ids and more.header["hidden"]["batch_windows"] == int(batch)
    for a, b in zip(one.bits, more.bits, strict=True):
        assert as_float(a[0]) == pytest.approx(as_float(b[0]), abs=1e-4)


def test_no_bos_no_prompt(model, tmp_path, capsys):
    """A first token that follows nothing is not scored, and a completion of one token is then an error."""
    path = model / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
    assert score(model, write_pairs(tmp_path / "a.jsonl", [("", "some words here")]), tmp_path / "o") == 0
    assert not read_scores(tmp_path / "o").texts[0].startswith("s")
    assert score(model, write_pairs(tmp_path / "b.jsonl", [("a", "b"), ("", "b")]), tmp_path / "o2") == 2
    assert "b.jsonl:2: 1 tokens: there is none to score after the first" in capsys.readouterr().err


BAD_LINES = {
    "not JSON": (b'{"prompt": "a"', "pairs.jsonl:2: not JSON"),
    "blank": (b"", "pairs.jsonl:2: not JSON"),
    "not UTF-8": (b'{"prompt": "\xe9"}', "pairs.jsonl:2: not UTF-8: byte 0xe9"),
    "a list": (b"[1]", "pairs.jsonl:2: expected a JSON object, got list"),
    "no completion": (b'{"prompt": "a"}', "pairs.jsonl:2: expected a completion, which is a text, got none"),
    "a number": (b'{"prompt": 3, "completion": "a"}', "pairs.jsonl:2: expected a prompt, which is a text, got 3"),
    "empty completion": (b'{"prompt": "a", "completion": ""}', "pairs.jsonl:2: empty completion"),
    "half a character": (b'{"prompt": "a", "completion": "b\\ud83d"}', "pairs.jsonl:2: completion: \\ud83d is half of"),
    "nested deeply": (b"[" * 200_000, "pairs.jsonl:2: not JSON"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_bad_line(tmp_path, out, capsys, kind):
    line, message = BAD_LINES[kind]
    good = b'{"prompt": "a", "completion": "b"}'
    (tmp_path / "pairs.jsonl").write_bytes(b"\n".join([good, line, good, b""]))
    assert_refused(capsys, score(TINY, tmp_path / "pairs.jsonl", out), out, message)


def test_bad_pairs(text, tmp_path, out, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    assert_refused(capsys, score(TINY, tmp_path / "empty.jsonl", out), out, "empty.jsonl: empty")
    assert_refused(capsys, score(TINY, text, out, "--score", "completion"), out, "is a text; prompts and completions")


def test_plot(scored, text, tmp_path, out, capsys):
    """A picture of both panels, with values that are not finite too; a place for it that cannot be is known before."""
    assert score(TINY, text, tmp_path / "o.jsonl", "--plot", tmp_path / "o.png") == 0
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")
    read = read_scores(scored)
    figures = []
    for name, lines in (("finite", read.bits), ("infinite", [(0xFF800000, 0, 0)] * 3)):
        records = [token_record(i, 0, 1, "t", bits, ("0" * 16, "0" * 32, "0" * 16)) for i, bits in enumerate(lines)]
        path = tmp_path / name
        path.write_bytes(b"".join(map(as_line, [read.header, *records, {"type": "summary", "tokens": len(records)}])))
        plot_scores(path, tmp_path / f"{name}.png")
        figures.append((tmp_path / f"{name}.png").read_bytes())
    assert figures[0] != figures[1]
    code = score(TINY, text, out, "--plot", tmp_path / "nowhere" / "o.png")
    assert_refused(capsys, code, out, "--plot")
    assert_refused(capsys, score(TINY, text, out, "--plot", out), out, "is where the records go")


def test_perplexity_against_a_unigram_model(scored_whole):
    """The example is a language model: at most half the perplexity of token frequencies fitted on this very text."""
    read = read_scores(scored_whole)
    counts = Counter(read.ids)
    unigram = math.exp(-sum(math.log(counts[token] / len(read.ids)) for token in read.ids) / len(read.ids))
    assert read.summary["perplexity"] < unigram / 2


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_chunks(size):
    blocks = [torch.arange(start, stop)[:, None] for start, stop in ((0, 5), (5, 6), (6, 6), (6, 20), (20, 21))]
    chunks = list(in_chunks(blocks, size))
    assert torch.cat(chunks).flatten().tolist() == list(range(21))
    assert all(len(chunk) == size for chunk in chunks[:-1]) and 0 < len(chunks[-1]) <= size


def python(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_module_and_light_import(text, tmp_path):
    """As a process: the exit code, and no library of the optional dependencies before it is needed."""
    done = python("-m", "vocabshard", "score", tmp_path / "none", text, "--out", tmp_path / "o.jsonl", "--tp", 4)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"vocabshard: error: checkpoint {tmp_path / 'none'}: expected a directory, found nothing\n"
    heavy = (
        "import sys, vocabshard.command.score; print({'transformers', 'tokenizers', 'safetensors'} & set(sys.modules))"
    )
    assert python("-c", heavy).stdout == "set()\n"


def test_records(scored, text):
    """What each record holds, and that the numbers beside the bits are those bits."""
    lines = [json.loads(line) for line in scored.read_text().splitlines()]
    header, tokens, summary = lines[0], lines[1:-1], lines[-1]
    assert header["type"] == "header"
    assert header["contract"] and header["projection"] and header["backend"] and header["provenance"]
    assert (header["tp"], header["sizes"], header["batch_rows"], header["dtype"]) == (1, [ROWS], 64, "fp32")
    assert header["checkpoint"]["name"] == "tiny_lm"
    digests = [*header["checkpoint"]["sha256"].values(), header["text"]["sha256"]]
    assert sorted(header["checkpoint"]["sha256"]) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert (header["model"]["head_rows"], header["model"]["real_vocab_size"]) == (ROWS, REAL)
    assert (header["hidden"]["window"], header["hidden"]["stride"]) == (256, 128)
    assert "".join(token["text"] for token in tokens) == text.read_text()
    weight = weight_fingerprint(load_file(TINY / "model.safetensors")["lm_head.weight"][:REAL])
    for position, token in enumerate(tokens):
        assert list(token) == [
            *("type", "index", "sequence", "id", "text", "logp", "lse", "entropy", "bits"),
            *("hidden", "weight", "target"),
        ]
        assert is_token(token, position) and token["sequence"] == 0
        assert token["weight"] == header["model"]["weight"] == weight
        words = struct.unpack(">III", bytes.fromhex(token["bits"]))
        assert [token["logp"], token["lse"], token["entropy"]] == [as_float(word) for word in words]
    mean = torch.tensor([token["logp"] for token in tokens], dtype=torch.float64).mean()
    assert summary["type"] == "summary"
    assert summary["tokens"] == len(tokens) > 256
    assert summary["mean_logp"] == pytest.approx(mean.item(), abs=1e-12)
    assert summary["perplexity"] == pytest.approx(torch.exp(-mean).item())
    assert summary["tokens_per_s"] == pytest.approx(len(tokens) / summary["seconds"])
    assert summary["resumed"] == 0
    assert summary["hidden_seconds"] + summary["head_seconds"] < summary["seconds"]
    assert 100 * 2**20 < summary["memory_bytes"] < 100 * 2**30
    for name in ("hidden", "target"):
        assert len({token[name] for token in tokens}) == len(tokens)


def test_values_are_the_models_own(scored, text):
    """The first window's log-probs, lse and entropy, from transformers' model with its head, over the real rows."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    ids = tokens_of(TINY, text).ids[:257]
    with torch.no_grad():
        logits = whole(torch.tensor([ids[:-1]])).logits[0, :, :REAL].double()
    logp = torch.log_softmax(logits, 1)
    expected = [
        logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0],
        torch.logsumexp(logits, 1),
        -(logp.exp() * logp).sum(1),
    ]
    found = torch.tensor([[as_float(word) for word in bits] for bits in read_scores(scored).bits[:256]]).T
    for values, right in zip(found, expected, strict=True):
        assert (values - right).abs().max() < 2e-5


@pytest.mark.parametrize("rows", ["1", "7"])
def test_batches(scored, text, tmp_path, rows):
    assert score(TINY, text, tmp_path / "o.jsonl", "--batch-rows", rows) == 0
    assert token_lines(tmp_path / "o.jsonl") == token_lines(scored)


def test_one_batch_unpadded(scored_whole, tmp_path):
    options = ["--sizes", REAL, "--batch-rows", "100000"]
    assert score(TINY, TINY / "text.txt", tmp_path / "o.jsonl", *options) == 0
    assert token_lines(tmp_path / "o.jsonl") == token_lines(scored_whole)


def test_padding_counts_when_it_is_said_to_be_real(scored, text, tmp_path):
    """309 more terms exp(0): the real vocabulary size is not for show."""
    assert score(TINY, text, tmp_path / "o.jsonl", "--real-vocab-size", str(ROWS)) == 0
    pairs = zip(read_scores(tmp_path / "o.jsonl").bits, read_scores(scored).bits, strict=True)
    assert all(as_float(more[1]) > as_float(right[1]) for more, right in pairs)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_head(scored, text, tmp_path, dtype):
    assert score(TINY, text, tmp_path / "o.jsonl", "--dtype", dtype) == 0
    narrow, wide = read_scores(tmp_path / "o.jsonl"), read_scores(scored)
    assert narrow.header["dtype"] == dtype
    assert narrow.bits != wide.bits
    assert narrow.summary["mean_logp"] == pytest.approx(wide.summary["mean_logp"], abs=0.02)


def test_softcap(model, scored, text, tmp_path):
    edit_config(final_logit_softcapping=5.0)(model)
    assert score(model, text, tmp_path / "o.jsonl") == 0
    capped = read_scores(tmp_path / "o.jsonl")
    assert capped.header["model"]["softcap"] == 5.0
    assert capped.bits != read_scores(scored).bits
    assert all(as_float(lse) <= 5.0 + torch.tensor(float(REAL)).log() for _, lse, _ in capped.bits)


def test_biased_head(model, scored, text, tmp_path):
    """A bias that takes one token out of the vocabulary."""
    bias = torch.zeros(ROWS)
    bias[199] = -torch.inf
    edit_weights(lambda weights: weights.update({"lm_head.bias": bias}))(model)
    assert score(model, text, tmp_path / "o.jsonl") == 0
    biased, plain = read_scores(tmp_path / "o.jsonl"), read_scores(scored)
    assert biased.header["model"]["bias"] == "lm_head.bias"
    assert 199 in plain.ids
    for token, bits, before in zip(biased.ids, biased.bits, plain.bits, strict=True):
        assert as_float(bits[1]) <= as_float(before[1])
        assert (as_float(bits[0]) == -torch.inf) == (token == 199)
    record = json.loads(token_lines(tmp_path / "o.jsonl")[biased.ids.index(199)])
    assert record["logp"] is None
    assert record["bits"].startswith("ff800000")


def test_tied_and_in_several_files(model, text, tmp_path):
    """A tied head is the embedding, wherever the index says it lies; a separate copy of it gives the same bytes."""
    weights = load_file(model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.clone()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert score(model, text, tmp_path / "separate.jsonl") == 0

    del weights["lm_head.weight"]
    (model / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {f"model-{part}-of-3.safetensors": names[part - 1 :: 3] for part in (1, 2, 3)}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, model / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    edit_config(tie_word_embeddings=True)(model)
    checkpoint = Checkpoint.open(model)
    assert checkpoint.head_name == "model.embed_tokens.weight"
    assert score(model, text, tmp_path / "tied.jsonl") == 0
    assert token_lines(tmp_path / "tied.jsonl") == token_lines(tmp_path / "separate.jsonl")


def test_tied_by_default(model):
    """A config that does not say so: transformers' default for its kind of model decides."""
    edit_weights(lambda weights: weights.pop("lm_head.weight"))(model)
    path = model / "config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"]
    path.write_text(json.dumps({**config, "model_type": "gemma2"}))
    assert Checkpoint.open(model).head_name == "model.embed_tokens.weight"
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match="no head"):
        Checkpoint.open(model)


def test_only_the_ranks_rows_are_read(monkeypatch):
    """Shards are the slices of the full head, as stored, and nothing else is asked of the files."""
    full = load_file(TINY / "model.safetensors")["lm_head.weight"]
    asked = []
    real_slice = checkpoint_module._slice

    class Watched:
        def __init__(self, found):
            self.found = found

        def __getattr__(self, name):
            assert name in ("get_shape", "get_dtype")
            return getattr(self.found, name)

        def __getitem__(self, rows):
            asked.append((rows.start, rows.stop))
            return self.found[rows]

    monkeypatch.setattr(checkpoint_module, "_slice", lambda file, name: Watched(real_slice(file, name)))
    checkpoint = Checkpoint.open(TINY)
    assert asked == []
    for start, stop in ((0, 640), (640, 1232), (1232, 1232), (1232, 2560)):
        weight, bias = checkpoint.head_shard(start, stop)
        assert bias is None
        assert weight.dtype == full.dtype
        assert torch.equal(weight, full[start:stop])
        assert weight.untyped_storage().nbytes() == 2 * weight.numel()
        assert asked.pop() == (start, stop)
        assert asked == []


def test_tokenizer_that_is_not_one_file(model, text):
    """Without tokenizer.json transformers reads what else is there, and gives the same tokens after the first."""
    content = json.loads((model / "tokenizer.json").read_text())["model"]
    (model / "tokenizer.json").unlink()
    (model / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in content["merges"])
    (model / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    special = {"bos_token": "<|bos|>", "eos_token": "<|bos|>", "unk_token": "<|bos|>", "pad_token": "<|bos|>"}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": False, **special}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    plain, whole = tokens_of(model, text), tokens_of(TINY, text)
    assert plain.ids == whole.ids[1:]
    assert (plain.context, whole.context) == (1, 1)
    assert "".join(plain.texts) == text.read_text()
    # special tokens that are in a text are tokens to score like others
    encode, fast = load_tokenizer(model), load_tokenizer(TINY)
    for given in ("a<|bos|>", "<|bos|>", "<|bos|>a"):
        assert encode(given, False) == fast(given, False)
        assert encode(given, True) == Encoded(fast(given, True).ids[1:], fast(given, True).texts[1:], 0)


@pytest.mark.parametrize("positions", [1, 2, 9, 10, 11, 14, 15, 33])
@pytest.mark.parametrize("stride", [1, 4, 5, 10])
def test_windows_give_every_position_once(positions, stride):
    spans = list(Windows(10, stride).spans(positions))
    assert [spot for _, stop, new in spans for spot in range(new, stop)] == list(range(positions))
    assert all(stop - start <= 10 for start, stop, _ in spans)
    assert all(new - start >= 10 - stride for start, _, new in spans[1:])


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 100, 2251, 2560])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_even_shards(rows, tp):
    sizes = split_rows(rows, tp)
    assert (len(sizes), sum(sizes)) == (tp, rows)
    assert all(sum(sizes[:rank]) % 16 == 0 or sum(sizes[:rank]) == rows for rank in range(tp))
    assert max(sizes) - min(sizes) <= 16 or rows % 16
    assert choose_sizes([0, 2240, 11], 3, 2560, 2251) == [0, 2240, 11]


def test_an_ordinary_sum_differs(scored, text):
    """On this very input: torch's fp32 product and logsumexp over 1, 2, 3 and 4 shards, and in batches of 1, 7, 64."""
    checkpoint = Checkpoint.open(TINY)
    tokens = tokens_of(TINY, text)
    spans = spans_of([tokens], Windows(256, 128))
    hidden = torch.cat(list(hidden_states(load_base_model(checkpoint), [tokens], spans, 1, 1)))
    weight = checkpoint.head_shard(0, REAL)[0].float()
    targets = torch.tensor(tokens.ids[1:])

    def ordinary(sizes, rows):
        lse = []
        for batch in hidden.split(rows):
            parts = torch.stack([torch.logsumexp(F.linear(batch, w), 1) for w in weight.split(sizes)])
            top = parts.amax(0)
            lse.append(top + (parts - top).exp().sum(0).log())
        logit = torch.cat([F.linear(batch, weight) for batch in hidden.split(rows)]).gather(1, targets[:, None])[:, 0]
        return logit - torch.cat(lse)

    whole = ordinary([REAL], 64)
    for sizes in ([1008, 1243], [752, 752, 747], [16, 1984, 251]):
        assert not torch.equal(ordinary(sizes, 64), whole)
    assert not torch.equal(ordinary([REAL], 1), whole)
    assert not torch.equal(ordinary([REAL], 7), whole)


FAILING_RANK = """
import sys
from vocabshard.command import checkpoint, main
from vocabshard.command.errors import InputError
import os

if os.environ["RANK"] == "1":
    def fail(self, start, stop):
        raise InputError("the disk went away")
    checkpoint.Checkpoint.head_shard = fail
raise SystemExit(main(sys.argv[1:]))
"""


def test_ranks_one_fails(text, out, tmp_path, capfd):
    """Every rank ends, the message of the one that failed appears once, and nothing is written."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING_RANK)
    code = launching.run(2, [str(script), "score", str(TINY), str(text), "--out", str(out), "--quiet"])
    printed, err = capfd.readouterr()
    assert (code, printed) == (2, "")
    assert err.count("vocabshard: error: ") == 1
    assert "vocabshard: error: rank 1: the disk went away\n" in err
    assert "Traceback" not in err
    assert [path.name for path in out.parent.iterdir()] == ["old.jsonl"]
    assert out.read_text() == "old"


KILLED_RANK = """
import os, signal, sys
from vocabshard.command import main, score

if os.environ["RANK"] == "1":
    real, calls = score.linear_logp, []
    def last(*arguments, **options):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    score.linear_logp = last
raise SystemExit(main(sys.argv[1:]))
"""


def test_ranks_one_is_killed(scored, text, out, tmp_path, capfd, monkeypatch):
    """Nobody waits for it, what was finished is kept, and the same command goes on from there.

    More layouts in multigpu/test_score.py; here the command starts the ranks itself.
    """
    script = tmp_path / "killed.py"
    script.write_text(KILLED_RANK)
    started = time.monotonic()
    with monkeypatch.context() as killing:

        def start(tp, arguments):  # as by torchrun, which says how many there are
            assert arguments[-2:] == ["--tp", "2"]
            return launching.run(tp, [str(script), *arguments[:-2]])

        killing.setattr(score_module, "start_ranks", start)
        assert score(TINY, text, out, "--tp", "2") == 128 + 9
    err = capfd.readouterr().err
    assert "rank 1 of 2 failed with exit code 137; the others were ended" in err
    assert f"what was scored is kept in {out}.partial, and the same command goes on from there" in err
    assert "Traceback" not in err
    assert out.read_text() == "old"
    kept = [json.loads(line) for line in out.with_name("old.jsonl.partial").read_text().splitlines()[1:]]
    assert len(kept) == 3 * 64 and all(is_token(record, index) for index, record in enumerate(kept))
    assert time.monotonic() - started < 100
    assert score(TINY, text, out, "--tp", "2") == 0
    assert token_lines(out) == token_lines(scored)
    assert read_scores(out).summary["resumed"] == len(kept)
    header = read_scores(out).header
    assert header["tp"] == 2 == len(header["sizes"])
    assert header["model"] == read_scores(scored).header["model"]
    assert capfd.readouterr() == ("", "")
    assert main(["compare", str(scored), str(out)]) == 0
    assert capfd.readouterr().out.endswith("equal\n")
