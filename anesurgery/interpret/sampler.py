"""Choose a token from logits: the likeliest, or one that is drawn with temperature, top-k, top-p and min-p."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.errors import InterpretError
from anesurgery.mil import Array


def is_whole(value: Any) -> bool:
    """Is it a whole number, and not a boolean?"""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Is it a number, and not a boolean?"""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Sampler:
    """Chooses a token from logits; by default the likeliest.

    ::

        >>> Sampler()(np.array([0.0, 2.0, 1.0]), np.random.default_rng(0))
        1

    Raises:
        InterpretError: an option cannot be what it is.
    """

    temperature: float = 0.0
    """0 takes the likeliest token; 1 samples from what the model says; more is bolder."""
    top_k: int = 0
    """Sample from so many of the likeliest tokens only; 0 means all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the probability of the likeliest."""
    repetition_penalty: float = 1.0
    """Logits of tokens that were read or written are divided by it where above 0, and multiplied below."""

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise InterpretError(f"temperature={self.temperature!r}; it must be a finite number from 0 on")
        if not is_whole(self.top_k) or self.top_k < 0:
            raise InterpretError(f"top_k={self.top_k!r}; it must be an integer from 0 on")
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InterpretError(f"top_p={self.top_p!r}; it must be above 0, and 1 at most")
        if not is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise InterpretError(f"min_p={self.min_p!r}; it must be from 0 to 1")
        if not is_number(self.repetition_penalty) or not 0 < self.repetition_penalty < math.inf:
            raise InterpretError(
                f"repetition_penalty={self.repetition_penalty!r}; it must be above 0, and finite"
            )

    @property
    def greedy(self) -> bool:
        """Does it always take the likeliest token, whatever was written?"""
        return not self.temperature and self.repetition_penalty == 1

    def __call__(self, logits: Array, rng: np.random.Generator, read: Sequence[int] = ()) -> int:
        """Return the number of a token.

        Args:
            logits: of each token.
            rng: the source of random numbers.
            read: the tokens of the text so far, for the penalty of repetitions.

        Raises:
            InterpretError: the logits are not numbers.
        """
        logits, largest = self._penalised(logits, read)
        if not self.temperature:
            return int(np.argmax(logits))
        order, weights = self._shares(logits, largest)
        return int(order[rng.choice(len(order), p=weights)])

    def probabilities(self, logits: Array, read: Sequence[int] = ()) -> Array:
        """Return the probability with which each token is chosen, in fp64.

        Args:
            logits: of each token.
            read: the tokens of the text so far, for the penalty of repetitions.

        Raises:
            InterpretError: the logits are not numbers.
        """
        logits, largest = self._penalised(logits, read)
        shares = np.zeros(len(logits))
        if not self.temperature:
            shares[np.argmax(logits)] = 1
        else:
            order, weights = self._shares(logits, largest)
            shares[order] = weights
        return shares

    def _penalised(self, logits: Array, read: Sequence[int]) -> tuple[Array, float]:
        """Return the logits after the penalty of repetitions, and the largest, which must be finite."""
        if self.repetition_penalty != 1 and len(read):
            logits, tokens = np.array(logits, np.float64), np.unique(read)
            old = logits[tokens]
            logits[tokens] = np.where(old > 0, old / self.repetition_penalty, old * self.repetition_penalty)
        largest = float(np.max(logits))
        if not np.isfinite(largest):
            raise InterpretError(f"the largest logit is {largest}; look for the op with `anesurgery.ranges`")
        return logits, largest

    def _shares(self, logits: Array, largest: float) -> tuple[Array, Array]:
        """Return the tokens that may be chosen, the likeliest first, and the probability of each."""
        with np.errstate(over="ignore"):
            scaled = (np.asarray(logits, np.float64) - largest) / self.temperature
        order = np.argsort(-scaled, kind="stable")[: self.top_k or None]
        weights = np.exp(scaled[order])
        weights /= weights.sum()
        inside = (np.cumsum(weights) - weights < self.top_p) & (weights >= self.min_p * weights[0])
        weights = np.where(inside, weights, 0)
        return order, weights / weights.sum()
