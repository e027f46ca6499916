"""Wrong types and values for public calls: errors that name the call, the argument and what it takes."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_rewrites import DoubleRelu, one_input

import anesurgery as ane
from anesurgery.doors import door, fits
from anesurgery.errors import LoadError, OutOfMemory, SurgeryError
from anesurgery.mil import Program, ct, mb

ANY: Any = ane
"""The public calls, to type checkers of any type."""
X = {"x": np.ones((2, 4), np.float32)}


def small() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 4))], opset_version=ct.target.iOS16)(
        lambda x: mb.linear(x=mb.relu(x=x), weight=np.eye(4, dtype=np.float32), name="y")
    )


WRONG: dict[str, tuple[Callable[[Program, Path], Any], str]] = {
    "split parts": (
        lambda p, _: ANY.split(p, "zz"),
        "split: parts='zz' is of type str; it takes a whole number",
    ),
    "draw around": (
        lambda p, _: ANY.draw(p, around=7),
        "draw: around=7 is of type int; it takes a string or None",
    ),
    "to_text dialect": (lambda p, _: ANY.to_text(p, dialect=7), "to_text: dialect=7 is of type int"),
    "sensitivity data": (lambda p, _: ANY.sensitivity(p, 7), "sensitivity: data=7 is of type int"),
    "sensitivity modes": (
        lambda p, _: ANY.sensitivity(p, X, 7),
        "modes=7 is of type int; it takes a list of str",
    ),
    "compress bits": (lambda p, _: ANY.compress(p, 5.0, inputs=X), "bits=5; it may be 1, 2, 3, 4, 6, 8"),
    "compress for": (
        lambda p, _: ANY.compress(p, inputs=X, for_="zz"),
        "for_='zz'; it may be 'size' or 'speed'",
    ),
    "compress target": (lambda p, _: ANY.compress(p, inputs=X, target="zz"), "unknown chip or device 'zz'"),
    "compress inputs": (lambda p, _: ANY.compress(p), "compress corrects weights with samples: give inputs="),
    "ranges shard": (lambda p, _: ANY.ranges(p, shard=7), "ranges: shard=7 is of type int"),
    "inspect target": (lambda p, _: ANY.inspect(p, target=7), "inspect: target=7 is of type int"),
    "compare contract": (lambda p, _: ANY.compare(p, p, contract=7), "takes a list of InterfaceChange"),
    "compare contracts": (lambda p, _: ANY.compare(p, p, contract=["zz"]), "takes a list of InterfaceChange"),
    "compare gate": (lambda p, _: ANY.compare(p, p, gate=-7), "gate=-7 is no PSNR in dB to reach"),
    "compare no gate": (lambda p, _: ANY.compare(p, p, gate=float("nan")), "gate=nan is no PSNR"),
    "compare words": (lambda p, _: ANY.compare(p, p, gate="zz"), "gate='zz' is of type str; it takes a number"),
    "run outputs": (
        lambda p, _: ANY.run(p, X, outputs=7),
        "run: outputs=7 is of type int; it takes a list of str",
    ),
    "run a letter": (lambda p, _: ANY.run(p, X, outputs="y"), "run: outputs='y' is of type str"),
    "apply target": (lambda p, _: ANY.apply(p, "negate_subtract", target="zz"), "unknown chip or device 'zz'"),
    "apply no target": (lambda p, _: ANY.apply(p, "negate_subtract", target=7), "target=7 is no name"),
    "apply a name": (
        lambda p, _: ANY.apply(p, "gpt2_anee"),
        "unknown pass or recipe 'gpt2_anee'; did you mean 'gpt2_ane'",
    ),
    "apply passes": (lambda p, _: ANY.apply(p, 7), "unknown pass or recipe '7'"),
    "apply a pass": (lambda p, _: ANY.apply(p, [7]), "unknown pass or recipe '7'"),
    "apply assume": (lambda p, _: ANY.apply(p, "negate_subtract", assume=7), "assume=7 is of type int"),
    "load units": (lambda p, _: ANY.load(p, compute_units="zz"), "unknown compute units 'zz'"),
    "save": (lambda p, at: ANY.save(p, at / "y.mlpackage"), "loaded=... is of type Program; it takes a Loaded"),
    "save path": (
        lambda p, _: ANY.save(ANY.load(p), 7),
        "save: path=7 is of type int; it takes a string or a path",
    ),
    "merge": (lambda _, at: ANY.merge(7, at / "y.mlpackage"), "models=7 is of type int; it takes a dictionary"),
    "decompile": (lambda _, at: ANY.decompile(7, at / "y.mlpackage"), "decompile: source=7 is of type int"),
    "upgrade": (lambda p, _: ANY.upgrade(p, sequence="zz"), "upgrade: sequence='zz' is of type str"),
    "register": (lambda *_: ANY.register(7), "register: 7 is no pass"),
    "register_rule": (lambda *_: ANY.register_rule(7), "register_rule: rule=7 is of type int; it takes a Rule"),
    "Target": (lambda *_: ANY.Target.parse(7), "target=7 is no name"),
    "Tolerance": (lambda *_: ANY.Tolerance("zz"), "Tolerance: rtol='zz' is of type str; it takes a number"),
    "no Tolerance": (lambda *_: ANY.Tolerance(-1), "rtol=-1; a difference is 0 or more"),
    "Recipe": (lambda *_: ANY.Recipe(name="own", steps=7), "Recipe: steps=7 is of type int"),
    "Pipeline": (lambda *_: ANY.Pipeline(7), "Pipeline: steps=7 is of type int"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_an_error_in_words(name: str, tmp_path: Path) -> None:
    call, words = WRONG[name]
    with pytest.raises(SurgeryError) as caught:
        call(small(), tmp_path)
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.int64(3), int),
        (3, float),
        (np.float32(3), float),
        (np.bool_(True), bool),
        (Path("x"), str | Path),
        ([1], tuple[int, ...]),
        ((), Sequence[str]),
        ({"x": 1}, Mapping[str, int] | Iterable[int]),
        (None, int | None),
        (len, Callable[..., int]),
        (..., Any),
    ],
    ids=str,
)
def test_what_fits_is_let_in(value: Any, kind: Any) -> None:
    assert fits(value, kind)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (3.0, int),
        ("3", int),
        ("ab", Sequence[str]),
        ([1, "2"], Sequence[int]),
        (None, int),
        (7, Mapping[str, int]),
    ],
    ids=str,
)
def test_what_does_not_fit_is_found(value: Any, kind: Any) -> None:
    assert not fits(value, kind)


def test_a_door_leaves_to_the_function_what_it_checks_itself_and_to_python_what_python_says() -> None:
    @door("mine")
    def call(mine: int, other: int = 0) -> Any:
        return mine, other

    assert call("x") == ("x", 0)  # type: ignore[arg-type]
    with pytest.raises(SurgeryError, match=r"call: other='x' is of type str; it takes a whole number"):
        call(1, other="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument 'third'"):
        call(1, third=3)  # type: ignore[call-arg]


def test_compute_units_may_be_given_by_name() -> None:
    assert ane.load(small(), compute_units="CPU_ONLY").compute_units is ct.ComputeUnit.CPU_ONLY


def test_what_the_system_refuses_is_said_in_words() -> None:
    @door()
    def read(place: str) -> None:
        raise OSError(errno.EIO, "Input/output error", place)

    with pytest.raises(LoadError, match=r"read: the system failed at a/b: Input/output error; see to the disk"):
        read("a/b")


def huge() -> Program:
    """A product of 2^46 numbers, for which no machine has addresses."""

    program = mb.program(input_specs=[mb.TensorSpec((1 << 23, 1)), mb.TensorSpec((1, 1 << 23))])(
        lambda x, y: mb.reduce_sum(x=mb.matmul(x=x, y=y, name="product"), axes=[0, 1], name="sum")
    )

    made: Program = program
    return made


def failing(error: Exception, cause: Exception | None = None) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error from cause

    return fail


NO_MEMORY: list[tuple[Exception, Exception | None, str]] = [
    (
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes."),
        None,
        "a value asked for 4.29 GB at once",
    ),
    (
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1073741824 bytes."),
        None,
        "a value asked for 1.07 GB at once",
    ),
    (
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        None,
        "a value asked for 21.5 GB at once",
    ),
    (
        MemoryError("Unable to allocate 7.45 GiB for an array with shape"),
        None,
        "a value asked for 8 GB at once",
    ),
    (MemoryError(), None, "a value found no place in it"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), None, "a value found no place in it"),
    (SurgeryError("pass p failed"), MemoryError("std::bad_alloc"), "a value found no place in it"),
]


@pytest.mark.parametrize(("error", "cause", "words"), NO_MEMORY)
def test_too_little_memory_is_said_in_words(error: Exception, cause: Exception | None, words: str) -> None:
    call = door()(failing(error, cause))
    with pytest.raises(OutOfMemory) as caught:
        call()
    assert str(caught.value) == (f"fail: the memory does not suffice: {words}; use a machine with more memory")


@pytest.mark.parametrize("error", [RuntimeError("a tensor has no memory format"), ValueError("out of range")])
def test_other_errors_are_not_about_memory(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        door()(failing(error))()


def test_an_error_that_is_its_own_cause_is_raised() -> None:
    """The wrong version looks for the first cause of all, without an end."""
    error = ValueError("round and round")
    with pytest.raises(ValueError, match="round and round"):
        door()(failing(error, error))()


@pytest.mark.parametrize("prove", ["both", "model", "sites"])
def test_a_proof_that_finds_too_little_memory(
    prove: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs numbers fails; nothing is written, and the call says what needs less."""
    error, _, words = NO_MEMORY[0]
    place = "checking.site.check_site" if prove == "sites" else "checking.comparison.run"
    monkeypatch.setattr(f"anesurgery.{place}", failing(error))
    program = one_input(lambda x: mb.relu(x=mb.relu(x=x), name="y"))
    with pytest.raises(OutOfMemory, match=words) as caught:
        ane.apply(program, DoubleRelu(), prove=prove, quiet=True).save(tmp_path / "new.mlpackage")
    assert ('prove="sites"' in str(caught.value)) == (prove != "sites")
    assert str(caught.value).startswith("apply: the memory does not suffice")
    assert not list(tmp_path.iterdir())
    assert ane.apply(program, DoubleRelu(), prove=None, quiet=True).changes


@pytest.mark.parametrize(
    "call",
    [
        lambda p, x: ane.run(p, x),
        lambda p, x: ane.Predictor(p)(x),
        lambda p, x: ane.compare(p, p, x),
        lambda p, x: ane.compare(p, p, x, prove=True),
        lambda p, x: ane.ranges(p, x),
    ],
    ids=["run", "Predictor", "compare", "prove", "ranges"],
)
def test_an_op_that_finds_too_little_memory(call: Callable[..., Any]) -> None:
    x = {"x": np.zeros((1 << 23, 1), np.float32), "y": np.zeros((1, 1 << 23), np.float32)}
    with pytest.raises(OutOfMemory, match=r"a value asked for 281 TB at once"):
        call(huge(), x)


NOT_GIVEN: dict[str, Callable[[Any], Any]] = {
    "a member": lambda m: ane.compare(m, m, member="x"),
    "layers": lambda m: ane.apply(m, "neuralnetwork_ane", quiet=True),
    "a range": lambda m: ane.ranges(m, member=3),
}


@pytest.mark.parametrize("call", NOT_GIVEN.values(), ids=NOT_GIVEN)
def test_no_error_names_a_place_that_nobody_gave(call: Callable[[Any], Any], tmp_path: Path) -> None:
    """The wrong version: the temporary package of a model that another call gave back."""
    surgery = ane.apply(small(), "remove_identity", quiet=True)
    model = surgery.model
    with pytest.raises(SurgeryError, match="this MLModel") as told:
        call(model)
    assert ".anesurgery-" not in str(told.value)
    assert ane.inspect(model).model == "this MLModel"
    kept = surgery.save(tmp_path / "kept.mlpackage")
    with pytest.raises(SurgeryError, match=r"kept\.mlpackage"):
        call(ct.models.MLModel(str(kept), skip_model_load=True))
