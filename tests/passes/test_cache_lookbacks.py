"""What looks back and is no plain attention: convolutions along the tokens, and attention sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, table

from anesurgery.checking.comparison import compare
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.facts import windows
from anesurgery.interpret.decoding import Decoder
from anesurgery.mil import Array, Program, Var, ct, mb, types
from anesurgery.passes.add_cache import AddCache, caches
from anesurgery.passes.position_function import PositionFunction
from anesurgery.surgery import apply

TOKENS, WIDTH, WORDS = 48, 8, 19


def numbers(*shape: int) -> Array:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) * 0.7).astype(np.float32)


def built(block: Callable[[Var], Var]) -> Program:
    """Embeddings, a block beside the residual stream, and logits."""

    @mb.program(input_specs=[mb.TensorSpec((1, TOKENS), types.int32)], opset_version=ct.target.iOS18)
    def program(ids: Var) -> Var:
        x = mb.gather(x=numbers(WORDS, WIDTH), indices=ids, axis=0)
        x = mb.add(x=x, y=block(mb.add(x=x, y=attention(x))))
        return mb.linear(x=x, weight=numbers(WORDS, WIDTH), name="logits")

    made: Program = program
    return made


def attention(x: Var, weigh: Callable[[Var, Var], Var] | None = None) -> Var:
    """With a causal mask; `weigh` makes weights of masked scores, and mixes values."""
    mask = np.triu(np.full((TOKENS, TOKENS), -1e4, np.float32), 1)
    q, k, v = (mb.linear(x=x, weight=numbers(WIDTH, WIDTH + i)[:, :WIDTH]) for i in range(3))
    scores = mb.add(x=mb.matmul(x=q, y=k, transpose_y=True), y=mask)
    if weigh is not None:
        return weigh(scores, v)
    return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=v)


def convolved(x: Var, *, pads: tuple[int, int] = (3, 3), first: int = 0, act: bool = False, **more: Any) -> Var:
    """A window of 4 tokens for each channel; what it makes behind the last token is cut off."""
    turned = mb.transpose(x=x, perm=[0, 2, 1])
    size = {"groups": WIDTH, "weight": numbers(WIDTH, 1, 4), "bias": numbers(WIDTH), **more}
    y = mb.conv(x=turned, pad_type="custom", pad=list(pads), **size, name="window")
    y = mb.silu(x=y) if act else y
    if y.shape[-1] != TOKENS:
        y = mb.slice_by_index(x=y, begin=[0, 0, first], end=[1, WIDTH, first + TOKENS], name="cut")
    return mb.transpose(x=y, perm=[0, 2, 1])


def led(x: Var, *, value: float = 0.0, pad: tuple[int, int] = (3, 0)) -> Var:
    """The same, with the zeros of an op before it."""
    turned = mb.transpose(x=x, perm=[0, 2, 1])
    turned = mb.pad(x=turned, pad=list(pad), mode="constant", constant_val=value, name="zeros")
    y = mb.conv(x=turned, pad_type="valid", groups=WIDTH, weight=numbers(WIDTH, 1, 4), name="window")
    return mb.transpose(x=y, perm=[0, 2, 1])


def with_sinks(scores: Var, v: Var, *, behind: bool = True, shifted: bool = True) -> Var:
    """A column of other scores takes its share."""
    sinks = np.broadcast_to(numbers(1)[:, None, None], (1, TOKENS, 1)).copy()
    parts = (scores, sinks) if behind else (sinks, scores)
    both = mb.concat(values=parts, axis=-1, name="both")
    both = mb.sub(x=both, y=mb.reduce_max(x=both, axes=[-1], keep_dims=True)) if shifted else both
    weights = mb.softmax(x=both, axis=-1)
    begin = 0 if behind else 1
    taken = mb.slice_by_index(x=weights, begin=[0, 0, begin], end=[1, TOKENS, begin + TOKENS], name="taken")
    return mb.matmul(x=taken, y=v)


def by_sums(scores: Var, v: Var) -> Var:
    """The share of a sink, from the logarithm of the sum of weights."""
    total = mb.reduce_log_sum_exp(x=scores, axes=[-1], keep_dims=True)
    share = mb.sigmoid(x=mb.sub(x=total, y=numbers(1)))
    return mb.mul(x=mb.matmul(x=mb.softmax(x=scores, axis=-1), y=v), y=share)


BLOCKS: dict[str, Callable[[Var], Var]] = {
    "padded on both sides": convolved,
    "padded before": lambda x: convolved(x, pads=(3, 0)),
    "changed before it is cut": lambda x: convolved(x, act=True),
    "dilated": lambda x: convolved(x, pads=(6, 6), dilations=[2]),
    "all channels": lambda x: convolved(x, groups=1, weight=numbers(WIDTH, WIDTH, 4)),
    "zeros before it": led,
    "sinks": lambda x: attention(x, with_sinks),
    "sinks, not shifted": lambda x: attention(x, lambda s, v: with_sinks(s, v, shifted=False)),
    "sinks by sums": lambda x: attention(x, by_sums),
}
FORMS = {
    "slice": [AddCache(prefill=5, required=True)],
    "blend": [AddCache(prefill=5, required=True, writes="blend", cache="io"), PositionFunction()],
}


@pytest.mark.one_of(21)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BLOCKS)
def test_it_gives_what_it_gave(name: str, form: str) -> None:
    program = built(BLOCKS[name])
    made = apply(program, FORMS[form], prove=None, quiet=True)
    ids = np.random.default_rng(0).integers(0, WORDS, TOKENS)
    expected, decoder = Decoder(program).feed(ids), Decoder(made.program)
    parts = np.split(ids, [3, 4, 11, 31, 32, 37])  # calls begin anywhere, and go around a ring
    found = np.concatenate([decoder.feed(part) for part in parts])
    assert compare_arrays("logits", expected, found).psnr > (60 if form == "slice" else 110)  # states hold fp16


def test_a_state_that_holds_other_tokens_is_not_read_before_the_first() -> None:
    program = built(convolved)
    made = apply(program, FORMS["slice"], prove=None, quiet=True).program
    ids = np.random.default_rng(0).integers(0, WORDS, 9)
    decoder = Decoder(made)
    expected = decoder.feed(ids)
    decoder.feed(ids[::-1])
    decoder._read = decoder._read[:, :0]  # a new text, and the state as it is
    assert np.array_equal(decoder.feed(ids), expected)


@pytest.mark.parametrize(("size", "right"), [(8, True), (7, False)])
def test_a_ring_that_is_too_small_would_be_found(
    size: int, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of 4 and calls of 5 tokens take 8 slots."""
    monkeypatch.setattr(
        caches, "ring", lambda span, *_, **__: caches.Ring(size, size + 5) if span == 4 else None
    )
    program = built(convolved)
    made = apply(program, FORMS["slice"], prove=None, quiet=True)
    assert compare(program, made.program, contract=made.contract, gate=60).ok == right


def test_a_window_that_is_shifted_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "reach", lambda op, axis, zeros: int(op.weight.shape[axis]))
    program = built(convolved)
    made = apply(program, [AddCache(prefill=5)], prove=None, quiet=True)
    assert made.refusals or not compare(program, made.program, contract=made.contract, gate=60).ok


def weigh(scores: Var, v: Var) -> Var:
    highest = mb.reduce_max(x=scores, axes=[-1], keep_dims=True, name="highest")
    return mb.mul(x=mb.matmul(x=mb.softmax(x=scores, axis=-1), y=v), y=highest)


test_cases, test_surroundings = table(
    AddCache(prefill=5),
    *(
        refuses(reason, built, block)
        for block, reason in [
            (lambda x: convolved(x, pads=(1, 2)), "looks ahead of a token"),
            (lambda x: convolved(x, pads=(4, 0)), "leaves out the token itself"),
            (lambda x: convolved(x, first=1), "other than the tokens"),
            (lambda x: led(x, value=1.0), "another number than 0"),
            (lambda x: led(x, pad=(1, 2)), "padding that is not before the first token"),
            (lambda x: attention(x, lambda s, v: with_sinks(s, v, behind=False)), "it mixes tokens"),
        ]
    ),
    refuses("mixes tokens", built, lambda x: attention(x, weigh)),
)
