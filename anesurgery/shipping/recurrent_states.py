"""A decoder with a recurrent state as a package that reads one token a call: its state goes in and comes out.

Mamba and hybrids keep what they read in states of a fixed size (the last columns of a convolution, and a sum
that decays) and, where they have attention, in keys and values. transformers holds all of it in one cache, so
that a step is the same for every family: the tensors of the cache are inputs, `cache_0`, ..., and what they are
after the token comes back as `cache_0_out`, .... Keys and values are as long as the context, and a new one is
blended in at `position`, by 0 and 1.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import registry
from anesurgery.files.package import Loaded
from anesurgery.interpret.decoder_calls import BACK
from anesurgery.interpret.state import POSITION
from anesurgery.mil import Program, ct
from anesurgery.shipping.converting import LOGITS, TOKENS, traced_package
from anesurgery.surgery import Surgery, apply

Path = tuple[str | int, ...]
"""From the cache or the module on: modules, attributes, and places in lists and dictionaries."""
KEPT = "cache_"
"""The beginning of the names of what is kept."""
CACHE, MODULE = "cache", "module"
"""The roots of paths: most families keep all in a cache, and some in their modules."""
COLUMNS = "conv_states"
GROWING = {"update": ("keys", "values"), "update_indexer": ("indexer_keys",)}
"""Method of a layer of a cache -> the attributes to which it appends what it is given."""
DECODE = "decode"
MIXING = ("add_cache", "position_function")
"""Steps of `llm_ane` that make a step of a model that reads all its tokens at once."""
SHAPES = 8
"""How many shapes of states are joined, at most: columns, sums, and keys and values of two kinds of layers."""
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""What the cache is called by models of transformers."""


@dataclass(frozen=True)
class Held:
    """A tensor that is kept from one token to the next."""

    path: Path
    """Where it is kept."""
    shape: tuple[int, ...]
    axis: int | None = None
    """The one that grows with the text, here as long as the context; None for a state of a fixed size."""


@dataclass(frozen=True)
class Step:
    """How a module of transformers reads one token."""

    module: Any
    argument: str
    """The name by which it takes a cache."""
    cache: Any
    """As it is after a token."""
    held: tuple[Held, ...]
    context: int

    @property
    def counts(self) -> bool:
        """Must it know how many tokens came before? Only what grows has places."""
        return any(h.axis is not None for h in self.held)

    @property
    def recurrent(self) -> bool:
        """Does it keep more than `add_cache` does: keys, values, and the last columns of convolutions?"""
        return any(h.axis is None and COLUMNS not in h.path for h in self.held)

    def filled(self, position: Any, tensors: Sequence[Any]) -> Any:
        """A cache that holds these tensors after so many tokens."""
        import torch

        cache = _copied(self.cache)
        for held, tensor in zip(self.held, tensors, strict=True):
            owner, last = _at(self.module, cache, held.path[:-1]), held.path[-1]
            if isinstance(owner, (dict, list)):
                owner[last] = tensor  # type: ignore[index]
            else:
                setattr(owner, str(last), tensor)
        for i, layer in enumerate(cache.layers if self.counts else ()):
            layer.get_mask_sizes = lambda *_: (self.context, 0)
            layer.get_seq_length = lambda *_: position[0].to(torch.int64)
            for method, names in GROWING.items():
                kept = [h for h in self.held if h.path in [(CACHE, "layers", i, name) for name in names]]
                if kept:
                    setattr(layer, method, _blending(layer, kept, position))
        return cache

    def taken(self, cache: Any) -> list[Any]:
        """The tensors of a cache."""
        return [_at(self.module, cache, held.path) for held in self.held]


def _blending(layer: Any, kept: Sequence[Held], position: Any) -> Any:
    """What takes new rows into a layer: blended in at a position, where the layer itself appends them."""
    import torch

    def update(*new: Any, **_: Any) -> Any:
        results = []
        for held, value in zip(kept, new, strict=False):
            places = torch.arange(held.shape[held.axis or 0], dtype=torch.int32)
            own = (places == position).to(value.dtype)
            own = own.reshape([-1 if axis == held.axis else 1 for axis in range(len(held.shape))])
            name = str(held.path[-1])
            setattr(layer, name, getattr(layer, name) * (1 - own) + value * own)
            results.append(getattr(layer, name))
        return tuple(results) if len(results) > 1 else results[0]

    return update


def step_of(module: Any, context: int) -> Step | None:
    """How a module reads one token; None where transformers keeps nothing for it, or what is not followed.

    Args:
        module: of transformers.
        context: the most tokens that are kept.
    """
    parameters = inspect.signature(module.forward).parameters
    argument = next((name for name in CACHE_NAMES if name in parameters), None)
    if argument is None:
        return None
    own = {id(tensor) for _, tensor in _in_modules(module)}
    try:
        (cache, one), (_, two) = (_after(module, argument, count, own) for count in (1, 2))
    except Exception:  # of transformers, which raises what it likes
        return None
    if not one or one.keys() != two.keys():
        return None
    held = [_held(path, one[path], two[path], context) for path in one]
    return Step(module, argument, cache, tuple(h for h in held if h), context) if all(held) else None


def _after(module: Any, argument: str, count: int, own: Collection[int]) -> tuple[Any, dict[Path, Any]]:
    """The cache after so many tokens, and the shapes of what it and the modules hold, but for `own`."""
    import torch

    with torch.no_grad():
        cache = begun(module, argument, torch.zeros(1, count, dtype=torch.int64))[1]
    kept = [*_tensors(cache, (CACHE,)), *((p, t) for p, t in _in_modules(module) if id(t) not in own)]
    return cache, {path: tuple(tensor.shape) for path, tensor in kept}


def begun(module: Any, argument: str, ids: Any) -> tuple[Any, Any]:
    """What a module gives for the beginning of a text, and the cache that it is then read on with."""
    import transformers

    output = module(ids, use_cache=True)
    cache = getattr(output, argument, None)
    if cache is None:  # some take one, and make none
        cache = transformers.DynamicCache(config=module.config)
        output = module(ids, use_cache=True, **{argument: cache})
    return output, cache


def _held(path: Path, one: tuple[int, ...], two: tuple[int, ...], context: int) -> Held | None:
    """What is kept at a place, by its shapes after one token and after two; None where that is not followed."""
    if one == two:
        return Held(path, one)
    grown = [axis for axis, (n, m) in enumerate(zip(one, two, strict=False)) if n != m]
    named = any(path[-1] in names for names in GROWING.values())
    if not named or len(one) != len(two) or len(grown) != 1 or two[grown[0]] != 2:
        return None
    return Held(path, tuple(context if axis in grown else n for axis, n in enumerate(one)), grown[0])


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """The tensors of floats in a container of a cache, and where they are."""
    import torch

    if torch.is_tensor(value) and value.is_floating_point():
        yield path, value
    for name, inner in _items(value):
        yield from _tensors(inner, (*path, name))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a container holds, by name."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list):
        return enumerate(value)
    return vars(value).items() if _is_cache(value) else ()


def _is_cache(value: Any) -> bool:
    """Is it a cache of transformers, or a layer of one?"""
    kind = type(value)
    return kind.__module__.startswith("transformers.") and kind.__name__.endswith(("Cache", "Layer"))


def _in_modules(module: Any) -> Iterator[tuple[Path, Any]]:
    """The tensors that modules hold, parameters and buffers apart."""
    for name, inner in module.named_modules():
        for attribute, value in vars(inner).items():
            if not attribute.startswith("_"):
                yield from _tensors(value, (MODULE, name, attribute))


def _copied(value: Any) -> Any:
    """Containers of their own with the same contents."""
    if isinstance(value, list):
        return [_copied(v) for v in value]
    if isinstance(value, dict):
        return {name: _copied(v) for name, v in value.items()}
    if not _is_cache(value):
        return value
    other = copy.copy(value)
    vars(other).update({name: _copied(v) for name, v in vars(value).items()})
    return other


def _at(module: Any, cache: Any, path: Sequence[Any]) -> Any:
    """What is at a place."""
    root, *names = path
    value = cache
    if root == MODULE:
        value, names = module.get_submodule(names[0]), names[1:]
    for name in names:
        value = value[name] if isinstance(value, (dict, list)) else getattr(value, name)
    return value


def convert_step(step: Step, *, half: bool = True) -> Any:
    """Convert a module that reads one token by trace.

    Args:
        step: how it reads one.
        half: is it computed in fp16, and are what goes in and comes out fp16?

    Raises:
        LoadError: it cannot be traced or converted; says which module and why.
    """
    import torch

    names = [f"{KEPT}{i}" for i in range(len(step.held))]
    examples = [torch.zeros(1, 1, dtype=torch.int64), *[torch.zeros(1, dtype=torch.int32)] * step.counts]
    examples += [torch.zeros(h.shape) for h in step.held]
    kind = np.float16 if half else np.float32
    inputs = [ct.TensorType(TOKENS, (1, 1), dtype=np.int32)]
    inputs += [ct.TensorType(POSITION, (1,), dtype=np.int32)] * step.counts
    inputs += [ct.TensorType(n, h.shape, dtype=kind) for n, h in zip(names, step.held, strict=True)]
    outputs = [ct.TensorType(LOGITS), *(ct.TensorType(f"{name}{BACK}", dtype=kind) for name in names)]
    return traced_package(step.module, _stepping(step), examples, inputs, outputs, half)


def _stepping(step: Step) -> Any:
    """A module with what is kept among its inputs and outputs."""
    import torch

    class Stepping(torch.nn.Module):
        """A token, its position and what was kept to logits, and what is kept then."""

        def __init__(self) -> None:
            super().__init__()
            self.model = step.module

        def forward(self, ids: Any, *given: Any) -> tuple[Any, ...]:
            position, tensors = (given[0], given[1:]) if step.counts else (None, given)
            cache = step.filled(position, tensors)
            kept: Mapping[str, Any] = {step.argument: cache, "use_cache": True}
            logits = self.model(input_ids=ids, **kept).logits
            return (logits, *step.taken(cache))

    return Stepping().eval()


def is_step(program: Program) -> bool:
    """Does a program read one token after what it kept, as `convert_step` makes it?"""
    return any(name.startswith(KEPT) for function in program.functions.values() for name in function.inputs)


def finished_step(loaded: Loaded, *, target: str | None, cache: str, joined: bool, lookup: bool) -> Surgery:
    """A step as the function `decode`, with what `llm_ane` does besides, and with states.

    Args:
        loaded: of `convert_step`.
        target: chip and OS.
        cache: where what is kept is: "state", or "io", as inputs that come back.
        joined: do states of one shape become one?
        lookup: are embeddings looked up in the function that makes masks, where there is one?
    """
    ((name, function),) = loaded.program.functions.items()
    del loaded.program.functions[name]
    loaded.program.add_function(DECODE, function)
    steps = [step for step in registry.recipe_module("llm_ane").llm_ane.steps if step.name not in MIXING]
    if cache == "state":
        steps.append(registry.make_pass("io_as_cache"))
        steps += [registry.make_pass("join_states", joined=f"{KEPT}of_{i}") for i in range(SHAPES * joined)]
    if POSITION in function.inputs:
        steps.append(registry.make_pass("position_function", lookup=lookup))
    return apply(loaded.program, steps, target=target, prove=None, quiet=True)
