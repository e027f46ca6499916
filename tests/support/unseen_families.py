"""A third set for `unseen_decoders`: families of transformers that no page had named when it was chosen.

The second half of the causal language models that transformers lists: recurrent states in several forms, sparse
choices of keys, loops over the experts that some token chose, decoders of encoder-decoders, and those that no
cache could be added to.
"""

from __future__ import annotations

from functools import partial
from typing import Any

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 120,
    "vocab_size": 307,
    "max_position_embeddings": 300,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALL_HEADS: dict[str, Any] = {"num_key_value_heads": 4}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED: dict[str, Any] = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 40}
ONE_GROUP: dict[str, Any] = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
TWO_GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]}
HEADS: dict[str, Any] = {"head_dim": 16}
LATENT: dict[str, Any] = ALL_HEADS | {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
INDEXED: dict[str, Any] = {"index_topk": 400, "index_head_dim": 16, "index_n_heads": 2}
LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
DELTA: dict[str, Any] = {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
ENCODED: dict[str, Any] = {
    "d_model": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 120,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
}
DECODER: dict[str, Any] = {"is_decoder": True}

Row = tuple[str, dict[str, Any]]


def row_of(sizes: dict[str, Any], name: str, config: str = "", **more: Any) -> Row:
    """The class of a configuration, and its options with the name of the model."""
    return (config or f"{name}Config", {"name": f"{name}ForCausalLM", **sizes} | more)


_row = partial(row_of, SIZES)


CONFIGURATIONS: dict[str, Row] = {
    "dbrx": (
        "DbrxConfig",
        {
            "name": "DbrxForCausalLM",
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 300,
            "vocab_size": 307,
            "initializer_range": 0.12,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "qwen3_5": _row("Qwen3_5", "Qwen3_5TextConfig", linear_num_value_heads=4, **DELTA, **LINEAR, **HEADS),
    "qwen3_5_moe": _row(
        "Qwen3_5Moe", "Qwen3_5MoeTextConfig", linear_num_value_heads=4, **DELTA, **LINEAR, **HEADS, **SHARED
    ),
    "aria_text": _row(
        "AriaText", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, moe_intermediate_size=48
    ),
    "mamba": (
        "MambaConfig",
        {"name": "MambaForCausalLM", "vocab_size": 307, "hidden_size": 48, "state_size": 8},
    ),
    "falcon_mamba": (
        "FalconMambaConfig",
        {
            "name": "FalconMambaForCausalLM",
            "vocab_size": 307,
            "hidden_size": 48,
            "state_size": 8,
            "num_hidden_layers": 2,
        },
    ),
    "nemotron_h": _row(
        "NemotronH",
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=8,
        chunk_size=16,
        layers_block_type=["mamba", "attention", "mamba", "moe"],
        num_hidden_layers=4,
        n_routed_experts=4,
        n_shared_experts=1,
        moe_shared_expert_intermediate_size=48,
        **HEADS,
        **EXPERTS,
    ),
    "zamba2": _row(
        "Zamba2",
        layers_block_type=["mamba", "hybrid", "mamba"],
        num_hidden_layers=3,
        num_mem_blocks=1,
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_headdim=16,
        mamba_ngroups=1,
        chunk_size=16,
        adapter_rank=8,
        **ALL_HEADS,
    ),
    "olmo_hybrid": _row("OlmoHybrid", linear_num_value_heads=2, **DELTA, **LINEAR),
    "deepseek_v32": _row("DeepseekV32", **ONE_GROUP, **INDEXED, **LATENT, **EXPERTS),
    "glm_moe_dsa": _row("GlmMoeDsa", **ONE_GROUP, **INDEXED, **LATENT, **EXPERTS),
    "roberta": _row("Roberta", **DECODER),
    "bert": ("BertConfig", {"name": "BertLMHeadModel", **SIZES, **DECODER}),
    "electra": _row("Electra", embedding_size=32, **DECODER),
    "bart": _row("Bart", **ENCODED),
    "blenderbot": _row("Blenderbot", **ENCODED),
    "pegasus": _row("Pegasus", **ENCODED),
    "granitemoe_swa": _row("GraniteMoeSWA", num_local_experts=4, num_experts_per_tok=2),
    "longcat_flash": _row(
        "LongcatFlash",
        num_layers=2,
        head_dim=8,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        expert_ffn_hidden_size=40,
        ffn_hidden_size=100,
        **LATENT,
    ),
    "zaya": _row("Zaya", num_experts=4, moe_intermediate_size=48, router_hidden_size=16, **HEADS),
    "lfm3": _row("Lfm3", layer_types=["conv", "full_attention"]),
    "gemma4_unified": _row("Gemma4Unified", "Gemma4UnifiedTextConfig", **HEADS),
    "apertus1p5": _row("Apertus1p5Text", "Apertus1p5TextConfig"),
    "axk1": _row("AXK1", n_routed_experts=4, **TWO_GROUPS, **EXPERTS, **LATENT),
    "beam": _row("Beam", num_experts=4, sliding_window=25, **TWO_GROUPS, **HEADS, **EXPERTS),
    "flint": _row("Flint", sliding_window=25, **HEADS, **SHARED),
    "kolibri1": _row("Kolibri1", sliding_window=25, **HEADS, **SHARED),
    "lara_mini": _row("LaraMini", sliding_window=25, linear_num_value_heads=4, **DELTA, **HEADS, **SHARED),
    "hrm_text": _row("HrmText", **HEADS),
    "dory": _row("Dory", n_input_layers=1, n_output_layers=1, num_hidden_layers=3, sliding_window=25, **HEADS),
    "hy_v4": _row(
        "HYV4", n_routed_experts=4, mlp_layer_types=["dense", "sparse"], **INDEXED, **EXPERTS, **LATENT
    ),
    "kimi_linear": _row(
        "KimiLinear",
        linear_head_dim=8,
        linear_num_heads=4,
        num_local_experts=4,
        **LINEAR,
        **EXPERTS,
        **{k: v for k, v in LATENT.items() if k != "q_lora_rank"},
    ),
    "rwkv": _row("Rwkv", context_length=300, attention_hidden_size=64),
    "recurrent_gemma": _row(
        "RecurrentGemma",
        lru_width=64,
        attention_window_size=40,
        block_types=["recurrent", "attention"],
        **HEADS,
    ),
    "llama4": _row(
        "Llama4",
        "Llama4TextConfig",
        intermediate_size_mlp=100,
        num_local_experts=2,
        num_experts_per_tok=1,
        attention_chunk_size=32,
        no_rope_layers=[1, 0],
        **HEADS,
    ),
    "doge": _row("Doge", keep_window_size=400),
    "jetmoe": _row("JetMoe", kv_channels=16, num_local_experts=4, num_experts_per_tok=2),
    "minimax": _row("MiniMax"),
}
"""Name -> the class of its configuration, and its options with the class of its module."""
