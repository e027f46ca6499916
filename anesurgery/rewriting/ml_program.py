"""An ML Program as passes operate on it: a package goes in and comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from anesurgery.checking.comparison import Comparison, compare
from anesurgery.errors import Refusal
from anesurgery.files.interface import Interface
from anesurgery.files.interface_change import InterfaceChange
from anesurgery.files.package import Loaded, save, to_mlmodel
from anesurgery.loading import clone, interface, load
from anesurgery.mil import Array, Program, walk_ops
from anesurgery.placement.standing import Standing, stand
from anesurgery.placement.target import Target
from anesurgery.rewriting.subject import Subject, counted

if TYPE_CHECKING:
    from typing_extensions import Self


class MLProgram(Subject):
    """A model whose ops passes edit."""

    words: ClassVar[str] = "the ops of an ML Program"
    suffix: ClassVar[str] = ".mlpackage"
    converts: ClassVar[bool] = True

    def __init__(self, loaded: Loaded, must_stay: bool = False) -> None:
        self.loaded, self._must_stay = loaded, must_stay

    @classmethod
    def read(cls, model: Any) -> Self:
        """A package, MLModel or MIL program; a neural network is made into a program."""
        return cls(load(model), isinstance(model, (Program, Loaded)))

    @property
    def must_stay(self) -> bool:
        """Is it a program that the caller gave?"""
        return self._must_stay

    def clone(self) -> Self:
        """A program of its own; weights are shared."""
        return type(self)(clone(self.loaded))

    @property
    def source(self) -> Path | None:
        """The package."""
        return self.loaded.source

    def check_source(self) -> None:
        """The weights are read from their file when they are needed."""
        self.loaded.check_source()

    @property
    def graphs(self) -> Sequence[Program]:
        """The one program, with all its functions."""
        return [self.loaded.program]

    @staticmethod
    def validate(graph: Program) -> None:
        """Let coremltools check each function."""
        for function in graph.functions.values():
            function.validate(force_validate=True)

    def finish(self) -> None:
        """Nothing: passes edit the program itself."""

    @property
    def interface(self) -> Interface:
        """Signatures, and the description as it will be saved."""
        return interface(self.loaded)

    @property
    def op_counts(self) -> dict[str, int]:
        """Number of ops by type, constants left out."""
        return op_counts(self.loaded.program)

    def standing(self, target: str) -> Standing:
        """By the inspection of all functions."""
        return stand(self.program, Target.parse(target))[0]

    def notes(self, before: Self) -> list[str]:
        """What changed when a neural network became a program."""
        return list(self.loaded.notes)

    def compare(
        self,
        before: Self,
        inputs: Mapping[str, Array] | None,
        *,
        contract: Sequence[InterfaceChange],
        gate: float,
        exact: bool,
        seed: int,
    ) -> list[Comparison | Refusal]:
        """Both in the arithmetic as stored, against the gate of the recipe."""
        a, b = before.loaded, self.loaded
        return [compare(a, b, inputs, precision="fp16", contract=contract, gate=gate, seed=seed)]

    @property
    def program(self) -> Program:
        """The program itself."""
        return self.loaded.program

    @property
    def spec(self) -> Any:
        """The specification as given; the program in it is not brought up to date."""
        return self.loaded.spec

    def mlmodel(self) -> Any:
        """An MLModel in a temporary package."""
        return to_mlmodel(self.loaded)

    def save(self, path: Path, *, overwrite: bool, edited: bool) -> Path:
        """Write the package."""
        return save(self.loaded, path, overwrite=overwrite)


def op_counts(program: Program) -> dict[str, int]:
    """Number of ops by type, constants left out, the most frequent first."""
    return counted(op.op_type for op in walk_ops(program) if op.op_type != "const")
