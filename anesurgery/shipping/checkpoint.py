"""Read a checkpoint folder of Hugging Face: its config, module, tokenizer, chat template and sampling settings.

`build` reads one with `Checkpoint.read`. transformers, tokenizers and safetensors do the reading; nothing is
downloaded, and no code of the folder is run.

While the checkpoint is converted its weights stay in memory-mapped files, to need less memory: the operating
system reads a mapped array when it is used, and drops it when memory is short. `fp32_checkpoint` maps the
weights of the PyTorch module, and `mapped_constants` the constants that coremltools makes of them. A conversion
then holds a few copies of the largest weight, not of all weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.errors import LoadError, first_line
from anesurgery.files import arrays
from anesurgery.files.runner_file import sha256_of
from anesurgery.files.source import not_fetched
from anesurgery.mil import Array, patched, quiet_host

LEAST = 1 << 20
"""Smallest array, in bytes, that gets a file of its own. A choice: 1 MB keeps the number of files small."""
SHARD = 1 << 28
"""Bytes of one file of fp32 weights; a single larger weight exceeds it. A choice: 268 MB at a time fit in
memory."""
PIECE = 1 << 20
"""Elements that are checked for overflow at once: 4.2 MB of fp32."""
INFINITE = 1e38
"""Magnitude from which coremltools takes a number for an infinity, which it leaves as it is."""
WEIGHTS, WEIGHT_INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of all weights, and the file that says in which file each weight is."""


def fp32_checkpoint(folder: Path, to: Path) -> Path:
    """Copy a checkpoint with all floats in fp32, because only fp32 weights can be mapped into the module.

    Args:
        folder: the checkpoint, with its safetensors.
        to: the folder to make; its config files are the same.

    Returns:
        `to`, or `folder` itself where all its floats are fp32 already.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    files = _weight_files(folder)
    if not _has_half_floats(files):
        return folder
    to.mkdir(parents=True)
    for file in folder.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy2(file, to)
    file_of_weight: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def write_shard() -> None:
        name = f"model-{len(set(file_of_weight.values()))}.safetensors"
        save_file(shard, to / name, {"format": "pt"})
        file_of_weight.update(dict.fromkeys(shard, name))
        shard.clear()

    for file in files:
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - no mapping
                tensor = stored.get_tensor(name)
                shard[name] = tensor.float() if tensor.is_floating_point() else tensor
                if sum(t.nbytes for t in shard.values()) > SHARD:
                    write_shard()
    if shard:
        write_shard()
    arrays.write_text(to / WEIGHT_INDEX, json.dumps({"metadata": {}, "weight_map": file_of_weight}))
    return to


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers reads; others beside them may hold other weights of the same names."""
    if (whole := folder / WEIGHTS).is_file():
        return [whole]
    named = _read_json(folder / WEIGHT_INDEX).get("weight_map")
    if isinstance(named, dict):
        return sorted({folder / str(name) for name in named.values()})
    return sorted(folder.glob("*.safetensors"))


def _has_half_floats(files: list[Path]) -> bool:
    """Return whether any weight is fp16 or bf16."""
    from safetensors import safe_open

    dtypes = set()
    for file in files:
        with safe_open(file, "pt") as stored:
            dtypes |= {stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118 - no mapping
    return bool(dtypes & {"F16", "BF16"})


@contextmanager
def mapped_constants(folder: Path) -> Iterator[None]:
    """Within the context, map the large constants that coremltools makes from files in a folder."""
    with quiet_host():
        from coremltools.converters.mil.mil.operation import Operation
        from coremltools.converters.mil.mil.passes.defs.quantization import FP16ComputePrecision
    names, infer = count(), Operation._auto_val

    def map_if_large(value: Any) -> Any:
        return _mapped_copy(value, folder / str(next(names))) if _should_be_mapped(value) else value

    def infer_mapped(op: Any, output_types: Any) -> Any:
        inferred = infer(op, output_types)
        for result in inferred:
            if result is not None:
                result.val = map_if_large(result.val)
        return inferred

    with ExitStack() as stack:
        stack.enter_context(patched(Operation, "_auto_val", infer_mapped))
        overflows = staticmethod(_overflow_check(FP16ComputePrecision.fp16_overflow))
        stack.enter_context(patched(FP16ComputePrecision, "fp16_overflow", overflows))
        yield


def _should_be_mapped(value: Any) -> bool:
    """Return whether a value is a large array in numpy's own memory; torch's are mapped already."""
    if not isinstance(value, np.ndarray) or value.nbytes < LEAST or value.dtype.kind not in "fiub":
        return False
    owner: Any = value
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return isinstance(owner, np.ndarray)


def _mapped_copy(value: Array, file: Path) -> Array:
    """Copy an array into a mapped file; unlinked at once, it vanishes with its last reader."""
    buffer = torch.from_file(str(file), shared=True, size=value.nbytes, dtype=torch.uint8)
    file.unlink()
    copy: Array = buffer.numpy().view(value.dtype).reshape(value.shape)
    copy[...] = value
    return copy


def _overflow_check(host: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wrap coremltools' test whether a constant overflows fp16, to avoid copies of large ones."""

    def overflows(op: Any) -> bool:
        lists = [v if isinstance(v, (list, tuple)) else [v] for v in op.inputs.values()]
        operands = list(chain.from_iterable(lists))
        constants = [v.op.val.val for v in operands if v.op is not None and v.op.op_type == "const"]
        large = [c for c in constants if isinstance(c, np.ndarray) and c.size > PIECE]
        if not large:
            return host(op)
        return any(
            _has_finite_overflow(np.asarray(c)) for c in constants if getattr(c, "dtype", None) == np.float32
        )

    return overflows


def _has_finite_overflow(values: Array) -> bool:
    """Return whether a finite number is beyond the range of fp16."""
    flat = values.reshape(-1)
    pieces = (np.abs(flat[at : at + PIECE]) for at in range(0, flat.size, PIECE))
    return any(bool(((p > fp16.LARGEST) & (p < INFINITE)).any()) for p in pieces)


CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TEMPLATES = ("chat_template.jinja", "tokenizer_config.json")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
INPUT_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
"""Patterns of the files that `build` depends on: a build starts anew when one of them changes."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a config, weights and a tokenizer."""

    folder: Path
    config: Any
    """The config object of transformers."""

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read the config of a folder, and check the headers of its weight files.

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
            raise LoadError(f"{folder / CONFIG}: transformers cannot read it: {first_line(error)}") from error
        _check_weights(folder)
        _read_json(folder / TOKENIZER)
        return cls(folder, config)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """File name -> its hash, of each file that the build depends on."""
        files = sorted({file for pattern in INPUT_FILES for file in self.folder.glob(pattern)})
        return {file.name: sha256_of(file) for file in files}

    @property
    def positions(self) -> int | None:
        """The most tokens that the model was made for; None where the config does not say it."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return int(found) if isinstance(found, int) else None

    @property
    def words(self) -> int:
        """The size of the vocabulary."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def tied(self) -> bool:
        """Whether the head shares its weight with the embeddings."""
        return bool(getattr(self.config.get_text_config(), "tie_word_embeddings", False))

    def module(self, work: Path) -> Any:
        """Load the model in fp32, ready to be traced, with its weights mapped from files.

        Args:
            work: a folder for fp32 copies of weights of other dtypes. Keep it as long as the module is used.

        Raises:
            LoadError: transformers cannot load it, or weights are missing or have other shapes.
        """
        from transformers import AutoModelForCausalLM

        try:
            with quiet_transformers():
                model, info = AutoModelForCausalLM.from_pretrained(
                    fp32_checkpoint(self.folder, work / "fp32"),
                    local_files_only=True,
                    dtype=torch.float32,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # named below
                )
        except Exception as error:  # transformers raises what it likes
            kind = getattr(self.config, "model_type", "?")
            raise LoadError(
                f"{self.folder}: transformers cannot load it as a causal language model (model_type {kind!r}): "
                f"{first_line(error)}"
            ) from error
        if other := sorted(info["mismatched_keys"]):
            name, stored, expected = other[0]
            raise LoadError(
                f"{self.folder}: {name} is {tuple(stored)} in the weights and {tuple(expected)} by {CONFIG}"
                + _and_more(other)
            )
        if lost := sorted(info["missing_keys"]):
            raise LoadError(
                f"{self.folder}: the weights have no {lost[0]}, which {CONFIG} asks for{_and_more(lost)}"
            )
        return model.eval()

    @cached_property
    def _generation(self) -> Mapping[str, Any]:
        return _read_json(self.folder / GENERATION)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        found = self._generation.get("eos_token_id", getattr(self.config, "eos_token_id", None))
        several = found if isinstance(found, list) else [] if found is None else [found]
        return tuple(int(token) for token in several)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling options of the checkpoint; empty where it always takes the likeliest token."""
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
        found = _read_json(config).get("chat_template")
        if isinstance(found, list):  # several by name
            named = {row.get("name"): row.get("template") for row in found if isinstance(row, dict)}
            found = named.get("default") or next(iter(named.values()), "")
        return found if isinstance(found, str) else ""

    @property
    def special(self) -> dict[str, str]:
        """Name of a special token -> its text, as templates read them."""
        given = _read_json(self.folder / TEMPLATES[1])
        texts = {
            name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()
        }
        return {n: t for n, t in texts.items() if n.endswith("_token") and isinstance(t, str)}

    def tokenizer(self) -> str:
        """Return the tokenizer in the JSON of the tokenizers library; "" where the folder has none.

        Raises:
            LoadError: the folder's tokenizer cannot be written in that form.
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
                f"{self.folder}: no {TOKENIZER} can be made of its tokenizer: {first_line(error)}"
            ) from error
        return text


def _check_weights(folder: Path) -> None:
    """Read the header of each weight file, and check that each file in the index exists.

    Raises:
        LoadError: one is missing, not fetched, or damaged.
    """
    from safetensors import safe_open

    named = _read_json(folder / WEIGHT_INDEX).get("weight_map")
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
            raise LoadError(f"{file} is damaged: {first_line(error)}; fetch it again") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the context, transformers shows no progress bars and no warnings: errors are raised anyway."""
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


def _and_more(names: Sequence[Any]) -> str:
    """Return "; and N more" for the names after the first; "" for a single one."""
    return f"; and {len(names) - 1} more" if len(names) > 1 else ""


def _read_json(file: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; empty where the file is absent or holds no object.

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
