"""Shapes of models in use, narrow: what crosses the borders of a decoder with states, a UNet, and Whisper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.files.sequence import Chain
from anesurgery.mil import Array, Program, Var, ct, mb, types

RNG = np.random.default_rng(8)
WIDTH, TOKENS, LAYERS = 32, 8, 4


def weight(*shape: int) -> Array:
    return (RNG.standard_normal(shape) / 6).astype(np.float16)


def linear(x: Var, wide: int, narrow: int, name: str = "") -> Var:
    made: Var = mb.linear(x=x, weight=weight(wide, narrow), **({"name": name} if name else {}))
    return made


def norm(x: Var) -> Var:
    made: Var = mb.layer_norm(x=x, axes=[-1], gamma=np.ones(WIDTH, np.float16), epsilon=np.float16(1e-5))
    return made


def gated(x: Var, name: str) -> Var:
    inner = mb.mul(x=mb.silu(x=linear(norm(x), 2 * WIDTH, WIDTH)), y=linear(norm(x), 2 * WIDTH, WIDTH))
    made: Var = mb.add(x=x, y=linear(inner, WIDTH, 2 * WIDTH), name=name)
    return made


def llama(stacked: bool = False) -> Program:
    """A decoder with rotary positions, a mask, a tied table, and its keys and values in states."""
    count, shape = (1, (LAYERS, TOKENS, WIDTH)) if stacked else (LAYERS, (TOKENS, WIDTH))
    specs = [mb.TensorSpec((1, TOKENS), dtype=types.int32), mb.TensorSpec((1, TOKENS), dtype=types.fp16)]
    specs += [mb.StateTensorSpec(shape, types.fp16) for _ in range(count)]
    table = weight(50, WIDTH)

    def program(ids: Var, places: Var, *states: Var) -> Var:
        held = mb.const(val=table, name="table")
        x = mb.squeeze(x=mb.gather(x=held, indices=ids, axis=0), axes=[0])
        angles = mb.matmul(x=places, y=weight(1, WIDTH), transpose_x=True)
        cos, sin = mb.cos(x=angles), mb.sin(x=angles)
        mask = mb.band_part(x=mb.fill(shape=[TOKENS, TOKENS], value=np.float16(1)), lower=-1, upper=0)
        for number in range(LAYERS):
            q, k = (mb.add(x=mb.mul(x=linear(norm(x), WIDTH, WIDTH), y=cos), y=sin) for _ in range(2))
            keys = kept(states, number, k, stacked)
            scores = mb.mul(x=mb.matmul(x=q, y=keys, transpose_y=True), y=mask)
            x = mb.add(x=x, y=linear(mb.matmul(x=mb.softmax(x=scores, axis=-1), y=keys), WIDTH, WIDTH))
            x = gated(x, f"layer_{number}")
        made: Var = mb.linear(x=norm(x), weight=held, name="logits")
        return made

    names = ", ".join(["ids", "places", *(f"state_{n}" for n in range(count))])
    place: dict[str, Any] = {"body": program}
    exec(f"def named({names}): return body({names})", place)  # the builder looks at the parameters
    made: Program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(place["named"])
    return made


def kept(states: tuple[Var, ...], number: int, value: Var, stacked: bool) -> Var:
    """The state of a layer, with what is new added to it."""
    state = states[0 if stacked else number]
    old = mb.read_state(input=state)
    if not stacked:
        made: Var = mb.coreml_update_state(state=state, value=mb.add(x=old, y=value))
        return made
    new = mb.slice_update(
        x=old, update=mb.expand_dims(x=value, axes=[0]), begin=[number, 0, 0], end=[number + 1, TOKENS, WIDTH]
    )
    whole = mb.coreml_update_state(state=state, value=new)
    row = mb.slice_by_index(x=whole, begin=[number, 0, 0], end=[number + 1, TOKENS, WIDTH])
    made = mb.squeeze(x=row, axes=[0])
    return made


def unet() -> Program:
    """Levels of half the side, whose values are read again on the way up."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4, 16, 16), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        def conv(x: Var, outputs: int, stride: int = 1) -> Var:
            size = (outputs, int(x.shape[1]), 3, 3)
            made: Var = mb.relu(x=mb.conv(x=x, weight=weight(*size), strides=[stride] * 2, pad_type="same"))
            return made

        skips = []
        for level in range(3):
            x = conv(x, 8 << level)
            skips.append(mb.identity(x=x, name=f"skip_{level}"))
            x = conv(skips[-1], 8 << level, 2)
        x = conv(x, 64)
        for level in (2, 1, 0):
            x = mb.upsample_nearest_neighbor(x=x, scale_factor_height=2, scale_factor_width=2)
            x = conv(mb.concat(values=[x, skips[level]], axis=1), 8 << level)
        return mb.identity(x=x, name="y")

    return program


def whisper() -> Program:
    """An encoder, and a decoder of which each layer reads what the encoder gives."""
    specs = [mb.TensorSpec((TOKENS, WIDTH), dtype=types.fp16), mb.TensorSpec((2, WIDTH), dtype=types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(sound: Var, said: Var) -> Var:
        x = sound
        for number in range(LAYERS):
            x = gated(x, f"encoder_{number}")
        heard, x = mb.identity(x=norm(x), name="heard"), said
        for number in range(LAYERS):
            keys = linear(heard, WIDTH, WIDTH)
            scores = mb.matmul(x=linear(norm(x), WIDTH, WIDTH), y=keys, transpose_y=True)
            x = mb.add(x=x, y=mb.matmul(x=mb.softmax(x=scores, axis=-1), y=keys))
            x = gated(x, f"decoder_{number}")
        return linear(norm(x), 40, WIDTH, "logits")

    return program


def proved(whole: Program, chain: Chain) -> None:
    found = ane.compare(whole, chain, precision="fp16", prove=True)
    assert found.psnr == np.inf
    assert found.proof is not None
    assert found.proof.words.startswith("bit for bit")


@pytest.mark.slow
def test_one_hidden_state_passes_between_the_layers_of_a_decoder() -> None:
    whole = llama()
    chain = ane.split(whole, 4)
    assert [border.names for border in chain.borders] == [("layer_0",), ("layer_1",), ("layer_2",)]
    assert all(border.bytes == TOKENS * WIDTH * 2 for border in chain.borders)
    states = [[n for n in c.program.functions["main"].inputs if n.startswith("state")] for c in chain.chunks]
    assert states == [[f"state_{n}"] for n in range(LAYERS)]
    proved(whole, chain)


def test_a_state_that_all_layers_share_keeps_them_together() -> None:
    whole = llama(stacked=True)
    total = sum(ane.split(whole, max_bytes="1 GB").weights)
    with pytest.raises(ane.SurgeryError, match=r"the state state_0 stays in one chunk"):
        ane.split(whole, max_bytes=total // 3)


def test_skip_connections_pass_and_are_reported() -> None:
    whole = unet()
    chain = ane.split(whole, 3)
    passing = [set(border.names) for border in chain.borders]
    assert any(name.startswith("skip") for names in passing for name in names)
    proved(whole, chain)
    assert "skip_0" in str(chain)


@pytest.mark.slow
def test_what_the_encoder_heard_passes_to_each_part_of_the_decoder() -> None:
    whole = whisper()
    chain = ane.split(whole, 4)
    assert "heard" in chain.borders[-1].names
    assert len(chain.borders[-1].names) <= 2
    proved(whole, chain)


@pytest.mark.quick_cases("unet")
@pytest.mark.parametrize("build", [llama, unet, whisper])
def test_a_limit_is_kept_by_as_few_chunks_as_can_be(build: Callable[[], Program]) -> None:
    whole = build()
    total = sum(ane.split(whole, max_bytes="1 GB").weights)
    chain = ane.split(whole, max_bytes=int(total / 2.5))
    assert max(chain.weights) <= total / 2.5
    assert len(chain.chunks) in (3, 4)
    proved(whole, chain)
