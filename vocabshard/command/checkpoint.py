"""A Hugging Face style checkpoint directory: its settings, and any rows of its head without reading the others.

The head is the tensor named `lm_head.weight` (or `embed_out.weight`) or, when the config ties it, the token embedding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocabshard.command.errors import InputError, first_line, require

if TYPE_CHECKING:
    import torch

HEAD_SUFFIXES = ("lm_head.weight", "embed_out.weight")
EMBEDDING_SUFFIXES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "tok_embeddings.weight")
FLOATS = ("F32", "F16", "BF16")
# What some models do to their logits and the head operator does not: leaving it out would give wrong numbers silently.
UNSUPPORTED_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True)
class Checkpoint:
    """A checked directory; `files` maps every tensor's name to the safetensors file that holds it."""

    path: Path
    config: Mapping[str, Any]
    files: Mapping[str, Path]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Reads the config and the headers of the weight files.

        Raises InputError when something is missing, corrupt or truncated, or when the head is not one that can be
        scored.
        """
        path = Path(path)
        if not path.is_dir():
            raise InputError(
                f"checkpoint {path}: expected a directory, found {'a file' if path.exists() else 'nothing'}"
            )
        checkpoint = cls(path, _read_json(path / "config.json"), _tensor_files(path))
        checkpoint._check_head()
        return checkpoint

    def setting(self, name: str, default: Any = None) -> Any:
        """A value of the config, or of its text model's when the whole model has several parts."""
        text = self.config.get("text_config")
        inner = text.get(name) if isinstance(text, Mapping) else None
        value = self.config.get(name)
        return next((found for found in (value, inner) if found is not None), default)

    @cached_property
    def tied(self) -> bool:
        """Whether the head is the token embedding, by the config, or by transformers' default for such a config."""
        tied = self.setting("tie_word_embeddings")
        if tied is None:
            auto = require("transformers").AutoConfig
            try:
                tied = auto.from_pretrained(self.path, local_files_only=True).tie_word_embeddings
            except Exception as error:  # whatever a config of unknown content makes transformers raise
                raise InputError(f"{self.path / 'config.json'}: {first_line(error)}") from error
        return bool(tied)

    @cached_property
    def head_name(self) -> str:
        """The name of the head's weight."""
        suffixes = EMBEDDING_SUFFIXES + HEAD_SUFFIXES if self.tied else HEAD_SUFFIXES
        for suffix in suffixes:
            names = [name for name in self.files if name == suffix or name.endswith("." + suffix)]
            if len(names) > 1:
                raise InputError(f"checkpoint {self.path}: expected one head, found {', '.join(sorted(names))}")
            if names:
                return names[0]
        raise InputError(
            f"checkpoint {self.path}: no head: none of its {len(self.files)} tensors is named {' or '.join(suffixes)}"
        )

    @cached_property
    def bias_name(self) -> str | None:
        """The name of the head's bias, if it has one."""
        name = self.head_name.removesuffix("weight") + "bias"
        return name if name in self.files else None

    @cached_property
    def head_shape(self) -> tuple[int, int]:
        """Rows (padding included) and hidden size of the head."""
        rows, width = _slice(self.files[self.head_name], self.head_name).get_shape()
        return rows, width

    @property
    def softcap(self) -> float | None:
        """The bound of the model's soft-cap on its logits, if it has one."""
        return self.setting("final_logit_softcapping")

    @property
    def context(self) -> int | None:
        """The number of positions of the model, where the config says it."""
        positions = self.setting("max_position_embeddings", self.setting("n_positions"))
        if positions is not None and (type(positions) is not int or positions < 1):
            raise InputError(
                f"{self.path / 'config.json'}: expected a positive number of positions (max_position_embeddings), "
                f"got {positions!r}"
            )
        return positions

    def real_vocab_size(self, asked: int | None = None) -> int:
        """Rows of the head that are no padding: what was asked for, else the config's `real_vocab_size`, else all."""
        rows = self.head_shape[0]
        real = self.setting("real_vocab_size", rows) if asked is None else asked
        if type(real) is not int or not 1 <= real <= rows:
            raise InputError(f"real vocabulary size: expected 1 to {rows}, the rows of {self.head_name}, got {real!r}")
        return real

    def head_shard(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows `[start, stop)` of the head as stored [stop - start, D], and of its bias; only they are read."""
        weight = self._rows(self.head_name, start, stop)
        return weight, None if self.bias_name is None else self._rows(self.bias_name, start, stop)

    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of the config, the tokenizer and every weight file, by file name."""
        names = {"config.json", "tokenizer.json", "tokenizer.model", *(file.name for file in self.files.values())}
        return {name: file_sha256(self.path / name) for name in sorted(names) if (self.path / name).is_file()}

    def _rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        try:
            rows = _slice(self.files[name], name)[start:stop]
        except Exception as error:  # SafetensorError: the file has changed since it was checked
            raise InputError(f"{self.files[name]}: rows {start} to {stop} of {name}: {first_line(error)}") from error
        return rows.clone()  # the slice may be a view of the mapped file

    def _check_head(self) -> None:
        scales = [name for name in UNSUPPORTED_SCALES if self.setting(name) not in (None, 1, 1.0)]
        if scales:
            raise InputError(
                f"{self.path / 'config.json'}: {scales[0]} = {self.setting(scales[0])!r} scales the logits, "
                "which this command does not support"
            )
        axes_of = {self.head_name: 2, **({self.bias_name: 1} if self.bias_name else {})}
        for name, axes in axes_of.items():
            found = _slice(self.files[name], name)
            if len(found.get_shape()) != axes or found.get_dtype() not in FLOATS:
                raise InputError(
                    f"checkpoint {self.path}: {name}: expected {axes} axes of {', '.join(FLOATS)}, got shape "
                    f"{list(found.get_shape())} of {found.get_dtype()}"
                )
        rows, width = self.head_shape
        for key, size in (("hidden_size", width), ("vocab_size", rows)):
            stated = self.setting(key, size)
            if stated != size:
                raise InputError(
                    f"{self.path / 'config.json'}: {key} is {stated!r}, but {self.head_name} is {rows} x {width}"
                )
        self.real_vocab_size()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _tensor_files(path: Path) -> dict[str, Path]:
    """Every tensor's file, by the index if there is one; each file's header is read and its length checked."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        stated = _read_json(index).get("weight_map")
        if not isinstance(stated, dict) or not all(isinstance(name, str) for name in stated.values()):
            raise InputError(f"{index}: expected a weight_map from tensor names to file names")
        files = {path / name for name in stated.values()}
    else:
        stated = None
        files = {path / "model.safetensors"}
        if not (path / "model.safetensors").exists():
            others = sorted(path.glob("*.safetensors"))
            if len(others) != 1:
                raise InputError(f"checkpoint {path}: expected model.safetensors or {index.name}, found neither")
            files = set(others)
    found: dict[str, Path] = {}
    for file in sorted(files):
        with _open(file) as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    for name, file_name in (stated or {}).items():
        if found.get(name) != path / file_name:
            raise InputError(f"{index}: says that {name} is in {file_name}, but it is not")
    return found


def _open(file: Path) -> Any:
    safetensors = require("safetensors")
    try:
        return safetensors.safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise InputError(f"{file}: not found") from error
    except Exception as error:  # SafetensorError: a bad header, or a file shorter or longer than its header says
        raise InputError(f"{file}: not a whole safetensors file: {first_line(error)}") from error


def _slice(file: Path, name: str) -> Any:
    """The tensor as something that answers for its shape and type, and reads only the rows it is asked for."""
    return _open(file).get_slice(name)
