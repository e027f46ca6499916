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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import registry
from anesurgery.files.package import Loaded
from anesurgery.interpret.decoder_calls import BACK
from anesurgery.interpret.state import POSITION
from anesurgery.mil import Program, ct
from anesurgery.shipping.converting import LOGITS, TOKENS, converted
from anesurgery.surgery import Surgery, apply

CACHE = "cache_"
"""The beginning of the names of what is kept."""
RECURRENT = ("conv_states", "recurrent_states")
DECODE = "decode"
MIXING = ("add_cache", "position_function")
"""Steps of `llm_ane` that make a step of a model that reads all its tokens at once."""
KEYS = ("keys", "values")
SHAPES = 8
"""How many shapes of states are joined, at most: columns, sums, and keys and values of two kinds of layers."""
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What the cache is called by models of transformers."""


@dataclass(frozen=True)
class Held:
    """A tensor that a layer of a cache holds."""

    layer: int
    kind: str
    number: int
    """Of several of a kind."""
    shape: tuple[int, ...]


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
        """Must it know how many tokens came before? Only keys and values have places."""
        return any(h.kind in KEYS for h in self.held)

    def filled(self, position: Any, tensors: Sequence[Any]) -> Any:
        """A cache that holds these tensors after so many tokens."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        for layer in cache.layers:
            for kind in RECURRENT:
                setattr(layer, kind, dict(getattr(layer, kind, {})))
            if _reads_keys(layer):
                _keep_keys(layer, position, self.context)
        for held, tensor in zip(self.held, tensors, strict=True):
            layer = cache.layers[held.layer]
            if held.kind in KEYS:
                setattr(layer, held.kind, tensor)
            else:
                getattr(layer, held.kind)[held.number] = tensor
        return cache

    def taken(self, cache: Any) -> list[Any]:
        """The tensors of a cache."""
        layers = cache.layers
        return [
            getattr(layers[h.layer], h.kind) if h.kind in KEYS else getattr(layers[h.layer], h.kind)[h.number]
            for h in self.held
        ]


def step_of(module: Any, context: int) -> Step | None:
    """How a module reads one token; None where it keeps nothing but keys and values, as `add_cache` can do.

    Args:
        module: of transformers.
        context: the most tokens that are kept.
    """
    import torch

    parameters = inspect.signature(module.forward).parameters
    argument = next((name for name in CACHE_NAMES if name in parameters), None)
    if argument is None:
        return None
    with torch.no_grad():
        cache = getattr(module(torch.zeros(1, 1, dtype=torch.int64), use_cache=True), argument, None)
    held = tuple(h for i, layer in enumerate(getattr(cache, "layers", ())) for h in _held(i, layer, context))
    if not any(h.kind == "recurrent_states" for h in held):
        return None
    return Step(module, argument, cache, held, context)


def _held(number: int, layer: Any, context: int) -> list[Held]:
    """What a layer holds, with as many keys and values as the context."""
    found = [
        Held(number, kind, i, tuple(tensor.shape))
        for kind in RECURRENT
        for i, tensor in getattr(layer, kind, {}).items()
        if tensor is not None
    ]
    if _reads_keys(layer):
        for kind in KEYS:
            batch, heads, _, width = getattr(layer, kind).shape
            found.append(Held(number, kind, 0, (batch, heads, context, width)))
    return found


def _reads_keys(layer: Any) -> bool:
    """Has a layer read a key?"""
    return getattr(layer, "keys", None) is not None


def _keep_keys(layer: Any, position: Any, context: int) -> None:
    """Let a layer hold as many keys and values as the context, and blend new ones in at a position."""
    import torch

    places = torch.arange(context, dtype=torch.int32).reshape(1, 1, context, 1)

    def update(keys: Any, values: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        new = (places == position).to(keys.dtype)
        layer.keys, layer.values = (
            old * (1 - new) + value * new for old, value in ((layer.keys, keys), (layer.values, values))
        )
        return layer.keys, layer.values

    layer.update = update
    layer.get_mask_sizes = lambda _: (context, 0)
    layer.get_seq_length = lambda: position[0].to(torch.int64)


def convert_step(step: Step, *, half: bool = True) -> Any:
    """Convert a module that reads one token by trace.

    Args:
        step: how it reads one.
        half: is it computed in fp16, and are what goes in and comes out fp16?

    Raises:
        LoadError: it cannot be traced or converted; says which module and why.
    """
    import torch

    names = [f"{CACHE}{i}" for i in range(len(step.held))]
    examples = [torch.zeros(1, 1, dtype=torch.int64), *[torch.zeros(1, dtype=torch.int32)] * step.counts]
    examples += [torch.zeros(h.shape) for h in step.held]
    kind = np.float16 if half else np.float32
    inputs = [ct.TensorType(TOKENS, (1, 1), dtype=np.int32)]
    inputs += [ct.TensorType(POSITION, (1,), dtype=np.int32)] * step.counts
    inputs += [ct.TensorType(n, h.shape, dtype=kind) for n, h in zip(names, step.held, strict=True)]
    outputs = [ct.TensorType(LOGITS), *(ct.TensorType(f"{name}{BACK}", dtype=kind) for name in names)]
    return converted(step.module, _stepping(step), examples, inputs, outputs, half)


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
    return any(name.startswith(CACHE) for function in program.functions.values() for name in function.inputs)


def finished_step(loaded: Loaded, *, target: str | None, cache: str, joined: bool) -> Surgery:
    """A step as the function `decode`, with what `llm_ane` does besides, and with states.

    Args:
        loaded: of `convert_step`.
        target: chip and OS.
        cache: where what is kept is: "state", or "io", as inputs that come back.
        joined: do states of one shape become one?
    """
    ((name, function),) = loaded.program.functions.items()
    del loaded.program.functions[name]
    loaded.program.add_function(DECODE, function)
    steps = [step for step in registry.recipe_module("llm_ane").llm_ane.steps if step.name not in MIXING]
    if cache == "state":
        steps.append(registry.make_pass("io_as_cache"))
        steps += [registry.make_pass("join_states", joined=f"{CACHE}of_{i}") for i in range(SHAPES * joined)]
    if POSITION in function.inputs:
        steps.append(registry.make_pass("position_function"))
    return apply(loaded.program, steps, target=target, prove=None, quiet=True)
