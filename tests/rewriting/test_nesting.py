"""Blocks inside each other cost what their ops cost, however deep; counted in ops that walks come by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_models import compile_package
from nested import TooManyError, branches, chain, loops, visits

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.facts.masks import conjuncts
from anesurgery.facts.whole_numbers import is_whole
from anesurgery.mil import Operation, Program, Var, ct, mb, nested_ops, nesting, reads, walk_ops

X = {"x": np.ones((2, 3), np.float32)}
DEEP = 60
STORED = 40
"""What a file holds."""

LINEAR: dict[str, Callable[[Program], object]] = {
    "inspect": lambda p: str(ane.inspect(p)),
    "text": ane.to_text,
    "draw": ane.draw,
    "run": lambda p: ane.run(p, X),
    "compare": lambda p: str(ane.compare(p, p)),
}
EDITS: dict[str, Callable[[Program], object]] = {
    "apply": lambda p: str(ane.apply(p, "auto", quiet=True)),
    "prove": lambda p: str(ane.compare(p, p, prove=True)),
}
"""What copies a program, or builds ops in it: coremltools looks at the blocks around each op that it builds."""


def visited(use: Callable[[Program], object], program: Program) -> int:
    with visits(2_000_000) as counted:
        use(program)
    return counted.count


@pytest.mark.one_of(6)
@pytest.mark.parametrize("nest", [branches, loops])
@pytest.mark.parametrize("name", LINEAR)
def test_twice_as_deep_costs_twice_as_much(nest: Callable[[int], Program], name: str) -> None:
    half, whole = (visited(LINEAR[name], nest(depth)) for depth in (DEEP // 2, DEEP))
    assert whole <= 2.1 * half


@pytest.mark.slow
def test_applying_is_not_exponential() -> None:
    half, whole = (visited(EDITS["apply"], branches(depth)) for depth in (10, 20))
    assert whole <= 4 * half


@pytest.mark.slow
@pytest.mark.parametrize("nest", [branches, loops])
@pytest.mark.parametrize("name", EDITS)
def test_no_edit_is_exponential(nest: Callable[[int], Program], name: str) -> None:
    half, whole = (visited(EDITS[name], nest(depth)) for depth in (DEEP // 2, DEEP))
    assert whole <= 4 * half


def test_a_walk_that_calls_itself_over_a_walk_is_noticed() -> None:
    def each(op: Operation) -> int:
        return 1 + sum(each(inner) for block in op.blocks for inner in walk_ops(block))

    with visits(50_000), pytest.raises(TooManyError):
        sum(each(op) for op in branches(DEEP).functions["main"].operations)


@pytest.mark.slow
@pytest.mark.parametrize("nest", [branches, loops])
def test_files(nest: Callable[[int], Program], tmp_path: Path) -> None:
    program, package = nest(STORED), tmp_path / "deep.mlpackage"
    with visits(500_000):
        ane.save(ane.load(program), package)
        ane.split(package, 2).save(tmp_path / "parts")
        ane.merge({"a": package, "b": package}, tmp_path / "merged.mlpackage")
        compiled = compile_package(package, tmp_path / "deep.mlmodelc")
        ane.decompile(compiled, tmp_path / "again.mlpackage")
    expected = ane.run(program, X)["y"]
    for path in (package, tmp_path / "again.mlpackage"):
        np.testing.assert_array_equal(ane.run(path, X)["y"], expected)


@pytest.mark.parametrize("nest", [branches, loops])
def test_what_no_file_holds_is_refused(nest: Callable[[int], Program], tmp_path: Path) -> None:
    program = nest(DEEP)
    words = f"nested {DEEP} deep, and a file can hold {STORED}; unroll"
    with pytest.raises(LoadError, match=words):
        ane.save(ane.load(program), tmp_path / "deep.mlpackage")
    with pytest.raises(LoadError, match=words):
        ane.split(program, 2)
    with pytest.raises(LoadError, match=words):
        ane.to_text(program, dialect="mil")
    assert not list(tmp_path.iterdir())


def test_readers_of_blocks() -> None:
    program = branches(2)
    main = program.functions["main"]
    (outer,) = [op for op in main.operations if op.op_type == "cond"]
    assert nesting(program) == 2
    assert [op.op_type for op in nested_ops(outer) if op.op_type != "const"] == [
        *("add", "cond", "add", "relu", "abs", "abs")
    ]
    assert {var.name for var in reads(outer)} == {"positive", "x"}
    assert len(list(walk_ops(program))) == len(list(main.operations)) + len(list(nested_ops(outer)))


def doubled(kind: str, first: Callable[[Var], Any], levels: int) -> Var:
    """A value that is read twice by the op that makes the next, and so on."""
    made: list[Var] = []

    @mb.program(input_specs=[mb.TensorSpec((2,))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        made.append(first(x))
        for _ in range(levels):
            made.append(getattr(mb, kind)(x=made[-1], y=made[-1]))
        return mb.cast(x=made[-1], dtype="fp32", name="y")

    return made[-1]


LEVELS = 2000
"""Far more than the stack of Python has, and than any walk of both sides of each op can see the end of."""


@pytest.mark.slow
def test_values_that_are_read_twice() -> None:
    assert is_whole(doubled("add", lambda x: mb.round(x=x), LEVELS))
    assert not is_whole(doubled("add", lambda x: x, LEVELS))
    flags = doubled("logical_and", lambda x: mb.greater(x=x, y=np.float32(0)), LEVELS)
    assert len(conjuncts(flags, True)) == 1


@pytest.mark.slow
def test_a_long_chain(tmp_path: Path) -> None:
    """Nothing calls itself from op to op."""
    program = chain(5000)
    for use in (LINEAR["inspect"], LINEAR["text"], LINEAR["run"], LINEAR["compare"], EDITS["apply"]):
        use(program)
    ane.save(ane.load(program), tmp_path / "chain.mlpackage")
    ane.split(tmp_path / "chain.mlpackage", 2)
    compiled = compile_package(tmp_path / "chain.mlpackage", tmp_path / "chain.mlmodelc")
    ane.decompile(compiled, tmp_path / "again.mlpackage")
