"""`vocabshard score`: the same bytes whatever the batch and the shards; on ranks: tests/multigpu/test_score.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from vocabshard.command.checkpoint import Checkpoint
from vocabshard.command.hidden import Windows, hidden_states, load_base_model, spans_of
from vocabshard.command.job import choose_sizes, split_rows
from vocabshard.command.tokens import ALL, load_tokenizer, tokenize
from vocabshard.testing.scoring import score, token_lines

TINY = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny_lm"
REAL = 2251


def tokens_of(checkpoint, text):
    return tokenize(load_tokenizer(checkpoint), text.read_text(), "", ALL)


@pytest.mark.parametrize("rows", ["1", "7"])
def test_batches(scored, text, tmp_path, rows):
    assert score(TINY, text, tmp_path / "o.jsonl", "--batch-rows", rows) == 0
    assert token_lines(tmp_path / "o.jsonl") == token_lines(scored)


def test_one_batch_unpadded(scored_whole, tmp_path):
    options = ["--sizes", REAL, "--batch-rows", "100000"]
    assert score(TINY, TINY / "text.txt", tmp_path / "o.jsonl", *options) == 0
    assert token_lines(tmp_path / "o.jsonl") == token_lines(scored_whole)


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
