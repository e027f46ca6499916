"""Layers that run something else: branches and loops run networks, custom layers the caller's functions.

A nested network sees the blobs around it and writes to them by `copy`. MIL's blocks return values instead:
those of the blobs that existed before and are written inside, and of those that both sides of a branch make. A
break or continue sets a flag, and the layers after it run under the condition that the flag is not set.

The flags are blobs of a loop: HALTED (the rest of the round is left out), BROKEN (no round follows), GO_ON (the
condition holds) and ROUND (the number of rounds so far). `ctx.exact` names the blobs of five axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from functools import reduce as fold
from typing import Any

import numpy as np

from anesurgery.errors import UnknownName
from anesurgery.mil import Var, mb
from anesurgery.neuralnetwork.context import BROKEN, GO_ON, HALTED, JUMPS, ROUND, Context, Made, layer, written
from anesurgery.neuralnetwork.layers.blob_axes import scalar, whole
from anesurgery.neuralnetwork.spec import nested_networks

NEARLY_ZERO = np.float32(1e-6)
"""A condition holds if its absolute value is above this (builder of coremltools, `add_branch`)."""


@dataclass(frozen=True)
class Part:
    """Some layers of a network, built as a network is."""

    layers: Sequence[Any] = ()


layer("copy")(lambda ctx, params, inputs: inputs[0])


@layer("branch")
def branch(ctx: Context, params: Any, inputs: list[Var]) -> None:
    """One network if the input is not 0, else the other one, if there is one."""
    other = params.elseBranch if params.HasField("elseBranch") else Part()
    _choose(ctx, _holds(ctx, inputs[0]), params.ifBranch, other)


@layer("loopBreak", inputs=0)
def loop_break(ctx: Context, params: Any, inputs: list[Var]) -> None:
    """End the loop."""
    _jump(ctx, "loopBreak")


@layer("loopContinue", inputs=0)
def loop_continue(ctx: Context, params: Any, inputs: list[Var]) -> None:
    """Go on with the next round."""
    _jump(ctx, "loopContinue")


def _jump(ctx: Context, kind: str) -> None:
    """Set the flags of a break or continue."""
    if HALTED not in ctx.env:
        raise ctx.error("is outside a loop; move it into the body of one")
    ctx.env.update({flag: _flag(True) for flag in JUMPS[kind]})


def _flag(value: bool) -> Var:
    return mb.const(val=np.bool_(value))


def _holds(ctx: Context, x: Var) -> Var:
    """Is the one number of a blob other than 0?"""
    return mb.greater(x=mb.abs(x=scalar(ctx, x)), y=NEARLY_ZERO)


def _jumps(network: Any) -> set[str]:
    """Return the breaks and continues that a network holds, without those of loops inside it."""
    kinds = {each.WhichOneof("layer") for each in network.layers} & JUMPS.keys()
    branches = (each for each in network.layers if each.WhichOneof("layer") == "branch")
    return kinds.union(*(_jumps(n) for each in branches for n in nested_networks(each)))


def _read(network: Any) -> Iterator[str]:
    """Yield every blob that a network may read."""
    for reader in network.layers:
        yield from reader.input
        for inner in nested_networks(reader):
            yield from _read(inner)


def _always_made(network: Any) -> set[str]:
    """Return the blobs that a network makes whichever branches run, and wherever it breaks or continues."""
    blobs: set[str] = set()
    for each in network.layers:
        blobs |= set(each.output)
        if each.WhichOneof("layer") == "branch":
            blobs |= set.intersection(*(_always_made(n) for n in nested_networks(each)))
        if _may_jump(each):
            break
    return blobs


def _may_jump(network_layer: Any) -> bool:
    """Is a layer a break or continue, or a branch that holds one?"""
    return bool(_jumps(Part([network_layer])))


def _run(ctx: Context, network: Any) -> None:
    """Build a network; after a layer that may break or continue, only for the case that it did not."""
    layers = list(network.layers)
    at = next((i for i, each in enumerate(layers) if _may_jump(each)), len(layers))
    ctx.build(Part(layers[: at + 1]))
    rest = Part(layers[at + 1 :])
    if rest.layers and layers[at].WhichOneof("layer") not in JUMPS:
        _choose(ctx, ctx.env[HALTED], Part(), rest)


def _choose(ctx: Context, condition: Var, first: Any, second: Any) -> None:
    """Build two networks as the two sides of a `cond`, or only the one that a constant condition chooses."""
    outer = ctx.env
    changed = {n for network in (first, second) for n in written(network)}
    both = _always_made(first) & _always_made(second)
    names = sorted(n for n in changed if n in outer or n in both)
    if condition.val is not None:
        _run(ctx, first if condition.val else second)
        for name in changed.difference(names):
            ctx.env.pop(name, None)  # a `cond` would not give it
        return
    if not names:
        return

    exact = ctx.exact
    ends: list[set[str]] = [set(), set()]

    def build(network: Any, which: int) -> tuple[Var, ...]:
        ctx.env, ctx.exact = dict(outer), set(exact)
        try:
            _run(ctx, network)
            ends[which] = ctx.exact.intersection(names)
            return _results(ctx, names, outer.values())
        finally:
            ctx.env, ctx.exact = outer, exact

    chosen = mb.cond(pred=condition, _true_fn=partial(build, first, 0), _false_fn=partial(build, second, 1))
    _same_axes(ctx, ends[0], ends[1], "the two sides of a branch")
    outer.update(zip(names, [chosen] if isinstance(chosen, Var) else chosen, strict=True))
    ctx.exact = exact.difference(names) | ends[0]


def _same_axes(ctx: Context, one: set[str], other: set[str], where: str) -> None:
    """Refuse a blob of four axes that is one of five elsewhere, which MIL would not notice."""
    if one != other:
        name = min(one ^ other)
        raise ctx.limit(f"gives {name!r} 4 axes or 5, depending on {where}; let it have 5 always")


def _results(ctx: Context, names: Sequence[str], outside: Any) -> tuple[Var, ...]:
    """Return the results of a block; a value from outside of it, or a constant, is copied by an identity."""
    taken = set(outside)
    results = []
    for name in names:
        value = ctx.env[name]
        results.append(_own(value) if value in taken or value.val is not None else value)
        taken.add(value)
    return tuple(results)


def _own(x: Var) -> Var:
    """Return the value as a new, unknown one of the block: coremltools compares the known values of loops."""
    own: Var = mb.identity(x=x)
    own._sym_val = None  # type: ignore[attr-defined]
    return own


@layer("loop", inputs=(0, 1))
def loop(ctx: Context, params: Any, inputs: list[Var]) -> None:
    """A network as long as a condition holds, at most so many times as stated or as the input says.

    The condition is found before the first round and after each.
    """
    limit = scalar(ctx, whole(ctx, inputs[0])) if inputs else np.int32(params.maxLoopIterations)
    limited, conditional = bool(inputs) or params.maxLoopIterations > 0, bool(params.conditionVar)
    jumps = _jumps(params.bodyNetwork)
    if not limited and not conditional and "loopBreak" not in jumps:
        raise ctx.limit("never ends; give it a condition, a largest number of rounds or a loopBreak layer")
    outer = dict(ctx.env)
    flags = _start(ctx, params, limited, conditional, jumps)
    names = [*flags, *_carried(ctx, params, outer)]
    before, exact = dict(ctx.env), ctx.exact

    def go_on(*values: Var) -> Var:
        result = _goes_on(dict(zip(names, values, strict=True)), limit)
        return _own(result) if result in values else result

    def one_round(*values: Var) -> tuple[Var, ...]:
        ctx.env = {**before, **dict(zip(names, values, strict=True))}
        ctx.exact = set(exact)
        try:
            _one_round(ctx, params, jumps)
            kept = ctx.exact.intersection(names)
            _same_axes(ctx, exact.intersection(names), kept, "the round of a loop")
            return _results(ctx, names, [*before.values(), *values])
        finally:
            ctx.env, ctx.exact = before, exact

    last = mb.while_loop(_cond=go_on, _body=one_round, loop_vars=tuple(_own(ctx.env[n]) for n in names))
    values = [last] if isinstance(last, Var) else last
    ctx.env = outer
    ctx.env.update({n: v for n, v in zip(names, values, strict=True) if n not in flags})


def _goes_on(state: dict[str, Var], limit: Any) -> Var:
    """Is there another round?"""
    terms = [mb.less(x=state[ROUND], y=limit)] if ROUND in state else []
    terms += [state[GO_ON]] if GO_ON in state else []
    terms += [mb.logical_not(x=state[BROKEN])] if BROKEN in state else []
    return fold(lambda a, b: mb.logical_and(x=a, y=b), terms)


def _start(ctx: Context, params: Any, limited: bool, conditional: bool, jumps: set[str]) -> list[str]:
    """Set the flags of a loop, run its condition, and name the flags that it carries from round to round.

    HALTED is none of these: each round sets it anew.
    """
    for flag in (HALTED, BROKEN, GO_ON, ROUND):  # those of a loop outside
        ctx.env.pop(flag, None)
    if limited:
        ctx.env[ROUND] = mb.const(val=np.int32(0))
    if conditional:
        _condition(ctx, params, again=False)
    if jumps:
        ctx.env[HALTED] = _flag(False)
    if "loopBreak" in jumps:
        ctx.env[BROKEN] = _flag(False)
    return [flag for flag in (ROUND, GO_ON, BROKEN) if flag in ctx.env]


def _carried(ctx: Context, params: Any, outer: dict[str, Var]) -> list[str]:
    """Return the blobs that a loop writes and whose last value is needed: by the next round, or outside."""
    body, condition = params.bodyNetwork, params.conditionNetwork
    changed = {*written(body), *written(condition)}
    needed = outer.keys() | set(_read(body))
    return sorted(n for n in changed & needed & ctx.env.keys() if n not in (HALTED, BROKEN, GO_ON, ROUND))


def _one_round(ctx: Context, params: Any, jumps: set[str]) -> None:
    """Build one round of a loop: its body, the count of rounds, and the condition of the next one."""
    if jumps:
        ctx.env[HALTED] = _flag(False)
    _run(ctx, params.bodyNetwork)
    if ROUND in ctx.env:
        ctx.env[ROUND] = mb.add(x=ctx.env[ROUND], y=np.int32(1))
    if params.conditionVar:
        _condition(ctx, params, again=True)


def _condition(ctx: Context, params: Any, again: bool) -> None:
    """Build the network of the condition; `again`: what it made the last time is forgotten.

    `copy` writes to blobs outside, which keep their value.
    """
    for each in params.conditionNetwork.layers if again else ():
        if each.WhichOneof("layer") != "copy":
            for name in each.output:
                ctx.env.pop(name, None)
    _run(ctx, params.conditionNetwork)
    if params.conditionVar not in ctx.env:
        raise ctx.error(
            f"takes its condition from the blob {params.conditionVar!r}, which nothing makes; "
            "let the condition network make it"
        )
    ctx.env[GO_ON] = _holds(ctx, ctx.env[params.conditionVar])


@layer("custom", inputs=(0, None))
def custom(ctx: Context, params: Any, inputs: list[Var]) -> Made:
    """Build what the caller's function for the class makes of (context, params, inputs).

    Returns:
        The `Var` of its output; a `Sequence` of them; None where it has no outputs.

    Raises:
        LoadError: there is no function for the class, or it gives something else.
    """
    name = str(params.className)
    if name in ctx.custom:
        built: Made = ctx.custom[name](ctx, params, inputs)
        for value in [built] if isinstance(built, Var) else built or ():
            if not isinstance(value, Var):
                raise ctx.error(
                    f"the function for class {name!r} gives a {type(value).__name__}; let it give MIL values"
                )
        return built
    near = f" ({UnknownName('class', name, ctx.custom)})" if ctx.custom else ""
    raise ctx.limit(
        f"is a custom layer of class {name!r}, whose code is not in the file{near}; say how to build it, "
        f"upgrade(model, custom={{{name!r}: build}}), where build(context, params, inputs) gives the MIL "
        "values of its outputs"
    )
