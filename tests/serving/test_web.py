"""The calls of the page: who may make them, what may be sent, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asgi_calls import Answer, ask

pytest.importorskip("starlette", reason="pip install 'anesurgery[serve]'")

from anesurgery.serving.task import Limits
from anesurgery.serving.web import Jobs, checked_request, site

LIMITS = Limits(upload=1000, seconds=60, keep=600, models=2)
DONE = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
print(json.dumps("half"), flush=True)
(folder / "report.html").write_text("<p>a report</p>")
(folder / "download.zip").write_bytes(b"new")
(folder / "answer.json").write_text(json.dumps({"sentence": sys.argv[2], "download": "net.zip"}))
"""
SLEEPS = "import time; time.sleep(600)"
DIES = "import os; os.kill(os.getpid(), 11)"

Call = Callable[..., Awaitable[Answer]]


def visit(
    what: Callable[[Call, Jobs], Awaitable[None]],
    script: str = DONE,
    limits: Limits = LIMITS,
    token: str | None = None,
) -> None:
    """Let a visitor call a page whose tasks are a script."""

    async def run() -> None:
        app = site(limits, frozenset({"here:1"}), token)
        jobs: Jobs = app.state.jobs
        jobs.command = (sys.executable, "-S", "-c", script)
        async with app.router.lifespan_context(app):
            await what(lambda *words, **how: ask(app, *words, **how), jobs)
        assert not jobs.folder.exists(), "nothing is left behind"

    asyncio.run(run())


async def sent(call: Call, name: str = "net.mlmodel", body: bytes = b"x" * 10) -> str:
    address = f"/models/{(await call('POST', '/models')).json['id']}"
    answer = await call("PUT", f"{address}/files/{name}", body, pieces=4)
    assert answer.status == 200, answer.body
    return address


async def worked(call: Call, address: str, **question: str) -> Any:
    answer = await call("POST", f"{address}/work", json.dumps(question).encode())
    assert answer.status == 200, answer.body
    while (told := (await call("GET", address)).json)["state"] in ("waiting", "working"):
        await asyncio.sleep(0.01)
    return told


def test_a_model_is_sent_worked_on_shown_downloaded_and_deleted() -> None:
    async def visitor(call: Call, jobs: Jobs) -> None:
        address = await sent(call, "net.mlpackage/Data/model.mlmodel")
        (job,) = jobs.held.values()
        assert (job.folder / "upload/net.mlpackage/Data/model.mlmodel").read_bytes() == b"x" * 10
        assert (await call("GET", f"{address}/report")).status == 404
        told = await worked(call, address, task="apply", target="M1", recipe="gpt2_ane", prove="both")
        request = json.loads(told["sentence"])
        assert request["target"] == "M1"
        assert request["unpacked"] == LIMITS.unpacked
        assert (told["state"], told["words"], told["report"]) == ("ready", "half", True)
        report = await call("GET", f"{address}/report")
        assert report.body == b"<p>a report</p>"
        download = await call("GET", f"{address}/download")
        assert download.body == b"new"
        assert download.headers["content-disposition"] == 'attachment; filename="net.zip"'
        assert (await call("DELETE", address)).status == 204
        assert not job.folder.exists()
        assert (await call("GET", address)).status == 404

    visit(visitor)


def test_a_report_may_neither_load_nor_ask_anything() -> None:
    async def visitor(call: Call, _: Jobs) -> None:
        address = await sent(call)
        await worked(call, address)
        policy = (await call("GET", f"{address}/report")).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "sandbox allow-scripts;" in policy
        assert "connect-src" not in policy
        page = await call("GET", "/")
        assert "script-src 'self';" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert b"http://" not in page.body
        assert b"https://" not in page.body

    visit(visitor)


def test_without_the_token_nothing_is_given() -> None:
    async def visitor(call: Call, jobs: Jobs) -> None:
        for method, address in (("GET", "/"), ("GET", "/front.js"), ("POST", "/models"), ("GET", "/?token=no")):
            assert (await call(method, address)).status == 403
        assert not jobs.held
        first = await call("GET", "/?token=secret")
        assert (first.status, first.headers["location"]) == (303, "/")
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert (await call("GET", "/", headers={"cookie": cookie.partition(";")[0]})).status == 200

    visit(visitor, token="secret")


@pytest.mark.parametrize(
    "headers", [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}], ids=str
)
def test_other_sites_are_turned_away(headers: dict[str, str]) -> None:
    async def visitor(call: Call, jobs: Jobs) -> None:
        assert (await call("POST", "/models", headers={"origin": "http://here:1"})).status == 200
        assert (await call("POST", "/models", headers=headers)).status == 403
        assert len(jobs.held) == 1

    visit(visitor)


@pytest.mark.parametrize(
    "name",
    [
        "../net.mlmodel",
        "a/../../net.mlmodel",
        "/etc/passwd",
        "a//b",
        "a/./b",
        "..\\net.mlmodel",
        "c:/net.mlmodel",
        "a\0b",
        "a\tb",
        "x" * 201,
        "/".join("a" * 17),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    async def visitor(call: Call, jobs: Jobs) -> None:
        address = f"/models/{(await call('POST', '/models')).json['id']}"
        answer = await call("PUT", f"{address}/files/{name}", b"x")
        assert answer.status == 400
        assert "no path inside a model" in answer.json["error"]
        assert [path.name for path in jobs.folder.rglob("*") if path.is_file()] == []

    visit(visitor)


def test_a_file_is_never_replaced() -> None:
    async def visitor(call: Call, jobs: Jobs) -> None:
        address = await sent(call, "a/b")
        for name in ("a/b", "a", "a/b/c"):
            assert (await call("PUT", f"{address}/files/{name}", b"y")).status == 400
        assert [p.read_bytes() for p in jobs.folder.rglob("*") if p.is_file()] == [b"x" * 10]

    visit(visitor)


def test_what_is_too_large_is_refused_while_it_comes() -> None:
    async def visitor(call: Call, jobs: Jobs) -> None:
        address = await sent(call, "a", b"x" * 600)
        answer = await call("PUT", f"{address}/files/b", b"x" * 4000, pieces=10)
        assert answer.status == 413
        assert "1,000 bytes" in answer.json["error"]
        assert sum(p.stat().st_size for p in jobs.folder.rglob("*") if p.is_file()) <= 1000
        assert (await call("POST", f"{address}/work", b"x" * 20_000)).status == 413

    visit(visitor)


def test_there_are_so_many_places() -> None:
    async def visitor(call: Call, _: Jobs) -> None:
        first = await sent(call)
        await sent(call)
        assert "come back" in (await call("POST", "/models")).json["error"]
        await call("DELETE", first)
        assert (await call("POST", "/models")).status == 200

    visit(visitor)


def test_work_ends_with_its_time() -> None:
    async def visitor(call: Call, _: Jobs) -> None:
        told = await worked(call, await sent(call))
        assert told["state"] == "failed"
        assert told["error"] == "it took longer than 0.2 seconds, which is the limit here"

    visit(visitor, SLEEPS, replace(LIMITS, seconds=0.2))


def test_a_process_that_dies_is_said() -> None:
    async def visitor(call: Call, _: Jobs) -> None:
        told = await worked(call, await sent(call))
        assert told["state"] == "failed"
        assert "signal 11" in told["error"]

    visit(visitor, DIES)


def test_work_that_cannot_be_started_is_said_and_its_files_are_deleted() -> None:
    async def visitor(call: Call, jobs: Jobs) -> None:
        jobs.command = ("/nowhere/python",)
        address = await sent(call)
        (job,) = jobs.held.values()
        told = await worked(call, address)
        assert told["state"] == "failed"
        assert "cannot be started" in told["error"]
        assert (await call("DELETE", address)).status == 204
        assert not job.folder.exists()

    visit(visitor)


def test_one_works_and_the_others_wait_and_may_leave() -> None:
    async def visitor(call: Call, jobs: Jobs) -> None:
        first, second = await sent(call), await sent(call)
        for address in (first, second):
            await call("POST", f"{address}/work", b"{}")
        while (await call("GET", first)).json["state"] != "working":
            await asyncio.sleep(0.01)
        told = (await call("GET", second)).json
        assert (told["state"], told["ahead"]) == ("waiting", 1)
        again = await call("POST", f"{second}/work", b"{}")
        assert "wait until that is done" in again.json["error"]
        await call("DELETE", first)  # its process ends, and the next begins
        while (await call("GET", second)).json["state"] != "working":
            await asyncio.sleep(0.01)
        await call("DELETE", second)
        assert jobs.order == []

    visit(visitor, SLEEPS)


def test_what_nobody_asks_for_is_deleted() -> None:
    async def visitor(call: Call, jobs: Jobs) -> None:
        await sent(call)
        (job,) = jobs.held.values()
        while jobs.held:
            await asyncio.sleep(0.01)
        assert not job.folder.exists()

    visit(visitor, limits=replace(LIMITS, keep=0.1))


def test_what_has_been_here_for_too_long_is_deleted_though_it_is_asked_for() -> None:
    async def visitor(call: Call, jobs: Jobs) -> None:
        own = await sent(call)
        (job,) = jobs.held.values()
        while jobs.held:
            await call("GET", own)
            await asyncio.sleep(0.01)
        assert not job.folder.exists()
        assert (await call("GET", own)).status == 404

    visit(visitor, limits=replace(LIMITS, stay=0.1))


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ([], "not names with words"),
        ({"task": ["apply"]}, "not names with words"),
        ({"task": "delete"}, "unknown task"),
        ({"recipe": "os.system"}, "unknown recipe"),
        ({"prove": "none"}, "unknown prove"),
        ({"target": "Z80"}, "unknown chip or device"),
    ],
    ids=str,
)
def test_what_is_asked_is_seen_through(question: Any, reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        checked_request(question)


def test_what_is_not_asked_for_is_left_out() -> None:
    words = {"task": "inspect", "target": "any", "recipe": "auto", "prove": "sites"}
    assert checked_request({"memory": "0", "target": " "}) == words


DEEP = 4999
QUESTIONS: dict[str, tuple[bytes, str]] = {
    "deep lists": (b"[" * DEEP + b"]" * DEEP, "nested too deep"),
    "deep objects": (b'{"a":' * 1500 + b"1" + b"}" * 1500, "nested too deep"),
    "a deep answer": (b'{"task": ' + b"[" * DEEP, "nested too deep"),
    "deep and cut off": (b"[" * 9999, "nested too deep"),
    "no JSON": (b"{task}", "not JSON"),
    "half a character": (b'{"recipe": "\\ud800"}', r"unknown recipe '\ud800'"),
    "a long number": (b'{"task": ' + b"9" * 5000 + b"}", "not JSON"),
    "no text": (b"\xff\xfe", "not JSON"),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_that_is_none_is_refused_in_words(name: str) -> None:
    question, reason = QUESTIONS[name]

    async def visitor(call: Call, _: Jobs) -> None:
        address = await sent(call)
        answer = await call("POST", f"{address}/work", question)
        assert answer.status == 400, answer.body
        assert reason in answer.json["error"]
        assert (await worked(call, address))["state"] == "ready"

    visit(visitor)


def left(folder: Path) -> Path:
    """What a server that was killed leaves in a folder for temporary files."""
    child = os.fork()
    if not child:
        try:
            tempfile.tempdir = str(folder)
            jobs = Jobs(Limits())
            with jobs.opened():
                (jobs.add().folder / "upload/net.mlmodel").write_bytes(b"x")
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    (there,) = folder.iterdir()
    assert [p.name for p in there.rglob("net.mlmodel")]
    return there


def test_what_a_killed_server_left_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def visitor(call: Call, jobs: Jobs) -> None:
        assert list(tmp_path.iterdir()) == [jobs.folder.parent]

    visit(visitor)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*is named like what a killed save leaves")
@pytest.mark.parametrize("change", ["renamed", "copied", "another name", "something else in it"])
def test_what_is_not_certainly_ours_stays(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = left(tmp_path)
    foreign = tmp_path / f".anesurgery-{'a' * 32}"
    if change == "renamed":
        there.rename(foreign)
    elif change == "copied":
        shutil.copytree(there, foreign)
    elif change == "another name":
        foreign = there.rename(tmp_path / "anesurgery-serve-1")
    else:
        (there / "mine").write_text("x")
        foreign = there
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def visitor(call: Call, jobs: Jobs) -> None:
        assert list(foreign.rglob("net.mlmodel"))

    visit(visitor)
    assert list(tmp_path.iterdir()) == [foreign]


def test_servers_that_live_keep_their_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def visitor(call: Call, jobs: Jobs) -> None:
        await sent(call)
        with Jobs(LIMITS).opened():
            assert list(jobs.folder.rglob("net.mlmodel"))

    visit(visitor)
