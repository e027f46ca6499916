"""Every command ends with a command that can be pasted, at 80 columns."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import typer
from coremltools.models import datatypes
from coremltools.models.neural_network import NeuralNetworkBuilder
from fake_core_ml import install
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands.app import app
from anesurgery.commands.subcommand import Outcome
from anesurgery.mil import ct

WIDTH = 80
ANOTHER = ("serve", "chat", "review")
"""A page, a talk, and Markdown for a pull request."""
ELSEWHERE = {"build", "compress-cache", "choose-sizes", "sizes", "decompile", "executorch"}
"""Commands whose inputs other tests make; mypy sees that each names what follows it."""
MAC = {"measure", "learn", "calibrate"}
ON_A_SCREEN = ("see", "fix", "plan", "prove", "compare", "ranges", "certify", "sensitivity", "compress")
"""Commands that print 14 lines at most, and with `--full` all."""
LINES = 14
PLURAL = r"(?<![.,\d])1 (?:chunk|op|function|token|sample|edit|step|weight|size)s\b"
COMMANDS = """
list
explain auto
explain pad_last_axis
example tiny --out other.mlpackage
see m.mlpackage
see m.mlpackage --why logits
see folder
fix m.mlpackage auto --target iPhone13 --overwrite
plan m.mlpackage
plan m.mlpackage auto --target iPhone13
run m.mlpackage
compare m.mlpackage b.mlpackage
diff m.mlpackage b.mlpackage
prove m.mlpackage
prove m.mlpackage b.mlpackage
ranges m.mlpackage
ranges folder
certify m.mlpackage
sensitivity m.mlpackage --mode linear-8
compress m.mlpackage small.mlpackage --bits 8 --target iPhone17
split m.mlpackage --parts 2 --out parts
merge a=m.mlpackage b=b.mlpackage --out both.mlpackage
extract both.mlpackage a --out a.mlpackage
draw m.mlpackage --out m.svg
swift m.mlpackage --to runner
generate m.mlpackage --ids 1,2 --steps 2
to-coreai m.mlpackage m.aimodel
lint m.aimodel
plan m.aimodel
fix m.aimodel --dry-run
fix m.mlpackage select_last_token --dry-run
to-coreml m.aimodel back.mlpackage
see parts
plan parts
fix parts
generate parts --ids 1,2 --steps 1
compare m.mlpackage parts
split m.mlpackage --max-size 20MB --out whole
chips
doctor
""".strip().splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two equal models, and a folder of one; commands add their own."""
    place = tmp_path_factory.mktemp("steps")
    (place / "folder").mkdir()
    for name in ("m", "b", "folder/one"):
        ane.example("tiny", place / f"{name}.mlpackage")
    return place


def last(output: str) -> str:
    """The command that an output ends with, its lines joined as a shell joins them."""
    (following,) = re.findall(r"^next: ((?:.*\\\n)*.*)", output, re.MULTILINE)
    return re.sub(r"\\\n\s*", "", following)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_ends_with_one_that_is_written_right(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setattr("sys.argv", ["anesurgery", *shlex.split(words)])
    done = CliRunner().invoke(app, shlex.split(words))
    assert done.exit_code in (0, 1), done.output
    assert max(map(len, done.stdout.splitlines())) <= WIDTH or words.startswith("diff")
    if words.split()[0] in ON_A_SCREEN and "--why" not in words:
        assert len(done.stdout.splitlines()) <= LINES
    parsed(last(done.stdout))
    assert not re.search(r"certify parts\b(?!/)", done.stdout), "`certify` takes a single chunk"
    assert not re.search(PLURAL, done.stdout)


def test_what_was_only_tried_leads_to_doing_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = ["fix", "m.mlpackage", "select_last_token"]
    monkeypatch.setattr("sys.argv", ["anesurgery", *words, "--dry-run"])
    done = CliRunner().invoke(app, [*words, "--dry-run"])
    assert last(done.stdout) == f"anesurgery {' '.join(words)}"
    assert "Nothing was written" in done.stdout


def test_models_of_two_interfaces_lead_to_a_command_that_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong version: `compare`, which refuses outputs of two shapes."""
    monkeypatch.chdir(folder)
    CliRunner().invoke(app, shlex.split("fix m.mlpackage select_last_token --out last.mlpackage"))
    following = last(CliRunner().invoke(app, ["diff", "m.mlpackage", "last.mlpackage"]).stdout)
    assert CliRunner().invoke(app, shlex.split(following)[1:]).exit_code == 0


def test_a_pipeline_of_networks_leads_to_a_command_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong versions: `compress` without a place to write to, and one that takes no such pipeline."""
    monkeypatch.chdir(tmp_path)
    networks = []
    for reads, makes in (("x", "h"), ("h", "y")):
        ports = [(name, datatypes.Array(64)) for name in (reads, makes)]
        builder = NeuralNetworkBuilder(ports[:1], ports[1:], disable_rank5_shape_mapping=True)
        weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
        builder.add_inner_product("product", weight, None, 64, 64, False, reads, makes)
        networks.append(ct.models.MLModel(builder.spec, skip_model_load=True))
    ct.utils.make_pipeline(*networks).save("p.mlmodel")
    following = last(CliRunner().invoke(app, ["sensitivity", "p.mlmodel", "--mode", "linear-8"]).stdout)
    done = CliRunner().invoke(app, shlex.split(following)[1:])
    assert done.exit_code == 0, done.output
    assert ane.compare("p.mlmodel", "p_int4.mlpackage", gate=15).ok


def test_a_network_that_is_to_become_a_package_leads_to_its_repair_as_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong version: the recipe of layers, which says that an .mlpackage is no name for the result."""
    monkeypatch.chdir(tmp_path)
    ane.example("network", "n.mlmodel")
    done = CliRunner().invoke(app, shlex.split("fix n.mlmodel --out n.mlpackage --target iPhone15Pro"))
    assert "ane.upgrade('n.mlmodel').save('n.mlpackage')" in str(done.exception)
    repair = last(done.stdout)
    assert repair == "anesurgery fix n.mlmodel --target iPhone15Pro"
    ane.upgrade("n.mlmodel").save("n.mlpackage")  # as the message says


def test_a_copy_is_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version led to a comparison of the model with its copy."""
    monkeypatch.chdir(tmp_path)
    ane.example("tiny", "m.mlpackage")
    done = CliRunner().invoke(app, shlex.split("fix m.mlpackage unroll_loop --out same.mlpackage"))
    assert "It is the model as given" in done.stdout
    assert last(done.stdout).startswith("anesurgery certify same.mlpackage")


def test_on_a_mac_each_command_leads_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`measure` needs no option, as pages and reports name it."""
    monkeypatch.chdir(tmp_path)
    ane.save(ane.load(install(monkeypatch)), "m.mlpackage")
    (tmp_path / "sent").mkdir()
    for words in (
        "measure m.mlpackage --target M4 --runs 2",
        "learn m_measured.json",
        "learn m_measured.json --out rates2.json",
        "measure m.mlpackage --target M4 --runs 2 --out sent/m.json",
        "calibrate sent --out times.json",
    ):
        done = CliRunner().invoke(app, shlex.split(words))
        assert done.exit_code == 0, done.output
        parsed(last(done.stdout))


def parsed(line: str) -> None:
    """See that a command may run: its options exist, nothing is missing, and what it reads is there."""
    words = shlex.split(line)
    if words[0] != "anesurgery":
        assert words[:1] in (["cd"], ["export"])
        return
    group = typer.main.get_command(app)
    command = group.commands[words[1]]  # type: ignore[attr-defined]
    command.make_context(words[1], words[2:])


@pytest.mark.parametrize("line", ["anesurgery tell m", "anesurgery run", "anesurgery see gone.mlpackage"])
def test_a_step_that_cannot_run_is_noticed(line: str) -> None:
    with pytest.raises(Exception, match="gone|tell|Missing parameter: model"):
        parsed(line)


def test_no_command_is_left_out() -> None:
    """An outcome names what follows; a command without it does not pass the type checker."""
    known = {words.split()[0] for words in COMMANDS} | {*ANOTHER, *ELSEWHERE, *MAC, "inspect", "apply"}
    assert set(typer.main.get_command(app).commands) == known  # type: ignore[attr-defined]
    assert inspect.signature(Outcome).parameters["then"].default is inspect.Parameter.empty
