"""Processes that tests start: they are waited for, but never judged by how long they take."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

HUNG = 1800
"""Seconds after which a child counts as hung; far beyond what one takes on the busiest machine."""


def run_child(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """What a child printed; it is stopped only if it hangs."""
    return subprocess.run(command, capture_output=True, text=True, timeout=HUNG, **options)
