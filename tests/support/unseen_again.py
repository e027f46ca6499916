"""A second set of decoders that no page had named when it was chosen: families and sizes for `unseen_decoders`.

It was written down before any of them was tried. Convolutions and attention sinks, one head of keys, odd
widths, positions by distance, blocks in parallel, caps, clips and mixtures are among them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import unseen_families
from unseen_families import ALL_HEADS, Row, row_of

SIZES = unseen_families.SIZES | {"hidden_size": 72, "intermediate_size": 136}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT: dict[str, Any] = {
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
ALTERNATING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 25}
CONVOLVED: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
SPARSE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}
SMALL_TABLES: dict[str, Any] = {"vocab_size_per_layer_input": 307, "hidden_size_per_layer_input": 12}
ROUTED: dict[str, Any] = EXPERTS | LATENT | SPARSE

_row = partial(row_of, SIZES)


CONFIGURATIONS: dict[str, Row] = {
    "lfm2_odd": _row("Lfm2", conv_L_cache=4, conv_bias=True, **CONVOLVED),
    "lfm2_moe": _row("Lfm2Moe", num_experts=4, num_dense_layers=1, **EXPERTS, **CONVOLVED),
    "gpt_oss_odd": _row("GptOss", head_dim=18, num_local_experts=3, num_experts_per_tok=2, sliding_window=22),
    "granite_swa": _row("GraniteSWA", **ALTERNATING),
    "granitemoeshared": _row(
        "GraniteMoeShared", num_local_experts=3, num_experts_per_tok=2, shared_intermediate_size=44
    ),
    "mimo_v2_flash": _row(
        "MiMoV2Flash", head_dim=20, v_head_dim=12, n_routed_experts=4, **EXPERTS, **ALTERNATING, **SPARSE
    ),
    "cwm": _row("Cwm", head_dim=18, **ALTERNATING),
    "exaone_moe": _row("ExaoneMoe", num_experts=4, num_shared_experts=1, **EXPERTS, **ALTERNATING, **SPARSE),
    "laguna": _row(
        "Laguna", head_dim=18, num_experts=4, shared_expert_intermediate_size=44, **EXPERTS, **SPARSE
    ),
    "mellum": _row("Mellum", head_dim=22, num_experts=5, **EXPERTS, **ALTERNATING),
    "solar_open": _row("SolarOpen", head_dim=18, n_routed_experts=4, n_shared_experts=1, **EXPERTS),
    "hy_v3": _row("HYV3", head_dim=18, num_experts=4, num_shared_experts=1, **EXPERTS, **SPARSE),
    "ministral3": _row("Ministral3", head_dim=18),
    "minimax_m2": _row("MiniMaxM2", head_dim=18, num_local_experts=4, num_experts_per_tok=2),
    "afmoe": _row("Afmoe", head_dim=18, num_experts=4, num_shared_experts=1, **EXPERTS, **ALTERNATING),
    "cohere2_moe": _row("Cohere2Moe", head_dim=18, num_experts=4, num_experts_per_tok=2, **ALTERNATING),
    "glm4_moe_lite": _row("Glm4MoeLite", **ALL_HEADS, n_routed_experts=4, n_shared_experts=1, **ROUTED),
    "gemma4": _row(
        "Gemma4", "Gemma4TextConfig", head_dim=18, global_head_dim=20, **SMALL_TABLES, **ALTERNATING
    ),
    "hyperclovax": _row("HyperCLOVAX", attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=1.5),
    "arcee_one_head": _row("Arcee", num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen2_one_head": _row("Qwen2", num_attention_heads=6, num_key_value_heads=1, tie_word_embeddings=True),
    "gemma2_capped": _row("Gemma2", head_dim=22, attn_logit_softcapping=5.0, final_logit_softcapping=9.0),
    "stablelm_parallel": _row(
        "StableLm", qk_layernorm=True, use_parallel_residual=True, partial_rotary_factor=0.45
    ),
    "phi_normed": _row(
        "Phi", qk_layernorm=True, rope_parameters={"rope_theta": 5e3, "partial_rotary_factor": 0.34}
    ),
    "starcoder2_window": _row("Starcoder2", sliding_window=27, use_bias=True),
    "smollm3_without_positions": _row("SmolLM3", no_rope_layers=[1, 0]),
    "falcon_one_head": (
        "FalconConfig",
        {"name": "FalconForCausalLM", **SIZES, "multi_query": True, "parallel_attn": True, "bias": True},
    ),
    "gpt_neox_in_turn": _row("GPTNeoX", use_parallel_residual=False, rotary_pct=0.5),
    "bloom_odd": (
        "BloomConfig",
        {"name": "BloomForCausalLM", "vocab_size": 307, "hidden_size": 66, "n_layer": 2, "n_head": 6},
    ),
    "mpt_clipped": (
        "MptConfig",
        {
            "name": "MptForCausalLM",
            "vocab_size": 307,
            "d_model": 60,
            "n_layers": 2,
            "n_heads": 5,
            "max_seq_len": 300,
            "attn_config": {"clip_qkv": 1.5, "alibi": True},
        },
    ),
}
"""Name -> the class of its configuration, and its options with the class of its module."""
