"""Every writer under every fault, at any call of the system: the old file or the new one, and no debris."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_networks import build as network
from compiled_models import compile_package
from faults import calls, failing
from saved import model, scratches

import anesurgery as ane
from anesurgery.errors import SurgeryError
from anesurgery.files import arrays
from anesurgery.files.package import save

CALLS_TRIED = 6
"""At how many calls a fault comes in the short run, of each writer and fault that is in it."""


class Workshop:
    """Inputs, and what the writers make of them; the numbers 1 and 2 tell the old content from the new."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.inputs = folder / "inputs"
        self.inputs.mkdir()
        self.packages = {n: save(model(n, 32), self.inputs / f"{n}.mlpackage") for n in (1, 2)}
        self.compiled = {n: compile_package(p, self.inputs / f"{n}.mlmodelc") for n, p in self.packages.items()}
        self.network = self.inputs / "network.mlmodel"
        self.network.write_bytes(network().SerializeToString())
        self.upgraded = {n: self._upgraded(n) for n in (1, 2)}

    def _upgraded(self, n: int) -> Any:
        return ane.upgrade(self.network, precision="fp16" if n == 1 else "fp32")

    def prepare(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()


def saves(shop: Workshop, n: int) -> object:
    return ane.save(ane.load(shop.packages[n]), shop.out / "saved.mlpackage", overwrite=True)


def splits(shop: Workshop, n: int) -> object:
    return ane.split(shop.packages[n], 2).save(shop.out / "chain", overwrite=True)


def splits_into_a_pipeline(shop: Workshop, n: int) -> object:
    return ane.split(shop.packages[n], 2).save(shop.out / "chain.mlpackage", overwrite=True)


def merges(shop: Workshop, n: int) -> object:
    both = {"a": shop.packages[n], "b": shop.packages[n]}
    return ane.merge(both, shop.out / "merged.mlpackage", overwrite=True)


def decompiles(shop: Workshop, n: int) -> object:
    return ane.decompile(shop.compiled[n], shop.out / "decompiled.mlpackage", overwrite=True)


def upgrades(shop: Workshop, n: int) -> object:
    return ane.save(ane.load(shop.upgraded[n]), shop.out / "upgraded.mlpackage", overwrite=True)


def reports(shop: Workshop, n: int) -> object:
    return ane.inspect(shop.packages[n]).save_html(shop.out / "report.html")


def draws(shop: Workshop, n: int) -> object:
    return ane.draw(shop.packages[n]).save(shop.out / "ops.svg")


def plans(shop: Workshop, n: int) -> object:
    return arrays.write_text(shop.out / "plan.json", json.dumps({"plan": n}))


def artifacts(shop: Workshop, n: int) -> None:
    arrays.write_one(shop.out / "table.npy", np.full(1000, n), overwrite=True)


def outputs(shop: Workshop, n: int) -> None:
    arrays.write(shop.out / "run.npz", {"y": np.full(1000, n)}, overwrite=True)


Writer = Callable[[Workshop, int], object]
Fault = Callable[[Workshop], Callable[[str], object]]
WRITERS: tuple[Writer, ...] = (
    *(saves, splits, splits_into_a_pipeline, merges, decompiles, upgrades),
    *(reports, draws, plans, artifacts, outputs),
)


def fails(code: int) -> Fault:
    return lambda shop: failing(code)


def only(names: tuple[str, ...], code: int) -> Fault:
    """Only some calls fail."""

    def fault(shop: Workshop) -> Callable[[str], object]:
        return lambda name: failing(code)(name) if name in names else None

    return fault


def raises(error: type[BaseException]) -> Fault:
    def act(name: str) -> None:
        raise error

    return lambda shop: act


def folder_vanishes(shop: Workshop) -> Callable[[str], object]:
    return lambda name: shutil.rmtree(shop.out, ignore_errors=True)


FAULTS: dict[str, tuple[Fault, bool]] = {
    "an error of the disk": (fails(errno.EIO), False),
    "an error of the disk, told after the call": (fails(errno.EIO), True),
    "a full disk": (fails(errno.ENOSPC), False),
    "a full quota": (fails(errno.EDQUOT), False),
    "no permission": (fails(errno.EACCES), False),
    "no open files left": (fails(errno.EMFILE), False),
    "a full disk at fsync": (only(("fsync",), errno.ENOSPC), False),
    "a rename across devices": (only(("rename", "_rename"), errno.EXDEV), False),
    "a folder that vanishes": (folder_vanishes, False),
    "Ctrl-C before a call": (raises(KeyboardInterrupt), False),
    "Ctrl-C after a call": (raises(KeyboardInterrupt), True),
    "an exit": (raises(SystemExit), False),
}
QUICK = {(artifacts, "a full disk"), (merges, "an error of the disk"), (draws, "Ctrl-C after a call")}


def content(folder: Path) -> dict[str, bytes]:
    """The files in a folder by path; in a manifest identifiers are drawn anew each time."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    for name in [n for n in files if n.endswith("Manifest.json")]:
        files[name] = str(len(json.loads(files[name])["itemInfoEntries"])).encode()
    return files


def without_debris(folder: Path) -> dict[str, bytes]:
    return {n: b for n, b in content(folder).items() if not n.startswith(".anesurgery")}


def attempt(shop: Workshop, write: Writer, fault: Fault, after: bool, at: int) -> bool:
    """Write with a fault at a call; whether it was told of."""
    shop.prepare()
    write(shop, 1)
    try:
        with calls(at, fault(shop), after):
            write(shop, 2)
    except SurgeryError:
        return True
    except (KeyboardInterrupt, SystemExit):
        assert not scratches(shop.out), "what ends a writer leaves nothing"
        return True
    return False


def total(shop: Workshop, write: Writer) -> int:
    shop.prepare()
    write(shop, 1)
    with calls() as told:
        write(shop, 2)
    return len(told.names)


def try_each(shop: Workshop, write: Writer, name: str, step: Callable[[int], int]) -> None:
    fault, after = FAULTS[name]
    count = total(shop, write)
    new, inputs = content(shop.out), content(shop.inputs)
    shop.prepare()
    write(shop, 1)
    old = content(shop.out)
    assert old != new
    for at in range(1, count + 1, step(count)):
        told = attempt(shop, write, fault, after, at)
        vanished = not shop.out.exists()
        found = {} if vanished else without_debris(shop.out)
        allowed = [new, {}] if fault is folder_vanishes else [new, *([old] if told else [])]
        assert found in allowed, f"call {at}"
        assert content(shop.inputs) == inputs, f"call {at}"
        shop.out.mkdir(exist_ok=True)
        write(shop, 2)
        assert not scratches(shop.out), f"call {at}"
        assert content(shop.out) == new, f"call {at}"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("shop"))


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("write", "name"), sorted(QUICK, key=str), ids=lambda v: getattr(v, "__name__", v))
def test_a_writer_under_a_fault(shop: Workshop, write: Writer, name: str) -> None:
    try_each(shop, write, name, lambda count: max(1, count // CALLS_TRIED))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("write", WRITERS, ids=lambda w: w.__name__)
def test_every_writer_under_every_fault(shop: Workshop, write: Writer, name: str) -> None:
    try_each(shop, write, name, lambda count: max(1, count // 40))
