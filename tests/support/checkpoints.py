"""A checkpoint folder as transformers saves one: a small Llama with a tokenizer trained on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = "hello world, how are you? I am well, thank you — and you? 你好 🙂"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>")


def tokenizer() -> Any:
    """Bytes, and pairs of a few words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    made.train_from_iterator([WORDS] * 20, trainer)
    return made


def save_checkpoint(folder: Path, *, template: str = TEMPLATE, layers: int = 2, **config: Any) -> Path:
    """Write the checkpoint of a Llama with random weights, which are the same each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), bos_token="<s>", eos_token="</s>")
    fast.chat_template = template or None
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"max_position_embeddings": 48, "initializer_range": 0.2, "eos_token_id": 1, "bos_token_id": 0}
    words = {"vocab_size": len(fast)}
    made = LlamaConfig(num_hidden_layers=layers, **{**sizes, **more, **words, **config})
    LlamaForCausalLM(made).save_pretrained(folder)
    return folder
