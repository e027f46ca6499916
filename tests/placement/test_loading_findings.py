"""What makes a load slow or fail: each finding on a model of which it was reported, not on its neighbour."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from statement import half, of
from statements_of_reports import stateful

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.rules import whole_model


def attention(queries: int, keys: int) -> Callable[[], Program]:
    def body(q: Var, k: Var) -> Var:
        return mb.softmax(x=mb.matmul(x=q, y=k, transpose_y=True), axis=-1)

    return of(body, (1, 2, queries, 16), (1, 2, keys, 16))


def products(count: int, bits: int = 16) -> Callable[[], Program]:
    """134 MB of fp16 weights each, or their bytes of 8 bits."""

    def body(x: Var) -> Var:
        for _ in range(count):
            plain = np.zeros((8192, 8192), np.float16 if bits == 16 else np.int8)
            weight = (
                plain if bits == 16 else mb.constexpr_blockwise_shift_scale(data=plain, scale=half(8192, 1))
            )
            x = mb.linear(x=x, weight=weight)
        return x

    return of(body, (1, 8192))


def norms(count: int, width: int = 64) -> Callable[[], Program]:
    def body(x: Var) -> Var:
        for _ in range(count):
            x = mb.layer_norm(x=x, axes=[-1], gamma=half(width), beta=half(width))
        return x

    return of(body, (1, 64, width))


def late(constant: bool) -> Callable[[], Program]:
    """A reshape to a length that is computed."""

    def build() -> Program:
        specs = [mb.TensorSpec((4, 8), dtype=types.fp16), mb.TensorSpec((2,), dtype=types.int32)]

        @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
        def program(x: Var, shape: Var) -> Var:
            return mb.relu(x=mb.reshape(x=x, shape=[8, 4] if constant else shape))

        made: Program = program
        return made

    return build


def vocoder(phase: bool, doublings: int = 0) -> Callable[[], Program]:
    """Magnitudes times the cosine and sine of phases, or of plain numbers, and a transposed convolution."""

    def body(x: Var) -> Var:
        size, angle = mb.exp(x=x), mb.tanh(x=x)
        for _ in range(doublings):  # a walk that forgot where it was would take 2 ** doublings steps
            size = mb.add(x=size, y=size)
        parts = [mb.mul(x=size, y=f(x=angle) if phase else angle) for f in (mb.cos, mb.sin)]
        return mb.conv_transpose(x=mb.concat(values=parts, axis=1), weight=half(16, 1, 20), strides=[5])

    return of(body, (1, 8, 32))


def crop(size: int | None) -> Callable[[], Program]:
    """Elements from a computed place on: so many, or a computed number."""

    def body(x: Var) -> Var:
        place = mb.cast(x=mb.reduce_sum(x=x), dtype="int32")
        end = mb.mul(x=place, y=2) if size is None else mb.add(x=place, y=size)
        ends = [mb.concat(values=[np.int32(n), p], axis=0) for n, p in ((0, place), (4, end))]
        return mb.slice_by_index(x=x, begin=ends[0], end=ends[1])

    return of(body, (4, 8))


CASES: dict[str, tuple[Callable[[], Program], str, str]] = {
    "128 queries over 1,024 keys": (attention(128, 1024), "A17/iOS 18", "compile-memory"),
    "130 ran": (attention(130, 1024), "A17/iOS 18", ""),
    "one query over 2,048": (attention(1, 2048), "A17/iOS 18", "compile-memory"),
    "64 ran": (attention(64, 2048), "A17/iOS 18", ""),
    "not seen on M1": (attention(128, 1024), "M1/macOS 15", ""),
    "a history of 32,768": (attention(64, 32768), "M5/macOS 26", "compile-history"),
    "8,192 compiled": (attention(64, 8192), "M5/macOS 26", ""),
    "1.1 GB": (products(9), "M4/macOS 15", "load-minutes"),
    "0.7 GB": (products(5), "M4/macOS 15", "load-minutes"),
    "0.4 GB": (products(3), "A16/iOS 17", "load-minutes"),
    "0.27 GB": (products(2), "A16/iOS 17", ""),
    "1.88 GB of int8 on a phone": (products(28, bits=8), "A19/iOS 26", "size-phone"),
    "0.75 GB of int8 on a phone": (products(11, bits=8), "A19/iOS 26", "load-minutes"),
    "0.27 GB of int8 on a phone": (products(4, bits=8), "A19/iOS 26", ""),
    "palettes and a state": (stateful("palette"), "any", "state-palette"),
    "a state alone": (stateful("fp16"), "any", ""),
    "four norms at 64x64": (norms(4), "M5 Max/macOS 27", "compile-norm-values"),
    "one block": (norms(2), "M5 Max/macOS 27", ""),
    "a waveform on an M5": (vocoder(True), "M5/macOS 26", "crash-waveform"),
    "a waveform on an iPhone 17": (vocoder(True), "iPhone 17/iOS 27", "crash-waveform"),
    "plain numbers, doubled": (vocoder(False, 64), "M5/macOS 26", ""),
    "a waveform on an M1": (vocoder(True), "M1/macOS 26", ""),
    "a waveform on macOS 27": (vocoder(True), "M5/macOS 27", ""),
    "no phases": (vocoder(False), "M5/macOS 26", ""),
    "a shape of the run": (late(False), "any", "compile-late-shape"),
    "a constant shape": (late(True), "any", ""),
    "a crop around a computed place": (crop(4), "any", "compile-late-cut"),
    "a crop of a computed size": (crop(None), "any", "compile-late-shape"),
}


@pytest.mark.parametrize("name", CASES)
def test_loads_that_were_reported(name: str) -> None:
    build, target, rule = CASES[name]
    found = {f.rule for f in ane.inspect(build(), target).findings} & {r.id for r in whole_model.SLOW_LOADS}
    assert (rule in found) if rule else not found


def looked_up(size: int, groups: int = 1) -> Callable[[], Program]:
    """Rows of a table of palettes, one for each group of rows."""

    def body(x: Var) -> Var:
        table = mb.constexpr_lut_to_dense(
            indices=np.zeros((32, 8), types.np_uint4_dtype if size == 4 else np.uint8),
            lut=np.zeros((groups, 1, 2**size, 1), np.float16),
        )
        ids = mb.cast(x=mb.reduce_sum(x=x, axes=[-1]), dtype="int32")
        return mb.gather(x=table, indices=ids, axis=0, validate_indices=False)

    return of(body, (4, 8))


@pytest.mark.parametrize(("size", "groups", "said"), [(4, 1, True), (4, 2, False), (8, 1, False)])
def test_one_palette_of_4_bits_for_a_table_of_rows_is_named(size: int, groups: int, said: bool) -> None:
    found = ane.inspect(looked_up(size, groups)(), "M4/macOS 26")
    messages = [f.message for f in found.findings if f.rule == "num-coarse-table"]
    assert len(messages) == said
    assert all("32x8" in message and "16 different numbers" in message for message in messages)


def test_without_the_engine_nothing_is_compiled_for_it() -> None:
    found = ane.inspect(products(9)(), "M4/macOS 15", compute_units="CPU_ONLY")
    assert not {f.rule for f in found.findings} & {r.id for r in whole_model.SLOW_LOADS}


def test_memory_tells_the_weights_as_stored_and_expanded() -> None:
    memory = ane.inspect(products(2, bits=8)()).memory
    assert memory is not None
    assert memory.expanded == pytest.approx(2 * 8192 * 8192 * 2, rel=1e-3)  # and the biases
    assert memory.weights < 0.51 * memory.expanded


def test_memory_tells_what_an_app_on_a_phone_has_left() -> None:
    found = ane.inspect(products(2, bits=8)(), "A19/iOS 26")
    memory = found.memory
    assert memory is not None
    assert memory.app is not None
    assert memory.needed == memory.weights + memory.expanded + memory.activations + memory.states
    assert memory.left == memory.app - memory.needed > 0
    assert "for an app" in " ".join(found.details.split())
    assert found.to_json()["memory"]["left"] == memory.left
    large = ane.inspect(products(28, bits=8)(), "A19/iOS 26")
    assert large.memory is not None
    assert large.memory.left is not None
    assert large.memory.left < 0
    assert "too much" in " ".join(large.details.split())


@pytest.mark.parametrize("target", ["M4", "any", "A15/iOS 17"])
def test_where_no_app_was_ended_nothing_is_said_of_its_limit(target: str) -> None:
    memory = ane.inspect(products(2, bits=8)(), target).memory
    assert memory is not None
    assert memory.left is None
