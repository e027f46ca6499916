"""Run one model a few times in this process and print, as JSON, the memory that it took at its peak.

Usage: peak.py torch NAME | peak.py PACKAGE PRECISION. Run it in a fresh process.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import numpy as np
import psutil
import torch

CALLS = 3


class Watch(threading.Thread):
    """Looks every millisecond how much memory this process holds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._process, self._done = psutil.Process(), threading.Event()
        self.base = self._process.memory_info().rss
        self.resident = self.anonymous = 0

    def run(self) -> None:
        """Look until told to stop."""
        while not self._done.wait(0.001):
            info = self._process.memory_info()
            self.resident = max(self.resident, info.rss)
            self.anonymous = max(self.anonymous, info.rss - getattr(info, "shared", 0))

    def report(self) -> dict[str, int]:
        """Bytes: when it started, at the peak, at the peak without mapped files, private at the end."""
        own = self._process.memory_full_info().uss
        self._done.set()
        self.join()
        return {"base": self.base, "resident": self.resident, "anonymous": self.anonymous, "own": own}


def run_torch(name: str) -> dict[str, int]:
    """Build the module and call it."""
    import models
    import transformers  # noqa: F401 - its memory is not the model's

    watch = Watch()
    module, x = models.module(name), models.example(name)
    watch.start()  # only now: random numbers for tied weights are made twice
    with torch.inference_mode():
        for _ in range(CALLS):
            module(x)
    return watch.report()


def run_package(path: str, precision: str) -> dict[str, int]:
    """Map the package and call it with some numbers."""
    from anesurgery.interpret import Predictor
    from anesurgery.mil import np_dtype

    watch = Watch()
    watch.start()
    predictor = Predictor(path, precision=precision)
    values: dict[str, Any] = {
        name: np.ones([int(d) for d in var.shape], np_dtype(var))
        for name, var in predictor.executables[0].function.inputs.items()
    }
    for _ in range(CALLS):
        predictor(values)
    return watch.report()


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, how = sys.argv[1:]
    print(json.dumps(run_torch(how) if what == "torch" else run_package(what, how)))
