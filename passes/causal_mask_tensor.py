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

The pass reads a mask by its effect: it evaluates whatever stands between the scores and the softmax. So it does
not matter whether the mask is a `select`, an addition, a product and an addition, boolean, built at run time
from ranges and comparisons, a tensor, or an operand of fused attention. A condition on an input (padding)
becomes a term of its own small shape, which is combined with the causal part once for all layers. Other terms
are added as before. If such a term follows an op that replaces scores (`select`), the scores are multiplied by
0 or 1 first; otherwise a large term could make a replaced score visible again.

`as_input=True` makes the mask an input of the model. The tensor has the element type of the scores: fp16 in an
fp16 program. Scores that are cast to fp32 only for the softmax are masked before the cast.

Rows in which some position stays visible keep their weights, since exp(fill) is 0. Rows in which every position
is masked (left padding, also by a large negative term) get finite weights: those of the unmasked scores. The
pass refuses a term that would lift a masked score to a visible one; it looks at the term's range, or at its
values on the inputs.

Refuses when an element is neither kept unchanged nor masked (a bias), when a position sees a later one, when a
row masks every position at conversion, when the number of positions is symbolic, and when a condition on an
input is not a conjunction, or replaces scores before another term is added.

Why it helps: `band_part`, run-time ranges and int32 comparisons never run on the ANE (measured: M4, macOS 27),
an fp32 mask sends the scores to the CPU (reported: M1 Max, macOS 13), and its softmax does not handle -inf
(documented by Apple). A finite fill of -1e4 is what Apple's own transformers use.

Grade: checked: it rests on the size of the scores.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.checking.grades import UpperLimit
from anesurgery.checking.lengths import drawn_shape
from anesurgery.facts import attention, masks
from anesurgery.regions import small_builds

INPUT = "causal_mask"
"""The name of the mask as an input."""

LEAST_FILL, MOST_FILL = -32000.0, attention.MASKED
"""The fill must mask a score, and be a number on hardware that ends at -32768."""


@dataclass(frozen=True)
class CausalMaskTensor(Rewrite):
    """One additive tensor for each causal mask, shared by all layers and heads."""

    name = "causal_mask_tensor"
    kinds = frozenset({"softmax", "scaled_dot_product_attention"})
    # they rewrite the spellings of a mask that it knows
    precedes = ("negate_subtract", "explicit_broadcast")
    tolerates_nonfinite = False
    """An infinite score that was masked meets a finite number to add."""
    shares_inner = True
    fill: float = an.option(-1e4, least=LEAST_FILL, most=MOST_FILL)
    """What is added to a masked score."""
    as_input: bool = False
    """Make the mask an input of the model, named `causal_mask`."""

    def check(self, m: Match) -> Match | Refusal:
        """Match attention with a causal mask that has another form than `rewrite` gives it."""
        chain = attention.mask_chain(m.root)
        if isinstance(chain, Refusal):
            return chain
        if self.is_constant(chain):
            return an.NO_MATCH
        parts = masks.take_apart(chain)
        if isinstance(parts, Refusal):
            return Refusal(parts.reason, m.root)
        chain = parts.chain
        # are masked scores multiplied by 0 first?
        zeroes_first = bool(parts.dynamic_terms) and not masks.is_sum(chain)
        if parts.keep.all() or self.is_written(chain, parts, zeroes_first):
            return an.NO_MATCH
        if zeroes_first and parts.conditions:
            (condition, _), term = parts.conditions[0], parts.dynamic_terms[0]
            return Refusal(f"%{term.name} is added after %{condition.name} has replaced scores", m.root)
        if (refusal := masks.against_causal(parts.keep)) is not None:
            return Refusal(refusal.reason, m.root)
        most = an.intervals.masked_up_to(self.fill)
        limits = an.intervals.score_limits(m.root, chain.scores, most)
        if not zeroes_first:  # a large term that is added would make masked scores visible again
            limits |= {term: UpperLimit(most) for term in parts.dynamic_terms}
        return m.bind(scores=chain.scores, chain=chain, parts=parts, zeroes_first=zeroes_first, limits=limits)

    def is_constant(self, chain: attention.Chain) -> bool:
        """Is the mask a constant as this pass makes it? This evaluates no op, unlike `is_written`."""
        mask, value = chain.masks[0], an.constant(chain.masks[0])
        if value is None or self.as_input or [op.op_type for op in chain.ops] not in ([], ["add"]):
            return False
        if np.ndim(value) != chain.scores.rank or an.np_dtype(mask) != an.np_dtype(chain.scores):
            return False
        if not _is_shared(mask) or mask.shape[-2:] != chain.size:
            return False
        bits, fill = (a.view(f"u{value.dtype.itemsize}") for a in (value, np.array(self.fill, value.dtype)))
        keep = bits == 0  # compares integers, since numpy compares fp16 slowly
        filled = bool((keep | (bits == fill)).all())
        return filled and masks.against_causal(keep) is None and masks.without_copies(keep) is keep

    def is_written(self, chain: attention.Chain, parts: masks.Parts, zeroes_first: bool) -> bool:
        """Is the mask what `rewrite` makes already?"""
        op_types = ["mul"] * zeroes_first + ["add"] * (1 + len(parts.static_terms)) if chain.ops else []
        dtype = an.np_dtype(chain.scores)
        if [op.op_type for op in chain.ops] != op_types or an.np_dtype(chain.masks[0]) != dtype:
            return False
        if zeroes_first and not np.array_equal(an.constant(chain.masks[0]), parts.keep):
            return False
        total: Var | None = chain.masks[1 if zeroes_first else 0]
        for op_type in ["add"] * len(parts.dynamic_terms) + ["minimum"] * len(parts.conditions):
            op = an.producer(total, op_type)
            total = None if op is None else op.x
        value = an.constant(total)
        if value is None or self.as_input or np.shape(value) != parts.keep.shape:
            return False
        return np.array_equal(value, self.tensor(parts.keep, dtype)) and _is_shared(total)

    def tensor(self, keep: an.Array, dtype: np.dtype[np.generic]) -> an.Array:
        """Return the additive mask: 0 where a position is kept, else the fill."""
        return np.where(keep, 0, self.fill).astype(dtype)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw conditions and terms under which each row keeps a position; give the mask for its own input."""
        shape = drawn_shape(var)
        if var in m.parts.dynamic_terms and not m.zeroes_first:
            return self.sample_term(m, var, rng)
        for condition, wanted in m.parts.conditions:
            if var is condition:
                keep: an.Array = m.parts.keep
                of_keys = shape[-1:] == keep.shape[-1:]
                holds = rng.random(shape) < (0.5 if of_keys else 1)
                if of_keys:
                    holds[..., _safe_keys(keep)] = True
                return np.asarray(holds == wanted)
        if var.op is None and var.name.startswith(INPUT) and shape == m.parts.keep.shape:
            return self.tensor(m.parts.keep, an.np_dtype(var))
        return None

    def sample_term(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array:
        """Draw a term that makes no masked score visible, and no row invisible."""
        shape, most = drawn_shape(var), an.intervals.masked_up_to(self.fill)
        values = np.minimum(rng.standard_normal(shape) * 10 ** rng.uniform(-3, 4, shape), most)
        of_keys = shape[-1:] == m.parts.keep.shape[-1:]
        visible = _safe_keys(m.parts.keep) if of_keys else slice(None)
        if shape:
            values[..., visible] = values[..., visible].clip(-most, most)
        return np.asarray(values).astype(an.np_dtype(var))

    def rewrite(self, mb: Builder, m: Match) -> Var | dict[Var, Var]:
        """Add the shared mask to the scores."""
        root, parts = m.root, m.parts
        total = self.total(mb, m)
        if root.op_type != "softmax":
            fused = mb.scaled_dot_product_attention(**attention.fused_operands(root), attn_mask=total)
            return small_builds.for_readers(mb, root.outputs[0], fused)
        x = m.scores
        if m.zeroes_first:
            dtype = an.np_dtype(x)
            key = ("kept_scores", _digest(parts.keep), parts.keep.shape, dtype.name)
            x = mb.mul(x=x, y=mb.shared(key, lambda: parts.keep.astype(dtype), "kept_scores"))
        x = mb.add(x=x, y=total)
        for bias in parts.static_terms:
            x = mb.add(x=x, y=small_builds.as_dtype(mb, bias, an.np_dtype(m.scores)))
        for op in m.chain.tail:
            x = _copy_of_tail_op(mb, op, x)
        return mb.softmax(x=small_builds.as_dtype(mb, x, an.np_dtype(root.x)), axis=an.constant(root.axis))

    def total(self, mb: Builder, m: Match) -> Var:
        """Build the sum of the causal mask, the conditions and the free terms, once for all layers."""
        dtype, parts = an.np_dtype(m.scores), m.parts
        digest = _digest(parts.keep)
        key = ("causal_mask", digest, parts.keep.shape, dtype.name, self.fill, self.as_input)
        if self.as_input:
            entry = self.input_mask(mb, m, digest)
            mask = mb.shared_value(key, [entry], lambda inner: small_builds.as_dtype(inner, entry, dtype))
        else:
            mask = mb.shared(key, lambda: self.tensor(parts.keep, dtype), "causal_mask")
        if not (parts.conditions or parts.dynamic_terms):
            return mask
        reads = [mask, *(v for v, _ in parts.conditions), *parts.dynamic_terms]

        def build(mb: Builder) -> Var:
            masked = mask
            for condition, wanted in parts.conditions:
                masked = mb.minimum(x=masked, y=self.masked_unless(mb, condition, wanted, dtype))
            for term in parts.dynamic_terms:
                masked = mb.add(x=masked, y=small_builds.as_dtype(mb, term, dtype))
            return masked

        return mb.shared_value((*key, *parts.conditions, *parts.dynamic_terms), reads, build)

    def masked_unless(self, mb: Builder, condition: Var, wanted: bool, dtype: np.dtype[np.generic]) -> Var:
        """Build 0 where a condition is as wanted, and the fill elsewhere."""
        number = mb.cast(x=condition, dtype=small_builds.dtype_word(dtype))
        fill, minus_fill = dtype.type(self.fill), dtype.type(-self.fill)
        term = mb.mul(x=number, y=minus_fill if wanted else fill)
        return mb.add(x=term, y=fill) if wanted else term

    def input_mask(self, mb: Builder, m: Match, digest: str) -> Var:
        """Add the mask as an input: `causal_mask` if positions see all earlier ones, else with a digest."""
        keep: an.Array = m.parts.keep
        queries, keys = keep.shape[-2:]
        is_triangle = keep.size == queries * keys and (keep == np.tri(queries, keys, dtype=bool)).all()
        name = INPUT if is_triangle else f"{INPUT}_{digest}"
        if (there := mb.input(name)) is not None and there.shape != keep.shape:
            name = f"{INPUT}_{queries}x{keys}"
        dtype = mb.input_dtype(an.np_dtype(m.scores))
        array = self.tensor(keep, dtype)
        shape = an.shape_in_words(keep.shape)
        words = f"give {name} ({shape}, {dtype}): 0 where a position may look, {self.fill:g} elsewhere"
        change = an.InterfaceChange(words, (name,), inputs=lambda values: {**values, name: array})
        return mb.add_input(keep.shape, an.types.numpy_type_to_builtin_type(dtype.type), change)


def _is_shared(var: Var | None) -> bool:
    """Is a value one of the constants at the head of its block, where shared constants are?"""
    block = var.op.enclosing_block if var is not None and var.op is not None else None
    for op in block.operations if block is not None else ():
        if op.op_type != "const":
            return False
        if op.outputs[0] is var:
            return True
    return False


def _safe_keys(keep: an.Array) -> list[int]:
    """Return keys such that each query keeps at least one of them."""
    keys: list[int] = []
    for row in keep.reshape(-1, keep.shape[-1]):
        if row.any() and not row[keys].any():
            keys.append(int(np.flatnonzero(row)[-1]))
    return keys


def _copy_of_tail_op(mb: Builder, op: an.Operation, x: Var) -> Var:
    """Build a cast, scaling or reshape between a mask and its softmax again, on x; an identity is left out."""
    if op.op_type == "cast":
        return small_builds.as_dtype(mb, x, an.np_dtype(op.outputs[0]))
    if op.op_type in ("mul", "real_div"):
        scale = op.y if an.constant(op.y) is not None else op.x
        x = small_builds.as_dtype(mb, x, an.np_dtype(scale))
        copy: Var = getattr(mb, op.op_type)(x=x, y=scale)
        return copy
    return mb.reshape(x=x, shape=op.shape) if op.op_type == "reshape" else x


def _digest(keep: an.Array) -> str:
    """Return a short name of what a mask keeps."""
    return hashlib.blake2b(np.packbits(keep).tobytes(), digest_size=4).hexdigest()


@an.example((1, 1, 3, 2), (1, 1, 3, 2))
def example(q: Var, k: Var) -> Var:
    """Scores of three positions, masked with -inf."""
    keep = np.tril(np.ones((1, 1, 3, 3), bool))
    scores = mb.matmul(x=q, y=k, transpose_y=True, name="scores")
    masked = mb.select(cond=keep, a=scores, b=np.float32(-np.inf), name="masked")
    return mb.softmax(x=masked, axis=-1, name="weights")
