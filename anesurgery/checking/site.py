"""Prove one edit: run the old and the new ops on the same numbers, before the old ones are removed.

The values that both sides read from outside are drawn at random; what it costs is the size of the edit,
not of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from anesurgery.checking.fingerprint import fingerprint
from anesurgery.facts.slices import reads, slice_back
from anesurgery.mil import Array, Operation, Var, is_symbolic, np_dtype, types

if TYPE_CHECKING:
    import torch

Sampler = Callable[[Var, np.random.Generator], "Array | None"]

LARGEST_SITE = 400
"""Ops on the old side above which an edit is not proven by itself (`prove="model"` covers it)."""

SYMBOL_LENGTH = 3
"""Length that stands for a symbolic dimension while an edit is proven."""


@dataclass(frozen=True)
class Tolerance:
    """What a pass promises at its own sites, computed in fp32."""

    rtol: float = 0.0
    """Largest difference, relative to the largest magnitude of the old value; 0 means bit-exact."""

    def __str__(self) -> str:
        return "bit-exact" if self.rtol == 0 else f"within {self.rtol:g} of the largest value"


EXACT = Tolerance()
REASSOCIATED = Tolerance(1e-5)
"""For sums in another order: fp32 rounding of a few thousand terms stays below it."""


@dataclass(frozen=True)
class SiteProof:
    """The difference between the old and the new values of one edit, on random inputs in fp32."""

    max_abs: float
    max_rel: float
    """`max_abs` over the largest finite magnitude of the old value."""
    values: int
    """Number of elements compared; undefined old ones (NaN) are left out."""

    def within(self, tolerance: Tolerance) -> bool:
        """Does the difference keep the promise?"""
        return self.max_abs == 0 if tolerance.rtol == 0 else self.max_rel <= tolerance.rtol


def prove_site(
    replaced: Sequence[tuple[Var, Var]],
    new_ops: Sequence[Operation],
    sample: Sampler,
    rng: np.random.Generator,
    matched: Sequence[Operation] = (),
    proven: dict[Hashable, SiteProof | str] | None = None,
) -> SiteProof | str:
    """Compare each old value with its replacement; a string says why this edit cannot be compared.

    Args:
        replaced: pairs (old value, new value) of equal shape.
        new_ops: the ops that the rewrite made, in order.
        sample: gives values for a boundary var whose range matters (ids), or None for the default.
        rng: the source of randomness.
        matched: the ops of the match; what they make is computed, even where the new side reads it.
        proven: proofs of this pass by fingerprint; an edit that is the same computation is not run again.
    """
    made = {v for op in new_ops for v in op.outputs}
    outside = {v for op in new_ops for v in reads(op) if v not in made}
    outside |= {new for _, new in replaced if new not in made}
    boundary = {v for v in outside if v.op is None or v.op.op_type != "const"}
    known = {v for op in matched for v in op.outputs}
    stop = boundary - known
    if stop != boundary:
        edge = {v for op in matched for v in reads(op)} - known
        stop = stop | edge if stop <= edge else stop
    old_ops = slice_back([old for old, _ in replaced] + [v for v in boundary if v in known], stop)
    if len(old_ops) > LARGEST_SITE:
        return f"depends on {len(old_ops)} ops"
    inner = {v for op in old_ops for v in op.outputs}
    inputs = boundary | {v for op in old_ops for v in reads(op) if v not in inner}
    # What the new side reads from inside the old side is computed, so it must not be drawn.
    drawn = [v for v in inputs if v not in inner and not (v.op is not None and v.op.op_type == "const")]
    proven = {} if proven is None else proven
    key = fingerprint(replaced, old_ops, new_ops)
    if key not in proven:
        try:
            bindings = {v: draw(v, sample, rng) for v in drawn}
        except ValueError as reason:
            return str(reason)
        carried = [v for v in boundary if v in inner]
        proven[key] = _compare(replaced, old_ops, list(new_ops), bindings, carried)
    return proven[key]


def _compare(
    replaced: Sequence[tuple[Var, Var]],
    old_ops: list[Operation],
    new_ops: list[Operation],
    bindings: dict[Var, torch.Tensor],
    carried: list[Var],
) -> SiteProof | str:
    from anesurgery.interpret import Unsupported, evaluate

    olds = [old for old, _ in replaced]
    try:
        old_values = evaluate(old_ops, bindings, [*olds, *carried])
    except Unsupported as reason:
        return str(reason)
    bindings = {**bindings, **dict(zip(carried, old_values[len(olds) :], strict=True))}
    new_values = evaluate(new_ops, bindings, [new for _, new in replaced])
    parts = [_difference(o, n) for o, n in zip(old_values[: len(olds)], new_values, strict=True)]
    return SiteProof(max(p[0] for p in parts), max(p[1] for p in parts), sum(p[2] for p in parts))


def _difference(old: torch.Tensor, new: torch.Tensor) -> tuple[float, float, int]:
    import torch

    if tuple(old.shape) != tuple(new.shape):
        return float("inf"), float("inf"), 0
    if torch.equal(old, new):
        return 0.0, 0.0, old.numel()
    defined = ~torch.isnan(old.double())
    a, b = old.double()[defined], new.double()[defined]
    apart = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(torch.inf, torch.inf)  # inf == inf agrees
    largest = float(apart.max()) if apart.numel() else 0.0
    finite = a[torch.isfinite(a)].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return largest, (largest / scale if scale else largest), a.numel()


def drawn_shape(var: Var) -> tuple[int, ...]:
    """The shape of the values that stand for a var."""
    return tuple(SYMBOL_LENGTH if is_symbolic(d) else int(d) for d in var.shape or ())


def draw(var: Var, sample: Sampler, rng: np.random.Generator) -> torch.Tensor:
    """Random values for a boundary var: as `sample` says, else normal, small non-negative, or coin flips.

    Raises:
        ValueError: the var is no plain tensor, or has no known rank.
    """
    import torch

    if not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)):
        raise ValueError(f"%{var.name} is no tensor")
    values: Any = sample(var, rng)
    if values is None:
        shape = drawn_shape(var)
        dtype = np_dtype(var)
        if dtype.kind == "f":
            seed = torch.Generator().manual_seed(int(rng.integers(2**31)))
            return torch.randn(shape, generator=seed).to(torch.from_numpy(np.zeros(0, dtype)).dtype)
        elif dtype.kind == "b":
            values = rng.random(shape) < 0.5
        elif dtype.kind in "iu":
            values = rng.integers(0, 2, shape).astype(dtype)
        else:
            raise ValueError(f"%{var.name} holds {dtype}")
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(np.shape(values))
