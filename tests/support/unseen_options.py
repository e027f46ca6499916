"""A fifth set for `unseen_decoders`: rare combinations of options, in bf16, and families that no set has.

It was written down before any of it was tried: tied heads with scales, norms of queries and keys, parts of the
rotary positions, one head of keys, sinks, caps, shared experts, odd windows, three kinds of scaled rotary
positions, and biases.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import unseen_families
from unseen_families import Row, row_of

SIZES = unseen_families.SIZES | {
    "num_hidden_layers": 3,
    "hidden_size": 80,
    "num_key_value_heads": 1,
    "intermediate_size": 104,
    "vocab_size": 311,
}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 44}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 2e4,
    "factor": 3.0,
    "original_max_position_embeddings": 100,
}
LLAMA_3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e5,
    "factor": 6.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 90,
}

_row = partial(row_of, SIZES)


CONFIGURATIONS: dict[str, Row] = {
    "nemotron_part_biased": _row(
        "Nemotron",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
        attention_bias=True,
        mlp_bias=True,
        **TIED,
    ),
    "granite_tied_yarn": _row(
        "Granite",
        embedding_multiplier=5.0,
        logits_scaling=3.0,
        residual_multiplier=0.5,
        rope_parameters=YARN,
        **TIED,
    ),
    "qwen3_windows_llama3": _row(
        "Qwen3",
        head_dim=22,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=29,
        rope_parameters=LLAMA_3,
        **MIXED,
    ),
    "gpt_oss_yarn_one_head": _row(
        "GptOss",
        head_dim=20,
        num_local_experts=5,
        num_experts_per_tok=3,
        sliding_window=31,
        rope_parameters=YARN,
        **MIXED,
    ),
    "glm4_moe_two_shared": _row(
        "Glm4Moe",
        head_dim=20,
        use_qk_norm=True,
        attention_bias=True,
        n_routed_experts=5,
        n_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.7,
        n_group=1,
        topk_group=1,
        **EXPERTS,
    ),
    "llama_dynamic_tied": _row(
        "Llama", head_dim=24, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, **TIED
    ),
    "inkling2": _row(
        "Inkling2",
        "Inkling2TextConfig",
        unpadded_vocab_size=311,
        head_dim=20,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=20,
        sliding_window_size=27,
        d_rel=4,
        rel_extent=40,
        log_scaling_n_floor=64,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
        n_routed_experts=5,
        n_layers_per_attn_res_block=2,
        **EXPERTS,
    ),
    "mvp": _row(
        "Mvp",
        d_model=80,
        decoder_layers=3,
        decoder_attention_heads=4,
        decoder_ffn_dim=104,
        encoder_layers=1,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        init_std=0.12,
    ),
}
"""Name -> the class of its configuration, and its options with the class of its module."""
