"""Decoders of other families, from configuration to text, beside transformers: docs/decoder-families.md.

Each checkpoint has random weights and is built in fp16, in chunks where it can be cut. 200 tokens are written
greedily. A text may differ from the one of transformers in fp32 in two cases only: two tokens were nearer than
`TIE` of the range of the logits, or the token has logits that transformers itself gives for it where each of
its numbers moves by a rounding of fp16: of the experts of a mixture, those next to a threshold are then chosen
otherwise. All other logits agree to `ROUNDING`, and nothing of what differs otherwise is excused.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import torch
import transformers
import unseen_again
import unseen_families
import unseen_options
import unseen_published
from unseen_families import ALL_HEADS, EXPERTS, SIZES, Row, row_of

import anesurgery as ane
from anesurgery.errors import SurgeryError
from anesurgery.interpret.decoding import Decoder
from anesurgery.mil import Array
from anesurgery.shipping import agreement

AGAIN, FAMILIES, PUBLISHED, OPTIONS = "again", "families", "published", "options"
MARKS = {"": "unseen", **{name: f"unseen {name}" for name in (AGAIN, FAMILIES, PUBLISHED, OPTIONS)}}
"""Set of configurations -> the name of its table on the page."""
CONTEXT, PREFILL, PROMPT, STEPS = 224, 16, 19, 200
TIE = 1e-3
"""Of a range: what fp16 cannot be asked to tell apart."""
HALF = 2.0**-10
"""Of a number: how far apart two of fp16 are at most."""
MOVES = 400
"""How often transformers is asked at most; the rarest choice that was seen came in about 1 of 50."""
ROUNDING = 0.01
"""Of the range of logits: what differs by more is no rounding of one token."""
OLDER: dict[str, Any] = {
    "vocab_size": 307,
    "n_positions": 300,
    "n_embd": 60,
    "n_layer": 2,
    "n_head": 5,
    "initializer_range": 0.12,
}
ROUTED: dict[str, Any] = EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 75,
}
LLAMA_3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA_3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}

_row = partial(row_of, SIZES)


CONFIGURATIONS: dict[str, Row] = {
    "diffllama": _row("DiffLlama"),
    "nanochat": _row("NanoChat"),
    "vaultgemma": _row("VaultGemma", head_dim=20, sliding_window=23, query_pre_attn_scalar=20),
    "modernbert_decoder": _row(
        "ModernBertDecoder", **ALL_HEADS, local_attention=20, global_attn_every_n_layers=2, sep_token_id=2
    ),
    "minicpm3": _row("MiniCPM3", **ALL_HEADS, **LATENT),
    "youtu": _row("Youtu", **ALL_HEADS, **LATENT),
    "jais2": _row("Jais2"),
    "bitnet": _row("BitNet"),
    "gpt_neox_japanese": _row("GPTNeoXJapanese", **ALL_HEADS, intermediate_multiple_size=2),
    "openai": ("OpenAIGPTConfig", {"name": "OpenAIGPTLMHeadModel", **OLDER}),
    "ctrl": ("CTRLConfig", {"name": "CTRLLMHeadModel", **OLDER, "dff": 100}),
    "biogpt": _row("BioGpt", **ALL_HEADS),
    "qwen2_moe": _row("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=56, **EXPERTS),
    "ernie4_5_moe": _row("Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=48),
    "glm4_moe": _row("Glm4Moe", head_dim=16, **ROUTED, n_group=1, topk_group=1),
    "dots1": _row("Dots1", head_dim=16, **ROUTED, n_group=2, topk_group=1),
    "deepseek_v3_groups": _row(
        "DeepseekV3", **ALL_HEADS, **LATENT, **{**ROUTED, "n_routed_experts": 8}, n_group=2, topk_group=1
    ),
    "phimoe": _row("Phimoe", num_local_experts=4, num_experts_per_tok=2),
    "flex_olmo": _row("FlexOlmo", num_experts=4, num_experts_per_tok=2),
    "olmoe": _row("Olmoe", num_experts=4, num_experts_per_tok=2),
    "granitemoe": _row("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    "hunyuan_moe": _row("HunYuanMoEV1", head_dim=16, num_experts=4, moe_topk=2),
    "hunyuan": _row("HunYuanDenseV1", head_dim=16),
    "olmo_clipped": _row("Olmo", clip_qkv=0.9),
    "olmo3": _row("Olmo3", sliding_window=21),
    "arcee": _row("Arcee"),
    "apertus": _row("Apertus"),
    "seed_oss": _row("SeedOss", head_dim=16),
    "ernie4_5": _row("Ernie4_5"),
    "cohere2": _row("Cohere2", sliding_window=19, layer_types=["sliding_attention", "full_attention"]),
    "ministral": _row("Ministral", sliding_window=17, head_dim=16),
    "glm4": _row("Glm4", head_dim=16),
    "llama_llama3": _row("Llama", rope_parameters=LLAMA_3),
    "llama_yarn": _row("Llama", rope_parameters=YARN),
}
"""Name -> the class of its configuration, and its options with the class of its module."""


SETS = {
    "": CONFIGURATIONS,
    AGAIN: unseen_again.CONFIGURATIONS,
    FAMILIES: unseen_families.CONFIGURATIONS,
    PUBLISHED: unseen_published.CONFIGURATIONS,
    OPTIONS: unseen_options.CONFIGURATIONS,
}


@dataclass(frozen=True)
class Text:
    """What came out for one configuration."""

    same: int
    """How many of the tokens are those of transformers, from the first on."""
    error: float
    """The largest of a logit, by the range of all, before a choice of experts differs."""
    chunks: int
    gap: float = float("nan")
    """Between the two likeliest tokens where the texts part, by the range of their logits."""
    others: int = 0
    """How many tokens have other experts, as transformers gives them after a rounding."""
    led: bool = False
    """Did such a token come before the texts part, and do their logits tell the tokens apart?"""
    refused: str = ""
    forward: bool = False
    """Is the text of transformers that of its forward pass, as its `generate` numbers positions differently?"""

    @property
    def right(self) -> bool:
        """Is it the text of transformers, but for what comes after a tie?"""
        tied = self.same == STEPS or self.gap < TIE or self.led
        return not self.refused and tied and self.error < ROUNDING

    def __str__(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        words = "the same" if self.same == STEPS else f"the same up to token {self.same},"
        if self.same < STEPS:
            by_experts = self.led and self.gap >= TIE
            differ = f" where the two best logits differ by {self.gap:.1e} of the range"
            words += " then different experts" if by_experts else differ
        if self.others:
            words += f" ({self.others} of {PROMPT + STEPS} tokens routed differently)"
        words += " as its forward pass; `generate` numbers the positions differently" if self.forward else ""
        return words if self.right else f"wrong: {words}"


def save_checkpoint(name: str, folder: Path) -> None:
    """Write a checkpoint with random weights, the same each time, and a tokenizer."""
    config, options = next(rows[name] for rows in SETS.values() if name in rows)
    options = dict(options)
    kind = getattr(transformers, options.pop("name"))
    torch.manual_seed(0)
    module: Any = kind(getattr(transformers, config)(**options))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim < 2:  # norms of ones and biases of zeros would hide what is left out
                parameter.add_(torch.randn_like(parameter) * 0.1)
    if name in SETS[PUBLISHED] or name in SETS[OPTIONS]:
        module.to(torch.bfloat16)
    module.save_pretrained(folder)
    made: Any = checkpoints.tokenizer()
    made.save(str(folder / "tokenizer.json"))


def built(folder: Path, out: Path, context: int = CONTEXT) -> Any:
    """The folder in chunks, or in one package where no cut is small enough."""
    options: dict[str, Any] = {"context": context, "prefill": PREFILL, "quiet": True}
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 2
    try:
        return ane.build(folder, out, limit=f"{size * 0.6 / 1000:.0f} KB", **options)
    except SurgeryError as error:
        if not any(words in str(error) for words in ("cannot be cut between", "can be cut into")):
            raise
    return ane.build(folder, out, **options)


def moved(module: Any, ids: Any) -> Iterator[Array]:
    """What transformers gives where each weight, and what each layer gives, moves by a rounding of fp16."""

    def move(x: Any) -> Any:
        if not torch.is_tensor(x) or not x.is_floating_point():
            return x
        return x * (1 + HALF * (2 * torch.rand(x.shape, generator=draws) - 1))

    for seed in range(MOVES):
        draws = torch.Generator().manual_seed(seed)
        other = copy.deepcopy(module)
        for layer in other.modules():
            if not list(layer.children()):
                layer.register_forward_hook(lambda layer, given, out: move(out))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.copy_(move(parameter))
            yield other(ids, use_cache=False).logits[0].numpy()


def tried(name: str, folder: Path) -> Text:
    """Build a configuration, and compare the text with that of transformers."""
    checkpoint, out = folder / "checkpoint", folder / "out"
    save_checkpoint(name, checkpoint)
    try:
        made = built(checkpoint, out)
    except SurgeryError as error:
        return Text(
            0, 0.0, 0, refused=str(error).splitlines()[0].split(" (passes before it")[0].removesuffix(")")
        )
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompt = np.random.default_rng(1).integers(3, module.config.vocab_size, PROMPT).tolist()
    ids, forward = greedy(module, torch.tensor([prompt]))
    with torch.no_grad():
        logits = module(ids, use_cache=False).logits[0].numpy()
    written = list(ane.generate(out, prompt, STEPS, precision="fp16", quiet=True).written)
    rows = Decoder(out, precision="fp16").feed(ids[0].tolist())
    text = compared(ids[0, PROMPT:].tolist(), written, logits, rows, moved(module, ids), made.chunks)
    return replace(text, forward=forward)


def greedy(module: Any, prompt: Any) -> tuple[Any, bool]:
    """What transformers writes, and is it by its forward pass alone? So where `generate` counts otherwise."""
    options = {"do_sample": False, "eos_token_id": None, "forced_eos_token_id": None, "pad_token_id": 0}
    of = agreement.ComparedText(np.arange(1, 1 + agreement.TRIED))
    with torch.no_grad():
        if not agreement.counts_positions_otherwise(module, of):
            return module.generate(prompt, max_new_tokens=STEPS, **options), False
        for _ in range(STEPS):
            token = module(prompt, use_cache=False).logits[:, -1:].argmax(-1)
            prompt = torch.cat([prompt, token], dim=1)
    return prompt, True


def compared(
    expected: list[int], written: list[int], logits: Array, rows: Array, moves: Iterable[Array], chunks: int
) -> Text:
    """What is to be said of a text and of its logits; `moves` are other logits that transformers may give."""
    spread = np.ptp(logits)
    errors = np.abs(rows - logits).max(-1) / spread
    least = errors.copy()
    if not np.all(errors < ROUNDING):
        for other in moves:
            least = np.minimum(least, np.abs(rows - other).max(-1) / spread)
            if np.all(least < ROUNDING):
                break
    others = np.flatnonzero(~(errors < ROUNDING) & (least < ROUNDING))
    error = float(np.max(np.where(errors < ROUNDING, errors, least)))
    same = next((i for i, (a, b) in enumerate(zip(written, expected, strict=True)) if a != b), STEPS)
    if same == STEPS:
        return Text(same, error, chunks, others=len(others))
    last = PROMPT + same - 1
    row = np.sort(logits[last])
    gap = float((row[-1] - row[-2]) / np.ptp(row))
    told = bool(errors[last] * spread * 2 >= row[-1] - row[-2])
    return Text(same, error, chunks, gap, len(others), told and bool(np.any(others <= last)))


def row(name: str, text: Text) -> str:
    """A line of the table."""
    error = "" if text.refused else f"{text.error:.1e}"
    return f"| `{name}` | {text.chunks or ''} | {text} | {error} |"


def rows_of(table: str) -> dict[str, str]:
    """The lines of a table, by name."""
    return {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}


def table(rows: dict[str, str], command: str) -> str:
    """A line for each configuration."""
    words = [line.split(" | ")[2] for line in rows.values()]
    refused, wrong = (sum(w.startswith(kind) for w in words) for kind in ("refused", "wrong"))
    lines = [
        f"{len(rows)} small configurations with random weights: {len(rows) - refused - wrong} right, {refused} "
        f"refused, {wrong} wrong. We compare {STEPS} greedy tokens in fp16 with Transformers in fp32 "
        f"(`{command}`). Two tokens are a tie if their logits differ by less than {TIE:g} of the range of the "
        "logits. We accept a different expert if Transformers also picks it with random errors, as large as "
        "fp16 rounding, in its weights and layer outputs. "
        f"We look at the experts of {PROMPT + STEPS} tokens, {PROMPT} of the prompt and {STEPS} "
        "generated. The error is the largest error of a logit, divided by the range.",
        "",
        "| configuration | chunks | text | error |",
        "|---|---|---|---|",
        *rows.values(),
    ]
    return "\n".join(lines)


def written(page: str, name: str, found: dict[str, Text]) -> str:
    """The page with the table of a set, in which the lines of what was tried are replaced."""
    more = f" --set {name}" if name else ""
    command = f"python tests/support/unseen_decoders.py{more} --page docs/decoder-families.md"
    begin, end = (f"<!-- {MARKS[name]}: {side} -->" for side in ("begin", "end"))
    rows = rows_of(page[page.index(begin) : page.index(end)]) | {n: row(n, text) for n, text in found.items()}
    text = f"{begin}\n{table({n: rows[n] for n in SETS[name] if n in rows}, command)}\n{end}"
    return re.sub(f"{begin}.*?{end}", lambda _: text, page, flags=re.DOTALL)


def main() -> None:
    """Try all, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="those to try, whose lines alone are replaced; all by default")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    parser.add_argument("--keep", type=Path, help="a file with what came out before, which is not tried again")
    parser.add_argument("--set", default="", choices=list(SETS), help="another set than the first")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    keep = options.keep
    rows = json.loads(keep.read_text()) if keep and keep.exists() else {}
    found = {name: Text(**row) for name, row in rows.items()}
    for name in options.names or SETS[options.set]:
        if name in found:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = tried(name, Path(folder))
            except Exception as error:  # an error of another kind is a defect
                traceback.print_exception(error, limit=-4)
                found[name] = Text(0, np.inf, 0)
        print(name, found[name].chunks, found[name], f"{found[name].error:.1e}", flush=True)
        if keep:
            keep.write_text(json.dumps({name: asdict(text) for name, text in found.items()}))
    if options.page:
        options.page.write_text(written(options.page.read_text(), options.set, found))


if __name__ == "__main__":
    main()
