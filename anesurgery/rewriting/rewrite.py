"""The rewrite as a pass, and the driver that applies it.

A pass author writes `pattern`, `check` and `rewrite`. The driver owns the rest: walking (nested blocks, all
functions), the worklist and its limit, where new ops go, names, proof, replacing, dead ops, scopes.
Work is proportional to the number of ops plus edits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar, TypeAlias

import numpy as np

from anesurgery.checking.site import SiteProof, prove_site
from anesurgery.errors import PassError, ProofError, Refusal, SurgeryError
from anesurgery.mil import (
    Array,
    Block,
    Function,
    Operation,
    Program,
    Var,
    consumers,
    is_output,
    operands,
    remove_input,
    static_shape,
)
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.dead_code import remove_dead
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, match
from anesurgery.rewriting.pattern import op as op_patterns
from anesurgery.rewriting.session import Change, Session
from anesurgery.text import operand_text, type_text

EDITS_PER_OP = 4
"""A rewrite that makes more edits than this for each op of a block reaches no fixed point."""

Result: TypeAlias = "Var | Sequence[Var] | Mapping[Var, Var]"
"""What `rewrite` returns: a Var for the root's output, a sequence for all its outputs, or {old: new}."""


@dataclass(frozen=True)
class Rewrite(Pass):
    """A pass that replaces what a pattern matches, everywhere, until nothing matches."""

    shares_inner: ClassVar[bool] = False
    """May inner values of a match be read elsewhere? (They then stay.)"""
    static: ClassVar[bool] = False
    """Refuse a match in which a value has a symbolic shape?"""

    def __init_subclass__(cls, **options: Any) -> None:
        """Build the pattern when the class is made, so that one that cannot match is an error there."""
        super().__init_subclass__(**options)
        if "pattern" in vars(cls):
            with suppress(AttributeError):  # it needs an option without default: built when the pass runs
                cls.pattern(object.__new__(cls), op_patterns)

    def pattern(self, op: Ops) -> OpPattern:
        """What to look for; its outermost op is the root."""
        raise NotImplementedError

    def check(self, m: Match) -> Match | Refusal | None:
        """Accept a match (perhaps with more bindings), say why not, or None: does not apply."""
        return m

    def rewrite(self, mb: Builder, m: Match) -> Result:
        """Build the new ops and return what replaces the old values."""
        raise NotImplementedError

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> Array | None:
        """Values for a boundary var of the proof whose range matters (ids, for example); None: default."""
        return None

    def run(self, program: Program, session: Session) -> None:
        """Apply the rewrite to every function."""
        pattern = self.pattern(op_patterns)
        for function in program.functions.values():
            _Driver(self, session, function, pattern).visit_block(function)
        for function, name in session.dropped_inputs:
            remove_input(function, name)
        session.dropped_inputs.clear()


@dataclass
class _Driver:
    """One rewrite on one function."""

    step: Rewrite
    session: Session
    function: Function
    pattern: OpPattern

    def visit_block(self, block: Block) -> None:
        """Visit a block's ops in order, and again what an edit may have enabled; then the nested blocks."""
        with block:
            ops = list(block.operations)
            queue = deque(op for op in ops if op.op_type in self.pattern.op_types)
            left = EDITS_PER_OP * len(ops) + 8
            while queue:
                root = queue.popleft()
                if root.enclosing_block is not block:
                    continue  # removed meanwhile, or in a nested block, which is visited later
                found = self.visit(root, left)
                left -= bool(found)
                queue.extend(op for op in found if op.op_type in self.pattern.op_types)
            for op in list(block.operations):
                for nested in op.blocks:
                    self.visit_block(nested)

    def visit(self, root: Operation, left: int) -> list[Operation]:
        """Edit at one root, if it matches; the ops that are worth another look.

        Raises:
            PassError: the pass raised (the cause is chained), or there are no edits left.
        """
        where = f"pass {self.step.name} at {root.name}"
        try:
            m = self.accept(root)
            if m is not None and not left:
                raise PassError(f"pass {self.step.name} reaches no fixed point; last edit at {root.name}")
            return [] if m is None else self.edit(m)
        except SurgeryError:
            raise
        except Exception as error:
            raise PassError(
                f"{where} ({root.op_type}) failed: {type(error).__name__}: {error}; "
                "the model given to it is unchanged"
            ) from error

    def accept(self, root: Operation) -> Match | None:
        """The match at one root, if every guard and the pass's own check agree; refusals are recorded."""
        m = match(self.pattern, root)
        if isinstance(m, Match):
            refusal = self.guard(m)
            m = self.step.check(m) if refusal is None else refusal
        if not isinstance(m, (Match, Refusal, NoneType)):
            raise PassError(
                f"pass {self.step.name} at {root.name}: `check` returned {m!r}; "
                "return the match, a Refusal with the reason, or None where the pass does not apply"
            )
        if isinstance(m, Refusal):
            self.session.refusals.append((self.step.name, m))
            return None
        return m

    def guard(self, m: Match) -> Refusal | None:
        """What the engine checks for every rewrite."""
        matched = set(m.ops)
        for op in m.ops[1:]:
            if op.enclosing_block is not m.root.enclosing_block:
                return Refusal(f"{op.name} is in another block", m.root)
            for v in () if self.step.shares_inner else op.outputs:
                if is_output(v) or not matched.issuperset(v.child_ops):
                    return Refusal(f"%{v.name} is read elsewhere", m.root)
        if self.step.static:
            for v in (v for op in m.ops for v in op.outputs):
                if static_shape(v) is None:
                    return Refusal(f"%{v.name} has the symbolic shape {tuple(v.shape)}", m.root)
        return None

    def edit(self, m: Match) -> list[Operation]:
        """Build, prove, replace, clean up; the ops that are worth another look."""
        builder = Builder(self.session, self.function, self.step.name, m.root)
        pairs = self.pairs(m, self.step.rewrite(builder, m))
        self.refuse_loops(m, pairs, builder.made)
        proof, unproven = self.prove(m, pairs, builder.made)
        readers = [op for old, _ in pairs for op in consumers(old)]
        for old, new in pairs:
            self.replace(builder, old, new)
        dead = remove_dead([*m.ops, *(old.op for old, _ in pairs if old.op is not None)])
        unused = remove_dead(builder.made)
        self.separate_names([old for old, _ in pairs])
        new_ops = [op for op in builder.made if op not in unused]
        bound = [f"{k}={operand_text(v)}" for k, v in m.bindings.items() if isinstance(v, Var)]
        change = Change(
            self.step.name, m.root.name, _names(dead), _names(new_ops), ", ".join(bound), proof, unproven
        )
        self.session.changes.append(change)
        return [*new_ops, *(op for op in readers if op.enclosing_block is not None)]

    def pairs(self, m: Match, result: Result) -> list[tuple[Var, Var]]:
        """What replaces what, with shapes and dtypes checked (declared interface changes may differ)."""
        if isinstance(result, Mapping):
            pairs = list(result.items())
        else:
            news = list(result) if isinstance(result, Sequence) else [result]
            if len(news) != len(m.root.outputs):
                raise PassError(
                    f"pass {self.step.name} at {m.root.name}: `rewrite` returned {len(news)} values "
                    f"for {len(m.root.outputs)}"
                )
            pairs = list(zip(m.root.outputs, news, strict=True))
        declared = {name for change in self.session.contract for name in change.names}
        for old, new in pairs:
            if not isinstance(new, Var):
                raise PassError(
                    f"pass {self.step.name} at {m.root.name}: `rewrite` returned {new!r} for "
                    f"%{old.name}, not a value"
                )
            same = tuple(old.shape or ()) == tuple(new.shape or ()) and old.dtype == new.dtype
            if not same and not (old.name in declared and not old.child_ops):
                raise PassError(
                    f"pass {self.step.name} at {m.root.name}: %{old.name} is {type_text(old)}, "
                    f"its replacement {type_text(new)}"
                )
        return pairs

    def refuse_loops(self, m: Match, pairs: list[tuple[Var, Var]], made: list[Operation]) -> None:
        """All readers of an old value will read the new one: a new op must not be among them."""
        olds = {old for old, _ in pairs}
        for op in made:
            for v in (v for _, v in operands(op) if v in olds):
                raise PassError(
                    f"pass {self.step.name} at {m.root.name}: the new {op.op_type} reads %{v.name}, "
                    "which it replaces"
                )

    def prove(
        self, m: Match, pairs: list[tuple[Var, Var]], made: list[Operation]
    ) -> tuple[SiteProof | None, str]:
        """Compare both sides while both exist.

        Raises:
            ProofError: they differ by more than the pass promises.
        """
        if not self.session.prove_sites:
            return None, ""
        comparable = [(old, new) for old, new in pairs if tuple(old.shape or ()) == tuple(new.shape or ())]
        if not comparable:
            return None, "the shape changes on purpose; the comparison of whole models covers it"
        started = time.perf_counter()
        known = self.session.proven.setdefault(str(self.step), {})
        proof = prove_site(
            comparable, made, lambda v, rng: self.step.sample(m, v, rng), self.session.rng, m.ops, known
        )
        self.session.proof_seconds += time.perf_counter() - started
        if isinstance(proof, str):
            return None, proof
        if not proof.within(self.step.tolerance):
            raise ProofError(
                f"pass {self.step.name} at {m.root.name}: old and new differ by {proof.max_abs:g} "
                f"({proof.max_rel:.2g} of the largest value); promised: {self.step.tolerance}"
            )
        return proof, ""

    def replace(self, builder: Builder, old: Var, new: Var) -> None:
        """Let every reader of `old` read `new`, which takes over the name."""
        if new.op not in builder.made or (is_output(old) and is_output(new)):
            if not is_output(old):
                self.substitute(old, new)
                return
            assert old.op is not None
            new = builder.before(old.op).identity(x=new)  # an output needs a name of its own
        self.substitute(old, new)
        if new.op is not None and len(new.op.outputs) == 1 and old.op is not None:
            new.op.name = old.op.name if len(old.op.outputs) == 1 else old.name
        new.name = old.name

    def separate_names(self, olds: list[Var]) -> None:
        """A replaced op that lives on, since its other outputs are read, gives its values other names."""
        for old in olds:
            if old.op is not None and old.op.enclosing_block is not None:
                old.name = self.session.fresh_name(self.function, f"{old.name}_replaced")

    def substitute(self, old: Var, new: Var) -> None:
        """Replace the uses; types were checked, so no type inference runs again."""
        block = old.op.enclosing_block if old.op is not None else self.function
        block.replace_uses_of_var_after_op(  # type: ignore[union-attr]
            anchor_op=old.op, old_var=old, new_var=new, no_check_var_types=True, force_replace=True
        )


def _names(ops: list[Operation]) -> tuple[str, ...]:
    return tuple(f"{op.op_type} {op.name}" for op in ops if op.op_type != "const")


__all__ = ["Builder", "Result", "Rewrite"]
