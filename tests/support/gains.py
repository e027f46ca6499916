"""What the first sentence of a page says is gained on a phone: made by a run on a small model.

``python tests/support/gains.py [PAGE ...]`` writes them into the pages; tests/test_gains.py holds them.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import anesurgery as ane
from anesurgery.placement.durations import Change, change, from_to, rounded

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- gain -->", "<!-- end of gain -->"
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEARLY_ALL = 0.95
"""From this share on, a gain comes from one pass."""
CACHED = ane.recipes.llm_ane.with_options(add_cache={"context": 64, "prefill": 16})
TITLES = {
    "gpt2": "a small GPT-2",
    "bert": "a small BERT",
    "llama": "a small Llama",
    "whisper": "a small Whisper",
}


@cache
def faster(name: str, recipe: str, device: str) -> str:
    """``We estimate that the recipe `gpt2_ane` cuts the time of a small GPT-2 on an iPhone 13 from ...``."""
    with tempfile.TemporaryDirectory() as folder:
        model = ane.example(name, Path(folder) / "model.mlpackage")
        surgery = ane.apply(model, recipe, target=device, prove="model", quiet=True)
        assert surgery.proof is not None
        assert surgery.proof.ok
        gain = _takes(f"the recipe `{recipe}` cuts the time of {TITLES[name]}", device, surgery.time)
        return f"{gain}. {_gained_by(surgery, model, device)}."


def _takes(what: str, device: str, time: Change | None, each: str = "prediction") -> str:
    """``We estimate that WHAT on an iPhone 13 from 14.9 ms to 1.89 ms per prediction. That is ...``."""
    times, speed = _times(time)
    return f"We estimate that {what} on an {device} {times} per {each}. {speed}"


def _times(time: Change | None) -> tuple[str, str]:
    """Two times of which the second is shorter for certain, and their ratio."""
    assert time is not None
    assert time.better, "a page shows a gain"
    times = from_to(time.before.ms, time.after.ms).replace(" -> ", " to ")
    speedup, low, high = (rounded(1 / ratio) for ratio in (time.ratio, time.high, time.low))
    likely = f"the 80% interval is {low} to {high}"
    return f"from {times}", f"That is about {speedup} times as fast; {likely}"


def _gained_by(surgery: ane.Surgery, model: Path, device: str) -> str:
    """Return what the repaired model computes less of, and if this gives nearly all of the gain."""
    assert surgery.contract, "only the last position is computed"
    nearly_all = _from_one_position(model, device, surgery.time)
    what = "Nearly all of the gain comes from computing" if nearly_all else "The repaired model returns"
    logits = "the logits (the scores of all possible next tokens)"
    return f"{what} {logits} at the last position only"


def _from_one_position(model: Path, device: str, time: Change | None) -> bool:
    """Does nearly all of a gain come from computing the logits at one position?"""
    alone = ane.apply(model, "select_last_token", target=device, prove=None, quiet=True).time
    assert alone is not None
    assert time is not None
    return (time.before.ms - alone.after.ms) > NEARLY_ALL * (time.before.ms - time.after.ms)


@cache
def found_and_repaired(name: str, recipe: str, device: str) -> str:
    """What `inspect` finds first: the op that takes most of the time; and the gain if it computes one row."""
    with tempfile.TemporaryDirectory() as folder:
        model = ane.example(name, Path(folder) / "model.mlpackage")
        found = ane.inspect(model, target=device)
        surgery = ane.apply(model, recipe, target=device, quiet=True)
    assert found.time is not None
    assert "select_last_token" in {change.pass_name for change in surgery.changes}
    slowest = max(found.ops, key=lambda row: row.ms or 0.0)
    share = (slowest.ms or 0.0) / found.time.ms
    what = f"the op `{slowest.name}` accounts for {share:.0%} of the time of {TITLES[name]} on an {device}"
    times, speed = _times(surgery.time)
    gain = f"If this op computes only the last position, the time drops {times} per prediction"
    return f"We estimate that {what}. {gain}. {speed}."


def _named_on(page: str, block: int = 0) -> dict[str, Any]:
    """The names that a block of Python on a page defines; it writes no file here."""
    code = CODE.findall((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))[block]
    lines = [line for line in code.splitlines() if ".save" not in line]
    names: dict[str, Any] = {"ane": ane}
    exec(compile("\n".join(lines), page, "exec", dont_inherit=True), names)
    return names


def _in_the_tutorial(device: str) -> tuple[Any, ane.Surgery]:
    """The network of the tutorial, and its repair."""
    model = _named_on("tutorial")["model"]
    surgery = ane.apply(model, "auto", target=device, prove="model", quiet=True)
    assert surgery.proof is not None
    assert surgery.proof.ok
    return model, surgery


@cache
def more_on_the_engine(device: str) -> str:
    """The share of the work of the tutorial's network on the engine."""
    model, surgery = _in_the_tutorial(device)
    before, after = (ane.inspect(one, target=device) for one in (model, surgery.program))
    low, high, least = before.residency["flop"], before.residency_at_most["flop"], after.residency["flop"]
    what = f"the Neural Engine of an {device} runs {low:.0%} to {high:.0%} of the work of a small image network"
    return f"By our estimate, {what}. The repair on this page raises this to {least:.0%}."


@cache
def faster_images(device: str) -> str:
    """The time of the tutorial's network."""
    _, surgery = _in_the_tutorial(device)
    assert surgery.proof is not None
    assert np.isinf(surgery.proof.psnr)
    assert not surgery.contract
    gain = _takes(
        "the recipe `auto` cuts the time of the image network in the [tutorial](tutorial.md)",
        device,
        surgery.time,
    )
    return f"{gain}. On our test inputs, the outputs are identical."


@cache
def with_a_cache(device: str) -> str:
    """A step of a decoder that reads one token, beside the whole model."""
    with tempfile.TemporaryDirectory() as folder:
        whole = ane.example("gpt2", Path(folder) / "model.mlpackage", ios=18)
        before = ane.inspect(whole, target=f"{device}/iOS 18").time
        surgery = ane.apply(whole, CACHED, target=f"{device}/iOS 18", quiet=True)
        cached = surgery.save(Path(folder) / "cached.mlpackage")
        after = ane.inspect(cached, target=f"{device}/iOS 18", function="decode").time
        assert before is not None
        assert after is not None
        time = change(before, after)
        assert _from_one_position(whole, f"{device}/iOS 18", time)
    gain = _takes("the recipe `llm_ane` cuts the time of a small GPT-2", device, time, each="token")
    logits = "computing the logits (the scores of all possible next tokens) of one token instead of 64"
    cache = "Keeping the results of earlier tokens (a cache) saves little in a context of only 64 tokens"
    why = f"Nearly all of the gain comes from {logits}. {cache}"
    return f"{gain}. {why}."


@cache
def smaller(bits: int, device: str) -> str:
    """A GPT-2 with compressed weights: its bytes, and how near its outputs stay on held-out samples."""
    samples = [
        {"input_ids": np.random.default_rng(n).integers(0, 4000, (1, 64)).astype(np.int32)} for n in range(8)
    ]
    with tempfile.TemporaryDirectory() as folder:
        found = ane.compress(
            ane.example("gpt2", Path(folder) / "model.mlpackage"), bits, inputs=samples, target=device
        )
    assert found.loss is not None
    sizes = " to ".join(f"{number / 1e6:.1f} MB" for number in found.bytes)
    near = f"to {found.loss.psnr:.0f} dB ([PSNR](numbers.md)); `certify` requires 40"
    kept = f"The outputs agree with the original's {near}."
    random = "Weights and inputs were random, so expect different results with a trained model."
    what = f"Compressed to {bits} bits for an {device}, a small GPT-2 shrinks from {sizes}"
    return f"{what}. {kept} {random}"


@cache
def nearer(device: str) -> str:
    """A norm whose squares overflow fp16, before and after its repair."""
    names = _named_on("numbers")
    model, inputs = names["model"], {"x": names["values"]}
    repaired = ane.apply(model, "safe_numbers", target=device, inputs=inputs, quiet=True).program
    before, after = (
        ane.certify(one, inputs, target=device).outputs["ane"][0].psnr for one in (model, repaired)
    )
    gain = f"the accuracy of the output on an {device} from {before:.0f} dB to {after:.0f} dB (PSNR)"
    return (
        "In fp16, an RMS norm of large values overflows. By our estimate, the recipe `safe_numbers` raises "
        f"{gain}."
    )


@cache
def surer(device: str) -> str:
    """A network of a flexible length beside the same at a fixed one: its share on the engine for certain."""
    names = _named_on("sizes", 1)
    flexible = ane.inspect(names["ranged"], target=device)
    before = flexible.residency["ops"]
    assert before == 0
    assert flexible.residency_at_most["ops"] == 1
    after = min(found.residency["ops"] for found in names["sized"].inspect(device).values())
    share = f"what share of its ops an {device} runs on the Neural Engine"
    unsure = f"we cannot tell {share}; it could be anything from {before:.0%} to 100%"
    return (
        f"If a small audio network accepts a range of input lengths, {unsure}. "
        f"With two fixed lengths, we expect {after:.0%}."
    )


@cache
def fewer(device: str) -> str:
    """An old network: the layers that the engine cannot run."""
    with tempfile.TemporaryDirectory() as folder:
        model = ane.example("network", Path(folder) / "old.mlmodel")
        surgery = ane.apply(model, "neuralnetwork_ane", target=device, prove="model", quiet=True)
        before, after = (
            sum(row.legal is False for row in ane.inspect(one, target=device).ops)
            for one in (model, surgery.save(Path(folder) / "new.mlmodel"))
        )
    what = f"the number of layers that an {device} cannot run on its Neural Engine"
    gain = f"the recipe `neuralnetwork_ane` cuts {what} from {before} to {after}"
    return f"In the example network below, {gain}, by our estimate."


PAGES: dict[str, Callable[[], str]] = {
    "README.md": partial(faster, "gpt2", "gpt2_ane", "iPhone 13"),
    "docs/index.md": partial(faster, "gpt2", "gpt2_ane", "iPhone 13"),
    "docs/tutorial.md": partial(more_on_the_engine, "iPhone 12"),
    "docs/ios-developers.md": partial(faster_images, "iPhone 15"),
    "docs/inspect.md": partial(found_and_repaired, "gpt2", "auto", "iPhone 13"),
    "docs/repair.md": partial(faster, "llama", "auto", "iPhone 14"),
    "docs/numbers.md": partial(nearer, "iPhone 13"),
    "docs/compression.md": partial(smaller, 4, "iPhone 17"),
    "docs/sizes.md": partial(surer, "iPhone 16"),
    "docs/neural-networks.md": partial(fewer, "iPhone 12"),
    "docs/convert.md": partial(faster, "whisper", "whisper_ane", "iPhone 15"),
    "docs/decoders.md": partial(with_a_cache, "iPhone 13"),
}
"""Page -> what makes its sentence."""


def filled(page: str) -> str:
    """The text of a page with its sentence made anew."""
    text = (ROOT / page).read_text(encoding="utf-8")
    line = f"{BEGIN}\n**{PAGES[page]()}**\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: line, text, flags=re.DOTALL)


if __name__ == "__main__":
    for name in sys.argv[1:] or PAGES:
        (ROOT / name).write_text(filled(name), encoding="utf-8")
