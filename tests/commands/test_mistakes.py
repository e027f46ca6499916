"""What a user may give by mistake: an error says what, where and what to do, and nothing is written."""

from __future__ import annotations

import os
import shlex
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands.app import app
from anesurgery.errors import SurgeryError

LONGEST = 320
"""Characters of an error at most, four lines of a terminal; most have half of it."""
EMPTY_FILES = """
empty.mlpackage empty.mlmodel a.tflite a.pt a.pth a.pth.tar a.ckpt a.torchscript a.pkl a.pb a.engine a.h5
a.keras a.gguf a.safetensors a.bin a.mlmodelc empty.txt empty.npz
"""
TEXTS = {
    "text.mlmodel": "hello",
    "a.onnx": "zz",
    "lengths.txt": "abc\n",
    "bad.json": "{",
    "plan.json": '{"format": "other"}',
    "bad.npz": "xx",
    "config.json": "{}",
    "steps.json": '{"format": "anesurgery.steps/1"}',
    "negative.txt": "5\n-3\n",
    "a.onnx.data": "zz",
    "lfs.mlmodel": "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345\n",
}
FOLDERS = "folder.mlpackage empty_folder e.aimodel f.mlmodelc saved_model"
INPUTS: dict[str, dict[str, np.ndarray]] = {
    "wrong_name.npz": {"foo": np.zeros(3)},
    "wrong_shape.npz": {"input_ids": np.zeros((3, 3), np.int32)},
    "nan.npz": {"input_ids": np.full((1, 16), np.nan, np.float32)},
    "halves.npz": {"input_ids": np.full((1, 16), 0.5, np.float32)},
    "none.npz": {},
    "objects.npz": {"input_ids": np.array([{}], dtype=object)},
    "words.npz": {"input_ids": np.full((1, 16), "a")},
    "complex.npz": {"input_ids": np.zeros((1, 16), np.complex64)},
    "large.npz": {"input_ids": np.full((1, 16), 10**12)},
    "out_of_table.npz": {"input_ids": np.full((1, 16), 5000, np.int32)},
    "more.npz": {"input_ids": np.zeros((1, 16), np.int32), "mask": np.zeros(3)},
    "flat.npz": {"input_ids": np.zeros(16, np.int32)},
    "no_rows.npz": {"input_ids": np.zeros((0, 16), np.int32)},
}


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, and many files that are none."""
    folder = tmp_path_factory.mktemp("bad")
    model = ane.example("tiny", folder / "m.mlpackage")
    ane.example("network", folder / "n.mlmodel")
    for name in EMPTY_FILES.split():
        (folder / name).touch()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    for name in FOLDERS.split():
        (folder / name).mkdir()
    for name, arrays in INPUTS.items():
        np.savez(folder / name, **arrays)  # type: ignore[arg-type]
    with zipfile.ZipFile(folder / "none.zip", "w") as file:
        file.writestr("readme.txt", "x")
    for name, (part, damage) in DAMAGES.items():
        copy = shutil.copytree(model, folder / f"{name}.mlpackage")
        (held,) = copy.rglob(part)
        held.write_bytes(damage(held.read_bytes()))
    (folder / "utf16.json").write_bytes("{}".encode("utf-16"))
    (no_weights,) = (folder / "no_weights.mlpackage").rglob("weight.bin")
    no_weights.unlink()
    _several(folder, model)
    return folder


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "cut": ("*.mlmodel", lambda content: content[:100]),
    "short": ("weight.bin", lambda content: content[:100]),
    "last_bytes": ("weight.bin", lambda content: content[:-10]),
    "zeros": ("weight.bin", lambda content: bytes(len(content))),
    "no_weights": ("weight.bin", lambda content: content),
    "manifest": ("Manifest.json", lambda content: b"{}"),
    "no_json": ("Manifest.json", lambda content: b"{"),
}
"""What may happen to a package on its way."""


def _several(folder: Path, model: Path) -> None:
    """A folder of two packages, zips, links that lead nowhere, and a name that is no UTF-8."""
    (folder / "saved_model" / "saved_model.pb").touch()
    for name in ("one", "other"):
        shutil.copytree(model, folder / "two" / f"{name}.mlpackage")
    with zipfile.ZipFile(folder / "two.zip", "w") as file:
        for path in (folder / "two").rglob("*"):
            file.write(path, path.relative_to(folder))
    with zipfile.ZipFile(folder / "part.zip", "w") as file:
        file.write(model / "Manifest.json", "m.mlpackage/Manifest.json")
    (folder / "link.mlpackage").symlink_to("nowhere.mlpackage")
    (folder / "loop.mlpackage").symlink_to("loop.mlpackage")
    os.mkdir(os.fsencode(folder) + b"/caf\xe9.mlpackage")


@pytest.fixture
def unchanged(there: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In that folder, in which nothing is made or changed."""
    monkeypatch.chdir(there)
    monkeypatch.setenv("COLUMNS", "80")
    before = {path: path.lstat().st_mtime_ns for path in there.rglob("*")}
    yield
    assert {path: path.lstat().st_mtime_ns for path in there.rglob("*")} == before


CASES = {
    # what is no model
    "see nothing.mlpackage": "does not exist; in its folder: ",
    "plan nothing.mlpackage auto": "does not exist; in its folder: ",
    "prove m.mlpackage nothing.mlpackage": "does not exist; in its folder: ",
    "diff m.mlpackage nothing.mlpackage": "does not exist; in its folder: ",
    "compare m.mlpackage nothing.mlpackage": "does not exist; in its folder: ",
    "see m.mlpackage nothing.mlpackage": "does not exist; in its folder: ",
    "ranges nothing.mlpackage": "does not exist; in its folder: ",
    "to-coreml nothing.aimodel x.mlpackage": "does not exist",
    "ranges m.mlpackage --save config.json": "config.json exists; choose another name, or use --overwrite",
    "ranges m.mlpackage --save nowhere/x.json": "the folder nowhere does not exist",
    "sensitivity m.mlpackage --save config.json": "config.json exists",
    "certify m.mlpackage --feedback a=b --feedback a=c": "the output a is fed back to b already",
    "certify m.mlpackage --feedback a": "--feedback a: write it as OUTPUT=INPUT",
    "see empty.mlpackage": "holds no model.*convert it again",
    "see empty.mlmodel": "holds no model.*convert it again",
    "see text.mlmodel": "is not a Core ML model, or is damaged; give an .mlmodel",
    "see folder.mlpackage": "lacks its Manifest.json; copy the whole package again",
    "see no_json.mlpackage": r"understood: it is no JSON \(line 1, column 2\); copy the package again",
    "see empty_folder": "holds no model; models end in .mlpackage",
    "see e.aimodel": "lacks metadata.json.*copy the whole folder again",
    "see f.mlmodelc": "lacks model.mil; copy the compiled model again",
    "see a.mlmodelc": "holds no model",
    "see a.tflite": "a LiteRT file, which coremltools does not read: convert the model that it was made of",
    "see a.pt": "a PyTorch file: load the module, and give it to",
    "see a.pth": "a PyTorch file: load the module, and give it to",
    "see a.h5": "a Keras file: convert what",
    "see a.keras": "a Keras file: convert what",
    "see a.gguf": "made for llama.cpp: give the folder of the checkpoint to `anesurgery build`",
    "see a.safetensors": "weights alone: give the folder of its checkpoint to `anesurgery build`",
    "see a.bin": "a part of a model: give the whole model",
    "see none.zip": "holds no model; zip the .mlpackage, the whole folder",
    "see cut.mlpackage": "is damaged; give",
    "see short.mlpackage": "ends at byte 100, but the model needs.*copy the package again",
    "run no_weights.mlpackage": "has no weights/weight.bin.*copy the package again",
    "decompile m.mlpackage --out d.mlpackage": "is not a compiled model; give an .mlmodelc folder",
    "executorch a.bin": "is empty; copy it again",
    "executorch text.mlmodel": "is no program of ExecuTorch",
    "to-coreml m.mlpackage x.mlpackage": "is no .aimodel; give a model of Core AI",
    "lint m.mlpackage": "is no .aimodel; `anesurgery see` reports on other models",
    "build nothing out": "holds no config.json; give a folder",
    "build empty_folder out": "holds no config.json; give a folder",
    "chat empty_folder hello": "`anesurgery build` makes such a folder",
    "swift empty_folder --to x": "`anesurgery build` and `anesurgery sizes` make such folders",
    "see last_bytes.mlpackage": "the file is cut short; copy the package again",
    "run zeros.mlpackage": "holds no weight at offset 64; the file is damaged, copy it again",
    "see manifest.mlpackage": "'itemInfoEntries' is missing; copy the package again",
    "see lfs.mlmodel": "a pointer of Git LFS to 12,345 bytes that were not fetched; run `git ",
    "see link.mlpackage": "is a link that leads nowhere; copy the model itself",
    "see loop.mlpackage": "is a link that leads nowhere; copy the model itself",
    "see caf\udce9.mlpackage": "lacks its Manifest.json; copy the whole package again",
    "see ''": "the name of the model is empty; if a variable of the shell gave it, set that first",
    "see m.mlpackage/Data": "is a part of .*m.mlpackage; give that",
    "see https://example.com/m.mlpackage": "^https://example.com/m.mlpackage is an address; download the model",
    "see openai/gpt2": "download that checkpoint, and give its folder to `anesurgery build`",
    "see two.zip": r"two.zip holds 2 models \(two/one.mlpackage, two/other.mlpackage\); unzip it, and give one",
    "see part.zip": "^part.zip: m.mlpackage lacks its specification .*; make the archive again",
    "fix two auto": "two is a folder of models; give one of them: one.mlpackage, other.mlpackage",
    "compare m.mlpackage two": "two is a folder of models; give one of them",
    "see a.pth.tar": "a PyTorch file: load the module",
    "see a.ckpt": "a PyTorch file: load the module",
    "see a.torchscript": "a PyTorch file: load the module",
    "see a.pkl": "a Python pickle: load what it holds as its author says",
    "see a.pb": "a TensorFlow model: convert it with coremltools.convert",
    "run saved_model": "a TensorFlow model: convert it with coremltools.convert",
    "see a.engine": "made by TensorRT for one GPU: convert the model that it was made of",
    "see a.onnx.data": "a part of a model: give the whole model",
    "see config.json": "a part of a model: give the whole model",
    "see bad.npz": "a file of arrays: give it as --inputs, and name the model first",
    "swift n.mlmodel --to x": "`anesurgery build` and `anesurgery sizes` make such folders",
    # how a command is written
    "see": "Missing argument 'model'; `.* see --help` shows what it takes",
    "sea m.mlpackage": r"No such command 'sea'. Did you mean 'see'\?; `.* --help` shows",
    "optimize m.mlpackage": "no command 'optimize'; say `anesurgery fix`",
    "m.mlpackage": "no command 'm.mlpackage'; say `anesurgery see m.mlpackage`",
    "convert a.pt": r"`anesurgery to-coreai` or `to-coreml`; in Python, apply\(module, 'auto', inputs=x\)",
    "fix m.mlpackage iPhone13": "'iPhone13' is a target: say --target iPhone13",
    "--nosuch": "No such option: --nosuch; `.* --help` shows",
    "see m.mlpackage --traget x": "No such option: --traget; did you mean '--target'.*; `.* see --help` shows",
    "see m.mlpackage --target": "Option '--target' requires an argument; `.* see --help` shows what it takes",
    "see m.mlpackage m.mlpackage m.mlpackage": "Got unexpected extra argument.*; `.* see --help` shows",
    "see m.mlpackage --jobs 0": "'--jobs': .* greater than or equal to 1; `.* see --help` shows",
    "certify m.mlpackage --gate abc": "'--gate': .* valid number.*; `.* certify --help` shows",
    "compare m.mlpackage": "Missing argument 'b'; `.* compare --help` shows",
    "serve --port 99999999": "less than or equal to 65535; `.* serve --help` shows",
    "review nothing": "Missing option '--base'; `.* review --help` shows",
    # targets and names
    "see m.mlpackage --target iphone99": "unknown chip or device 'iphone99'; did you mean",
    "see m.mlpackage --target M11": "unknown chip or device 'M11'; did you mean 'M1'",
    "see m.mlpackage --target 'M1/makOS 14'": "unknown OS 'makOS 14'; did you mean 'macOS 14'",
    "see m.mlpackage --target 'M4/macOS 13'": "macOS 13 does not run on M4",
    "see m.mlpackage --target M1/macOS": "unknown OS 'macOS'; did you mean 'macOS 27'",
    "see m.mlpackage --target ''": 'write it as "M1/macOS 14"',
    "see m.mlpackage --target iPhone13/macOS14": "macOS 14 does not run on A15",
    "see m.mlpackage --target 'iPhone 13 Pro Max Ultra'": "unknown chip or device 'iPhone 13 Pro Max Ultra'",
    "see m.mlpackage --target 'M1 Ultra Max'": "unknown chip or device 'M1 Ultra Max'",
    "see m.mlpackage --target android": "'android'; `anesurgery chips` lists what target takes",
    "see m.mlpackage --target 'iPhone 13/iOS 30'": "unknown OS 'iOS 30'; did you mean 'iOS 27'",
    "see m.mlpackage --target M4/macOS15/CPU": 'write it as "M1/macOS 14", "M1" or "macOS 14"',
    "run m.mlpackage --precision ane:M99": "nothing is known of the arithmetic of chip 'M99'; known: M1",
    "ranges m.mlpackage --chip M99": "nothing is known of the arithmetic of chip 'M99'",
    "run m.mlpackage --function man": "unknown function 'man'",
    "see m.mlpackage --compute-units NE": "unknown compute units 'NE'",
    "see m.mlpackage --function nope": "unknown function 'nope'; known: main",
    "see m.mlpackage --why nope": "unknown op 'nope'; known: ",
    "see m.mlpackage --why y --html w.html": "--why and --html cannot be asked for at once; choose one",
    "see m.mlpackage --why y --measured": "--why and --measured cannot be asked for at once; choose one",
    "see m.mlpackage --why y --rates bad.json": "is no table of rates.*write one with `anesurgery learn`",
    "see m.mlpackage --why y --gate 50": "--gate has no effect without --fix; leave it out",
    "see m.mlpackage --why y --overwrite": "--overwrite has no effect without --fix or --html; leave it out",
    "see m.mlpackage --compute-units CPU": "did you mean 'CPU_ONLY'",
    "fix m.mlpackage nosuch": "unknown pass or recipe 'nosuch'; `anesurgery list` lists them",
    "fix m.mlpackage gpt2_anee": "did you mean 'gpt2_ane'",
    "fix m.mlpackage pad_last_axs": "did you mean 'pad_last_axis'",
    "fix m.mlpackage , x.mlpackage": "no recipe or pass is named",
    "fix m.mlpackage pad_last_axis x.mlpackage --set multipel=32": "did you mean 'multiple'",
    "fix m.mlpackage pad_last_axis x.mlpackage --set multiple": "write it as option=value",
    "fix m.mlpackage pad_last_axis x.mlpackage --set multiple=0": "must be a positive integer",
    "fix m.mlpackage auto --prove maybe": "'maybe'; known: both, model, none, sites",
    "fix m.mlpackage auto --prove yes": "did you mean 'sites'",
    "fix m.mlpackage auto --require gold": "it may be checked, exhaustive, proved, bits",
    "fix m.mlpackage auto --set nosuch=1": "unknown option of auto: 'nosuch'; known: ",
    "explain nosuch": "unknown pass or recipe 'nosuch'",
    "explain pad_last_axes": "did you mean 'pad_last_axis'",
    "list pass": "did you mean 'passes'",
    "example nosuch": "unknown example 'nosuch'; known: bert, gpt2",
    "chips --target iphone99": "unknown chip or device",
    "list nosuch": "known: all, passes, recipes",
    "draw m.mlpackage --out a.svg --around nope": "unknown op 'nope'; known: ",
    "extract m.mlpackage nope --out x.mlpackage": "unknown function 'nope'; known: main",
    "compare m.mlpackage m.mlpackage --engine metal": "unknown engine 'metal'; known: ",
    "run m.mlpackage --precision int8": "it may be 'fp32' or 'fp16' or 'ane'",
    # a model that does not fit
    "fix m.mlpackage unet_ane": "is not for this model: the model has no convolution",
    "prove m.mlpackage n.mlmodel": "the models take different inputs, input_ids and picture",
    "compare m.mlpackage n.mlmodel": "the models take different inputs, input_ids and picture",
    "generate n.mlmodel --ids 1": "20 steps do not fit into the context of 3, the length of the input picture",
    "merge a=m.mlpackage --out x.mlpackage": "merge takes two models or more, by names such as prefill",
    "merge 1a=m.mlpackage b=m.mlpackage --out x.mlpackage": "'1a' is no name of a function; take letters",
    "split m.mlpackage --max-size 1B --out s": "cannot be cut between; the limit is 1 byte",
    "split m.mlpackage --parts 999 --out s": "it can be cut into 13 parts at most",
    "merge m.mlpackage --out x.mlpackage": "is not NAME=MODEL, as prefill=prefill.mlpackage",
    # inputs
    "see m.mlpackage --inputs nowhere.npz": "cannot be read as an .npz file: No such file",
    "run m.mlpackage --inputs m.mlpackage/Manifest.json": "cannot be read as an .npz file",
    "see m.mlpackage --inputs bad.npz": "it is no archive of arrays; write one with np.savez",
    "see m.mlpackage --inputs wrong_name.npz": "unknown input 'foo'; known: input_ids",
    "fix m.mlpackage auto --inputs wrong_shape.npz": r"has shape \(3, 3\), expected \(1, 16\)",
    "fix m.mlpackage auto --inputs nan.npz": "holds nan, and the model takes integers; give int32",
    "run m.mlpackage --inputs halves.npz": "holds 0.5, and the model takes integers; give int32",
    "fix m.mlpackage auto --inputs none.npz": "missing input 'input_ids'",
    "run m.mlpackage --inputs empty_folder": "it is a folder; name one of its files",
    "certify m.mlpackage --inputs empty_folder": "holds no .npz file; write one with np.savez",
    "run m.mlpackage --inputs objects.npz": "it holds Python objects; save arrays of numbers",
    "run m.mlpackage --inputs empty.npz": "it is empty; write one with np.savez",
    "run m.mlpackage --inputs words.npz": "holds text, expected int32",
    "run m.mlpackage --inputs complex.npz": "holds complex64, expected int32",
    "run m.mlpackage --inputs large.npz": "indexes a table of 96 rows; give ids from 0 to 95",
    "certify m.mlpackage --inputs out_of_table.npz": "holds 5000, and indexes a table of 96 rows",
    "fix m.mlpackage auto --inputs out_of_table.npz": "holds 5000, and indexes a table of 96 rows",
    "prove m.mlpackage --inputs out_of_table.npz": "holds 5000, and indexes a table of 96 rows",
    "compress m.mlpackage c.mlpackage --inputs out_of_table.npz": "holds 5000, and indexes a table of 96 rows",
    "sensitivity m.mlpackage --inputs out_of_table.npz": "holds 5000, and indexes a table of 96 rows",
    "run m.mlpackage --inputs more.npz": "unknown input 'mask'; known: input_ids",
    "run m.mlpackage --inputs flat.npz": r"has shape \(16,\), expected \(1, 16\)",
    "run m.mlpackage --inputs no_rows.npz": r"has shape \(0, 16\), expected \(1, 16\)",
    "certify m.mlpackage --feedback logits=input_ids": "for several calls in a row; give --steps 2",
    "certify m.mlpackage --inputs nowhere.npz": "cannot be read as an .npz file",
    "fix m.mlpackage auto --assume input_ids=5": "write it as input_ids=0:50256",
    "fix m.mlpackage auto --assume input_ids=9:2": "ends at 2, before it begins at 9",
    "fix m.mlpackage auto --assume nope=0:5": "unknown input 'nope'; known: input_ids",
    "generate m.mlpackage --ids a,b": "write the tokens as 3,14,15",
    "generate m.mlpackage --ids 1,2": "do not fit into the context of 16",
    "choose-sizes lengths.txt": "line 1 of lengths.txt is 'abc'; write a length",
    "choose-sizes negative.txt": "the length -3 is no whole number from 1",
    "choose-sizes m.mlpackage": "is a folder and no file; give a file",
    "choose-sizes empty.txt": "there are no lengths; give",
    "choose-sizes nothing.txt": "cannot be read: No such file or directory$",
    "sizes m.mlpackage --size nope=1x8 --out s": "unknown input 'nope'; known: input_ids",
    "sizes m.mlpackage --size input_ids=0x16 --out s": "is no name with a shape; write it as input_ids=1x128",
    "sizes m.mlpackage --size input_ids=1x99999999999 --out s": "the memory does not suffice",
    "sizes m.mlpackage --size input_ids --out s": "is no name with a shape",
    # numbers
    "fix m.mlpackage auto --gate nan": "--gate nan; give a PSNR in dB",
    "certify m.mlpackage --gate=-inf": "--gate -inf; give a PSNR in dB",
    "compress m.mlpackage c.mlpackage --bits 99": "it may be 1, 2, 3, 4, 6, 8",
    "compress m.mlpackage c.mlpackage --bits 0": "it may be 1, 2, 3, 4, 6, 8",
    "compress m.mlpackage c.mlpackage --max-size 1B": "--max-size leaves 1 byte to a program, but 10.7 kB",
    "compress m.mlpackage c.mlpackage --form int9": "no form 'int9'; forms are such as",
    "fix m.mlpackage pad_last_axis x.mlpackage --set multiple=-1": "it must be a positive integer",
    "generate m.mlpackage --ids 999999": "999999 is no token of the model; tokens are from 0 to 95",
    "sensitivity m.mlpackage --mode none": "there is no mode 'none'; modes are ",
    # what is written, and what is read beside a model
    "see m.mlpackage --html x.pdf": "x.pdf ends in '.pdf'; let it end in .html",
    "certify m.mlpackage --html x.svg": "x.svg ends in '.svg'; let it end in .html",
    "compress m.mlpackage c.mlpackage --html x": "x ends in ''; let it end in .html",
    "ranges m.mlpackage --save x.pdf": "x.pdf ends in '.pdf'; let it end in .json",
    "learn config.json --out rates.txt": "rates.txt ends in '.txt'; let it end in .json",
    "see m.mlpackage m.mlpackage --status": "AFTER and --status cannot be asked for at once",
    "see m.mlpackage --fix o.mlpackage --segments": "--fix and --segments cannot",
    "see m.mlpackage --fix o.mlmodel": "let it end in .mlpackage",
    "see m.mlpackage --fix m.mlpackage": "is the input, which is never changed",
    "run m.mlpackage --out nowhere/out.npz": "nowhere does not exist; make it first",
    "fix m.mlpackage auto two/one.mlpackage": "exists; choose another name",
    "fix m.mlpackage auto x.mlpackage --out y.mlpackage": "two places to write are named",
    "see m.mlpackage --html nowhere/x.html": "the folder nowhere does not exist; make it first",
    "fix m.mlpackage auto m.mlpackage": "is the input, which is never changed; choose another name",
    "fix m.mlpackage auto m.mlpackage --overwrite": "is the input, which is never changed",
    "fix m.mlpackage x.mlpackage": "is no pass or recipe; to write the result there, say --out x.mlpackage",
    "fix m.mlpackage auto a.txt": "is not a name for this format; let it end in .mlpackage",
    "fix m.mlpackage auto nowhere/x.mlpackage": "does not exist; make it first",
    "fix m.mlpackage auto text.mlmodel/x.mlpackage": "is a file, and no folder; choose another place",
    "see m.mlpackage --html text.mlmodel/x.html": "text.mlmodel is a file, and no folder; choose another place",
    "fix m.mlpackage neuralnetwork_ane --out o.mlpackage": "edit neural networks.*; run anesurgery fix m",
    "fix n.mlmodel gpt2_ane --out o.mlpackage": "no attention was recognized .*; auto is for any model$",
    "fix m.mlpackage auto m.mlpackage/x.mlpackage": "is inside the input, which is never changed",
    "fix m.mlpackage auto /proc/x.mlpackage": "/proc/x.mlpackage was not written: .*; nothing was changed",
    "fix m.mlpackage steps.json": "steps.json: no plan: 'steps' is missing; `anesurgery plan --json`",
    "fix m.mlpackage utf16.json": "is no plan, as it is no text in UTF-8; `anesurgery plan --json` writes one",
    "learn none.npz": "is no recorded plan: it is no .*; record one with `anesurgery measure`",
    "fix m.mlpackage nothing.json": "nothing.json cannot be read: No such file or directory",
    "run m.mlpackage --out r.txt": "r.txt is no name for arrays; let it end in .npz",
    "compress m.mlpackage": "where to write is missing; add it: anesurgery .*--out NAME$",
    "compress m.mlpackage c.mlpackage --bits 5": "--bits 5; it may be .*; an average of others with --mixed$",
    "fix m.mlpackage plan.json": "no plan: .*`anesurgery plan --json` writes one",
    "fix m.mlpackage bad.json": "bad.json is no plan, as it is no JSON .*; `anesurgery plan --json` writes one",
    "run m.mlpackage --out m.mlpackage": "is the input, which is never changed",
    "compress m.mlpackage m.mlpackage --bits 8": "is the input, which is never changed",
    "to-coreai m.mlpackage x.mlpackage": "let it end in .aimodel",
    "draw m.mlpackage --out a.png": "name it .svg or .html; browsers open both",
    "example tiny --out a.txt": "let it end in .mlpackage",
    "example tiny a.txt": "let it end in .mlpackage",
    "see m.mlpackage --rates bad.json": "is no table of rates.*write one with `anesurgery learn`",
    "learn bad.json": "is no recorded plan.*record one with `anesurgery measure`",
    "learn nothing.json": "cannot be read: No such file or directory$",
    "calibrate empty_folder --out t.json": "it holds no .json; write files with `anesurgery measure`",
}
"""Command -> what its error says."""


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("command", CASES)
def test_a_mistake_is_named_with_what_to_do(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["anesurgery", *shlex.split(command)])
    done = CliRunner().invoke(app, shlex.split(command))
    assert isinstance(done.exception, SurgeryError), done.output
    with pytest.raises(SurgeryError, match=CASES[command]):
        raise done.exception
    assert len(str(done.exception)) <= LONGEST
    assert "\n" not in str(done.exception)
