"""Compress the weights of a function in the order in which they are read, each corrected by what its ops see.

All samples are run at once, op by op. Where a weight is first read, the inputs of its op are those that the
weights in front of it, compressed already, have made; the weight is corrected for them, and the run goes on
with what it became. Readers further down are asked in a run of the plain model before.

The plain model runs beside it. What the weights in front have changed in the inputs of an op is taken up by its
weight as far as it can be: the numbers that are rounded are those whose products with these inputs are nearest
to what the plain model makes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery.compressing.fitting import Fitting, best, lost, nearest
from anesurgery.compressing.second_order import Shares, moments, unit_of
from anesurgery.compressing.weight_rows import Rows, rows_of
from anesurgery.errors import NotFinite
from anesurgery.files.arrays import set_aside
from anesurgery.files.package import Loaded
from anesurgery.interpret import sampling
from anesurgery.interpret.arithmetic.precision import forget
from anesurgery.interpret.core import Env, Executable, Plan, Step
from anesurgery.interpret.table import Listener
from anesurgery.mil import Array, Function, Operation, Var, dtype_name, is_weight, operands, static_shape, types
from anesurgery.regions.compressed_weights import Form, Result
from anesurgery.regions.reencoding import numbers_of

BIASED = ("linear", "conv", "conv_transpose")
"""Ops whose bias can take up what rounding the weight does to the mean of their results."""
MOST_INPUTS = 4096
"""Rows of inputs that are looked at together, which take memory beside those that are there."""
MOST_VALUES = 1 << 30
"""Bytes of the values of all samples that are there at once, 1.1 GB; more of them are set aside on the disk. A
choice: a machine with 8 GB has them beside a model."""

Values = Mapping[str, Any]
NOTHING: Array = np.empty(0)
Choose = Callable[["Candidate"], "str | None"]
"""The form that a weight gets, such as "int4"; None where it stays as it is."""


@dataclass(frozen=True)
class Candidate:
    """A weight that can be compressed."""

    var: Var
    readers: tuple[Rows, ...]
    """In the order in which they run; all have one layout."""


@dataclass(frozen=True)
class Corrected:
    """A weight in a compressed form."""

    candidate: Candidate
    kind: str
    """The name of the form."""
    form: Form
    array: Array
    """What it decodes to."""
    error: float
    """Of its products, squared, as a share of their squares."""
    bytes: int
    """Of the form."""
    rounded: float
    """The same for the nearest numbers of the grid that it began with."""
    shifts: Mapping[Operation, Array] = field(default_factory=dict)
    """What the bias of each op gains, [output channels], so that the mean of its results stays."""
    calibration_rows: tuple[int, int] = (0, 0)
    """Rows of inputs that it was corrected by, and columns of each; (0, 0) of a table, which reads none."""


def candidates(function: Function, smallest: int) -> tuple[list[Candidate], dict[str, str]]:
    """The weights of a function that can be compressed, and why others of that size cannot.

    Args:
        function: read at its top level; what a loop or a branch reads stays as it is.
        smallest: elements above which a weight counts.
    """
    found: dict[Var, list[Rows]] = {}
    why: dict[Var, str] = {}
    weights = {v for op in function.operations for v in _weights(op, smallest)}
    for op in function.operations:
        for name, var in operands(op):
            if var in weights and (isinstance(read := rows_of(op, name), Rows)):
                found.setdefault(var, []).append(read)
            elif var in weights:
                why[var] = str(read)
    for var, readers in found.items():
        if len(var.child_ops) != len({r.op for r in readers}):
            why.setdefault(var, "a nested block reads it, or an op that is no product")
        if len({r.layout for r in readers}) > 1:
            why.setdefault(var, "its readers lay its output channels along different axes")
    kept = [Candidate(var, tuple(readers)) for var, readers in found.items() if var not in why]
    return kept, {var.name: reason for var, reason in why.items()}


def _weights(op: Operation, smallest: int) -> Iterator[Var]:
    """The constants of an op, if they are a weight of that size."""
    for var in op.outputs if is_weight(op) and op.op_type == "const" else ():
        shape = static_shape(var)
        if shape and len(shape) > 1 and int(np.prod(shape)) > smallest and dtype_name(var) in ("fp16", "fp32"):
            yield var


@dataclass(frozen=True)
class _Begun:
    """A weight whose correction was handed in."""

    due: Callable[[], Corrected]
    """Waits for it."""
    means: Mapping[Operation, Array]
    """Of what each op reads whose bias is corrected."""
    off: Array | None
    """How far the mean of what the first op reads is from that of the plain model."""
    calibration_rows: tuple[int, int]
    """Rows of what the first op reads, and columns."""


@dataclass
class Correction:
    """One function, its samples, and what each weight became.

    Args:
        loaded: the model.
        name: of the function.
        samples: as the function takes them.
        chosen: the weights to compress.
        choose: the form of each.
        progress: called after each weight with (done, total).
    """

    loaded: Loaded
    name: str
    samples: Sequence[Mapping[str, Any]]
    chosen: Sequence[Candidate]
    choose: Choose
    progress: Callable[[int], None] = lambda _: None
    biased: Callable[[Candidate], bool] = lambda _: True
    """May the biases of the ops that read a weight be corrected too?"""
    correct: Callable[..., Callable[[], Corrected]] = lambda *arguments: partial(correct, *arguments)
    """Hands in what `correct` is given, and gives what waits for its result."""
    plain: Sequence[Values] | None = None
    """What the function takes in the plain model; the samples by default, which differ where other compressed
    programs have made them."""
    ahead: int = 1
    """Weights that are worked on at the same time, where what their ops read is known."""
    outputs: bool = True
    """Are the outputs of the function wanted?"""
    arrays: bool = True
    """Are the numbers wanted that each weight decodes to? All of them take as much memory as the model."""
    folder: Path | None = None
    """Where what memory need not hold is set aside; that of the system for temporary files by default."""
    made: list[Corrected] = field(default_factory=list)
    plain_outputs: list[dict[str, Array]] = field(default_factory=list)
    """What the plain function makes of `plain`."""

    def run(self) -> list[dict[str, Array]]:
        """Compress the weights.

        Returns:
            The outputs of the compressed function for each sample.
        """
        executable = Executable(self.loaded.program, function=self.name, fuse=False)
        later = self._later(executable)
        first: dict[Operation, list[Candidate]] = {}
        for one in self.chosen:
            first.setdefault(one.readers[0].op, []).append(one)
        shifts: dict[Operation, Array] = {}
        begun: dict[Var, _Begun | None] = {}
        held: dict[Var, torch.Tensor] = {}
        last = {one.var: one.readers[-1].op for one in self.chosen}

        def begin(step: Step, read: Sequence[Values], wanted: Sequence[Values]) -> None:
            for one in first.get(step.op, ()):
                if one.var not in begun:
                    begun[one.var] = self._begun(one, read, wanted, later)

        ready = partial(_ready, held, shifts)

        def compress(step: Step, read: Sequence[Values], wanted: Sequence[Values]) -> Step:
            begin(step, read, wanted)
            for one in first.get(step.op, ()):
                if (done := begun[one.var]) is not None:
                    corrected = self._end(one, done)
                    shifts.update(corrected.shifts)
                    held[one.var] = executable.plan._tensor(np.ascontiguousarray(corrected.array))
                begun[one.var] = None
            step = ready(step)
            shifts.pop(step.op, None)
            _drop(held, last, step.op)
            return step

        both = executable, Executable(self.loaded.program, function=self.name, fuse=False)
        samples = self.samples, self.samples if self.plain is None else self.plain
        ops = {r.op for one in self.chosen for r in one.readers}
        ahead = Ahead(begin, self.ahead - 1)
        outputs, self.plain_outputs = side_by_side(
            both, samples, compress, ops, ahead, self.outputs, self.folder
        )
        return outputs

    def _later(self, executable: Executable) -> Seen:
        """What all readers but the first of each weight read, in the plain model."""
        seen = Seen({r.op: r for one in self.chosen for r in one.readers[1:]})
        if seen.rows:
            op_by_op(executable, self.samples, seen.step, set(seen.rows), outputs=False, folder=self.folder)
        return seen

    def _begun(
        self, one: Candidate, read: Sequence[Values], wanted: Sequence[Values], later: Seen
    ) -> _Begun | None:
        """Begin with one weight, whose correction depends on no other that is not compressed yet.

        Args:
            one: the weight.
            read: what the first op that reads it reads in the compressed model, for each sample.
            wanted: the same in the plain model.
            later: what its other readers read.
        """
        if (kind := self.choose(one)) is None:
            return None
        seen = Seen({one.readers[0].op: one.readers[0]})
        seen.see(one.readers[0].op, read)
        met = [(r.op, seen if n == 0 else later) for n, r in enumerate(one.readers)]
        met = [(op, each) for op, each in met if op in each.moments]
        shifted = {op: each.mean(op) for op, each in met if self.biased(one) and takes_bias(op)}
        hessians, centres = joined(one, [each.moments_of(op, op in shifted) for op, each in met])
        reader = one.readers[0]
        apart = Apart.of(reader, read, wanted, shifted.get(reader.op))
        crossed = None if apart is None or len(one.readers) > 1 else apart.crossed
        due = self.correct(one, kind, hessians, self.loaded.version, centres, crossed)
        return _Begun(due, shifted, None if apart is None else apart.mean, seen.size(reader.op))

    def _end(self, one: Candidate, begun: _Begun) -> Corrected:
        """Wait for what a weight became."""
        corrected = begun.due()
        shifts = _shifts(one, corrected.array, begun.means, begun.off)
        corrected = replace(corrected, shifts=shifts, calibration_rows=begun.calibration_rows)
        self.made.append(corrected if self.arrays else _aside(corrected, self.folder))
        self.progress(len(self.made))
        return corrected


def _drop(held: dict[Var, torch.Tensor], last: Mapping[Var, Operation], op: Operation) -> None:
    """Let go of the weights that no op after this one reads."""
    for var in [var for var in held if last[var] is op]:
        del held[var]


def _aside(corrected: Corrected, folder: Path | None) -> Corrected:
    """A weight whose codes are on the disk, without the numbers that it decodes to."""
    return replace(corrected, form=corrected.form.of(lambda array: set_aside(array, folder)), array=NOTHING)


def takes_bias(op: Operation) -> bool:
    """Has an op a bias that is stored, or could it have one?"""
    bias = op.inputs.get("bias")
    return op.op_type in BIASED and (bias is None or (bias.op is not None and bias.op.op_type == "const"))


@dataclass(frozen=True)
class Apart:
    """How far the inputs of an op are from those of the plain model."""

    mean: Array
    """[groups, columns]: plain less given."""
    crossed: Array
    """[groups, columns, columns]: plain less given, times given."""

    @classmethod
    def of(
        cls,
        rows: Rows,
        read: Sequence[Mapping[str, Any]],
        wanted: Sequence[Mapping[str, Any]],
        centre: Array | None,
    ) -> Apart | None:
        """Of all samples; None of a table, and where nothing differs.

        Args:
            rows: how the op reads its weight.
            read: what it reads, for each sample.
            wanted: the same in the plain model.
            centre: [groups, columns], the mean of what is given, where a bias takes that up.
        """
        if rows.inputs(read[0]) is None:
            return None
        count, total, crossed = 0, torch.zeros(()), torch.zeros(())
        for here, there in zip(together(rows, read), together(rows, wanted), strict=True):
            off = there.float() - here.float()
            if not bool(off.isfinite().all()):
                return None
            total = total + off.double().sum(1)
            crossed = crossed + (off.transpose(1, 2) @ here.float()).double()
            count += here.shape[1]
        if not bool(crossed.any()):
            return None
        if centre is not None:
            crossed = crossed - total[:, :, None] * torch.from_numpy(centre)[:, None]
        return cls(np.asarray(total / count), np.asarray(crossed))


def _shifts(
    one: Candidate, array: Array, means: Mapping[Operation, Array], off: Array | None
) -> dict[Operation, Array]:
    """What each op loses on average by the new weight, and the first by its inputs: [output channels]."""
    rows = {r.op: r for r in one.readers}
    weight = np.asarray(one.var.val, np.float64)
    lost, shifts = weight - array.astype(np.float64), dict[Operation, Array]()
    for number, (op, mean) in enumerate(means.items()):
        gained = np.einsum("grc,gc->gr", rows[op].of(lost), mean)
        if off is not None and not number and op is one.readers[0].op:
            gained += np.einsum("grc,gc->gr", rows[op].of(weight), off)
        outputs = rows[op].outputs
        shifts[op] = np.zeros(int(outputs.max()) + 1)
        np.add.at(shifts[op], outputs, gained)
    return shifts


def _ready(held: Mapping[Var, torch.Tensor], shifts: Mapping[Operation, Array], step: Step) -> Step:
    """An op with the weights, and the bias, that are corrected already."""
    step = _with_weights(step, held)
    return _shifted(step, shifts[step.op]) if step.op in shifts else step


def _with_weights(step: Step, held: Mapping[Var, torch.Tensor]) -> Step:
    """An op with other weights."""
    fixed = {name: held[var] for name, var in operands(step.op) if var in held}
    return replace(step, fixed={**step.fixed, **fixed}) if fixed else step


def _shifted(step: Step, shift: Array) -> Step:
    """An op with another bias."""
    bias = new_bias(step.op, shift)
    stored = [name for name in step.stored if name != "bias"]
    return replace(step, fixed={**step.fixed, "bias": torch.from_numpy(bias).float()}, stored=stored)


def new_bias(op: Operation, shift: Array) -> Array:
    """The bias of an op and what it gains, in the type of its weight."""
    old = 0.0 if op.inputs.get("bias") is None else np.asarray(op.bias.val, np.float64)
    return np.asarray((old + shift).astype(types.nptype_from_builtin(op.x.dtype)))


def op_by_op(
    executable: Executable,
    samples: Sequence[Mapping[str, Any]],
    before: Callable[[Step, Sequence[Mapping[str, Any]]], Step],
    ops: Collection[Operation],
    beside: Callable[[Step], None] = lambda _: None,
    look: Callable[[Step, Sequence[Env]], None] = lambda step, envs: None,
    outputs: bool = True,
    folder: Path | None = None,
) -> list[dict[str, Array]]:
    """Run all samples together, one op after the other.

    Args:
        executable: its constants may be replaced on the way.
        samples: as the function takes them.
        before: called before each of `ops` with its step and what it reads, a mapping for each sample; gives
            the step to take.
        ops: at the top level of the function.
        beside: called with each step before it is taken.
        look: called before each of `ops` with its step and what is there, for each sample.
        outputs: are they wanted? Else the run ends before the last of `ops`.
        folder: where values are set aside that would take more than `MOST_VALUES` together.

    Returns:
        The outputs for each sample.
    """
    plan = executable.plan
    envs: list[Env] = [dict(sampling.bind(executable.function, values, None)) for values in samples]
    last = _last_of(plan, ops)
    rest = plan.steps[last:]
    with torch.inference_mode():
        for number, step in enumerate(plan.steps[: last + 1]):
            if step.op in ops:
                look(step, envs)
                step = before(step, [plan.arguments(step, env) for env in envs])
            if number < last:
                beside(step)
                take_all(plan, step, envs, folder)
            else:
                rest[0] = step
    return [_rest(executable, env, rest) for env in envs] if outputs else []


def _last_of(plan: Plan, ops: Collection[Operation]) -> int:
    """The number of the last step of some ops; all samples together come to what it reads."""
    return max((n for n, step in enumerate(plan.steps) if step.op in ops), default=0)


def _rest(executable: Executable, env: Env, steps: Iterable[Step]) -> dict[str, Array]:
    """The outputs of a sample, whose last steps are taken by itself: logits of all samples would be large."""
    bound = list(env.values())
    with torch.inference_mode():
        for step in steps:
            executable.plan.take(step, env)
        outputs = executable.outputs(env, bound)
    env.clear()
    return outputs


def take_all(plan: Plan, step: Step, envs: Sequence[Env], folder: Path | None = None) -> None:
    """Take a step for all samples: a constant is made ready for it once, and not kept."""
    runs, room, plan.runs, plan.room = plan.runs, plan.room, max(plan.runs, 2), plan.ready_bytes
    for env in envs:
        plan.take(step, env)
        if _bytes(env) > MOST_VALUES // len(envs):
            for var in {var for var, _, _ in step.outs if isinstance(env.get(var), torch.Tensor)}:
                held = set_aside(env[var].contiguous().numpy(), folder, written=True)
                env[var] = torch.from_numpy(held)
    plan.runs, plan.room = runs, room
    for name in step.stored:
        var = step.op.inputs[name]
        if plan.kept.pop(var, None) is not None:
            forget(var.val)


def _bytes(env: Env) -> int:
    """Of all values of a sample, on the disk or not."""
    return sum(value.nbytes for value in env.values() if isinstance(value, torch.Tensor))


@dataclass(frozen=True)
class Ahead:
    """Work that may begin before its op is taken, as soon as what the op reads is there."""

    begin: Callable[[Step, Sequence[Values], Sequence[Values]], None]
    """Called with a step and what it reads in both models."""
    most: int
    """Steps that it is called with before one is taken."""

    def look(
        self, step: Step, plans: Sequence[Plan], envs: Sequence[Sequence[Env]], ops: Collection[Operation]
    ) -> None:
        """Begin with the steps after one whose inputs are there already.

        Args:
            step: that is about to be taken.
            plans: of both models.
            envs: what is there in both, for each sample.
            ops: that are asked for.
        """
        steps = {other.op: other for other in plans[1].steps}
        after = plans[0].steps[next(n for n, one in enumerate(plans[0].steps) if one.op is step.op) + 1 :]
        ready = (one for one in after if one.op in ops and all(map(envs[0][0].__contains__, _values_of(one))))
        for one in itertools.islice(ready, self.most):
            read = [plans[0].arguments(one, env) for env in envs[0]]
            self.begin(one, read, [plans[1].arguments(steps[one.op], env) for env in envs[1]])


def _values_of(step: Step) -> Iterator[Var]:
    """The values that a step reads."""
    for _, read in step.reads:
        yield from read if isinstance(read, tuple) else (read,)


Beside = Callable[[Step, Sequence[Values], Sequence[Values]], Step]
"""A step, what it reads and what it reads in the plain model, for each sample -> the step to take."""


def side_by_side(
    executables: tuple[Executable, Executable],
    samples: tuple[Sequence[Values], Sequence[Values]],
    before: Beside,
    ops: Collection[Operation],
    ahead: Ahead,
    outputs: bool = True,
    folder: Path | None = None,
) -> tuple[list[dict[str, Array]], list[dict[str, Array]]]:
    """Run all samples together through a model and through the plain one, one op after the other.

    Args:
        executables: the model, whose constants may be replaced on the way, and the plain one, of one function.
        samples: as the function takes them, for each of both.
        before: called before each of `ops`.
        ops: at the top level of the function.
        ahead: what may begin before its op is taken.
        outputs: are they wanted? Else the run ends before the last of `ops`.
        folder: where values are set aside that would take more than `MOST_VALUES` together.

    Returns:
        The outputs of both for each sample.
    """
    plain = executables[1]
    envs: list[Env] = [dict(sampling.bind(plain.function, values, None)) for values in samples[1]]
    steps = {step.op: step for step in plain.plan.steps}
    there: list[Sequence[Env]] = [[]]

    def both(step: Step, read: Sequence[Values]) -> Step:
        return before(step, read, [plain.plan.arguments(steps[step.op], env) for env in envs])

    def look(step: Step, others: Sequence[Env]) -> None:
        there[0] = others
        ahead.look(step, (executables[0].plan, plain.plan), (others, envs), ops)

    def beside(step: Step) -> None:
        take_all(plain.plan, steps[step.op], envs, folder)

    compressed = op_by_op(executables[0], samples[0], both, ops, beside, look, outputs, folder)
    rest = plain.plan.steps[_last_of(plain.plan, ops) :]
    return compressed, [_rest(plain, env, rest) for env in envs] if outputs else []


def plain_moments(
    loaded: Loaded, name: str, samples: Sequence[Mapping[str, Any]], chosen: Sequence[Candidate]
) -> dict[Var, Array]:
    """The second moments of what the readers of each weight see in the plain model, for `correct`."""
    seen = Seen({r.op: r for one in chosen for r in one.readers})
    executable = Executable(loaded.program, function=name, fuse=False)
    for values in samples:
        executable(values, listener=seen)
    return {one.var: joined(one, [seen.moments_of(r.op) for r in one.readers])[0] for one in chosen}


@dataclass(frozen=True)
class Moments:
    """The second moments of what an op reads."""

    moments: Array
    """[groups, columns, columns]."""
    centre: Array | None = None
    """[groups, columns], whose products with each other the moments about zero have more."""


class Seen(Listener):
    """Adds up the first and second moments of what ops read."""

    def __init__(self, rows: Mapping[Operation, Rows]) -> None:
        self.rows = rows
        self.moments: dict[Operation, Array] = {}
        self._sums: dict[Operation, Array] = {}
        self._counts: dict[Operation, int] = {}

    def mean(self, op: Operation) -> Array:
        """[groups, columns]."""
        return np.asarray(self._sums[op] / self._counts[op])

    def size(self, op: Operation) -> tuple[int, int]:
        """Rows that an op has read, and columns; (0, 0) of a table."""
        return (self._counts[op], int(self.moments[op].shape[-1])) if op in self._counts else (0, 0)

    def moments_of(self, op: Operation, centred: bool = False) -> Moments:
        """The moments of what an op reads; about the mean, where a bias takes that up."""
        if not centred:
            return Moments(self.moments[op])
        centre = self.mean(op) * np.sqrt(self._counts[op])
        return Moments(self.moments[op] - centre[:, :, None] * centre[:, None], centre)

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        """An op is about to run."""
        self.see(op, [inputs])

    def step(self, step: Step, samples: Sequence[Values]) -> Step:
        """An op is about to run on all samples."""
        self.see(step.op, samples)
        return step

    def see(self, op: Operation, samples: Sequence[Values]) -> None:
        """What an op reads, for each sample.

        Raises:
            NotFinite: it reads NaN or infinity, whose moments say nothing.
        """
        if op not in self.rows:
            return
        rows = self.rows[op]
        if rows.inputs(samples[0]) is None:  # of a table each row is read as it is
            columns = rows.of(np.empty(rows.shape, np.bool_)).shape[-1]
            count = sum(torch.as_tensor(values["indices"]).numel() for values in samples)
            self.moments[op] = self.moments.get(op, 0) + np.eye(columns)[None] * (count / rows.shape[0])
            return
        for part in together(rows, samples):
            if not bool(torch.isfinite(part).all()):
                raise NotFinite(
                    f"{op.op_type} {op.name!r} reads NaN or infinity when a sample runs, so its weight cannot "
                    "be corrected; leave that sample out, or see with `anesurgery ranges` where values overflow"
                )
            self.moments[op] = self.moments.get(op, 0) + moments(part)
            self._sums[op] = self._sums.get(op, 0) + np.asarray(part.double().sum(1))
            self._counts[op] = self._counts.get(op, 0) + part.shape[1]


def together(rows: Rows, samples: Sequence[Values]) -> Iterator[torch.Tensor]:
    """What an op reads [groups, number, columns], of several samples at once: one by one takes longer.

    What a weight meets of all samples may be far more than they are, as the windows of a convolution are.
    """
    some: list[torch.Tensor] = []
    for number, values in enumerate(samples, 1):
        read = rows.inputs(values)
        assert read is not None
        some.append(read)
        if sum(one.shape[1] for one in some) >= MOST_INPUTS or number == len(samples):
            yield torch.cat(some, dim=1)
            some = []


def correct(
    one: Candidate,
    kind: str,
    hessians: Array,
    version: int,
    centres: Array | None = None,
    crossed: Array | None = None,
) -> Corrected:
    """One weight in a form, corrected for the second moments of its inputs.

    Args:
        one: the weight.
        kind: such as "int4" or "palette3".
        hessians: [groups, columns, columns]; about the mean where a bias takes that up.
        version: of the specification.
        centres: [means, groups, columns], whose products with each other the moments about zero have more;
            errors are shares of those.
        crossed: [groups, columns, columns], what the inputs have lost, times the inputs: the numbers that are
            rounded are those whose products with the inputs are nearest to what the plain ones make.
    """
    reader, weight, unit = one.readers[0], np.asarray(one.var.val), unit_of(hessians)
    hessians = (hessians / unit).astype(np.float32)
    crossed = None if crossed is None else (crossed / unit).astype(np.float32)
    centres = None if centres is None else centres / np.sqrt(unit)
    rows, shares = reader.of(weight.astype(np.float32)), [Shares.of(hessian) for hessian in hessians]
    if crossed is not None:
        rows = rows + np.stack([_taken_up(*each) for each in zip(shares, rows, crossed, strict=True)])
    channels, axis = reader.channels, reader.channel
    grid = Fitting(rows, hessians, channels, axis, weight.ndim, weight.dtype, shares).grid(kind)
    whole = lost(rows, None, hessians) + _of_means(rows, centres)
    first = nearest(rows, grid, hessians)
    plainly = first.error + _of_means(rows - first.rows, centres)
    rounding = best(first, rows, shares, hessians)
    del first
    form = rounding.grid.form(rounding.rows, reader.back, weight.dtype, version)
    array = decoded(form).reshape(weight.shape)
    stored = reader.of(array.astype(np.float32))
    error = rounding.error if np.array_equal(stored, rounding.rows) else lost(rows, stored, hessians)
    whole = max(whole, float(np.finfo(np.float64).tiny))
    return Corrected(one, kind, form, array, error / whole, size_of(form), plainly / whole)


def _taken_up(shares: Shares, rows: Array, crossed: Array) -> Array:
    """What rows gain that their products with the inputs come near to those with the plain ones."""
    if len(rows) > len(crossed):
        return np.asarray(rows @ shares.solved(crossed))
    return shares.solved(rows @ crossed)


def joined(one: Candidate, each: Sequence[Moments]) -> tuple[Array, Array | None]:
    """The moments for all readers of a weight, and the means that these are about.

    Each counts by its share of what it makes.
    """
    centres = [met.centre for met in each]
    if len(each) == 1:
        return each[0].moments, None if centres[0] is None else centres[0][None]
    rows, tiny = one.readers[0].of(np.asarray(one.var.val, np.float64)), float(np.finfo(np.float64).tiny)
    counts = [max(lost(rows, None, met.moments) + _of_means(rows, met.centre), tiny) for met in each]
    means = [c / np.sqrt(n) for c, n in zip(centres, counts, strict=True) if c is not None]
    total = np.asarray(sum(met.moments / n for met, n in zip(each, counts, strict=True)))
    return total, np.stack(means) if means else None


def _of_means(rows: Array, centres: Array | None) -> float:
    """What the products of rows with means [..., groups, columns] add to their squares."""
    return 0.0 if centres is None else float(np.square(rows @ centres[..., None]).sum())


def size_of(form: Form) -> int:
    """As a package holds it: numbers of less than a byte are packed."""
    return sum(_size(np.asarray(value)) for value in form.arrays.values())


def decoded(form: Form) -> Array:
    """The numbers that a form decodes to; those of a constant are its own."""
    return np.asarray(form.inputs["val"] if form.op_type == "const" else numbers_of(Result(form)))


def _size(value: Array) -> int:
    if not value.ndim:  # an axis, which the program holds
        return 0
    width = int(types.numpy_type_to_builtin_type(value.dtype).get_bitwidth())
    return -(-value.size * width // 8)
