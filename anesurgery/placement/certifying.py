"""`certify`: the error of every op in fp16 and in the engine's arithmetic, what it grows to, and a verdict.

The model runs exactly and in each arithmetic at once, op by op (`interpret.abreast`): freely, so that errors
grow, and of right operands, so that what is left at an op is its own. An error is that of one set of inputs;
`search` looks for worse ones between the least and the largest number of each input.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.checking.metrics import OutputComparison, compare_arrays
from anesurgery.display import Drawn, drawn, finite
from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.facts.logits import logits_of
from anesurgery.files import arrays
from anesurgery.files.package import Loaded
from anesurgery.interpret import Predictor
from anesurgery.interpret.abreast import Abreast
from anesurgery.interpret.arithmetic.properties import CHIPS
from anesurgery.interpret.predictor import bound
from anesurgery.loading import load
from anesurgery.mil import Array, Program, function_of
from anesurgery.placement.inspector import inspect_program
from anesurgery.placement.op_errors import OpError, op_error
from anesurgery.placement.target import Target
from anesurgery.placement.worst_inputs import Peaks, described, ranges_of, ways
from anesurgery.semantics.constant_ends import LARGEST

Values = Mapping[str, Array]
GATE = 40.0
"""PSNR in dB: an error of a hundredth of the largest value."""
MARGIN = 4.0
"""A value this near to the end of fp16 is at risk: other inputs may be so many times as large."""


@dataclass(frozen=True)
class Certificate(Drawn):
    """What `certify` found.

    Attributes:
        rows: a row for each op with floats, in file order.
        outputs: arithmetic -> how near each output is, of the worst inputs tried.
        verdict: "holds", "at risk" or "fails".
        why: the op and the inputs on which the verdict rests, in words.
        samples: sets of inputs that were given or drawn.
        searched: sets that were tried beyond them; none where one of those fails already.
        gate: PSNR in dB that every output must reach.
        worst_inputs: the inputs that miss the gate, or else with the lowest PSNR of an output, as the program
            reads them.
    """

    rows: tuple[OpError, ...]
    outputs: Mapping[str, tuple[OutputComparison, ...]]
    verdict: str
    why: str
    samples: int
    searched: int
    gate: float
    worst_inputs: Values = field(repr=False, default_factory=dict)

    @property
    def ok(self) -> bool:
        """Does it hold?"""
        return self.verdict == "holds"

    @property
    def enters(self) -> tuple[OpError, ...]:
        """The ops by the error that they add themselves, the largest first."""
        return tuple(sorted(self.rows, key=lambda row: row.worst))

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the ops with their data flow, coloured by error, as one HTML file that needs no network.

        Args:
            path: of the file; an existing one is replaced.

        Returns:
            The path as written.

        Raises:
            SurgeryError: it cannot be written.
        """
        return arrays.write_text(Path(path).expanduser(), drawn(self, "page"))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [
            vars(r)
            | {"own": finite(r.own), "grown": finite(r.grown), "histogram": r.histogram and vars(r.histogram)}
            for r in self.rows
        ]
        outputs = {a: [finite(vars(o)) for o in compared] for a, compared in self.outputs.items()}
        return {
            "verdict": self.verdict,
            "why": self.why,
            "gate_db": self.gate,
            "samples": self.samples,
            "searched": self.searched,
            "outputs": outputs,
            "ops": rows,
        }


@door("inputs", "seed")
def certify(
    model: Any,
    inputs: Values | Iterable[Values] | None = None,
    *,
    target: str | None = None,
    function: str | None = None,
    gate: float = GATE,
    search: int = 0,
    seed: int = 0,
) -> Certificate:
    """Say whether a model keeps its numbers in fp16 and on the engine, op by op.

    Args:
        model: path, MLModel or MIL program.
        inputs: one set of inputs by name, or several; one sampled set when absent.
        target: chip and OS, as "M1/macOS 14", whose arithmetic is taken, and whose rules name the repairs.
        function: which function; `main` or the first by default.
        gate: PSNR in dB that every output must reach, against exact arithmetic.
        search: how many more sets of inputs to try, within the range of the numbers of each input: by the
            gradients of the largest values and of the error where there are floats, and by random changes.
            Nothing is searched where inputs fail that were given.
        seed: of the sampled inputs and of the search.

    Returns:
        The errors of each op, of the outputs, and a verdict: "fails" where a given or drawn set of inputs
        misses the gate; "at risk" where only the search found such a set, or a value comes near the end of
        fp16.

    Raises:
        InterpretError: inputs that do not fit.
        SurgeryError: an empty list of inputs.
    """
    loaded = load(model)
    engine = arithmetic_of(target)
    first = Predictor(loaded, function=function)
    samples = (
        [first.sample(seed)] if inputs is None else [inputs] if isinstance(inputs, Mapping) else list(inputs)
    )
    if not samples:
        raise SurgeryError("certify: the list of inputs is empty; give at least one set")
    trial = _Trial(loaded, function, ("fp16", engine), gate)
    samples = [bound(loaded, v, function) for v in samples]
    one = len(samples) == 1 and not search
    worst = _Tried(samples[0]) if one else min(map(trial.judged, samples), key=_Tried.badness)
    walk = _Walk(trial, loaded.program, function, samples, worst)
    if search and not worst.misses:
        worst = walk.worst_of(search, np.random.default_rng(seed))
    rows, outputs = trial.rows(worst.values, _findings(loaded, function, target))
    verdict, why = _verdict(rows, outputs, trial.misses(outputs), worst.described, gate)
    return Certificate(rows, outputs, verdict, why, len(samples), walk.tried, gate, worst.values)


def arithmetic_of(target: str | None) -> str:
    """The arithmetic of the engine of a target, as far as one is known of its chip: "ane:M1", else "ane"."""
    chips = [chip for chip in Target.parse(target).chips if chip in CHIPS] if target else []
    return f"ane:{chips[0]}" if len(chips) == 1 else "ane"


def _findings(loaded: Loaded, function: str | None, target: str | None) -> dict[str, tuple[Any, ...]]:
    """The numeric findings of `inspect`, by op."""
    inspection = inspect_program(loaded, Target.parse(target), function=function)
    return {row.name: tuple(f for f in row.findings if f.kind == "numeric") for row in inspection.ops}


@dataclass(frozen=True)
class _Tried:
    """A set of inputs, and what came of it.

    Attributes:
        values: the inputs.
        misses: the outputs that miss the gate, in words.
        psnr: the lowest of an output; minus infinite where one is not finite on one side only.
        headroom: dB that its values leave below the end of fp16.
        described: how the search came to it, and what it holds; empty if it was given or drawn.
    """

    values: Values
    misses: Sequence[str] = ()
    psnr: float = math.inf
    headroom: float = math.inf
    described: str = ""

    def badness(self) -> tuple[bool, float]:
        """Orders sets of inputs: the least is the worst."""
        return not self.misses, self.psnr

    def distance(self, gate: float) -> float:
        """How many dB are missing to a failure, by what is nearest to one."""
        return min(self.psnr - gate, self.headroom)


class _Walk:
    """The search for worse inputs, from the worst of those that were given."""

    def __init__(
        self, trial: _Trial, program: Program, function: str | None, samples: Sequence[Values], first: _Tried
    ) -> None:
        self._trial, self._program, self._function = trial, program, function
        self._ranges, self._worst, self._nearest = ranges_of(samples), first, first
        self.tried = 0

    def worst_of(self, rounds: int, rng: np.random.Generator) -> _Tried:
        """The worst inputs after some tries, each way in turn; a way that torch cannot go is left."""
        left = ways(self._program, self._function, self._worst.values, self._ranges) if self._ranges else []
        while left and self.tried < rounds:
            way = left.pop(0)
            if way.uphill is None:
                way.point = self._nearest.values
            try:
                values = way.next(self._ranges, rng)
            except RuntimeError:
                continue
            left.append(way)
            self.tried += 1
            tried = self._trial.judged(values)
            if tried.badness() < self._worst.badness():
                self._worst = replace(tried, described=f"by {way.name}; {described(values, self._ranges)}")
            if tried.distance(self._trial.gate) < self._nearest.distance(self._trial.gate):
                self._nearest = tried
        return self._worst


def _near(output: OutputComparison) -> float:
    return -math.inf if output.bad or math.isnan(output.psnr) else output.psnr


class _Trial:
    """One model in several arithmetics."""

    def __init__(self, loaded: Loaded, function: str | None, arithmetics: Sequence[str], gate: float) -> None:
        self._all = Abreast(loaded.program, function, arithmetics)
        self._chosen, self.gate = logits_of(function_of(loaded.program, function)), gate

    def judged(self, values: Values) -> _Tried:
        """A set of inputs, with how near the outputs are, without a look at each op."""
        peaks = Peaks()
        exact = self._all.exact(values, listener=peaks)
        outputs = {a: _compared(exact, other(values)) for a, other in self._all.others.items()}
        psnr = min((_near(o) for compared in outputs.values() for o in compared), default=math.inf)
        return _Tried(values, self.misses(outputs), psnr, peaks.headroom)

    def misses(self, outputs: Mapping[str, Sequence[OutputComparison]]) -> list[str]:
        """The outputs that are too far, or of which another class or token is the best, in words."""
        words = []
        for arithmetic, compared in outputs.items():
            for o in compared:
                if _near(o) < self.gate:
                    far = "is not finite" if _near(o) == -math.inf else f"reaches {o.psnr:.1f} dB"
                    words.append(f"{o.name} {far} in {arithmetic}")
                elif o.name in self._chosen and o.top_k is not None and o.top_k < 1:
                    words.append(
                        f"{o.name} has another best entry in {arithmetic}, of {1 - o.top_k:.1%} of rows"
                    )
        return words

    def rows(
        self, values: Values, findings: Mapping[str, tuple[Any, ...]]
    ) -> tuple[tuple[OpError, ...], dict[str, tuple[OutputComparison, ...]]]:
        """The errors of every op on one set of inputs, and of the outputs."""
        rows = []
        for row in filter(None, map(op_error, self._all(values))):
            said = findings.get(row.name, ())
            rules = tuple(dict.fromkeys(f.rule for f in said))
            repairs = tuple(dict.fromkeys(f.remedy for f in said if f.remedy))
            rows.append(replace(row, rules=rules, repairs=repairs))
        exact = self._all.outputs["fp32"]
        return tuple(rows), {a: _compared(exact, self._all.outputs[a]) for a in self._all.others}


def _compared(exact: Mapping[str, Any], rounded: Mapping[str, Any]) -> tuple[OutputComparison, ...]:
    names = [n for n, v in exact.items() if np.asarray(v).dtype.kind == "f"]
    return tuple(compare_arrays(n, np.asarray(exact[n]), np.asarray(rounded[n])) for n in names)


def _verdict(
    rows: Sequence[OpError],
    outputs: Mapping[str, Sequence[OutputComparison]],
    missed: Sequence[str],
    searched: str,
    gate: float,
) -> tuple[str, str]:
    """The verdict, and what it rests on; `searched` says how inputs were found that were not given."""
    worst = min(rows, key=lambda row: row.worst, default=None)
    blamed = "" if worst is None else f"; the largest error enters at {worst.op_type} {worst.name}"
    blamed += f" ({', '.join(worst.repairs)} may help)" if worst is not None and worst.repairs else ""
    if missed and searched:
        return "at risk", f"{'; '.join(missed)} on inputs that the search found {searched}{blamed}"
    if missed:
        return "fails", "; ".join(missed) + blamed
    near = [row for row in rows if row.largest * MARGIN > LARGEST and math.isfinite(row.largest)]
    if near:
        row = max(near, key=lambda r: r.largest)
        return "at risk", f"{row.op_type} {row.name} reaches {row.largest:.3g}; fp16 ends at {LARGEST:.0f}"
    least = min((_near(o) for compared in outputs.values() for o in compared), default=math.inf)
    if least == math.inf:
        return "holds", "every output is identical"
    return "holds", f"every output reaches {least:.1f} dB, and at least {gate:g} dB were asked for"
