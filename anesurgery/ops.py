"""Op types by trait: one table, in place of private sets."""

from __future__ import annotations


def names(text: str) -> frozenset[str]:
    """The names in a text, as tables of op types and layer types are written."""
    return frozenset(text.split())


BINARY = names(
    """
    add sub mul real_div floor_div mod pow maximum minimum
    equal not_equal greater greater_equal less less_equal logical_and logical_or logical_xor
    """
)
"""Ops of two operands that broadcast."""

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

REDUCTIONS = names(
    """
    reduce_l1_norm reduce_l2_norm reduce_log_sum reduce_log_sum_exp reduce_max reduce_mean reduce_min
    reduce_prod reduce_sum reduce_sum_square
    """
)
"""Ops that reduce `axes` to one number each."""

VIEWS = names("reshape expand_dims squeeze")
"""Ops that are nothing but another view of `x` (when shapes are static)."""
