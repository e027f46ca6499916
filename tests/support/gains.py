"""What the first sentence of a page says is gained on a phone: made of an example, its recipe and a device.

``python tests/support/gains.py`` writes the sentences into the pages; tests/test_gains.py holds them.
"""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path

import anesurgery as ane
from anesurgery.placement.durations import from_to, rounded

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- gain -->", "<!-- end of gain -->"
PAGES = {
    "README.md": ("gpt2", "gpt2_ane", "iPhone 13"),
    "docs/index.md": ("gpt2", "gpt2_ane", "iPhone 13"),
    "docs/ios-developers.md": ("llama", "decoder_ane", "iPhone 15"),
    "docs/inspect.md": ("gpt2", "auto", "iPhone 13"),
    "docs/convert.md": ("gpt2", "gpt2_ane", "iPhone 12"),
    "docs/convert-hugging-face.md": ("whisper", "whisper_ane", "iPhone 15"),
    "docs/decoders.md": ("llama", "decoder_ane", "iPhone 13"),
}
"""Page -> example, recipe and device."""
TITLES = {"gpt2": "A small GPT-2", "llama": "A small Llama", "whisper": "A small Whisper"}


@cache
def sentence(name: str, recipe: str, device: str) -> str:
    """``A small GPT-2 on an iPhone 13: 14.9 ms -> 1.89 ms by estimate (2.4 to 96 times as fast), ...``."""
    with tempfile.TemporaryDirectory() as folder:
        model = ane.example(name, Path(folder) / "model.mlpackage")
        surgery = ane.apply(model, recipe, target=device, prove="model", quiet=True)
    time, proof = surgery.time, surgery.proof
    assert time is not None
    assert time.better, "a page shows a gain"
    assert proof is not None
    assert proof.ok
    times, fastest, slowest = from_to(time.before.ms, time.after.ms), 1 / time.low, 1 / time.high
    band = f"{rounded(slowest)} to {rounded(fastest)} times as fast"
    return f"**{TITLES[name]} on an {device}: {times} by estimate ({band}), same outputs.**"


def filled(page: str) -> str:
    """The text of a page with its sentence made anew."""
    text = (ROOT / page).read_text(encoding="utf-8")
    line = f"{BEGIN}\n{sentence(*PAGES[page])}\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: line, text, flags=re.DOTALL)


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / name).write_text(filled(name), encoding="utf-8")
