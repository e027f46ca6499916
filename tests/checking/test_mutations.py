"""Mutations of what the library's passes make of their examples are caught by default settings."""

from __future__ import annotations

import zlib

import pytest
from mutations import outcomes
from sketches import example_of

from anesurgery import registry
from anesurgery.checking import numbers

pytestmark = pytest.mark.first

NAMES = registry.pass_names()

EQUIVALENT = {
    ("causal_mask_tensor", "add: y[1] + 1"): "-1e4 + 1 hides a score as well as -1e4",
    ("legacy_divide", "inverse: epsilon[0] negated"): "the smallest normal number, lost in a sum with 2 to 8",
    ("legacy_embedding", "gather: validate_indices[0] flipped"): "all indices are valid",
    ("padding_mask_tensor", "mul: y[0] + 1"): "a fill of -9999 masks as well",
    ("rerank", "reshape: shape reversed"): "the next reshape restores the order; between them is a relu",
    ("rerank", "reduce_max: keep_dims[0] flipped"): "a reshape follows",
    ("unroll_loop", "list_read: index[0] negated"): "the list has two elements: -1 is the second",
    ("unroll_loop", "list_write: index[0] negated"): "the list has two elements: -1 is the second",
    ("unroll_loop", "list_gather: indices[1] negated"): "the list has two elements: -1 is the second",
    **{
        (name, what): why
        for name in ("group_norm", "rms_norm")
        for what, why in (
            ("maximum: y[0] + 1", "the norm does not depend on what its numbers are divided by"),
            ("real_div: x[0] negated", "it is squared"),
        )
    },
    **{
        (name, what): "any positive unit gives the same; in fp16 test_exact_steps and the hazards tell"
        for name in ("group_norm", "rms_norm", "scale_cosines", "scale_roots", "scale_spectra")
        for what in (
            "clip: alpha[0] + 1",
            "clip: alpha[0] negated",
            "clip: beta[0] + 1",
            "real_div: x and y swapped",
        )
    },
    ("scale_cosines", "maximum: y[0] + 1"): "a cosine does not depend on what the rows are divided by",
    ("scale_spectra", "maximum: y[0] + 1"): "the logarithm does not depend on what its numbers are divided by",
    ("scale_spectra", "real_div: x[0] negated"): "it is squared",
    **{
        ("hold_guards", what): "any positive unit gives the same; in fp16 the hazards tell"
        for what in ("clip: alpha[0] + 1", "clip: alpha[0] negated", "real_div: x and y swapped")
    },
    ("scale_spectra", "reduce_max: keep_dims[0] flipped"): "there is one batch: the shapes broadcast alike",
    ("scale_roots", "maximum: y[0] + 1"): "the root does not depend on what its numbers are divided by",
    ("mean_of_means", "reduce_mean: axes[0] negated"): "the other axis first, and then the rest",
    ("centre_variance", "sub: x and y swapped"): "the difference is squared",
    ("halve_exponent", "mul: y[0] negated"): "it is squared",
    ("clip_product", "clip: beta[0] + 1"): "the quantization stops below it",
    ("stable_angle", "real_div: x[0] + 1"): "of 4 or 5 over a number only the sign is read",
    ("stable_angle", "equal: y[0] + 1"): "0 / 0, which is no number before either; test_stable_angle tries it",
    ("stable_angle", "select: a[0] + 1"): "0 is divided by it",
    ("stable_angle", "select: a[0] negated"): "0 is divided by it",
    ("flat_gather", "minimum: y[0] + 1"): "the gather takes the nearest row within, too",
    ("sequence_layout", "expand_dims: axes[0] + 1"): "the kernels are 1x1; a reshape and a squeeze follow",
    ("decompose_attention", "matmul: x and y swapped"): "query and key are one value: the scores are symmetric",
    ("undilate_convolution", "conv: weight[0] + 1"): "the corner of this kernel meets padding only",
    ("undilate_convolution", "conv: weight[0] negated"): "the corner of this kernel meets padding only",
}
"""(pass, mutation) -> why it computes the same."""


def outcomes_of(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Mutation -> was it caught, for the edits that a pass makes of its example."""
    return outcomes(registry.make_pass(name), example_of(name), monkeypatch)


@pytest.mark.parametrize("every", [48, pytest.param(1, marks=pytest.mark.slow)])
def test_nearly_all_are_caught(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each survivor is listed with the reason why it computes the same, and there are no others."""
    monkeypatch.setattr(numbers, "shrunk", lambda *given: "not made smaller: that takes half the time")
    names = [
        name for name in NAMES if zlib.crc32(name.encode()) % every == 0
    ]  # the same, whatever comes between
    found = {(name, what): caught for name in names for what, caught in outcomes_of(name, monkeypatch).items()}
    survived = {key for key, caught in found.items() if not caught}
    assert survived == {key for key in EQUIVALENT if key[0] in names}
    assert len(found) > 450 / every
