"""Scatters at constant and at dynamic places: every kind, every mode, doubles and places outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from closeness import assert_close
from pass_cases import refuses, rewrites, table

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types, walk_ops
from anesurgery.passes.replace_scatter import MODES, ReplaceScatter
from anesurgery.testing import apply_pass, assert_same_numbers

SCATTERS = {"scatter", "scatter_along_axis", "scatter_nd"}
EVERY_MODE = ["update", *MODES]


def scattered(
    kind: str, places: Any, shape: tuple[int, ...], updates: tuple[int, ...], dynamic: bool = False, **more: Any
) -> Program:
    """A scatter, with the places as a constant or as an input."""
    places = np.asarray(places, np.int32)
    specs = [mb.TensorSpec(shape), mb.TensorSpec(updates), mb.TensorSpec(places.shape, dtype=types.int32)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS16)
    def program(x: Var, u: Var, k: Var) -> Any:
        made = getattr(mb, kind)(data=x, indices=k if dynamic else places, updates=u, **more)
        return made if dynamic else (made, mb.identity(x=k))

    return program


def columns(places: Any, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where the elements of a slice of the last axis lie in the flat tensor."""
    return np.arange(np.prod(shape)).reshape(shape)[..., places].ravel()


def test_two_halves_are_one_concat() -> None:
    """As a trace writes `q[..., :3] = a; q[..., 3:] = b`: the buffer, and its flat shape, are gone."""
    left, right = columns(slice(0, 3), (4, 10, 5)), columns(slice(3, 5), (4, 10, 5))

    @mb.program(input_specs=[mb.TensorSpec((4, 10, 3)), mb.TensorSpec((4, 10, 2))])
    def program(a: Var, b: Var) -> Any:
        made: Any = np.zeros(200, np.float32)
        for places, u in ((left, a), (right, b)):
            flat = mb.reshape(x=u, shape=[len(places)])
            made = mb.scatter(data=made, indices=places.astype(np.int32), updates=flat, axis=0, mode="update")
        return mb.relu(x=mb.reshape(x=made, shape=[4, 10, 5]))

    after, session = apply_pass(ReplaceScatter(), program)
    assert len(session.changes) == 2
    kinds = [op.op_type for op in walk_ops(after) if op.op_type != "const"]
    assert kinds == ["reshape", "reshape", "concat", "reshape", "relu"]
    assert_same_numbers(program, after)


def test_a_converted_scatter() -> None:
    class Written(torch.nn.Module):
        def forward(self, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            return (x * 1).scatter(1, torch.tensor([[1, 2], [1, 2]]), u) + 1

    x, u = torch.randn(2, 5), torch.randn(2, 2)
    with quiet_host():
        model = ct.convert(
            torch.jit.trace(Written().eval(), (x, u)),  # type: ignore[no-untyped-call]
            inputs=[ct.TensorType("x", x.shape), ct.TensorType("u", u.shape)],
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
        )
    before = SCATTERS & {op.op_type for op in walk_ops(ane.load(model).program)}
    surgery = ane.apply(model, ["fold_constants", "replace_scatter"], quiet=True)
    assert before
    assert not SCATTERS & {op.op_type for op in walk_ops(surgery.program)}, surgery.refusals
    (found,) = ane.run(surgery.program, {"x": x.numpy(), "u": u.numpy()}).values()
    assert_close(found, Written()(x, u).numpy(), rtol=1e-6)


BUT_ONE = columns(slice(0, 3), (40, 5)) + np.repeat(np.arange(40) == 7, 3)
AT_RUN_TIME: list[Any] = [
    *(
        ("scatter", [0], (2, 4, 3), (2, 1, 3), {"axis": 1, "mode": mode}, read)
        for mode in EVERY_MODE
        for read in ([1], [-1], [3])
    ),
    ("scatter", [0, 0], (4, 3), (2, 3), {"axis": 0, "mode": "add"}, [2, 2]),
    ("scatter_nd", [[0], [0]], (4, 3), (2, 3), {"mode": "update"}, [[2], [3]]),
    ("scatter_along_axis", [[0, 1, 2]], (4, 3), (1, 3), {"axis": 0, "mode": "update"}, [[3, 0, 3]]),
]
test_cases, test_surroundings = table(
    ReplaceScatter(),
    # All periods but one lie alike: that is no slice of an inner axis.
    refuses("80 pieces would be needed", scattered, "scatter", BUT_ONE, (200,), (120,), axis=0, mode="update"),
    refuses("78 pieces would be needed", scattered, "scatter", np.arange(40) ** 2, (1600,), (40,), axis=0),
    refuses("9 rows are written at dynamic", scattered, "scatter", range(9), (80,), (9,), dynamic=True, axis=0),
    refuses("fp16 counts up to 2047", scattered, "scatter", [0], (2048,), (1,), dynamic=True, axis=0),
    refuses("have 2 coordinates", scattered, "scatter_nd", [[0, 0]], (3, 3), (1,), dynamic=True),
    *(
        rewrites(scattered, "scatter", [3, 0, 1], (4, 5, 6), sizes, axis=axis, mode=mode, rtol=0)
        for mode in EVERY_MODE
        for axis, sizes in ((0, (3, 5, 6)), (1, (4, 3, 6)), (-1, (4, 5, 3)))
    ),
    *(
        rewrites(scattered, "scatter", [2, 0, 2, -1], (4, 3), (4, 3), axis=0, mode=m, rtol=0)
        for m in EVERY_MODE
    ),
    *(
        rewrites(scattered, "scatter_nd", places, shape, (len(places), *shape[2:]), mode=mode, rtol=0)
        for places in ([[0, 1], [3, 2]], [[0, 0]], [[-1, -2]])
        for shape, mode in (((4, 3, 2), "update"), ((4, 3), "add"))
    ),
    *(
        rewrites(scattered, "scatter_along_axis", places, (2, 3), (2, 3), axis=0, mode="update", rtol=0)
        for places in ([[1, 1, 1], [0, 0, 0]], [[0, 1, 1], [1, 0, 0]])
    ),
    rewrites(scattered, "scatter", [[0, 1], [3, 2]], (4, 3), (2, 2, 3), axis=0, mode="add", rtol=0),
    *(
        rewrites(
            scattered,
            kind,
            places,
            shape,
            sizes,
            dynamic=True,
            **options,
            inputs={"k": np.array(read, np.int32)},
            rtol=0,
            id=f"{kind} at {read}, {options}",
        )
        for kind, places, shape, sizes, options, read in AT_RUN_TIME
    ),
    *(
        rewrites(
            scattered,
            "scatter",
            flat,
            (200,),
            (len(flat),),
            axis=0,
            mode=mode,
            rtol=0,
            id=f"columns {places}, {mode}",
        )
        for places in (slice(0, 3), slice(2, 5), [4], [0, 2], [3, 1])
        for flat in (columns(places, (8, 5, 5)),)
        for mode in ("update", "add")
    ),
)
