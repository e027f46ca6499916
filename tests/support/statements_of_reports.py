"""Later public reports, each asked of a model of its own: latency, wrong numbers, failures and placements.

A row has the id of the report, and what is asked. Of some reports nothing can be asked: `silent` says why
`inspect` keeps silent (that counts as unknown), `outside` why the report is not one about Core ML's choice
(that is not counted).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from statement import (
    RANGED,
    Statement,
    all_on,
    blocks,
    can,
    half,
    no_warning,
    of,
    palette,
    program,
    says,
    states,
    warns,
    weighing,
)

from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement import Inspection


@dataclass(frozen=True)
class Report:
    """A report, and what is asked of it.

    Attributes:
        id: of the report.
        asked: statements about models; none where `silent` or `outside` says why.
        silent: why `inspect` says nothing of it.
        outside: why it is no statement about what `inspect` speaks of.
    """

    id: str
    asked: tuple[Statement, ...] = ()
    silent: str = ""
    outside: str = ""


@dataclass(frozen=True)
class Comparison(Statement):
    """Which of two forms of a model is faster: "faster" or "slower" is the first one, against `other`."""

    other: Callable[[], Program] | None = None


def faster(name: str, build: Callable[[], Program], other: Callable[[], Program], seen: str) -> Comparison:
    return Comparison(name, build, "M5 Pro/macOS 27", lambda found: found.time, seen, sure=False, other=other)


def warns_of_all(found: Inspection) -> Any:
    """Does it say that ALL is no safe default?"""
    return any("Core ML's default, ALL" in note for note in found.notes)


def none_on_ane(found: Inspection) -> Any:
    """Is no op on the ANE? Not known where some may be."""
    counts = found.counts
    return False if counts.get("ane") else None if counts.get("unknown") else True


def mostly_on_ane(found: Inspection) -> Any:
    """Are most ops on the ANE for certain, or is it certain that they are not?"""
    low, high = found.residency["ops"], found.residency_at_most["ops"]
    return True if low > 0.5 else False if high <= 0.5 else None


def is_mixed(found: Inspection) -> Any:
    return None if found.counts.get("unknown") else found.status == 1


def gate(form: str, positions: int = 1024) -> Callable[[], Program]:
    """A product of 2560 by 10240, its weights in one of the forms that were compared."""
    shape = (10240, 2560)

    def body(x: Var) -> Var:
        if form in ("w8a8", "a8w4"):
            scale = np.float16(0.1)
            x = mb.dequantize(input=mb.quantize(input=x, scale=scale, output_dtype="int8"), scale=scale)
        weights: dict[str, Callable[[], Any]] = {
            "fp16": lambda: half(*shape),
            "palette": lambda: palette(4, *shape),
            "palettes": lambda: palette(4, *shape, groups=shape[0]),
            "a8w4": lambda: palette(4, *shape),
            "int4": lambda: blocks(types.np_int4_dtype, shape, shape[0], 1),
            "grouped": lambda: blocks(types.np_int4_dtype, shape, shape[0], 80),
            "w8a8": lambda: blocks(np.int8, shape, shape[0], 1),
        }
        return mb.linear(x=x, weight=weights[form]())

    return of(body, (1, positions, shape[1]))


def quantized_product(rows: int, columns: int) -> Callable[[], Program]:
    """A product of two slices, each quantized and read back, and the result as well."""

    def again(x: Var) -> Var:
        scale = np.float16(0.0625)
        return mb.dequantize(input=mb.quantize(input=x, scale=scale, output_dtype="int8"), scale=scale)

    def body(x: Var) -> Var:
        a = mb.slice_by_size(x=x, begin=[0, 0, 0, 0], size=[1, rows, 1, columns])
        b = mb.slice_by_size(x=x, begin=[0, rows, 0, 0], size=[1, rows, 1, columns])
        return again(mb.mul(x=again(a), y=again(b)))

    return of(body, (1, 2 * rows, 1, columns))


def gated_convolutions(layers: int = 2) -> Callable[[], Program]:
    """Layers of gated short convolutions over 512 tokens, channels first."""

    def layer(x: Var) -> Var:
        gates = mb.conv(x=mb.layer_norm(x=x, axes=[1]), weight=half(3072, 1024, 1, 1))
        b, c, y = mb.split(x=gates, num_splits=3, axis=1)
        mixed = mb.conv(
            x=mb.mul(x=b, y=y), weight=half(1024, 1, 1, 3), groups=1024, pad_type="custom", pad=[0, 0, 2, 0]
        )
        x = mb.add(x=x, y=mb.conv(x=mb.mul(x=c, y=mixed), weight=half(1024, 1024, 1, 1)))
        y = mb.layer_norm(x=x, axes=[1])
        wide = mb.mul(
            x=mb.silu(x=mb.conv(x=y, weight=half(4608, 1024, 1, 1))),
            y=mb.conv(x=y, weight=half(4608, 1024, 1, 1)),
        )
        return mb.add(x=x, y=mb.conv(x=wide, weight=half(1024, 4608, 1, 1)))

    def body(x: Var) -> Var:
        for _ in range(layers):
            x = layer(x)
        return x

    return of(body, (1, 1024, 1, 512))


def attention_block(tokens: int, width: int, heads: int, shared: int = 1) -> Callable[[], Program]:
    """Attention whose keys and values serve several heads of queries, as plain products."""
    size = width // heads

    def split(x: Var, count: int) -> Var:
        return mb.transpose(x=mb.reshape(x=x, shape=[1, tokens, count, size]), perm=[0, 2, 1, 3])

    def body(x: Var) -> Var:
        kept = heads // shared
        q = split(mb.linear(x=x, weight=half(width, width)), heads)
        k, v = (split(mb.linear(x=x, weight=half(kept * size, width)), kept) for _ in range(2))
        if shared > 1:
            k, v = (mb.concat(values=[value] * shared, axis=1) for value in (k, v))
        p = mb.softmax(x=mb.matmul(x=q, y=k, transpose_y=True), axis=-1)
        mixed = mb.transpose(x=mb.matmul(x=p, y=v), perm=[0, 2, 1, 3])
        return mb.linear(x=mb.reshape(x=mixed, shape=[1, tokens, width]), weight=half(width, width))

    return of(body, (1, tokens, width))


def conformer(tokens: int = 361, width: int = 1024) -> Callable[[], Program]:
    """A feed-forward layer and a convolution module."""

    def body(x: Var) -> Var:
        wide = mb.silu(x=mb.linear(x=mb.layer_norm(x=x, axes=[-1]), weight=half(4 * width, width)))
        x = mb.add(x=x, y=mb.linear(x=wide, weight=half(width, 4 * width)))
        y = mb.transpose(x=mb.layer_norm(x=x, axes=[-1]), perm=[0, 2, 1])
        a, b = mb.split(x=mb.conv(x=y, weight=half(2 * width, width, 1)), num_splits=2, axis=1)
        y = mb.mul(x=a, y=mb.sigmoid(x=b))
        y = mb.silu(x=mb.conv(x=y, weight=half(width, 1, 9), groups=width, pad_type="same"))
        y = mb.conv(x=y, weight=half(width, width, 1))
        return mb.add(x=x, y=mb.transpose(x=y, perm=[0, 2, 1]))

    return of(body, (1, tokens, width))


def mamba(tokens: int = 224, width: int = 512) -> Callable[[], Program]:
    """Projections and a short depthwise convolution, several layers."""

    def body(x: Var) -> Var:
        for _ in range(6):
            y = mb.conv(x=x, weight=half(2 * width, width, 1, 1))
            y = mb.silu(
                x=mb.conv(
                    x=y, weight=half(2 * width, 1, 1, 4), groups=2 * width, pad_type="custom", pad=[0, 0, 3, 0]
                )
            )
            x = mb.add(x=x, y=mb.conv(x=y, weight=half(width, 2 * width, 1, 1)))
        return x

    return of(body, (1, width, 1, tokens))


def sparse_palette() -> Callable[[], Program]:
    """Weights of a sparse palette."""

    def body(x: Var) -> Var:
        mask = np.zeros((32, 64), types.np_uint1_dtype)
        mask.reshape(-1)[::2] = 1
        indices = np.zeros(int(np.asarray(mask, np.int32).sum()), types.np_uint4_dtype)
        mask_, data = mb.constexpr_lut_to_sparse(
            indices_mask=mask, indices_nonzero_data=indices, lut=half(1, 1, 16, 1)
        )
        return mb.linear(x=x, weight=mb.constexpr_sparse_to_dense(nonzero_data=data, mask=mask_))

    return of(body, (1, 64))


def masked_scores() -> Callable[[], Program]:
    """An additive mask of the smallest fp32 number, which is -inf in fp16."""

    def body(x: Var, m: Var) -> Var:
        least = np.float16(-np.inf)
        mask = mb.mul(x=mb.sub(x=np.float16(1), y=m), y=least)
        return mb.softmax(x=mb.add(x=mb.matmul(x=x, y=x, transpose_y=True), y=mask), axis=-1)

    return of(body, (1, 4, 512, 32), (1, 1, 1, 512))


def root_of_mean(x: Var) -> Var:
    return mb.rsqrt(x=mb.reduce_mean(x=mb.square(x=mb.tanh(x=x)), axes=[-1]), epsilon=np.float16(0))


def products(queries: int, keys: int) -> Callable[[], Program]:
    def body(q: Var, k: Var) -> Var:
        return mb.softmax(x=mb.matmul(x=q, y=k, transpose_y=True), axis=-1)

    return of(body, (1, 2, queries, 16), (1, 2, keys, 16))


def norms(count: int) -> Callable[[], Program]:
    def body(x: Var) -> Var:
        for _ in range(count):
            x = mb.layer_norm(x=x, axes=[-1], gamma=half(64), beta=half(64))
        return x

    return of(body, (1, 64, 64))


def prefill(rows: int = 151936, tokens: int = 128) -> Callable[[], Program]:
    """Rows of a large table, and layers."""

    def build() -> Program:
        def body(ids: Var) -> Var:
            x = mb.gather(x=np.zeros((rows, 1024), np.float16), indices=ids, axis=0, validate_indices=False)
            for _ in range(4):
                y = mb.silu(x=mb.linear(x=mb.layer_norm(x=x, axes=[-1]), weight=half(3072, 1024)))
                x = mb.add(x=x, y=mb.linear(x=y, weight=half(1024, 3072)))
            return x

        return program(body, (1, tokens), dtype=types.int32)

    return build


def stateful(form: str) -> Callable[[], Program]:
    """A cache that is written and read by a step of a decoder."""

    def body(x: Var, state: Var) -> Var:
        weight = palette(4, 64, 64) if form == "palette" else half(64, 64)
        made = mb.linear(x=x, weight=weight)
        new = mb.slice_update(x=mb.read_state(input=state), update=made, begin=[0, 0], end=[1, 64])
        return mb.relu(x=mb.coreml_update_state(state=state, value=new))

    return of(body, (1, 64), states=((32, 64),))


def with_table_mask() -> Callable[[], Program]:
    """A plain decoder block with a mask in fp32 and integer ids."""

    def build() -> Program:
        specs = [mb.TensorSpec((1, 512), dtype=types.int32), mb.TensorSpec((1, 1, 512, 512), dtype=types.fp32)]

        @mb.program(input_specs=specs, opset_version=ct.target.iOS16)
        def made(ids: Var, mask: Var) -> Any:
            x = mb.gather(x=half(1000, 768), indices=ids, axis=0)
            for _ in range(3):
                y = mb.gelu(x=mb.linear(x=mb.layer_norm(x=x, axes=[-1]), weight=half(3072, 768)))
                x = mb.add(x=x, y=mb.linear(x=y, weight=half(768, 3072)))
            scores = mb.matmul(x=x, y=x, transpose_y=True)
            return mb.softmax(x=mb.add(x=mb.cast(x=scores, dtype="fp32"), y=mask), axis=-1)

        result: Program = made
        return result

    return build


GPU = "it compares with the GPU, of which inspect says no number"
WEIGHTS = "wrong numbers that depend on the trained weights"
CORE_AI = "of Core AI, not Core ML"

M5 = "M5 Pro/macOS 27"

REPORTS: tuple[Report, ...] = (
    Report("R001", silent=GPU),
    *[
        Report(name, (Statement(f"{name}: ALL is slower", conformer(), chip, warns_of_all, True, units="ALL"),))
        for name, chip in (("R002", "M2/macOS 15"), ("R004", "M1/macOS 15"), ("R014", "M2 Ultra/macOS 26"))
    ],
    Report("R006", silent=WEIGHTS),
    Report("R007", silent=GPU),
    Report("R009", silent="a GPU that does not compile"),
    Report("R011", silent="nothing in the graph tells that it does not compile"),
    Report(
        "R012",
        (
            Statement(
                "R012: all on the GPU",
                gated_convolutions(),
                "M2 Ultra/macOS 26",
                all_on,
                "gpu",
                sure=False,
                units="CPU_AND_GPU",
            ),
        ),
    ),
    Report("R016", silent=WEIGHTS),
    Report(
        "R017", (Statement("R017: each op is on the ANE", gated_convolutions(), "A17/iOS 27", all_on, "ane"),)
    ),
    Report("R019", silent=WEIGHTS),
    Report(
        "R021",
        (
            Statement(
                "R021: shared keys go to the GPU",
                attention_block(512, 1024, 16, 2),
                "M2 Ultra/macOS 26",
                all_on,
                "gpu",
                sure=False,
                units="ALL",
            ),
        ),
    ),
    Report("R022", outside="several packages"),
    Report(
        "R024",
        (
            Statement(
                "R024: ALL picks the ANE",
                attention_block(512, 768, 12),
                "M1 Max/macOS 26",
                all_on,
                "ane",
                sure=False,
                units="ALL",
            ),
        ),
    ),
    Report("R026", silent="nothing in the graph tells that it does not compile"),
    Report("R027", silent=WEIGHTS),
    Report("R029", (warns("num-mask-product", "R029: a mask of -inf", masked_scores(), "M1 Max/macOS 26"),)),
    Report("R031", silent=GPU),
    Report("R036", (faster("R036: a palette at 1,024 positions", gate("palette"), gate("fp16"), "slower"),)),
    Report("R037", (faster("R037: a palette in an MLP", gate("palette"), gate("fp16"), "slower"),)),
    Report("R038", (faster("R038: W8A8", gate("w8a8"), gate("fp16"), "faster"),)),
    Report("R039", (faster("R039: a palette and 8 bits", gate("a8w4"), gate("fp16"), "slower"),)),
    Report("R041", (faster("R041: W8A8", gate("w8a8"), gate("fp16"), "faster"),)),
    Report("R042", silent=WEIGHTS),
    Report("R043", (faster("R043: direct int4", gate("int4"), gate("fp16"), "faster"),)),
    Report(
        "R044",
        (
            faster("R044: direct int4 at 64 positions", gate("int4", 64), gate("fp16", 64), "faster"),
            faster("R044: a palette at 64 positions", gate("palette", 64), gate("fp16", 64), "slower"),
        ),
    ),
    Report("R046", (faster("R046: a palette for each channel", gate("palettes"), gate("fp16"), "slower"),)),
    Report(
        "R047", (Statement("R047: each op is on the ANE", quantized_product(1024, 1024), M5, all_on, "ane"),)
    ),
    Report("R048", silent="numbers of quantized products"),
    Report("R049", (Statement("R049: too small for the ANE", quantized_product(32, 64), M5, all_on, "cpu"),)),
    Report("R051", outside=CORE_AI),
    Report("R052", outside=CORE_AI),
    Report("R054", outside=CORE_AI),
    Report("R056", (Statement("R056: one submission", conformer(), "A19/iOS 27", all_on, "ane"),)),
    Report("R057", silent=GPU),
    Report(
        "R059",
        (
            Statement("R059: a range", RANGED, "M5 Pro/macOS 26", none_on_ane, True, sure=False),
            warns("dyn-range-disputed", "R059: a range is doubtful", RANGED, "M5 Pro/macOS 26"),
        ),
    ),
    Report("R061", outside="hints at run time"),
    Report("R062", silent="the graph is not public"),
    Report("R064", silent=GPU),
    Report(
        "R066", (warns("num-eps", "R066: a root without a guard", of(root_of_mean, (1, 64)), "A19/iOS 26"),)
    ),
    Report(
        "R067",
        (
            Statement(
                "R067: quantize is on the ANE",
                of(lambda x: mb.quantize(input=x, scale=np.float16(0.1), output_dtype="int8"), (1, 64)),
                "M3/macOS 26",
                lambda found: found.ops[0].legal,
                True,
            ),
        ),
    ),
    Report("R069", (can("R069: a sparse palette stays", sparse_palette(), "Mac/macOS 26"),)),
    Report("R071", silent="a decoder of which neither time is in the table"),
    *[
        Report(
            name,
            (
                Statement(
                    f"{name}: leaves", weighing(megabytes), "Mac/macOS 26", none_on_ane, True, sure=False
                ),
                Statement(
                    f"{name}: it is said", weighing(megabytes), "Mac/macOS 26", says("size-leaves"), left
                ),
            )[0 if left else 1 :],
        )
        for name, megabytes, left in (("R072", 3600, True), ("R074", 857, False))
    ],
    Report("R076", outside="a head on the GPU against one on the CPU"),
    *[
        Report(
            name,
            (
                warns("compile-memory", f"{name}: no memory", products(*failed), "A17/iOS 18"),
                no_warning("compile-memory", f"{name}: enough", products(*ran), "A17/iOS 18"),
            ),
        )
        for name, failed, ran in (("R077", (128, 1024), (130, 1024)), ("R079", (1, 2048), (64, 2048)))
    ],
    Report("R081", silent="nothing in the graph tells that it does not compile"),
    Report("R082", silent=WEIGHTS),
    Report(
        "R084",
        (
            warns("state-palette", "R084: a palette and a state", stateful("palette"), "M4/macOS 26"),
            no_warning("state-palette", "R084: fp16 and a state", stateful("fp16"), "M4/macOS 26"),
        ),
    ),
    Report("R086", (warns("load-minutes", "R086: 667 MB", weighing(640), "Mac/macOS 26"),)),
    Report("R087", (Statement("R087: a range", RANGED, "M2 Max/macOS 15", none_on_ane, True, sure=False),)),
    Report(
        "R089",
        (
            warns("state-width-32", "R089: 270 fails", states((1, 2, 3, 270)), "M4/macOS 15"),
            no_warning("state-width-32", "R089: 256 runs", states((1, 2, 3, 256)), "M4/macOS 15"),
        ),
    ),
    Report("R091", silent=WEIGHTS),
    Report("R092", (warns("size-leaves", "R092: 3.8 GB", weighing(3600), "M3/macOS 15"),)),
    Report("R094", (warns("load-minutes", "R094: 1.3 GB", weighing(1300), "M4 Pro/macOS 15"),)),
    Report(
        "R096",
        (
            Statement(
                "R096: a virtual Mac",
                weighing(1100),
                "Mac/macOS 15",
                lambda found: any("virtual Mac" in f.advice for f in found.findings),
                True,
            ),
        ),
    ),
    Report(
        "R097",
        (
            warns("compile-history", "R097: 32,768", products(64, 32768), "M5/macOS 26"),
            no_warning("compile-history", "R097: 8,192", products(64, 8192), "M5/macOS 26"),
        ),
    ),
    Report("R102", (Statement("R102: all on the ANE", mamba(), "A19/iOS 26", all_on, "ane"),)),
    Report("R104", (Statement("R104: on the ANE", prefill(), "M5 Pro/macOS 26", mostly_on_ane, True),)),
    Report("R106", silent=GPU),
    Report("R107", outside="ONNX Runtime"),
    Report("R109", (warns("compile-norm-values", "R109: four norms", norms(4), "M5 Max/macOS 27"),)),
    Report("R111", outside="the private compiler"),
    Report("R112", silent=GPU),
    Report(
        "R114", (Statement("R114: mixed", with_table_mask(), "M1 Max/macOS 13", is_mixed, True, sure=False),)
    ),
    Report(
        "R116",
        (
            Statement("R116: 3.1 GB", weighing(3000), "M1 Max/macOS 13", none_on_ane, True, sure=False),
            warns("size-leaves", "R116: it is said", weighing(3000), "M1 Max/macOS 13"),
            no_warning("size-leaves", "R116: 1.5 GB", weighing(1450), "M1 Max/macOS 13"),
        ),
    ),
    Report("R117", silent="the graph is not public, and its author doubts the row"),
)
