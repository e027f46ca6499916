"""Decoders with a recurrent state write what transformers writes, from a checkpoint and by their steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
import transformers

import anesurgery as ane
from anesurgery.errors import SurgeryError
from anesurgery.interpret.decoding import Decoder
from anesurgery.mil import Array
from anesurgery.shipping import building
from anesurgery.shipping.agreement import logits_by_steps
from anesurgery.shipping.recurrent_states import CacheTensor, DecoderStep, convert_step, step_of

SINGLY = (
    "and reads prompts token by token: there is no prefill, and each token of a prompt costs what one of the "
    "answer does"
)
WORDS, CONTEXT, PROMPT = 307, 24, [5, 7, 9, 11, 3]
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "initializer_range": 0.12,
    "eos_token_id": 2,
}
HYBRID: dict[str, Any] = SIZES | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}


def _random(module: Any) -> Any:
    """With norms that are not all ones."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return module.eval()


def mamba() -> Any:
    torch.manual_seed(0)
    config = transformers.MambaConfig(**SIZES, state_size=8, time_step_min=0.2, time_step_max=1.0)  # it counts
    return _random(transformers.MambaForCausalLM(config))


def falcon() -> Any:
    torch.manual_seed(0)
    return _random(transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**HYBRID)))


def bamba() -> Any:
    """By default it gives each call the positions from 0 on, however much was read before."""
    torch.manual_seed(0)
    config = transformers.BambaConfig(**HYBRID, attn_layer_indices=[1])
    return _random(transformers.BambaForCausalLM(config))


def doge() -> Any:
    """Masks that hang on the values of other tokens, in sliding windows."""
    torch.manual_seed(0)
    config = transformers.DogeConfig(**HYBRID, sliding_window=9, keep_window_size=CONTEXT)
    return _random(transformers.DogeForCausalLM(config))


def griffin() -> Any:
    """It keeps what is recurrent in its modules."""
    torch.manual_seed(0)
    kinds = {"lru_width": 48, "attention_window_size": 11, "block_types": ["recurrent", "attention"]}
    return _random(transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**HYBRID, **kinds)))


def sparse() -> Any:
    """Keys of an indexer beside keys and values."""
    torch.manual_seed(0)
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    index = {"v_head_dim": 12, "index_topk": CONTEXT, "index_head_dim": 16, "index_n_heads": 2}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
    sizes = {**HYBRID, "num_key_value_heads": 4, "topk_group": 1, "first_k_dense_replace": 1}
    config = transformers.DeepseekV32Config(**sizes, **latent, **index, **experts)
    return _random(transformers.DeepseekV32ForCausalLM(config))


def logits_of(module: Any, ids: list[int]) -> Array:
    with torch.no_grad():
        rows: Array = module(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return rows


def greedy(module: Any, steps: int) -> list[int]:
    with torch.no_grad():
        ids = module.generate(
            torch.tensor([PROMPT]), max_new_tokens=steps, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return list(map(int, ids[0, len(PROMPT) :]))


def error(rows: Array, expected: Array) -> float:
    return float(np.abs(rows - expected).max() / np.ptp(expected))


def step(module: Any) -> DecoderStep:
    found = step_of(module, CONTEXT)
    assert found is not None
    return found


@pytest.mark.one_of(6)
@pytest.mark.parametrize("build", [mamba, falcon, bamba, doge, griffin, sparse])
def test_steps_give_the_logits_of_the_whole_text(build: Callable[[], Any]) -> None:
    """At every length from 1 to the context, as prompts are read token by token."""
    module, ids = build(), [*PROMPT, *range(20, 20 + CONTEXT - len(PROMPT))]
    rows = Decoder(convert_step(step(module), half=False)).feed(ids)
    assert len(rows) == CONTEXT
    assert error(rows, logits_of(module, ids)) < 1e-5


class Forgets(DecoderStep):
    """A wrong version: the sums come back as they were."""

    def cache_values(self, cache: Any) -> list[Any]:
        pairs = zip(self.tensors, super().cache_values(cache), strict=True)
        return [t * 0 if "recurrent_states" in tensors.path else t for tensors, t in pairs]


def test_a_state_that_is_lost_is_found() -> None:
    module, ids = mamba(), [*PROMPT, *range(20, 36)]
    own = step(module)
    wrong = Forgets(own.module, own.argument, own.cache, own.tensors, own.context)
    rows = Decoder(convert_step(wrong, half=False)).feed(ids)
    assert error(rows, logits_of(module, ids)) > 1e-2


def test_what_a_hybrid_holds_and_what_needs_no_step() -> None:
    found = step(falcon())
    first = ("cache", "layers", 0)
    assert {tensors for tensors in found.tensors if tensors.path[:3] == first} == {
        CacheTensor((*first, "conv_states", 0), (1, 128, 4)),
        CacheTensor((*first, "recurrent_states", 0), (1, 6, 16, 8)),
        CacheTensor((*first, "keys"), (1, 2, CONTEXT, 12), 2),
        CacheTensor((*first, "values"), (1, 2, CONTEXT, 12), 2),
    }
    assert found.counts
    assert found.recurrent
    assert not replace(found, tensors=tuple(h for h in found.tensors if h.axis is None)).counts
    config = transformers.LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    assert not step(transformers.LlamaForCausalLM(config).eval()).recurrent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mamba")
    mamba().save_pretrained(folder)
    checkpoints.tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def test_a_checkpoint_becomes_a_folder_that_writes_what_transformers_writes(
    checkpoint: Path, tmp_path: Path
) -> None:
    made = ane.build(checkpoint, tmp_path / "out", context=CONTEXT, quiet=True)
    assert made.psnr > 60
    assert made.notes == (f"it has a recurrent state, {SINGLY}",)
    assert list(ane.generate(tmp_path / "out", PROMPT, 15, quiet=True).written) == greedy(mamba(), 15)
    assert "".join(ane.chat(tmp_path / "out", "hello", steps=3))
    runner = json.loads((tmp_path / "out" / "runner.json").read_text())
    assert runner["context"] == CONTEXT
    assert list(runner["functions"]) == ["decode"]
    assert {n: s["shape"] for n, s in runner["functions"]["decode"]["states"].items()} == {
        "cache_of_0": [2, 96, 4],
        "cache_of_1": [2, 96, 8],
    }


@pytest.mark.slow
def test_a_build_that_forgets_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets(own: DecoderStep) -> Any:
        return convert_step(Forgets(own.module, own.argument, own.cache, own.tensors, own.context))

    monkeypatch.setattr(building, "convert_step", forgets)
    with pytest.raises(SurgeryError, match="and not by rounding"):
        ane.build(checkpoint, tmp_path / "out", context=CONTEXT, quiet=True)


@pytest.mark.parametrize("build", [mamba, griffin, bamba, doge])
def test_transformers_reads_by_steps_what_it_reads_at_once(build: Callable[[], Any]) -> None:
    """It is asked so, where a build reads so: in some families the two are not the same."""
    module, ids = build(), np.arange(5, 5 + CONTEXT)
    for _ in range(2):  # nothing is left from a text that was read before
        assert error(logits_by_steps(module, ids, ids - 5), logits_of(module, ids.tolist())) < 1e-5


def test_what_a_step_has_no_functions_for_is_an_error(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SurgeryError, match="recurrent state, and reads its prompt token by token: leave them"):
        ane.build(checkpoint, tmp_path / "out", context=CONTEXT, width=4, quiet=True)


@pytest.mark.slow
def test_a_graph_that_gets_no_cache_is_built_by_its_steps(tmp_path: Path) -> None:
    doge().save_pretrained(tmp_path / "checkpoint")
    checkpoints.tokenizer().save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    made = ane.build(tmp_path / "checkpoint", tmp_path / "out", context=CONTEXT, quiet=True)
    assert made.psnr > 60
    (note,) = made.notes
    assert note.startswith("the graph of a whole text gets no cache (add_cache")
    assert note.endswith(SINGLY)
    assert list(ane.generate(tmp_path / "out", PROMPT, 15, quiet=True).written) == greedy(doge(), 15)
    with pytest.raises(SurgeryError, match="is combined with values of other tokens"):
        ane.build(tmp_path / "checkpoint", tmp_path / "wide", context=CONTEXT, width=4, quiet=True)
