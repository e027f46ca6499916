"""Convert mixtures of experts, in transformers' own forms and in one where all experts see all tokens.

`register_experts()` offers the latter to transformers as "dense": `model.set_experts_implementation("dense")`.
Its products are with constant matrices, as the Neural Engine needs; nothing is gathered, sorted or grouped. The
price: each expert computes every token, so that a model with 8 experts, 2 of them chosen, takes 4 times the
operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from anesurgery.frontend.arguments import Convert, argument, dtype_of, inputs_of, option, promoted
from anesurgery.mil import Var, is_symbolic, mb, types


def histogram(context: Any, node: Any) -> None:
    """Convert `torch.histc(x, bins, min, max)`."""
    x, bins = inputs_of(context, node)[0], int(option(context, node, 1, "bins", 100))
    low, high = (float(option(context, node, i, k, 0)) for i, k in ((2, "min"), (3, "max")))
    if not low < high or is_symbolic(np.prod(x.shape)):
        raise NotImplementedError(f"{node.name}: histc of {x.shape} from {low:g} to {high:g}")
    values = mb.cast(x=mb.reshape(x=x, shape=[1, -1]), dtype="fp32")
    at = mb.mul(x=mb.sub(x=values, y=np.float32(low)), y=np.float32(bins / (high - low)))
    at = mb.select(cond=mb.equal(x=values, y=np.float32(high)), a=np.float32(bins - 1), b=mb.floor(x=at))
    hits = mb.cast(x=mb.equal(x=at, y=np.arange(bins, dtype=np.float32)[:, None]), dtype="fp32")
    context.add(mb.cast(x=mb.reduce_sum(x=hits, axes=[1]), dtype=dtype_of(x), name=node.name))


def bincount(context: Any, node: Any) -> None:
    """Convert `torch.bincount(x, weights=None, minlength=n)` to a sum of one-hot rows, of length n.

    Numbers from n on are not counted, as the result cannot grow.
    """
    x, weights = inputs_of(context, node)[0], argument(context, node, 1, "weights")
    count = int(option(context, node, 2, "minlength", 0))
    if not count:
        words = "the numbers decide the length of its result: give `minlength`, the number of bins"
        raise NotImplementedError(f"{node.name}: {node.kind} without `minlength`: {words}")
    hits = mb.equal(x=x, y=np.arange(count, dtype=np.int32)[:, None])
    hits = mb.cast(x=hits, dtype="int32" if weights is None else "fp32")
    if weights is not None:
        hits, weights = promoted([hits, weights])
        hits = mb.mul(x=hits, y=weights)
    context.add(mb.reduce_sum(x=hits, axes=[1], name=node.name))


def grouped_product(context: Any, node: Any) -> None:
    """Convert `torch.nn.functional.grouped_mm(x, w, offs=ends)`: each group of rows times its own matrix.

    Every row is multiplied by every matrix, and the right product is selected.
    """
    x, weight = promoted(inputs_of(context, node)[:2])
    ends = argument(context, node, 2, "offs")
    if x.rank != 2 or weight.rank != 3 or not isinstance(ends, Var):
        raise NotImplementedError(f"{node.name}: grouped_mm of shapes {x.shape} and {weight.shape}")
    groups, rows = int(weight.shape[0]), int(x.shape[0])
    row_numbers = np.arange(rows, dtype=np.int32)[None]
    is_past_end = mb.cast(x=mb.less_equal(x=mb.expand_dims(x=ends, axes=[1]), y=row_numbers), dtype="int32")
    group = mb.reduce_sum(x=is_past_end, axes=[0])
    products = mb.matmul(x=mb.expand_dims(x=x, axes=[0]), y=weight)
    is_of_group = mb.equal(x=mb.expand_dims(x=group, axes=[0]), y=np.arange(groups, dtype=np.int32)[:, None])
    zero = types.nptype_from_builtin(x.dtype)(0)
    chosen = mb.select(cond=mb.expand_dims(x=is_of_group, axes=[2]), a=products, b=zero)
    context.add(mb.reduce_sum(x=chosen, axes=[0], name=node.name))


CONVERSIONS: dict[str, Convert] = {
    "histc": histogram,
    "bincount": bincount,
    **dict.fromkeys(
        ("grouped_mm", "_grouped_mm", "grouped_mm_fallback", "transformers::grouped_mm_fallback"),
        grouped_product,
    ),
}


def register_experts() -> None:
    """Offer "dense" to transformers, as another `experts_implementation`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("dense", dense_experts)


def dense_experts(
    experts: Any, tokens: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Return the sum of all experts' outputs, each times its share of the token: 0 unless it was chosen.

    tokens: (tokens, channels). chosen, shares: (tokens, experts per token), the chosen experts and their
    shares.
    """
    numbers = torch.arange(experts.num_experts, device=tokens.device)
    is_chosen = (chosen[..., None] == numbers).to(tokens.dtype)
    weights = (is_chosen * shares[..., None].to(tokens.dtype)).sum(dim=1)  # of each expert for each token
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    total = torch.zeros_like(tokens)
    for i in range(experts.num_experts):
        hidden = _product(experts, name, i, tokens)
        hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
        hidden = _product(experts, "down_proj", i, hidden)
        if experts.has_post_expert_norm:
            hidden = experts.post_expert_norm(hidden)
        total = total + hidden * weights[:, i : i + 1]
    return total


def _product(experts: Any, name: str, i: int, x: torch.Tensor) -> torch.Tensor:
    """Return x times a matrix of one expert, plus its bias."""
    weight = getattr(experts, name)[i]
    bias = getattr(experts, f"{name}_bias")[i] if experts.has_bias else None
    return torch.nn.functional.linear(x, weight.t() if experts.is_transposed else weight, bias)
