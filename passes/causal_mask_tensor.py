"""Make every spelling of a causal mask one shared tensor that is added to the scores.

Before::

    main(%q: 1x1x3x2, %k: 1x1x3x2) {
      %scores: 1x1x3x3 = matmul(x=%q, y=%k, transpose_y=True)
      %masked: 1x1x3x3 = select(cond=const<1x1x3x3xbool>, a=%scores, b=-inf)
      %weights: 1x1x3x3 = softmax(x=%masked)
      return %weights
    }

After::

    main(%q: 1x1x3x2, %k: 1x1x3x2) {
      %scores: 1x1x3x3 = matmul(x=%q, y=%k, transpose_y=True)
      %weights_causal_mask_tensor_add: 1x1x3x3 = add(x=%scores, y=const<1x1x3x3>)
      %weights: 1x1x3x3 = softmax(x=%weights_causal_mask_tensor_add)
      return %weights
    }

The mask is read by what it does and not by how it is written (`select`, additive, multiply and add, boolean,
built at run time from ranges and comparisons): whatever stands between the scores and the softmax is
evaluated. A part that depends on an input (padding) is split off a conjunction and added once for all
layers. `as_input=True` makes the mask an input of the model. The tensor has the element type of the scores:
fp16 in an fp16 program.

Rows that keep nothing give finite weights afterwards; the others what they gave, since exp(fill) is 0.

Refuses when an element is neither kept as it is nor shut out (a bias), when a position sees one ahead of it,
when a row keeps nothing, when the shape is symbolic, or when what depends on an input is no conjunction.

Why it helps: `band_part`, run-time ranges and int32 comparisons never run on the ANE (measured: M4, macOS 27),
an fp32 mask sends the scores to the CPU (reported: M1 Max, macOS 13), and its softmax does not handle -inf
(documented by Apple). A finite fill of -1e4 is what Apple's own transformers use.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anesurgery import masks
from anesurgery.adapter import InterfaceChange
from anesurgery.builder import Builder
from anesurgery.errors import PassError
from anesurgery.mil import Array, Program, Var, constant, mb, np_dtype, producer, static_shape
from anesurgery.pattern import Match, OpPattern, Ops, Refusal
from anesurgery.rewrite import Rewrite

LEAST_FILL, MOST_FILL = -32000.0, masks.SHUT
"""Two fills (causal and padding) must stay within fp16, and each must shut a score out."""


@dataclass(frozen=True)
class CausalMaskTensor(Rewrite):
    """One additive tensor for each causal mask, shared by all layers and heads."""

    name: ClassVar[str] = "causal_mask_tensor"
    shares_inner: ClassVar[bool] = True
    fill: float = -1e4
    """What is added to a score that is shut out."""
    as_input: bool = False
    """Make the mask an input of the model, named `causal_mask`."""

    def __post_init__(self) -> None:
        if not LEAST_FILL <= self.fill <= MOST_FILL:
            raise PassError(
                f"{self.name}: fill={self.fill:g}; it must lie in [{LEAST_FILL:g}, {MOST_FILL:g}]"
            )

    def pattern(self, op: Ops) -> OpPattern:
        """Where weights are made from scores."""
        return op.any("softmax", "scaled_dot_product_attention")()

    def check(self, m: Match) -> Match | Refusal | None:
        """Read the mask; None where there is none, or it has the form already."""
        fused = m.root.op_type != "softmax"
        chain = _fused_chain(m) if fused else masks.chain_to(m.root.x)
        if chain is None or (not fused and constant(m.root.axis) not in (-1, m.root.x.rank - 1)):
            return None
        if static_shape(chain.scores) is None:
            return Refusal(
                f"the scores have the symbolic shape {tuple(chain.scores.shape)}", m.root
            )
        parts = masks.take_apart(chain)
        if isinstance(parts, str):
            return Refusal(parts, m.root)
        keep = masks.squeezed(parts.keep)
        if keep.all() or self.is_normal(chain, parts, keep):
            return None
        if reason := masks.causal(keep):
            return Refusal(reason, m.root)
        return m.bind(scores=chain.scores, keep=keep, parts=parts)

    def is_normal(self, chain: masks.Chain, parts: masks.Parts, keep: Array) -> bool:
        """Is the mask one finite tensor of the right type and rank already?"""
        first = chain.ops[0] if chain.ops else None
        mask = chain.masks[0] if first is not None and first.op_type == "add" else None
        if mask is None or len(chain.ops) != 1 + len(parts.free):
            return False
        if parts.conditions and producer(mask, "add") is not None:
            mask = next((v for v in (mask.op.x, mask.op.y) if constant(v) is not None), mask)  # type: ignore[union-attr]
        value = constant(mask)
        if value is None or np_dtype(mask) != np_dtype(chain.scores) or mask.shape != keep.shape:
            return False
        return bool(np.array_equal(value, self.tensor(keep, np_dtype(mask))))

    def tensor(self, keep: Array, dtype: np.dtype[np.generic]) -> Array:
        """The additive mask."""
        return np.where(keep, 0, self.fill).astype(dtype)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> Array | None:
        """Paddings that keep the first position, so that no row keeps nothing; the mask for its own input."""
        if var in m.parts.conditions:
            condition = rng.random(static_shape(var) or ()) < 0.5
            condition[..., 0] = True
            return condition
        if var.op is None and var.name.startswith("causal_mask"):
            return self.tensor(m.keep, np_dtype(var))
        return None

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Add the shared mask to the scores."""
        dtype, parts = np_dtype(m.scores), m.parts
        digest = hashlib.blake2b(np.packbits(m.keep).tobytes(), digest_size=8).hexdigest()
        key = ("causal_mask", digest, m.keep.shape, dtype.name, self.fill)
        if self.as_input:
            total = self.input_mask(mb, m.keep, dtype, digest)
        else:
            total = mb.shared(key, lambda: self.tensor(m.keep, dtype), "causal_mask")
        if parts.conditions:
            causal = total
            total = mb.shared_value(
                (*key, *parts.conditions),
                parts.condition.op,
                lambda inner: self.with_padding(inner, causal, parts.conditions, dtype),
            )
        if m.root.op_type != "softmax":
            names = ("query", "key", "value")
            result: Var = mb.scaled_dot_product_attention(
                **{n: m.root.inputs[n] for n in names}, attn_mask=total
            )
            return result
        x = mb.add(x=m.scores, y=total)
        for term in parts.free:
            same = np_dtype(term) == dtype
            x = mb.add(x=x, y=term if same else mb.cast(x=term, dtype=_name(dtype)))
        if np_dtype(m.root.x) != dtype:
            x = mb.cast(x=x, dtype=_name(np_dtype(m.root.x)))
        result = mb.softmax(x=x, axis=constant(m.root.axis))
        return result

    def with_padding(
        self, mb: Builder, causal: Var, conditions: tuple[Var, ...], dtype: np.dtype[np.generic]
    ) -> Var:
        """The causal mask plus, for each condition, 0 where it holds and `fill` where it does not."""
        for condition in conditions:
            shut = mb.add(x=mb.cast(x=condition, dtype=_name(dtype)), y=dtype.type(-1))
            causal = mb.add(x=causal, y=mb.mul(x=shut, y=dtype.type(-self.fill)))
        return causal

    def input_mask(self, mb: Builder, keep: Array, dtype: np.dtype[np.generic], digest: str) -> Var:
        """The mask as an input of the model."""
        plain = keep.shape[-2:] == keep.shape and bool(np.array_equal(keep, np.tril(keep)))
        name = (
            "causal_mask"
            if plain or keep.size == np.prod(keep.shape[-2:])
            else f"causal_mask_{digest}"
        )
        held = mb.input_dtype(dtype)
        array = self.tensor(keep, held)
        shape = "x".join(map(str, keep.shape))
        words = (
            f"give {name} ({shape}, {held}): 0 where a position may look, {self.fill:g} elsewhere"
        )
        change = InterfaceChange(words, (name,), inputs=lambda values: {**values, name: array})
        return mb.add_float_input(keep.shape, dtype, change)


def _fused_chain(m: Match) -> masks.Chain | None:
    """The mask operand of fused attention as a chain without ops; the scores stand for query times key."""
    mask = m.root.inputs.get("attn_mask")
    return None if mask is None else masks.Chain(m.root.query, (), (mask,), m.root)


def _name(dtype: np.dtype[np.generic]) -> str:
    return "fp16" if dtype == np.float16 else "fp32"


def example() -> Program:
    """Scores of three positions, masked with -inf."""
    keep = np.tril(np.ones((1, 1, 3, 3), bool))

    @mb.program(input_specs=[mb.TensorSpec((1, 1, 3, 2)), mb.TensorSpec((1, 1, 3, 2))])
    def program(q: Var, k: Var) -> Var:
        scores = mb.matmul(x=q, y=k, transpose_y=True, name="scores")
        masked = mb.select(cond=keep, a=scores, b=np.float32(-np.inf), name="masked")
        return mb.softmax(x=masked, axis=-1, name="weights")

    return program
