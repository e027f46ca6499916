"""Every way in which coremltools compresses weights, against every edit of weights: what stays compressed.

For each mode and opset a small model is compressed by coremltools; each pass, a merge and a split then edit it.
A cell says whether all weights that were compressed still are ("kept"), how many are not ("lost 1"), "-" where
nothing was edited, and the error where one was raised; "differs" where the outputs are not those of before.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, is_compressed, mb, operands, quiet_host, types, walk_ops

with quiet_host():
    from coremltools.optimize import coreml as host

LARGE = 100
"""Elements above which a weight is compressed."""
CLOSE = 1e-4
RNG = np.random.default_rng(0)
OPSETS = {"iOS 16": ct.target.iOS16, "iOS 17": ct.target.iOS17, "iOS 18": ct.target.iOS18}
PASSES = ("pad_last_axis", "embedding_matmul", "split_head", "channels_first", "fold_constants")


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def text(opset: Any) -> Program:
    """A table, a hidden layer of odd width, a head; with the shapes that passes look for."""

    @mb.program(input_specs=[mb.TensorSpec((1, 6), dtype=types.int32)], opset_version=opset)
    def program(ids: Var) -> Var:
        x = mb.gather(x=floats(67, 24), indices=ids, axis=0)
        h = mb.linear(x=x, weight=floats(40, 24), bias=floats(40))
        y = mb.linear(x=mb.relu(x=h), weight=floats(24, 40))
        return mb.linear(x=mb.add(x=x, y=y), weight=floats(300, 24), name="logits")

    return program


def settings(make: Any, **options: Any) -> Any:
    return host.OptimizationConfig(global_config=make(weight_threshold=LARGE, **options))


def palettes(**options: Any) -> Callable[[Any], Any]:
    joint = options.pop("joint", False)
    return lambda m: host.palettize_weights(m, settings(host.OpPalettizerConfig, **options), joint)


def linear(**options: Any) -> Callable[[Any], Any]:
    joint = options.pop("joint", False)
    return lambda m: host.linear_quantize_weights(m, settings(host.OpLinearQuantizerConfig, **options), joint)


def prune(**options: Any) -> Callable[[Any], Any]:
    return lambda m: host.prune_weights(m, settings(host.OpMagnitudePrunerConfig, **options))


def then(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda m: second(first(m))


def modes() -> dict[str, Callable[[Any], Any]]:
    """Each mode of coremltools by a name; what an opset cannot hold, coremltools refuses."""
    made: dict[str, Callable[[Any], Any]] = {}
    for bits, how in itertools.product((1, 2, 3, 4, 6, 8), ("kmeans", "uniform")):
        made[f"palette {bits} {how}"] = palettes(mode=how, nbits=bits)
    for bits in (2, 4, 8):
        grouped = {"mode": "uniform", "nbits": bits, "granularity": "per_grouped_channel"}
        for size, axis in ((4, None), (8, 0), (8, 1)):
            where = {} if axis is None else {"channel_axis": axis}
            made[f"palettes {bits} of {size} on {axis}"] = palettes(**grouped, group_size=size, **where)
        made[f"palettes {bits} with scales"] = palettes(**grouped, group_size=4, enable_per_channel_scale=True)
    made["palettes 4 of 4 kmeans"] = palettes(
        mode="kmeans", nbits=4, granularity="per_grouped_channel", group_size=4
    )
    for bits, dim in ((2, 2), (4, 2), (4, 4)):
        made[f"vectors {bits} of {dim}"] = palettes(mode="kmeans", nbits=bits, cluster_dim=dim)
    for dtype, how in itertools.product(("int8", "uint8", "int4", "uint4"), ("linear", "linear_symmetric")):
        for reach in ("per_tensor", "per_channel", "per_block"):
            more = {"block_size": 8} if reach == "per_block" else {}
            made[f"{dtype} {how} {reach}"] = linear(mode=how, dtype=dtype, granularity=reach, **more)
    made["pruned"] = prune(target_sparsity=0.6)
    made["pruned n:m"] = prune(n_m_ratio=(2, 4))
    made["pruned blocks"] = prune(target_sparsity=0.5, block_size=4)
    made["pruned, palette"] = then(prune(target_sparsity=0.6), palettes(mode="uniform", nbits=4, joint=True))
    made["pruned, palette kmeans"] = then(
        prune(target_sparsity=0.6), palettes(mode="kmeans", nbits=4, joint=True)
    )
    made["pruned, int8"] = then(prune(target_sparsity=0.6), linear(joint=True))
    made["pruned, int4"] = then(prune(target_sparsity=0.6), linear(dtype="int4", joint=True))
    whole = host.OptimizationConfig(
        global_config=host.OpLinearQuantizerConfig(weight_threshold=0, granularity="per_tensor")
    )
    made["palette, int8"] = then(
        palettes(mode="uniform", nbits=4), lambda m: host.linear_quantize_weights(m, whole, True)
    )
    return made


def weights(program: Program) -> list[Var]:
    """Large constants that ops read, compressed or not."""
    found: dict[Var, None] = {}
    for op in walk_ops(program):
        if not op.op_type.startswith("constexpr_"):
            stored = [v for _, v in operands(op) if v.op is not None and v.op.op_type.startswith("const")]
            found |= dict.fromkeys(v for v in stored if v.rank > 1 and np.prod(v.shape) > LARGE)
    return list(found)


def edits(folder: Path) -> dict[str, Callable[[Path], Any]]:
    """What is done to a package; each gives a model, or None where it does nothing."""

    def apply(name: str) -> Callable[[Path], Any]:
        steps: list[Any] = [ane.passes.SplitHead(most=128)] if name == "split_head" else [name]

        def run(path: Path) -> Any:
            surgery = ane.apply(path, steps, quiet=True)
            return surgery.save(folder / "edited.mlpackage", overwrite=True) if surgery.changes else None

        return run

    def merged(path: Path) -> Any:
        return ane.merge(dict.fromkeys("ab", path), folder / "merged.mlpackage", overwrite=True)

    found = {name: apply(name) for name in PASSES}
    return {**found, "merge": merged, "split": lambda path: ane.split(path, 2)}


def cell(edit: Callable[[Path], Any], before: Path, expected: Any, kept: int) -> str:
    """What became of the weights."""
    try:
        after = edit(before)
        if after is None:
            return "-"
        chunks = [c.program for c in after.chunks] if hasattr(after, "chunks") else [ane.load(after).program]
        now = [is_compressed(w) for program in chunks for w in weights(program)]
        found = ane.run(after, VALUES)["logits"]
        if not np.allclose(found, expected, rtol=CLOSE, atol=CLOSE * np.abs(expected).max()):
            return f"differs by {np.abs(found - expected).max():.2g}"
        return "kept" if sum(now) >= kept else f"lost {kept - sum(now)}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"


VALUES = {"ids": np.arange(6, dtype=np.int32)[None]}


def main() -> None:
    """Build the matrix and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="modes whose name has this")
    chosen = parser.parse_args()
    table = Table("mode", "opset", "compressed", *PASSES, "merge", "split")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = {
            opset: ane.save(ane.load(text(aim)), folder / f"{aim.name}.mlpackage")
            for opset, aim in OPSETS.items()
        }
        todo = [(m, o) for m in modes() if chosen.only in m for o in OPSETS]
        for mode, opset in track(todo, disable=not Console().is_terminal):
            path = folder / "compressed.mlpackage"
            with quiet_host():
                try:
                    plain = ct.models.MLModel(str(whole[opset]), skip_model_load=True)
                    modes()[mode](plain).save(str(path))
                except Exception as error:
                    table.add_row(mode, opset, f"coremltools: {str(error).splitlines()[0][:50]}")
                    continue
            states = [is_compressed(w) for w in weights(ane.load(path).program)]
            expected = ane.run(path, VALUES)["logits"]
            cells = [cell(edit, path, expected, sum(states)) for edit in edits(folder).values()]
            table.add_row(mode, opset, f"{sum(states)} of {len(states)}", *cells)
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
