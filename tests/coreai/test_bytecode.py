"""The frame of MLIR's bytecode: what is right is read, and what is damaged is an error in words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anesurgery.coreai.asset import Bytecode, Cursor
from anesurgery.errors import LoadError


def varint(value: int) -> bytes:
    """As MLIR writes a number: in the first byte as many zeros as bytes follow."""
    for more in range(8):
        if value < 1 << (7 * (more + 1)):
            return ((value << 1 | 1) << more).to_bytes(more + 1, "little")
    return b"\0" + value.to_bytes(8, "little")


def section(kind: int, data: bytes) -> bytes:
    return bytes([kind]) + varint(len(data)) + data


def program(weights: dict[str, bytes], producer: bytes = b"test") -> bytes:
    """A file with these weights, and no op."""
    names = [name.encode() + b"\0" for name in weights]
    strings = varint(len(names)) + b"".join(varint(len(n)) for n in reversed(names)) + b"".join(names)
    blobs = [varint(1) + varint(len(w)) + w for w in weights.values()]
    offsets = varint(0) + varint(0) + varint(len(blobs))
    offsets += b"".join(varint(i) + varint(len(b)) + b"\0" for i, b in enumerate(blobs))
    body = section(0, strings) + section(5, b"".join(blobs)) + section(6, offsets)
    return b"ML\xefR" + varint(6) + producer + b"\0" + body


SOUND = program({"weight": np.arange(5, dtype="<f4").tobytes(), "other": b"\1\2\3"})


@given(st.integers(0, 2**64 - 1))
def test_numbers_of_every_length_are_read(value: int) -> None:
    written = varint(value)
    cursor = Cursor(memoryview(written), 0, len(written))
    assert cursor.number() == value
    assert cursor.at == len(written)


def test_weights_are_views_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(SOUND)
    read = Bytecode(tmp_path / "p")
    assert read.producer == "test"
    assert read.array("weight", np.dtype("<f4"), 5).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert read.array("other", np.dtype(np.uint8), 3).tolist() == [1, 2, 3]
    assert not read.array("other", np.dtype(np.uint8), 3).flags.owndata


@pytest.mark.parametrize(
    ("key", "count", "words"),
    [("absent", 5, "lacks the weight"), ("weight", 4, "20 bytes, and its type needs 16")],
)
def test_other_weights_are_refused(key: str, count: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(SOUND)
    with pytest.raises(LoadError, match=words):
        Bytecode(tmp_path / "p").array(key, np.dtype("<f4"), count)


def outcome(path: Path, content: bytes) -> bool:
    """Is it read? Else an error in words was raised, and no other."""
    path.write_bytes(content)
    try:
        found = Bytecode(path)
    except LoadError:
        return False
    for key, (_, size) in found.resources.items():
        found.array(key, np.dtype(np.uint8), size)
    return True


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(SOUND) - 1), st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused(tmp_path: Path, at: int, byte: int) -> None:
    outcome(tmp_path / "p", SOUND[:at] + bytes([byte]) + SOUND[at + 1 :])


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(tmp_path: Path, tail: bytes) -> None:
    outcome(tmp_path / "p", SOUND[:6] + tail)


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    whole = [n for n in range(len(SOUND)) if outcome(tmp_path / "p", SOUND[:n])]
    sections = len(program({})) - len(SOUND)
    assert sections < 0
    assert all(SOUND[n] in (5, 6) for n in whole)  # cut between two sections it is whole, with fewer of them
