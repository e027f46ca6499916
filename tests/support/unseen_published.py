"""A fourth set for `unseen_decoders`: families and variants, with weights in bf16, as they are published.

It was written down before any of it was tried. Numbers of bf16 are numbers of fp16, so a build stores what its
checkpoint has. Half are families that no set had, hybrids and decoders of encoder-decoders among them; half
are variants of families that have a cache: groups of queries, tied heads, biases, windows, caps, parts of the
rotary positions, two sets of frequencies, blocks in parallel, experts, and latent keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import unseen_families
from unseen_families import ALL_HEADS, DECODER, EXPERTS, LATENT, Row, row_of

SIZES = unseen_families.SIZES | {"intermediate_size": 112}
ONE_HEAD: dict[str, Any] = {"num_key_value_heads": 1}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
HYBRID: dict[str, Any] = {"mamba_d_state": 8, "mamba_expand": 2}
ENCODED = unseen_families.ENCODED | {"decoder_ffn_dim": 112}
OLDER: dict[str, Any] = {
    "vocab_size": 307,
    "n_positions": 300,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.12,
}
ALTERNATING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 22}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
SHORT_AND_LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [2.0 + 0.2 * i for i in range(8)],
}

_row = partial(row_of, SIZES)


def rotary(part: float = 1.0, **more: Any) -> dict[str, Any]:
    """Rotary positions of a part of each head."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part} | more
    return {"rope_parameters": rope}


CONFIGURATIONS: dict[str, Row] = {
    "granitemoehybrid": _row(
        "GraniteMoeHybrid",
        layer_types=["mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_chunk_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=40,
        **HYBRID,
    ),
    "jamba": _row(
        "Jamba", num_experts=4, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, **HYBRID
    ),
    "zamba": _row(
        "Zamba",
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2,
        use_mamba_kernels=False,
        **ALL_HEADS,
        **HYBRID,
    ),
    "mamba2": (
        "Mamba2Config",
        {
            "name": "Mamba2ForCausalLM",
            "vocab_size": 307,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "axk2": _row(
        "AXK2", n_routed_experts=4, index_topk=400, index_head_dim=16, index_n_heads=2, **EXPERTS, **LATENT
    ),
    "cohere_compass": _row(
        "CohereCompass",
        "CohereCompassTextConfig",
        rope_parameters={f"{kind}_attention": ROPE for kind in ("sliding", "full")},
        **ALTERNATING,
    ),
    "rembert": _row("RemBert", input_embedding_size=40, output_embedding_size=56, **DECODER),
    "roformer": _row("RoFormer", embedding_size=48, **DECODER),
    "megatron_bert": _row("MegatronBert", **DECODER),
    "bert_generation": ("BertGenerationConfig", {"name": "BertGenerationDecoder", **SIZES, **DECODER}),
    "mbart": _row("MBart", **ENCODED),
    "marian": _row("Marian", **ENCODED),
    "plbart": _row("PLBart", **ENCODED),
    "blenderbot_small": _row("BlenderbotSmall", **ENCODED),
    "trocr": _row("TrOCR", **{k: v for k, v in ENCODED.items() if k.startswith("d")}),
    "llama_biased_tied": _row("Llama", attention_bias=True, mlp_bias=True, **ONE_HEAD, **TIED),
    "llama_linear_rope": _row("Llama", **rotary(rope_type="linear", factor=4.0)),
    "phi3_two_sets": _row(
        "Phi3",
        rope_parameters=SHORT_AND_LONG,
        original_max_position_embeddings=256,
        max_position_embeddings=512,
    ),
    "phi_part": _row("Phi", **ALL_HEADS, **rotary(0.25)),
    "gptj_part": ("GPTJConfig", {"name": "GPTJForCausalLM", **OLDER, "rotary_dim": 8}),
    "gpt2_scaled": (
        "GPT2Config",
        {"name": "GPT2LMHeadModel", **OLDER, "n_inner": 96, "scale_attn_by_inverse_layer_idx": True},
    ),
    "falcon_groups": (
        "FalconConfig",
        {
            "name": "FalconForCausalLM",
            "vocab_size": 307,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "initializer_range": 0.12,
        },
    ),
    "mistral_window": _row("Mistral", sliding_window=27, head_dim=20, **ONE_HEAD),
    "gemma3_windows": _row(
        "Gemma3", "Gemma3TextConfig", head_dim=20, **ALTERNATING, final_logit_softcapping=12.0
    ),
    "cohere_normed": _row("Cohere", use_qk_norm=True, logit_scale=0.3),
    "opt_projected": (
        "OPTConfig",
        {
            "name": "OPTForCausalLM",
            "vocab_size": 307,
            "hidden_size": 64,
            "word_embed_proj_dim": 40,
            "ffn_dim": 112,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 300,
            "do_layer_norm_before": False,
            "init_std": 0.12,
        },
    ),
    "granite_scaled": _row(
        "Granite",
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        logits_scaling=2.0,
    ),
    "qwen3_moe_in_turn": _row(
        "Qwen3Moe", num_experts=5, decoder_sparse_step=2, norm_topk_prob=True, head_dim=18, **EXPERTS
    ),
    "mixtral_one_expert": _row("Mixtral", num_local_experts=5, num_experts_per_tok=1, sliding_window=24),
    "exaone4_windows": _row("Exaone4", head_dim=18, **ALTERNATING),
}
"""Name -> the class of its configuration, and its options with the class of its module."""
