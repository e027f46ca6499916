"""An ML Program, or a pipeline of them, as passes operate on it: a package goes in and comes out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from anesurgery.checking.comparison import Comparison, compare_as_stored
from anesurgery.checking.lengths import Declared, declared_lengths
from anesurgery.errors import InterfaceError, IsPipeline, Refusal
from anesurgery.files.interface import Interface, warn_of_names
from anesurgery.files.package import Loaded, save, to_mlmodel
from anesurgery.files.sequence import Chain, ModelSequence, members, read_pipeline
from anesurgery.interpret.predictor import bound
from anesurgery.loading import clone, interface, load
from anesurgery.mil import Array, Operation, Program, ct, dtype_name, types, walk_ops
from anesurgery.neuralnetwork.spec import NETWORKS
from anesurgery.placement.durations import Time, total_of
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.models import inspect_other
from anesurgery.placement.standing import Standing, placed
from anesurgery.placement.target import Target
from anesurgery.rewriting.subject import Comparing, Subject, counted

if TYPE_CHECKING:
    from typing_extensions import Self


FROM_NETWORK = (
    "the neural network became an ML Program in fp32, which the ANE does not run: anesurgery.upgrade makes it "
    "fp16 where outputs allow it, and neuralnetwork_ane edits its layers instead"
)


class MLProgram(Subject):
    """A model whose ops passes edit: one program, or several that run one after the other (`parts`)."""

    words: ClassVar[str] = "the ops of an ML Program"
    suffix: ClassVar[str] = ".mlpackage"
    converts: ClassVar[bool] = True

    def __init__(self, loaded: Loaded, layers: Any = None) -> None:
        self.loaded = loaded
        self.layers = layers
        """The neural network that the program was made of, as path or MLModel; None where it was none."""

    @classmethod
    def read(cls, model: Any) -> Self:
        """A package, MLModel or MIL program; a neural network is made into a program.

        A pipeline counts as its ML Programs, edited one after the other; its other models stay as they are.
        """
        try:
            loaded = load(model)
            warn_of_names(() if isinstance(model, Loaded) else loaded.notes)
            return cls(loaded, _layers(model, loaded))
        except IsPipeline:
            place = getattr(model, "package_path", model)
            if place is None:
                raise
            units = getattr(model, "compute_unit", None)
            return cast("Self", ProgramSequence(read_pipeline(Path(place).expanduser(), units)))

    def clone(self) -> Self:
        """A program of its own; weights are shared."""
        return type(self)(clone(self.loaded), layers=self.layers)

    @property
    def parts(self) -> Sequence[Loaded]:
        """The programs, in the order in which they run."""
        return [self.loaded]

    @property
    def takes(self) -> Mapping[str, Iterable[str]]:
        """The inputs that callers give, states among them, by function; that of a pipeline has no name."""
        return {name: function.inputs for name, function in self.program.functions.items()}

    @property
    def runnable(self) -> Any:
        """What a `Predictor` takes."""
        return self.loaded

    @property
    def source(self) -> Path | None:
        """The package."""
        return self.loaded.source

    def check_source(self) -> None:
        """The weights are read from their files when they are needed."""
        for part in self.parts:
            part.check_source()

    @property
    def graphs(self) -> Sequence[Program]:
        """The programs with all their functions, in the order in which they run."""
        return [part.program for part in self.parts]

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
        """Number of ops by type in all programs, constants left out."""
        return counted(op.op_type for graph in self.graphs for op in _counting(graph))

    def check_inputs(self, values: Any) -> None:
        """Of one function, by what the description of the model allows; a state may be among them."""
        super().check_inputs(values)
        if len(self.parts) == 1 and not self.wired and len(self.program.functions) == 1:
            (function,) = self.program.functions.values()
            states = {name for name, var in function.inputs.items() if types.is_state(var.sym_type)}
            bound(self.loaded, {name: value for name, value in values.items() if name not in states})

    @property
    def was_layers(self) -> bool:  # type: ignore[override]
        """Was it made of a neural network?"""
        return self.layers is not None

    def standing(self, target: Target) -> Standing:
        """How the model stands by the inspection of all functions of all programs."""
        return Standing.of([one for part in self.parts for one in placed(part, target)])

    def as_given(self, target: Target) -> Standing:
        """By the layers of the network, where it was one."""
        layers = inspect_other(self.layers, target, inspect_program) if self.was_layers else None
        return self.standing(target) if layers is None else Standing.of_layers(layers)

    def advised(self, target: Target) -> list[Inspection]:
        """The inspection of each function of all programs, with advice."""
        return [one for part in self.parts for one in placed(part, target, advice=True)]

    def time(self, target: str | None) -> Time | None:
        """That of one prediction with each function; a target of several generations asks for no inspection."""
        aim = Target.parse(target)
        if len(aim.families) != 1:
            return None
        return total_of([one.time for part in self.parts for one in placed(part, aim)])

    def spec_of(self, graph: Program) -> Any:
        """That of the program's own model."""
        return next(part.spec for part in self.parts if part.program is graph)

    def declared_in(self, graph: Program) -> Declared:
        """Those of the inputs in the specification of the program's own model."""
        return declared_lengths(graph, self.spec_of(graph))

    def notes(self, before: Self) -> list[str]:
        """What changed when a neural network became a program, and what that means for the ANE."""
        slow = self.layers is not None and not _computes_in_half(self.loaded.program)
        return [*self.loaded.notes, *([FROM_NETWORK] if slow else [])]

    def worse_than_layers(self, target: Target) -> str:
        """Which share on the ANE, or which time, is worse than that of the layers."""
        layers = inspect_other(self.layers, target, inspect_program) if self.was_layers else None
        if layers is None:
            return ""
        upgraded, stood = Standing.of_upgraded(self.loaded, target), Standing.of_layers(layers)
        less = upgraded.can_run_less(stood) or upgraded.shown_less(stood)
        if not less and upgraded.expected.times(stood.expected) is not None and upgraded.slower(stood):
            less = f"the {upgraded.takes(stood, ' would rise')}"
        return less and (
            f"{less} in the ML Program that these steps make of this neural network: apply them to what "
            "anesurgery.upgrade gives, or neuralnetwork_ane to its layers"
        )

    def compare(
        self, before: Self, inputs: Mapping[str, Array] | None, how: Comparing
    ) -> list[Comparison | Refusal]:
        """Both in the arithmetic as stored, against the gate of the recipe."""
        return [compare_as_stored(before.loaded, self.loaded, inputs, **how.options())]

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


def _layers(model: Any, loaded: Loaded) -> Any:
    """What holds the layers of which a program was made, for `inspect`: a path or an MLModel; else None."""
    if isinstance(model, ct.models.MLModel) and model.package_path is None:
        return model if model.get_spec().WhichOneof("Type") in NETWORKS else None
    source = loaded.source
    return source if source is not None and source.suffix == ".mlmodel" and loaded.weights is None else None


def _computes_in_half(program: Program) -> bool:
    """Does any op of it compute in fp16?"""
    ops = (op for op in walk_ops(program) if op.op_type not in ("const", "cast"))
    return any(dtype_name(v) == "fp16" for op in ops for v in op.outputs)


class ProgramSequence(MLProgram):
    """The ML Programs of a pipeline, or those of a chain."""

    def __init__(self, models: ModelSequence, given: Interface | None = None) -> None:
        self.models = models
        self.given = given or models.interface
        self.layers = None

    @property
    def wired(self) -> bool:
        """Each member reads what others make."""
        return True

    def clone(self) -> Self:
        """Programs of their own; weights are shared."""
        return type(self)(self.models.copy(clone), self.given).only(self.member)

    @property
    def source(self) -> Path | None:
        """The package, the folder of chunks, or the model that was cut."""
        return self.models.source

    @property
    def parts(self) -> Sequence[Loaded]:
        """The ML Programs among the models."""
        return list(self.models.loaded.values())

    @property
    def takes(self) -> Mapping[str, Iterable[str]]:
        """What callers of the whole give."""
        return {name: ends.inputs for name, ends in self.models.ends.items()}

    @property
    def runnable(self) -> Any:
        """The models as they are, where all are programs; else all in a temporary package."""
        return self.mlmodel() if None in self.members.values() else self.models

    @property
    def members(self) -> Mapping[str, Program | None]:
        """The models by name; those that are no programs stay."""
        programs = self.models.loaded
        return {n: programs[n].program if n in programs else None for n, _ in members(self.spec)}

    def finish(self) -> None:
        """See that each member still takes and gives what its neighbours count on.

        Raises:
            InterfaceError: a pass changed it on purpose.
        """
        if difference := self.given.difference(self.interface):
            raise InterfaceError(
                f"the models of a pipeline depend on each other, so their interfaces must stay: {difference}; "
                "leave that pass out"
            )

    @property
    def interface(self) -> Interface:
        """That of the pipeline, and the signatures of the programs in it."""
        return self.models.interface

    def notes(self, before: MLProgram) -> list[str]:
        """Which members of a pipeline are edited; chunks are of one model."""
        if isinstance(self.models, Chain):
            return []
        held = [n for n, program in self.members.items() if any(program is g for g in self.chosen)]
        others = [n for n in self.members if n not in held]
        stay = f"; {', '.join(others)} {'stays' if len(others) == 1 else 'stay'} unchanged" if others else ""
        return [f"of the pipeline, the ML Programs are operated on: {', '.join(held)}{stay}"]

    def compare(
        self, before: MLProgram, inputs: Mapping[str, Array] | None, how: Comparing
    ) -> list[Comparison | Refusal]:
        """Each program with what it was, as stored; inputs that are given go to the one that takes them."""
        assert isinstance(before, ProgramSequence)
        pairs = zip(before.parts, self.parts, strict=True)
        options = how.options(contract=(), prove=how.prove)  # no pass changes an interface between members
        return [self._compared(old, new, inputs, **options) for old, new in pairs]

    @staticmethod
    def _compared(old: Loaded, new: Loaded, inputs: Mapping[str, Array] | None, **how: Any) -> Comparison:
        wanted = {name for f in old.program.functions.values() for name in f.inputs}
        fitting = inputs if inputs is not None and set(inputs) == wanted else None
        return compare_as_stored(old, new, fitting, **how)

    @property
    def program(self) -> Program:
        """The program, where there is only one.

        Raises:
            IsPipeline: there are several.
        """
        if len(self.graphs) > 1:
            names = ", ".join(self.models.loaded)
            raise IsPipeline(f"it has several programs ({names}); `subject.graphs` lists them")
        return self.graphs[0]

    @property
    def spec(self) -> Any:
        """The specification as given."""
        return self.models.spec

    def mlmodel(self) -> Any:
        """An MLModel in a temporary package."""
        return self.models.mlmodel()

    def save(self, path: Path, *, overwrite: bool, edited: bool) -> Path:
        """Write the package; of a chain also a folder of chunks."""
        return self.models.save(path, overwrite=overwrite)


def op_counts(program: Program) -> dict[str, int]:
    """Number of ops by type, constants left out, the most frequent first."""
    return counted(op.op_type for op in _counting(program))


def _counting(program: Program) -> list[Operation]:
    """The ops that count: constants do not."""
    return [op for op in walk_ops(program) if op.op_type != "const"]
