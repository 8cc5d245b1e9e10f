"""`vocabshard score`: what is refused, with one line that says why, before anything is written."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from vocabshard.command import main
from vocabshard.command.errors import InputError
from vocabshard.command.recording import Recording
from vocabshard.testing.scoring import assert_refused, edit_config, edit_weights, score

TINY = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny_lm"
ROWS = 2560


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
    "a byte order mark alone": (lambda path: path.write_bytes(b"\xef\xbb\xbf"), ": empty"),
    "not UTF-8 after a mark": (lambda path: path.write_bytes(b"\xef\xbb\xbfa\xe9"), "byte 0xe9 at position 4"),
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


@pytest.mark.parametrize("there", [True, False])
def test_partial_file_that_is_a_link(text, out, tmp_path, capsys, there):
    """What such a link names is neither read, written nor made."""
    other = tmp_path / "other"
    if there:
        other.write_text("precious")
    partial = out.with_name("old.jsonl.partial")
    partial.symlink_to(other)
    assert score(TINY, text, out) == 2
    assert (
        "old.jsonl.partial, where the records are kept until all are there, is a symbolic link"
        in capsys.readouterr().err
    )
    assert partial.is_symlink() and out.read_text() == "old"
    assert other.read_text() == "precious" if there else not other.exists()
    with pytest.raises(InputError, match="cannot be"):  # one that came after that check
        Recording(out, {"type": "header"}, []).finish({})
    assert other.read_text() == "precious" if there else not other.exists()


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
