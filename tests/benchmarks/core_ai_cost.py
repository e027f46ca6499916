"""What translating GPT-2 of 124 million weights into Core AI costs: processor time beside `cp -r`, and memory.

Run as `python tests/benchmarks/core_ai_cost.py`; only the ratios mean anything.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMES_OF_COPYING, SECONDS = 3, 2
"""Processor time that is asked for: so many times that of `cp -r`, and so many seconds more."""
SCRIPT = """
import json, resource, sys, time
import anesurgery as ane
from anesurgery.coreai import translating
def resident(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
started, before = time.process_time(), resident()
ane.to_coreai(sys.argv[1], sys.argv[2])
print(json.dumps({"seconds": time.process_time() - started, "bytes": resident() - before}))
"""


def copying(package: Path, target: Path) -> float:
    """Processor seconds of `cp -r`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["cp", "-r", str(package), str(target)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def gpt2(package: Path) -> int:
    """Write the model; return the bytes of its weights."""
    subprocess.run([sys.executable, str(ROOT / "tests/benchmarks/gpt2.py"), str(package)], check=True, cwd=ROOT)
    return sum(file.stat().st_size for file in package.rglob("*.bin"))


def translating(package: Path, target: Path) -> Any:
    """Processor seconds and resident bytes beside those of the imports, in a fresh process."""
    command = [sys.executable, "-c", SCRIPT, str(package), str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the figures, and what is asked for."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        weights = gpt2(folder / "gpt2.mlpackage")
        copied = copying(folder / "gpt2.mlpackage", folder / "copy.mlpackage")
        cost = translating(folder / "gpt2.mlpackage", folder / "gpt2.aimodel")
    asked = TIMES_OF_COPYING * copied + SECONDS
    print(f"processor time {cost['seconds']:.2f} s of {asked:.2f} s; cp -r takes {copied:.2f} s")
    print(f"memory {cost['bytes'] / weights:.2f} of the weights")


if __name__ == "__main__":
    main()
