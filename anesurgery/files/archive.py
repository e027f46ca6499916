"""A model in a .zip archive, as downloads hold packages: unpacked with its sizes and places checked first."""

from __future__ import annotations

import lzma
import shutil
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from anesurgery.errors import LoadError

SUFFIX = ".zip"
LARGEST = 1 << 35
"""Bytes that are unpacked at most, 32 GiB; the largest packages of language models have about 8."""
MOST = 10_000
"""Files at most; a package has three, a chain of chunks a few hundred."""
MANIFEST = "Manifest.json"


def is_archive(path: Path) -> bool:
    """Is a path that of an archive, by its name?"""
    return path.suffix.lower() == SUFFIX and path.is_file()


def unpack(archive: Path, folder: Path, largest: int = LARGEST) -> Path:
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
        raise LoadError(
            f"{archive} holds {len(roots)} models ({listed}), and one can be read; unzip it and choose"
        )
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
