"""Compute what a model means where its own numbers do not say it in fp32.

`log(softmax(x))` of scores that are 104 apart adds the epsilon 1.4e-45 to a probability of 0. So fp32 gives
-103.3 whatever the scores are. The model means the difference of the scores, which a repaired model computes.

A conversion to fp16 makes the -3.4e38 of a mask infinite. Then 0 times it is NaN, and so is the softmax of a
row that is masked entirely. The model means the finite number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from anesurgery.facts.written_exponentials import LOGS_OF_SHARES, WrittenExponential, written_exponential
from anesurgery.interpret.arithmetic.fp64 import Double
from anesurgery.interpret.table import Implementation
from anesurgery.mil import Operation, Program, constant, is_stored, np_dtype, operands, walk_ops
from anesurgery.ops import names
from anesurgery.semantics.reading import number

SHARES = frozenset({"softmax", "sigmoid"})


def unguarded_log(op: Operation) -> WrittenExponential | None:
    """Return the form of a logarithm of a softmax or sigmoid without an epsilon that guards it, else None."""
    form = written_exponential(op) if op.op_type == "log" else None
    return form if form is not None and form.op_type in LOGS_OF_SHARES and not form.guard else None


def rounded_to_infinity(op: Operation) -> frozenset[str]:
    """Return the inputs of an op that are constants of fp16, and infinite."""
    halves = [(name, v) for name, v in operands(op) if is_stored(v) and np_dtype(v) == np.float16]
    return frozenset(name for name, v in halves if op.op_type in MASKING and np.isinf(constant(v)).any())


MASKING = names("add sub mul real_div select")
"""The ops with which masks are written."""
LARGEST = float(np.finfo(np.float32).max)


class Meant(Double):
    """The arithmetic of fp64 in which masks are finite, and log-softmax reads the operand of the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.exponents: dict[Operation, torch.Tensor] = {}
        """Softmax or sigmoid -> its operand in this run."""

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """Return the function of an op; a softmax or sigmoid keeps its operand for the logarithm."""
        plain = super().meaning(op, row)
        if infinite := rounded_to_infinity(op):
            return lambda **read: plain(**{k: finite(v) if k in infinite else v for k, v in read.items()})
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


def finite(value: Any) -> torch.Tensor:
    """Return a constant with the largest numbers of fp32 for infinities."""
    return torch.as_tensor(value).double().clamp(-LARGEST, LARGEST)


def arithmetic_of(program: Program) -> Any:
    """Return the arithmetic that computes what a program means: fp32, or `Meant` where that differs."""
    ops = (op for function in program.functions.values() for op in walk_ops(function))
    return Meant() if any(unguarded_log(op) is not None or rounded_to_infinity(op) for op in ops) else "fp32"
