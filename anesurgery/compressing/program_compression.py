"""Compress the weights of one program: decide their forms, quantize inputs, correct weights, and store them.

`compression.compress` builds one `Plan` for the call, and a `ProgramCompression` for each program: a pipeline
and a folder of chunks have several. The forms that a weight may have come from published times
(`weight_forms`); if it may have several, costs at the outputs decide (`assignment`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from anesurgery.compressing import activations as quantizing
from anesurgery.compressing.activations import IOS17, Quantized
from anesurgery.compressing.assignment import estimate_forms, measure_forms
from anesurgery.compressing.correcting import (
    Candidate,
    CorrectedWeight,
    Correction,
    find_candidates,
    takes_bias,
)
from anesurgery.compressing.finished import Finished
from anesurgery.compressing.input_moments import LOOKED_UP, InputSize
from anesurgery.compressing.storing import key_of, shift_biases, store
from anesurgery.compressing.weight_forms import (
    IOS16,
    READING,
    Choice,
    bounds_of,
    choose,
    choose_activations,
    choose_form,
    read_form,
)
from anesurgery.compressing.weight_rows import WeightRows
from anesurgery.display import byte_words
from anesurgery.errors import SurgeryError, Unsuited
from anesurgery.files.package import Loaded
from anesurgery.files.protobuf import opset_version
from anesurgery.mil import (
    Operation,
    Program,
    Var,
    is_compressed,
    is_weight,
    np_dtype,
    operands,
    static_shape,
    walk_ops,
)
from anesurgery.placement.target import Target
from anesurgery.placement.timing import rows_of
from anesurgery.regions.reencoding import stored_bytes

MIXED = (2, 3, 4, 6, 8)
"""The bits that are tried where each weight gets its own."""
EVEN, ESTIMATED, TRIED = "even", "estimated", "tried"
"""How the bits of each weight are found: all weights get the same, or each the form that costs least at the
outputs, as estimated (`assignment.estimate_forms`) or as tried in every form (`assignment.measure_forms`)."""
WEIGHT, INPUTS = "weight", "inputs"
"""What of a weight may have to stay as it is: its own numbers, or the inputs of the ops that read it."""
PAIR_LEAVES = "quantizing them would leave the Neural Engine on a chip of the target; name yours by target="
"""Why inputs stay: their quantize and dequantize would run elsewhere."""
Progress = Callable[[int, int], None]
"""Called with (weights done, all weights)."""
LeftOut = dict[tuple[str, str], str]
"""(name of a weight, "weight" or "inputs" of its ops) -> why that stays as it is."""
Values = Mapping[str, Any]
Outputs = list[dict[str, Any]]
"""The outputs of a function, for each sample."""


@dataclass(frozen=True)
class CompressedWeight:
    """What was done with one weight: a row of the report."""

    weight: str
    readers: tuple[str, ...]
    """The types of the ops that read it."""
    form: str
    """The name of the form, such as "int4"; "" where the weight stays as it is."""
    why: str
    """The evidence for the form, or the reason why the weight stays."""
    bytes: tuple[int, int]
    """Before and after."""
    error: float = 0.0
    """The squared error of its products on the calibration samples, over their squares."""
    rounded: float = 0.0
    """The same error if its numbers were rounded to the nearest."""
    ops: tuple[str, ...] = ()
    """The names of the ops that read it, in every function."""
    inputs: str = ""
    """"int8" where its ops read 8 bits, or the reason why not, if that was asked for."""
    scales: tuple[float, ...] = ()
    """The scales of the inputs of each op, where they are 8 bits."""
    cosine: float | None = None
    """Between products with inputs of 8 bits and those without, for the op with the least."""
    calibration_rows: InputSize = LOOKED_UP
    """The inputs that it was corrected by."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        lists = {
            name: list(getattr(self, name))
            for name in ("readers", "bytes", "ops", "scales", "calibration_rows")
        }
        return {**vars(self), **lists}


@dataclass(frozen=True)
class Plan:
    """What one call of `compress` asks for."""

    bits: float
    target: Target
    purpose: str
    """"speed" or "size"."""
    smallest: int
    """Weights with more elements are compressed."""
    function: str | None
    """The function that takes the samples."""
    how: str
    """How the bits of each weight are found: `EVEN`, `ESTIMATED` or `TRIED`."""
    activations: str | None
    """How ranges of 8-bit inputs are found; None where inputs are not quantized."""
    balance: bool
    finished: Finished
    forms: tuple[str, ...]
    """Forms that were asked for by name, in place of those of the bits."""
    max_bytes: int | None = None
    """The most bytes of all weights; by default as many as if all had the first form."""

    def choices(self, readers: Iterable[Operation], version: int, rows: WeightRows) -> dict[str | None, Choice]:
        """Return the forms that a weight may have, the preferred one first.

        Args:
            readers: all ops that read it, in every function.
            version: the specification version.
            rows: how its first op reads it.
        """
        products = [op for op in readers if op.op_type != "gather"]  # a gather reads few rows of its table
        bounds = bounds_of(rows_of(op) for op in products) or frozenset((READING,))
        if self.activations and any(op.op_type in quantizing.READERS for op in products):
            both = choose_activations(self.target, bounds, self.purpose)
            if both.inputs:
                return {both.form: both}
        if self.forms:
            return self._named_choices(bounds, version, rows)
        counts = MIXED if self.how == TRIED else (int(self.bits),)
        if self.how == ESTIMATED and (self.bits < MIXED[-1] or self.max_bytes is not None):
            counts = (*counts, *(n for n in MIXED if n != self.bits))
        choices = [choose(bits, self.target, bounds, version, self.purpose) for bits in counts]
        if choices[0].form is None and self.how == ESTIMATED:
            return {None: choices[0]}
        return {choice.form: choice for choice in choices}

    def _named_choices(
        self, bounds: frozenset[str], version: int, rows: WeightRows
    ) -> dict[str | None, Choice]:
        """Return the named forms that a weight can have; the reason against the first if it can have none."""
        choices: list[Choice] = []
        for name in self.forms:
            reason = read_form(name).unfit(rows.channel_count, rows.rows_per_group)
            if reason:
                choices.append(Choice(None, reason))
            else:
                choices.append(choose_form(name, self.target, bounds, version, self.purpose))
        possible = [choice for choice in choices if choice.form is not None] or choices[:1]
        return {choice.form: choice for choice in possible}


class ProgramResult(NamedTuple):
    """What `ProgramCompression.run` did."""

    outputs: Outputs
    """The outputs of the compressed program."""
    plain_outputs: Outputs
    """The outputs of the plain program, for the plain samples."""
    weights: list[CompressedWeight]
    """A row for each weight."""


class ProgramCompression:
    """The weights of one program, and the forms that they may have.

    Args:
        loaded: the program, which `run` edits.
        name: of the function that takes the samples.
        plan: of the call.
        left_out: weights, or inputs, that stay as they are.

    Raises:
        Unsuited: the model is older than iOS 16.
        SurgeryError: it is older than iOS 17, and inputs should be quantized.
    """

    def __init__(self, loaded: Loaded, name: str, plan: Plan, left_out: LeftOut) -> None:
        self.loaded, self.name, self.plan, self.left_out = loaded, name, plan, left_out
        self.version = min(opset_version(f) for f in loaded.program.functions.values())
        if self.version < IOS16:
            raise Unsuited("weights can be compressed from iOS 16 on; convert the model for that or newer")
        if plan.activations and self.version < IOS17:
            raise SurgeryError("activations of 8 bits begin at iOS 17; convert the model for that or newer")
        self.candidates, self.reasons = find_candidates(loaded.program.functions[name], plan.smallest)
        self.readers = _readers_in_all_functions(loaded.program, self.candidates)
        self.possible = {
            each.var: plan.choices(self.readers[each.var], self.version, each.readers[0])
            for each in self.candidates
        }
        for candidate in self.candidates:
            if (reason := left_out.get((candidate.var.name, WEIGHT))) is not None:
                self.possible[candidate.var] = {None: Choice(None, reason)}
        self.choices = {var: next(iter(choices.values())) for var, choices in self.possible.items()}
        """Weight -> its form; the preferred one until `run`."""

    def newer_forms(self, version: int) -> dict[str, str]:
        """Return the forms that weights would have in another opset -> what they have now, "" for none."""
        forms: dict[str, str] = {}
        for candidate in self.candidates:
            choices = self.plan.choices(self.readers[candidate.var], version, candidate.readers[0])
            newer, now = next(iter(choices.values())), self.choices[candidate.var]
            if newer.form and newer.form != now.form:
                forms[newer.form] = now.form or ""
        return forms

    def run(
        self,
        samples: Sequence[Values],
        plain_samples: Sequence[Values],
        progress: Progress | None,
        needs_outputs: bool,
    ) -> ProgramResult:
        """Compress the weights, and store them in the program.

        The arguments are those of `Correction`.
        """
        if self.plan.how != EVEN:
            self._choose_by_costs(samples)
        chosen = [candidate for candidate in self.candidates if self.choices[candidate.var].form]
        quantized = self._quantize_inputs(chosen, samples)
        sizes = {candidate.var: stored_bytes(candidate.var) for candidate in self.candidates}
        correction = self._correction(chosen, samples, plain_samples, progress, needs_outputs)
        outputs = correction.run()
        corrected = {weight.candidate.var: weight for weight in correction.corrected}
        rows = []
        for candidate in self.candidates:
            var = candidate.var
            row = self._row(candidate, sizes[var], corrected.get(var))
            rows.append(_with_inputs(row, quantized.get(var)))
        rows += [CompressedWeight(name, (), "", reason, (0, 0)) for name, reason in self.reasons.items()]
        for weight in correction.corrected:
            shift_biases(weight, self.readers[weight.candidate.var])
        store([self.loaded.program], correction.corrected)
        return ProgramResult(outputs, correction.plain_outputs, rows)

    def _correction(
        self,
        chosen: Sequence[Candidate],
        samples: Sequence[Values],
        plain_samples: Sequence[Values],
        progress: Progress | None,
        needs_outputs: bool,
    ) -> Correction:
        """Return the correction of the chosen weights, ready to run."""
        finished = self.plan.finished
        correction = Correction(
            self.loaded,
            self.name,
            samples,
            chosen,
            lambda candidate: self.choices[candidate.var].form,
            may_shift_bias=self._may_shift_bias,
            correct=finished.begin,
            plain_samples=plain_samples,
            parallel=finished.workers.count,
            needs_outputs=needs_outputs,
            keeps_arrays=False,
            folder=finished.folder,
        )
        if progress is not None:
            correction.progress = lambda done: progress(done, len(chosen))
        return correction

    def _may_shift_bias(self, candidate: Candidate) -> bool:
        """Can the ops of other functions take the same shifts of biases as those of this one?"""
        here = {r.op for r in candidate.readers}
        others = [op for op in self.readers[candidate.var] if op not in here and op.op_type != "gather"]
        return all(map(takes_bias, others))

    def _quantize_inputs(
        self, chosen: Sequence[Candidate], samples: Sequence[Values]
    ) -> dict[Var, list[Quantized]]:
        """Quantize the inputs of linear and conv, in every function by the scales of the one that runs.

        Returns:
            Weight -> what was done with the inputs of each op that reads it; empty where it was not asked for.
        """
        if self.plan.activations is None:
            return {}
        left_out = {name for name, part in self.left_out if part == INPUTS}
        asked = [candidate for candidate in chosen if self.choices[candidate.var].inputs]
        measured = [candidate for candidate in asked if candidate.var.name not in left_out]
        by_op = quantizing.measure_scales(self.loaded, self.name, samples, measured, self.plan.activations)
        results = {candidate.var: [Quantized(0.0, 1.0, PAIR_LEAVES)] for candidate in asked}
        scales: dict[Operation, float] = {}
        for candidate in measured:
            var = candidate.var
            results[var] = [by_op[r.op] for r in candidate.readers if r.op in by_op]
            largest = max((each.scale for each in results[var]), default=0.0)
            for op in self.readers[var]:
                if op.op_type in quantizing.READERS:
                    scales[op] = by_op[op].scale if op in by_op else largest
        quantizing.insert_pairs(self.loaded.program, {op: scale for op, scale in scales.items() if scale})
        quantizing.clip_products(self.loaded.program)
        return results

    def _choose_by_costs(self, samples: Sequence[Values]) -> None:
        """Choose among the possible forms by what they cost at the outputs."""
        forms = {each: [f for f in self.possible[each.var] if f is not None] for each in self.candidates}
        forms = {candidate: names for candidate, names in forms.items() if names}
        plan = self.plan
        if not forms or (plan.max_bytes is None and all(len(names) == 1 for names in forms.values())):
            return
        max_bytes = self._bytes_for(forms)
        if plan.how == ESTIMATED:
            modes = estimate_forms(self.loaded, self.name, samples, forms, plan.finished, max_bytes)
        else:
            modes = measure_forms(
                self.loaded, self.name, samples, forms, plan.bits, self.version, plan.finished, max_bytes
            )
        goal = f"{plan.bits:g} bits are the average" if max_bytes is None else "there is room for it"
        stays = Choice(None, f"it costs most at the outputs, and {goal}")
        for candidate in forms:
            form = modes.get(candidate.var)
            self.choices[candidate.var] = stays if form is None else self.possible[candidate.var][form]

    def _bytes_for(self, candidates: Iterable[Candidate]) -> int | None:
        """Return the bytes that weights with a choice may take: what all others, and the new biases, leave.

        Raises:
            SurgeryError: they leave nothing.
        """
        if self.plan.max_bytes is None:
            return None
        weights = list(candidates)
        readers = {r.op: r for candidate in weights for r in candidate.readers if takes_bias(r.op)}
        old_biases = {
            key_of(op.bias): stored_bytes(op.bias) for op in readers if op.inputs.get("bias") is not None
        }
        new_biases = sum(r.op_channels.size * np.dtype(np_dtype(op.x)).itemsize for op, r in readers.items())
        replaced = sum(stored_bytes(candidate.var) for candidate in weights) + sum(old_biases.values())
        others = weight_bytes(self.loaded) - replaced + new_biases
        if others >= self.plan.max_bytes:
            raise SurgeryError(
                f"max_bytes leaves {byte_words(self.plan.max_bytes)} to a program, but {byte_words(others)} of "
                "it cannot be compressed; give more"
            )
        return self.plan.max_bytes - others

    def _row(self, candidate: Candidate, size: int, corrected: CorrectedWeight | None) -> CompressedWeight:
        """Return the row of a weight in the report; `size` is its bytes before, `corrected` what it became."""
        name, why = candidate.var.name, self.choices[candidate.var].why
        types = tuple(dict.fromkeys(r.op.op_type for r in candidate.readers))
        if corrected is None:
            return CompressedWeight(name, types, "", why, (size, size))
        return CompressedWeight(
            name,
            types,
            corrected.kind,
            why,
            (size, corrected.bytes),
            error=corrected.error,
            rounded=corrected.nearest_error,
            ops=tuple(dict.fromkeys(op.name for op in self.readers[candidate.var])),
            calibration_rows=corrected.calibration_rows,
        )


def _readers_in_all_functions(program: Program, candidates: Sequence[Candidate]) -> dict[Var, list[Operation]]:
    """Return for each weight the ops of all functions that read the same numbers."""
    readers = {candidate.var: [r.op for r in candidate.readers] for candidate in candidates}
    if len(program.functions) == 1:
        return readers
    by_key = {key_of(candidate.var): candidate.var for candidate in candidates}
    shapes = {shape for shape, _, _ in by_key}
    ops = [op for function in program.functions.values() for op in function.operations]
    for op, var in ((reader, var) for reader in ops for _, var in operands(reader)):
        if var.op is None or var.op.op_type != "const" or static_shape(var) not in shapes:
            continue
        weight = by_key.get(key_of(var))
        if weight is not None and op not in readers[weight]:
            readers[weight].append(op)
    return readers


def _with_inputs(row: CompressedWeight, quantized: Sequence[Quantized] | None) -> CompressedWeight:
    """Return a row that also says what was done with the inputs of the ops."""
    if not quantized:
        return row
    worst = min(quantized, key=lambda each: each.cosine)
    scales = tuple(each.scale for each in quantized if each.scale)
    inputs = "int8" if scales else worst.why
    return replace(row, inputs=inputs, scales=scales, cosine=worst.cosine)


def weight_bytes(loaded: Loaded) -> int:
    """Return the bytes of the weights of a program; equal ones, which are stored once, count once."""
    sizes: dict[Any, int] = {}
    for op in walk_ops(loaded.program):
        for _, var in () if is_weight(op) else operands(op):
            if is_compressed(var):
                sizes[_compressed_key(var)] = stored_bytes(var)
            elif var.op is not None and var.op.op_type == "const" and isinstance(var.val, np.ndarray):
                sizes[key_of(var)] = stored_bytes(var)
    return sum(sizes.values())


def _compressed_key(var: Var) -> Any:
    """Return a key that is equal for compressed weights of equal constants."""
    assert var.op is not None
    return tuple(key_of(v) if not is_compressed(v) else _compressed_key(v) for _, v in operands(var.op))
