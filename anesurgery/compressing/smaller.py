"""A model that became smaller, as it is handed out and saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from anesurgery.rewriting.ml_program import MLProgram


class Smaller:
    """What a compression leaves."""

    subject: MLProgram

    @property
    def model(self) -> Any:
        """An MLModel in a temporary package."""
        return self.subject.mlmodel()

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the package, or the folder of chunks, atomically.

        Raises:
            LoadError: the path exists, is the input, has another suffix, or cannot be written.
        """
        return self.subject.save(Path(path).expanduser().absolute(), overwrite=overwrite, edited=True)


__all__ = ["Smaller"]
