"""Make a small GPT-2, see what keeps it off the Neural Engine of an iPhone 13, fix it, and prove it.

Leaves gpt2.mlpackage, gpt2_ane.mlpackage, report.txt and report.json in build/demo.
`--svg FILE` draws the report as a picture.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import anesurgery as ane
from anesurgery.commands.next_steps import command
from anesurgery.show import surgeries, terminal
from anesurgery.show.console import WIDTH, PlainConsole

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "demo"
TARGET = "iPhone 13"
NEXT = (
    "  .venv/bin/anesurgery see {folder}/gpt2.mlpackage --target iPhone13 --full",
    "  .venv/bin/anesurgery prove {folder}/gpt2.mlpackage {folder}/gpt2_ane.mlpackage --last",
    "  .venv/bin/anesurgery explain causal_mask_tensor",
)


def repair(name: str) -> str:
    """The command that applies a pass."""
    return command("fix", "gpt2.mlpackage", name, target=TARGET)


def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--svg", type=Path, help="draw the report into this file")
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    before = ane.example("gpt2", BUILD / "gpt2.mlpackage", overwrite=True)
    console = PlainConsole(width=WIDTH, record=True)
    console.print(terminal.short_report(ane.inspect(before, target=TARGET), repair), "", crop=False)
    surgery = ane.apply(before, "gpt2_ane", target=TARGET, prove="both")
    after = surgery.save(BUILD / "gpt2_ane.mlpackage", overwrite=True)
    console.print(surgeries.short_surgery(surgery, repair), crop=False)
    (BUILD / "report.txt").write_text(console.export_text(clear=False), encoding="utf-8")
    if arguments.svg is not None:
        console.save_svg(str(arguments.svg), title=f"GPT-2 on an {TARGET}: anesurgery see, fix")
    (BUILD / "report.json").write_text(json.dumps(surgery.to_json(), indent=2), encoding="utf-8")
    folder = BUILD.relative_to(ROOT)
    print(f"\nwrote {after.name}, report.txt and report.json into {folder}\nnext:")
    print("\n".join(NEXT).format(folder=folder))


if __name__ == "__main__":
    main()
