"""Compute what a model means where fp32 itself is the limit: the logarithm of a probability that is 0 in fp32.

`log(softmax(x))` of scores that are 104 apart adds the epsilon 1.4e-45 to a probability of 0. So fp32 gives
-103.3 whatever the scores are. The model means the difference of the scores, which a repaired model computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anesurgery.facts.written_exponentials import LOGS_OF_SHARES, WrittenExponential, written_exponential
from anesurgery.interpret.arithmetic.fp64 import Double
from anesurgery.interpret.table import Implementation
from anesurgery.mil import Operation, Program, walk_ops
from anesurgery.semantics.reading import number

SHARES = frozenset({"softmax", "sigmoid"})


def unguarded_log(op: Operation) -> WrittenExponential | None:
    """Return the form of a logarithm of a softmax or sigmoid without an epsilon that guards it, else None."""
    form = written_exponential(op) if op.op_type == "log" else None
    return form if form is not None and form.op_type in LOGS_OF_SHARES and not form.guard else None


class Meant(Double):
    """The arithmetic of fp64 in which the logarithm of a softmax or sigmoid is computed from its operand."""

    def __init__(self) -> None:
        super().__init__()
        self.exponents: dict[Operation, torch.Tensor] = {}
        """Softmax or sigmoid -> its operand in this run."""

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """Return the function of an op; a softmax or sigmoid keeps its operand for the logarithm."""
        plain = super().meaning(op, row)
        if (form := unguarded_log(op)) is not None:
            return lambda **operands: self._log(form)
        if op.op_type not in SHARES:
            return plain

        def compute(**operands: Any) -> Any:
            self.exponents[op] = operands["x"].double()
            return plain(**operands)

        return compute

    def _log(self, form: WrittenExponential) -> torch.Tensor:
        x, share = self.exponents[form.exponential], form.exponential
        if form.op_type == "log_sigmoid":
            return torch.nn.functional.logsigmoid(-x if form.opposite else x)
        return torch.log_softmax(x, int(number(share.axis) or 0))


def arithmetic_of(program: Program) -> Any:
    """Return the arithmetic that computes what a program means: fp32, or `Meant` for such logarithms."""
    ops = (op for function in program.functions.values() for op in walk_ops(function))
    return Meant() if any(unguarded_log(op) is not None for op in ops) else "fp32"
