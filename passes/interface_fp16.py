"""Change fp32 inputs and outputs of an fp16 program to fp16, and remove the casts at both ends.

Before::

    main(%x: 1x4) {
      %x_fp16: 1x4xfp16 = cast(x=%x, dtype="fp16")
      %r: 1x4xfp16 = relu(x=%x_fp16)
      %y: 1x4 = cast(x=%r, dtype="fp32")
      return %y
    }

After::

    main(%x: 1x4xfp16) {
      %y: 1x4xfp16 = relu(x=%x)
      return %y
    }

The change is declared: the caller passes fp16 arrays and gets them. `auto` makes the change if every chip of
the target loses time with the casts; `keep_interface=True` prevents it. If ops read an input as fp32, or
compute an output in fp32, a cast is added there (run `compute_fp16` first to make most of these fp16).

Refuses when the program is for iOS 15, whose interface has no fp16 (`newer_opset` upgrades it to iOS 16, which
is declared; `auto` does so if the target allows it), when an input or output is an image, and when an output is
also an input.

Why it helps: on M1 with macOS 14.6 the casts at the ends ran on the CPU; on M4 with macOS 27 they are legal on
the ANE (both measured through Core ML). Where a cast is removed, the types prove that the results are the same:
the caller rounds what the cast rounded. Where one is added, the value is rounded once more.

Grade: none: the interface changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Pass, Program, Refusal, Session, Var, mb
from anesurgery.files.interface import VERSION
from anesurgery.files.protobuf import opset_version
from anesurgery.placement.rules import legality, loading
from anesurgery.rewriting import newer_opsets

CASTS = next(rule for rule in legality.FORBIDDEN if rule.id == "fp32-cast")
"""Where casts at the ends cost something."""
NEEDED = int(an.ct.target.iOS16.value)
"""The specification version whose interface has fp16."""


@dataclass(frozen=True)
class InterfaceFp16(Pass):
    """fp32 inputs and outputs become fp16, declared."""

    name = "interface_fp16"
    tolerance = an.Tolerance(2e-3)
    rounds = True
    follows = ("compute_fp16",)
    newer_opset: bool = False
    """Make a program for iOS 15 one for iOS 16 and macOS 13."""

    @classmethod
    def variants(cls, target: an.Target) -> tuple[Pass, ...]:
        """Return the pass if every chip of the target pays for the casts."""
        if not (CASTS.scope.families >= target.families and CASTS.scope.concerns(target)):
            return ()
        return (cls(newer_opset=not loading.of_version(NEEDED, target) and target.os is not None),)

    def requires(self, program: Program) -> Refusal | None:
        """Refuse programs for iOS 15: fp16 inputs and outputs came with iOS 16."""
        if not _is_old(program):
            return None
        if self.newer_opset:
            return newer_opsets.why_not(program, NEEDED)
        words = "the program is for iOS 15, where inputs and outputs cannot be fp16"
        return Refusal(f"{words}; newer_opset=True makes it one for iOS 16 and macOS 13")

    def run(self, program: Program, session: Session) -> None:
        """Change each fp32 input, then each fp32 output, of each function."""
        if _is_old(program) and any(self.wanted(session, f) for f in program.functions.values()):
            program.functions.update(newer_opsets.raised(program, NEEDED).functions)
            words = "it needs iOS 16 or macOS 13"
            session.contract.append(an.InterfaceChange(words, (VERSION,), retypes=True))
        for function in program.functions.values():
            with an.GraphEdits(self, session, function) as edits:
                for name, var in list(function.inputs.items()):
                    if self.may_change(session, name, var):
                        self.input(edits, name, var)
                for var in list(function.outputs):
                    if self.may_change(session, var.name, var):
                        self.output(edits, var)

    def wanted(self, session: Session, function: an.Function) -> bool:
        """Is there an input or output that may become fp16?"""
        ports = [*function.inputs.items(), *((v.name, v) for v in function.outputs)]
        return any(self.may_change(session.again(), name, var) for name, var in ports)

    def may_change(self, session: Session, name: str, var: Var) -> bool:
        """Is an input or output an fp32 tensor that can become fp16? If it cannot, the session records why."""
        if not an.types.is_tensor(var.sym_type) or an.dtype_name(var) != "fp32":
            return False
        if name in session.images:
            session.refuse(self.name, f"%{name} is an image")
            return False
        if var.op is None and an.is_output(var):
            session.refuse(self.name, f"%{name} is an input and an output")
            return False
        return True

    def input(self, edits: an.GraphEdits, name: str, old: Var) -> None:
        """Make an input fp16, with a cast for ops that still read fp32."""
        new = edits.new_input(name, old.shape, an.types.fp16)
        readers = [op for op in an.consumers(old) if op.op_type == "cast" and not an.is_output(op.outputs[0])]
        casts = [cast for cast in readers if an.dtype_name(cast.outputs[0]) == "fp16"]
        for cast in casts:
            edits.replace(cast.outputs[0], new)
        removed = edits.remove(casts)
        if old.child_ops:
            edits.replace(old, edits.first().cast(x=new, dtype="fp32", name=f"{name}_fp32"))
        words = f"give {name} as fp16"
        change = an.InterfaceChange(words, (name,), inputs=lambda values: _halved(values, name), retypes=True)
        edits.session.declare(self.name, name, change, [f"cast {op.name}" for op in removed], ())

    def output(self, edits: an.GraphEdits, old: Var) -> None:
        """Make an output fp16: the operand of its last cast, or a cast of it."""
        last, name = an.producer(old, "cast"), old.name
        new: Var = old if last is None else last.x
        if an.dtype_name(new) != "fp16":
            source = new if an.dtype_name(new) == "bool" else old  # a condition is 0 or 1 in any type
            new = edits.last().cast(x=source, dtype="fp16", name=f"{name}_fp16")
        elif new.op is None or an.is_output(new) or len(new.op.outputs) > 1:
            new = edits.last().identity(x=new, name=f"{name}_fp16")
        edits.replace_output(old, new)
        edits.remove([] if last is None else [last])
        edits.take_name(old, new)
        words = f"{name} is fp16"
        change = an.InterfaceChange(words, (name,), outputs=lambda after, _: _halved(after, name), retypes=True)
        edits.session.declare(self.name, name, change, (), ())


def _is_old(program: Program) -> bool:
    return any(opset_version(f) < NEEDED for f in program.functions.values())


def _halved(values: an.Values, name: str) -> an.Values:
    if name not in values:
        return values
    with np.errstate(over="ignore"):
        return {**values, name: np.asarray(values[name]).astype(np.float16)}


@an.example((1, 4), opset="iOS16")
def example(x: Var) -> Var:
    """An fp16 program with casts at its ends."""
    r = mb.relu(x=mb.cast(x=x, dtype="fp16", name="x_fp16"), name="r")
    return mb.cast(x=r, dtype="fp32", name="y")
