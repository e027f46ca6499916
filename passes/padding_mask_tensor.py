"""Make the fill of a mask that is computed from an input a finite number.

Every constant below -32000 in the mask of a softmax (`mul`, `add`, `select`, `sub`, `maximum`, `minimum`)
becomes `fill`; a mask that depends on inputs only is computed once for all layers. In fp16 the largest numbers
of fp32 are infinite, and `(1 - mask) * -inf` is NaN wherever the mask keeps a score.

The pass assumes masks of 0 and 1. Rows in which some position stays visible keep their weights, since exp(fill)
is 0. Rows in which every position is masked had equal weights, if the old fill was so low that scores vanished
beside it, or NaN. If the fill is added, they now have the weights of the unmasked scores. With `equal=True`
their weights are equal again: a `maximum` for each mask cuts masked scores off at half the fill, as
`safe_numbers` does.

`equal=True` leaves a mask of two sums, and that of fused attention, as it is: there, keys hidden by one mask
and by both were treated differently.

Refuses when the mask is causal (`causal_mask_tensor` makes one tensor of it), and when a fill is also a result
of the model.

Why it helps: the softmax of the engine does not handle -inf (Apple, for Core AI), and a number below -32768
becomes -inf where the sum is fused with the product (measured ceiling: M1 to M6). A fill of -1e4 is what
Apple's own transformers use. What the pass gains in time was not measured.

Grade: checked: it rests on the size of the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.checking.lengths import drawn_shape
from anesurgery.facts import attention
from anesurgery.facts import masks as masks_facts

DEEPEST = 3.2e4
"""Beyond this a fill is too deep: two of them add up to less than fp16 holds, and -inf less -inf is NaN."""
FILLING = frozenset({"add", "sub", "mul", "select", "maximum", "minimum"})
"""Ops that bring a fill in."""
MASKING = an.ops.POINTWISE | an.ops.CARRIERS | {"tile"}
"""Ops with which masks are computed."""
MOST_OPS = 40
"""Ops upstream of a softmax that are looked at; masks of transformers take up to ten, and several may be
joined."""


@dataclass(frozen=True)
class PaddingMaskTensor(Rewrite):
    """Masks from inputs are filled with a finite number."""

    name = "padding_mask_tensor"
    kinds = an.ops.SHARING
    follows = ("causal_mask_tensor",)
    tolerates_nonfinite = False
    """An infinite score that was masked meets a finite number to add."""
    shares_inner = True
    caveat = (
        "where a mask that keeps a score is multiplied with an infinity, the old numbers are NaN and were not "
        "compared; a row in which a sum masks all has the weights of its scores, and with equal=True equal ones"
    )
    fill: float = an.option(-1e4, least=-DEEPEST, most=attention.MASKED)
    """What is added to a score that is masked."""
    equal: bool = False
    """Do rows that keep nothing have equal weights, for the price of an op?"""

    def check(self, m: Match) -> Match | Refusal:
        """Find the fills that are not finite."""
        chain = attention.mask_chain(m.root)
        if isinstance(chain, Refusal):
            return chain
        ops = _upstream(m.root, chain.scores)
        fills = {op: names for op in ops if (names := _operands_with_deep_fill(op))}
        if not fills:
            return an.NO_MATCH
        if masks_facts.against_causal_attention(m.root) is None:
            return Refusal("the mask is causal; causal_mask_tensor turns it into one tensor", m.root)
        changed = _downstream(ops, {op.outputs[0] for op in fills})
        if outputs := [v.name for op in changed for v in op.outputs if an.is_output(v)]:
            return Refusal(f"%{outputs[0]} is a result of the model", m.root)
        on_scores = set(_downstream(ops, {chain.scores}))  # others compute the mask, which layers share
        masks = {v for op in ops for _, v in an.operands(op) if op not in on_scores or v is not chain.scores}
        most = an.intervals.masked_up_to(self.fill / 2 if self.equal else self.fill)
        limits = an.intervals.score_limits(m.root, chain.scores, most)
        return m.bind(changed=changed, fills=fills, on_scores=on_scores, masks=masks, limits=limits)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw masks of 0 and 1 that keep some keys and mask others, whichever of the two keeps."""
        if var not in m.masks or not (shape := drawn_shape(var)):
            return None
        keys = rng.permutation(np.arange(shape[-1]) % 2)
        return np.broadcast_to(keys, shape).astype(an.np_dtype(var))

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the ops from the fills to the softmax again, with finite fills."""
        new: dict[Var, Var] = {}
        sums = [op for op in m.changed if op in m.on_scores and op.op_type in ("add", "sub")]
        for op in m.changed:
            old = op.outputs[0]
            if op in m.on_scores:
                new[old] = self.again(mb, op, new, m.fills)
                if self.equal and sums == [op]:
                    new[old] = mb.maximum(x=new[old], y=an.np_dtype(old).type(self.fill / 2))
                continue
            reads = [new.get(v, v) for _, v in an.operands(op)]
            build = partial(self.again, op=op, new=dict(new), fills=m.fills)
            new[old] = mb.shared_value((self.name, old, self.fill, *reads), reads, build)
        if m.root.op_type != "softmax":
            operands = {name: new.get(value, value) for name, value in an.op_inputs(m.root).items()}
            return mb.scaled_dot_product_attention(**operands)
        return mb.softmax(x=new[m.root.x], axis=an.constant(m.root.axis))

    def again(
        self, mb: Builder, op: an.Operation, new: dict[Var, Var], fills: dict[an.Operation, list[str]]
    ) -> Var:
        """Build an op again with finite fills, on new operands."""
        inputs: dict[str, Any] = {}
        for name, value in an.op_inputs(op).items():
            if isinstance(value, Var):
                inputs[name] = new.get(value, value)
                if name in fills.get(op, ()):
                    inputs[name] = self.finite(value)
        return getattr(mb, op.op_type)(**inputs, name=f"{op.outputs[0].name}_finite")

    def finite(self, constant: Var) -> an.Array:
        """Return the numbers of a constant, with finite fills."""
        value = np.asarray(an.constant(constant))
        numbers = np.where(np.abs(value) > DEEPEST, np.sign(value) * -self.fill, value)
        return numbers.astype(an.np_dtype(constant))


def _upstream(root: an.Operation, scores: Var) -> list[an.Operation]:
    """Return the ops from the scores to a softmax, and those that make its mask, in the order of the block."""
    ops: dict[an.Operation, None] = {}
    stack = [root.x.op if root.op_type == "softmax" else root.attn_mask.op]
    while stack and len(ops) < MOST_OPS:
        op = stack.pop(0)
        if op is None or op in ops or op.op_type not in MASKING or len(op.outputs) != 1:
            continue
        if op.outputs[0] is scores or op.enclosing_block is not root.enclosing_block:
            continue
        ops[op] = None
        stack += [v.op for _, v in an.operands(op)]
    block = root.enclosing_block
    assert block is not None
    return [op for op in block.operations if op in ops]


def _operands_with_deep_fill(op: an.Operation) -> list[str]:
    """Return the names of the operands of an op that bring in a fill below -`DEEPEST`."""
    names = []
    for name, var in an.operands(op) if op.op_type in FILLING else ():
        value = an.constant(var)
        if value is None or an.np_dtype(var).kind != "f" or name == "cond":
            continue
        signs = {"sub": (1 if name == "y" else -1,), "mul": (1, -1)}.get(op.op_type, (-1,))
        if any(((sign * np.asarray(value, np.float64)) > DEEPEST).any() for sign in signs):
            names.append(name)
    return names


def _downstream(ops: list[an.Operation], sources: set[Var]) -> list[an.Operation]:
    """Return the ops that make or read these values, or values made from them, in order."""
    reached, touching = set(sources), list[an.Operation]()
    for op in ops:
        if op.outputs[0] in sources or any(v in reached for _, v in an.operands(op)):
            reached.add(op.outputs[0])
            touching.append(op)
    return touching


@an.example((1, 1, 4, 2), mb.TensorSpec((1, 1, 1, 4), dtype=an.types.int32))
def example(x: Var, mask: Var) -> Var:
    """Scores of four positions under a padding mask, as encoders write it."""
    scores = mb.matmul(x=x, y=x, transpose_y=True, name="scores")
    kept = mb.cast(x=mask, dtype="fp32", name="kept")
    shut = mb.sub(x=np.float32(1), y=kept, name="shut")
    fill = mb.mul(x=shut, y=np.finfo(np.float32).min, name="fill")
    masked = mb.add(x=scores, y=fill, name="masked")
    return mb.softmax(x=masked, axis=-1, name="weights")
