"""Loads that were reported to abort, hang or fail: a claim where they were seen, a warning elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol, mil_list
from statement import half, of

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.rules.loading import REPORTS, Outcome
from anesurgery.show.costs import costs

IDS = (
    {row.id for row in REPORTS}
    | {f"{row.id}-elsewhere" for row in REPORTS}
    | {"fault-batch-norm-volume-elsewhere"}
)


def product(weight: Callable[[], Var]) -> Callable[[], Program]:
    return of(lambda x: mb.linear(x=x, weight=weight()), (1, 64))


def eight_bits() -> Var:
    made: Var = mb.constexpr_blockwise_shift_scale(data=np.ones((32, 64), np.int8), scale=half(32, 1))
    return made


def indices() -> object:
    return np.ones((32, 64)).astype(types.nptype_from_builtin(types.uint4))


def scaled_palette(inside: bool) -> Callable[[], Var]:
    def build() -> Var:
        table = half(1, 64, 16, 1) if inside else half(1, 1, 16, 1)
        if inside:
            table = mb.constexpr_blockwise_shift_scale(data=table, scale=half(1, 64, 1, 1))
        weight: Var = mb.constexpr_lut_to_dense(indices=indices(), lut=table)
        return weight if inside else mb.constexpr_blockwise_shift_scale(data=weight, scale=half(32, 1))

    return build


def upsampler(factor: int, pool: int) -> Callable[[], Program]:
    def body(x: Var) -> Var:
        small = mb.max_pool(x=x, kernel_sizes=[pool] * 2, strides=[pool] * 2, pad_type="valid")
        return mb.upsample_nearest_neighbor(x=small, scale_factor_height=factor, scale_factor_width=factor)

    return of(body, (1, 16, 64, 64))


def written(given: bool) -> Callable[[], Program]:
    def body(cache: Var, update: Var) -> Var:
        data = cache if given else mb.relu(x=mb.add(x=cache, y=cache))
        places = np.zeros((1, 2, 1, 8), np.int32)
        return mb.scatter_along_axis(data=data, indices=places, updates=update, axis=2, mode="update")

    return of(body, (1, 2, 16, 8), (1, 2, 1, 8))


def volume(rank: int) -> Callable[[], Program]:
    ones = half(4)
    return of(lambda x: mb.batch_norm(x=x, mean=ones, variance=ones), (1, 4, *[8] * (rank - 2)))


def sound(samples: int, *, upsampled: bool = False) -> Callable[[], Program]:
    if upsampled:
        taps = half(1, 1, 2)
        return of(lambda x: mb.conv_transpose(x=x, weight=taps, strides=[2]), (1, 1, samples // 2))
    return of(lambda x: mb.conv(x=x, weight=half(1, 1, 3), pad_type="same"), (1, 1, samples))


def fused(width: int, layers: int) -> Callable[[], Program]:
    def body(x: Var) -> Var:
        for _ in range(layers):
            x = mb.scaled_dot_product_attention(query=x, key=x, value=x)
        return x

    return of(body, (1, 2, 1, width))


def attention(*shape: int, turned: bool = False) -> Callable[[], Program]:
    def body(x: Var) -> Var:
        weights = mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=not turned, transpose_x=turned))
        return mb.matmul(x=x, y=weights, transpose_y=True) if turned else mb.matmul(x=weights, y=x)

    return of(body, shape)


def recurrent() -> Program:
    def body(x: Var) -> Var:
        weights = {"weight_ih": half(16, 8), "weight_hh": half(16, 4), "bias": half(16)}
        return mb.lstm(x=x, initial_h=half(1, 4), initial_c=half(1, 4), **weights)[0]

    return of(body, (3, 1, 8))()


def passed(*, changed: bool) -> Callable[[], Program]:
    """An input that is an output too; changed, an op lies between."""
    return of(lambda x, y: (mb.relu(x=x), mb.mul(x=y, y=half()) if changed else y), (1, 64), (1, 64))


def returned(*, into: bool, changed: bool) -> Callable[[], Program]:
    """A value written to a state, or into one, that is an output too; changed, an op lies between."""

    def build() -> Program:
        state = mb.StateTensorSpec((1, 8, 4), dtype=types.fp16)
        x = mb.TensorSpec((1, 8, 4), dtype=types.fp16)

        @mb.program(input_specs=[state, x], opset_version=ct.target.iOS18)
        def main(state: Var, x: Var) -> Var:
            merged = mb.add(x=mb.read_state(input=state), y=x)
            written = mb.slice_update(x=merged, update=x, begin=[0, 0, 0], end=[1, 8, 4]) if into else merged
            if into:
                merged = mb.relu(x=x)
                written = mb.slice_update(x=written, update=merged, begin=[0, 0, 0], end=[1, 8, 4])
            mb.coreml_update_state(state=state, value=written)
            return mb.mul(x=merged, y=x) if changed else merged

        made: Program = main
        return made

    return build


def mean_of_all() -> Program:
    return of(lambda x: mb.expand_dims(x=mb.reduce_mean(x=x, keep_dims=False), axes=[0]), (1, 64))()


def vector_by(*shape: int) -> Callable[[], Program]:
    return of(lambda x, y: mb.matmul(x=x, y=y), (4,), shape)


def pooled(*, length: int | None, guarded: bool = True) -> Callable[[], Program]:
    """A mean over tokens by a mask; without a length it varies."""

    def build() -> Program:
        tokens = get_new_symbol() if length is None else length
        specs = [mb.TensorSpec((1, tokens, 8)), mb.TensorSpec((1, tokens, 1))]

        @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
        def main(x: Var, mask: Var) -> Var:
            total = mb.reduce_sum(x=mb.mul(x=x, y=mask), axes=[1])
            count = mb.reduce_sum(x=mask, axes=[1])
            return mb.real_div(x=total, y=mb.maximum(x=count, y=np.float32(1e-6)) if guarded else count)

        return main

    return build


def varying_mean(*, varies: bool) -> Callable[[], Program]:
    def build() -> Program:
        spec = mb.TensorSpec((1, get_new_symbol() if varies else 16, 8))
        return mb.program(input_specs=[spec])(lambda x: mb.reduce_mean(x=mb.relu(x=x), axes=[1]))

    return build


def labelled(batch: int | None, length: int | None = 8) -> Callable[[], Program]:
    """A classifier of 8 labels; without a batch it varies, and without a length another axis does."""

    def build() -> Program:
        rows = get_new_symbol() if batch is None else batch
        spec = mb.TensorSpec((rows, get_new_symbol() if length is None else length, 8))

        @mb.program(input_specs=[spec], opset_version=ct.target.iOS17)
        def main(x: Var) -> Any:
            scores = mb.softmax(x=mb.reduce_mean(x=x, axes=[1]), axis=-1)
            return mb.classify(probabilities=scores, classes=mb.const(val=mil_list([*map(str, range(8))])))

        return main

    return build


def turned(*strides: int) -> Callable[[], Program]:
    """A transposed convolution whose kernel is its stride."""
    return of(
        lambda x: mb.conv_transpose(x=x, weight=half(8, 4, *strides), strides=list(strides)),
        (1, 8, 5, 26)[: 2 + len(strides)],
    )


def written_norm(size: int, *, last: bool = False, spread: float = 0.1) -> Callable[[], Program]:
    """A layer norm between two reshapes; `last` multiplies by its scale behind the second one."""

    def body(x: Var) -> Var:
        x = mb.reshape(x=x, shape=[2, size, 1, 1])
        x = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[1], keep_dims=True))
        power = mb.reduce_mean(x=mb.square(x=x), axes=[1], keep_dims=True)
        x = mb.mul(x=x, y=mb.rsqrt(x=power, epsilon=np.float16(1e-4)))
        scale = np.linspace(1, 1 + spread, size).astype(np.float16)
        if not last:
            x = mb.add(x=mb.mul(x=x, y=scale.reshape(1, size, 1, 1)), y=half(1, size, 1, 1))
        x = mb.reshape(x=x, shape=[2, size])
        return mb.mul(x=x, y=scale) if last else x

    return of(body, (2, size))


def kept(*, read: bool) -> Callable[[], Program]:
    """A state that gets a row, and a sum of the new value or of what was written."""

    def build() -> Program:
        specs = [mb.TensorSpec((1, 8), dtype=types.fp16), mb.StateTensorSpec((1, 8), dtype=types.fp16)]

        @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
        def program(x: Var, state: Var) -> Var:
            new = mb.add(x=mb.read_state(input=state), y=x)
            written = mb.coreml_update_state(state=state, value=new)
            return mb.relu(x=written if read else new)

        return program

    return build


def last_of(length: int) -> Callable[[], Program]:
    """The last of so many rows."""
    return of(
        lambda x: mb.relu(x=mb.slice_by_index(x=x, begin=[-1, 0], end=[0, 4], squeeze_mask=[True, False])),
        (length, 4),
    )


def shifted(axis: int, *, tail: bool = True, whole: bool = True) -> Callable[[], Program]:
    """A state that loses its oldest row and gets a new one: behind the others or before them, or one row only.

    Args:
        axis: that of the rows.
        tail: join the new row behind the others?
        whole: write the state as it is, else through a slice_update of all of it?
    """
    shape = [1, 2, 8, 16]
    row = [*shape[:axis], 1, *shape[axis + 1 :]]
    specs = [mb.TensorSpec(row, dtype=types.fp16), mb.StateTensorSpec(shape, dtype=types.fp16)]

    def build() -> Program:
        @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
        def program(x: Var, state: Var) -> Var:
            held = mb.read_state(input=state)
            begin, end = [0] * 4, list(shape)
            begin[axis], end[axis] = (1, shape[axis]) if tail else (0, shape[axis] - 1)
            rest = mb.slice_by_index(x=held, begin=begin, end=end)
            value = mb.concat(values=[rest, x] if tail else [x, rest], axis=axis)
            if not whole:
                value = mb.slice_update(x=held, update=value, begin=[0] * 4, end=shape)
            return mb.relu(x=mb.coreml_update_state(state=state, value=value))

        return program

    return build


def repeated(rank: int) -> Callable[[], Program]:
    """Two heads of keys for six of queries, as transformers repeats them (rank 5), and with fewer axes."""

    def body(keys: Var) -> Var:
        x = mb.reshape(x=keys, shape=[1, 2, 1, 9, 16] if rank == 5 else [2, 1, 9, 16])
        x = mb.tile(x=x, reps=[1, 1, 3, 1, 1] if rank == 5 else [1, 3, 1, 1])
        x = mb.reshape(x=x, shape=[1, 6, 9, 16])
        return mb.matmul(x=half(1, 6, 4, 16), y=x, transpose_y=True)

    return of(body, (1, 2, 9, 16))


def listed(last: Callable[[Var], Var]) -> Callable[[], Program]:
    """The places of numbers that are not 0, of which `last` takes a part."""
    return of(lambda x: last(mb.non_zero(x=x)), (4, 6))


def column(places: Var, place: int = 1) -> Var:
    masks = {"begin_mask": [True, False], "end_mask": [True, False], "squeeze_mask": [False, True]}
    return mb.slice_by_index(x=places, begin=[0, place], end=[0, place + 1], **masks)


def padded(mode: str, *amounts: int, rank: int = 4) -> Callable[[], Program]:
    return of(lambda x: mb.pad(x=x, pad=list(amounts), mode=mode), (1, 4, 6, 6, 8)[:rank])


def strided(*sizes: int, stride: int = 6, dtype: Any = types.fp16) -> Callable[[], Program]:
    """A convolution of 12 with a stride along the last axis."""
    number = np.float16 if dtype == types.fp16 else np.float32
    weight = np.ones((4, 2, *[1] * (len(sizes) - 1), 12), number)
    strides = [1] * (len(sizes) - 1) + [stride]

    def build() -> Program:
        @mb.program(input_specs=[mb.TensorSpec((1, 2, *sizes), dtype=dtype)], opset_version=ct.target.iOS17)
        def program(x: Var) -> Var:
            return mb.conv(x=x, weight=weight, strides=strides)

        made: Program = program
        return made

    return build


def voxels(*sizes: int) -> Callable[[], Program]:
    """A convolution over a volume."""
    return of(lambda x: mb.conv(x=x, weight=half(2, 1, 3, 3, 3), pad_type="same"), (1, 1, *sizes))


M4, M4_26, M15 = "M4/macOS 15", "M4/macOS 26", "M2/macOS 15"
CASES: dict[str, tuple[Callable[[], Program], str, str, str]] = {
    "8 bits on the GPU of an M4": (product(eight_bits), M4, "ALL", "abort-int8-gpu"),
    "without the ANE": (product(eight_bits), M4, "CPU_AND_GPU", "abort-int8-gpu"),
    "8 bits where they ran": (product(eight_bits), M4_26, "CPU_AND_GPU", "abort-int8-gpu-elsewhere"),
    "no GPU is asked for": (product(eight_bits), M4, "CPU_AND_NE", ""),
    "another chip": (product(eight_bits), "M1/macOS 15", "ALL", "abort-int8-gpu-elsewhere"),
    "several chips": (product(eight_bits), "M1-M4", "ALL", "abort-int8-gpu-elsewhere"),
    "weights of fp16": (product(lambda: half(32, 64)), M4, "ALL", ""),
    "scaled tables": (product(scaled_palette(True)), M4_26, "CPU_AND_NE", "abort-palette-scale"),
    "scales after the table": (product(scaled_palette(False)), M4_26, "CPU_AND_GPU", "abort-palette-scale"),
    "another OS": (product(scaled_palette(True)), M4, "CPU_AND_NE", "abort-palette-scale-elsewhere"),
    "the CPU alone": (product(scaled_palette(True)), M4_26, "CPU_ONLY", ""),
    "nearest by 8": (upsampler(8, 8), M15, "ALL", "hang-nearest-pool"),
    "nearest by 8, another OS": (upsampler(8, 8), M4_26, "CPU_AND_NE", "hang-nearest-pool-elsewhere"),
    "nearest by 8 on the GPU": (upsampler(8, 8), M15, "CPU_AND_GPU", ""),
    "nearest by 2": (upsampler(2, 8), M15, "ALL", ""),
    "a pool of 4x4": (upsampler(8, 4), M15, "ALL", ""),
    "a stride over a long axis": (strided(18_001), "M1/macOS 26", "ALL", "hang-strided-length-elsewhere"),
    "two axes, one of them long": (strided(40, 20_000), M4, "CPU_AND_NE", "hang-strided-length-elsewhere"),
    "a stride of 1": (strided(18_001, stride=1), "M1/macOS 26", "ALL", ""),
    "a stride in fp32": (strided(18_001, dtype=types.fp32), "M1/macOS 26", "ALL", ""),
    "a stride without the engine": (strided(18_001), "M1/macOS 26", "CPU_AND_GPU", ""),
    "a stride over a shorter axis": (strided(16_001), "M1/macOS 26", "ALL", ""),
    "a large volume": (voxels(128, 128, 128), "M1/macOS 13", "CPU_ONLY", "crash-large-volume"),
    "a flat, wide volume": (voxels(16, 512, 512), "M2/macOS 13", "ALL", "crash-large-volume"),
    "a large volume on macOS 15": (voxels(160, 128, 128), M15, "ALL", "crash-large-volume-elsewhere"),
    "a small volume": (voxels(64, 64, 64), "M1/macOS 13", "CPU_ONLY", ""),
    "the last of one": (last_of(1), "A17/iOS 18", "ALL", "crash-last-of-one-elsewhere"),
    "the last of one, without the GPU": (last_of(1), "A17/iOS 18", "CPU_AND_NE", ""),
    "the last of two": (last_of(2), "A17/iOS 18", "ALL", ""),
    "a long sound": (sound(479_014), "M5/macOS 26", "CPU_AND_NE", "refused-long-sound"),
    "a sound made longer": (sound(480_000, upsampled=True), "M5/macOS 26", "ALL", "refused-long-sound"),
    "a long sound on an M2": (sound(479_014), "M2/macOS 15", "ALL", "refused-long-sound-elsewhere"),
    "a long sound on the GPU": (sound(479_014), "M5/macOS 26", "CPU_AND_GPU", ""),
    "15 s of sound": (sound(240_000), "M5/macOS 26", "CPU_AND_NE", ""),
    "a cache by scatter": (written(True), "M5/macOS 26", "CPU_AND_NE", "refused-cache-scatter"),
    "on an M1": (written(True), "M1/macOS 26", "CPU_AND_NE", "refused-cache-scatter-elsewhere"),
    "no cache": (written(False), "M5/macOS 26", "CPU_AND_NE", ""),
    "an unread write": (kept(read=False), "M4/macOS 27", "CPU_AND_NE", "refused-state-write"),
    "a write that is read": (kept(read=True), "M4/macOS 27", "CPU_AND_NE", ""),
    "an unread write without the engine": (kept(read=False), "M4/macOS 27", "CPU_AND_GPU", ""),
    "an unread write on an M1": (kept(read=False), "M1/macOS 27", "CPU_AND_NE", ""),
    "a shifted state": (shifted(2), "M5/macOS 26", "CPU_AND_NE", "refused-state-shift"),
    "a state shifted on its last axis": (shifted(3, whole=False), "M5/macOS 26", "ALL", "refused-state-shift"),
    "a shifted state on an M1": (shifted(2), "M1/macOS 26", "CPU_AND_NE", "refused-state-shift-elsewhere"),
    "a shifted state on the GPU": (shifted(2), "M5/macOS 26", "CPU_AND_GPU", ""),
    "a state shifted the other way": (shifted(2, tail=False), "M5/macOS 26", "CPU_AND_NE", ""),
    "keys repeated on five axes": (repeated(5), "M2/macOS 26", "CPU_AND_NE", "refused-repeated-heads"),
    "keys repeated on four axes": (repeated(4), "M2/macOS 26", "CPU_AND_NE", ""),
    "keys repeated on an M4": (repeated(5), "M4/macOS 26", "CPU_AND_NE", ""),
    "two attentions of 512": (fused(512, 2), M4_26, "CPU_AND_NE", "refused-wide-attention"),
    "on macOS 15": (fused(512, 2), M4, "CPU_AND_NE", "refused-wide-attention-elsewhere"),
    "one attention of 512": (fused(512, 1), M4_26, "CPU_AND_NE", ""),
    "two attentions of 256": (fused(256, 2), M4_26, "CPU_AND_NE", ""),
    "attention of three axes": (attention(2, 9, 16), "M2/macOS 27", "CPU_AND_GPU", "abort-flat-attention"),
    "no GPU for it": (attention(2, 9, 16), "M2/macOS 27", "CPU_AND_NE", ""),
    "attention of four axes": (attention(1, 2, 9, 16), "M2/macOS 27", "CPU_AND_GPU", ""),
    "turned weights": (
        attention(1, 2, 16, 9, turned=True),
        "M5/macOS 26",
        "CPU_AND_GPU",
        "abort-turned-attention",
    ),
    "turned weights on an M1": (
        attention(1, 2, 16, 9, turned=True),
        "M1/macOS 26",
        "CPU_AND_GPU",
        "abort-turned-attention-elsewhere",
    ),
    "weights as they are": (attention(1, 2, 9, 16), "M5/macOS 26", "CPU_AND_GPU", ""),
    "recurrent on the GPU": (recurrent, "M5/macOS 26", "CPU_AND_GPU", "abort-recurrent-gpu"),
    "recurrent on the GPU of an M1": (recurrent, "M1/macOS 26", "ALL", "abort-recurrent-gpu-elsewhere"),
    "recurrent without a GPU": (recurrent, "M5/macOS 26", "CPU_AND_NE", ""),
    "an input as an output": (passed(changed=False), "M2/macOS 26", "CPU_AND_NE", "refused-passed-input"),
    "the same on macOS 15": (passed(changed=False), M15, "ALL", "refused-passed-input-elsewhere"),
    "an input that an op changes": (passed(changed=True), "M2/macOS 26", "CPU_AND_NE", ""),
    "a state's value as an output": (
        returned(into=False, changed=False),
        M4_26,
        "ALL",
        "crash-returned-write-elsewhere",
    ),
    "a part of a state as an output": (
        returned(into=True, changed=False),
        M4_26,
        "ALL",
        "crash-returned-write-elsewhere",
    ),
    "a state's value that an op changes": (returned(into=False, changed=True), M4_26, "ALL", ""),
    "a mean of all as an output": (mean_of_all, "M2/macOS 14", "CPU_ONLY", "refused-number-output"),
    "a mean of all on macOS 15": (mean_of_all, M15, "ALL", "refused-number-output-elsewhere"),
    "a mean of rows": (of(lambda x: mb.reduce_mean(x=x, axes=[1]), (1, 64)), "M2/macOS 14", "ALL", ""),
    "a vector by a batch": (vector_by(10, 4, 3), "M2/macOS 14", "CPU_ONLY", "crash-vector-product"),
    "a vector by a matrix": (vector_by(4, 3), "M2/macOS 14", "ALL", ""),
    "a mean by a mask": (pooled(length=None), M4_26, "ALL", "crash-masked-mean-elsewhere"),
    "a mean by a mask, unguarded": (
        pooled(length=None, guarded=False),
        "A18/iOS 18",
        "CPU_AND_NE",
        "crash-masked-mean-elsewhere",
    ),
    "a mean by a mask on the CPU": (pooled(length=None), M4_26, "CPU_ONLY", ""),
    "a mean by a mask at one length": (pooled(length=16), M4_26, "ALL", ""),
    "a mean of sizes that vary": (varying_mean(varies=True), "A15/iOS 15", "CPU_ONLY", "refused-varying-mean"),
    "the same on iOS 16": (varying_mean(varies=True), "A15/iOS 16", "CPU_ONLY", ""),
    "a mean of fixed sizes": (varying_mean(varies=False), "A15/iOS 15", "CPU_ONLY", ""),
    "a norm between reshapes": (written_norm(1024), "M2/macOS 26", "CPU_AND_NE", "refused-norm-scale"),
    "the same on an M5": (written_norm(1024), "M5/macOS 26", "CPU_AND_NE", "refused-norm-scale-elsewhere"),
    "scaled behind the reshapes": (written_norm(1024, last=True), "M2/macOS 26", "CPU_AND_NE", ""),
    "equal scales": (written_norm(1024, spread=0), "M2/macOS 26", "CPU_AND_NE", ""),
    "a shorter norm": (written_norm(768), "M2/macOS 26", "CPU_AND_NE", ""),
    "mirrored channels": (
        padded("reflect", 0, 0, 1, 1, 0, 0, 1, 1),
        "A17/iOS 18",
        "CPU_ONLY",
        "refused-edge-pad",
    ),
    "an edge of depth": (padded("replicate", 1, 0, 0, 0, 0, 0, rank=5), "any", "ALL", "refused-edge-pad"),
    "mirrored images": (padded("reflect", 1, 1, 1, 1), M4, "ALL", ""),
    "all axes named, the last padded": (padded("replicate", 0, 0, 0, 0, 0, 0, 0, 1), M4, "ALL", ""),
    "zeros around channels": (padded("constant", 1, 1, 0, 0, 0, 0), M4, "ALL", ""),
    "labels for a batch that varies": (labelled(None), M4, "CPU_ONLY", "refused-label-batch-elsewhere"),
    "labels for one row": (labelled(1), M4, "CPU_ONLY", ""),
    "labels for one row of a length that varies": (labelled(1, None), M4, "CPU_ONLY", ""),
    "a step of 16 along one axis": (turned(16, 1), "A17/iOS 18", "CPU_AND_NE", "refused-deconv-stride"),
    "the same on an M4": (turned(1, 32), M4_26, "CPU_AND_NE", "refused-deconv-stride-elsewhere"),
    "the same on the CPU": (turned(16, 1), "A17/iOS 18", "CPU_ONLY", ""),
    "a step of 16 along both axes": (turned(16, 16), "A17/iOS 18", "CPU_AND_NE", ""),
    "a step of 16 along the only axis": (turned(16), "A17/iOS 18", "CPU_AND_NE", ""),
    "a step of 4 along one axis": (turned(4, 1), "A17/iOS 18", "CPU_AND_NE", ""),
    "places along one axis": (listed(column), M4, "CPU_ONLY", "crash-places-elsewhere"),
    "places along each axis": (
        listed(lambda x: mb.squeeze(x=mb.split(x=x, num_splits=2, axis=1)[0], axes=[1])),
        M4,
        "ALL",
        "crash-places-elsewhere",
    ),
    "narrow places": (
        listed(lambda x: column(mb.cast(x=x, dtype="int16"))),
        M4,
        "ALL",
        "crash-places-elsewhere",
    ),
    "all places": (listed(lambda x: x), M4, "CPU_ONLY", ""),
    "the first place": (
        listed(lambda x: mb.squeeze(x=mb.slice_by_size(x=x, begin=[0, 0], size=[1, 2]), axes=[0])),
        M4,
        "ALL",
        "",
    ),
    "numbers at places": (listed(lambda x: mb.reduce_sum(x=x, axes=[1])), M4, "ALL", ""),
    "a norm of rank 5": (volume(5), M4, "CPU_ONLY", "fault-batch-norm-volume-elsewhere"),
    "a norm of rank 4": (volume(4), M4, "ALL", ""),
}


@pytest.mark.parametrize("name", CASES)
def test_loads_that_were_reported(name: str) -> None:
    build, target, units, rule = CASES[name]
    found = ane.inspect(build(), target, compute_units=units)
    said = {f.rule: f for f in found.all_findings if f.rule in IDS}
    assert set(said) == ({rule} if rule else set())
    if not rule:
        return
    elsewhere = rule.endswith("-elsewhere")
    assert said[rule].grade.value == ("guess" if elsewhere else "reported")
    other_unit = rule == "abort-int8-gpu" and units == "ALL"  # the engine may load what the GPU does not
    ends = any(row.outcome is not Outcome.UNIT_FAILED for row in REPORTS if rule == row.id)
    assert (said[rule].kind == "load") == (ends and not other_unit)
    assert bool(found.refused) == (said[rule].kind == "load")
    assert elsewhere or "ane" not in found.counts


CHIPS_ALONE: dict[str, tuple[Callable[[], Program], str, str]] = {
    "scaled tables": (product(scaled_palette(True)), "M4", "on M4, macOS 26.6.2"),
    "scales after the table": (product(scaled_palette(False)), "M4", "on M4, macOS 26.6.2"),
    "a norm between reshapes": (written_norm(1024), "M2", "on M1 Max and M2 Pro, macOS 26.5"),
    "a cache by scatter": (written(True), "M5", "on M5 Pro, macOS 26"),
    "a long sound": (sound(479_014), "M5", "on M5 Pro, macOS 26.5"),
    "scaled tables on some chip": (product(scaled_palette(True)), "M1-M4", ""),
    "scaled tables on another chip": (product(scaled_palette(True)), "M2", ""),
    "scaled tables on another OS": (product(scaled_palette(True)), M4, ""),
}


@pytest.mark.parametrize("name", CHIPS_ALONE)
def test_a_chip_without_an_os_is_told_on_which_os_the_load_failed(name: str) -> None:
    """The wrong version: a guess in the whole report only, though the chip also runs this OS."""
    build, target, where = CHIPS_ALONE[name]
    found = ane.inspect(build(), target)
    assert not found.refused  # it may load on an older OS
    first = costs(found)[0]
    assert (where in first.why and first.wrong) if where else first.kind not in ("load", "memory")


def test_the_first_line_names_the_abort() -> None:
    """The wrong version: "every op", as if the model loaded."""
    program = product(eight_bits)()
    refused = ane.inspect(program, M4, compute_units="CPU_AND_GPU")
    assert "reported to abort: 1 weight of 8 bits" in refused.summary
    doubtful = ane.inspect(program, M4, compute_units="ALL")
    assert "the load may hang or fail: abort-int8-gpu (use CPU_AND_NE" in doubtful.summary
    assert refused.status == doubtful.status == 2


def test_auto_pads_by_slices_what_core_ml_refuses_though_it_takes_longer() -> None:
    """The wrong version: a time by estimate of the model that does not load, which slices would raise."""
    program = padded("reflect", 0, 0, 1, 1, 0, 0, 1, 1)()
    assert "reported to be refused by Core ML: 1 pad" in ane.inspect(program, "M4").summary
    surgery = ane.apply(program, "auto", target="M4", quiet=True)
    assert {change.pass_name for change in surgery.changes} == {"reflect_pad_slices"}
    assert not ane.inspect(surgery.program, "M4").refused
    x = {"x": np.random.default_rng(0).standard_normal((1, 4, 6, 6)).astype(np.float16)}
    (before,), (after,) = (ane.run(p, x).values() for p in (program, surgery.program))
    np.testing.assert_array_equal(before, after)


def test_auto_folds_the_scales_of_a_palette_that_would_abort() -> None:
    surgery = ane.apply(product(scaled_palette(True))(), "auto", target=M4_26, quiet=True)
    assert "fold_palette_scales" in {change.pass_name for change in surgery.changes}
    assert not ane.inspect(surgery.program, M4_26).refused
