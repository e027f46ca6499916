"""Convert a causal language model of transformers by trace: ids of shape (1, context) in, logits out.

`build` calls `convert` for a whole text, and `recurrent_states` calls `traced_package` for one step. All
experts of a mixture compute every token, each times its share: no other form in transformers keeps the tokens
on an axis of their own (`frontend.register_experts`).

`torch.jit.trace` records the ops of one example. Code that asks which experts were chosen, gathers the rows of
each, and adds up the results would be recorded with the experts and rows of that example. While a `Traceable`
is entered, such code runs on all rows instead, and rows that are not an expert's own count as 0:

* `hits.nonzero()` gives every position, and `torch.where(mask)` the positions of all rows; both remember the
  mask;
* `rows[positions]` is all rows; `shares[positions, ...]` is the share of each row, and 0 where the mask is
  false;
* `total.index_add_(0, positions, rows)` adds only the rows where the mask is true;
* `rows.split(sizes.tolist())` gives all rows to each group, and `torch.cat` takes each row from its own group.

Code that does anything else with such positions is refused (`NotExpressible`). No list of uses is complete, so
`check` compares what was traced with the module on other inputs than those of the trace. Two calls are also
rewritten because torch cannot trace `scatter` of a plain bool, nor coremltools join empty tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from anesurgery import frontend
from anesurgery.errors import LoadError, NotExpressible, SurgeryError
from anesurgery.frontend.length_choices import LengthError
from anesurgery.mil import ct, silent_host

MAX_DIFFERENCE = 1e-3
"""Largest accepted difference of a trace from its module, as a share of the range of the output in fp32."""
SHAPE_QUERIES = frozenset({"__len__", "__get__", "numel", "size", "dim"})
"""Functions that may be called on positions: they ask for the shape and dtype only."""
NUMBER_QUERIES = SHAPE_QUERIES | {"__eq__", "__ne__", "__index__", "__int__", "item", "__format__", "__bool__"}
"""Functions that may be called on an entry of `nonzero`, which is the number of an expert."""


class _GroupSizes(list[int]):
    """The number of rows of each group, with the tensor that holds these numbers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.tolist())
        self.tensor = tensor


class _Positions:
    """One of the index vectors that `torch.where(mask)` returns, standing for all rows."""

    def __init__(self, mask: torch.Tensor, axis: int) -> None:
        self.mask, self.axis = mask, axis
        self.all = torch.arange(mask.shape[axis])
        """What the traced code gets in its place: every index of that axis."""


class Traceable(TorchFunctionMode):
    """A torch function mode in which code that picks rows by computed values runs on all rows.

    Args:
        every: replace all functions of `HANDLERS`; otherwise only those of `PLAIN`, which keep the result.
    """

    def __init__(self, *, every: bool = True) -> None:
        super().__init__()
        self._every = every
        self._positions: dict[int, _Positions] = {}
        self._pending_groups: tuple[_GroupSizes, int] | None = None
        self._expert_indices: dict[int, torch.Tensor] = {}
        self.acted = False
        """Whether a handler replaced a call by one with another result; then `check` is needed."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call the handler of a torch function, or the function itself.

        Raises:
            NotExpressible: the call uses positions in a way that may be wrong for all rows.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        handler = HANDLERS.get(name) if self._every or name in PLAIN else None
        first = next((key for key in FIRST if key in kwargs), None) if not args else None
        others = {key: value for key, value in kwargs.items() if key != first}
        given = args if first is None else (kwargs[first],)
        result = NotImplemented if handler is None else handler(self, *given, **others)
        if result is not NotImplemented:
            self.acted = self.acted or name not in PLAIN
            return result
        for value in _flatten((args, kwargs)):
            if self._positions_of(value) is not None and name not in SHAPE_QUERIES:
                raise NotExpressible(f"{name} of the rows that a mask chooses, which a trace would keep")
            if self._is_expert_index(value) and name not in NUMBER_QUERIES:
                raise NotExpressible(f"{name} of what nonzero gives, which a trace would keep")
        return func(*args, **kwargs)

    def __exit__(self, *error: object) -> None:
        """Check that groups which were split were joined again."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._pending_groups is not None and error[0] is None:
            raise NotExpressible("rows are split by sizes that are computed, and not joined again")

    def _is_expert_index(self, value: Any) -> bool:
        return value is not None and self._expert_indices.get(id(value)) is value

    def _remember_expert_index(self, value: torch.Tensor) -> torch.Tensor:
        """Return the same tensor, remembered as an entry of what `nonzero` gave."""
        self._expert_indices[id(value)] = value
        return value

    def _positions_of(self, index: Any) -> _Positions | None:
        place = self._positions.get(id(index))
        return place if place is not None and place.all is index else None

    def nonzero(self, x: torch.Tensor, *, as_tuple: bool = False) -> Any:
        """Return every index of a vector: an expert that no row chose then adds 0 to all rows."""
        if x.ndim != 1 or as_tuple:
            return NotImplemented
        return self._remember_expert_index(torch.arange(len(x))[:, None])

    def unbind(self, x: torch.Tensor, dim: int = 0) -> Any:
        """Return the entries of `nonzero` one by one."""
        own = self._is_expert_index(x) and dim == 0
        return tuple(self._remember_expert_index(row) for row in x.unbind(0)) if own else NotImplemented

    def squeeze(self, x: torch.Tensor, *axes: Any, **named: Any) -> Any:
        """Return the entries of `nonzero` as a vector, or one of them as a scalar."""
        own = self._is_expert_index(x)
        return self._remember_expert_index(x.squeeze(*axes, **named)) if own else NotImplemented

    def where(self, mask: Any, *others: Any, **named: Any) -> Any:
        """Return positions of all rows for each axis of a mask."""
        if others or named or mask.ndim < 1:
            return NotImplemented
        positions = [_Positions(mask, axis) for axis in range(mask.ndim)]
        self._positions |= {id(place.all): place for place in positions}
        return tuple(place.all for place in positions)

    def getitem(self, x: torch.Tensor, index: Any) -> Any:
        """Return all rows, or what each row has where the mask is true."""
        indices = index if isinstance(index, tuple) else (index,)
        positions = [place for item in indices if (place := self._positions_of(item)) is not None]
        if self._is_expert_index(x):
            return self._remember_expert_index(x[index]) if index == 0 else NotImplemented
        if not positions:
            is_single = self._is_expert_index(index) and index.numel() == 1
            if not is_single:
                return NotImplemented
            beyond = _scalar_index(index) >= len(x)  # no such expert, so that no token chooses it
            return x[-1] if beyond else x[index]
        sizes = [place.mask.shape[place.axis] for place in positions]
        if (
            any(self._positions_of(item) is None for item in indices[: len(positions)])
            or list(x.shape[: len(sizes)]) != sizes
        ):
            return NotImplemented
        if len(positions) == 1:
            return x if len(indices) == 1 else x[(slice(None), *indices[1:])]
        weights = positions[0].mask.permute([place.axis for place in positions]).to(x.dtype)
        shares = (x * weights).sum(dim=tuple(range(1, len(positions))))
        return shares[(slice(None), *indices[len(positions) :])]

    def index_add_(self, total: torch.Tensor, dim: int, index: Any, source: Any, **named: Any) -> Any:
        """Add to `total`, in place, the rows where the mask is true."""
        if (added := self._masked_rows(total, dim, index, source, named)) is None:
            return NotImplemented
        return total.add_(added)

    def index_add(self, total: torch.Tensor, dim: int, index: Any, source: Any, **named: Any) -> Any:
        """Return `total` plus the rows where the mask is true."""
        if (added := self._masked_rows(total, dim, index, source, named)) is None:
            return NotImplemented
        return total + added

    def _masked_rows(self, total: Any, dim: int, index: Any, source: Any, named: Any) -> torch.Tensor | None:
        """Return `source` with 0 in rows where the mask is false; None where `index` is no position."""
        position = self._positions_of(index)
        if position is None or dim != 0 or named:
            return None
        others = [axis for axis in range(position.mask.ndim) if axis != position.axis]
        mask = position.mask.to(total.dtype)
        mask = mask.sum(dim=others) if others else mask
        added: torch.Tensor = source * mask.reshape([-1] + [1] * (source.ndim - 1))
        return added

    def tolist(self, x: torch.Tensor) -> Any:
        """Return group sizes that remember their tensor."""
        return NotImplemented if x.ndim != 1 or x.is_floating_point() else _GroupSizes(x)

    def split(self, x: torch.Tensor, sizes: Any, dim: int = 0) -> Any:
        """Return all rows once for each group."""
        if not isinstance(sizes, _GroupSizes) or dim != 0:
            return NotImplemented
        self._pending_groups = (sizes, int(x.shape[0]))
        return tuple(x for _ in sizes)

    def cat(self, parts: Any, dim: int = 0, **named: Any) -> Any:
        """Take each row from its own group; and drop empty parts, which coremltools cannot join."""
        nonempty = [part for part in parts if part.numel()]
        if not named and 0 < len(nonempty) < len(parts):
            return torch.cat(nonempty, dim) if len(nonempty) > 1 else nonempty[0]
        sizes, rows = self._pending_groups or ([], 0)
        if dim != 0 or named or len(parts) != len(sizes) or any(len(part) != rows for part in parts):
            return NotImplemented
        self._pending_groups = None
        assert isinstance(sizes, _GroupSizes)
        ends = sizes.tensor.cumsum(0)
        rows_index = torch.arange(rows)[:, None]
        is_of_group = ((rows_index < ends) & (rows_index >= ends - sizes.tensor)).to(parts[0].dtype)
        shape = [-1] + [1] * (parts[0].ndim - 1)
        return sum(part * is_of_group[:, i].reshape(shape) for i, part in enumerate(parts))

    def scatter(self, x: torch.Tensor, dim: int, index: Any, value: Any = None, **named: Any) -> Any:
        """Scatter a plain bool as a number."""
        return x.scatter(dim, index, int(value)) if isinstance(value, bool) and not named else NotImplemented


def check(traced: Any, module: Any, inputs: Sequence[Sequence[Any]]) -> None:
    """Check that a trace gives what its module gives on other inputs than those of the trace.

    The module is traced anew for each input, because code may ask whether it is being traced.

    Raises:
        NotExpressible: it does not.
    """
    trace: Any = torch.jit.trace
    for values in inputs:
        with Traceable(every=False):
            expected_trace = trace(module, tuple(values), check_trace=False)
        for actual, expected in zip(
            _flatten((traced(*values),)), _flatten((expected_trace(*values),)), strict=True
        ):
            error = float((actual - expected).abs().max()) if expected.numel() else 0.0
            spread = float(expected.max() - expected.min()) if expected.numel() else 0.0
            if not error <= MAX_DIFFERENCE * spread:
                raise NotExpressible(
                    f"its trace differs from it by {error:.3g} for other inputs, where numbers have a range of "
                    f"{spread:.3g}: it keeps what was computed for its example"
                )


def _flatten(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _flatten(one)
    elif isinstance(value, dict):
        yield from _flatten(list(value.values()))
    else:
        yield value


def _scalar_index(index: Any) -> int:
    """Return the number that a scalar integer index holds; -1 for any other index."""
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
"""Name of a torch function -> its handler, which returns NotImplemented where it does not apply."""
FIRST = ("condition", "tensors", "input")
"""Names by which a call may give the first argument of these functions."""
PLAIN = frozenset({"scatter", "tolist"})
"""Handlers that change how a call is written, and not its result."""


TOKENS, LOGITS = "input_ids", "logits"


def convert(module: Any, context: int, *, half: bool = True) -> Any:
    """Convert a causal language model to an ML Program of iOS 18.

    Args:
        module: of transformers, in fp32.
        context: how many tokens it reads.
        half: compute in fp16, else in fp32.

    Raises:
        LoadError: the module cannot be traced or converted.
    """
    example = torch.zeros(1, context, dtype=torch.int64)
    inputs = [ct.TensorType(TOKENS, shape=example.shape, dtype=np.int32)]
    return traced_package(module, _ids_to_logits(module), [example], inputs, [ct.TensorType(LOGITS)], half)


def traced_package(
    module: Any,
    call: Any,
    examples: Sequence[Any],
    inputs: Sequence[ct.TensorType],
    outputs: Sequence[ct.TensorType],
    half: bool,
) -> Any:
    """Trace a module that calls a module of transformers, and convert the trace.

    Args:
        module: of transformers.
        call: the module to trace, which calls `module`.
        examples: example inputs of the trace; the first holds token ids.
        inputs: types of the package's inputs.
        outputs: types of its outputs.
        half: compute in fp16, else in fp32.

    Raises:
        LoadError: the module cannot be traced or converted.
    """
    prepare(module)
    try:
        with torch.no_grad(), silent_host():
            trace: Any = torch.jit.trace
            with Traceable() as mode:
                traced = trace(call, tuple(examples), check_trace=False)
            if mode.acted:
                check(traced, call, _other_tokens(examples, int(module.config.get_text_config().vocab_size)))
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
    """Prepare a module for the trace: the experts of a mixture all compute every token."""
    frontend.register()
    if getattr(module, "set_experts_implementation", None) is not None:
        frontend.register_experts()
        module.set_experts_implementation("dense")


def _other_tokens(examples: Sequence[Any], vocabulary: int) -> list[tuple[Any, ...]]:
    """Return two other inputs: random tokens, and one token repeated, which few experts get."""
    draws = torch.Generator().manual_seed(0)
    ids, *others = examples
    drawn = [torch.randint(0, vocabulary, shape, generator=draws) for shape in (ids.shape, ids.shape[:1])]
    return [(tokens.to(ids.dtype).expand(ids.shape), *others) for tokens in drawn]


def _ids_to_logits(module: Any) -> Any:
    """Wrap a module to take ids and return only logits."""

    class Logits(torch.nn.Module):
        """Ids to logits, without the other outputs of transformers and without a cache."""

        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, input_ids: Any) -> Any:
            return self.model(input_ids=input_ids, use_cache=False).logits

    return Logits().eval()
