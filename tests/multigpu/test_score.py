"""`vocabshard score` on groups of 1 to 4 ranks: checkpoints as transformers writes them, and layouts of the head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from vocabshard.command import build_parser
from vocabshard.command.checkpoint import Checkpoint
from vocabshard.command.job import prepare
from vocabshard.command.ranks import Place
from vocabshard.command.records import as_float, read_scores
from vocabshard.command.score import run_job
from vocabshard.launching import Ranks

TINY = Path(__file__).resolve().parent.parent.parent / "examples" / "tiny_lm"
ENTRIES = 2251  # of the tokenizer; no multiple of 16, so that shards end inside a tile
SHAPE = {
    "vocab_size": ENTRIES,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
# name -> class of the config, its own settings, and the size of the files
CHECKPOINTS = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}, "1GB"),
    "llama tied in files": ("LlamaConfig", {"tie_word_embeddings": True}, "100KB"),
    "qwen3 in files": ("Qwen3Config", {"tie_word_embeddings": False}, "100KB"),
    "qwen3 tied": ("Qwen3Config", {"tie_word_embeddings": True}, "1GB"),
    "gemma2 in files": ("Gemma2Config", {"tie_word_embeddings": False, "final_logit_softcapping": 30.0}, "100KB"),
    "gemma2 tied in files": ("Gemma2Config", {"tie_word_embeddings": True, "final_logit_softcapping": 30.0}, "100KB"),
    "gemma2 tied": ("Gemma2Config", {"final_logit_softcapping": 30.0, "sliding_window": 16}, "1GB"),
}


@pytest.fixture(scope="module")
def groups() -> dict[int, dist.ProcessGroup]:
    """Groups of the first 1, 2, 3 and 4 ranks; gloo, as the command's own: all is on the CPU."""
    return {size: dist.new_group(list(range(size)), backend="gloo") for size in range(1, dist.get_world_size() + 1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One folder of all ranks."""
    paths = [str(tmp_path_factory.mktemp("score"))]
    dist.broadcast_object_list(paths)
    return Path(paths[0])


def score(ranks: Ranks, groups, checkpoint: Path, source: Path, out: str, layouts: dict[int, list[str]]) -> None:
    """One file of scores, `out` and W, for each W, made by the first W ranks; the others wait."""
    for size, options in layouts.items():
        if ranks.rank < size:
            given = ["score", str(checkpoint), str(source), "--out", f"{out}{size}", "--quiet", *options]
            run_job(prepare(build_parser().parse_args(given), size), Place(ranks.rank, groups[size]))
        dist.barrier()


def token_lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()[1:-1]


def write_checkpoint(name: str, path: Path):
    """What transformers saves of a model with random weights, and the model."""
    import transformers

    kind, settings, file_size = CHECKPOINTS[name]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SHAPE, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(path, max_shard_size=file_size)
    shutil.copy(TINY / "tokenizer.json", path)
    return model


def log_probs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """The model's own, of every token after the first."""
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_of_transformers(ranks: Ranks, groups, folder: Path, name: str) -> None:
    """The same bytes at TP 1, 2, 3 and 4, and within the error of the model's own log_softmax."""
    path, source, out = folder / name, folder / "pairs.jsonl", str(folder / f"{name}-scores")
    model = write_checkpoint(name, path) if ranks.rank == 0 else None
    if ranks.rank == 0:
        texts = (TINY / "text.txt").read_text()
        pairs = [{"prompt": texts[at : at + 40], "completion": texts[at + 40 : at + 120]} for at in (0, 500, 900)]
        source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    dist.barrier()
    score(ranks, groups, path, source, out, {size: ["--score", "all"] for size in groups})
    if model is None:
        return
    checkpoint = Checkpoint.open(path)
    assert checkpoint.tied == ("tied" in name)
    assert (len(set(checkpoint.files.values())) > 1) == ("in files" in name)
    for size in groups:
        assert token_lines(f"{out}{size}") == token_lines(f"{out}1"), f"TP {size}"
    read = read_scores(f"{out}1")
    assert read.header["model"]["softcap"] == (30.0 if "gemma2" in name else None)
    assert len({bits[0] for bits in read.bits}) > 60
    records = [json.loads(line) for line in token_lines(f"{out}1")]
    for number in range(3):
        mine = [record for record in records if record["sequence"] == number]
        ids = [0, *(record["id"] for record in mine)]  # 0: BOS
        assert len(ids) < SHAPE["max_position_embeddings"]
        theirs, exact = log_probs(model.float(), ids), log_probs(model.double(), ids)
        ours = torch.tensor([as_float(int(record["bits"][:8], 16)) for record in mine], dtype=torch.float64)
        ulp = exact.abs().max() * 2.0**-23
        assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + ulp


def test_layouts_of_a_padded_head(ranks: Ranks, groups, folder: Path) -> None:
    """Even and uneven shards, empty ones, with and without the padding, over more than one window."""
    source = folder / "text.txt"
    if ranks.rank == 0:
        source.write_text((TINY / "text.txt").read_text()[:1500])
    dist.barrier()
    even = {size: [] for size in groups}
    uneven = {
        2: ["--sizes", "1008,1243", "--batch-rows", "7"],
        3: ["--sizes", "0,2240,11"],
        4: ["--sizes", "16,0,1984,560"],
    }
    score(ranks, groups, TINY, source, str(folder / "even"), even)
    score(ranks, groups, TINY, source, str(folder / "uneven"), {size: uneven[size] for size in groups if size > 1})
    if ranks.rank == 0:
        want = token_lines(str(folder / "even1"))
        assert len(want) > 400
        for size in groups:
            assert token_lines(str(folder / f"even{size}")) == want, f"TP {size}"
            assert size == 1 or token_lines(str(folder / f"uneven{size}")) == want, f"TP {size}, uneven"
