"""Which pass repairs what a legality rule finds: a table by rule. docs/remedies.md has it with the reasons."""

from __future__ import annotations

PASSES: dict[str, str] = {
    "adapt_rank": "linear-rank sdpa-rank",
    "argmax_as_floats": "op-reduce_argmax op-reduce_argmin",
    "approximate": "op-asin op-acos op-tan op-sinh op-cosh op-atanh sin-cos",
    "causal_mask_tensor": "op-band_part mask-positions",
    "channel_scales": "comp-blockwise",
    "chain_pools": "max-pool-width pool-window",
    "compute_fp16": "fp32",
    "convolve_each_image": "conv-dynamic-weight",
    "decompose_attention": "sdpa-no-device sdpa-mask-cast",
    "decompose_ops": "op-mod op-reduce_prod op-cumsum op-one_hot",
    "depthwise_sum": "conv-depthwise-step",
    "embedding_matmul": "embedding embedding-uint16",
    "fold_long_axis": "axis",
    "fold_constants": "op-shape op-range_1d",
    "integers_as_floats": "int32 logical-and",
    "interface_fp16": "fp32-cast",
    "long_convolution": "conv-kernel conv-kernel-old",
    "one_hot_lookup": "gather-runtime gather-uint16 slice-runtime",
    "reflect_pad_slices": "pad-mirror",
    "replace_scatter": "op-scatter op-scatter_along_axis op-scatter_nd",
    "rerank": "rank",
    "resample_matmul": "op-crop_resize texture-old",
    "scale_after_product": "comp-pcs",
    "slice_windows": "op-sliding_windows op-reverse_sequence",
    "split_conv3d": "conv3d",
    "split_head": "head-size",
    "split_inner_axis": "matmul-inner",
    "threshold_to_maximum": "threshold",
    "token_id_guard": "index-guard",
    "unroll_loop": "op-cond op-while_loop op-make_list op-list_read op-list_write op-list_gather "
    "op-list_scatter op-list_length",
    "unroll_recurrent": "op-lstm op-gru op-rnn",
}
"""Pass -> the rules whose findings it repairs, where it can."""

REMEDIES: dict[str, str] = {rule: name for name, rules in PASSES.items() for rule in rules.split()}
"""Rule -> the pass."""
