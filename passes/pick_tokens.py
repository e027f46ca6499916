"""Let the model return the likeliest token of each row, or the likeliest few with their logits.

Before::

    main(%x: 1x2x4xfp16) {
      %logits: 1x2x6xfp16 = linear(x=%x, weight=const<6x4xfp16>)
      return %logits
    }

After::

    main(%x: 1x2x4xfp16) {
      %logits: 1x2x6xfp16 = linear(x=%x, weight=const<6x4xfp16>)
      %tokens: 1x2xint32 = reduce_argmax(x=%logits)
      return %tokens
    }

With `k` above 1 the outputs are `top_values` and `top_tokens`, largest first. `cap` limits these logits as
`cap * tanh(logits / cap)`, and `temperature` divides them; both keep the order, so only `k` numbers are
computed. `output` names the logits, by default the widest output. `anesurgery.generate` reads such models. Run
`select_last_token` as well to return one row only.

`each_part=True` is for a head that was cut by vocabulary (`split_head`). `part_tokens` and `part_values` then
hold the likeliest token of each part and its logit, with the parts on the last axis, and the caller takes the
best; the row of the whole vocabulary is never joined. A head that was not cut has one part.

Refuses when no output holds floats for more than one word, when there are fewer words than `k`, when
`cap / temperature` overflows, and when the logits are random numbers.

Why it helps: the model returns a few numbers instead of a row for each word of the vocabulary. The search
itself stays on the CPU, since its index is int32 (measured, M4, macOS 27.0.1, by
751K/Apple-Neural-Engine-Microarchitecture-Study-M6). What the pass gains in time was not measured.

Grade: none: the interface changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Pass, Program, Refusal, Session, Var, mb
from anesurgery.errors import PassError, UnknownName
from anesurgery.facts import dependence
from anesurgery.interpret.decoder_calls import INPUTS, PART_TOKENS, PART_VALUES, TOKENS, TOP_TOKENS, TOP_VALUES


@dataclass(frozen=True)
class PickTokens(Pass):
    """Tokens in place of logits."""

    name = "pick_tokens"
    follows = ("add_cache", "select_last_token", "split_head", "scale_ranges")
    k: int = an.option(1, least=1)
    """How many tokens."""
    temperature: float = an.option(1.0, above=0.0)
    """What the logits of the likeliest tokens are divided by."""
    cap: float | None = an.option(None, above=0.0)
    """What the logits of the likeliest tokens are bent below."""
    output: str | None = None
    """The name of the logits; the widest output by default."""
    each_part: bool = False
    """Give the likeliest token of each part of the head, and its logit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k == 1 and (self.temperature != 1 or self.cap is not None):
            raise PassError(
                f"{self.name}: the likeliest token depends on no temperature or cap; they need k=2 or more"
            )
        if self.each_part and self.k > 1:
            raise PassError(f"{self.name}: each part gives one token; each_part=True takes no k")

    @property
    def factor(self) -> float:
        """What the likeliest logits, bent below `cap` if there is one, are multiplied by."""
        return (self.cap or 1.0) / self.temperature

    def requires(self, program: Program) -> Refusal | None:
        """Refuse programs without logits for enough words.

        Raises:
            UnknownName: there is no such output.
        """
        for function in _reading(program):
            outputs = [v.name for v in function.outputs]
            if self.output is not None and self.output not in outputs:
                raise UnknownName("output", self.output, outputs)
            if {TOKENS, TOP_TOKENS, PART_TOKENS} & set(outputs):
                return Refusal("the model gives tokens already")
            if (head := self.logits(function)) is None:
                return Refusal(f"no output holds logits: {', '.join(outputs)}")
            if head.shape[-1] < self.k:
                return Refusal(f"%{head.name} has {head.shape[-1]} words, fewer than k={self.k}", head.op)
            if self.factor > float(np.finfo(an.np_dtype(head)).max):
                return Refusal(
                    f"%{head.name} times {self.factor:g}, by cap and temperature, overflows", head.op
                )
            if drawn := [op for op in dependence.slice_back([head], set()) if op.op_type in an.ops.RANDOM]:
                return Refusal(f"%{head.name} is drawn at random, and is another in each run", drawn[0])
        return None

    def logits(self, function: an.Function) -> Var | None:
        """Return the output with the most words, or the one that is named."""
        floats = [v for v in function.outputs if self.output is None or v.name == self.output]
        words = {v: (v.shape or (1,))[-1] for v in floats if an.np_dtype(v).kind == "f"}
        heads = [v for v, count in words.items() if isinstance(count, int) and count > 1]
        return max(heads, key=lambda v: words[v], default=None)

    def run(self, program: Program, session: Session) -> None:
        """Edit all functions alike."""
        names: dict[str, None] = {}
        sizes: list[int] = []
        for function in _reading(program):
            logits = self.logits(function)
            assert logits is not None
            sizes = [int(part.shape[-1]) for part in _parts(logits)]
            with an.GraphEdits(self, session, function) as edits:
                edits.replace_output(logits, *self.picked(edits.last(), logits))
                edits.remove([logits.op] if logits.op is not None else [])
            names[logits.name] = None
        new = (TOP_VALUES, TOP_TOKENS) if self.k > 1 else (TOKENS,)
        new = (PART_VALUES, PART_TOKENS) if self.each_part else new
        name = next(iter(names))
        words = f"{' and '.join(new)} in place of {', '.join(names)}"
        change = an.InterfaceChange(words, (*new, *names), outputs=lambda o, i: self.expected(o, name, sizes))
        session.declare(self.name, name, change, list(names), new)

    def picked(self, mb: Builder, logits: Var) -> list[Var]:
        """Build the outputs that replace the logits."""
        if self.each_part:
            return _of_parts(mb, _parts(logits))
        if self.k == 1:
            return [mb.reduce_argmax(x=logits, axis=-1, keep_dims=False, name=TOKENS)]
        values, tokens = mb.topk(x=logits, k=self.k, axis=-1, name="top")
        kind = an.np_dtype(logits).type
        if self.cap is not None:
            values = mb.tanh(x=mb.mul(x=values, y=kind(1 / self.cap)))
        values = mb.mul(x=values, y=kind(self.factor), name=TOP_VALUES)
        return [values, mb.identity(x=tokens, name=TOP_TOKENS)]

    def expected(self, outputs: an.Values, name: str, sizes: Sequence[int]) -> an.Values:
        """What the new model gives, from what the old one gave; `sizes` are those of the parts of the head."""
        rest, logits = {n: v for n, v in outputs.items() if n != name}, outputs[name]
        if self.each_part:
            starts = np.cumsum([0, *sizes[:-1]])
            pieces = np.split(logits, starts[1:], axis=-1)
            tokens = [np.argmax(p, -1).astype(np.int32) + at for p, at in zip(pieces, starts, strict=True)]
            values = np.stack([np.max(p, -1) for p in pieces], -1)
            return {**rest, PART_VALUES: values, PART_TOKENS: np.stack(tokens, -1).astype(np.int32)}
        if self.k == 1:
            return {**rest, TOKENS: np.argmax(logits, -1).astype(np.int32)}
        order = np.argsort(-logits, axis=-1, kind="stable")[..., : self.k]
        values = np.take_along_axis(logits, order, -1)
        values = values if self.cap is None else self.cap * np.tanh(values / self.cap)
        return {**rest, TOP_VALUES: values / self.temperature, TOP_TOKENS: order.astype(np.int32)}


def _reading(program: Program) -> list[an.Function]:
    """Return the functions that read tokens: all but those that compute inputs from the position."""
    return [function for name, function in program.functions.items() if not name.endswith(INPUTS)]


def _parts(logits: Var) -> list[Var]:
    """Return the parts of a head that are joined on the last axis; the head itself if it is whole."""
    op = logits.op
    while op is not None and op.op_type in ("cast", "identity"):
        op = op.x.op
    if op is None or op.op_type != "concat" or an.flag(op, "interleave"):
        return [logits]
    return list(op.inputs["values"]) if an.reading.axis_of(op) == logits.rank - 1 else [logits]


def _of_parts(mb: Builder, parts: Sequence[Var]) -> list[Var]:
    """Build the largest logit of each part, and its token."""
    values = [mb.reduce_max(x=part, axes=[-1], keep_dims=True) for part in parts]
    tokens, start = [], 0
    for part in parts:
        place = mb.reduce_argmax(x=part, axis=-1, keep_dims=True)
        tokens.append(mb.add(x=place, y=np.int32(start)) if start else place)
        start += int(part.shape[-1])
    if len(parts) == 1:
        return [mb.identity(x=values[0], name=PART_VALUES), mb.identity(x=tokens[0], name=PART_TOKENS)]
    joined = ((values, PART_VALUES), (tokens, PART_TOKENS))
    return [mb.concat(values=listed, axis=-1, name=name) for listed, name in joined]


@an.example((1, 2, 4), dtype="fp16", opset="iOS18")
def example(x: Var) -> Var:
    """A head of six words over two positions."""
    weight = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float16)
    return mb.linear(x=x, weight=weight, name="logits")
