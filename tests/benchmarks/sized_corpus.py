"""Models of the corpus at six sizes each, beside the same model at each size made without `sizes`.

What a model is at another size is known in one of three ways: a package of a range reads that size itself; a
neural network is given its size in its specification; and of a package of one size, the numbers that are
lengths are written here by hand, as its graph was read.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import residency
from PIL import Image
from sized_figures import nearness, nearness_in_words, stored, worst

import anesurgery as ane
from anesurgery.files.joining import default_function
from anesurgery.files.package import Loaded
from anesurgery.files.size_index import read as sized_file
from anesurgery.loading import clone, load
from anesurgery.mil import Operation, ct, function_of, is_stored, mb, types
from anesurgery.semantics.inference import infer, set_type

Shapes = dict[str, tuple[int, ...]]
Numbers = Mapping[int, int]
SAYING = ("shape", "end", "reps", "size")
"""Parameters in which the ops of these models say lengths."""


@dataclass(frozen=True)
class Source:
    """The file of the corpus, and the package that is made into sizes."""

    original: Path
    package: Path


@dataclass(frozen=True)
class Real:
    """A model of the corpus, its sizes, and what it is at one.

    Attributes:
        shapes: of the inputs that differ, at each size.
        at: the model at some shapes, from its package and a folder for what is written.
        draw: input -> what its numbers are drawn by, of a generator and a shape; numbers from 0 to 1 otherwise.
        prepare: what makes the package of one that is not run as it is, in a folder.
    """

    shapes: Sequence[Shapes]
    at: Callable[[Source, Shapes, Path], Any]
    draw: Mapping[str, Callable[[np.random.Generator, Sequence[int]], Any]] = field(default_factory=dict)
    prepare: Callable[[Path, Path], Path] = lambda source, _: source


def as_it_is(source: Source, shapes: Shapes, scratch: Path) -> Any:
    """A model of a range, which reads the shapes."""
    return source.package


def repaired(source: Path, scratch: Path) -> Path:
    """With a mask that hides with a number: times minus infinity, what is seen is none."""
    return Path(ane.apply(source, "padding_mask_tensor", quiet=True).save(scratch / "repaired.mlpackage"))


def of_steps(steps: int) -> Callable[[Path, Path], Path]:
    """A network that reads a sequence of so many steps at once."""

    def prepare(source: Path, scratch: Path) -> Path:
        target = scratch / "steps.mlpackage"
        ane.upgrade(source, precision="fp32", sequence=steps).save(str(target))
        return target

    return prepare


def in_steps(source: Source, shapes: Shapes, scratch: Path) -> Any:
    """The network upgraded for as many steps as the shapes have."""
    return ane.upgrade(source.original, precision="fp32", sequence=next(iter(shapes.values()))[0])


def described(spec: Any, shapes: Shapes) -> Any:
    """A specification whose inputs have some shapes."""
    for feature in spec.description.input:
        shape, kind = shapes.get(feature.name), feature.type
        if shape is None:
            continue
        if kind.WhichOneof("Type") == "imageType":
            kind.imageType.height, kind.imageType.width = shape[-2:]
        else:
            kind.multiArrayType.shape[:] = shape
    for feature in spec.description.output:
        if feature.type.WhichOneof("Type") == "multiArrayType":
            feature.type.multiArrayType.ClearField("shape")
    return spec


def in_its_specification(source: Source, shapes: Shapes, scratch: Path) -> Any:
    """A neural network whose specification says other shapes of the inputs."""
    spec = described(ct.utils.load_spec(str(source.original)), shapes)
    target = scratch / "respecified.mlmodel"
    ct.utils.save_spec(spec, str(target))
    return target


def by_hand(
    numbers: Callable[[Shapes], Numbers], tables: Sequence[str] = ()
) -> Callable[[Source, Shapes, Path], Any]:
    """A package of one size whose numbers are replaced, wherever a parameter says lengths, and tables cut.

    Args:
        numbers: by the shapes, what each number becomes.
        tables: names of stored values that are cut along each axis that is such a number.
    """

    def at(source: Source, shapes: Shapes, scratch: Path) -> Loaded:
        copied = clone(load(source.package))
        function, new = function_of(copied.program, default_function(copied)), numbers(shapes)
        for name, shape in shapes.items():
            set_type(function.inputs[name], types.tensor(function.inputs[name].dtype, shape))
        with function:
            for op in [op for op in function.operations if not is_stored(op.outputs[0])]:
                _rewrite(op, new, tables)
                infer(op)
        spec = type(copied.spec)()
        spec.CopyFrom(copied.spec)
        return replace(copied, spec=described(spec, shapes))

    return at


def _rewrite(op: Operation, new: Numbers, tables: Sequence[str]) -> None:
    changed = dict[str, Any]()
    for name, var in op.inputs.items():
        if isinstance(var, (tuple, list)) or not is_stored(var):
            continue
        if name in SAYING and not set(np.ravel(var.val)).isdisjoint(new):
            changed[name] = np.array([new.get(int(n), int(n)) for n in np.ravel(var.val)], np.int32)
        elif var.name in tables:
            changed[name] = np.ascontiguousarray(var.val[tuple(slice(new.get(n, n)) for n in var.shape)])
    if changed:
        op.set_inputs(
            no_check_var_types=True,
            **{name: mb.const(val=value, before_op=op) for name, value in changed.items()},
        )


def of(name: str, sizes: Sequence[Sequence[int]]) -> list[Shapes]:
    """The shapes of one input."""
    return [{name: tuple(size)} for size in sizes]


def batches(**shapes: tuple[int, ...]) -> list[Shapes]:
    """One and two at once, which is all that these models' ranges hold."""
    return [{name: (n, *shape) for name, shape in shapes.items()} for n in (1, 2)]


def pictures(sides: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """The shapes of pictures of three colours."""
    return [(1, 3, *side) for side in sides]


def loud(rng: np.random.Generator, shape: Sequence[int]) -> Any:
    """Numbers away from 0, of which a model takes logarithms."""
    return rng.uniform(0.1, 1, shape).astype(np.float32)


def words(rng: np.random.Generator, shape: Sequence[int]) -> Any:
    """Ids of words."""
    return rng.integers(1, 30000, shape).astype(np.int32)


def seen(rng: np.random.Generator, shape: Sequence[int]) -> Any:
    """A mask that hides two places."""
    mask = np.ones(shape, np.int32)
    mask[:, 3:5] = 0
    return mask


FLAT = ((32, 32), (32, 48), (48, 48), (64, 48), (64, 64), (72, 96))
TILES = ((64, 64), (64, 96), (96, 96), (96, 128), (128, 128), (160, 128))
TEXTS = (16, 32, 48, 64, 96, 128)
STEPS = (8, 12, 16, 24, 32, 40)
FRAMES = (64, 96, 128, 160, 192, 256)
HEARD = (100, 250, 400, 600, 1000, 1500)
SAMPLES = tuple(43844 - 256 * n for n in (120, 100, 80, 60, 40, 0))
"""As many places as leave the same rest by the hops of all octaves."""
MODELS: dict[str, Real] = {
    "dtln_aec_128_part1_fp16": Real(
        batches(lpb_magnitude=(1, 257), mic_magnitude=(1, 257), states_in=(2, 128, 2)),
        as_it_is,
        dict.fromkeys(("lpb_magnitude", "mic_magnitude", "states_in"), loud),
    ),
    "dtln_aec_128_part2_fp16": Real(
        batches(estimated_frame=(1, 512), lpb_time=(1, 512), states_in=(2, 128, 2)),
        as_it_is,
        dict.fromkeys(("estimated_frame", "lpb_time", "states_in"), loud),
    ),
    "waifu2x_anime_noise0": Real(of("input", [(3, *side) for side in FLAT]), in_its_specification),
    "mlc_edsr_f32b5": Real(of("input_1", [(1, *side, 3) for side in FLAT]), in_its_specification),
    "bisenet": Real(of("input", pictures(TILES)), by_hand(lambda _: {})),
    "bge_small": Real(
        [{"input_ids": (1, n), "attention_mask": (1, n)} for n in TEXTS],
        by_hand(
            lambda shapes: {128: shapes["input_ids"][1]},
            ("position_embeddings_1_to_fp16", "token_type_embeddings_1_to_fp16"),
        ),
        {"input_ids": words, "attention_mask": seen},
        repaired,
    ),
    "fluid_titanet_small": Real(
        of("processed_signal", [(1, n, 80) for n in FRAMES]),
        by_hand(lambda shapes: {256: shapes["processed_signal"][1]}, ("const_1",)),
        {"length": lambda rng, shape: np.array([50], np.int32)},
    ),
    "whisper_tiny_decoder": Real(
        of("encoder_hidden_states", [(1, n, 384) for n in HEARD]), by_hand(lambda _: {}), {"input_ids": words}
    ),
    "exermote": Real(
        of("accelerations", [(n, 1, 12, 1, 1) for n in STEPS]), in_steps, prepare=of_steps(STEPS[-1])
    ),
    "mlt_es2en_char_decoder16": Real(
        of("encodedChar", [(n, 1, 87, 1, 1) for n in STEPS]), in_steps, prepare=of_steps(STEPS[-1])
    ),
    "mlt_gesture_classifier": Real(
        of("features", [(n, 1, 1, 20, 6) for n in STEPS]), in_steps, prepare=of_steps(STEPS[-1])
    ),
    "basic_pitch_nmp": Real(
        of("input_2", [(1, n, 1) for n in SAMPLES]),
        by_hand(lambda shapes: {43844: shapes["input_2"][1], 172: shapes["input_2"][1] // 256 + 1}),
    ),
    "kokoro_duration": Real([{"input_ids": (1, n), "attention_mask": (1, n)} for n in TEXTS], as_it_is),
    "blazeface_scaled": Real(of("image", pictures([(96, 96), (128, 128)])), in_its_specification),
    "sinet_portrait_seg": Real(of("input_54", pictures([(160, 160), (320, 320)])), in_its_specification),
    "mlc_mosaic": Real(of("sub_2", [(1, 256, 256, 3), (1, 512, 512, 3)]), as_it_is),
    "silero_unified": Real(of("audio_input", [(1, 576), (1, 1088)]), as_it_is),
    "pose_cpm": Real(of("image__0", pictures(TILES)), in_its_specification),
}


def drawn(model: Real, loaded: Loaded, shapes: Shapes, seed: int) -> dict[str, Any]:
    """Numbers of all inputs: pictures of random points, what the model says, or numbers from 0 to 1."""
    rng, values = np.random.default_rng(seed), dict[str, Any]()
    for feature in loaded.described_inputs:
        own = tuple(function_of(loaded.program, default_function(loaded)).inputs[feature.name].shape)
        shape = shapes.get(feature.name, own)
        if feature.type.WhichOneof("Type") == "imageType":
            values[feature.name] = Image.fromarray(rng.integers(0, 255, (*shape[-2:], 3)).astype(np.uint8))
        else:
            values[feature.name] = model.draw.get(feature.name, _even)(rng, shape)
    return values


def _even(rng: np.random.Generator, shape: Sequence[int]) -> Any:
    return rng.uniform(0, 1, shape).astype(np.float32)


def package(name: str, folder: Path) -> Path:
    """Where a model is; graphs are given random weights in the folder."""
    places = dict(residency.corpus(folder, everything=True))
    key = next(key for key in places if key.split(".")[0] == name and not key.endswith("mlmodelc"))
    return Path(places[key]())


def row(name: str, model: Real, original: Path, scratch: Path) -> str:
    """A row of the table."""
    source = Source(original, model.prepare(original, scratch))
    begun = time.process_time()
    wanted = {key: [shapes[key] for shapes in model.shapes] for key in model.shapes[0]}
    try:
        sized = ane.sizes(source.package, wanted)
    except ane.SurgeryError as error:
        return f"| {name} | {_listed(model)} | refused | | | | {error} |"
    folder = sized.save(scratch / "sized")
    seconds = time.process_time() - begun
    near = [nearness(*pair) for pair in both(model, source, folder, scratch, model.shapes, "fp16")]
    one = stored(ane.save(list(sized.models.values())[-1], scratch / "one.mlpackage"))
    _, padding = sized_file(folder)
    between = list[float]()
    if not padding.why_not:
        lengths = list(_between(model.shapes, padding.inputs))
        between = [nearness(*pair) for pair in both(model, source, folder, scratch, lengths, "fp32")]
    more = 100 * (stored(folder) / one - 1)
    return (
        f"| {name} | {_listed(model)} | {nearness_in_words(near)} | {more:+.1f} % | "
        f"{worst(between) if between else '-'} | {seconds:.0f} s | {padding} |"
    )


def _listed(model: Real) -> str:
    return ", ".join("x".join(map(str, next(iter(shapes.values())))) for shapes in model.shapes)


def _between(shapes: Sequence[Shapes], axes: Mapping[str, int]) -> Iterator[Shapes]:
    """A length within each two sizes."""
    for shorter, longer in itertools.pairwise(shapes):
        yield {
            key: tuple(
                (n + longer[key][a]) // 2 if axes.get(key) == a else longer[key][a] for a, n in enumerate(shape)
            )
            for key, shape in shorter.items()
        }


def both(
    model: Real, source: Source, folder: Path, scratch: Path, shapes: Sequence[Shapes], precision: str
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What the folder of sizes gives at some shapes, and what the model at them does."""
    loaded = load(source.package)
    for i, at in enumerate(shapes):
        values = drawn(model, loaded, at, i)
        expected = ane.run(model.at(source, at, scratch), values, precision=precision)
        yield ane.run(folder, values, precision=precision), expected


def rows(folder: Path, names: Sequence[str] = ()) -> Iterator[str]:
    """The rows of all models, or of some."""
    for name in names or MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            yield row(name, MODELS[name], package(name, folder), Path(scratch))


def main() -> None:
    """Print the rows of the models that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path, help="keep the graphs with random weights there")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for one in rows(chosen.folder or Path(scratch), chosen.names):
            print(one, flush=True)


if __name__ == "__main__":
    main()
