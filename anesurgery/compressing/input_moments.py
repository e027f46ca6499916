"""Sum up what ops read over all samples: means, second moments, and how far they moved from the plain model.

`correcting` needs them for each weight: the second moments of the inputs, the sum of x^T x, are the Hessian of
the squared error of the products. Arrays have the groups and columns of `weight_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from anesurgery.compressing.fitting import product_error
from anesurgery.compressing.running_samples import Values
from anesurgery.compressing.second_order import second_moments
from anesurgery.compressing.weight_rows import WeightRows
from anesurgery.errors import NotFinite
from anesurgery.interpret.steps import Step
from anesurgery.interpret.table import Listener
from anesurgery.mil import Array, Operation

MOST_INPUTS = 4096
"""Rows of inputs that are multiplied together, to bound the memory."""
LEAST_SPREAD = 1e-4
"""Share of the second moments that must be left about the mean. A choice: less is rounding."""


class InputSize(NamedTuple):
    """How many inputs of an op the samples gave."""

    inputs: int
    columns: int


LOOKED_UP = InputSize(0, 0)
"""The size for a table of embeddings, which no input is multiplied with."""


@dataclass(frozen=True)
class InputMoments:
    """The second moments of what an op reads."""

    matrix: Array
    """[groups, columns, columns], about 0 or about the mean."""
    centre: Array | None = None
    """[groups, columns], if they are about the mean: the mean times the root of the count, so that its products
    with itself are count * mean^T mean, which the moments about 0 have more than the matrix."""


class MomentRecorder(Listener):
    """Sums up moments of what ops read: `before` as one sample runs, `before_step` as all run step by step.

    Args:
        readers: the ops to watch, each with how it reads its weight.
    """

    def __init__(self, readers: Mapping[Operation, WeightRows]) -> None:
        self.readers = readers
        self.matrices: dict[Operation, Array] = {}
        self._sums: dict[Operation, Array] = {}
        self._counts: dict[Operation, int] = {}

    def mean(self, op: Operation) -> Array:
        """Return the mean of what an op read, [groups, columns]."""
        return np.asarray(self._sums[op] / self._counts[op])

    def size(self, op: Operation) -> InputSize:
        """Return how many rows an op read, and their columns."""
        count = self._counts.get(op)
        return LOOKED_UP if count is None else InputSize(count, int(self.matrices[op].shape[-1]))

    def moments_of(self, op: Operation, centred: bool = False) -> InputMoments:
        """Return the moments of what an op read; about the mean if its bias will be corrected.

        Of inputs that hardly vary, as a single row, they are about 0: any weight would do about the mean, since
        the bias corrects all of its error on these inputs, and on no others.
        """
        matrix = self.matrices[op]
        if not centred:
            return InputMoments(matrix)
        centre = self.mean(op) * np.sqrt(self._counts[op])
        spread = matrix - centre[:, :, None] * centre[:, None]
        trace, whole_trace = (np.trace(each, axis1=1, axis2=2).sum() for each in (spread, matrix))
        return InputMoments(spread, centre) if trace > LEAST_SPREAD * whole_trace else InputMoments(matrix)

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        """Add the inputs of an op that is about to run."""
        self.add(op, [inputs])

    def before_step(self, step: Step, samples: Sequence[Values]) -> Step:
        """Add the inputs of a step that is about to run on all samples, and return it."""
        self.add(step.op, samples)
        return step

    def add(self, op: Operation, samples: Sequence[Values]) -> None:
        """Add what an op reads in each sample.

        Raises:
            NotFinite: it reads NaN or infinity, so its moments mean nothing.
        """
        if (reader := self.readers.get(op)) is None:
            return
        if reader.inputs(samples[0]) is None:  # a table: as if each row were looked up equally often
            columns = reader.to_rows(np.empty(reader.shape, np.bool_)).shape[-1]
            count = sum(torch.as_tensor(values["indices"]).numel() for values in samples)
            self.matrices[op] = self.matrices.get(op, 0) + np.eye(columns)[None] * (count / reader.shape[0])
            return  # without a count of inputs, which a table has none of: its size is `LOOKED_UP`
        for inputs in batched_inputs(reader, samples):
            if not bool(torch.isfinite(inputs).all()):
                raise NotFinite(
                    f"{op.op_type} {op.name!r} reads NaN or infinity when a sample runs, so its weight cannot "
                    "be corrected; leave that sample out, or see with `anesurgery ranges` where values overflow"
                )
            self.matrices[op] = self.matrices.get(op, 0) + second_moments(inputs)
            self._sums[op] = self._sums.get(op, 0) + np.asarray(inputs.double().sum(1))
            self._counts[op] = self._counts.get(op, 0) + inputs.shape[1]


def batched_inputs(reader: WeightRows, samples: Sequence[Values]) -> Iterator[torch.Tensor]:
    """Yield what an op reads, [groups, number, columns], of several samples at once, which is faster.

    All samples at once would take too much memory: the patches of a convolution are far larger than its input.
    """
    batch: list[torch.Tensor] = []
    for number, values in enumerate(samples, 1):
        inputs = reader.inputs(values)
        assert inputs is not None
        batch.append(inputs)
        if sum(each.shape[1] for each in batch) >= MOST_INPUTS or number == len(samples):
            yield torch.cat(batch, dim=1)
            batch = []


def joint_moments(
    weight: Array, reader: WeightRows, moments: Sequence[InputMoments]
) -> tuple[Array, Array | None]:
    """Return the moments for all ops that read one weight, each divided by the squares of its products.

    Args:
        weight: the numbers.
        reader: how any of the ops reads it; all have one layout.
        moments: of each op.

    Returns:
        The sum of the matrices [groups, columns, columns], and the centres [ops, groups, columns] of those that
        are about the mean; None without any.
    """
    centres = [each.centre for each in moments]
    if len(moments) == 1:
        return moments[0].matrix, None if centres[0] is None else centres[0][None]
    rows, tiny = reader.to_rows(weight.astype(np.float64)), float(np.finfo(np.float64).tiny)
    errors = [product_error(rows, None, each.matrix) + centre_error(rows, each.centre) for each in moments]
    squares = [max(error, tiny) for error in errors]  # errors against zeros: the squares of all products
    scaled = [c / np.sqrt(n) for c, n in zip(centres, squares, strict=True) if c is not None]
    total = np.asarray(sum(each.matrix / n for each, n in zip(moments, squares, strict=True)))
    return total, np.stack(scaled) if scaled else None


def centre_error(rows: Array, centres: Array | None) -> float:
    """Return what the means add to the squared products of rows: moments about the mean leave it out.

    Args:
        rows: [groups, rows, columns].
        centres: [..., groups, columns], as in `InputMoments`; None where moments are about 0.
    """
    return 0.0 if centres is None else float(np.square(rows @ centres[..., None]).sum())


@dataclass(frozen=True)
class InputDrift:
    """How far the inputs of an op moved from those of the plain model, by the weights compressed before it."""

    mean: Array
    """[groups, columns]: the mean of plain - actual."""
    crossed: Array
    """[groups, columns, columns]: the sum of (plain - actual)^T actual."""

    @classmethod
    def of(
        cls, reader: WeightRows, samples: Sequence[Values], plain: Sequence[Values], mean: Array | None
    ) -> InputDrift | None:
        """Return the drift over all samples; None for a table, without a difference, and for infinite ones.

        Args:
            reader: how the op reads its weight.
            samples: the arguments of the op in each sample.
            plain: the same in the plain model.
            mean: [groups, columns], of the inputs if a bias takes up the drift of the mean.
        """
        if reader.inputs(samples[0]) is None:
            return None
        count, total, crossed = 0, torch.zeros(()), torch.zeros(())
        for actual, expected in zip(
            batched_inputs(reader, samples), batched_inputs(reader, plain), strict=True
        ):
            difference = expected.float() - actual.float()
            if not bool(difference.isfinite().all()):
                return None
            total = total + difference.double().sum(1)
            crossed = crossed + (difference.transpose(1, 2) @ actual.float()).double()
            count += actual.shape[1]
        if not bool(crossed.any()):
            return None
        if mean is not None:
            crossed = crossed - total[:, :, None] * torch.from_numpy(mean)[:, None]
        return cls(np.asarray(total / count), np.asarray(crossed))
