"""Translating GPT-2 with 124 million weights: processor time and memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from core_ai_models import needs_core_ai

pytestmark = [needs_core_ai, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TIMES_OF_COPYING, SECONDS = 3, 2
"""Processor time: this many times what `cp -r` takes, and as many seconds more."""
SHARE = 1.5
"""Resident memory beside that of the imports, as a share of the weights; pages that map the package count."""
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


def test_gpt2_is_translated_for_little(tmp_path: Path) -> None:
    package = tmp_path / "gpt2.mlpackage"
    subprocess.run([sys.executable, str(ROOT / "tests/benchmarks/gpt2.py"), str(package)], check=True, cwd=ROOT)
    weights = sum(file.stat().st_size for file in package.rglob("*.bin"))
    copied = copying(package, tmp_path / "copy.mlpackage")
    command = [sys.executable, "-c", SCRIPT, str(package), str(tmp_path / "gpt2.aimodel")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    cost = json.loads(done.stdout.splitlines()[-1])
    assert weights > 2 * 123e6
    assert cost["seconds"] <= TIMES_OF_COPYING * copied + SECONDS
    assert cost["bytes"] <= SHARE * weights
