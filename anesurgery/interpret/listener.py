"""Watch a run: a listener is called for each op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anesurgery.mil import Operation


class Listener:
    """Told about each op as it runs; override what you need."""

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        """An op is about to run on these values (torch tensors by parameter name)."""

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """An op has made these values, in the order of its outputs."""
