"""From a text file to the tokens to score, with the tokenizer of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vocabshard.command.checkpoint import Checkpoint
from vocabshard.command.errors import InputError, first_line, require

_Encoding = tuple[list[int], list[str], list[int]]  # ids, the text of each, and 1 for each special token


@dataclass(frozen=True)
class Tokens:
    """A sequence of tokens; `ids[context:]` are scored, what precedes them is only seen by the model."""

    ids: list[int]
    texts: list[str]  # of each of `ids`
    context: int

    def __len__(self) -> int:
        return len(self.ids) - self.context


def read_text(path: str | Path) -> str:
    """A file's UTF-8 text. Raises InputError when it cannot be read, is empty, or is no text."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"text {path}: cannot be read: {error.strerror}") from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"text {path}: not UTF-8: byte 0x{content[error.start]:02x} at position {error.start}"
        ) from error
    if "\0" in text:
        raise InputError(f"text {path}: binary: a zero byte at position {content.index(0)}")
    if not text.strip():
        raise InputError(f"text {path}: empty")
    return text


def tokenize(checkpoint: Checkpoint, text: str, real_vocab_size: int) -> Tokens:
    """All tokens of `text`, after the special ones (BOS) that this tokenizer puts first.

    Without any, the first token of the text has nothing before it and is not scored.
    """
    ids, texts, special = _encode_fast(checkpoint.path, text) or _encode_slow(checkpoint.path, text)
    context, end = 0, len(ids)
    while end and special[end - 1]:  # what closes a sequence is no text
        end -= 1
    while context < end and special[context]:
        context += 1
    ids, texts, context = ids[:end], texts[:end], max(1, context)
    if len(ids) <= context:
        raise InputError(f"the text is {len(ids)} tokens long: there is none to score after the first")
    if max(ids) >= real_vocab_size:
        raise InputError(
            f"the tokenizer of {checkpoint.path} gives token {max(ids)}, beyond the head's {real_vocab_size} "
            "real rows: it belongs to another model, or --real-vocab-size is too small"
        )
    return Tokens(ids, texts, context)


def _encode_fast(path: Path, text: str) -> _Encoding | None:
    """By `tokenizer.json` alone, which spares loading transformers; None when there is no such file."""
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    tokenizers = require("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{file}: not a tokenizer: {first_line(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoding = tokenizer.encode(text)
    return list(encoding.ids), [text[start:stop] for start, stop in encoding.offsets], encoding.special_tokens_mask


def _encode_slow(path: Path, text: str) -> _Encoding:
    """By whatever tokenizer transformers finds in the directory."""
    transformers = require("transformers")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        ids = tokenizer(text, truncation=False)["input_ids"]
    except Exception as error:  # a missing or corrupt file of any of many formats
        raise InputError(
            f"checkpoint {path}: no tokenizer.json, and no other tokenizer could be loaded: {first_line(error)}"
        ) from error
    special = set(tokenizer.all_special_ids)
    return ids, [tokenizer.decode([token]) for token in ids], [int(token in special) for token in ids]
