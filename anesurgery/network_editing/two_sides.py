"""Layers of two sides, written with the layers of the first releases: what the passes over them share.

One side may be a constant: it becomes a parameter of a layer with one input. Otherwise the two blobs become the
inputs of `add`, `multiply`, `max` or `min`, the larger one first. A pass has a table of these layers, and says
what is done to the second side before; `TwoSided` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from anesurgery.errors import Refusal
from anesurgery.mil import Array
from anesurgery.network_editing.broadcast_forms import Sizes, constant_form, same_result
from anesurgery.network_editing.layer_pass import LayerRewrite, Site
from anesurgery.neuralnetwork.making import weights


@dataclass(frozen=True)
class Constant:
    """One side is computed, the other is the same at every run."""

    x: str
    """The computed blob."""
    value: Array
    first: bool
    """Is the constant the first side?"""
    form: list[int] | Refusal
    """The sizes that `bias` and `scale` give it: [C], [1, H, W] or [C, H, W]; [] for a single number."""

    @property
    def number(self) -> float | None:
        """The one number that the constant is, if the result is as large as the computed side."""
        return float(self.value.flat[0]) if self.form == [] else None


@dataclass(frozen=True)
class TwoSided(LayerRewrite, abstract=True):
    """Layers of two sides become a plain layer of two blobs, or one of a blob and numbers.

    Where a side is an operation more than the plain layer has (x - y is x + (-y)), it is `turned` first.
    """

    plain: ClassVar[Mapping[str, str]]
    """Layer type -> the plain layer of two blobs."""

    def __init_subclass__(cls, **options: Any) -> None:
        """The layer types that the pass looks at are those of its rows."""
        cls.kinds = frozenset(cls.plain)
        super().__init_subclass__(**options)

    def turned(self, site: Site, y: str, outputs: Sequence[str] | None = None) -> str | Refusal:
        """The blob that the plain layer reads in the place of the second side, a computed one, or why not."""
        return y

    def turned_numbers(self, value: Array) -> Array | Refusal:
        """The numbers that the plain layer reads in the place of the second side, a constant."""
        return value

    def rewrite(self, site: Site) -> Refusal | None:
        """Puts the layer with a constant there if one side is one, else the layer between two sides."""
        sides = two_sides(site)
        if isinstance(sides, Refusal):
            return sides
        return self.by_constant(site, sides) if isinstance(sides, Constant) else self.by_blobs(site, *sides)

    def by_constant(self, site: Site, sides: Constant) -> Refusal | None:
        """Put the layer of one blob and numbers there."""
        if isinstance(sides.form, Refusal):
            return sides.form
        value = sides.value if sides.first else self.turned_numbers(sides.value)
        if isinstance(value, Refusal):
            return value
        x = self.turned(site, sides.x) if sides.first else sides.x
        if isinstance(x, Refusal):
            return x
        put = plus if self.plain[site.node.kind] == "add" else times
        put(site, x, value, sides.form)
        return None

    def by_blobs(self, site: Site, x: str, y: str) -> Refusal | None:
        """Put the plain layer of two blobs there, the one that gives the result its shape first."""
        places = order(site, kind := self.plain[site.node.kind], x, y)
        if isinstance(places, Refusal):
            return places
        second = self.turned(site, y)
        if isinstance(second, Refusal):
            return second
        site.emit(kind, [(x, second)[i] for i in places], site.outputs)
        return None


def two_sides(site: Site) -> Constant | tuple[str, str] | Refusal:
    """What an op of two sides reads.

    Returns:
        The constant side with the other as a `Constant`; a tuple of the two blobs where none or both of them
        are constant; a refusal where there are more or fewer than two.

    Raises:
        Refused: nothing is known about the shape of a side.
    """
    if len(site.inputs) != 2:
        return Refusal(f"it has {len(site.inputs)} inputs, not 2")
    x, y = site.inputs
    for one, other in ((x, y), (y, x)):
        if (value := site.constant(other)) is not None and site.constant(one) is None:
            form = constant_form(site.shape(one), value, site.shape(site.outputs[0]))
            return Constant(one, value, other == x, form)
    return x, y


def plus(site: Site, x: str, value: Array, form: Sequence[int], alpha: float = 1.0) -> None:
    """Put alpha x + value there as the outputs of the layer; `form` is that of the constant."""
    if not form:
        site.linear(x, alpha, float(value.flat[0]), site.outputs)
        return
    if alpha != 1:
        x = site.linear(x, alpha, 0.0)
    site.emit("bias", [x], site.outputs, shape=form, bias=weights(value))


def times(site: Site, x: str, value: Array, form: Sequence[int]) -> None:
    """Put x times value there as the outputs of the layer; `form` is that of the constant."""
    if not form:
        site.linear(x, float(value.flat[0]), 0.0, site.outputs)
    else:
        site.emit("scale", [x], site.outputs, shapeScale=form, scale=weights(value))


def order(site: Site, kind: str, x: str, y: str) -> tuple[int, int] | Refusal:
    """The places of two blobs as the inputs of a plain layer: first the one that gives the result its shape.

    Args:
        site: whose blobs they are.
        kind: "add", "multiply", "max" or "min".
        x: the first blob.
        y: the second one.

    Raises:
        Refused: nothing is known about the shape of a blob.
    """
    a, b = site.shape(x), site.shape(y)
    if None in a + b and not _alike(site, x, y):
        return Refusal(f"{_words(a)} and {_words(b)} may differ where a size is dynamic")
    if same_result(a, b, kind):
        return 0, 1
    if same_result(b, a, kind):
        return 1, 0
    return Refusal(f"{_words(a)} and {_words(b)} are not among the shapes of the plain layer")


def _alike(site: Site, x: str, y: str) -> bool:
    """Do two blobs have the same sizes, dynamic ones included?"""
    one, other = (site.network.blobs.var(blob) for blob in (x, y))
    return one is not None and other is not None and tuple(one.shape) == tuple(other.shape)


def _words(shape: Sizes) -> str:
    return "x".join("?" if d is None else str(d) for d in shape)
