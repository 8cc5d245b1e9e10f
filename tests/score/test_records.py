"""`vocabshard score`: what its records hold, whether they are the model's own values, and their picture."""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("transformers")
from safetensors.torch import load_file

from vocabshard import weight_fingerprint
from vocabshard.command.plot import plot_scores
from vocabshard.command.records import as_float, as_line, is_token, read_scores, token_record
from vocabshard.command.tokens import ALL, load_tokenizer, tokenize
from vocabshard.testing.scoring import assert_refused, score

TINY = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny_lm"
ROWS, REAL = 2560, 2251  # of its head


def tokens_of(checkpoint, text):
    return tokenize(load_tokenizer(checkpoint), text.read_text(), "", ALL)


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


def test_perplexity_against_a_unigram_model(scored_whole):
    """The example is a language model: at most half the perplexity of token frequencies fitted on this very text."""
    read = read_scores(scored_whole)
    counts = Counter(read.ids)
    unigram = math.exp(-sum(math.log(counts[token] / len(read.ids)) for token in read.ids) / len(read.ids))
    assert read.summary["perplexity"] < unigram / 2


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_head(scored, text, tmp_path, dtype):
    assert score(TINY, text, tmp_path / "o.jsonl", "--dtype", dtype) == 0
    narrow, wide = read_scores(tmp_path / "o.jsonl"), read_scores(scored)
    assert narrow.header["dtype"] == dtype
    assert narrow.bits != wide.bits
    assert narrow.summary["mean_logp"] == pytest.approx(wide.summary["mean_logp"], abs=0.02)


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


def test_output_through_a_link(text, out, tmp_path):
    link = tmp_path / "link.jsonl"
    link.symlink_to(out)
    assert score(TINY, text, link) == 0
    assert link.is_symlink() and out.read_text().startswith("{")


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
