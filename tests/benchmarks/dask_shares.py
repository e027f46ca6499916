"""`ane.sensitivity` and `ane.ranges` shared out over workers of Dask, and compared with one run.

Needs `pip install "dask[distributed]"`. The workers are local here; a `Client` with the address of a scheduler
takes those of other machines, which must see the model under the same path.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from dask.distributed import Client, LocalCluster  # type: ignore[import-not-found,import-untyped,unused-ignore]

import anesurgery as ane
from anesurgery.checking.ranges import Ranges
from anesurgery.compressing.sensitivity import Sensitivity

MODES = ["linear-8", "palettize-4-uniform"]


def data() -> list[dict[str, Any]]:
    """Some inputs."""
    rng = np.random.default_rng(0)
    return [{"ids": rng.integers(0, 257, (1, 64)).astype(np.int32)} for _ in range(4)]


def sensitivity(path: str, shard: str | None = None) -> dict[str, Any]:
    """A share of the weights, as plain data."""
    return ane.sensitivity(path, data(), MODES, smallest=1024, shard=shard).to_json()


def ranges(path: str, shard: str | None = None) -> dict[str, Any]:
    """A share of the inputs, as plain data."""
    found: dict[str, Any] = ane.ranges(path, data(), shard=shard).to_json()
    return found


def main() -> None:
    """Run both ways, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    from recipe import make

    shares = [f"{n}/{chosen.workers}" for n in range(1, chosen.workers + 1)]
    with tempfile.TemporaryDirectory() as folder:
        path = str(make(Path(folder), 2, 64, 257, 64))
        whole = Sensitivity.from_json(sensitivity(path)), Ranges.from_json(ranges(path))
        with LocalCluster(n_workers=chosen.workers, threads_per_worker=1) as cluster, Client(cluster) as client:  # type: ignore[no-untyped-call,unused-ignore]
            made = client.gather([client.map(f, [path] * len(shares), shares) for f in (sensitivity, ranges)])
    first, *others = map(Sensitivity.from_json, made[0])
    costs = first.merge(*others)
    one, *rest = map(Ranges.from_json, made[1])
    print(
        "sensitivity:",
        "equal to one run" if costs.rows == whole[0].rows else "differs",
        len(costs.rows),
        "weights",
    )
    print("ranges:", "equal to one run" if one.merge(*rest).rows == whole[1].rows else "differs")


if __name__ == "__main__":
    main()
