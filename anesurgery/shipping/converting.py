"""A causal language model of transformers as a package: ids of `context` tokens in, logits out.

The experts of a mixture all compute every token, each times its share, as no other form of transformers keeps
the tokens on an axis of their own (`frontend.register_experts`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from anesurgery import frontend
from anesurgery.errors import LoadError, NotExpressible, SurgeryError
from anesurgery.frontend.length_choices import LengthError
from anesurgery.mil import ct, quiet_host

TOKENS, LOGITS = "input_ids", "logits"


def convert(module: Any, context: int, *, half: bool = True) -> Any:
    """Convert a causal language model by trace.

    Args:
        module: of transformers, in fp32.
        context: the tokens that it reads.
        half: is it computed in fp16?

    Raises:
        LoadError: it cannot be traced or converted; says which module and why.
    """
    import torch

    example = torch.zeros(1, context, dtype=torch.int64)
    inputs = [ct.TensorType(TOKENS, shape=example.shape, dtype=np.int32)]
    return converted(module, _logits(module), [example], inputs, [ct.TensorType(LOGITS)], half)


def converted(
    module: Any,
    call: Any,
    examples: Sequence[Any],
    inputs: Sequence[ct.TensorType],
    outputs: Sequence[ct.TensorType],
    half: bool,
) -> Any:
    """Convert what calls a module of transformers, by trace.

    Args:
        module: of transformers.
        call: a module that is traced, which calls it.
        examples: tensors that it is traced with.
        inputs: of the package.
        outputs: likewise.
        half: is it computed in fp16?

    Raises:
        LoadError: it cannot be traced or converted; says which module and why.
    """
    import torch

    prepare(module)
    try:
        with torch.no_grad(), quiet_host(), redirect_stderr(io.StringIO()):  # coremltools' progress bars
            trace: Any = torch.jit.trace
            with Traceable() as mode:
                traced = trace(call, tuple(examples), check_trace=False)
            if mode.acted:
                check(traced, call, _others(examples, int(module.config.get_text_config().vocab_size)))
            model = ct.convert(
                traced,
                inputs=list(inputs),
                outputs=list(outputs),
                minimum_deployment_target=ct.target.iOS18,
                compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
                skip_model_load=True,
            )
    except NotExpressible as error:
        raise NotExpressible(f"{type(module).__name__} was not converted: {error}") from error
    except SurgeryError:
        raise
    except Exception as error:  # torch and coremltools raise what they like
        kind = LoadError if isinstance(error, LengthError) else NotExpressible
        raise kind(f"{type(module).__name__} was not converted: {str(error).strip()}") from error
    return model


def prepare(module: Any) -> None:
    """Let a module be traced: the experts of a mixture all compute every token."""
    frontend.register()
    if getattr(module, "set_experts_implementation", None) is not None:
        frontend.register_experts()
        module.set_experts_implementation("dense")


def _others(examples: Sequence[Any], words: int) -> list[tuple[Any, ...]]:
    """Other tokens than those of a trace: different ones, and one again and again, which few experts get."""
    import torch

    draws = torch.Generator().manual_seed(0)
    ids, *others = examples
    drawn = [torch.randint(0, words, shape, generator=draws) for shape in (ids.shape, ids.shape[:1])]
    return [(tokens.to(ids.dtype).expand(ids.shape), *others) for tokens in drawn]


def _logits(module: Any) -> Any:
    """The module with ids as its input and logits as its output."""
    import torch

    class Logits(torch.nn.Module):
        """Ids to logits, without transformers' own outputs and cache."""

        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, input_ids: Any) -> Any:
            return self.model(input_ids=input_ids, use_cache=False).logits

    return Logits().eval()


# What a trace would keep from its example, or stumble over, is computed in another way while it runs.
#
# A mixture that transformers cannot compute as "dense" asks which experts were chosen, gathers the rows of
# each, and adds what it makes of them; or it sorts the rows and splits them by how many each expert got. A
# trace would keep the experts and the rows of its example. While a `Traceable` is entered such code runs on
# all rows, and takes 0 for those that are not an expert's own:
#
# * `hits.nonzero()` gives every place, and `torch.where(mask)` the places of all rows, which remember the
#   mask;
# * `rows[places]` is all rows, `shares[places, ...]` the share of each row, and 0 where the mask has none;
# * `total.index_add_(0, places, rows)` adds the rows that the mask has;
# * `rows.split(sizes.tolist())` gives all rows for each group, and `torch.cat` takes each row from its own.
#
# Code that makes something else of such places, or of what `nonzero` gives, is refused; and as no list of
# uses is complete, `check` compares what was traced with the module on other inputs than those of the trace.
#
# torch cannot trace `scatter` of a bool that is a plain value, nor can coremltools join what is empty.

NEAR = 1e-3
"""Of the range of an output in fp32: what a trace may differ by from its module."""
TOLD = frozenset({"__len__", "__get__", "numel", "size", "dim"})
"""What may be asked of chosen places: that there are some, and of what kind."""
NUMBERS = TOLD | {"__eq__", "__ne__", "__index__", "__int__", "item", "__format__", "__bool__"}
"""What may be made of the number of an expert that some token chose: it says which, and nothing else."""


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
    """While it is entered, code that takes rows by what was computed runs on all rows.

    Args:
        every: does it? Or are only calls written in another way that torch cannot trace?
    """

    def __init__(self, *, every: bool = True) -> None:
        super().__init__()
        self._every = every
        self._places: dict[int, Places] = {}
        self._groups: tuple[Sizes, int] | None = None
        self._hits: dict[int, torch.Tensor] = {}
        self.acted = False
        """Does something stand for what the code would have done?"""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, or what stands for it.

        Raises:
            NotExpressible: it makes something of places that is not known to be right for all rows.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        own = HANDLERS.get(name) if self._every or name in PLAIN else None
        result = NotImplemented if own is None else own(self, *args, **kwargs)
        if result is not NotImplemented:
            self.acted = self.acted or name not in PLAIN
            return result
        for value in _flat((args, kwargs)):
            if self._known(value) is not None and name not in TOLD:
                raise NotExpressible(f"{name} of the rows that a mask chooses, which a trace would keep")
            if self._is_hit(value) and name not in NUMBERS:
                raise NotExpressible(f"{name} of what nonzero gives, which a trace would keep")
        return func(*args, **kwargs)

    def __exit__(self, *error: object) -> None:
        """See that groups were put together again.

        Raises:
            NotExpressible: they were not.
        """
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._groups is not None and error[0] is None:
            raise NotExpressible("rows are split by sizes that are computed, and not joined again")

    def _is_hit(self, value: Any) -> bool:
        return value is not None and self._hits.get(id(value)) is value

    def _hit(self, value: torch.Tensor) -> torch.Tensor:
        """The same, known as what `nonzero` gives or a part of it."""
        self._hits[id(value)] = value
        return value

    def _known(self, index: Any) -> Places | None:
        place = self._places.get(id(index))
        return place if place is not None and place.all is index else None

    def nonzero(self, x: torch.Tensor, *, as_tuple: bool = False) -> Any:
        """Every place of a vector: none is an expert that does anything for a row which did not choose it."""
        if x.ndim != 1 or as_tuple:
            return NotImplemented
        return self._hit(torch.arange(len(x))[:, None])

    def unbind(self, x: torch.Tensor, dim: int = 0) -> Any:
        """The places of `nonzero`, one after the other."""
        own = self._is_hit(x) and dim == 0
        return tuple(self._hit(row) for row in x.unbind(0)) if own else NotImplemented

    def squeeze(self, x: torch.Tensor, *axes: Any) -> Any:
        """The places of `nonzero` as a vector, or one of them as a number."""
        return self._hit(x.squeeze(*axes)) if self._is_hit(x) else NotImplemented

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
        if self._is_hit(x):
            return self._hit(x[index]) if index == 0 else NotImplemented
        if not places:
            one = self._is_hit(index) and index.numel() == 1
            beyond = one and _number(index) >= len(x)  # an expert that is none, and that no token chooses
            return x[-1] if beyond else x[index] if one else NotImplemented
        sizes = [place.mask.shape[place.axis] for place in places]
        if (
            any(self._known(item) is None for item in listed[: len(places)])
            or list(x.shape[: len(sizes)]) != sizes
        ):
            return NotImplemented
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


def check(traced: Any, module: Any, inputs: Sequence[Sequence[Any]]) -> None:
    """See that a trace gives what its module gives for other inputs than those that it was traced with.

    The module is traced for each of them and keeps what it likes: code may ask whether it is traced.

    Raises:
        NotExpressible: it does not.
    """
    trace: Any = torch.jit.trace
    for given in inputs:
        with Traceable(every=False):
            plain = trace(module, tuple(given), check_trace=False)
        for own, expected in zip(_flat((traced(*given),)), _flat((plain(*given),)), strict=True):
            error = float((own - expected).abs().max()) if expected.numel() else 0.0
            spread = float(expected.max() - expected.min()) if expected.numel() else 0.0
            if not error <= NEAR * spread:
                raise NotExpressible(
                    f"its trace differs from it by {error:.3g} for other inputs, where numbers have a range of "
                    f"{spread:.3g}: it keeps what was computed for its example"
                )


def _flat(value: Any) -> Iterator[Any]:
    """What tuples, lists and mappings hold."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _flat(one)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _number(index: Any) -> int:
    """The place that a single index says; -1 for any other index."""
    single = torch.is_tensor(index) and index.ndim == 0 and not index.is_floating_point()
    return int(index) if single and index.dtype != torch.bool else -1


HANDLERS: dict[str, Callable[..., Any]] = {
    "nonzero": Traceable.nonzero,
    "where": Traceable.where,
    "__getitem__": Traceable.getitem,
    "unbind": Traceable.unbind,
    "squeeze": Traceable.squeeze,
    "index_add_": Traceable.index_add_,
    "index_add": Traceable.index_add,
    "tolist": Traceable.tolist,
    "split": Traceable.split,
    "cat": Traceable.cat,
    "scatter": Traceable.scatter,
}
"""Function of torch -> what stands for it, or gives NotImplemented."""
PLAIN = frozenset({"scatter", "tolist"})
"""Handlers that change the form of a call, and not what is computed."""
