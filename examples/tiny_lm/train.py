"""Trains `tiny_lm`, the small language model whose head the examples and the tests score.

The text is CPython's own: the language reference topics that `help()` shows (`pydoc_data.topics`) and the docstrings of
the standard library, both under the Python Software Foundation License, version 2 (LICENSE-PSF.txt beside this file).
A few topics are held out of the training and written to `text.txt`; a paragraph that also occurs in them is removed
from everything the model and the tokenizer are trained on.

    python examples/tiny_lm/train.py --out examples/tiny_lm

Needs `pip install vocabshard[score]`. One thread and a seed: the same Python, torch and machine give the same files.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

LICENCE = "Python Software Foundation License, version 2 (PSF-2.0)"
HELD_OUT_TOPICS = ("calls", "import", "objects")  # they share few paragraphs with other topics
SKIPPED_FOLDERS = {"test", "tests", "site-packages", "idlelib", "lib2to3", "ensurepip", "turtledemo", "__pycache__"}
BOS = "<|bos|>"
PAD_TO = 128 * 4  # what Megatron pads a vocabulary to at tensor-parallel degree 4
CONTEXT = 256


@dataclass(frozen=True)
class Recipe:
    """What a run of the training depends on, beside the text."""

    steps: int
    batch: int
    learning_rate: float
    seed: int
    entries: int  # of the tokenizer: no multiple of 16, so that the padding starts inside a tile


def topics() -> dict[str, str]:
    """The language reference topics of this Python, by name."""
    from pydoc_data.topics import topics as found

    return dict(sorted(found.items()))


def docstrings() -> Iterator[str]:
    """Every docstring of the standard library's Python files, in path order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) > 80:
                    yield text


def without_seen(documents: Iterable[str], seen: set[str]) -> list[str]:
    """The documents without the paragraphs in `seen`; every paragraph kept joins `seen`, so none is kept twice."""
    kept = []
    for document in documents:
        paragraphs = []
        for paragraph in document.split("\n\n"):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                paragraphs.append(paragraph)
        if paragraphs:
            kept.append("\n\n".join(paragraphs) + "\n")
    return kept


def split_text() -> tuple[list[str], str]:
    """Training documents, and the held-out text."""
    found = topics()
    held_out = "\n".join(found.pop(name) for name in HELD_OUT_TOPICS)
    seen = {" ".join(paragraph.split()) for paragraph in held_out.split("\n\n")}
    return without_seen(found.values(), seen) + without_seen(docstrings(), seen), held_out


def train_tokenizer(documents: list[str], entries: int) -> Tokenizer:
    """A byte-level BPE of exactly `entries` entries, that puts BOS first when asked for special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    if tokenizer.get_vocab_size() != entries:
        raise ValueError(
            f"expected a tokenizer of {entries} entries, got {tokenizer.get_vocab_size()}: too little text"
        )
    return tokenizer


def build_model(entries: int, bos: int) -> LlamaForCausalLM:
    """An untied model whose embedding and head are padded; the padding rows are zero, and stay so."""
    padded = -(-entries // PAD_TO) * PAD_TO
    config = LlamaConfig(
        vocab_size=padded,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=bos,
        eos_token_id=bos,
        pad_token_id=None,
    )
    config.real_vocab_size = entries
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[entries:] = 0
        model.get_input_embeddings().weight[entries:] = 0
    return model


def token_losses(model: LlamaForCausalLM, ids: torch.Tensor, entries: int) -> torch.Tensor:
    """-log p of `ids[:, 1:]` given what precedes, over the real entries only; `ids` int64 [B, T], the result fp32."""
    hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
    logits = F.linear(hidden, model.lm_head.weight[:entries])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


def train(model: LlamaForCausalLM, stream: torch.Tensor, entries: int, recipe: Recipe) -> None:
    """AdamW over random windows of `stream` (int64 [T]), with a warm-up and a cosine decay to a tenth."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(recipe.seed)
    window = torch.arange(CONTEXT + 1)
    warm_up = max(1, recipe.steps // 20)
    average, started = math.log(entries), time.perf_counter()
    for step in range(recipe.steps):
        progress = max(0, step - warm_up) / max(1, recipe.steps - warm_up)
        scale = min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * scale
        starts = torch.randint(len(stream) - CONTEXT, (recipe.batch, 1), generator=generator)
        loss = token_losses(model, stream[starts + window], entries).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average += 0.02 * (loss.item() - average)
        if step % 50 == 49:
            print(f"step {step + 1:5d}  loss {average:.3f}  {time.perf_counter() - started:.0f} s", flush=True)


@torch.no_grad()
def held_out_perplexity(model: LlamaForCausalLM, ids: torch.Tensor, entries: int, stride: int = CONTEXT // 2) -> float:
    """Perplexity of `ids[1:]`, each token with at least `CONTEXT - stride` tokens before it where there are as many."""
    total, scored = 0.0, 0
    for start in range(0, len(ids) - 1, stride):
        window = ids[start : start + CONTEXT + 1]
        losses = token_losses(model, window[None], entries)
        fresh = losses[scored - start :]
        total += fresh.double().sum().item()
        scored += len(fresh)
        if scored == len(ids) - 1:
            break
    return math.exp(total / scored)


def unigram_perplexity(fitted_on: torch.Tensor, ids: torch.Tensor, entries: int) -> float:
    """Perplexity of `ids` under the token frequencies of `fitted_on`, one added to every count."""
    counts = torch.bincount(fitted_on, minlength=entries).double() + 1
    return math.exp(-(counts / counts.sum()).log()[ids].mean().item())


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, text: str, out: Path) -> None:
    """Writes the Hugging Face style directory (weights in bf16) and the held-out text."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        **model.config.to_diff_dict(),
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
    }
    describe = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": BOS,
        "model_max_length": CONTEXT,
    }
    for name, content in (("config.json", config), ("tokenizer_config.json", describe)):
        (out / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "text.txt").write_text(text, encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=f"Train tiny_lm. The text's licence: {LICENCE}.")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="directory to write (default: this one)"
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=12, help=f"windows of {CONTEXT} tokens a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--entries", type=int, default=2251, help="entries of the tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    recipe = Recipe(args.steps, args.batch, args.learning_rate, args.seed, args.entries)

    torch.set_num_threads(args.threads)
    torch.manual_seed(recipe.seed)
    documents, text = split_text()
    tokenizer = train_tokenizer(documents, recipe.entries)
    stream = torch.tensor([token for encoding in tokenizer.encode_batch(documents) for token in encoding.ids])
    held_out = torch.tensor(tokenizer.encode(text).ids)
    model = build_model(recipe.entries, tokenizer.token_to_id(BOS))
    print(f"text: {LICENCE}")
    print(f"{len(documents)} documents, {len(stream)} training tokens, {len(held_out) - 1} held-out tokens")
    print(
        f"{sum(parameter.numel() for parameter in model.parameters())} parameters, vocabulary {recipe.entries} padded "
        f"to {model.config.vocab_size}"
    )

    train(model, stream, recipe.entries, recipe)
    save(model.bfloat16(), tokenizer, text, args.out)
    model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)  # rounded, computed in fp32, as in scoring
    print(f"held-out perplexity {held_out_perplexity(model, held_out, recipe.entries):.2f}")
    print(
        f"unigram perplexity {unigram_perplexity(stream, held_out[1:], recipe.entries):.2f}, "
        f"fitted on the held-out text itself {unigram_perplexity(held_out[1:], held_out[1:], recipe.entries):.2f}"
    )


if __name__ == "__main__":
    main()
