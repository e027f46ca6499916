"""Tokens are chosen with the probabilities with which transformers chooses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from anesurgery.interpret.sampler import Sampler
from anesurgery.mil import Array

WORDS = 200
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.8, "top_k": 17},
    {"temperature": 0.8, "top_k": 1000},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.7, "min_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.7},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.1},
]


def expected(logits: Array, read: list[int], options: dict[str, Any]) -> Array:
    """What transformers samples with: its processors in the order in which `generate` calls them."""
    makers = {
        "repetition_penalty": theirs.RepetitionPenaltyLogitsProcessor,
        "temperature": theirs.TemperatureLogitsWarper,
        "top_k": theirs.TopKLogitsWarper,
        "top_p": theirs.TopPLogitsWarper,
        "min_p": theirs.MinPLogitsWarper,
    }
    scores, ids = torch.from_numpy(logits)[None], torch.tensor([read])
    for name, maker in makers.items():
        if name in options:
            scores = maker(options[name])(ids, scores)
    return torch.softmax(scores, -1)[0].numpy()


@pytest.mark.parametrize("options", OPTIONS)
def test_probabilities_are_those_of_transformers(options: dict[str, Any]) -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        logits = draw.standard_normal(WORDS) * draw.choice([0.5, 3, 10])
        read = draw.integers(0, WORDS, 30).tolist()
        found = Sampler(**options).probabilities(logits, read)
        np.testing.assert_allclose(found, expected(logits, read, options), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    "wrong", [{"top_k": 18}, {"temperature": 0.81}, {"repetition_penalty": 1.01}, {"min_p": 0.5}]
)
def test_other_options_have_other_probabilities(wrong: dict[str, Any]) -> None:
    right = {"temperature": 0.8, "top_k": 17}
    logits = np.random.default_rng(0).standard_normal(WORDS) * 3
    read = list(np.argsort(-logits)[:3])
    found = Sampler(**{**right, **wrong}).probabilities(logits, read)
    assert np.abs(found - expected(logits, read, right)).max() > 1e-6


def test_tokens_are_drawn_with_these_probabilities() -> None:
    sampler, draw = Sampler(temperature=1.0, top_p=0.9), np.random.default_rng(0)
    logits = np.random.default_rng(1).standard_normal(8)
    counts = np.bincount([sampler(logits, draw) for _ in range(4000)], minlength=8) / 4000
    wanted = sampler.probabilities(logits)
    assert np.abs(counts - wanted).max() < 0.03  # four deviations of a share of one half
    assert not counts[wanted == 0].any()
    assert Sampler().probabilities(logits).tolist() == (np.arange(8) == np.argmax(logits)).tolist()
