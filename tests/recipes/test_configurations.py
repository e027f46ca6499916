"""Small architectures of other sizes: they convert, their recipe loses nothing, and the numbers stay.

Odd numbers of heads, layers, words and positions, shared keys, parallel residuals, windows, caps and biases by
distance; a tenth of what `make matrix` measures at larger sizes.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scores import scored

import anesurgery as ane
from anesurgery import frontend
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.files.interface import adapt_inputs, adapt_outputs
from anesurgery.interpret import run
from anesurgery.loading import load
from anesurgery.mil import Array, ct, quiet_host
from anesurgery.placement.score import OFF
from anesurgery.placement.target import Target
from anesurgery.surgery import find_recipe

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from architectures import Architecture, hugging_face, pixels

LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 3, "hidden_size": 48, "intermediate_size": 80}
WORDS = LAYERS | {"vocab_size": 101, "max_position_embeddings": 77, "pad_token_id": 0}
GROUPED = WORDS | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
SEQ2SEQ = {
    f"{part}_{what}": size
    for part in ("encoder", "decoder")
    for what, size in (("layers", 1), ("attention_heads", 3), ("ffn_dim", 80))
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def ids(length: int = 13, batch: int = 1, *names: str) -> dict[str, Array]:
    """Token ids, and a padding mask where it is named."""
    found = {"input_ids": np.random.default_rng(0).integers(3, 100, (batch, length)).astype(np.int32)}
    seen = np.ones((batch, length), np.int32)
    seen[:, length - 3 :] = 0
    return found | dict.fromkeys(names, seen)


def causal(name: str, sizes: dict[str, Any], length: int = 13, batch: int = 1, **more: str) -> Architecture:
    build = hugging_face(more.get("model", f"{name}ForCausalLM"), more.get("config", f"{name}Config"), sizes)
    return Architecture(build, lambda: ids(length, batch), "decoder_ane", (("use_cache", False),))


def text(name: str, sizes: dict[str, Any], length: int = 13, batch: int = 1) -> Architecture:
    build = hugging_face(f"{name}Model", f"{name}Config", sizes)
    return Architecture(build, lambda: ids(length, batch, "attention_mask"), "encoder_ane")


def seen(name: str, sizes: dict[str, Any], side: int) -> Architecture:
    build = hugging_face(f"{name}Model", f"{name}Config", sizes)
    return Architecture(build, pixels(side), "vit_ane")


FEW = {
    "mqa_untied": causal("Llama", GROUPED | {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "soft_caps_and_windows": causal(
        "Gemma2", GROUPED | {"num_hidden_layers": 2, "sliding_window": 5, "query_pre_attn_scalar": 7}
    ),
    "parallel_residual": causal("GPTNeoX", WORDS | {"num_attention_heads": 4, "rotary_pct": 0.5}),
    "distance_bias": causal("Bloom", {"n_layer": 1, "n_head": 3, "hidden_size": 48, "vocab_size": 101}),
    "odd_heads_and_batch": text("Bert", WORDS, length=77, batch=2),
    "relative_bias": Architecture(
        hugging_face(
            "T5EncoderModel",
            "T5Config",
            {"num_layers": 1, "num_heads": 3, "d_model": 40, "d_kv": 12, "d_ff": 80, "vocab_size": 101},
        ),
        lambda: ids(11, 1, "attention_mask"),
        "encoder_ane",
    ),
    "translation": Architecture(
        hugging_face(
            "BartForConditionalGeneration",
            "BartConfig",
            SEQ2SEQ | SPECIAL | {"d_model": 48, "vocab_size": 1101, "max_position_embeddings": 40},
        ),
        lambda: ids(11, 1, "attention_mask") | {"decoder_input_ids": ids(5)["input_ids"]},
        "seq2seq_ane",
        (("use_cache", False),),
    ),
    "counted_positions": text("Roberta", WORDS | {"vocab_size": 1101, "pad_token_id": 1}, batch=2),
    "patches": seen("ViT", LAYERS | {"image_size": 42, "patch_size": 14}, 42),
    "sound": Architecture(
        lambda: (
            hugging_face(
                "WhisperModel",
                "WhisperConfig",
                SEQ2SEQ
                | SPECIAL
                | {"d_model": 48, "vocab_size": 101, "num_mel_bins": 20, "max_source_positions": 25},
            )().encoder
        ),
        lambda: {"input_features": np.random.default_rng(0).standard_normal((1, 20, 50)).astype(np.float32)},
        "whisper_ane",
    ),
}
"""Tried each time."""

MORE = {
    "three_layers": causal("Llama", GROUPED | {"num_hidden_layers": 3}, length=77),
    "batch_of_two": causal("Qwen2", GROUPED, batch=2),
    "no_bias_mqa": causal("Falcon", WORDS | {"new_decoder_architecture": False, "alibi": False}),
    "query_norms": causal("Qwen3", GROUPED | {"head_dim": 12}),
    "windows": causal("Mistral", GROUPED | {"sliding_window": 4}),
    "local_and_global": causal(
        "Gemma3", GROUPED | {"num_hidden_layers": 2, "sliding_window": 4}, config="Gemma3TextConfig"
    ),
    "partial_rotary": causal("Phi", WORDS | {"num_attention_heads": 4, "partial_rotary_factor": 0.5}),
    "parallel_cohere": causal("Cohere", GROUPED),
    "scaled_granite": causal(
        "Granite", GROUPED | {"residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 3.0}
    ),
    "learned_opt": causal("OPT", WORDS | {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "mpt_alibi": causal(
        "Mpt", {"n_layers": 1, "n_heads": 4, "d_model": 48, "vocab_size": 101, "max_seq_len": 32}
    ),
    "gptj_interleaved": causal(
        "GPTJ", {"n_layer": 1, "n_head": 3, "n_embd": 48, "vocab_size": 101, "n_positions": 32, "rotary_dim": 8}
    ),
}
"""Tried by `make test-all`."""


def program_of(row: Architecture, module: Any, precision: str = "FLOAT32") -> Any:
    """The program that coremltools converts by trace."""
    frontend.register()
    with torch.no_grad(), quiet_host(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, row.example(), check_trace=False)  # type: ignore[no-untyped-call]
        return ct.convert(
            traced,
            inputs=[ct.TensorType(k, shape=v.shape, dtype=v.dtype) for k, v in row.inputs().items()],
            minimum_deployment_target=ct.target.iOS17,
            compute_precision=getattr(ct.precision, precision),
            convert_to="milinternal",
        )


def psnr(expected: Any, found: Any) -> float:
    return compare_arrays("y", np.asarray(expected), np.asarray(found).reshape(np.shape(expected))).psnr


def tried(row: Architecture) -> None:
    """Convert it, apply the recipe of the family for three targets, and hold it to the bars."""
    module = row.module()
    with torch.no_grad():
        expected = module(*row.example()).numpy()
    program, inputs = program_of(row, module), row.inputs()
    (name,) = (v.name for v in program.functions["main"].outputs)
    (before,) = run(program, inputs).values()
    assert psnr(expected, before) >= 80
    for target in ("M1/macOS 14", "M4/macOS 15"):
        given = load(program)
        surgery = ane.apply(given, row.recipe, target=target, prove=None, quiet=True)
        aim = Target.parse(target)
        assert not scored(surgery.program, aim)[0].loss(scored(program, aim)[0], OFF)
        wanted = adapt_outputs(surgery.contract, {name: np.asarray(before)}, inputs)[name]
        (after,) = run(surgery.program, adapt_inputs(surgery.contract, inputs)).values()
        assert psnr(wanted, after) >= 80


@pytest.mark.quick_cases("mqa_untied", "parallel_residual", "distance_bias", "patches", "sound")
@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", FEW)
def test_a_few_configurations(name: str) -> None:
    tried(FEW[name])


@pytest.mark.quick_cases("counted_positions-1")
@pytest.mark.parametrize(("name", "lookups"), [("translation", 2), ("counted_positions", 1)])
def test_lookups_of_words_and_casts_of_inputs_alone_stay_off(name: str, lookups: int) -> None:
    row = FEW[name]
    program = load(program_of(row, row.module(), "FLOAT16")).program
    surgery = ane.apply(program, list(find_recipe(str(row.recipe)).steps), prove=None, quiet=True)
    _, (inspection,) = scored(surgery.program, Target.parse("M4/macOS 15"))
    illegal = sorted(op.op_type for op in inspection.ops if op.legal is False)
    read = sum(op.op_type == "cast" for op in inspection.ops if op.legal is False)
    assert illegal == ["cast"] * read + ["gather"] * lookups
    assert read <= len(program.functions["main"].inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_configurations(name: str) -> None:
    tried(MORE[name])
