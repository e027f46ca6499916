"""Read and write `runner.json`, which tells a runner how to generate text with a model.

`anesurgery build` writes it into a folder with the model, its tables and its tokenizer; `Runner` is its
content. Paths are relative to the folder. `version` goes up when a change would break old readers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from anesurgery.doors import fits, in_words
from anesurgery.errors import LoadError

NAME, FORMAT, VERSION = "runner.json", "anesurgery runner", 3
AGAIN = "build the folder again"
PIECE = 1 << 20
"""Bytes that are hashed at a time, 1 MB: a choice, so that memory stays small."""


@dataclass(frozen=True)
class Runner:
    """The content of `runner.json`.

    Attributes:
        model: the package, or the folder of chunks. If you built only the Core AI model, the `.aimodel`.
        chunks: the packages in the order in which they run; just one for a whole model.
        functions: function name -> its entries (docs/file-formats.md: the second table). A runner uses the
            function with the smallest `context` that the text fits into.
        tokens: the input with the token ids.
        logits: the output with the logits, or with token ids if the model picks the tokens itself.
        context: the maximum length of prompt plus answer, in tokens.
        tables: input -> file with one row for each token or position.
        tokenizer: file of Hugging Face's tokenizers library; "" for none.
        template: file of the chat template, in Jinja; "" for none.
        special: special token -> its text, as the template expects it.
        ends: ids of the stop tokens.
        sampling: sampling options of the checkpoint: `temperature`, `top_k`, `top_p`, `min_p`,
            `repetition_penalty`.
        hashes: file -> SHA-256 of its bytes, in hexadecimal.
        values: if the model picks tokens itself, it picks the best one in each slice of the vocabulary. This
            output has their logits: use the token with the highest. "" if there is none.
        asset: the same model as an `.aimodel`; "" for none.
    """

    model: str
    chunks: tuple[str, ...]
    functions: dict[str, Any]
    tokens: str
    logits: str
    context: int
    tables: dict[str, str] = field(default_factory=dict)
    tokenizer: str = ""
    template: str = ""
    special: dict[str, str] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    values: str = ""
    asset: str = ""

    def in_format(self, format: str | None) -> str:
        """Return the model in a format, "coreml" or "coreai"; for None the model that is loaded by default.

        Raises:
            LoadError: it was not built in that format.
        """
        models = {"coreai" if n.endswith(".aimodel") else "coreml": n for n in (self.asset, self.model) if n}
        if format is not None and format not in models:
            held = " and ".join(models)
            raise LoadError(f"the folder holds {held}, and no {format}; build it with --format both")
        return self.model if format is None else models[format]

    def text(self) -> str:
        """Return the text of `runner.json`."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=2) + "\n"

    def check(self, folder: Path) -> None:
        """Check that the files are those that were built.

        Raises:
            LoadError: one is missing or was changed.
        """
        for name, expected in self.hashes.items():
            try:
                digest = sha256_of(folder / name)
            except OSError as error:
                raise LoadError(
                    f"{folder / name} cannot be read: {error.strerror or error}; {AGAIN}"
                ) from error
            if digest != expected:
                raise LoadError(f"{folder / name} is not the file that {NAME} names: it was changed; {AGAIN}")


KINDS: dict[str, Any] = {
    "model": str,
    "chunks": list[str],
    "functions": dict[str, Any],
    "tokens": str,
    "logits": str,
    "context": int,
    "tables": dict[str, str],
    "tokenizer": str,
    "template": str,
    "special": dict[str, str],
    "ends": list[int],
    "sampling": dict[str, Any],
    "hashes": dict[str, str],
    "values": str,
    "asset": str,
}
"""Entry -> the type that it must have."""


def is_built(place: Any) -> bool:
    """Is `place` the path of a folder with a `runner.json`?"""
    return isinstance(place, (str, os.PathLike)) and (Path(place).expanduser() / NAME).is_file()


def model_of(place: Any) -> Any:
    """Return the path of the model in a folder with a `runner.json`; return anything else unchanged."""
    return Path(place).expanduser() / read_runner(place).model if is_built(place) else place


def read_runner(folder: str | os.PathLike[str]) -> Runner:
    """Read the `runner.json` of a folder.

    Raises:
        LoadError: there is none, or it is damaged.
    """
    file = Path(folder).expanduser() / NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        what = f"{file.parent} holds no {NAME}" if file.parent.exists() else f"{file.parent} does not exist"
        raise LoadError(f"{what}; `anesurgery build` makes such a folder") from error
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{file} cannot be read: {error}; {AGAIN}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise LoadError(f"{file} is no file of a runner; {AGAIN}")
    if content.get("version") != VERSION:
        raise LoadError(
            f"{file} is of version {content.get('version')!r}; this library reads {VERSION}; {AGAIN}"
        )
    content.setdefault("asset", "")  # a folder that was built before there were two formats
    for name, kind in KINDS.items():
        if not fits(content.get(name), kind):
            raise LoadError(
                f"{file}: {name} is {content.get(name)!r:.60}, and must be {in_words(kind)}; {AGAIN}"
            )
    entries: dict[str, Any] = {f.name: content[f.name] for f in fields(Runner)}
    entries |= {name: tuple(value) for name, value in entries.items() if isinstance(value, list)}
    runner = Runner(**entries)
    paths = [runner.model, *runner.chunks, *runner.tables.values(), *runner.hashes]
    for name in (*paths, *filter(None, (runner.tokenizer, runner.template, runner.asset))):
        if not _is_inside(name):
            raise LoadError(f"{file} names {name!r}, which is not a file beside it; {AGAIN}")
    return runner


def _is_inside(name: str) -> bool:
    """Does a relative path stay within its folder?"""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def hashes_of(folder: Path, names: Mapping[str, Any] | list[str]) -> dict[str, str]:
    """Return {path in `folder`: SHA-256} of the named files, and of all files in the named subfolders."""
    digests: dict[str, str] = {}
    for name in names:
        path = folder / name
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        digests |= {file.relative_to(folder).as_posix(): sha256_of(file) for file in files}
    return digests
