"""Compress the weights of a function in the order in which they are read, each corrected by what its ops read.

All samples run through the model op by op (`running_samples`). Before an op with a weight runs, its inputs are
those that the weights compressed before it gave; the weight is rounded for these inputs, and the run goes on
with the rounded weight. If several ops read the weight, the inputs of the later ones come from a run of the
plain model before.

The plain model runs beside it. A weight also makes up for what the weights before it changed in its inputs:
what is rounded is not the weight itself but the one whose products with the actual inputs come nearest to the
plain products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from anesurgery.compressing.fitting import FormFitter, best_rounding, product_error, round_to_nearest
from anesurgery.compressing.input_moments import (
    LOOKED_UP,
    InputDrift,
    InputSize,
    MomentRecorder,
    centre_error,
    joint_moments,
)
from anesurgery.compressing.running_samples import Lookahead, Values, run_op_by_op, run_side_by_side
from anesurgery.compressing.second_order import HessianFactor, mean_diagonal
from anesurgery.compressing.weight_rows import WeightRows, weight_rows_of
from anesurgery.files.arrays import set_aside
from anesurgery.files.package import Loaded
from anesurgery.interpret.core import Executable
from anesurgery.interpret.steps import Step
from anesurgery.mil import Array, Function, Operation, Var, dtype_name, is_weight, operands, static_shape, types
from anesurgery.regions.compressed_weights import Form, Result
from anesurgery.regions.reencoding import numbers_of

BIASED = ("linear", "conv", "conv_transpose")
"""Ops whose bias can make up for a change of the mean of their results."""

NO_ARRAY: Array = np.empty(0)
ChooseForm = Callable[["Candidate"], "str | None"]
"""A weight -> the name of its form, such as "int4"; None where it stays as it is."""


@dataclass(frozen=True)
class Candidate:
    """A weight that can be compressed."""

    var: Var
    readers: tuple[WeightRows, ...]
    """How each op reads it, in the order in which they run; all have one layout."""


@dataclass(frozen=True)
class CorrectedWeight:
    """A weight in a compressed form."""

    candidate: Candidate
    kind: str
    """The name of the form, such as "int4"."""
    form: Form
    """The op that decodes it."""
    array: Array
    """What it decodes to, in the shape of the weight."""
    error: float
    """The squared error of its products, over the sum of their squares."""
    bytes: int
    """The bytes of the form."""
    nearest_error: float
    """The same error if each number is rounded to the nearest one of the first grid."""
    bias_shifts: Mapping[Operation, Array] = field(default_factory=dict)
    """Op -> what to add to its bias, [output channels], so that the mean of its results stays."""
    calibration_rows: InputSize = LOOKED_UP
    """The inputs that it was corrected by."""


def find_candidates(function: Function, smallest: int) -> tuple[list[Candidate], dict[str, str]]:
    """Find the weights of a function that can be compressed.

    Args:
        function: its top level; weights that a loop or a branch reads stay as they are.
        smallest: weights with more elements count.

    Returns:
        The weights, and for those that cannot be compressed: name -> reason.
    """
    readers: dict[Var, list[WeightRows]] = {}
    reasons: dict[Var, str] = {}
    weights = {v for op in function.operations for v in _weights(op, smallest)}
    for op in function.operations:
        for name, var in operands(op):
            if var not in weights:
                continue
            rows = weight_rows_of(op, name)
            if isinstance(rows, WeightRows):
                readers.setdefault(var, []).append(rows)
            else:
                reasons[var] = rows
    for var, its_readers in readers.items():
        if len(var.child_ops) != len({r.op for r in its_readers}):
            reasons.setdefault(var, "a nested block reads it, or an op that is no product")
        if len({r.layout for r in its_readers}) > 1:
            reasons.setdefault(var, "its readers lay its output channels along different axes")
    found = [Candidate(var, tuple(rows)) for var, rows in readers.items() if var not in reasons]
    return found, {var.name: reason for var, reason in reasons.items()}


def _weights(op: Operation, smallest: int) -> Iterator[Var]:
    """Yield the output of a const that is a float weight of at least 2 axes and of more elements than that."""
    if op.op_type != "const" or not is_weight(op):
        return
    for var in op.outputs:
        shape = static_shape(var)
        if shape and len(shape) > 1 and int(np.prod(shape)) > smallest and dtype_name(var) in ("fp16", "fp32"):
            yield var


@dataclass(frozen=True)
class _Job:
    """The correction of one weight, begun and perhaps still running in another process."""

    wait: Callable[[], CorrectedWeight]
    means: Mapping[Operation, Array]
    """Op whose bias will be corrected -> the mean of its inputs, [groups, columns]."""
    drift: Array | None
    """[groups, columns]: the mean difference of the first op's inputs to those of the plain model."""
    calibration_rows: InputSize
    """The number of the first op's inputs."""


@dataclass
class Correction:
    """Compresses the weights of one function."""

    loaded: Loaded
    """The model; it is not edited."""
    name: str
    """The name of the function."""
    samples: Sequence[Values]
    """Its inputs."""
    chosen: Sequence[Candidate]
    """The weights to compress."""
    choose: ChooseForm
    """Gives the form of each weight."""
    progress: Callable[[int], None] = lambda _: None
    """Called after each weight with the number done."""
    may_shift_bias: Callable[[Candidate], bool] = lambda _: True
    """May the biases of the ops that read this weight be corrected too?"""
    correct: Callable[..., Callable[[], CorrectedWeight]] = lambda *arguments: partial(correct, *arguments)
    """Begins `correct` with its arguments, and returns a function that waits for the result."""
    plain_samples: Sequence[Values] | None = None
    """Inputs of the plain function, where other compressed programs changed `samples`; `samples` by default."""
    parallel: int = 1
    """The number of weights that are corrected at the same time, where their inputs are known."""
    needs_outputs: bool = True
    """False where the outputs of the function are not needed, which saves the end of the run."""
    keeps_arrays: bool = True
    """Keep the decoded numbers of each weight? All together take as much memory as the model."""
    folder: Path | None = None
    """For files of what memory need not hold; the system's folder of temporary files by default."""
    corrected: list[CorrectedWeight] = field(default_factory=list)
    """The results."""
    plain_outputs: list[dict[str, Array]] = field(default_factory=list)
    """The outputs of the plain function, for each of `plain_samples`."""

    def run(self) -> list[dict[str, Array]]:
        """Compress the weights into `corrected`.

        Returns:
            The outputs of the compressed function for each sample.
        """
        executable = Executable(self.loaded.program, function=self.name, fuse=False)
        plain = Executable(self.loaded.program, function=self.name, fuse=False)
        later = self._record_later_readers(executable)
        by_op: dict[Operation, list[Candidate]] = {}
        for candidate in self.chosen:
            by_op.setdefault(candidate.readers[0].op, []).append(candidate)
        last_readers = {candidate.var: candidate.readers[-1].op for candidate in self.chosen}
        jobs: dict[Var, _Job | None] = {}
        weights: dict[Var, torch.Tensor] = {}  # corrected, until the last op has read them
        shifts: dict[Operation, Array] = {}

        def begin(step: Step, arguments: Sequence[Values], plain_arguments: Sequence[Values]) -> None:
            for candidate in by_op.get(step.op, ()):
                if candidate.var not in jobs:
                    jobs[candidate.var] = self._begin(candidate, arguments, plain_arguments, later)

        def compress(step: Step, arguments: Sequence[Values], plain_arguments: Sequence[Values]) -> Step:
            begin(step, arguments, plain_arguments)
            for candidate in by_op.get(step.op, ()):
                if (job := jobs[candidate.var]) is not None:
                    corrected = self._finish(candidate, job)
                    shifts.update(corrected.bias_shifts)
                    weights[candidate.var] = executable.plan._tensor(np.ascontiguousarray(corrected.array))
                jobs[candidate.var] = None
            step = _with_bias_shift(_with_weights(step, weights), shifts.pop(step.op, None))
            for var in [var for var in weights if last_readers[var] is step.op]:
                del weights[var]
            return step

        samples = self.samples, self.samples if self.plain_samples is None else self.plain_samples
        ops = {r.op for candidate in self.chosen for r in candidate.readers}
        lookahead = Lookahead(begin, self.parallel - 1)
        both = executable, plain
        outputs, self.plain_outputs = run_side_by_side(
            both, samples, compress, ops, lookahead, self.needs_outputs, self.folder
        )
        return outputs

    def _record_later_readers(self, executable: Executable) -> MomentRecorder:
        """Return the moments of what all readers but the first of each weight read, in the plain model."""
        recorder = MomentRecorder({r.op: r for candidate in self.chosen for r in candidate.readers[1:]})
        if recorder.readers:
            ops = set(recorder.readers)
            run_op_by_op(
                executable, self.samples, recorder.before_step, ops, needs_outputs=False, folder=self.folder
            )
        return recorder

    def _begin(
        self,
        candidate: Candidate,
        arguments: Sequence[Values],
        plain_arguments: Sequence[Values],
        later: MomentRecorder,
    ) -> _Job | None:
        """Begin to correct one weight; None where it stays as it is.

        Args:
            candidate: the weight; what it reads depends on no weight that is not compressed yet.
            arguments: of the first op that reads it, in the compressed model, for each sample.
            plain_arguments: the same in the plain model.
            later: the moments of what its other readers read.
        """
        if (kind := self.choose(candidate)) is None:
            return None
        reader = candidate.readers[0]
        first = MomentRecorder({reader.op: reader})
        first.add(reader.op, arguments)
        recorders = [(reader.op, first), *((r.op, later) for r in candidate.readers[1:])]
        recorders = [(op, recorder) for op, recorder in recorders if op in recorder.matrices]
        means = {
            op: recorder.mean(op)
            for op, recorder in recorders
            if self.may_shift_bias(candidate) and takes_bias(op)
        }
        moments = [recorder.moments_of(op, op in means) for op, recorder in recorders]
        hessians, centres = joint_moments(np.asarray(candidate.var.val), reader, moments)
        drift = InputDrift.of(reader, arguments, plain_arguments, means.get(reader.op))
        crossed = drift.crossed if drift is not None and len(candidate.readers) == 1 else None
        wait = self.correct(candidate, kind, hessians, self.loaded.version, centres, crossed)
        return _Job(
            wait=wait,
            means=means,
            drift=None if drift is None else drift.mean,
            calibration_rows=first.size(reader.op),
        )

    def _finish(self, candidate: Candidate, job: _Job) -> CorrectedWeight:
        """Wait for a weight, and add it to the results."""
        corrected = job.wait()
        corrected = replace(
            corrected,
            bias_shifts=_bias_shifts(candidate, corrected.array, job.means, job.drift),
            calibration_rows=job.calibration_rows,
        )
        self.corrected.append(corrected if self.keeps_arrays else _without_array(corrected, self.folder))
        self.progress(len(self.corrected))
        return corrected


def _without_array(corrected: CorrectedWeight, folder: Path | None) -> CorrectedWeight:
    """Return a weight without its decoded numbers, and with its codes in files."""
    form = corrected.form.of(lambda array: set_aside(array, folder))
    return replace(corrected, form=form, array=NO_ARRAY)


def takes_bias(op: Operation) -> bool:
    """Is the bias of an op stored, or could it get one?"""
    bias = op.inputs.get("bias")
    return op.op_type in BIASED and (bias is None or (bias.op is not None and bias.op.op_type == "const"))


def _bias_shifts(
    candidate: Candidate, array: Array, means: Mapping[Operation, Array], drift: Array | None
) -> dict[Operation, Array]:
    """Return what the mean of each op's results lost, [output channels], by rounding and drifted inputs."""
    rows = {r.op: r for r in candidate.readers}
    weight = np.asarray(candidate.var.val, np.float64)
    difference, shifts = weight - array.astype(np.float64), dict[Operation, Array]()
    for op, mean in means.items():
        row_shifts = np.einsum("grc,gc->gr", rows[op].to_rows(difference), mean)
        if drift is not None and op is candidate.readers[0].op:
            row_shifts += np.einsum("grc,gc->gr", rows[op].to_rows(weight), drift)
        channels = rows[op].op_channels
        shifts[op] = np.zeros(int(channels.max()) + 1)
        np.add.at(shifts[op], channels, row_shifts)
    return shifts


def _with_weights(step: Step, weights: Mapping[Var, torch.Tensor]) -> Step:
    """Return a step that reads these weights in place of its own."""
    fixed = {name: weights[var] for name, var in operands(step.op) if var in weights}
    return replace(step, fixed={**step.fixed, **fixed}) if fixed else step


def _with_bias_shift(step: Step, shift: Array | None) -> Step:
    """Return a step whose bias is larger by a shift."""
    if shift is None:
        return step
    bias = torch.from_numpy(shifted_bias(step.op, shift)).float()
    to_widen = [name for name in step.to_widen if name != "bias"]
    return replace(step, fixed={**step.fixed, "bias": bias}, to_widen=to_widen)


def shifted_bias(op: Operation, shift: Array) -> Array:
    """Return the bias of an op plus a shift [output channels], in the type of the op's input."""
    old = 0.0 if op.inputs.get("bias") is None else np.asarray(op.bias.val, np.float64)
    return np.asarray((old + shift).astype(types.nptype_from_builtin(op.x.dtype)))


def plain_moments(
    loaded: Loaded, name: str, samples: Sequence[Values], chosen: Sequence[Candidate]
) -> dict[Var, Array]:
    """Return for each weight the second moments of what its ops read in the plain model, for `correct`."""
    recorder = MomentRecorder({r.op: r for candidate in chosen for r in candidate.readers})
    executable = Executable(loaded.program, function=name, fuse=False)
    for values in samples:
        executable(values, listener=recorder)
    matrices = {}
    for candidate in chosen:
        moments = [recorder.moments_of(r.op) for r in candidate.readers]
        weight = np.asarray(candidate.var.val)
        matrices[candidate.var], _ = joint_moments(weight, candidate.readers[0], moments)
    return matrices


def correct(
    candidate: Candidate,
    kind: str,
    hessians: Array,
    version: int,
    centres: Array | None = None,
    crossed: Array | None = None,
) -> CorrectedWeight:
    """Round one weight to a form, so that the squared error of its products is small.

    Args:
        candidate: the weight.
        kind: the form, such as "int4" or "palette3".
        hessians: [groups, columns, columns], the second moments of its inputs; about the mean where a bias
            takes up the mean.
        version: the specification version.
        centres: [ops, groups, columns], as in `input_moments.joint_moments`: they complete the sum of squared
            products that errors are relative to.
        crossed: [groups, columns, columns], as in `input_moments.InputDrift`: the weight then makes up for the
            drift of its inputs.
    """
    reader, weight, unit = candidate.readers[0], np.asarray(candidate.var.val), mean_diagonal(hessians)
    hessians = (hessians / unit).astype(np.float32)
    centres = None if centres is None else centres / np.sqrt(unit)
    rows, factors = reader.to_rows(weight.astype(np.float32)), list(map(HessianFactor.of, hessians))
    if crossed is not None:
        crossed = (crossed / unit).astype(np.float32)
        rows = rows + np.stack([_drift_correction(*each) for each in zip(factors, rows, crossed, strict=True)])
    fitter = FormFitter(
        rows,
        hessians,
        channels=reader.channels,
        axis=reader.channel_axis,
        rank=weight.ndim,
        dtype=weight.dtype,
        factors=factors,
    )
    grid = fitter.grid(kind)
    squares = product_error(rows, None, hessians) + centre_error(rows, centres)
    squares = max(squares, float(np.finfo(np.float64).tiny))
    nearest = round_to_nearest(rows, grid, hessians)
    nearest_error = nearest.error + centre_error(rows - nearest.rows, centres)
    rounding = best_rounding(nearest, rows, factors, hessians)
    del nearest  # its rows are as large as the weight
    form = rounding.grid.form(rounding.rows, reader.from_rows, weight.dtype, version)
    array = decode(form).reshape(weight.shape)
    decoded_rows = reader.to_rows(array.astype(np.float32))
    error = rounding.error
    if not np.array_equal(decoded_rows, rounding.rows):
        error = product_error(rows, decoded_rows, hessians)
    return CorrectedWeight(
        candidate,
        kind,
        form,
        array,
        error=error / squares,
        bytes=form_bytes(form),
        nearest_error=nearest_error / squares,
    )


def _drift_correction(factor: HessianFactor, rows: Array, crossed: Array) -> Array:
    """Return what to add to rows [rows, columns] so that their products come nearest to the plain ones.

    This is rows @ crossed @ inverse of the Hessian, in the order that is cheaper.
    """
    if len(rows) > len(crossed):
        return np.asarray(rows @ factor.times_inverse(crossed))
    return factor.times_inverse(rows @ crossed)


def form_bytes(form: Form) -> int:
    """Return the bytes of a form in a package, where numbers of less than a byte are packed."""
    return sum(_packed_bytes(np.asarray(value)) for value in form.arrays.values())


def decode(form: Form) -> Array:
    """Return the numbers that a form decodes to."""
    return np.asarray(form.inputs["val"] if form.op_type == "const" else numbers_of(Result(form)))


def _packed_bytes(value: Array) -> int:
    if not value.ndim:  # an axis: the program holds it, not the file of weights
        return 0
    width = int(types.numpy_type_to_builtin_type(value.dtype).get_bitwidth())
    return -(-value.size * width // 8)
