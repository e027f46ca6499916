"""Op types by trait: one table for every room.

A trait holds for every op type in its set, in every opset; the tests try each one on the interpreter. What was
*measured* of ops (which of them a chip runs, at what cost) is evidence and stands in `placement`.
"""

from __future__ import annotations


def names(text: str) -> frozenset[str]:
    """The names in a text, as tables of op types and layer types are written."""
    return frozenset(text.split())


ORDERINGS = names("greater greater_equal less less_equal")
"""Comparisons that ask which operand is larger."""

SHARING = names("softmax scaled_dot_product_attention")
"""Ops that make weights of scores."""

COMPARISONS = ORDERINGS | {"equal", "not_equal"}
"""Ops of two numbers whose result is a boolean."""

LOGICAL = names("logical_and logical_or logical_xor")
"""Ops of two booleans."""

ARITHMETIC = names("add sub mul real_div floor_div mod pow maximum minimum")
"""Ops of two numbers whose result is a number."""

BINARY = ARITHMETIC | COMPARISONS | LOGICAL
"""Ops of two operands, `x` and `y`, that broadcast."""

BROADCASTING = BINARY | {"select"}
"""Ops whose operands broadcast."""

UNARY = names(
    """
    abs acos asin atan atanh cast ceil clamped_relu clip cos cosh elu erf exp exp2 floor gelu identity inverse
    leaky_relu linear_activation log logical_not relu relu6 round rsqrt scaled_tanh sigmoid sigmoid_hard sign
    silu sin sinh softplus softsign sqrt square tan tanh threshold thresholded_relu
    """
)
"""Ops that work on each element of `x` by itself."""

POINTWISE = UNARY | BROADCASTING
"""Ops of which each element depends on the elements of the operands at the same place only."""

BY_ROWS = POINTWISE | names("conv max_pool avg_pool batch_norm instance_norm")
"""Ops that can work on the rows of a long axis, as `fold_long_axis` cuts it."""

MONOTONE = names(
    """
    asin atan atanh ceil clip erf exp exp2 floor identity log relu relu6 round sigmoid sign sinh softplus
    softsign sqrt tanh
    """
)
"""Unary ops that never fall where `x` rises (and are a number)."""

ZERO_PRESERVING = names(
    """
    abs asin atan atanh cast ceil elu erf floor gelu identity leaky_relu relu relu6 round scaled_tanh sign silu
    sin sinh softsign sqrt square tan tanh thresholded_relu
    """
)
"""Unary ops that make 0 of 0, whatever their parameters are."""

SINGULAR = names("inverse log rsqrt")
"""Unary ops with a pole at 0, from which only `epsilon` keeps them away."""

OVERFLOWING = SINGULAR | names("acos asin atanh cosh exp exp2 sinh sqrt square tan")
"""Unary ops that make an infinity or NaN in fp16 of some finite numbers of fp16, with no parameter to blame."""

VIEWS = names("reshape expand_dims squeeze")
"""Ops that only reshape `x` (when shapes are static)."""

MOVES = VIEWS | names("transpose")
"""Ops that only rearrange the numbers of `x` (when shapes are static)."""

CARRIERS = MOVES | names("cast identity")
"""Ops that hand each number of `x` on once, with its axes in some order, perhaps in another type."""

REARRANGING = VIEWS | names(
    """
    transpose identity reverse reverse_sequence reshape_like flatten2d depth_to_space space_to_depth
    pixel_shuffle pixel_unshuffle
    """
)
"""Ops whose result holds each number of `x` exactly once."""

LOOKUPS = names("gather gather_along_axis gather_nd")
"""Ops that pick numbers of `x` at `indices`."""

MOVING = (
    REARRANGING | LOOKUPS | names("slice_by_index slice_by_size split tile crop sliding_windows batch_to_space")
)
"""Ops that only move data: their results hold numbers of `x`, and no others."""

PADDING = names("pad space_to_batch")
"""Ops that move data and fill up with another number."""

JOINING = names("concat stack")
"""Ops that put `values` side by side."""

REDUCTIONS = names(
    """
    reduce_l1_norm reduce_l2_norm reduce_log_sum reduce_log_sum_exp reduce_max reduce_mean reduce_min
    reduce_prod reduce_sum reduce_sum_square
    """
)
"""Ops that reduce `axes` to one number each."""

ALONG = {
    **dict.fromkeys(("softmax", "argsort", "topk", "cumsum", "reduce_argmax", "reduce_argmin"), "axis"),
    "layer_norm": "axes",
}
"""Ops that read rows -> the parameter that says along which axes."""

UNROUNDED = (
    COMPARISONS
    | LOGICAL
    | names(
        """
        logical_not select cast abs sign floor ceil round maximum minimum relu relu6 clip threshold identity
        concat stack shape fill fill_like range_1d one_hot slice_update band_part non_zero reduce_max
        reduce_min reduce_argmax reduce_argmin argsort topk
        """
    )
)
"""Ops that compute without rounding, beside those that only move data.

A trait, no field of the rows in `semantics`: the arithmetics of the interpreter ask for it, above which rows
stand, since some compute with it. It is held against random programs as a row is.
"""

PRODUCTS = names("conv linear matmul")
"""Sums of products, usually with stored weights."""

WEIGHTED = PRODUCTS - {"conv"}
"""Products that work on the last axis."""

ATTENTION = names("matmul einsum scaled_dot_product_attention")
"""Sums of products that attention is computed with."""

RECURRENT = names("gru lstm rnn")
"""Ops that run over a sequence, step by step."""

CONTRACTIONS = PRODUCTS | ATTENTION | RECURRENT | names("conv_transpose conv_quantized")
"""Ops that sum products: most of the work of a model."""

NORMS = names("batch_norm instance_norm l2_norm layer_norm local_response_norm")
"""Ops that normalise, with a guard against a division by 0."""

RANDOM = names("random_bernoulli random_categorical random_normal random_uniform")
"""Ops that draw numbers."""

CONTROL = names("cond while_loop")
"""Ops with nested blocks."""

STATEFUL = names("coreml_update_state read_state")
"""Ops that read or write a state."""

LISTS = names("list_gather list_length list_read list_scatter list_write make_list")
"""Ops on lists of tensors."""

IMPURE = RANDOM | CONTROL | {"coreml_update_state"}
"""Ops that do more than compute their results, or may: never removed as dead."""
