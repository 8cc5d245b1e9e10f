"""`vocabshard score`: heads as checkpoints hold them: padded, soft-capped, biased, tied, in several files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

from vocabshard.command import checkpoint as checkpoint_module
from vocabshard.command.checkpoint import Checkpoint
from vocabshard.command.errors import InputError
from vocabshard.command.records import as_float, read_scores
from vocabshard.testing.scoring import edit_config, edit_weights, score, token_lines

TINY = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny_lm"
ROWS, REAL = 2560, 2251  # of its head


def test_padding_counts_when_it_is_said_to_be_real(scored, text, tmp_path):
    """309 more terms exp(0): the real vocabulary size is not for show."""
    assert score(TINY, text, tmp_path / "o.jsonl", "--real-vocab-size", str(ROWS)) == 0
    pairs = zip(read_scores(tmp_path / "o.jsonl").bits, read_scores(scored).bits, strict=True)
    assert all(as_float(more[1]) > as_float(right[1]) for more, right in pairs)


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
