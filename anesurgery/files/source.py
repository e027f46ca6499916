"""Open source files so that later changes are noticed, and unpack archives safely.

`SourceFile` keeps a model's file open and checks at each use that nobody wrote to it. `unpack` extracts the
only model of a .zip file. `not_fetched` knows the pointers that Git LFS leaves in place of files.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import stat
import weakref
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from anesurgery.errors import LoadError

ZIP = ".zip"
LARGEST_UNPACKED = 1 << 35
"""The most bytes that are unpacked, 34 GB; the largest packages of language models have about 8 GB."""
MOST_FILES = 10_000
"""The most files that are unpacked; a package has three, a chain of chunks a few hundred."""
MANIFEST = "Manifest.json"


def is_archive(path: Path) -> bool:
    """Is a path an archive, by its suffix?"""
    return path.suffix.lower() == ZIP and path.is_file()


def unpack(archive: Path, folder: Path, largest: int = LARGEST_UNPACKED) -> Path:
    """Unpack the model of an archive, and nothing else in it.

    Args:
        archive: a .zip file with one package, compiled model or .mlmodel, in a folder or not.
        folder: an empty folder.
        largest: the most bytes to unpack.

    Returns:
        The path of the model.

    Raises:
        LoadError: it holds no model or several, has paths out of the folder, is too large, or is damaged.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [m for m in opened.infolist() if not m.is_dir() and "__MACOSX" not in m.filename]
            root = _model_root(archive, [PurePosixPath(m.filename) for m in members])
            chosen = [m for m in members if PurePosixPath(m.filename).is_relative_to(root)]
            for member in chosen:
                _check_member(archive, member)
            _check_sizes(archive, chosen, largest)
            for member in chosen:
                path = folder / (member.filename if root != PurePosixPath() else f"model/{member.filename}")
                path.parent.mkdir(parents=True, exist_ok=True)
                with opened.open(member) as packed, open(path, "xb") as unpacked:
                    shutil.copyfileobj(packed, unpacked, 1 << 20)
    except NotImplementedError as error:
        raise LoadError(f"{archive} is packed in a way that is not known here ({error}); unzip it") from error
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError) as error:
        raise LoadError(f"{archive} cannot be unpacked: {error}; download it again") from error
    except OSError as error:
        raise LoadError(f"{archive} cannot be unpacked: {error.strerror or error}; unzip it") from error
    return folder / (root if root != PurePosixPath() else "model")


def _model_root(archive: Path, names: list[PurePosixPath]) -> PurePosixPath:
    """Return the path of the model in an archive: the folder of a package or compiled model, or a file."""
    roots = {n.parent for n in names if n.name == MANIFEST}
    roots |= {p for n in names for p in n.parents if p.suffix == ".mlmodelc"}
    inside = {n for n in names if n.suffix == ".mlmodel" and not any(p in roots for p in n.parents)}
    roots = {r for r in roots | inside if not any(p in roots for p in r.parents)}
    if not roots:
        raise LoadError(f"{archive} holds no model; zip the .mlpackage, the whole folder")
    if len(roots) > 1:
        listed = ", ".join(sorted(map(str, roots))[:4])
        raise LoadError(f"{archive} holds {len(roots)} models ({listed}); unzip it, and give one of them")
    return roots.pop()


def _check_member(archive: Path, member: zipfile.ZipInfo) -> None:
    """Raise a LoadError if a member of an archive is a link, or its path leads out of the folder."""
    name = PurePosixPath(member.filename)
    outside = name.is_absolute() or ".." in name.parts or "\\" in member.filename or "\0" in member.filename
    if outside or stat.S_ISLNK(member.external_attr >> 16):
        raise LoadError(f"{archive} holds {member.filename!r}, which leads out of it; do not trust it")


def _check_sizes(archive: Path, members: list[zipfile.ZipInfo], largest: int) -> None:
    """Raise a LoadError if the declared sizes are too large, or there are too many files."""
    total = sum(member.file_size for member in members)
    if total > largest or len(members) > MOST_FILES:
        raise LoadError(
            f"{archive} holds {len(members)} files of {total:,} bytes, and at most {MOST_FILES} of {largest:,} "
            "are unpacked; unzip it"
        )


LARGEST = 2**31 - 1
"""The most bytes of a file that is read as a whole: what protobuf can hold. Weights are mapped, of any size."""
LARGEST_TEXT = 1 << 28
"""The most bytes of a JSON file; manifests and plans of the largest models have a few million."""
SAMPLES, SAMPLE = 32, 4096
"""Number of samples of a file, and bytes of each, that are compared if only its dates have changed."""


def read_text(path: Path, largest: int = LARGEST_TEXT) -> str:
    """Return the content of a text file.

    Raises:
        LoadError: it is not a file, too large, or cannot be read.
        UnicodeDecodeError: it is not UTF-8 text.
    """
    return SourceFile(path).read(largest).decode("utf-8")


def read_json(path: Path) -> Any:
    """Return the plain data in a JSON file.

    Raises:
        LoadError: it is not a file, too large, or cannot be read.
        ValueError: it holds something else; says what, without the words of Python's own readers.
    """
    try:
        return json.loads(read_text(path))
    except UnicodeDecodeError as error:
        raise ValueError("it is no text in UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON (line {error.lineno}, column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("it is no JSON that can be read: it is nested too deeply") from error


def system_failed(error: LoadError) -> bool:
    """Did the system fail to read a file that exists, so that its content is unknown?"""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)


class SourceFile:
    """An open file, and its state when it was opened.

    If the file is replaced or deleted, the open handle keeps the old content. If somebody writes to it in
    place, the content changes; so every use begins and ends with `check`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.handle = os.open(
                path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            )  # a pipe without a writer waits
            weakref.finalize(self, os.close, self.handle)
            self._opened_state = os.fstat(self.handle)
            if not stat.S_ISREG(self._opened_state.st_mode):
                raise LoadError(
                    f"{path} is {_kind_in_words(self._opened_state.st_mode)} and no file; give a file"
                )
            self._opened_samples = self._samples()
        except OSError as error:
            cure = "" if isinstance(error, FileNotFoundError) else "; is it yours to read?"
            raise LoadError(f"{path} cannot be read: {error.strerror}{cure}") from error

    @property
    def size(self) -> int:
        """The number of bytes when it was opened."""
        return self._opened_state.st_size

    @property
    def identity(self) -> tuple[int, ...]:
        """A key that is equal for two that opened the same file, unless it was changed in between."""
        status = self._opened_state
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def check(self) -> None:
        """Check that nobody wrote to the file.

        Raises:
            LoadError: its size or dates have changed.
        """
        try:
            now = os.fstat(self.handle)
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read any more: {error.strerror}; load it again") from error
        if _content(now) != _content(self._opened_state) or self._was_rewritten(now):
            words = _difference(self._opened_state, now)
            raise LoadError(f"{self.path} was changed after it was read ({words}); load it again")

    def _was_rewritten(self, now: os.stat_result) -> bool:
        """Was the content changed and its date restored? New rights change the ctime too, so samples decide."""
        return now.st_ctime_ns != self._opened_state.st_ctime_ns and self._samples() != self._opened_samples

    def _samples(self) -> list[bytes]:
        """Return samples of the file, evenly spaced from its start to its end."""
        last = max(0, self.size - SAMPLE)
        places = sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)})
        return [os.pread(self.handle, SAMPLE, at) for at in places]

    def read(self, largest: int = LARGEST) -> bytes:
        """Return the whole content, as it was when the file was opened.

        Raises:
            LoadError: it has more bytes than `largest`, cannot be read, or was changed.
        """
        if self.size > largest:
            raise LoadError(
                f"{self.path} has {self.size} bytes, and at most {largest} are read of such a file; it is "
                "damaged, or keep its weights in an .mlpackage, whose weight file may be of any size, or raise "
                f"anesurgery.files.source.{'LARGEST' if largest == LARGEST else 'LARGEST_TEXT'}"
            )
        try:
            with open(self.handle, "rb", closefd=False) as file:
                file.seek(0)
                content = file.read()
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read: {error.strerror}; copy it again") from error
        self.check()
        return content

    def check_place(self) -> None:
        """Check that the path still leads to this file, and that nobody wrote to it.

        Raises:
            LoadError: the file was replaced, removed or changed.
        """
        self.check()
        try:
            same = os.path.samestat(os.stat(self.path), self._opened_state)
        except OSError:
            same = False
        if not same:
            raise LoadError(f"{self.path} was replaced while the model was read; load it again")


POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:[a-z0-9.-]+ [^\n]*\n)*?size (\d+)\n", re.DOTALL
)
"""The file that Git LFS leaves in place of the real one (docs/spec.md of git-lfs/git-lfs)."""
LARGEST_POINTER = 1024
"""A pointer has fewer bytes than this, by its specification."""


def not_fetched(file: Path, content: bytes | None = None) -> str | None:
    """Return the error that a file is a pointer of Git LFS, and how to fetch the real file; None for others.

    Args:
        file: the path of the file.
        content: its content, if it was read already.
    """
    if content is None:
        if not file.is_file():
            return None
        with open(file, "rb") as opened:
            content = opened.read(LARGEST_POINTER)
    pointer = POINTER.match(content[:LARGEST_POINTER])
    if pointer is None:
        return None
    size = f"{int(pointer[1]):,} bytes"
    return (
        f"{file} is a pointer of Git LFS to {size} that were not fetched; run `git -C {file.parent} lfs pull`"
    )


KIND_IN_WORDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}


def _kind_in_words(mode: int) -> str:
    return KIND_IN_WORDS.get(stat.S_IFMT(mode), "a device")


def _content(state: os.stat_result) -> tuple[int, int]:
    """Return what changes when a file is written to, unless its old date is restored."""
    return state.st_size, state.st_mtime_ns


def _difference(before: os.stat_result, after: os.stat_result) -> str:
    if before.st_size == after.st_size:
        return "its date is new"
    return f"{before.st_size} bytes became {after.st_size}"
