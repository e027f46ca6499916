"""A checkpoint folder of Hugging Face: what it is, its module, its tokenizer and how it writes.

transformers, tokenizers and safetensors read it; nothing is fetched, and no code of the folder is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from anesurgery.errors import LoadError
from anesurgery.files.runner_file import sha256_of
from anesurgery.files.weights import not_fetched
from anesurgery.shipping.mapped_weights import widened

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
WEIGHT_INDEX = "model.safetensors.index.json"
TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
READ = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
"""The files of a checkpoint that change what is built."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a config, weights and a tokenizer."""

    folder: Path
    config: Any
    """Of transformers."""

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """The config of a folder.

        Raises:
            LoadError: it is no checkpoint that transformers reads, or transformers is missing.
        """
        if not (folder / CONFIG).is_file():
            raise LoadError(
                f"{folder} holds no {CONFIG}; give a folder that save_pretrained or a download wrote"
            )
        if not any(folder.glob("*.safetensors")):
            raise LoadError(f"{folder} holds no .safetensors; save the model with save_pretrained")
        try:
            from transformers import AutoConfig
        except ImportError as error:
            raise LoadError("reading a checkpoint needs transformers: pip install 'anesurgery[hf]'") from error
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises what it likes
            raise LoadError(f"{folder / CONFIG}: transformers cannot read it: {_first(error)}") from error
        _check_weights(folder)
        _json(folder / TOKENIZER)
        return cls(folder, config)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """The hash of each file that changes what is built."""
        files = sorted({file for pattern in READ for file in self.folder.glob(pattern)})
        return {file.name: sha256_of(file) for file in files}

    @property
    def positions(self) -> int | None:
        """The most tokens that it was made for, where the config says it."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return int(found) if isinstance(found, int) else None

    @property
    def words(self) -> int:
        """How many tokens there are."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def tied(self) -> bool:
        """Does its head read the table of embeddings?"""
        return bool(getattr(self.config.get_text_config(), "tie_word_embeddings", False))

    def module(self, work: Path) -> Any:
        """The model in fp32, ready to be traced; its weights are mapped from files.

        Args:
            work: a folder for weights in fp32, where the checkpoint has others; the model needs it.

        Raises:
            LoadError: transformers cannot make it, or weights are missing.
        """
        import torch
        from transformers import AutoModelForCausalLM

        try:
            with silent():
                model, info = AutoModelForCausalLM.from_pretrained(
                    widened(self.folder, work / "fp32"),
                    local_files_only=True,
                    dtype=torch.float32,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # named below
                )
        except Exception as error:  # transformers raises what it likes
            kind = getattr(self.config, "model_type", "?")
            raise LoadError(
                f"{self.folder}: transformers cannot load it as a causal language model (model_type {kind!r}): "
                f"{_first(error)}"
            ) from error
        if other := sorted(info["mismatched_keys"]):
            name, stored, expected = other[0]
            raise LoadError(
                f"{self.folder}: {name} is {tuple(stored)} in the weights and {tuple(expected)} by {CONFIG}"
                + _more(other)
            )
        if lost := sorted(info["missing_keys"]):
            raise LoadError(
                f"{self.folder}: the weights have no {lost[0]}, which {CONFIG} asks for{_more(lost)}"
            )
        return model.eval()

    @cached_property
    def _generation(self) -> Mapping[str, Any]:
        return _json(self.folder / GENERATION)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens after which an answer is complete."""
        found = self._generation.get("eos_token_id", getattr(self.config, "eos_token_id", None))
        several = found if isinstance(found, list) else [] if found is None else [found]
        return tuple(int(token) for token in several)

    @property
    def sampling(self) -> dict[str, Any]:
        """What it samples with; nothing where it takes the likeliest token."""
        if not self._generation.get("do_sample"):
            return {}
        given = {name: self._generation.get(name) for name in SAMPLING}
        return {"temperature": 1.0} | {name: value for name, value in given.items() if value is not None}

    @property
    def template(self) -> str:
        """The chat template; "" for none."""
        file, config = (self.folder / name for name in TEMPLATES)
        if file.is_file():
            return file.read_text(encoding="utf-8")
        found = _json(config).get("chat_template")
        if isinstance(found, list):  # several by name
            named = {row.get("name"): row.get("template") for row in found if isinstance(row, dict)}
            found = named.get("default") or next(iter(named.values()), "")
        return found if isinstance(found, str) else ""

    @property
    def special(self) -> dict[str, str]:
        """The special tokens by name, as templates read them."""
        given = _json(self.folder / TEMPLATES[1])
        texts = {
            name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()
        }
        return {n: t for n, t in texts.items() if n.endswith("_token") and isinstance(t, str)}

    def tokenizer(self) -> str:
        """The tokenizer as the text of a file of the tokenizers library; "" where the folder has none.

        Raises:
            LoadError: it has one that no such file can be made of.
        """
        file = self.folder / TOKENIZER
        if file.is_file():
            return file.read_text(encoding="utf-8")
        if not any((self.folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
            return ""
        from transformers import AutoTokenizer

        try:
            made = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
            text: str = made.backend_tokenizer.to_str()
        except Exception as error:  # transformers raises what it likes
            raise LoadError(
                f"{self.folder}: no {TOKENIZER} can be made of its tokenizer: {_first(error)}"
            ) from error
        return text


def _check_weights(folder: Path) -> None:
    """Look at the header of each file of weights, and for each file that the index names.

    Raises:
        LoadError: one is missing, not fetched, or damaged.
    """
    from safetensors import safe_open

    named = _json(folder / WEIGHT_INDEX).get("weight_map")
    listed = sorted(set(named.values())) if isinstance(named, dict) else []
    for file in (folder / str(name) for name in listed):
        if not file.is_file():
            raise LoadError(f"{file} is not there, though {WEIGHT_INDEX} names it; fetch the folder again")
    for file in sorted(folder.glob("*.safetensors")):
        if pointer := not_fetched(file):
            raise LoadError(pointer)
        try:
            with safe_open(file, "numpy"):
                pass
        except Exception as error:  # the library raises its own
            raise LoadError(f"{file} is damaged: {_first(error)}; fetch it again") from error


@contextmanager
def silent() -> Iterator[None]:
    """Transformers shows no bars and tables of its own: what matters in them is raised."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _more(names: Sequence[Any]) -> str:
    """How many others there are."""
    return f"; and {len(names) - 1} more" if len(names) > 1 else ""


def _json(file: Path) -> Mapping[str, Any]:
    """What a file holds; nothing where it is absent.

    Raises:
        LoadError: it cannot be read.
    """
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{file} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _first(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
