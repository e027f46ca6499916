"""A file that is opened once, whose content is then what it was; archives, unpacked with care."""

from __future__ import annotations

import lzma
import os
import shutil
import stat
import weakref
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from anesurgery.errors import LoadError

ZIP = ".zip"
LARGEST_UNPACKED = 1 << 35
"""Bytes that are unpacked at most, 34 GB; the largest packages of language models have about 8."""
MOST = 10_000
"""Files at most; a package has three, a chain of chunks a few hundred."""
MANIFEST = "Manifest.json"


def is_archive(path: Path) -> bool:
    """Is a path that of an archive, by its name?"""
    return path.suffix.lower() == ZIP and path.is_file()


def unpack(archive: Path, folder: Path, largest: int = LARGEST_UNPACKED) -> Path:
    """Unpack the model of an archive; what lies beside it there is left alone.

    Args:
        archive: a .zip file with one package, compiled model or .mlmodel, in a folder or not.
        folder: an empty one.
        largest: bytes at most.

    Returns:
        The path of the model.

    Raises:
        LoadError: it holds none or several, leads out of the folder, is too large, or is damaged.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [m for m in opened.infolist() if not m.is_dir() and "__MACOSX" not in m.filename]
            root = _root(archive, [PurePosixPath(m.filename) for m in members])
            chosen = [m for m in members if PurePosixPath(m.filename).is_relative_to(root)]
            for member in chosen:
                _check(archive, member)
            _check_sizes(archive, chosen, largest)
            for member in chosen:
                place = folder / (member.filename if root != PurePosixPath() else f"model/{member.filename}")
                place.parent.mkdir(parents=True, exist_ok=True)
                with opened.open(member) as packed, open(place, "xb") as written:
                    shutil.copyfileobj(packed, written, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError) as error:
        raise LoadError(f"{archive} cannot be unpacked: {error}; download it again") from error
    except NotImplementedError as error:
        raise LoadError(f"{archive} is packed in a way that is not known here ({error}); unzip it") from error
    except OSError as error:
        raise LoadError(f"{archive} cannot be unpacked: {error.strerror or error}; unzip it") from error
    return folder / (root if root != PurePosixPath() else "model")


def _root(archive: Path, names: list[PurePosixPath]) -> PurePosixPath:
    """Where in an archive the model is: the folder of a manifest or of a compiled model, or a file."""
    roots = {n.parent for n in names if n.name == MANIFEST}
    roots |= {p for n in names for p in n.parents if p.suffix == ".mlmodelc"}
    inside = {n for n in names if n.suffix == ".mlmodel" and not any(p in roots for p in n.parents)}
    roots = {r for r in roots | inside if not any(p in roots for p in r.parents)}
    if len(roots) != 1:
        listed = ", ".join(sorted(map(str, roots))[:4]) or "none"
        raise LoadError(f"{archive} holds {len(roots)} models ({listed}); unzip it, and give one of them")
    return roots.pop()


def _check(archive: Path, member: zipfile.ZipInfo) -> None:
    """See that a member is a file inside the archive.

    Raises:
        LoadError: it is a link, or its name leads elsewhere.
    """
    name = PurePosixPath(member.filename)
    outside = name.is_absolute() or ".." in name.parts or "\\" in member.filename or "\0" in member.filename
    if outside or stat.S_ISLNK(member.external_attr >> 16):
        raise LoadError(f"{archive} holds {member.filename!r}, which leads out of it; do not trust it")


def _check_sizes(archive: Path, members: list[zipfile.ZipInfo], largest: int) -> None:
    """See that what comes out is not too much; a member that has more than it says is refused when it is read.

    Raises:
        LoadError: it is.
    """
    total = sum(member.file_size for member in members)
    if total > largest or len(members) > MOST:
        raise LoadError(
            f"{archive} holds {len(members)} files of {total:,} bytes, and at most {MOST} of {largest:,} are "
            "unpacked; unzip it"
        )


LARGEST = 2**31 - 1
"""Bytes that are read at once: what protobuf can hold. Weights are mapped and may be larger."""
LARGEST_TEXT = 1 << 28
"""Bytes of a JSON file; manifests and plans of the largest models have a few million."""
SAMPLES, SAMPLE = 32, 4096
"""How many places of a file are compared where only its dates speak of a change, and bytes of each."""


def read_text(path: Path, largest: int = LARGEST_TEXT) -> str:
    """The content of a text file.

    Raises:
        LoadError: it is no file, too large, or cannot be read.
        UnicodeDecodeError: it is no text.
    """
    return SourceFile(path).read(largest).decode("utf-8")


def system_failed(error: LoadError) -> bool:
    """Is a file there, and could the system not read it? Nobody knows then what it would have said."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)


class SourceFile:
    """An open file, and the state in which it was found.

    A file that is replaced or deleted keeps its content for those who hold it open; one that is written to in
    place does not, so every use begins and ends with `check`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.handle = os.open(
                path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            )  # a pipe without a writer waits
            weakref.finalize(self, os.close, self.handle)
            self._found = os.fstat(self.handle)
            if not stat.S_ISREG(self._found.st_mode):
                raise LoadError(f"{path} is {_kind(self._found.st_mode)} and no file; give a file")
            self._sampled = self._samples()
        except OSError as error:
            cure = "" if isinstance(error, FileNotFoundError) else "; is it yours to read?"
            raise LoadError(f"{path} cannot be read: {error.strerror}{cure}") from error

    @property
    def size(self) -> int:
        """Number of bytes when it was opened."""
        return self._found.st_size

    @property
    def identity(self) -> tuple[int, ...]:
        """Equal for two who have opened one file, unless somebody wrote to it in between."""
        status = self._found
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def check(self) -> None:
        """See that nobody wrote to the file.

        Raises:
            LoadError: its size or times are others now.
        """
        try:
            now = os.fstat(self.handle)
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read any more: {error.strerror}; load it again") from error
        if _content(now) != _content(self._found) or self._dates_only(now):
            words = _difference(self._found, now)
            raise LoadError(f"{self.path} was changed after it was read ({words}); load it again")

    def _dates_only(self, now: os.stat_result) -> bool:
        """Was the content exchanged and the old date set again? Rights, owner and names change one date too."""
        return now.st_ctime_ns != self._found.st_ctime_ns and self._samples() != self._sampled

    def _samples(self) -> list[bytes]:
        """Pieces of the file from its beginning to its end."""
        last = max(0, self.size - SAMPLE)
        places = sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)})
        return [os.pread(self.handle, SAMPLE, at) for at in places]

    def read(self, largest: int = LARGEST) -> bytes:
        """The whole content, as it was when the file was opened.

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
        """See that the path still leads to this file, and that nobody wrote to it.

        Raises:
            LoadError: another file is there, or none, or it was changed.
        """
        self.check()
        try:
            same = os.path.samestat(os.stat(self.path), self._found)
        except OSError:
            same = False
        if not same:
            raise LoadError(f"{self.path} was replaced while the model was read; load it again")


KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}


def _kind(mode: int) -> str:
    return KINDS.get(stat.S_IFMT(mode), "a device")


def _content(state: os.stat_result) -> tuple[int, int]:
    """What changes when a file is written to, unless the old date is set again."""
    return state.st_size, state.st_mtime_ns


def _difference(before: os.stat_result, after: os.stat_result) -> str:
    if before.st_size == after.st_size:
        return "its date is new"
    return f"{before.st_size} bytes became {after.st_size}"
