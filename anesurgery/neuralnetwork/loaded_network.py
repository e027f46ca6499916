"""A neural network that stays one; its program is made when it is asked for."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from anesurgery.files.package import Loaded
from anesurgery.mil import Program
from anesurgery.neuralnetwork.importing import import_network


class LoadedNetwork(Loaded):
    """A neural network as a chunk of a chain; one with a custom layer cannot be run, but all else.

    Args:
        spec: specification of a model, one of `NETWORKS`.
        what: the model in words; errors begin with it.
        source: the file it came from, which is never written to.
    """

    def __init__(self, spec: Any, what: str = "the model", source: Path | None = None) -> None:
        self.spec, self.what, self.source = spec, what, source
        self.weights = self.compute_units = None
        self.notes = self.other_weights = ()

    def __repr__(self) -> str:
        return f"<LoadedNetwork {self.what!r}>"

    @cached_property
    def imported(self) -> Loaded:
        """The ML Program of the network, with the names that its inputs and outputs have.

        Raises:
            LoadError: a layer cannot be built, as a custom one, whose code is not in the file.
        """
        return import_network(self.spec, self.what, source=self.source, keep_names=True)

    @property
    def program(self) -> Program:  # type: ignore[override]
        """The program of `imported`."""
        return self.imported.program

    @property
    def version(self) -> int:
        """The specification version."""
        return int(self.spec.specificationVersion)


def runnable(chunk: Loaded) -> Loaded:
    """A chunk as an ML Program.

    Raises:
        LoadError: it is a network with a layer that cannot be built.
    """
    return chunk.imported if isinstance(chunk, LoadedNetwork) else chunk
