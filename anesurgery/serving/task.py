"""One piece of work on a model that a visitor brought, in a process of its own that is bound first by `Limits`.

Run as ``python -m anesurgery.serving.task FOLDER REQUEST``: the folder holds ``upload/``; lines of JSON on
stdout say how far the work is; ``answer.json`` in the folder is written last. It opens no connection, and ends
when the process that started it does.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from anesurgery.byte_counts import GB, byte_words
from anesurgery.doors import short_of_memory
from anesurgery.errors import LoadError, SurgeryError
from anesurgery.files import source
from anesurgery.files.progress import Listener, listening

REPORT, ANSWER, DOWNLOAD, PLACE = "report.html", "answer.json", "download.zip", "place.json"
"""The files of a task in its folder: the page, what came of it, the new model, and where the model given is."""
SUFFIXES = (".mlpackage", ".mlmodel", ".mlmodelc")
TEXT = 100_000
"""Characters of text in an answer at most: a page shows a thousand lines."""
FORBIDDEN = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "os.exec", "os.system")
"""Events of Python's audit that no work on a model has a reason for."""


def main() -> None:
    """Do what the command line asks for; the answer is a file."""
    folder, request = Path(sys.argv[1]).resolve(), json.loads(sys.argv[2])
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    bind(request["memory"], request["unpacked"])
    with _telling(said) as listener:
        result = answer(folder, request, listener)
    (folder / ANSWER).write_text(json.dumps(result), encoding="utf-8")


def bind(memory: int, file: int) -> None:
    """Bound this process: what it may allocate, and write to one file; and forbid connections.

    Args:
        memory: bytes.
        file: bytes.
    """
    import resource

    for what, most in (
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_FSIZE, file),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    sys.addaudithook(_refuse)


def _refuse(event: str, _: object) -> None:
    if event.startswith(FORBIDDEN):
        raise PermissionError(f"work on a model has no reason for {event}")


def _end_with_the_server() -> None:
    """Wait until the server closes its end of the pipe, or is no more."""
    sys.stdin.buffer.read()
    os._exit(1)


@contextmanager
def _telling(said: IO[str]) -> Iterator[Listener]:
    """Say every half second how far the work in the body is."""
    done = threading.Event()

    def tell() -> None:
        before = ""
        while not done.wait(0.5):
            if (words := _far(listener)) != before:
                print(json.dumps(words[:200]), file=said, flush=True)
                before = words

    with listening() as listener:
        listener.step = "loading coremltools and torch"
        clock = threading.Thread(target=tell, daemon=True)
        clock.start()
        try:
            yield listener
        finally:
            done.set()
            clock.join()


def _far(listener: Listener) -> str:
    amount = listener.amount
    if amount is None or not amount.total:
        return listener.step
    return f"{listener.step}, {min(100, 100 * amount.done // amount.total)} %"


def answer(folder: Path, request: dict[str, Any], listener: Listener) -> dict[str, Any]:
    """What came of a request: `sentence` and more, or `error`.

    Args:
        folder: of the visitor's model.
        request: `task` ("inspect" or "apply"), `target`, `recipe`, `prove`, and the limits.
        listener: whose step says what is done.
    """
    try:
        listener.step = "unpacking"
        model = place(folder, request["unpacked"])
        os.chdir(model.parent)  # messages then name the model and not the folders of this machine
        listener.step = "loading coremltools and torch"
        work = {"inspect": _inspect, "apply": _apply}[request["task"]]
        return work(folder, Path(model.name), request, listener)
    except Exception as error:
        if short_of_memory(error):
            limit = byte_words(request["memory"])
            return {"error": f"it takes more than {limit} of memory, which is the limit here"}
        if isinstance(error, SurgeryError):
            return {"error": _without(str(error), folder)}
        if isinstance(error, (RuntimeError, OSError)):
            return {"error": f"{type(error).__name__}: {_without(str(error), folder)}"}
        return {
            "error": f"{type(error).__name__}: {_without(str(error), folder)}; this model shows a defect here"
        }


def _without(text: str, folder: Path) -> str:
    """A text without the folders of this machine."""
    for part in ("work/", "upload/", ""):
        text = text.replace(f"{folder}/{part}", "")
    return text[:TEXT]


def place(folder: Path, largest: int) -> Path:
    """Where the model of an upload is; an archive is unpacked, once.

    Args:
        folder: with `upload/`.
        largest: bytes that are unpacked at most.

    Raises:
        LoadError: it is no model.
    """
    noted = folder / PLACE
    if noted.exists():
        return folder / json.loads(noted.read_text(encoding="utf-8"))
    sent = sorted((folder / "upload").iterdir())
    if len(sent) != 1:
        raise LoadError(
            f"{len(sent)} files and folders were sent, and one is a model; zip what belongs together"
        )
    top = sent[0]
    if source.is_archive(top):
        shutil.rmtree(folder / "work", ignore_errors=True)
        (folder / "work").mkdir()
        model = source.unpack(top, folder / "work", largest)
        top.unlink()
    elif top.suffix in SUFFIXES:
        model = top
    else:
        raise LoadError(f"{top.name} is no .mlpackage, .mlmodel or .mlmodelc, and no .zip of one")
    noted.write_text(json.dumps(str(model.relative_to(folder))), encoding="utf-8")
    return model


def _inspect(folder: Path, model: Path, request: dict[str, Any], listener: Listener) -> dict[str, Any]:
    from anesurgery.placement.inspector import inspect
    from anesurgery.show import summary
    from anesurgery.show.page import page

    listener.step = "placing each op"
    inspection = inspect(model, request["target"])
    listener.step = "drawing the report"
    _write(folder / REPORT, page(inspection), folder)
    return {"sentence": summary.verdict(inspection)}


def _apply(folder: Path, model: Path, request: dict[str, Any], listener: Listener) -> dict[str, Any]:
    from anesurgery.placement.inspector import inspect
    from anesurgery.placement.models import is_layered
    from anesurgery.show.headline import headline
    from anesurgery.show.page import page
    from anesurgery.surgery import apply

    listener.step = "reading the model"
    network = is_layered(model)
    recipe = "neuralnetwork_ane" if network and request["recipe"] == "auto" else request["recipe"]
    surgery = apply(model, recipe, target=request["target"], prove=request["prove"], quiet=True)
    listener.step = "writing the new model"
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    new = surgery.save(out / f"{model.stem}_{recipe}{'.mlmodel' if network else '.mlpackage'}")
    listener.step = "placing each op, before and after"
    before, after = inspect(model, request["target"]), inspect(new, request["target"])
    listener.step = "drawing the report"
    _write(folder / REPORT, page(before, after), folder)
    listener.step = "packing the new model"
    shutil.make_archive(str(folder / DOWNLOAD.removesuffix(".zip")), "zip", out)
    return {
        "sentence": headline(surgery),
        "changes": _without(surgery.details, folder),
        "download": f"{new.name}.zip" if surgery.changes else "",
    }


def _write(path: Path, text: str, folder: Path) -> None:
    for part in ("work/", "upload/", "out/", ""):
        text = text.replace(f"{folder}/{part}", "")
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()


@dataclass(frozen=True)
class Limits:
    """What an upload, and the work on it, may take.

    Attributes:
        upload: bytes of one model as it is sent.
        unpacked: bytes of one model out of its archive, and of each file that is written.
        memory: bytes of memory that one piece of work may allocate (held on Linux alone).
        seconds: that one piece of work may take.
        keep: seconds after the last sign of a visitor, after which his files are deleted.
        stay: seconds after a model began to be sent, after which its files are deleted, seen or not;
            work on it is ended first.
        models: models that are held at once.
    """

    upload: int = 4 * GB
    unpacked: int = 8 * GB
    memory: int = 8 * GB
    seconds: float = 1800
    keep: float = 900
    stay: float = 6 * 3600
    models: int = 8
