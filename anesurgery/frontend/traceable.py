"""What a trace would keep from its example, or stumble over, is computed in another way while it runs.

A mixture that transformers cannot compute as "dense" asks which experts were chosen, gathers the rows of each,
and adds what it makes of them; or it sorts the rows and splits them by how many each expert got. A trace would
keep the experts and the rows of its example. While a `Traceable` is entered such code runs on all rows, and
takes 0 for those that are not an expert's own:

* `hits.nonzero()` gives every place, and `torch.where(mask)` the places of all rows, which remember the mask;
* `rows[places]` is all rows, `shares[places, ...]` the share of each row, and 0 where the mask has none;
* `total.index_add_(0, places, rows)` adds the rows that the mask has;
* `rows.split(sizes.tolist())` gives all rows for each group, and `torch.cat` takes each row from its own.

Where code makes something else of such places its numbers come out wrong: compare what is converted with torch.
And torch cannot trace `scatter` of a bool that is a plain value, nor can coremltools join what is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Sizes(list[int]):
    """How many rows each group has, with the tensor that says it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.tolist())
        self.tensor = tensor


class Places:
    """One axis of the places that a mask has, as `torch.where` gives it."""

    def __init__(self, mask: torch.Tensor, axis: int) -> None:
        self.mask, self.axis = mask, axis
        self.all = torch.arange(mask.shape[axis])
        """What stands for it in the code that is traced."""


class Traceable(TorchFunctionMode):
    """While it is entered, code that takes rows by what was computed runs on all rows."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, Places] = {}
        self._groups: tuple[Sizes, int] | None = None
        self._every = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, or what stands for it."""
        kwargs = kwargs or {}
        own = HANDLERS.get(getattr(func, "__name__", ""))
        result = NotImplemented if own is None else own(self, *args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def _known(self, index: Any) -> Places | None:
        place = self._places.get(id(index))
        return place if place is not None and place.all is index else None

    def nonzero(self, x: torch.Tensor, *, as_tuple: bool = False) -> Any:
        """Every place of a vector."""
        if x.ndim != 1 or as_tuple:
            return NotImplemented
        self._every = True
        return torch.arange(len(x))[:, None]

    def where(self, mask: Any, *others: Any, **named: Any) -> Any:
        """All rows of each axis of a mask."""
        if others or named or mask.ndim < 1:
            return NotImplemented
        places = [Places(mask, axis) for axis in range(mask.ndim)]
        self._places |= {id(place.all): place for place in places}
        return tuple(place.all for place in places)

    def getitem(self, x: torch.Tensor, index: Any) -> Any:
        """All rows, or what each row has at the places of a mask."""
        listed = index if isinstance(index, tuple) else (index,)
        places = [place for item in listed if (place := self._known(item)) is not None]
        if not places:
            beyond = self._every and _number(index) >= len(x)
            return x[-1] if beyond else NotImplemented  # an expert that is none, and that no token chooses
        if len(places) == 1:
            return x if len(listed) == 1 else x[(slice(None), *listed[1:])]
        own = places[0].mask.permute([place.axis for place in places]).to(x.dtype)
        shares = (x * own).sum(dim=tuple(range(1, len(places))))
        return shares[(slice(None), *listed[len(places) :])]

    def index_add_(self, total: torch.Tensor, dim: int, index: Any, source: Any, **named: Any) -> Any:
        """Add the rows that a mask has."""
        if (added := self._added(total, dim, index, source, named)) is None:
            return NotImplemented
        return total.add_(added)

    def index_add(self, total: torch.Tensor, dim: int, index: Any, source: Any, **named: Any) -> Any:
        """The sum with the rows that a mask has."""
        if (added := self._added(total, dim, index, source, named)) is None:
            return NotImplemented
        return total + added

    def _added(self, total: Any, dim: int, index: Any, source: Any, named: Any) -> torch.Tensor | None:
        place = self._known(index)
        if place is None or dim != 0 or named:
            return None
        others = [axis for axis in range(place.mask.ndim) if axis != place.axis]
        own = place.mask.to(total.dtype)
        own = own.sum(dim=others) if others else own
        added: torch.Tensor = source * own.reshape([-1] + [1] * (source.ndim - 1))
        return added

    def tolist(self, x: torch.Tensor) -> Any:
        """Sizes of groups, which remember where they came from."""
        return NotImplemented if x.ndim != 1 or x.is_floating_point() else Sizes(x)

    def split(self, x: torch.Tensor, sizes: Any, dim: int = 0) -> Any:
        """All rows for each group."""
        if not isinstance(sizes, Sizes) or dim != 0:
            return NotImplemented
        self._groups = (sizes, int(x.shape[0]))
        return tuple(x for _ in sizes)

    def cat(self, parts: Any, dim: int = 0, **named: Any) -> Any:
        """Of each row what its own group made of it; and nothing of what is empty, as coremltools needs it."""
        full = [part for part in parts if part.numel()]
        if not named and 0 < len(full) < len(parts):
            return torch.cat(full, dim) if len(full) > 1 else full[0]
        sizes, rows = self._groups or ([], 0)
        if dim != 0 or named or len(parts) != len(sizes) or any(len(part) != rows for part in parts):
            return NotImplemented
        self._groups = None
        assert isinstance(sizes, Sizes)
        ends = sizes.tensor.cumsum(0)
        places = torch.arange(rows)[:, None]
        own = ((places < ends) & (places >= ends - sizes.tensor)).to(parts[0].dtype)
        shape = [-1] + [1] * (parts[0].ndim - 1)
        return sum(part * own[:, i].reshape(shape) for i, part in enumerate(parts))

    def scatter(self, x: torch.Tensor, dim: int, index: Any, value: Any = None, **named: Any) -> Any:
        """A bool as a number."""
        return x.scatter(dim, index, int(value)) if isinstance(value, bool) and not named else NotImplemented


def _number(index: Any) -> int:
    """The place that a single index says; -1 for any other index."""
    single = torch.is_tensor(index) and index.ndim == 0 and not index.is_floating_point()
    return int(index) if single and index.dtype != torch.bool else -1


HANDLERS: dict[str, Callable[..., Any]] = {
    "nonzero": Traceable.nonzero,
    "where": Traceable.where,
    "__getitem__": Traceable.getitem,
    "index_add_": Traceable.index_add_,
    "index_add": Traceable.index_add,
    "tolist": Traceable.tolist,
    "split": Traceable.split,
    "cat": Traceable.cat,
    "scatter": Traceable.scatter,
}
"""Function of torch -> what stands for it, or gives NotImplemented."""
