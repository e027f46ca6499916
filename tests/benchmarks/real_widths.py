"""The rows of `matrix.py --real`: two layers each, as wide as models in use, with the vocabularies of those."""

from __future__ import annotations

from architectures import (
    Architecture,
    Sizes,
    both,
    decoder,
    encoder,
    mel,
    picture,
    pixels,
    plain,
    spoken,
    trocr,
    waves,
    written,
)

BASE: Sizes = {"hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 3072}
"""As wide as BERT, ViT and wav2vec2."""
WORDS: Sizes = BASE | {"vocab_size": 30522, "max_position_embeddings": 512}
SMALL: Sizes = {
    "hidden_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
"""As wide as MiniLM; with 6 heads as DINOv2 and DeiT in their small form."""
NARROW: Sizes = SMALL | {"num_attention_heads": 6}
T5: Sizes = {"num_layers": 2, "num_heads": 8, "d_model": 512, "d_kv": 64, "d_ff": 2048, "vocab_size": 32128}
BART: Sizes = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "d_model": 768,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "vocab_size": 50265,
}
WHISPER: Sizes = BART | {
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "d_model": 384,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "vocab_size": 51865,
    "num_mel_bins": 80,
    "max_source_positions": 100,
}
SMOLLM: Sizes = {
    "hidden_size": 576,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
QWEN: Sizes = {
    "hidden_size": 896,
    "num_hidden_layers": 2,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 50257,
    "tie_word_embeddings": True,
}
STATES: Sizes = {"hidden_size": 768, "num_hidden_layers": 2, "vocab_size": 50280}

REAL: dict[str, Architecture] = {
    "opt": decoder("OPT", WORDS | {"ffn_dim": 3072, "word_embed_proj_dim": 768, "vocab_size": 50272}),
    "gpt_neox": decoder("GPTNeoX", WORDS | {"rotary_pct": 0.25, "vocab_size": 50304}),
    "llama": decoder("Llama", SMOLLM),
    "qwen2": decoder("Qwen2", QWEN),
    "mamba": decoder("Mamba", STATES, recipe=None),
    "mamba2": decoder(
        "Mamba2",
        STATES | {"state_size": 128, "num_heads": 24, "head_dim": 64, "n_groups": 1, "chunk_size": 256},
        recipe=None,
    ),
    "bert": encoder("Bert", WORDS),
    "roberta": encoder("Roberta", WORDS | {"vocab_size": 50265, "max_position_embeddings": 514}),
    "distilbert": encoder(
        "DistilBert", {"n_layers": 2, "n_heads": 12, "dim": 768, "hidden_dim": 3072, "vocab_size": 30522}
    ),
    "minilm": encoder("Bert", WORDS | SMALL),
    "modernbert": encoder("ModernBert", WORDS | {"intermediate_size": 1152, "vocab_size": 50368}),
    "mpnet": encoder("MPNet", WORDS | {"vocab_size": 30527}),
    "t5": plain("T5ForConditionalGeneration", "T5Config", T5, both, "seq2seq_ane"),
    "bart": plain("BartForConditionalGeneration", "BartConfig", BART, both, "seq2seq_ane"),
    "trocr": Architecture(trocr(NARROW), written, "seq2seq_ane", (("use_cache", False),)),
    "whisper": plain("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, spoken, "whisper_ane"),
    "wav2vec2": plain("Wav2Vec2ForCTC", "Wav2Vec2Config", BASE, waves),
    "hubert": plain("HubertModel", "HubertConfig", BASE, waves),
    "wav2vec2_bert": plain(
        "Wav2Vec2BertModel",
        "Wav2Vec2BertConfig",
        BASE | {"feature_projection_input_dim": 80},
        lambda: {"input_features": mel(100)["input_features"].transpose(0, 2, 1).copy()},
    ),
    "vit": picture("ViT", BASE | {"image_size": 224, "patch_size": 16}),
    "deit": picture("DeiT", NARROW | {"image_size": 224, "patch_size": 16}),
    "dinov2": picture("Dinov2", NARROW | {"image_size": 518, "patch_size": 14}),
    "clip_vision": picture("CLIPVision", BASE | {"image_size": 224, "patch_size": 32}),
    "siglip_vision": picture("SiglipVision", BASE | {"image_size": 224, "patch_size": 16}),
    "swin": picture("Swin", {"image_size": 224, "embed_dim": 96, "depths": [2, 2, 2, 2]}),
    "segformer": picture(
        "Segformer",
        {"hidden_sizes": [32, 64, 160, 256], "depths": [1, 1, 1, 1], "decoder_hidden_size": 256},
        model="SegformerForSemanticSegmentation",
    ),
    "convnextv2": plain(
        "ConvNextV2Model",
        "ConvNextV2Config",
        {"hidden_sizes": [96, 192, 384, 768], "depths": [1, 1, 2, 1]},
        pixels(),
    ),
    "resnet": plain(
        "ResNetModel",
        "ResNetConfig",
        {"embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [1, 1, 2, 1]},
        pixels(),
    ),
}
"""Families of which two layers convert in less than 4 GB."""
