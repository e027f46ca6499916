"""`Rewrite`: a pass that replaces what a pattern matches. Its author writes `pattern`, `check` and `rewrite`.

The rest is done here, and in `driver`. A `_Walk` visits the ops of a function, nested blocks included, with a
worklist: after an edit it visits the new ops and their readers again. An `_OpPlace` is one op at which the
pattern may match. `driver.operate` calls its methods: build the new ops, compare both sides, replace the old
ops, remove dead ones. Work is proportional to the number of ops plus edits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np

from anesurgery.checking.lengths import drawn_shape
from anesurgery.display import short_name
from anesurgery.errors import NO_MATCH, PassError, PatternError, Refusal
from anesurgery.mil import (
    Array,
    Block,
    Function,
    Operation,
    Program,
    Var,
    consumers,
    dtype_name,
    is_output,
    np_dtype,
    operands,
    remove_input,
    static_shape,
    visiting,
)
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.driver import Built, Place, alike, operate, remove_dead
from anesurgery.rewriting.graph_edits import hand_name, infer_readers, op_words, substitute, take_sizes
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, matches
from anesurgery.rewriting.pattern import op as op_patterns
from anesurgery.rewriting.session import ROUNDED, Change, Needs, Session
from anesurgery.semantics.analysis_cache import caching
from anesurgery.text import operand_text, type_text

EDITS_PER_OP = 4
"""A rewrite that makes more edits than this for each op of a block reaches no fixed point: passes end with one
edit for each op, or two; an endless one ends soon."""

Result: TypeAlias = "Var | Sequence[Var] | Mapping[Var, Var]"
"""What `rewrite` returns: a Var for the root's output, a sequence for all its outputs, or {old: new}."""

Pairs: TypeAlias = "list[tuple[Var, Var]]"
"""Old values, each with the one that replaces it."""


@dataclass(frozen=True)
class Rewrite(Pass, abstract=True):
    """A pass that replaces what a pattern matches, everywhere, until nothing matches."""

    kinds: ClassVar[frozenset[str]] = frozenset()
    """The op types at which it acts, where a pattern has nothing more to say."""
    shares_inner: ClassVar[bool] = False
    """May inner values of a match be read elsewhere? (They then stay.)"""
    static: ClassVar[bool] = False
    """Refuse a match in which a value has a symbolic shape?"""

    def __init_subclass__(cls, **options: Any) -> None:
        """Build the pattern when the class is made, so that one that cannot match is an error there."""
        super().__init_subclass__(**options)
        if {"pattern", "kinds"} & vars(cls).keys():
            with suppress(AttributeError):  # it needs an option without default: built when the pass runs
                _checked(cls, cls.pattern(object.__new__(cls), op_patterns))

    def pattern(self, op: Ops) -> OpPattern:
        """Return what to look for: by default any op of `kinds`.

        Args:
            op: makes patterns: `op.mul(x=var("x"), y=var("y"))`.

        Returns:
            The pattern; its outermost op is the root.
        """
        if not self.kinds:
            raise PassError(
                f"the pass {self.name} looks for nothing: write `pattern`, or `kinds` with op types"
            )
        return op.any(*([self.kinds] if isinstance(self.kinds, str) else sorted(self.kinds)))()

    def check(self, m: Match) -> Match | Refusal | None:
        """Decide whether the pass rewrites at a place.

        Args:
            m: the ops and values of the pattern; each value is a `Var`, with shape and dtype.

        Returns:
            The match, perhaps with more bindings (`m.bind(n=n)`), where it does; a `Refusal` with the reason,
            and the value that it rests on, where it does not; `NO_MATCH` where the pass is not about such a
            place (as None is taken, too).
        """
        return m

    def rewrite(self, mb: Builder, m: Match) -> Result:
        """Build the new ops.

        Args:
            mb: builds ops in front of the root, as coremltools' builder does; Python numbers take the dtype of
                the op's first float operand.
            m: what `check` gave.

        Returns:
            What replaces the old values: a `Var` for the root's output, a `Sequence` for all its outputs, or a
            `Mapping` {old: new}. Each has the shape and dtype of the old one.
        """
        raise PassError(f"the pass {self.name} builds nothing: write `rewrite`, which returns the new value")

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> Array | None:
        """Draw values for what a site reads where their range matters, as of ids.

        Args:
            m: the match.
            var: an input of the comparison of both sides.
            rng: to draw from.

        Returns:
            An array of the shape and dtype of `var`, by default of numbers of the range that `check` bound with
            `within=`; None for numbers as they are drawn elsewhere.
        """
        if var not in m.within:
            return None
        (low, high), shape, dtype = m.within[var], drawn_shape(var), np_dtype(var)
        if dtype.kind in "iu":
            return rng.integers(int(low), int(high) + 1, shape).astype(dtype)
        from anesurgery.checking.adversarial import between

        return between(low, high, shape, dtype, rng)

    def uncompared(self, m: Match) -> Refusal | None:
        """Say that numbers cannot be compared at a place.

        Args:
            m: the match.

        Returns:
            Why they cannot; None where they are compared.
        """
        return None

    def assumes(self, m: Match) -> Mapping[str, tuple[int, int]]:
        """Return the integers that an option lets the edit rely on, which models are compared on.

        Args:
            m: the match.

        Returns:
            Input -> the least and the largest; nothing by default.
        """
        return {}

    def run(self, program: Program, session: Session) -> None:
        """Apply the rewrite to every function.

        An option `assume` (input -> least and largest value) is given what the surgery assumes too; a note says
        what was assumed where the rewrite changed something.

        Args:
            program: is edited in place.
            session: is told of each change and refusal.

        Raises:
            PassError: a place raised, the rewrite reaches no fixed point, or it assumes something of an input
                that the program lacks.
        """
        edits, step = len(session.changes), cast(Any, self)
        has_option = hasattr(self, "assume")
        if has_option:
            step = replace(step, assume={**session.assume, **_own_assumptions(self, program)})
        pattern = _checked(type(self), step.pattern(op_patterns))
        for function in program.functions.values():
            _Walk(step, session, program, function, pattern).visit(function)
        for function, name in session.dropped_inputs:
            remove_input(function, name)
        session.dropped_inputs.clear()
        if has_option and step.assume and len(session.changes) > edits:
            ranges = (f"{name} in [{low}, {high}]" for name, (low, high) in step.assume.items())
            session.notes.append(f"assumed of the inputs: {', '.join(ranges)}")


def _own_assumptions(step: Any, program: Program) -> Mapping[str, tuple[float, float]]:
    """Return what a rewrite assumes of inputs by its own option `assume`.

    Raises:
        PassError: the model has no such input.
    """
    inputs = {name for function in program.functions.values() for name in function.inputs}
    if unknown := sorted({*(step.assume or {})} - inputs):
        raise PassError(
            f"{step.name}: the model has no input {unknown[0]!r}; it has {', '.join(sorted(inputs))}"
        )
    return step.assume or {}


def _checked(cls: type[Rewrite], pattern: object) -> OpPattern:
    """Return what `pattern` returned, if it is a pattern of an op.

    Raises:
        PatternError: it is no pattern of an op.
    """
    if isinstance(pattern, OpPattern):
        return pattern
    raise PatternError(
        f"`pattern` of {cls.__name__} returned {pattern!r}; it returns that of an op, as "
        '`op.relu(x=var("x"))`, or of one of several, as `op.any("relu", "relu6")(x=var("x"))`'
    )


@dataclass
class _Walk:
    """One rewrite on one function."""

    step: Rewrite
    session: Session
    program: Program
    function: Function
    pattern: OpPattern
    edited: list[Operation] = field(default_factory=list)
    """The ops at which something was built."""

    def visit(self, block: Block) -> None:
        """Visit a block's ops in order, and again what an edit may have enabled; then the nested blocks.

        Raises:
            PassError: there are too many edits; or a place raised.
        """
        with visiting(block, self.edited), caching() as forget:
            ops = list(block.operations)
            queue = deque(op for op in ops if op.op_type in self.pattern.op_types)
            edits_left = EDITS_PER_OP * len(ops) + 8
            while queue:
                root = queue.popleft()
                if root.enclosing_block is not block:
                    continue  # removed meanwhile, or in a nested block, which is visited later
                place = _OpPlace(self.step, self.session, self.program, self.function, self.pattern, root)
                edited = operate(place)
                if edited or place.builder.made:
                    self.edited.append(root)
                    forget()
                if edited:
                    if not edits_left:
                        last = short_name(root.name, 60)  # each edit may have made it longer
                        raise PassError(f"pass {self.step.name} reaches no fixed point; last edit at {last}")
                    edits_left -= 1
                    queue.extend(op for op in place.again if op.op_type in self.pattern.op_types)
            for op in list(block.operations):
                for nested in op.blocks:
                    self.visit(nested)


@dataclass
class _OpPlace(Place):
    """An op at which a pattern may match."""

    step: Rewrite
    session: Session
    program: Program
    function: Function
    pattern: OpPattern
    root: Operation
    again: list[Operation] = field(default_factory=list)
    """After an edit: the ops that are worth another look."""

    def __post_init__(self) -> None:
        self.builder = Builder(self.session, self.function, self.step.name, self.root)
        self.match: Match | None = None

    def __str__(self) -> str:
        return self.root.name

    @property
    def kind(self) -> str:
        """The op type."""
        return self.root.op_type

    def build(self) -> Built | Refusal:
        """Build the new ops, if every guard and the pass's check agree; else return the first reason."""
        m = self.accept()
        if not isinstance(m, Match):
            return m
        self.match, self.mark = m, self.session.marked(self.function)
        pairs = self.pairs(m, self.step.rewrite(self.builder, m))
        made = list(self.builder.made)
        self.refuse_loops(pairs, made)
        uncompared = self.refusal(ROUNDED) if self.builder.rounded() else self.step.uncompared(m)
        return Built(pairs, made, m.ops, uncompared, m.limits)

    def needs(self, built: Built) -> Needs | Refusal | None:
        """See what the edit needs of the values that it reads.

        Returns:
            The `Needs` that only a run shows; a `Refusal` where a value is larger; None for no needs.
        """
        from anesurgery.checking.edit_sites import limits_of, site_of
        from anesurgery.rewriting.needs import needs_of

        promise = replace(self.step.promise, limits=built.limits)
        limits = limits_of(site_of(built.pairs, built.made, built.matched), promise)
        return needs_of(limits, self.session, self.program, self.function) if limits else None

    def refusal(self, reason: str) -> Refusal:
        """Return a refusal at the op."""
        return Refusal(reason, self.root)

    def accept(self) -> Match | Refusal:
        """Return the first match that every guard and the pass's own check accept; else the first reason.

        A pattern may match in several ways, as one of `any_of` or with x and y exchanged.
        """
        found, reason = matches(self.pattern, self.root)
        for match in found:
            answer = self.judged(match)
            if isinstance(answer, Match):
                return answer
            reason = answer if reason is NO_MATCH else reason
        return reason

    def judged(self, match: Match) -> Match | Refusal:
        """Return what the guards, and then the pass's own check, say of a match.

        Raises:
            PassError: the check returned something else than it may.
        """
        refusal = self.guard(match)
        m = self.step.check(match) if refusal is None else refusal
        if m is None:  # a check may return None for `NO_MATCH`
            return NO_MATCH
        if not isinstance(m, (Match, Refusal)):
            raise self.error(
                f"`check` returned {m!r}; "
                "return the match, a Refusal with the reason, or NO_MATCH where the pass does not apply"
            )
        return m

    def guard(self, m: Match) -> Refusal | None:
        """Return what stands against a match of any rewrite: other blocks, other readers, symbolic shapes."""
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

    def pairs(self, m: Match, result: Result) -> Pairs:
        """Return the old values, each with its replacement, whose shape and dtype are checked.

        An output may change both if the pass declared that.

        Raises:
            PassError: `rewrite` returned something else, or a value of another shape or dtype.
        """
        if isinstance(result, Mapping):
            pairs = list(result.items())
        else:
            news = list(result) if isinstance(result, Sequence) else [result]
            if len(news) != len(m.root.outputs):
                raise self.error(f"`rewrite` returned {len(news)} values for {len(m.root.outputs)}")
            pairs = list(zip(m.root.outputs, news, strict=True))
        declared = {name for change in self.session.contract for name in change.names}
        for old, new in pairs:
            if not isinstance(new, Var):
                raise self.error(f"`rewrite` returned {new!r} for %{old.name}, not a value")
            if new.op in self.builder.made:
                take_sizes(new, old)
            same = alike(old, new, self.step.refines) and dtype_name(old) == dtype_name(new)
            if not same and not (old.name in declared and not old.child_ops):
                raise self.error(
                    f"%{old.name} is {type_text(old)}, its replacement {type_text(new)}; let `check` refuse "
                    "such a place, or `rewrite` bring it to that shape and type"
                )
        return pairs

    def refuse_loops(self, pairs: Pairs, new_ops: Sequence[Operation]) -> None:
        """Refuse a new op that reads an old value: all its readers will read the new one.

        Raises:
            PassError: there is one.
        """
        olds = {old for old, _ in pairs}
        for op in new_ops:
            for v in (v for _, v in operands(op) if v in olds):
                raise self.error(f"the new {op.op_type} reads %{v.name}, which it replaces")

    def sample(self, var: Var, rng: np.random.Generator) -> Array | None:
        """Return the values that the pass draws for an input of the comparison."""
        assert self.match is not None
        return self.step.sample(self.match, var, rng)

    def undo(self) -> None:
        """Remove the new ops and inputs, and what the pass declared."""
        remove_dead([*self.builder.made])
        if self.match is not None:
            self.session.reset(self.function, self.mark)

    def replace(self, built: Built) -> Change:
        """Let all readers read the new values, remove the dead ops, and return the record of the edit."""
        assert self.match is not None
        olds = [old for old, _ in built.pairs]
        readers = [op for old in olds for op in consumers(old)]
        refined = [new for old, new in built.pairs if self.step.refines and not alike(old, new)]
        for old, new in built.pairs:
            self.hand_over(old, new)
        infer_readers(self.function, refined)
        dead = remove_dead([*self.match.ops, *(old.op for old in olds if old.op is not None)])
        unused = set(remove_dead([*self.builder.made]))
        self.separate_names(olds)
        new_ops = [op for op in self.builder.made if op not in unused]
        self.again = [*new_ops, *(op for op in readers if op.enclosing_block is not None)]
        bound = [f"{k}={operand_text(v)}" for k, v in self.match.bindings.items() if isinstance(v, Var)]
        return Change(
            pass_name=self.step.name,
            where=self.root.name,
            before=op_words(dead),
            after=op_words(new_ops),
            bindings=", ".join(bound),
            assumes=self.step.assumes(self.match),
        )

    def hand_over(self, old: Var, new: Var) -> None:
        """Let every reader of `old` read `new`, which takes over the name if the rewrite built it.

        A value that was there before keeps its own name. An output needs an op of its own, for its name: if the
        replacement is not new, or is an output too, an identity of it becomes the output.
        """
        if new.op not in self.builder.made or (is_output(old) and is_output(new)):
            if not is_output(old):
                substitute(self.function, old, new)
                return
            assert old.op is not None
            new = self.builder.before(old.op).identity(x=new)
        substitute(self.function, old, new)
        hand_name(old, new)

    def separate_names(self, olds: list[Var]) -> None:
        """Rename old values whose op stays, as its other outputs are read: their names were handed over."""
        for old in olds:
            if old.op is not None and old.op.enclosing_block is not None:
                old.name = self.session.fresh_name(self.function, f"{old.name}_replaced")


__all__ = ["Builder", "Result", "Rewrite"]
