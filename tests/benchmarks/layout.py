"""How long decoder_ane takes with all passes of the layout, and how much memory of its own.

On GPT-2 124M against gpt2_ane; with `--llama 32`, on a Llama of 1.5 billion parameters. Each
runs in a fresh process on one thread; seconds are those of the processor, without imports.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from recipe import HERE, make, measure

BODY = """
import threading
import torch, coremltools
import anesurgery as ane
own, done = [0], threading.Event()
def watch():
    while not done.wait(0.01):
        with open("/proc/self/status") as status:
            found = next(line for line in status if line.startswith("RssAnon"))
        own[0] = max(own[0], int(found.split()[1]) // 1024)
recipe = ane.recipes.{recipe}
threading.Thread(target=watch, daemon=True).start()
begin()
surgery = ane.apply(source, recipe, target={target!r}, quiet=True)
surgery.save(target)
done.set()
extra["own_mb"], extra["edits"] = own[0], len(surgery.changes)
"""
LAYOUT = "decoder_ane.with_options(layout='channels_first')"


def main() -> None:
    """Measure and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama", type=int, default=0, help="layers of a Llama; GPT-2 by default")
    parser.add_argument("--folder", type=Path, help="where there is room; a temporary folder by default")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        if chosen.llama:
            source = folder / "llama.mlpackage"
            command = [sys.executable, str(HERE / "llama.py"), str(source), f"--layers={chosen.llama}"]
            subprocess.run(command, check=True)
            rows: list[tuple[str, str | None]] = [
                (r, t) for t in ("M1/macOS 14", "M4/macOS 15") for r in ("decoder_ane", LAYOUT)
            ]
        else:
            source = make(folder, 12, 768, 50257, 512)
            rows = [(recipe, None) for recipe in ("gpt2_ane", "decoder_ane", LAYOUT)]
        for recipe, target in rows:
            found = measure(BODY.format(recipe=recipe, target=target), source, folder)
            print(recipe, target, found, flush=True)


if __name__ == "__main__":
    main()
