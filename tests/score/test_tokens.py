"""`vocabshard score`: which tokens of texts, prompts and completions are scored, and what is seen before each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from vocabshard.command import score as score_module
from vocabshard.command.checkpoint import Checkpoint
from vocabshard.command.hidden import Windows, in_chunks
from vocabshard.command.records import as_float, read_scores
from vocabshard.command.tokens import ALL, Encoded, load_tokenizer, read_sequences, tokenize
from vocabshard.testing.scoring import score, token_lines

TINY = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny_lm"


def tokens_of(checkpoint, text):
    return tokenize(load_tokenizer(checkpoint), text.read_text(), "", ALL)


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


def test_names_in_capitals_and_byte_order_marks(text, tmp_path):
    """Neither makes another sequence of a file."""
    checkpoint = Checkpoint.open(TINY)
    for name, content, capitals in (
        ("plain.txt", text.read_bytes(), "MARKED.TXT"),
        ("plain.jsonl", write_pairs(tmp_path / "pairs", PAIRS).read_bytes(), "MARKED.JSONL"),
        ("plain.ndjson", write_pairs(tmp_path / "pairs", PAIRS).read_bytes(), "Marked.NdJson"),
    ):
        (tmp_path / name).write_bytes(content)
        (tmp_path / capitals).write_bytes(b"\xef\xbb\xbf" + content)
        plain, marked = (read_sequences(tmp_path / n, checkpoint, None, 2251) for n in (name, capitals))
        assert marked == plain and len(plain) == (1 if name == "plain.txt" else len(PAIRS))
    assert score(TINY, tmp_path / "MARKED.JSONL", tmp_path / "o") == 0
    assert read_scores(tmp_path / "o").header["score"] == "completion"


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


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_chunks(size):
    blocks = [torch.arange(start, stop)[:, None] for start, stop in ((0, 5), (5, 6), (6, 6), (6, 20), (20, 21))]
    chunks = list(in_chunks(blocks, size))
    assert torch.cat(chunks).flatten().tolist() == list(range(21))
    assert all(len(chunk) == size for chunk in chunks[:-1]) and 0 < len(chunks[-1]) <= size
