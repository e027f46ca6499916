"""Inputs that are not plain arrays: each is an error that says what to give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anesurgery as ane
from anesurgery.errors import InterpretError, PassError, SurgeryError
from anesurgery.files.package import save
from anesurgery.interpret import Predictor
from anesurgery.loading import load
from anesurgery.mil import Program, ct, mb, types

X = np.ones((2, 3), np.float32)
USES: dict[str, Callable[[Any, Any], Any]] = {
    "run": ane.run,
    "compare": lambda model, values: ane.compare(model, model, values),
    "ranges": ane.ranges,
    "apply": lambda model, values: ane.apply(
        model, "negate_subtract", prove="model", inputs=values, quiet=True
    ),
    "inspect": lambda model, values: ane.inspect(model, inputs=values),
}


def program() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)(
        lambda x: mb.relu(x=x, name="y")
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(load(program()), tmp_path_factory.mktemp("bad") / "model.mlpackage")


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([X], "inputs are a dictionary of arrays by name, not a ndarray"),
        (7, "inputs are a dictionary of arrays by name, not a int"),
        ({0: X}, "the names of inputs are strings, not 0"),
        ({None: X}, "the names of inputs are strings, not None"),
        ({"x": None}, "input 'x'"),
        ({"x": "text"}, "input 'x'"),
        ({"x": torch.eye(2, 3).to_sparse()}, "input 'x' is a tensor that is sparse; give tensor.to_dense()"),
        ({"x": torch.empty(2, 3, device="meta")}, "input 'x' is a meta tensor, which holds no numbers"),
        ({"x": torch.nested.nested_tensor([torch.ones(3), torch.ones(2)])}, "input 'x' is a nested tensor"),
        ({"x": torch.ones(2, 3).to(torch.float8_e4m3fn)}, "holds torch.float8_e4m3fn, which numpy lacks"),
    ],
    ids=range(10),
)
def test_what_is_no_input_is_an_error(use: str, values: Any, words: str, package: Path) -> None:
    if isinstance(values, list) and use not in ("ranges", "inspect", "apply"):
        words = "not a list"
    with pytest.raises(SurgeryError) as raised:
        USES[use](package, values)
    assert words in str(raised.value)


def test_a_list_without_samples_is_an_error(package: Path) -> None:
    """The wrong version draws its own in their place."""
    with pytest.raises(SurgeryError, match="inputs has no sample; give a dictionary of arrays"):
        USES["apply"](package, [])


def test_none_is_no_inputs(package: Path) -> None:
    with pytest.raises(InterpretError, match="not a NoneType; the model takes x"):
        ane.run(package, None)  # type: ignore[arg-type]


def test_plain_tensors_of_all_kinds_are_inputs() -> None:
    for value in (
        torch.ones(2, 3),
        torch.ones(2, 3, requires_grad=True),
        torch.ones(2, 3, dtype=torch.bfloat16),
    ):
        np.testing.assert_array_equal(ane.run(program(), {"x": value})["y"], X)


@pytest.mark.parametrize("seed", [-1, 1.5, "x", None])
@pytest.mark.parametrize(
    "use",
    [
        lambda seed: ane.apply(program(), "negate_subtract", seed=seed, quiet=True),
        lambda seed: ane.compare(program(), program(), seed=seed),
        lambda seed: ane.ranges(program(), seed=seed),
        lambda seed: ane.Predictor(program()).sample(seed),
    ],
    ids=["apply", "compare", "ranges", "sample"],
)
def test_a_seed_is_a_whole_number_from_0_up(use: Callable[[Any], Any], seed: Any) -> None:
    with pytest.raises(SurgeryError, match="must be a whole number from 0 up"):
        use(seed)


def test_no_fixed_point_is_said_with_a_short_name() -> None:
    from dataclasses import dataclass
    from typing import ClassVar

    from anesurgery.rewriting.pattern import var

    @dataclass(frozen=True)
    class Restless(ane.Rewrite):
        """Replaces each relu by two."""

        name: ClassVar[str] = "restless"

        def pattern(self, op: Any) -> Any:
            return op.relu(x=var("x"))

        def rewrite(self, mb: Any, m: Any) -> Any:
            return mb.relu(x=mb.relu(x=m.x))

    with pytest.raises(PassError, match="reaches no fixed point") as raised:
        ane.apply(program(), Restless(), prove=None, quiet=True)
    assert len(str(raised.value)) < 300


def looked_up(change: Callable[[Any], Any]) -> Predictor:
    """A table of five rows, indexed by what `change` makes of the input."""

    program = mb.program(input_specs=[mb.TensorSpec((1, 2), types.int32)], opset_version=ct.target.iOS17)(
        lambda ids: mb.gather(x=np.eye(5, dtype=np.float32), indices=change(ids), axis=0)
    )

    return Predictor(program)


def guarded(ids: Any) -> Any:
    counted = mb.add(x=ids, y=np.int32(5))
    return mb.select(cond=mb.greater_equal(x=ids, y=np.int32(0)), a=ids, b=counted)


@pytest.mark.parametrize("change", [lambda ids: mb.expand_dims(x=ids, axes=[0]), guarded])
@pytest.mark.parametrize("wrong", [5, 900, -6])
def test_an_id_beyond_its_table_is_an_error(change: Callable[[Any], Any], wrong: int) -> None:
    words = f"the input ids holds {wrong}, and indexes a table of 5 rows; give ids from 0 to 4"
    with pytest.raises(InterpretError, match=words):
        looked_up(change)({"ids": np.array([[4, wrong]], np.int32)})
    looked_up(change)({"ids": np.array([[4, -5]], np.int32)})


def test_an_id_that_the_model_clamps_may_be_any() -> None:
    (found,) = looked_up(lambda ids: mb.minimum(x=ids, y=np.int32(4)))({"ids": np.array([[1, 900]])}).values()
    assert found.argmax(-1).tolist() == [[1, 4]]


def first(ids: Any) -> Any:
    return mb.slice_by_index(x=ids, begin=[0, 0], end=[1, 1])


def at_least_0(ids: Any) -> Any:
    return mb.select(cond=mb.greater_equal(x=ids, y=np.int32(0)), a=ids, b=np.zeros((1, 2), np.int32))


@pytest.mark.parametrize(("change", "ids", "rows"), [(first, [3, 900], [3]), (at_least_0, [3, -100], [3, 0])])
def test_ids_that_reach_no_table_may_be_any(
    change: Callable[[Any], Any], ids: list[int], rows: list[int]
) -> None:
    """Those that are cut off, or replaced, are no ids of the table."""
    (found,) = looked_up(change)({"ids": np.array([ids])}).values()
    assert found.argmax(-1).tolist() == [rows]


def test_looked_up_ids_are_not_ids_of_the_first_table() -> None:
    """What `gather_nd` reads at the input indexes the second table; the input itself may be larger."""
    codes = np.arange(12, dtype=np.int32) % 5
    change = lambda ids: mb.gather_nd(x=codes, indices=mb.expand_dims(x=ids, axes=[2]))  # noqa: E731
    (found,) = looked_up(change)({"ids": np.array([[3, 11]])}).values()
    assert found.argmax(-1).tolist() == [[3, 1]]
