"""How much a visitor of the page may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery.byte_counts import GB


@dataclass(frozen=True)
class Limits:
    """What an upload, and the work on it, may take.

    Attributes:
        upload: bytes of one model as it is sent.
        unpacked: bytes of one model out of its archive, and of each file that is written.
        memory: bytes of memory that one piece of work may allocate (held on Linux alone).
        seconds: that one piece of work may take.
        keep: seconds after the last sign of a visitor, after which his files are deleted.
        stay: seconds after a model began to be sent, after which its files are deleted, seen or not;
            work on it is ended first.
        models: models that are held at once.
    """

    upload: int = 4 * GB
    unpacked: int = 8 * GB
    memory: int = 8 * GB
    seconds: float = 1800
    keep: float = 900
    stay: float = 6 * 3600
    models: int = 8
