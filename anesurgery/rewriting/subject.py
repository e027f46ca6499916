"""What passes operate on: a model of one format, read, cloned, edited, compared and saved.

`anesurgery.apply` knows this protocol only. `MLProgram` and `NeuralNetwork` fulfil it, and each pass names the
one that it edits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from anesurgery.checking.comparison import Comparison
from anesurgery.checking.lengths import NOTHING, Declared
from anesurgery.errors import Refusal, SurgeryError, UnknownName
from anesurgery.files.interface import Interface, InterfaceChange, call_of
from anesurgery.interpret.features import check_names
from anesurgery.mil import Array, Program
from anesurgery.placement.durations import Time
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.standing import Standing
from anesurgery.placement.target import Target

if TYPE_CHECKING:
    from typing_extensions import Self

Graph: TypeAlias = Any
"""What `Pass.run` edits in place: a MIL `Program`, or a `Network` of layers."""


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
    """Of the sampled inputs."""

    def options(self, **others: Any) -> dict[str, Any]:
        """Those of `compare`, and others; no proof follows a call that became several."""
        prove = self.prove and call_of(self.contract) is None
        own = {"contract": self.contract, "gate": self.gate, "seed": self.seed, "assume": self.assume}
        return {**own, "prove": prove, **others}


class Subject(ABC):
    """A model of one format, as passes edit it."""

    words: ClassVar[str]
    """What its passes edit: "the ops of an ML Program"."""
    suffix: ClassVar[str]
    """Of the file that `save` writes."""
    converts: ClassVar[bool] = False
    """Can its passes run inside `ct.convert` too?"""
    member: str | int | None = None
    """Of a pipeline, the one model that is edited, by name or number; None for all."""

    @classmethod
    @abstractmethod
    def read(cls, model: Any) -> Self:
        """A model as the user gives it; it may share memory with what was given, so clone it before editing.

        Raises:
            LoadError: it cannot be read.
            SurgeryError: it is of another format.
        """

    @abstractmethod
    def clone(self) -> Self:
        """A copy that can be edited without touching the original."""

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
        held, wanted = self.members, str(self.member)
        if not held:
            raise SurgeryError(f"{self.source or 'the model'} is not a pipeline; leave member={wanted!r} out")
        if wanted not in held and wanted.isdigit() and int(wanted) < len(held):
            wanted = list(held)[int(wanted)]
        if (graph := held.get(wanted)) is None:
            raise UnknownName("member", wanted, [name for name, one in held.items() if one is not None])
        return [graph]

    def only(self, member: str | int | None) -> Self:
        """Itself, of which one model of the pipeline is edited.

        Raises:
            SurgeryError: it is not a pipeline.
            UnknownName: no model of that name can be edited.
        """
        self.member = member
        assert self.chosen is not None
        return self

    @staticmethod
    @abstractmethod
    def validate(graph: Graph) -> None:
        """Raise any error if a pass left a graph that is not valid."""

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
        """The specification that describes the inputs of one of its graphs; None where there is none."""
        return None

    def declared_in(self, graph: Graph) -> Declared:
        """The lengths that are declared for the dynamic axes of one of its graphs."""
        return NOTHING

    @property
    def wired(self) -> bool:
        """Do other models depend on the interfaces of its graphs, which then must stay?"""
        return False

    def inspect(self, target: str | None) -> tuple[Inspection, ...]:
        """The inspections of its graphs, where they cost next to nothing; else ()."""
        return ()

    shares_weights: ClassVar[bool] = True
    """Does a copy share the weights, so that it costs next to nothing?"""

    def check_inputs(self, values: Any) -> None:
        """Refuse inputs that it does not take, as far as its format tells.

        Raises:
            InterpretError: they are no dictionary, or have another shape.
            UnknownName: no such input.
        """
        check_names(values if isinstance(values, Mapping) else (), values)

    was_layers: bool = False
    """Was it made of the layers of a neural network?"""

    def standing(self, target: Target) -> Standing | None:
        """How it stands on a target, findings left out; None where that is not estimated."""
        return None

    def as_given(self, target: Target) -> Standing | None:
        """How the file stands that it was made of, in its own format."""
        return self.standing(target)

    def advised(self, target: Target) -> list[Inspection]:
        """The inspection of each of its functions, with every finding."""
        return list(self.inspect(str(target)))

    def time(self, target: str | None) -> Time | None:
        """The estimated time on the chip that a target names; None where there is none."""
        return None

    def worse_than_layers(self, target: Target) -> str:
        """Why it should have stayed a neural network, in words; "" where it was none, or gains."""
        return ""

    def notes(self, before: Self) -> list[str]:
        """What the caller should know of the result, given the model before."""
        return []

    @abstractmethod
    def compare(
        self, before: Self, inputs: Mapping[str, Array] | None, how: Comparing
    ) -> Sequence[Comparison | Refusal]:
        """The numbers of each graph as a whole against those before, or why they cannot be compared.

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
        """A coremltools MLModel of the same format, made anew."""

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


def counted(kinds: Iterable[str]) -> dict[str, int]:
    """How often each kind occurs, the most frequent first."""
    return dict(sorted(Counter(kinds).items(), key=lambda item: (-item[1], item[0])))


def kept_off(before: Sequence[Inspection], after: Sequence[Inspection]) -> Iterator[str]:
    """How many layers the rules of the format forbid, where they were inspected."""
    rows = [[row for part in inspections for row in part.ops] for inspections in (before, after)]
    if any(rows):
        words = [f"{sum(row.legal is False for row in some)} of {len(some)}" for some in rows]
        yield f"layers that the rules of the format keep off the ANE: {' -> '.join(words)}"
