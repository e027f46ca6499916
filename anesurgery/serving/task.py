"""Do one piece of work on a visitor's model, in a process of its own that first limits its memory and files.

`web` runs ``python -m anesurgery.serving.task FOLDER REQUEST``. The folder holds ``upload/``; lines of JSON on
stdout say how far the work is; ``answer.json`` in the folder is written last. The process opens no connection,
and ends when the server does.
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

from anesurgery.display import GB, byte_words
from anesurgery.doors import short_of_memory
from anesurgery.errors import LoadError, SurgeryError
from anesurgery.files import source
from anesurgery.files.progress import Listener, listening

REPORT, ANSWER, DOWNLOAD, PLACE = "report.html", "answer.json", "download.zip", "place.json"
"""Files of a task: the report, the answer, the new model, and the path of the model given."""
SUFFIXES = (".mlpackage", ".mlmodel", ".mlmodelc")
TEXT = 100_000
"""The most characters of text in an answer: a page shows a thousand lines."""
FORBIDDEN = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "os.exec", "os.system")
"""Audit events of Python that work on a model never needs."""


def main() -> None:
    """Do what the command line asks for; the answer is a file."""
    folder, request = Path(sys.argv[1]).resolve(), json.loads(sys.argv[2])
    progress = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to stderr
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    bind(request["memory"], request["unpacked"])
    with _reporting_progress(progress) as listener:
        result = answer(folder, request, listener)
    (folder / ANSWER).write_text(json.dumps(result), encoding="utf-8")


def bind(memory: int, file: int) -> None:
    """Limit the memory and file sizes of this process, and forbid connections.

    Args:
        memory: the most bytes it may allocate.
        file: the most bytes it may write to one file.
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
    """Wait until the server closes its end of the pipe, and end."""
    sys.stdin.buffer.read()
    os._exit(1)


@contextmanager
def _reporting_progress(said: IO[str]) -> Iterator[Listener]:
    """Within the context, print every half second how far the work is."""
    done = threading.Event()

    def tell() -> None:
        before = ""
        while not done.wait(0.5):
            if (words := _progress_words(listener)) != before:
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


def _progress_words(listener: Listener) -> str:
    amount = listener.amount
    if amount is None or not amount.total:
        return listener.step
    return f"{listener.step}, {min(100, 100 * amount.done // amount.total)} %"


def answer(folder: Path, request: dict[str, Any], listener: Listener) -> dict[str, Any]:
    """Do the work of a request; return `sentence` and more, or `error`.

    Args:
        folder: the folder of the visitor's model.
        request: `task` ("inspect" or "apply"), `target`, `recipe`, `prove`, and the limits.
        listener: is told the current step.
    """
    try:
        listener.step = "unpacking"
        model = model_path(folder, request["unpacked"])
        os.chdir(model.parent)  # messages then name the model and not the folders of this machine
        listener.step = "loading coremltools and torch"
        work = {"inspect": _inspect, "apply": _apply}[request["task"]]
        return work(folder, Path(model.name), request, listener)
    except Exception as error:
        if short_of_memory(error):
            limit = byte_words(request["memory"])
            return {"error": f"it takes more than {limit} of memory, which is the limit here"}
        if isinstance(error, SurgeryError):
            return {"error": _without_folders(str(error), folder)}
        if isinstance(error, (RuntimeError, OSError)):
            return {"error": f"{type(error).__name__}: {_without_folders(str(error), folder)}"}
        words = f"{type(error).__name__}: {_without_folders(str(error), folder)}"
        return {"error": f"{words}; this model shows a defect here"}


def _without_folders(text: str, folder: Path, most: int | None = TEXT) -> str:
    """Return at most `most` characters of a text, without the folders of this machine."""
    for part in ("work/", "upload/", "out/", ""):
        text = text.replace(f"{folder}/{part}", "")
    return text[:most]


def model_path(folder: Path, largest: int) -> Path:
    """Return the path of the model in an upload; an archive is unpacked, once.

    Args:
        folder: the folder that holds `upload/`.
        largest: the most bytes that are unpacked.

    Raises:
        LoadError: the upload is no model.
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
    elif top.suffix in SUFFIXES:
        model = top
    else:
        from anesurgery.files.package import FOREIGN

        foreign = FOREIGN.get(top.suffix.lower(), "no .mlpackage, .mlmodel or .mlmodelc, and no .zip of one")
        raise LoadError(f"{top.name} is {foreign}")
    noted.write_text(json.dumps(str(model.relative_to(folder))), encoding="utf-8")
    if model != top:  # only now: if the process is killed before, the next one unpacks the archive again
        top.unlink()
    return model


def _inspect(folder: Path, model: Path, request: dict[str, Any], listener: Listener) -> dict[str, Any]:
    from anesurgery.placement.inspector import inspect
    from anesurgery.show import summary
    from anesurgery.show.page import page

    listener.step = "placing each op"
    inspection = inspect(model, request["target"])
    listener.step = "drawing the report"
    _write(folder / REPORT, page(inspection), folder)
    return {"sentence": summary.full_sentence(inspection)}


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
    new = surgery.save(out / f"{model.stem}_ane{'.mlmodel' if network else '.mlpackage'}")
    listener.step = "placing each op, before and after"
    before, after = inspect(model, request["target"]), inspect(new, request["target"])
    listener.step = "drawing the report"
    _write(folder / REPORT, page(before, after), folder)
    listener.step = "packing the new model"
    shutil.make_archive(str(folder / DOWNLOAD.removesuffix(".zip")), "zip", out)
    return {
        "sentence": headline(surgery),
        "changes": _without_folders(surgery.details, folder),
        "download": f"{new.name}.zip" if surgery.changes else "",
    }


def _write(path: Path, text: str, folder: Path) -> None:
    path.write_text(_without_folders(text, folder, most=None), encoding="utf-8")


@dataclass(frozen=True)
class Limits:
    """What an upload, and the work on it, may take."""

    upload: int = 4 * GB
    """Bytes of one model as it is sent."""
    unpacked: int = 8 * GB
    """Bytes of one model out of its archive, and of each file that is written."""
    memory: int = 8 * GB
    """Bytes of memory that one piece of work may allocate (enforced on Linux only)."""
    seconds: float = 1800
    """Seconds that one piece of work may take."""
    keep: float = 900
    """Seconds after the last request of a visitor after which the files are deleted."""
    stay: float = 6 * 3600
    """Seconds after the upload began after which the files are deleted in any case; work is ended first."""
    models: int = 8
    """Models that are stored at once."""


if __name__ == "__main__":
    main()
