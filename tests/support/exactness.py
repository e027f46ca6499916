"""Whether a model became less exact than it was: both against what the original means in fp32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import anesurgery as ane
from anesurgery.mil import Array

NOISE = 10 * math.log10(3 / 2)
"""dB by which a model may differ: three roundings where there were two, as two equally exact forms may have."""
EXACT = 120.0
"""dB from which an output counts as exact."""
SAMPLES = 12


def less_exact(
    original: Any, before: Any, after: Any, precision: str, samples: int = SAMPLES
) -> dict[str, tuple[float, float]]:
    """Outputs that are further off than before, with their signal-to-noise ratios before and after.

    Ratios are means over samples, in dB. A difference counts where it is more than `NOISE`, and more than three
    times its own error over the samples.
    """
    truth = ane.Predictor(original, precision="fp32")
    predictors = [ane.Predictor(model, precision=precision) for model in (before, after)]
    rows = []
    for seed in range(samples):
        inputs, wanted = _finite(truth, seed)
        given = [predictor(inputs) for predictor in predictors]
        rows.append([[_ratio(wanted[name], each[name]) for name in wanted] for each in given])
    ratios = np.array(rows)
    falls = ratios[:, 0] - ratios[:, 1]
    doubt = 3 * falls.std(axis=0) / math.sqrt(samples)
    worse = falls.mean(axis=0) > np.maximum(NOISE, doubt)
    pairs = ratios.mean(axis=0).T.tolist()
    return {name: (old, new) for name, (old, new), bad in zip(wanted, pairs, worse, strict=True) if bad}


def _finite(truth: ane.Predictor, seed: int) -> tuple[dict[str, Any], dict[str, Array]]:
    """Sampled inputs of which the model makes finite numbers, with these; magnitudes where signs do not.

    Raises:
        ValueError: neither do, so that nothing can be compared.
    """
    sample = truth.sample(seed)
    for inputs in (sample, {name: np.abs(value) for name, value in sample.items()}):
        outputs = truth(inputs)
        if all(np.isfinite(value).all() for value in outputs.values()):
            return inputs, outputs
    raise ValueError(f"the outputs of sample {seed} are not finite in fp32")


def _ratio(wanted: Array, given: Array) -> float:
    """Signal to noise in dB, at most `EXACT`; that of what is not finite is -`EXACT`."""
    signal, found = wanted.astype(np.float64), given.astype(np.float64)
    noise = np.mean(np.square(found - signal))
    if not np.isfinite(noise):
        return -EXACT
    power = max(float(np.mean(np.square(signal))), 1e-30)
    return min(EXACT, -10 * math.log10(max(float(noise) / power, 1e-30)))
