"""`vocabshard score`: bad input, what the records hold, checkpoints, and one answer whatever the sharding and batch.

Tests that start processes of their own have `ranks` in their names.
"""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("safetensors")
pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

from vocabshard import launching
from vocabshard.command import checkpoint as checkpoint_module
from vocabshard.command import main
from vocabshard.command.checkpoint import Checkpoint
from vocabshard.command.errors import InputError
from vocabshard.command.hidden import Windows, hidden_states, load_base_model
from vocabshard.command.job import choose_sizes, split_rows
from vocabshard.command.records import as_float, read_scores
from vocabshard.command.tokens import tokenize

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
    return main(["score", str(checkpoint), str(text), "--out", str(out), "--quiet", *options])


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


def test_disk_full(text, out, capsys, monkeypatch):
    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert_refused(capsys, score(TINY, text, out), out, "cannot be written: No space left on device")


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
    digests = [*header["checkpoint"]["sha256"].values(), header["text"]["sha256"], header["hidden"]["sha256"]]
    assert sorted(header["checkpoint"]["sha256"]) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert (header["model"]["head_rows"], header["model"]["real_vocab_size"]) == (ROWS, REAL)
    assert (header["hidden"]["window"], header["hidden"]["stride"]) == (256, 128)
    assert "".join(token["text"] for token in tokens) == text.read_text()
    for position, token in enumerate(tokens):
        assert list(token) == ["type", "index", "id", "text", "logp", "lse", "entropy", "bits"]
        assert (token["type"], token["index"]) == ("token", position)
        words = struct.unpack(">III", bytes.fromhex(token["bits"]))
        assert [token["logp"], token["lse"], token["entropy"]] == [as_float(word) for word in words]
    mean = torch.tensor([token["logp"] for token in tokens], dtype=torch.float64).mean()
    assert summary["type"] == "summary"
    assert summary["tokens"] == len(tokens) > 256
    assert summary["mean_logp"] == pytest.approx(mean.item(), abs=1e-12)
    assert summary["perplexity"] == pytest.approx(torch.exp(-mean).item())
    assert summary["tokens_per_s"] == pytest.approx(len(tokens) / summary["seconds"])


def test_values_are_the_models_own(scored, text):
    """The first window's log-probs, lse and entropy, from transformers' model with its head, over the real rows."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    ids = tokenize(Checkpoint.open(TINY), text.read_text(), REAL).ids[:257]
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


@pytest.mark.parametrize("rows", ["1", "7", "100000"])
def test_batches(scored_whole, tmp_path, rows):
    assert score(TINY, TINY / "text.txt", tmp_path / "o.jsonl", "--batch-rows", rows) == 0
    assert token_lines(tmp_path / "o.jsonl") == token_lines(scored_whole)


def test_unpadded(scored_whole, tmp_path):
    assert score(TINY, TINY / "text.txt", tmp_path / "o.jsonl", "--sizes", str(REAL)) == 0
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
    """Shards are the slices of the full head, in the type asked for, and nothing else is asked of the files."""
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
        weight, bias = checkpoint.head_shard(start, stop, torch.float32)
        assert bias is None
        assert weight.dtype == torch.float32
        assert torch.equal(weight, full[start:stop].float())
        assert weight.untyped_storage().nbytes() == 4 * weight.numel()
        assert asked.pop() == (start, stop)
        assert asked == []
    assert torch.equal(checkpoint.head_shard(16, 48, torch.bfloat16)[0], full[16:48])


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
    plain = tokenize(Checkpoint.open(model), text.read_text(), REAL)
    whole = tokenize(Checkpoint.open(TINY), text.read_text(), REAL)
    assert plain.ids == whole.ids[1:]
    assert (plain.context, whole.context) == (1, 1)
    assert "".join(plain.texts) == text.read_text()


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


@pytest.mark.parametrize(
    ("tp", "options"),
    [(2, ["--sizes", "1008,1243", "--batch-rows", "7"]), (3, []), (4, ["--sizes", "16,0,1984,560"])],
    ids=["tp2 uneven unpadded", "tp3 even", "tp4 uneven padded"],
)
def test_ranks_give_the_same_bytes(scored_whole, tmp_path, capfd, tp, options):
    assert score(TINY, TINY / "text.txt", tmp_path / "o.jsonl", "--tp", str(tp), *options) == 0
    printed, err = capfd.readouterr()
    assert printed == ""
    assert "error" not in err and "Traceback" not in err
    assert token_lines(tmp_path / "o.jsonl") == token_lines(scored_whole)
    header = read_scores(tmp_path / "o.jsonl").header
    assert header["tp"] == tp == len(header["sizes"])
    assert header["hidden"] == read_scores(scored_whole).header["hidden"]
    assert main(["compare", str(scored_whole), str(tmp_path / "o.jsonl")]) == 0
    assert capfd.readouterr().out.endswith("equal\n")


def test_an_ordinary_sum_differs(scored, text):
    """On this very input: torch's fp32 product and logsumexp over 1, 2, 3 and 4 shards, and in batches of 1, 7, 64."""
    checkpoint = Checkpoint.open(TINY)
    ids = tokenize(checkpoint, text.read_text(), REAL).ids
    hidden = hidden_states(load_base_model(checkpoint), ids[:-1], Windows(256, 128), 1)
    weight = checkpoint.head_shard(0, REAL, torch.float32)[0]
    targets = torch.tensor(ids[1:])

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
    def fail(self, start, stop, dtype):
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


def test_ranks_of_torchrun(scored, text, out, tmp_path, capfd):
    """Started by somebody else: --tp may be absent; what is wrong with the input is said once."""
    program = [str(PACKAGE / "command" / "rank" / "__main__.py"), "score", str(TINY)]
    options = ["--out", str(out), "--quiet"]
    assert launching.run(2, [*program, str(text), *options]) == 0
    assert token_lines(out) == token_lines(scored)
    out.write_text("old")
    capfd.readouterr()
    assert launching.run(2, [*program, str(tmp_path / "none.txt"), *options]) == 2
    err = capfd.readouterr().err
    assert err.count("vocabshard: error: text ") == 1
    assert "Traceback" not in err
    assert out.read_text() == "old"
