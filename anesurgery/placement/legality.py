"""What the Neural Engine can run, as rows: op types known to be legal, and conditions that forbid an op.

Most rows were measured through Core ML on an M4 (751K/Apple-Neural-Engine-Microarchitecture-Study-M6,
macOS 27.0.1, coremltools 9.0, opset iOS 18, fp16). For other chips they are extrapolated, and rows of the
private compiler (ane-guide, ANEForge) add what is known of a generation; those never speak against a row
through Core ML that was measured on the very chip. The first row that fires is the verdict, so the most
specific come first.
"""

from __future__ import annotations

from typing import Any

from anesurgery.mil import Operation
from anesurgery.placement import conditions as when
from anesurgery.placement.evidence import Finding, Grade, Rule, Scope
from anesurgery.placement.target import SOURCES, Target

STUDY = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6"
GUIDE = "sbryngelson/ane-guide, ANEForge (tables of the compiler)"
OLDER = "hollance/neural-engine, smpanaro/more-ane-transformers"
STRINGS = "strings of the compiler"

M4 = Scope(frozenset({16}), "macOS 27.0.1")
EVERY = frozenset({12, 13, 14, 15, 16, 17, 18})


def _ops(names: str) -> frozenset[str]:
    return frozenset(names.split())


LEGAL = _ops(
    "abs ceil floor round sign sqrt rsqrt square inverse log exp exp2 erf clip relu relu6 leaky_relu prelu elu "
    "sigmoid sigmoid_hard silu tanh scaled_tanh softplus softsign thresholded_relu linear_activation gelu atan "
    "sin cos add sub mul real_div floor_div pow maximum minimum equal not_equal greater greater_equal less "
    "less_equal select logical_and cast conv conv_transpose linear matmul scaled_dot_product_attention "
    "avg_pool l2_pool max_pool softmax layer_norm instance_norm batch_norm l2_norm local_response_norm "
    "reduce_sum reduce_mean reduce_max reduce_min reduce_l1_norm reduce_l2_norm reduce_log_sum "
    "reduce_log_sum_exp reduce_sum_square topk reshape expand_dims squeeze transpose concat split stack "
    "slice_by_index slice_by_size reverse tile space_to_depth depth_to_space space_to_batch batch_to_space "
    "pixel_shuffle pixel_unshuffle pad gather gather_nd gather_along_axis upsample_nearest_neighbor "
    "upsample_bilinear resize resize_nearest_neighbor resize_bilinear resample affine quantize dequantize "
    "fill_like"
)
"""Placed on the ANE of an M4 through Core ML (`STUDY`), where no row of `FORBIDDEN` fires."""

WITH_STATE = _ops("read_state coreml_update_state slice_update")
"""Seen on the ANE in models with a state: A19 on iOS 18, M4 (john-rocky/CoreML-LLM)."""

NEVER: tuple[tuple[str, str, str | None, str, str], ...] = (
    ("asin acos tan sinh cosh atanh asinh acosh", "the ANE has no such function", None,
     "make a table, or write it with sin, cos, exp or atan", STUDY),
    ("mod", "the ANE has no remainder", None, "write it as x - floor_div(x, y) * y", STUDY),
    ("reduce_prod", "the ANE has no product reduction", None, "sum logarithms, or multiply slices", STUDY),
    ("reduce_argmax reduce_argmin argsort", "its result is int32", None,
     "leave it last, or return the numbers and choose on the host", STUDY),
    ("cumsum", "the ANE has no running sum", None, "multiply with a triangular matrix of ones", STUDY),
    ("scatter scatter_along_axis scatter_nd", "the ANE cannot write at indices", None,
     "blend with a mask, or use slice_update", STUDY),
    ("band_part", "masks are not built on the ANE", "causal_mask_tensor", "make the mask a constant", STUDY),
    ("one_hot", "the ANE cannot write at indices", None, "compare with a constant range", STUDY),
    ("non_zero shape range_1d", "it computes shapes or indices", None, "fix the shapes: it then folds", STUDY),
    ("random_normal random_uniform random_bernoulli random_categorical", "the ANE has no random numbers",
     None, "make the noise an input", STUDY),
    ("sliding_windows reverse_sequence", "the compiler has no converter for it", None, "use slices", STUDY),
    ("crop_resize", "its box indices are int32", None, "slice, then resize", STUDY),
    ("lstm gru rnn", "recurrent ops stay on the CPU", None, "unroll the steps into linear and sigmoid", STUDY),
    ("cond while_loop", "control flow stays on the CPU", None, "unroll it, or use select", OLDER),
    ("make_list list_read list_write list_gather list_scatter list_length", "lists stay on the CPU", None,
     "use stack and slices", OLDER),
    ("non_maximum_suppression", "it stays on the CPU", None, "run it on the host", OLDER),
    ("custom", "a custom layer is code for the CPU or GPU", None, "split the model there", OLDER),
    ("classify", "class labels are chosen on the CPU", None, "", OLDER),
)  # fmt: skip
"""(op types, because, remedy, advice, source): refused in every form that was tried."""


def _never(ops: str, because: str, remedy: str | None, advice: str, source: str) -> list[Rule]:
    grade = Grade.MEASURED if source == STUDY else Grade.REPORTED
    return [
        Rule(
            f"op-{op}",
            _ops(op),
            because,
            source,
            False,
            None,
            grade,
            M4,
            "legality",
            remedy,
            advice,
        )
        for op in ops.split()
    ]


def _row(rule: str, ops: str, because: str, test: when.Test | None = None, **more: Any) -> Rule:
    given: dict[str, Any] = {"source": STUDY, "scope": M4, **more}
    return Rule(rule, _ops(ops), because, legal=False, test=test, **given)


def _compiler(
    rule: str, ops: str, because: str, test: when.Test | None = None, **more: Any
) -> Rule:
    """A row of the private compiler."""
    scope = Scope(frozenset(more.pop("families", EVERY)), via="compiler")
    given: dict[str, Any] = {"source": GUIDE, "grade": Grade.REPORTED, **more}
    return _row(rule, ops, because, test, scope=scope, **given)


FORBIDDEN: tuple[Rule, ...] = (
    *(rule for row in NEVER for rule in _never(*row)),
    _row("embedding", "gather", "a gather at indices of the run is refused", when.lookup,
         remedy="embedding_matmul", advice="look the rows up on the host"),
    _row("gather-runtime", "gather", "a gather at indices of the run is refused", when.runtime_indices,
         advice="make the indices constant, or gather on the host"),
    _row("index-guard", " ".join(sorted(when.GUARD)),
         "integer arithmetic stays on the CPU; this makes the indices of an embedding", when.index_guard,
         remedy="embedding_matmul", advice="look the rows up on the host"),
    _row("slice-runtime", "slice_by_index slice_by_size", "slices must be known when the model is compiled",
         when.late_slice, advice="slice at constants, or use a mask"),
    _row("mask-positions", "", "integer arithmetic stays on the CPU; this makes a causal mask",
         when.mask_positions, remedy="causal_mask_tensor", advice="make the mask a constant or an input"),
    _row("int32", "", "a 32-bit integer at run time keeps the op on the CPU", when.int32,
         advice="fold it into constants, move it to the host, or compute in fp16 up to 2048"),
    _row("fp32", "", "ops that compute in fp32 stay on the CPU or GPU", when.fp32, scope=Scope(),
         source="coremltools guide (typed execution); " + STUDY, grade=Grade.DOCUMENTED,
         advice="convert with compute_precision=FLOAT16"),
    _row("fp32-cast", "cast", "casts between fp32 and fp16 ran on the CPU", when.fp32_cast,
         source="freedomtan/coreml_modelc_profling",
         scope=Scope(frozenset({12, 13}), "macOS 14.6", until=(("macOS", 14), ("iOS", 17))),
         advice="declare fp16 inputs and outputs (from iOS 16 on)"),
    _row("int8-read", "cast add sub mul concat reshape transpose", "8-bit integers are read by dequantize only",
         when.int8_read, advice="keep quantize beside dequantize"),
    _row("rank", "", "tensors have at most 5 axes", when.rank_over(5), scope=Scope(), grade=Grade.DOCUMENTED,
         source="apple/coreai-models (rules for the ANE); " + STUDY, remedy="rerank", advice="merge axes"),
    _row("axis", "", "an axis is longer than the ANE takes", when.long_axis, source=SOURCES["axis"],
         advice="split the axis, and join the pieces last"),
    _row("conv-kernel", "conv", "the kernel is too large (decomposition preconditions)", when.large_kernel,
         source=SOURCES["kernel"], advice="sum shifted smaller convolutions; lay long kernels on the height"),
    _row("max-pool-width", "max_pool", "the window is too wide", when.wide_window,
         advice="chain smaller pools"),
    _row("matmul-inner", "matmul linear", "a row does not fit into the memory for kernels (64 KiB)",
         when.long_inner(32768), advice="split the inner axis and add the parts"),
    _row("prelu-rank", "prelu", "prelu needs three axes", when.rank_under(3), advice="add axes"),
    _compiler("linear-rank", "linear", "linear takes at most 4 axes", when.rank_over(4), source=STRINGS,
              advice="merge axes"),
    _compiler("sdpa-rank", "scaled_dot_product_attention", "fused attention takes at most 4 axes",
              when.rank_over(4), source=STRINGS, advice="merge batch and heads"),
    _compiler("sin-cos", "sin cos", "this generation has no sine", families={12, 13, 14},
              advice="make the table a constant"),
    _compiler("topk-old", "topk", "this generation has no sort", families={12, 13},
              advice="choose on the host"),
    _compiler("texture-old", "resample affine", "this generation has no texture unit", families={12, 13},
              advice="resample on the host"),
    _compiler("conv3d", "conv", "the compiler takes no 3-D convolution", when.rank_over(4),
              families={12, 13, 14, 15, 17, 18}, advice="sum 2-D convolutions over the depth"),
)  # fmt: skip
"""Conditions under which an op leaves the ANE."""

INDEXED = _ops("gather gather_nd gather_along_axis cast topk slice_update")
"""Ops at which 16-bit integers were seen on the ANE."""


class Legality:
    """The rows that concern a target, by op type."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._any = [r for r in FORBIDDEN if not r.ops and self._speaks(r)]
        self._own: dict[str, list[Rule]] = {}
        for rule in FORBIDDEN:
            for op_type in rule.ops if self._speaks(rule) else ():
                self._own.setdefault(op_type, []).append(rule)

    def _speaks(self, rule: Rule) -> bool:
        """Rows of the study hold everywhere till more is known; the compiler's not where it was made."""
        if rule.scope == M4:
            return True
        if rule.scope.via != "Core ML" and M4.covers(self.target):
            return False
        return rule.scope.concerns(self.target)

    def verdict(self, op: Operation) -> tuple[bool | None, Finding | None]:
        """Can the ANE run the op? True, False with the reason, or None where no row knows it."""
        for rule in (*self._own.get(op.op_type, ()), *self._any):
            value = rule.test(op, self.target) if rule.test is not None else op.op_type
            if value:
                return False, rule.finding(value, op.outputs[0].name)
        untried = op.op_type not in INDEXED and when.typed(when.values(op), when.INDEX)
        known = op.op_type in LEGAL or op.op_type in WITH_STATE
        return (True if known and not untried else None), None
