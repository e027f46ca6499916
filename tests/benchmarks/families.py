"""The rows of `matrix.py`: architectures of today, by family."""

from __future__ import annotations

from architectures import (
    BOXES,
    DECODER,
    DINO,
    GPT,
    LAYERS,
    PATCHES,
    RESNET,
    SEQ2SEQ,
    STAGES,
    T5,
    TEXT,
    WAVES,
    WHISPER,
    Architecture,
    Sizes,
    both,
    decoder,
    encoder,
    from_diffusers,
    from_timm,
    hugging_face,
    masked,
    mel,
    noisy,
    picture,
    pixels,
    plain,
    spoken,
    tokens,
    trocr,
    waves,
    written,
)

UNET: Sizes = {
    "sample_size": 32,
    "block_out_channels": (64, 128),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 128,
    "attention_head_dim": 8,
    "norm_num_groups": 32,
}
VAE: Sizes = {
    "block_out_channels": (64, 128),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "latent_channels": 4,
}

DENSE: Sizes = {"experts_implementation": "dense", "num_experts_per_tok": 2}
"""As `frontend.register_experts()` offers it."""
LATENT: Sizes = DECODER | {
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "n_routed_experts": 4,
    "moe_intermediate_size": 96,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

STATES: Sizes = {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 32000}
"""Models without attention."""
SCANS: Sizes = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
}
DELTAS: Sizes = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}

DECODERS = {
    "gpt2": decoder("GPT2", GPT, model="GPT2LMHeadModel"),
    "gpt_neo": decoder(
        "GPTNeo", TEXT | {"num_layers": 2, "num_heads": 12, "attention_types": [[["global", "local"], 1]]}
    ),
    "gpt_neox": decoder("GPTNeoX", TEXT | {"rotary_pct": 0.25}),
    "gptj": decoder("GPTJ", GPT | {"rotary_dim": 32}),
    "codegen": decoder("CodeGen", GPT | {"rotary_dim": 32}),
    "gpt_bigcode": decoder("GPTBigCode", GPT),
    "opt": decoder("OPT", TEXT | {"ffn_dim": 2048, "word_embed_proj_dim": 768}),
    "bloom": decoder("Bloom", {"n_layer": 2, "n_head": 12, "hidden_size": 768, "vocab_size": 32000}),
    "mpt": decoder(
        "Mpt", {"n_layers": 2, "n_heads": 12, "d_model": 768, "vocab_size": 32000, "max_seq_len": 256}
    ),
    "falcon": decoder("Falcon", TEXT | {"new_decoder_architecture": False, "alibi": False}),
    "llama": decoder("Llama"),
    "mistral": decoder("Mistral", DECODER | {"sliding_window": 16}),
    "qwen2": decoder("Qwen2"),
    "qwen3": decoder("Qwen3"),
    "gemma": decoder("Gemma"),
    "gemma2": decoder("Gemma2", DECODER | {"sliding_window": 16, "query_pre_attn_scalar": 64}),
    "gemma3": decoder("Gemma3", DECODER | {"sliding_window": 16}, config="Gemma3TextConfig"),
    "phi": decoder("Phi", TEXT),
    "phi3": decoder("Phi3"),
    "smollm3": decoder("SmolLM3"),
    "stablelm": decoder("StableLm"),
    "olmo2": decoder("Olmo2"),
    "granite": decoder("Granite"),
    "starcoder2": decoder("Starcoder2", DECODER | {"sliding_window": None}),
    "cohere": decoder("Cohere"),
    "glm": decoder("Glm"),
    "nemotron": decoder("Nemotron"),
    "persimmon": decoder("Persimmon", TEXT),
    "exaone4": decoder("Exaone4", DECODER | {"sliding_window": 16, "sliding_window_pattern": 2}),
    "helium": decoder("Helium"),
    "lfm2": decoder("Lfm2", DECODER | {"layer_types": ["conv", "full_attention"]}),
    "xglm": decoder("XGLM", SEQ2SEQ | {"num_layers": 2, "attention_heads": 12, "ffn_dim": 2048}),
    "falcon_alibi": decoder("Falcon", TEXT | {"new_decoder_architecture": False, "alibi": True}),
    "mixtral": decoder("Mixtral", DECODER | DENSE | {"num_local_experts": 4}),
    "qwen3_moe": decoder("Qwen3Moe", DECODER | DENSE | {"num_experts": 6, "moe_intermediate_size": 128}),
    "gpt_oss": decoder("GptOss", DECODER | DENSE | {"num_local_experts": 4, "sliding_window": 32}),
    "deepseek_v2": decoder("DeepseekV2", LATENT | DENSE),
    "deepseek_v3": decoder("DeepseekV3", LATENT | DENSE | {"head_dim": 16, "n_group": 2}),
    "mamba": decoder("Mamba", STATES | {"state_size": 8}, recipe=None),
    "mamba2": decoder(
        "Mamba2",
        STATES | {"state_size": 16, "num_heads": 8, "head_dim": 64, "n_groups": 2, "chunk_size": 64},
        recipe=None,
    ),
    "bamba": decoder("Bamba", DECODER | SCANS | {"attn_layer_indices": [1]}),
    "falcon_h1": decoder("FalconH1", DECODER | SCANS | {"mamba_d_ssm": 512}),
    "recurrent_gemma": decoder(
        "RecurrentGemma", DECODER | {"lru_width": 256, "block_types": ["recurrent", "attention"]}
    ),
    "xlstm": decoder("xLSTM", STATES | {"num_heads": 4, "chunk_size": 64}, recipe=None),
    "qwen3_next": decoder(
        "Qwen3Next",
        DECODER
        | DENSE
        | DELTAS
        | {"num_experts": 4, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96},
    ),
}
"""Causal language models."""

ENCODERS = {
    "bert": encoder("Bert"),
    "bert_mlm": encoder("Bert", model="BertForMaskedLM"),
    "roberta": encoder("Roberta"),
    "distilbert": encoder(
        "DistilBert", {"n_layers": 2, "n_heads": 12, "dim": 768, "hidden_dim": 2048, "vocab_size": 32000}
    ),
    "minilm": encoder("Bert", TEXT | {"hidden_size": 384, "num_attention_heads": 12}),
    "modernbert": encoder("ModernBert", TEXT | {"pad_token_id": 0, "local_attention": 96}),
    "albert": encoder("Albert", TEXT | {"embedding_size": 64}),
    "electra": encoder("Electra", TEXT | {"embedding_size": 64}),
    "mpnet": encoder("MPNet"),
    "deberta": encoder("Deberta", TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "deberta_v2": encoder(
        "DebertaV2", TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 32}
    ),
    "roformer": encoder("RoFormer", TEXT | {"embedding_size": 768}),
    "squeezebert": encoder(
        "SqueezeBert",
        TEXT
        | {"hidden_size": 768, "embedding_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    ),
    "nomic_bert": encoder("NomicBert"),
    "t5_encoder": encoder("T5", T5, model="T5EncoderModel"),
    "longformer": plain("LongformerModel", "LongformerConfig", TEXT | {"attention_window": [32, 32]}, masked),
    "clip_text": Architecture(hugging_face("CLIPTextModel", "CLIPTextConfig", TEXT), tokens, "encoder_ane"),
}
"""Text encoders."""

SEQUENCES = {
    "t5": plain("T5ForConditionalGeneration", "T5Config", T5, both, "seq2seq_ane"),
    "bart": plain("BartForConditionalGeneration", "BartConfig", SEQ2SEQ, both, "seq2seq_ane"),
    "marian": plain("MarianMTModel", "MarianConfig", SEQ2SEQ, both, "seq2seq_ane"),
    "trocr": Architecture(trocr(LAYERS), written, "seq2seq_ane", (("use_cache", False),)),
    "whisper": plain("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, spoken, "whisper_ane"),
    "whisper_encoder": Architecture(
        lambda: hugging_face("WhisperModel", "WhisperConfig", WHISPER)().encoder, mel, "whisper_ane"
    ),
    "wav2vec2": plain("Wav2Vec2ForCTC", "Wav2Vec2Config", WAVES, waves),
    "hubert": plain("HubertModel", "HubertConfig", WAVES, waves),
    "wavlm": plain("WavLMModel", "WavLMConfig", WAVES, waves),
    "mt5": plain(
        "MT5ForConditionalGeneration",
        "MT5Config",
        T5 | {"feed_forward_proj": "gated-gelu"},
        both,
        "seq2seq_ane",
    ),
    "led": plain("LEDForConditionalGeneration", "LEDConfig", SEQ2SEQ | {"attention_window": 32}, both),
    "clap": plain(
        "ClapAudioModelWithProjection",
        "ClapAudioConfig",
        {
            "patch_embeds_hidden_size": 48,
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [2, 2, 4, 4],
            "hidden_size": 384,
            "spec_size": 128,
            "num_mel_bins": 32,
            "window_size": 4,
        },
        lambda: {"input_features": mel(256)["input_features"][:, None, :32].transpose(0, 1, 3, 2).copy()},
    ),
    "wav2vec2_bert": plain(
        "Wav2Vec2BertModel",
        "Wav2Vec2BertConfig",
        LAYERS | {"feature_projection_input_dim": 80},
        lambda: {"input_features": mel(100)["input_features"].transpose(0, 2, 1).copy()},
    ),
}
"""Encoders with decoders, and sound."""

PICTURES = {
    "vit": picture("ViT"),
    "deit": picture("DeiT"),
    "beit": picture("Beit"),
    "dinov2": picture("Dinov2", PATCHES | {"patch_size": 14, "image_size": 518}),
    "dinov3": picture("DINOv3ViT"),
    "clip_vision": picture("CLIPVision", PATCHES | {"patch_size": 32}),
    "siglip_vision": picture("SiglipVision"),
    "sam_vision": picture(
        "SamVision",
        LAYERS | {"image_size": 256, "window_size": 7, "output_channels": 64, "global_attn_indexes": [1]},
        side=256,
    ),
    "yolos": picture("Yolos", PATCHES | {"image_size": [512, 864]}, model="YolosForObjectDetection"),
    "detr": picture("Detr", BOXES | {"backbone_config": RESNET}, model="DetrForObjectDetection"),
    "rt_detr": picture(
        "RTDetr",
        {
            "backbone_config": RESNET,
            "encoder_hidden_dim": 64,
            "encoder_in_channels": [64, 128, 256],
            "d_model": 64,
            "decoder_in_channels": [64, 64, 64],
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "decoder_layers": 2,
            "num_queries": 20,
        },
        model="RTDetrForObjectDetection",
    ),
    "depth_anything": picture(
        "DepthAnything",
        {
            "backbone_config": DINO,
            "reassemble_hidden_size": 256,
            "neck_hidden_sizes": [32, 64, 128, 128],
            "fusion_hidden_size": 64,
        },
        model="DepthAnythingForDepthEstimation",
        part="predicted_depth",
    ),
    "segformer": picture(
        "Segformer",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 64, 96, 128], "decoder_hidden_size": 64},
        model="SegformerForSemanticSegmentation",
    ),
    "swin": picture("Swin", STAGES),
    "swinv2": picture("Swinv2", STAGES),
    "vit_mae": picture("ViTMSN"),
    "convnextv2": plain(
        "ConvNextV2Model",
        "ConvNextV2Config",
        {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 2, 1]},
        pixels(),
    ),
    "mobilevit": picture("MobileViT", {"image_size": 256, "hidden_sizes": [64, 80, 96]}, side=256),
    "mobilenet_v2": plain("MobileNetV2Model", "MobileNetV2Config", {"image_size": 224}, pixels()),
    "levit": picture("Levit", {"image_size": 224}),
    "poolformer": plain(
        "PoolFormerModel",
        "PoolFormerConfig",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 64, 96, 128]},
        pixels(),
    ),
    "resnet": plain(
        "ResNetModel",
        "ResNetConfig",
        {k: v for k, v in RESNET.items() if k not in ("model_type", "out_features")},
        pixels(),
    ),
}
"""Models of pictures."""

OTHERS = {
    "timm_mobilenetv4": from_timm("mobilenetv4_conv_small"),
    "timm_efficientnet": from_timm("efficientnet_b0"),
    "timm_fastvit": from_timm("fastvit_t8", 256),
    "timm_repvit": from_timm("repvit_m0_9"),
    "timm_eva02": from_timm("eva02_tiny_patch14_224", recipe="vit_ane", depth=2),
    "timm_vit_reg": from_timm("vit_small_patch16_dinov3", 256, recipe="vit_ane", depth=2),
    "timm_maxvit": from_timm("maxvit_rmlp_pico_rw_256", 256),
    "timm_inception_next": from_timm("inception_next_tiny", depths=(1, 1, 1, 1)),
    "timm_gcvit": from_timm("gcvit_xxtiny"),
    "timm_sequencer": from_timm("sequencer2d_s", layers=(1, 1, 1, 1)),
    "timm_halonet": from_timm("halonet26t", 256),
    "timm_xcit": from_timm("xcit_nano_12_p16_224", depth=2),
    "timm_coatnet": from_timm("coatnet_nano_rw_224"),
    "timm_hiera": from_timm("hiera_tiny_224", stages=(1, 1, 1, 1)),
    "sd_unet": from_diffusers(
        "UNet2DConditionModel",
        noisy(sample=(1, 4, 32, 32), encoder_hidden_states=(1, 77, 128)),
        "unet_ane",
        **UNET,
    ),
    "sd_vae_decoder": from_diffusers("AutoencoderKL", pixels(32, 4, "z"), "unet_ane", "decode", **VAE),
    "sd_vae_encoder": from_diffusers("AutoencoderKL", pixels(128, 3, "x"), "unet_ane", "_encode", **VAE),
    "dit": from_diffusers(
        "SD3Transformer2DModel",
        noisy(hidden_states=(1, 16, 32, 32), encoder_hidden_states=(1, 77, 128), pooled_projections=(1, 128)),
        None,
        sample_size=32,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=128,
        caption_projection_dim=128,
        pooled_projection_dim=128,
        pos_embed_max_size=32,
    ),
}
"""timm and diffusers, where they are installed."""

ARCHITECTURES: dict[str, Architecture] = {**DECODERS, **ENCODERS, **SEQUENCES, **PICTURES, **OTHERS}
