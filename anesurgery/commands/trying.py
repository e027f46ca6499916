"""The commands to begin with: `list` and `explain`, which do not load torch, `example`, `draw` and `serve`."""

from __future__ import annotations

import secrets
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery import registry
from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Model, Overwrite, Quiet, complete_name
from anesurgery.commands.subcommand import Call, MaybePlace, Outcome, Place, subcommand
from anesurgery.commands.waiting import load_engine
from anesurgery.commands.written_options import written_options
from anesurgery.display import GB, byte_words, counted, folded, written
from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.show.report import Table

Kinds = Annotated[str, typer.Argument(help="recipes, passes or all.")]
StepName = Annotated[str, typer.Argument(help="A pass or recipe.", autocompletion=complete_name)]


@subcommand(engine=False)
def list_(kinds: Kinds = "all") -> Outcome:
    """List all recipes and passes, with one sentence each."""
    if kinds not in ("all", "recipes", "passes"):
        raise UnknownName("kind", kinds, ["recipes", "passes", "all"])
    rows = [("recipe", n) for n in registry.recipe_names() if kinds != "passes"]
    if kinds != "recipes":
        rows += [("pass", n) for n in registry.op_pass_names()]
        rows += [("layer pass", n) for n in registry.pass_names() if ("pass", n) not in rows]
    plain = [{"name": n, "kind": k, "summary": registry.summary(n)} for k, n in rows]
    table = Table(("name", "kind", "what it does"), [tuple(row.values()) for row in plain], ruled=False)
    return Outcome(plain, shown=table, then=command("explain", rows[0][1]))


@subcommand(engine=False)
def explain(name: StepName) -> Outcome:
    """Explain a pass or recipe: what it does, when it refuses, its evidence and its options."""
    text, options = registry.documentation(name), _options_of(name)
    lines = [f"  {step}.{key} = {value!r}" for step, opts in options.items() for key, value in opts.items()]
    shown = folded("\n".join([text.rstrip(), "", "Options:" if lines else "No options.", *lines]))
    then, more = command("example", "gpt2"), f"On your model: {command('fix', 'MODEL', name)}"
    return Outcome({"name": name, "documentation": text, "options": options}, shown=shown, then=then, more=more)


def _options_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the options of a pass, or of each step of a recipe: from its file, or by importing it."""
    if (options := written_options(name)) is not None:
        return options
    load_engine()
    from anesurgery.surgery import find_recipe

    steps = find_recipe(name).steps if name in registry.recipe_names() else (registry.make_pass(name),)
    return {step.name: {k: written(v) for k, v in step.options().items()} for step in steps}


Name = Annotated[str, typer.Argument(help="gpt2, llama, bert, vit, whisper, unet, network or tiny.")]


@subcommand("examples.example_models:example", waits="converting")
def example(call: Call, name: Name = "gpt2", out: MaybePlace = None) -> Outcome:
    """Write a small model to try this on, NAME.mlpackage here: a real architecture with random weights."""
    from anesurgery.examples.example_models import EXAMPLES

    path = call(name, out=out)
    chosen = EXAMPLES[name]
    size = sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
    out = out or Path(f"{name}{chosen.suffix}")
    plain = {"path": str(path), "recipe": chosen.recipe, "bytes": size}
    words = f"{chosen.words[:1].upper()}{chosen.words[1:]}, random weights, {byte_words(size)}"
    return Outcome(plain, shown=words, wrote=[out], then=command("see", out, target=chosen.target))


@subcommand("show.pictures:draw", waits="drawing")
def draw(call: Call, model: Model, out: Place, overwrite: Overwrite = False) -> Outcome:
    """Draw the graph as an .svg picture, or an .html page to zoom. --target colours the ops by unit."""
    from anesurgery.files.writing import check_place
    from anesurgery.show.pictures import check_picture

    check_picture(out)
    check_place(out.expanduser().absolute(), overwrite, Path(model).expanduser())
    drawing = call(model)
    path, then = drawing.save(out), command("see", model, target=call["target"])
    plain = {"path": str(path), "ops": list(drawing.ops)}
    return Outcome(plain, shown=counted(len(drawing.ops), "op"), wrote=[path], then=then)


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
