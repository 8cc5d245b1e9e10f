"""From an input file to the sequences of tokens to score: a plain text, or JSON Lines of prompts and completions."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vocabshard.command.checkpoint import Checkpoint
from vocabshard.command.errors import InputError, first_line, require

ALL, COMPLETION = "all", "completion"
JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Tokens:
    """A sequence of tokens; `ids[context:]` are scored, what precedes them is only seen by the model."""

    ids: list[int]
    texts: list[str]  # of each of `ids`
    context: int

    def __len__(self) -> int:
        return len(self.ids) - self.context


@dataclass(frozen=True)
class Encoded:
    """A text in tokens; the `opening` first of them are the tokenizer's own (BOS), and no text."""

    ids: list[int]
    texts: list[str]
    opening: int


Encode = Callable[[str, bool], Encoded]  # (text, whether the tokenizer puts its own tokens around it)


def is_json_lines(path: Path) -> bool:
    """Whether a file of this name holds JSON Lines."""
    return path.suffix.lower() in JSON_LINES


def read_sequences(path: Path, checkpoint: Checkpoint, scope: str | None, real_vocab_size: int) -> list[Tokens]:
    """The sequences of an input file: one of a text, one a line of JSON Lines, each with something to score.

    `scope` is ALL, COMPLETION or None, which is ALL of a text and the COMPLETION of JSON Lines. Raises InputError,
    which names the line where there are lines.
    """
    sequences = []
    if is_json_lines(path):
        pairs = list(read_pairs(path))
        encode = load_tokenizer(checkpoint.path)
        for number, (prompt, completion) in enumerate(pairs, 1):
            tokens = tokenize(encode, prompt, completion, scope or COMPLETION)
            sequences.append(_checked(tokens, f"{path}:{number}", checkpoint, real_vocab_size))
    else:
        if scope == COMPLETION:
            raise InputError(f"--score completion: {path} is a text; prompts and completions come in a *.jsonl")
        text = read_text(path)
        tokens = tokenize(load_tokenizer(checkpoint.path), text, "", ALL)
        sequences.append(_checked(tokens, f"text {path}", checkpoint, real_vocab_size))
    return sequences


def read_text(path: Path) -> str:
    """A file's UTF-8 text, without a byte order mark. Raises InputError when it cannot be read, is empty or no text."""
    content = _read_bytes(path)
    mark = len(codecs.BOM_UTF8) if content.startswith(codecs.BOM_UTF8) else 0
    try:
        text = content[mark:].decode("utf-8")
    except UnicodeDecodeError as error:
        at = mark + error.start
        raise InputError(f"text {path}: not UTF-8: byte 0x{content[at]:02x} at position {at}") from error
    if "\0" in text:
        raise InputError(f"text {path}: binary: a zero byte at position {content.index(0)}")
    if not text.strip():
        raise InputError(f"text {path}: empty")
    return text


def read_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """(prompt, completion) of every line. Raises InputError for the first line that is not as expected."""
    lines = _read_bytes(path).removeprefix(codecs.BOM_UTF8).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise InputError(f"text {path}: empty")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(f"{path}:{number}: not UTF-8: byte 0x{line[error.start]:02x}") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: not JSON: {first_line(error)}") from error
        if not isinstance(record, dict):
            raise InputError(f"{path}:{number}: expected a JSON object, got {type(record).__name__}")
        for key in ("prompt", "completion"):
            if not isinstance(record.get(key), str):
                found = "none" if key not in record else repr(record[key])[:40]
                raise InputError(f"{path}:{number}: expected a {key}, which is a text, got {found}")
            if lone := next((c for c in record[key] if "\ud800" <= c <= "\udfff"), None):
                raise InputError(f"{path}:{number}: {key}: \\u{ord(lone):04x} is half of a character, not a text")
        if not record["completion"]:
            raise InputError(f"{path}:{number}: empty completion: there is nothing to score")
        yield record["prompt"], record["completion"]


def tokenize(encode: Encode, prompt: str, completion: str, scope: str) -> Tokens:
    """The tokens of both texts, each tokenized by itself, after the special ones (BOS) that this tokenizer puts first.

    ALL scores every one but those, COMPLETION the completion's. Without any before it the first one is not scored.
    """
    first = encode(prompt or "a", True)
    if not prompt:
        first = Encoded(first.ids[: first.opening], first.texts[: first.opening], first.opening)
    second = encode(completion, False) if completion else Encoded([], [], 0)
    context = first.opening if scope == ALL else len(first.ids)
    return Tokens(first.ids + second.ids, first.texts + second.texts, max(1, context))


def _checked(tokens: Tokens, where: str, checkpoint: Checkpoint, real_vocab_size: int) -> Tokens:
    if len(tokens) < 1:
        raise InputError(f"{where}: {len(tokens.ids)} tokens: there is none to score after the first")
    largest = max(tokens.ids)
    if largest >= real_vocab_size:
        raise InputError(
            f"{where}: the tokenizer of {checkpoint.path} gives token {largest}, beyond the head's {real_vocab_size} "
            "real rows: it belongs to another model, or --real-vocab-size is too small"
        )
    return tokens


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"text {path}: cannot be read: {error.strerror}") from error


def load_tokenizer(path: Path) -> Encode:
    """The tokenizer of a checkpoint's directory."""
    return _fast(path) or _slow(path)


def _encoded(ids: list[int], texts: list[str], special: list[int]) -> Encoded:
    opening, end = 0, len(ids)
    while end and special[end - 1]:  # what closes a sequence is no text
        end -= 1
    while opening < end and special[opening]:
        opening += 1
    return Encoded(ids[:end], texts[:end], opening)


def _fast(path: Path) -> Encode | None:
    """By `tokenizer.json` alone, which spares loading transformers; None when there is no such file."""
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    try:
        tokenizer = require("tokenizers").Tokenizer.from_file(str(file))
    except InputError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{file}: not a tokenizer: {first_line(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str, open_it: bool) -> Encoded:
        encoding = tokenizer.encode(text, add_special_tokens=open_it)
        texts = [text[start:stop] for start, stop in encoding.offsets]
        return _encoded(list(encoding.ids), texts, encoding.special_tokens_mask)

    return encode


def _slow(path: Path) -> Encode:
    """By whatever tokenizer transformers finds in the directory."""
    transformers = require("transformers")

    def ids_of(tokenizer: Any, text: str, open_it: bool) -> list[int]:
        return list(tokenizer(text, truncation=False, add_special_tokens=open_it)["input_ids"])

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        alone, whole = (ids_of(tokenizer, "a", open_it) for open_it in (False, True))
    except Exception as error:  # a missing or corrupt file of any of many formats
        raise InputError(
            f"checkpoint {path}: no tokenizer.json, and no other tokenizer could be loaded: {first_line(error)}"
        ) from error

    # how many it puts around any text; by their ids they could not be told from special tokens that are in the text
    opening = next((at for at in range(len(whole)) if whole[at : at + len(alone)] == alone), 0)
    closing = len(whole) - opening - len(alone)

    def encode(text: str, open_it: bool) -> Encoded:
        ids = ids_of(tokenizer, text, open_it)
        if open_it:
            ids = ids[: len(ids) - closing]
        return Encoded(ids, [tokenizer.decode([token]) for token in ids], opening if open_it else 0)

    return encode
