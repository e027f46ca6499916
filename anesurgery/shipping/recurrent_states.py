"""Convert a decoder with a recurrent state to a package that reads one token per call.

`build` uses this for Mamba and hybrid models, and where no cache can be added to the graph of a whole text.
Such models keep the last columns of a convolution, a decaying sum and, with attention, keys and values.
transformers holds all of these in one cache object, so the tensors of that cache become inputs `cache_0`,
`cache_1`, ... and their new values outputs `cache_0_out`, `cache_1_out`, .... Keys and values have the length
of the context; the new row is blended in at `position` with a mask of 0 and 1. `finished_decoder` can then turn
these pairs into states.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anesurgery import registry
from anesurgery.files.package import Loaded
from anesurgery.interpret.decoder_calls import BACK
from anesurgery.interpret.state import POSITION
from anesurgery.mil import Program, ct
from anesurgery.shipping.converting import LOGITS, TOKENS, traced_package
from anesurgery.surgery import Surgery, apply

Path = tuple[str | int, ...]
"""Where a tensor is kept: ("cache", "layers", 0, "keys"), or ("module", "layers.0.mixer", "conv_state")."""
KEPT = "cache_"
"""The prefix of the names of cache inputs."""
CACHE, MODULE = "cache", "module"
"""The roots of paths: most families keep all tensors in a cache object, some keep them in their modules."""
COLUMNS = "conv_states"  # the last inputs of a convolution, in a cache
GROWING = {"update": ("keys", "values"), "update_indexer": ("indexer_keys",)}
"""Method of a cache layer -> the attributes to which it appends its arguments."""
DECODE = "decode"  # the name of the function that reads a token
LEFT_OUT_STEPS = ("add_cache", "position_function")
"""Steps of `llm_ane` that are left out: they turn the graph of a whole text into one that reads a token."""
SHAPES = 8
"""The most shapes whose states are joined: columns, sums, and keys and values of two kinds of layers."""
POSITION_IDS = "position_ids"
"""The argument of models of transformers that holds the positions of the tokens."""
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""What the cache is called by models of transformers."""


@dataclass(frozen=True)
class CacheTensor:
    """A tensor that is kept from one token to the next."""

    path: Path
    """Where it is kept, in the cache or in a module."""
    shape: tuple[int, ...]
    axis: int | None = None
    """The axis that grows with the text, here as long as the context; None for a state of a fixed size."""


@dataclass(frozen=True)
class DecoderStep:
    """How a module of transformers reads one token."""

    module: Any
    argument: str
    """The name by which it takes a cache."""
    cache: Any
    """The cache object after one token; `filled` copies it."""
    tensors: tuple[CacheTensor, ...]
    context: int

    @property
    def counts(self) -> bool:
        """Whether the module must be told the position of its token: it has keys or values."""
        return any(tensor.axis is not None for tensor in self.tensors)

    @property
    def recurrent(self) -> bool:
        """Whether it keeps more than `add_cache` can: other than keys, values and columns of convolutions."""
        return any(tensor.axis is None and COLUMNS not in tensor.path for tensor in self.tensors)

    def filled(self, position: Any, values: Sequence[Any]) -> Any:
        """Return a copy of the cache that holds these values, after `position` tokens."""
        cache = _copied_containers(self.cache)
        for tensor, value in zip(self.tensors, values, strict=True):
            owner, last = _tensor_at(self.module, cache, tensor.path[:-1]), tensor.path[-1]
            if isinstance(owner, (dict, list)):
                owner[last] = value  # type: ignore[index]
            else:
                setattr(owner, str(last), value)
        # transformers asks these for the mask and the position, and appending would change the shape; keys and
        # values are in caches only, never in modules
        for i, layer in enumerate(cache.layers if self.counts else ()):
            layer.get_mask_sizes = lambda *_: (self.context, 0)
            layer.get_seq_length = lambda *_: position[0].to(torch.int64)
            for method, names in GROWING.items():
                paths = [(CACHE, "layers", i, name) for name in names]
                if kept := [tensor for tensor in self.tensors if tensor.path in paths]:
                    setattr(layer, method, _blend_update(layer, kept, position))
        return cache

    def cache_values(self, cache: Any) -> list[Any]:
        """Return the tensors of a cache, in the order of `tensors`."""
        return [_tensor_at(self.module, cache, tensor.path) for tensor in self.tensors]


def _blend_update(layer: Any, kept: Sequence[CacheTensor], position: Any) -> Any:
    """Return a cache layer's update method that blends new rows in at `position` instead of appending them."""

    def update(*new: Any, **_: Any) -> Any:
        results = []
        for tensor, row in zip(kept, new, strict=False):
            positions = torch.arange(tensor.shape[tensor.axis or 0], dtype=torch.int32)
            is_new = (positions == position).to(row.dtype)
            is_new = is_new.reshape([-1 if axis == tensor.axis else 1 for axis in range(len(tensor.shape))])
            name = str(tensor.path[-1])
            setattr(layer, name, getattr(layer, name) * (1 - is_new) + row * is_new)
            results.append(getattr(layer, name))
        return tuple(results) if len(results) > 1 else results[0]

    return update


def step_of(module: Any, context: int) -> DecoderStep | None:
    """Return how a module reads one token; None where its cache is missing or of an unknown kind.

    Args:
        module: of transformers.
        context: the most tokens that keys and values hold.
    """
    parameters = inspect.signature(module.forward).parameters
    argument = next((name for name in CACHE_NAMES if name in parameters), None)
    if argument is None:
        return None
    # ids are enough, since the modules keep these tensors
    held_before = {id(tensor) for _, tensor in _module_tensors(module)}
    try:
        (cache, one), (_, two) = (_cache_after(module, argument, count, held_before) for count in (1, 2))
    except Exception:  # of transformers, which raises what it likes
        return None
    if not one or one.keys() != two.keys():
        return None
    tensors = [_cache_tensor(path, one[path], two[path], context) for path in one]
    known = tuple(tensor for tensor in tensors if tensor is not None)
    return DecoderStep(module, argument, cache, known, context) if len(known) == len(tensors) else None


def _cache_after(
    module: Any, argument: str, count: int, held_before: Collection[int]
) -> tuple[Any, dict[Path, Any]]:
    """Return the cache after `count` tokens, and path -> shape of every tensor that is kept."""
    with torch.no_grad():
        cache = read_beginning(module, argument, torch.zeros(1, count, dtype=torch.int64))[1]
    own = ((path, tensor) for path, tensor in _module_tensors(module) if id(tensor) not in held_before)
    return cache, {path: tuple(tensor.shape) for path, tensor in (*_tensors(cache, (CACHE,)), *own)}


def read_beginning(module: Any, argument: str, ids: Any) -> tuple[Any, Any]:
    """Return a module's output for the beginning of a text, and the cache with which to go on."""
    import transformers

    given = positions_given(module, torch.arange(ids.shape[1]))
    output = module(ids, use_cache=True, **given)
    cache = getattr(output, argument, None)
    if cache is None:  # some take one, and make none
        cache = transformers.DynamicCache(config=module.config)
        output = module(ids, use_cache=True, **{argument: cache}, **given)
    return output, cache


def positions_given(module: Any, positions: Any) -> dict[str, Any]:
    """Return the argument for the positions of tokens, as `generate` gives it; empty if a module takes none.

    Without it some modules, Bamba for one, count every call from 0.
    """
    takes = POSITION_IDS in inspect.signature(module.forward).parameters
    return {POSITION_IDS: positions.to(torch.int64)[None]} if takes else {}


def _cache_tensor(path: Path, one: tuple[int, ...], two: tuple[int, ...], context: int) -> CacheTensor | None:
    """Return what is kept at a path, from its shapes after one and two tokens; None for other growth."""
    if one == two:
        return CacheTensor(path, one)
    # keys and values grow by one row per token, along one axis
    grown = [axis for axis, (n, m) in enumerate(zip(one, two, strict=False)) if n != m]
    named = any(path[-1] in names for names in GROWING.values())
    if not named or len(one) != len(two) or len(grown) != 1 or two[grown[0]] != 2:
        return None
    return CacheTensor(path, tuple(context if axis in grown else n for axis, n in enumerate(one)), grown[0])


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the float tensors in a cache, with their paths."""
    if torch.is_tensor(value) and value.is_floating_point():
        yield path, value
    for name, inner in _items(value):
        yield from _tensors(inner, (*path, name))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the (name, value) pairs of a container; empty for other values."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list):
        return enumerate(value)
    return vars(value).items() if _is_cache(value) else ()


def _is_cache(value: Any) -> bool:
    """Return whether a value is a cache of transformers, or a layer of one."""
    kind = type(value)
    return kind.__module__.startswith("transformers.") and kind.__name__.endswith(("Cache", "Layer"))


def _module_tensors(module: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the tensors in plain attributes of modules, which are neither parameters nor buffers."""
    for name, inner in module.named_modules():
        for attribute, value in vars(inner).items():
            if not attribute.startswith("_"):
                yield from _tensors(value, (MODULE, name, attribute))


def _copied_containers(value: Any) -> Any:
    """Copy caches, lists and dicts deeply, and share the tensors in them."""
    if isinstance(value, list):
        return [_copied_containers(v) for v in value]
    if isinstance(value, dict):
        return {name: _copied_containers(v) for name, v in value.items()}
    if not _is_cache(value):
        return value
    other = copy.copy(value)
    vars(other).update({name: _copied_containers(v) for name, v in vars(value).items()})
    return other


def _tensor_at(module: Any, cache: Any, path: Sequence[Any]) -> Any:
    """Return the value at a path."""
    root, *names = path
    value = cache
    if root == MODULE:
        value, names = module.get_submodule(names[0]), names[1:]
    for name in names:
        value = value[name] if isinstance(value, (dict, list)) else getattr(value, name)
    return value


def convert_step(step: DecoderStep, *, half: bool = True) -> Any:
    """Convert a module to a package that reads one token.

    Args:
        step: how the module reads one token.
        half: compute in fp16, with a cache in fp16; else in fp32.

    Raises:
        LoadError: the module cannot be traced or converted.
    """
    names = [f"{KEPT}{i}" for i in range(len(step.tensors))]
    examples = [torch.zeros(1, 1, dtype=torch.int64)]
    inputs = [ct.TensorType(TOKENS, (1, 1), dtype=np.int32)]
    if step.counts:
        examples.append(torch.zeros(1, dtype=torch.int32))
        inputs.append(ct.TensorType(POSITION, (1,), dtype=np.int32))
    examples += [torch.zeros(tensor.shape) for tensor in step.tensors]
    kind = np.float16 if half else np.float32
    inputs += [
        ct.TensorType(n, tensor.shape, dtype=kind) for n, tensor in zip(names, step.tensors, strict=True)
    ]
    outputs = [ct.TensorType(LOGITS), *(ct.TensorType(f"{name}{BACK}", dtype=kind) for name in names)]
    return traced_package(step.module, Stepping(step).eval(), examples, inputs, outputs, half)


class Stepping(torch.nn.Module):
    """A module whose cache tensors are inputs and outputs."""

    def __init__(self, step: DecoderStep) -> None:
        super().__init__()
        self.model, self.step = step.module, step

    def forward(self, ids: Any, *given: Any) -> tuple[Any, ...]:
        """Return (logits, new cache tensors) of (ids, position, cache tensors)."""
        position, tensors = (given[0], given[1:]) if self.step.counts else (None, given)
        cache = self.step.filled(position, tensors)
        positions = positions_given(self.model, position) if self.step.counts else {}
        logits = self.model(input_ids=ids, **{self.step.argument: cache, "use_cache": True}, **positions).logits
        return (logits, *self.step.cache_values(cache))


def is_step(program: Program) -> bool:
    """Return whether a program is one that `convert_step` made."""
    return any(name.startswith(KEPT) for function in program.functions.values() for name in function.inputs)


def finished_decoder(loaded: Loaded, *, target: str | None, cache: str, joined: bool, lookup: bool) -> Surgery:
    """Apply `llm_ane` to a step, name its function `decode`, and make the cache states where asked.

    Args:
        loaded: what `convert_step` made.
        target: chip and OS.
        cache: "state" for Core ML states, "io" to leave inputs and outputs.
        joined: join the states of one shape.
        lookup: look embeddings up in the function that makes masks, where there is one.
    """
    ((name, function),) = loaded.program.functions.items()
    del loaded.program.functions[name]
    loaded.program.add_function(DECODE, function)
    llm_ane = registry.recipe_module("llm_ane").llm_ane
    passes = [one for one in llm_ane.steps if one.name not in LEFT_OUT_STEPS]
    if cache == "state":
        numbers = range(SHAPES if joined else 0)
        passes.append(registry.make_pass("io_as_cache"))
        passes += [registry.make_pass("join_states", joined=f"{KEPT}of_{i}") for i in numbers]
    if POSITION in function.inputs:
        passes.append(registry.make_pass("position_function", lookup=lookup))
    return apply(loaded.program, passes, target=target, prove=None, quiet=True)
