"""Real networks against the same networks in their first framework, run by ONNX Runtime.

What is compared is the largest difference beside the largest magnitude of an output. Both sides compute in
fp32, but sum in another order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.mil import Array

RATE = 22050
"""Samples of sound a second, as basic_pitch takes it."""
WINDOW = 43844
"""Samples of one call."""
OUTPUTS = {
    "Identity": "StatefulPartitionedCall:0",  # contours, three bins for each semitone
    "Identity_1": "StatefulPartitionedCall:1",  # notes
    "Identity_2": "StatefulPartitionedCall:2",  # onsets
}
"""Output of basic_pitch's package -> of its ONNX file: both number the outputs of one TensorFlow function."""


def reference(path: Path, value: Array) -> dict[str, Array]:
    """What ONNX Runtime makes of the one input; skips where it is absent."""
    runtime: Any = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    if not path.is_file():
        pytest.skip(f"{path.name} is not in the corpus")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # else a line for each weight that is an input too
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [made.name for made in session.get_outputs()]
    return dict(zip(names, session.run(names, {session.get_inputs()[0].name: value}), strict=True))


def difference(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def chord() -> Array:
    """Six tones with overtones that start one after the other and fade, over a little noise."""
    rng = np.random.default_rng(0)
    time, sound = np.arange(WINDOW) / RATE, np.zeros(WINDOW)
    for note in (48, 52, 55, 60, 67, 79):
        pitch, start = 440 * 2 ** ((note - 69) / 12), rng.uniform(0, 1)
        fading = np.exp(-3 * np.maximum(time - start, 0)) * (time > start)
        for overtone in range(1, 6):
            phase = rng.uniform(0, 2 * np.pi)
            sound += fading * np.sin(2 * np.pi * pitch * overtone * time + phase) / overtone
    return 0.3 * sound / np.abs(sound).max() + 0.003 * rng.standard_normal(WINDOW)


SOUNDS = {"a chord": chord(), "noise": np.random.default_rng(1).uniform(-1, 1, WINDOW)}


def test_a_network_of_layers_gives_what_its_source_gives(corpus: Path) -> None:
    x = np.random.default_rng(0).standard_normal((1, 3, 320, 320)).astype(np.float32)
    (expected,) = reference(corpus / "sinet.onnx", x).values()
    (found,) = ane.run(corpus / "sinet_portrait_seg.mlmodel", {"input.54": x}).values()
    assert difference(found, expected) < 1e-5


@pytest.mark.parametrize("sound", SOUNDS)
def test_an_ml_program_gives_what_its_source_gives(sound: str, corpus: Path) -> None:
    x = SOUNDS[sound].astype(np.float32).reshape(1, WINDOW, 1)
    expected = reference(corpus / "basic_pitch_nmp.onnx", x)
    found = ane.run(corpus / "basic_pitch_nmp.mlpackage", {"input_2": x}, precision="fp32")
    assert set(found) == set(OUTPUTS)
    for ours, theirs in OUTPUTS.items():
        assert difference(found[ours], expected[theirs]) < 3e-5, ours
    # Notes and onsets have one shape: taken for each other, they are far apart.
    assert difference(found["Identity_1"], expected[OUTPUTS["Identity_2"]]) > 0.1


def test_silence_divides_by_zero_in_the_package_alone(corpus: Path) -> None:
    """The source divides by `div_no_nan`, which gives 0; the package says `real_div`, and 0/0 is no number."""
    x = np.zeros((1, WINDOW, 1), np.float32)
    expected = reference(corpus / "basic_pitch_nmp.onnx", x)
    found = ane.run(corpus / "basic_pitch_nmp.mlpackage", {"input_2": x}, precision="fp32")
    assert all(np.isfinite(v).all() for v in expected.values())
    assert all(np.isnan(v).all() for v in found.values())
