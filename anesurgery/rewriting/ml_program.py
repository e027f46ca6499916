"""What passes operate on: a model of one format, and the ML Program or pipeline of them that is one.

`anesurgery.apply` knows the protocol `Subject` only. `MLProgram` and `NeuralNetwork` fulfil it, and each pass
names the one that it edits.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from anesurgery import registry
from anesurgery.checking.comparison import Comparison, compare_as_stored
from anesurgery.errors import InterfaceError, IsPipeline, Refusal, SurgeryError, UnknownName
from anesurgery.files.interface import Interface, InterfaceChange, call_of, warn_of_names
from anesurgery.files.package import Loaded, save, to_mlmodel
from anesurgery.files.sequence import (
    Chain,
    ModelSequence,
    check_folder,
    is_chunked,
    is_network,
    members,
    read_pipeline,
)
from anesurgery.files.writing import check_target
from anesurgery.interpret.features import check_names
from anesurgery.interpret.predictor import bound
from anesurgery.loading import clone, interface, load, load_chain
from anesurgery.mil import Array, Operation, Program, ct, dtype_name, types, walk_ops
from anesurgery.neuralnetwork.spec import NETWORKS
from anesurgery.placement.durations import Time, total_of
from anesurgery.placement.evidence import Finding, Rule
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.models import inspect_other
from anesurgery.placement.score import WOULD_RISE, Score, placed
from anesurgery.placement.target import Target
from anesurgery.placement.verdicts import found_by
from anesurgery.rewriting.session import Graph as Graph

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Comparing:
    """How two models are compared as a whole."""

    contract: Sequence[InterfaceChange]
    """Declared interface changes."""
    gate: float
    """PSNR in dB that the recipe promises in fp16; minus infinity only measures."""
    exact: bool
    """Did only passes edit that promise equal bits?"""
    prove: bool
    """Are they proved op by op too, and tried on adversarial inputs?"""
    assume: Mapping[str, tuple[int, int]]
    """Input -> the least and the largest value that the caller will give."""
    seed: int
    """The seed of the sampled inputs."""

    def options(self, **others: Any) -> dict[str, Any]:
        """Return the options of `compare`, and others; there is no proof if a call became several."""
        prove = self.prove and call_of(self.contract) is None
        own = {"contract": self.contract, "gate": self.gate, "seed": self.seed, "assume": self.assume}
        return {**own, "prove": prove, **others}


class Subject(ABC):
    """A model of one format, as passes edit it."""

    words: ClassVar[str]
    """What its passes edit: "the ops of an ML Program"."""
    suffix: ClassVar[str]
    """The suffix of the file that `save` writes."""
    converts: ClassVar[bool] = False
    """Can its passes run inside `ct.convert` too?"""
    shares_weights: ClassVar[bool] = True
    """Does a copy share the weights, so that it costs next to nothing?"""
    was_network: bool = False
    """Was it made of the layers of a neural network?"""
    member: str | int | None = None
    """The model of a pipeline that is edited, by name or number; None for all."""

    @property
    def file_bytes(self) -> int | None:
        """The bytes of the file that the model makes; None where its score knows the weights."""
        return None

    @classmethod
    @abstractmethod
    def read(cls, model: Any) -> Self:
        """Return a model as the user gives it. It may share memory with what was given, so clone it first.

        Raises:
            LoadError: it cannot be read.
            SurgeryError: it is of another format.
        """

    @abstractmethod
    def clone(self) -> Self:
        """Return a copy that can be edited without touching the original."""

    @property
    @abstractmethod
    def source(self) -> Path | None:
        """The file or package that it was read from; it is never written to."""

    @abstractmethod
    def check_source(self) -> None:
        """Raise a LoadError if the source was changed since, and is still read from."""

    @property
    @abstractmethod
    def graphs(self) -> Sequence[Graph]:
        """What passes edit in place, one after the other."""

    @property
    def members(self) -> Mapping[str, Graph | None]:
        """The models of a pipeline by name, None for those that stay; {} where it is no pipeline."""
        return {}

    @property
    def chosen(self) -> Sequence[Graph]:
        """The graphs that are edited: all, or that of the member."""
        if self.member is None:
            return self.graphs
        members, name = self.members, str(self.member)
        if not members:
            raise SurgeryError(f"{self.source or 'the model'} is not a pipeline; leave member={name!r} out")
        if name not in members and name.isdigit() and int(name) < len(members):
            name = list(members)[int(name)]
        if (graph := members.get(name)) is None:
            raise UnknownName("member", name, [n for n, each in members.items() if each is not None])
        return [graph]

    def only(self, member: str | int | None) -> Self:
        """Restrict edits to one model of the pipeline, None for all, and return itself.

        Raises:
            SurgeryError: it is not a pipeline.
            UnknownName: no model of that name can be edited.
        """
        self.member = member
        _ = self.chosen  # raises if there is no such member
        return self

    @staticmethod
    @abstractmethod
    def validate(graph: Graph) -> None:
        """Raise any error if a pass left a graph that is not valid."""

    @property
    def broken_links(self) -> str:
        """What the models of a pipeline no longer agree on after the edits, in words; "" for nothing."""
        return ""

    @abstractmethod
    def finish(self) -> None:
        """Write the edits of the graphs into what is saved; called once, after all passes."""

    @property
    @abstractmethod
    def interface(self) -> Interface:
        """What a caller of the saved model will see."""

    @property
    @abstractmethod
    def op_counts(self) -> dict[str, int]:
        """Number of ops or layers by type, constants left out, the most frequent first."""

    def spec_of(self, graph: Graph) -> Any:
        """Return the specification that describes the inputs of one of its graphs; None where there is none."""
        return None

    @property
    def wired(self) -> bool:
        """Do other models depend on the interfaces of its graphs, which then must stay?"""
        return False

    def inspect(self, target: str | None) -> tuple[Inspection, ...]:
        """Return the inspections of its graphs, where they cost next to nothing; else ()."""
        return ()

    def check_inputs(self, values: Any) -> None:
        """Refuse inputs that it does not take, as far as its format tells.

        Raises:
            InterpretError: they are no dictionary, or have another shape.
            UnknownName: no such input.
        """
        check_names(values if isinstance(values, Mapping) else (), values)

    def score(self, target: Target) -> Score | None:
        """Its score on a target, findings left out; None where there is none."""
        return None

    def as_given(self, target: Target) -> Score | None:
        """Return the score of the file that it was made of, in its own format."""
        return self.score(target)

    def advised(self, target: Target) -> list[Inspection]:
        """Return the inspection of each of its functions, with every finding and the pass that each names."""
        return list(self.inspect(str(target)))

    def found_by(self, rules: Sequence[Rule], target: Target) -> list[Finding]:
        """Return the findings of some rules only."""
        ids = {rule.id for rule in rules}
        return [f for part in self.advised(target) for f in part.all_findings if f.rule in ids]

    def advised_as_given(self, target: Target) -> list[Inspection]:
        """Return the inspections of the file that it was made of, in its own format."""
        return self.advised(target)

    def time(self, target: str | None) -> Time | None:
        """Return the estimated time on the chip that a target names; None where there is none."""
        return None

    def worse_than_layers(self, target: Target) -> str:
        """Return why its layers should have stayed a neural network; "" where it was none, or gains."""
        return ""

    def notes(self, before: Self) -> list[str]:
        """Return what the caller should know of the result, given the model before."""
        return []

    @abstractmethod
    def compare(
        self, before: Self, inputs: Mapping[str, Array] | None, how: Comparing
    ) -> Sequence[Comparison | Refusal]:
        """Return the numbers of each graph as a whole against those before, or why they cannot be compared.

        Args:
            before: the model as given.
            inputs: sampled by default.
            how: what is promised, and how it is shown.
        """

    @property
    @abstractmethod
    def program(self) -> Program:
        """The model as a MIL program."""

    @property
    @abstractmethod
    def spec(self) -> Any:
        """The specification that the model came with or has now; None for a bare program."""

    @abstractmethod
    def mlmodel(self) -> Any:
        """Return a coremltools MLModel of the same format, made anew."""

    @abstractmethod
    def save(self, path: Path, *, overwrite: bool, edited: bool) -> Path:
        """Write the model atomically, never over what was read.

        Args:
            path: ends in `suffix`.
            overwrite: may something that exists be replaced?
            edited: was anything changed? If not, the file that was read may be copied.

        Raises:
            LoadError: the path exists, is the input, has another suffix, or cannot be written.
        """


def count_kinds(kinds: Iterable[str]) -> dict[str, int]:
    """Return how often each kind occurs, the most frequent first."""
    return dict(sorted(Counter(kinds).items(), key=lambda item: (-item[1], item[0])))


def layers_off_ane(before: Sequence[Inspection], after: Sequence[Inspection]) -> Iterator[str]:
    """Yield a note on how many layers the rules keep off the ANE before and after, where any were inspected."""
    rows = [[row for part in inspections for row in part.ops] for inspections in (before, after)]
    if any(rows):
        words = [f"{sum(row.legal is False for row in some)} of {len(some)}" for some in rows]
        yield f"layers that the rules of the format keep off the ANE: {' -> '.join(words)}"


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
        """Return a package, MLModel or MIL program; a neural network is made into a program.

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
        """Return a program of its own; weights are shared."""
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
        """The package that it was read from."""
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
        return count_kinds(op.op_type for graph in self.graphs for op in _without_constants(graph))

    def check_inputs(self, values: Any) -> None:
        """Check inputs of a single function by the description of the model; a state may be among them."""
        super().check_inputs(values)
        if len(self.parts) == 1 and not self.wired and len(self.program.functions) == 1:
            (function,) = self.program.functions.values()
            states = {name for name, var in function.inputs.items() if types.is_state(var.sym_type)}
            bound(self.loaded, {name: value for name, value in values.items() if name not in states})

    @property
    def was_network(self) -> bool:  # type: ignore[override]
        """Was it made of a neural network?"""
        return self.layers is not None

    def score(self, target: Target) -> Score:
        """Score all functions of all programs by their inspections."""
        return Score.of([one for part in self.parts for one in placed(part, target)])

    def as_given(self, target: Target) -> Score:
        """Score the layers of the network, if it was one."""
        layers = self._layers_inspected(target)
        return self.score(target) if layers is None else Score.of_layers(layers)

    def advised_as_given(self, target: Target) -> list[Inspection]:
        """Inspect the layers of the network, if it was one."""
        layers = self._layers_inspected(target)
        return self.advised(target) if layers is None else [layers]

    def _layers_inspected(self, target: Target) -> Inspection | None:
        return inspect_other(self.layers, target, inspect_program) if self.was_network else None

    def advised(self, target: Target) -> list[Inspection]:
        """Return the inspection of each function of all programs, with advice."""
        return [inspection for part in self.parts for inspection in placed(part, target, advice=True)]

    def found_by(self, rules: Sequence[Rule], target: Target) -> list[Finding]:
        """Ask these rules alone: others may read all weights."""
        return [f for part in self.parts for f in found_by(part, target, rules)]

    def time(self, target: str | None) -> Time | None:
        """Return the time of one prediction with each function; None for a target of several generations."""
        device = Target.parse(target)
        if len(device.families) != 1:
            return None
        return total_of([one.time for part in self.parts for one in placed(part, device)])

    def spec_of(self, graph: Program) -> Any:
        """Return the specification of the model that has the program."""
        return next(part.spec for part in self.parts if part.program is graph)

    def notes(self, before: Self) -> list[str]:
        """Return what changed when a neural network became a program, and what that means for the ANE."""
        is_fp32 = self.was_network and not _computes_in_fp16(self.loaded.program)
        return [*self.loaded.notes, *([FROM_NETWORK] if is_fp32 else [])]

    def worse_than_layers(self, target: Target) -> str:
        """Return which share on the ANE, or which time, is worse than that of the layers."""
        layers = self._layers_inspected(target)
        if layers is None:
            return ""
        upgraded, before = Score.of_upgraded(self.loaded, target), Score.of_layers(layers)
        loss = upgraded.loss(before, ("can run", "shown"))
        has_times = upgraded.expected.times(before.expected) is not None
        if not loss and has_times and upgraded.over(before).slower:
            loss = f"the {upgraded.takes(before, WOULD_RISE)}"
        return loss and (
            f"{loss} in the ML Program that these steps make of this neural network: apply them to what "
            "anesurgery.upgrade gives, or neuralnetwork_ane to its layers"
        )

    def compare(
        self, before: Self, inputs: Mapping[str, Array] | None, how: Comparing
    ) -> list[Comparison | Refusal]:
        """Compare both models in the arithmetic as stored, against the gate of the recipe."""
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
        """Return an MLModel in a temporary package."""
        return to_mlmodel(self.loaded)

    def save(self, path: Path, *, overwrite: bool, edited: bool) -> Path:
        """Write the package, or the model of another format that the suffix names."""
        if (write := registry.writer_of(path)) is not None:
            return Path(write(self.loaded, path, overwrite=overwrite).path)
        return save(self.loaded, path, overwrite=overwrite)


def _layers(model: Any, loaded: Loaded) -> Any:
    """Return the neural network that a program was made of, as a path or MLModel; None where it was none."""
    if isinstance(model, ct.models.MLModel) and model.package_path is None:
        return model if model.get_spec().WhichOneof("Type") in NETWORKS else None
    source = loaded.source
    return source if source is not None and source.suffix == ".mlmodel" and loaded.weights is None else None


def _computes_in_fp16(program: Program) -> bool:
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
        if broken := self.broken_links:
            raise InterfaceError(f"{broken}; leave that pass out")

    @property
    def broken_links(self) -> str:
        """How an interface of a member differs from before, since its neighbours count on it."""
        difference = self.given.difference(self.interface)
        because = "the models of a pipeline depend on each other, so their interfaces must stay"
        return f"{because}: {difference}" if difference else ""

    @property
    def interface(self) -> Interface:
        """The interface of the pipeline, and the signatures of the programs in it."""
        return self.models.interface

    def notes(self, before: MLProgram) -> list[str]:
        """Return which members of a pipeline are edited; chunks are of one model."""
        if isinstance(self.models, Chain):
            return []
        edited = [n for n, program in self.members.items() if any(program is g for g in self.chosen)]
        others = [n for n in self.members if n not in edited]
        stay = f"; {', '.join(others)} {'stays' if len(others) == 1 else 'stay'} unchanged" if others else ""
        return [f"of the pipeline, the ML Programs are operated on: {', '.join(edited)}{stay}"]

    def compare(
        self, before: MLProgram, inputs: Mapping[str, Array] | None, how: Comparing
    ) -> list[Comparison | Refusal]:
        """Compare each program with itself before, as stored; inputs go to the program that takes them."""
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
        """Return an MLModel in a temporary package."""
        return self.models.mlmodel()

    def save(self, path: Path, *, overwrite: bool, edited: bool) -> Path:
        """Write the package; of a chain also a folder of chunks."""
        return self.models.save(path, overwrite=overwrite)


def op_counts(program: Program) -> dict[str, int]:
    """Return number of ops by type, constants left out, the most frequent first."""
    return count_kinds(op.op_type for op in _without_constants(program))


def _without_constants(program: Program) -> list[Operation]:
    return [op for op in walk_ops(program) if op.op_type != "const"]


def read_chunks(model: Any) -> ProgramSequence:
    """Return the chunks of a chain, or of the folder that it is in.

    Raises:
        SurgeryError: one of them is a neural network.
    """
    chain = model if isinstance(model, Chain) else load_chain(model)
    for number, chunk in enumerate(chain.chunks, 1):
        if is_network(chunk):
            raise SurgeryError(
                f"chunk {number} is a neural network; make an ML Program of the model by "
                "anesurgery.upgrade, and cut that"
            )
    return ProgramSequence(chain)


def check_out(
    model: str | os.PathLike[str], place: Path, overwrite: bool, suffix: str = MLProgram.suffix
) -> None:
    """Refuse a place that the result cannot be written to, before any work is done.

    Raises:
        LoadError: it may not; chunks go into a folder, or as a pipeline into a package.
    """
    source, target = Path(model).expanduser(), place.expanduser().absolute()
    if is_chunked(source) and not target.suffix:
        check_folder(source, target, overwrite)
    else:
        is_other_format = suffix == MLProgram.suffix and target.suffix in registry.WRITERS
        check_target(source, target, overwrite, target.suffix if is_other_format else suffix)


def read_subject(model: Any, kind: type[Subject] = MLProgram) -> Any:
    """Read a model for the passes of one format; a subject is returned as it is, chunks become one sequence."""
    if isinstance(model, Subject):
        return model
    return read_chunks(model) if kind is MLProgram and is_chunked(model) else kind.read(model)
