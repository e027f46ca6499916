"""The command `serve`: a page for this machine, or for a Space."""

from __future__ import annotations

import secrets
import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from anesurgery.commands.options import Quiet
from anesurgery.commands.waiting import load_engine
from anesurgery.display import GB
from anesurgery.errors import SurgeryError

LOCAL, EVERYWHERE = "127.0.0.1", "0.0.0.0"


def serve(
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8765,
    public: Annotated[
        str | None,
        typer.Option(
            metavar="HOST", help="Open to everybody who reaches this machine as HOST, without a token."
        ),
    ] = None,
    upload: Annotated[float, typer.Option(min=0.001, help="The most GB of one model, as it is sent.")] = 4,
    memory: Annotated[float, typer.Option(min=0.1, help="GB of memory for one job.")] = 8,
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes for one job.")] = 30,
    keep: Annotated[float, typer.Option(min=0.1, help="Minutes until unused files are deleted.")] = 15,
    hours: Annotated[float, typer.Option(min=0.01, help="Hours until any model is deleted.")] = 6,
    quiet: Quiet = False,
) -> None:
    """Open a page to inspect and rewrite models. Nothing leaves this machine."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise SurgeryError(f"serve needs {' and '.join(missing)}: pip install 'anesurgery[serve]'")
    load_engine(quiet)
    import uvicorn

    from anesurgery.serving.task import Limits
    from anesurgery.serving.web import MOST_WAITING, bounded, site

    token = None if public else secrets.token_urlsafe(24)
    hosts = {name.lower() for host in (public, LOCAL, "localhost") if host for name in (host, f"{host}:{port}")}
    sizes = {"upload": int(upload * GB), "unpacked": int(2 * upload * GB), "memory": int(memory * GB)}
    limits = Limits(**sizes, seconds=60 * minutes, keep=60 * keep, stay=3600 * hours)
    page = site(limits, frozenset(hosts), token)
    if not quiet:
        address = f"https://{public}" if public else f"http://{LOCAL}:{port}/?token={token}"
        print(f"open {address}\nCtrl-C ends it and deletes what was sent.", flush=True)
    uvicorn.run(
        page,
        host=EVERYWHERE if public else LOCAL,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        limit_concurrency=2 * MOST_WAITING,
        http=bounded(),
    )
    sys.stdout.flush()
