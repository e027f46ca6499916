"""A build that is wrong in one row or in a window is refused; what rounding does is no error, and said."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint

import anesurgery as ane
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.errors import LoadError, SurgeryError
from anesurgery.mil import Array
from anesurgery.shipping import agreement, building
from anesurgery.shipping.agreement import (
    AGREE,
    AT_THE_END,
    STRIDE,
    TRIED,
    ComparedText,
    Judge,
    logits_of_text,
    logits_with_noise,
    psnr_of_noise,
    with_quantized_weights,
    with_rounded_weights,
)
from anesurgery.shipping.converting import convert

WINDOW = TRIED + 6


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder whose tokens look back further than the short text that is read one by one."""
    from transformers import MistralConfig, MistralForCausalLM

    folder = save_checkpoint(tmp_path_factory.mktemp("windowed"))  # with its tokenizer
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    config = MistralConfig(
        **sizes,
        num_hidden_layers=2,
        vocab_size=301,
        sliding_window=WINDOW,
        max_position_embeddings=96,
        initializer_range=0.3,
    )
    MistralForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, pytest.param(8, marks=pytest.mark.slow)])
def test_a_window_that_is_lost_is_seen_beyond_it(
    windowed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int | None
) -> None:

    def without(module: Any, context: int) -> Any:
        other = copy.deepcopy(module)
        other.config.sliding_window = None
        return convert(other, context)

    options: dict[str, Any] = {"context": 64, "prefill": 16, "bits": bits, "quiet": True}
    assert ane.build(windowed, tmp_path / "right", **options).off < (0.1 if bits else agreement.ALIKE)
    monkeypatch.setattr(building, "convert", without)
    with pytest.raises(
        SurgeryError, match=r"after 9 of 64 tokens, and not by rounding.*a defect of the conver"
    ):
        ane.build(windowed, tmp_path / "wrong", **options)


class Router(torch.nn.Module):
    """One of two matrices for each token, the one that has the larger score."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(60, 16)
        self.scores = torch.nn.Linear(16, 2, bias=False)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(16, 60) for _ in range(2))

    def forward(self, input_ids: Any, use_cache: bool) -> Any:
        x = self.table(input_ids)
        first = (self.scores(x)[..., :1] >= self.scores(x)[..., 1:]).to(x.dtype)
        return type("Output", (), {"logits": self.heads[0](x) * first + self.heads[1](x) * (1 - first)})

    def at_a_threshold(self, token: int) -> Router:
        """With two scores of a token that are nearer than fp16 tells apart."""
        with torch.no_grad():
            x = self.table.weight[token]
            gap = (self.scores.weight[0] - self.scores.weight[1]) @ x
            self.scores.weight[1] += x * (gap + 1e-5) / (x @ x)  # by which the second is a hair larger
        return self


IDS = np.random.default_rng(0).integers(0, 60, 40)


def flipped(module: Router, row: int) -> Array:
    """Its rows, of which one comes from the other matrix."""
    rows = logits_of_text(module, IDS, ComparedText(IDS).places)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.scores.weight.copy_(other.scores.weight.flip(0))
        rows[row] = logits_of_text(other, IDS, ComparedText(IDS).places)[row]
    return rows


def test_one_row_that_is_wrong_is_found_where_all_together_seem_near() -> None:
    module, of = Router(), ComparedText(IDS)
    expected = logits_of_text(module, IDS, of.places)
    rows = expected.copy()
    rows[7] += 0.05 * np.ptp(expected)
    assert compare_arrays("logits", expected, rows).psnr > AGREE
    assert list(agreement.unexplained_rows(rows, of, expected, lambda: module)) == [7]
    assert not agreement.unexplained_rows(expected, of, expected, lambda: module)
    rows[7] = np.nan
    assert list(agreement.unexplained_rows(rows, of, expected, lambda: module)) == [7]


class Table(torch.nn.Module):
    """The logits of a token are a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Embedding(60, 60)

    def forward(self, input_ids: Any, use_cache: bool) -> Any:
        return type("Output", (), {"logits": self.rows(input_ids)})


def test_compressed_weights_may_lose_what_their_bits_lose_and_no_more() -> None:
    module, of = Table(), ComparedText(IDS)
    wanted = logits_of_text(module, IDS, of.places)
    judge = Judge(of, wanted, wanted, lambda: module)
    with with_quantized_weights(module, 4, -1):
        rows = logits_of_text(module, IDS, of.places)
    assert np.unique((rows[0] / np.ptp(rows[0])).round(4)).size <= 15  # of 4 bits, with one scale
    lost = compare_arrays("logits", wanted, rows).psnr
    assert judge.check_compressed(lost, 4).startswith("weights of 4 bits change the logits: ")
    with pytest.raises(SurgeryError, match="weights of 8 bits lose more than they must"):
        judge.check_compressed(lost, 8)
    with pytest.raises(SurgeryError, match="weights of 4 bits lose more than they must"):
        judge.check_compressed(float("nan"), 4)
    judge.check_decoded(rows, rows * (1 + 1e-3), 4)
    wrong = rows.copy()
    wrong[30] = rows[29]  # which all rows together hardly show beside what 4 bits lose
    with pytest.raises(SurgeryError, match=rf"of their range apart after token {of.places[30] + 1};"):
        judge.check_decoded(wrong, rows, 4)


def test_another_expert_is_right_next_to_a_threshold_only() -> None:
    of, row = ComparedText(IDS), 5
    near = Router().at_a_threshold(int(IDS[row]))
    expected = logits_of_text(near, IDS, of.places)
    assert not agreement.unexplained_rows(flipped(near, row), of, expected, lambda: near)
    others = [i for i, token in enumerate(IDS[of.places]) if token != IDS[row]]
    far = others[3]
    assert list(agreement.unexplained_rows(flipped(near, far), of, expected, lambda: near)) == [of.places[far]]


def test_rows_follow_tokens_prompts_and_the_end_of_a_long_text() -> None:
    short, prompts = list(range(TRIED)), list(range(0, TRIED, STRIDE))
    assert list(ComparedText(np.arange(TRIED)).places) == short + prompts
    assert list(ComparedText(np.arange(60)).places) == [*short, *prompts, *range(59 - AT_THE_END, 60)]


def config(**more: Any) -> Any:
    return type("Config", (), {"vocab_size": 50, "pad_token_id": 3, **more})


def test_how_long_a_text_is_compared() -> None:
    def length(weights: float, singly: bool = False, **more: Any) -> int:
        of = agreement.compared_text(config(**more), 2048, int(weights), singly=singly)
        assert 3 not in of.ids
        return len(of.ids)

    assert length(1e6) == 2048  # little work
    assert length(5e8) == 200
    assert length(5e8, sliding_window=512) == 512 + TRIED
    assert length(5e8, sliding_window=4096) == 200  # it never matters
    assert length(7e9, sliding_window=512) == TRIED  # too much work
    assert length(5e8, singly=True) == TRIED


def test_weights_are_rounded_while_a_module_computes_and_no_longer() -> None:
    module = Router()
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    places = ComparedText(IDS).places
    with with_rounded_weights(module):
        rows = logits_of_text(module, IDS, places)
    assert all(torch.equal(value, kept[name]) for name, value in module.state_dict().items())
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.half())
    np.testing.assert_array_equal(rows, logits_of_text(other, IDS, places))
    assert np.abs(rows - logits_of_text(module, IDS, places)).max() > 0


def test_noise_is_what_moves_of_a_rounding_lead_to() -> None:
    of, module = ComparedText(IDS), Router()
    expected = logits_of_text(module, IDS, of.places)
    assert 50 < psnr_of_noise(of, expected, module) < 80
    near = Router().at_a_threshold(int(IDS[5]))
    assert min(compare_arrays("", expected, other).psnr for other in logits_with_noise(near, of, 8)) < 40


class Unfit(torch.nn.Module):
    """As a model with heads of an odd size."""

    def forward(self, **_: Any) -> None:
        raise RuntimeError("13 must match 14")


def test_what_transformers_cannot_run_is_said() -> None:
    with pytest.raises(LoadError, match="cannot run Unfit on 3 tokens: 13 must match 14; look at the sizes"):
        logits_of_text(Unfit(), np.arange(3), np.arange(3))


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 60,
    "is_decoder": True,
    "initializer_range": 0.3,
}


def roberta() -> Any:
    """It counts from its token of padding on."""
    from transformers import RobertaConfig, RobertaForCausalLM

    torch.manual_seed(0)
    return RobertaForCausalLM(RobertaConfig(**SIZES)).eval()


def test_positions_that_generate_counts_otherwise_are_seen() -> None:
    from transformers import BertConfig, BertLMHeadModel

    of = ComparedText(np.arange(5, 5 + TRIED))
    assert agreement.counts_positions_otherwise(roberta(), of)
    assert not agreement.counts_positions_otherwise(BertLMHeadModel(BertConfig(**SIZES)).eval(), of)


@pytest.mark.slow
def test_positions_that_generate_counts_otherwise_are_said(tmp_path: Path) -> None:
    roberta().save_pretrained(tmp_path / "checkpoint")
    made = ane.build(tmp_path / "checkpoint", tmp_path / "out", context=32, prefill=8, quiet=True)
    assert any("generate of transformers counts from 0" in note for note in made.notes)
