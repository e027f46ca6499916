"""A folder that writes, from a checkpoint: what transformers writes, whatever stopped the build before."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from tokenizers import Tokenizer

import anesurgery as ane
from anesurgery.compressing.modes import read_mode
from anesurgery.errors import InterpretError, LoadError, SurgeryError
from anesurgery.files.runner_file import NAME, hashes_of, read_runner
from anesurgery.interpret.decoding import Decoder
from anesurgery.loading import load
from anesurgery.mil import Array, mb, walk_ops
from anesurgery.shipping import building
from anesurgery.shipping.agreement import AGREE
from anesurgery.shipping.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is made of it."""
    out = tmp_path_factory.mktemp("built") / "out"
    found = ane.build(checkpoint, out, context=40, prefill=8, target="M4/macOS 15", quiet=True)
    assert found.psnr > AGREE
    return out


def greedy(checkpoint: Path, prompt: list[int], steps: int) -> list[int]:
    """What transformers writes."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        made = model.generate(torch.tensor([prompt]), max_new_tokens=steps, do_sample=False, eos_token_id=None)
    return list(map(int, made[0, len(prompt) :]))


def logits_of(checkpoint: Path, ids: list[int]) -> Array:
    """What transformers gives."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        rows: Array = model(torch.tensor([ids])).logits[0].numpy()
    return rows


def test_it_writes_what_transformers_writes(checkpoint: Path, built: Path) -> None:
    prompt = [5, 60, 7, 8, 9, 33, 44, 55, 12, 13, 4]
    assert list(ane.generate(built, prompt, 25, quiet=True).written) == greedy(checkpoint, prompt, 25)
    assert list(ane.stream(built, prompt, 25)) == greedy(checkpoint, prompt, 25)


@pytest.mark.slow
def test_a_head_in_parts_gives_the_likeliest_token_of_each(
    checkpoint: Path, built: Path, tmp_path: Path
) -> None:
    made = ane.build(checkpoint, tmp_path / "out", context=40, prefill=8, head="argmax", quiet=True)
    assert made.psnr > AGREE
    runner = read_runner(tmp_path / "out")
    assert (runner.logits, runner.values, runner.sampling) == ("part_tokens", "part_values", {})
    assert runner.functions["decode"]["outputs"][runner.values]["shape"] == [1, 1, 1]
    prompt = [5, 60, 7, 8, 9, 33, 44, 55, 12, 13, 4]
    expected = ane.generate(built, prompt, 25, quiet=True).written
    assert ane.generate(tmp_path / "out", prompt, 25, quiet=True).written == expected
    assert "".join(ane.chat(tmp_path / "out", "hello", steps=3))
    with pytest.raises(InterpretError, match="no logits to sample from"):
        next(iter(ane.chat(tmp_path / "out", "hello", steps=3, sampler=ane.Sampler(temperature=1.0))))
    ane.swift(tmp_path / "out", tmp_path / "Package")
    fixture = json.loads((tmp_path / "Package" / "Tests" / "RunnerTests" / "fixture.json").read_text())
    assert fixture["written"]


def logits_of_prompts(folder: Path, ids: list[int]) -> Array:
    """After the last token of each prompt, from one token to all."""
    decoder, rows = Decoder(folder), []
    for count in range(1, len(ids) + 1):
        decoder.reset()
        rows.append(decoder.feed(ids[:count], whole=False)[-1])
    return np.stack(rows)


@pytest.mark.slow
def test_a_prompt_of_every_length_gives_the_logits_of_the_checkpoint(
    checkpoint: Path, built: Path, tmp_path: Path
) -> None:
    """By prefills of several lengths, and by steps that read more than the new token."""
    ids = np.random.default_rng(0).integers(0, 250, 40).tolist()
    expected = logits_of(checkpoint, ids)
    ane.build(checkpoint, tmp_path / "out", context=40, prefill=8, shorter=(4,), width=2, quiet=True)
    for folder in (built, tmp_path / "out"):
        error = np.abs(logits_of_prompts(folder, ids) - expected) / np.ptp(expected)
        assert error.max() < 5e-3
    runner = read_runner(tmp_path / "out")
    lengths = {
        name: f["inputs"]["input_ids"]["shape"][-1]
        for name, f in runner.functions.items()
        if f["outputs"].get("logits")
    }
    assert lengths == {"decode": 2, "prefill4": 4, "prefill": 8}
    for name in lengths:  # the head computes one row
        assert runner.functions[name]["outputs"]["logits"]["shape"][:2] == [1, 1]
        assert runner.functions[name]["picks"] in runner.functions[name]["inputs"]
    assert len(Decoder(tmp_path / "out").feed(ids)) == 40


def test_a_row_that_is_not_the_last_one_would_be_seen(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(0).integers(0, 250, 12).tolist()
    right, picked = logits_of_prompts(built, ids), Decoder._one_hot
    monkeypatch.setattr(Decoder, "_one_hot", lambda self, call, place: picked(self, call, max(place - 1, 0)))
    wrong = logits_of_prompts(built, ids)
    assert np.abs(right - wrong).max() > 0.1 * np.ptp(right)


@pytest.mark.slow
def test_a_mixture_of_experts_is_built(tmp_path: Path) -> None:
    """transformers groups and sorts the tokens by experts, which keeps no axis of tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(
        **sizes,
        vocab_size=50,
        num_hidden_layers=1,
        num_local_experts=3,
        max_position_embeddings=16,
        initializer_range=0.2,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    made = ane.build(tmp_path / "checkpoint", tmp_path / "out", context=16, prefill=4, quiet=True)
    assert any("has no tokenizer" in note for note in made.notes)
    written = ane.generate(tmp_path / "out", [5, 20, 7], 12, quiet=True).written
    assert list(written) == greedy(tmp_path / "checkpoint", [5, 20, 7], 12)


@pytest.mark.slow
def test_experts_that_are_chosen_by_groups_are_built(tmp_path: Path) -> None:
    """The groups are a mask that is scattered into, row by row."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    latent = {
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    }
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config = DeepseekV3Config(
        **sizes,
        **latent,
        **experts,
        vocab_size=50,
        num_hidden_layers=1,
        first_k_dense_replace=0,
        moe_intermediate_size=16,
        max_position_embeddings=16,
        initializer_range=0.2,
    )
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    ane.build(tmp_path / "checkpoint", tmp_path / "out", context=16, prefill=4, quiet=True)
    program = load(tmp_path / "out/model.mlpackage").program
    kinds = {op.op_type for function in program.functions.values() for op in walk_ops(function)}
    assert not any(kind.startswith("scatter") for kind in kinds)  # none is placed on the ANE
    written = ane.generate(tmp_path / "out", [5, 20, 7], 12, quiet=True).written
    assert list(written) == greedy(tmp_path / "checkpoint", [5, 20, 7], 12)


def test_the_folder_says_all_that_a_runner_needs(built: Path) -> None:
    runner = read_runner(built)
    assert sorted(runner.functions) == ["decode", "decode_inputs", "prefill", "prefill_inputs"]
    assert (runner.tokens, runner.logits, runner.context, runner.ends) == ("input_ids", "logits", 40, (1,))
    assert runner.functions["prefill"]["inputs"]["input_ids"] == {"shape": [1, 8], "dtype": "int32"}
    assert runner.functions["decode"]["states"]["cache_0"]["shape"] == [4, 2, 40, 8]
    assert runner.special["bos_token"] == "<s>"
    made = runner.functions["decode_inputs"]["outputs"]
    given = runner.functions["decode"]["inputs"]
    assert made
    assert all(given[name] == port for name, port in made.items())
    assert not (built / building.STAGES).exists()
    assert "Against the checkpoint" in str(
        ane.Build(built, *_of(json.loads((built / "report.json").read_text())))
    )


def test_a_model_of_pictures_and_text_ends_as_its_text_config_says(tmp_path: Path) -> None:
    from transformers import Gemma3Config

    assert Checkpoint(tmp_path, Gemma3Config(text_config={"eos_token_id": [7, 9]})).ends == (7, 9)


def _of(report: dict[str, Any]) -> list[Any]:
    options = building.Options(**report.pop("options"))
    return [options, *(report[name] for name in ("bytes", "chunks", "psnr", "top", "off", "placed", "notes"))]


@pytest.mark.parametrize("part", ["model.mlpackage/Data/com.apple.CoreML/weights/weight.bin", "tokenizer.json"])
def test_a_file_that_was_changed_is_an_error(built: Path, tmp_path: Path, part: str) -> None:
    copy = shutil.copytree(built, tmp_path / "copy")
    content = bytearray((copy / part).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / part).write_bytes(content)
    with pytest.raises(LoadError, match="is not the file that runner.json names"):
        ane.chat(copy, "hello")


@pytest.mark.slow
def test_chunks_write_the_same(checkpoint: Path, built: Path, tmp_path: Path) -> None:
    found = ane.build(checkpoint, tmp_path / "out", context=40, prefill=8, limit="30 KB", quiet=True)
    assert found.chunks > 1
    runner = read_runner(tmp_path / "out")
    assert len(runner.chunks) == found.chunks
    prompt = [5, 60, 7]
    rows = [Decoder(folder).feed(prompt) for folder in (built, tmp_path / "out")]
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-3, atol=1e-3 * float(np.abs(rows[0]).max()))
    sizes = [sum(f.stat().st_size for f in folder.rglob("weight.bin")) for folder in (built, tmp_path / "out")]
    assert sizes[1] < 1.2 * sizes[0]
    said = [note for note in found.notes if "more weights than the whole" in note]
    assert bool(said) is (sizes[1] / sizes[0] - 1 > building.TWICE)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose head reads its table of embeddings."""
    return save_checkpoint(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def weights(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("weight.bin"))


@pytest.mark.slow
def test_a_tied_table_is_stored_once_in_all_chunks(tied: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"context": 32, "prefill": 8, "quiet": True}
    whole = ane.build(tied, tmp_path / "whole", **options)
    cut = ane.build(tied, tmp_path / "cut", limit="30 KB", **options)
    assert cut.chunks > 1
    assert not any("more weights" in note for note in cut.notes)
    assert weights(cut.folder) <= 1.01 * weights(whole.folder) + 1024 * cut.chunks  # each file has its ends
    runner = read_runner(cut.folder)
    (place,) = runner.functions["decode_inputs"]["chunks"]
    assert place == cut.chunks - 1  # beside the head
    assert {"input_ids", "position"} == runner.functions["decode_inputs"]["inputs"].keys()
    assert "input_ids" not in runner.functions["decode"]["inputs"]
    prompt = [5, 60, 7, 8, 9, 33, 44, 55, 12, 13, 4]
    assert ane.generate(cut.folder, prompt, 18, quiet=True).written == tuple(greedy(tied, prompt, 18))


@pytest.mark.slow
def test_a_tied_table_that_two_chunks_store_is_said(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "tied", False)
    found = ane.build(tied, tmp_path / "out", context=16, prefill=8, limit="30 KB", quiet=True)
    (note,) = (note for note in found.notes if "more weights than the whole" in note)
    table = 2 * 32 * 301 / weights(tmp_path / "out")
    more = float(note.split("have ")[1].split("%")[0]) / 100
    assert abs(more / (1 + more) - table) < 0.1


@pytest.mark.slow
def test_a_packed_table_in_parts_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more words than a head of one piece has, the parts of 4 bits are looked up in as well."""
    monkeypatch.setattr(building._Builder, "judge_model", lambda *_: None)  # only what is stored is looked at
    words, width = 16500, 32
    source = save_checkpoint(tmp_path / "checkpoint", layers=1, tie_word_embeddings=True, vocab_size=words)
    options: dict[str, Any] = {"context": 16, "prefill": 8, "bits": 4, "quiet": True}
    table = words * width / 2 + 2 * words  # with a scale of each row
    stored = weights(ane.build(source, tmp_path / "out", **options).folder)
    assert table < stored < 1.3 * table  # a bias of each row, and what is small, are much for so few columns
    monkeypatch.setattr(Checkpoint, "tied", False)
    assert weights(ane.build(source, tmp_path / "twice", **options).folder) > stored + 0.9 * table


@pytest.mark.slow
def test_fewer_bits_are_said_with_what_they_cost(checkpoint: Path, built: Path, tmp_path: Path) -> None:
    found = ane.build(checkpoint, tmp_path / "out", context=40, prefill=8, bits=8, quiet=True)
    whole = json.loads((built / "report.json").read_text())
    assert found.bytes < whole["bytes"] - 8_000  # of a table of 301 x 32, at 8 bits; the rest is small
    assert 10 < found.psnr < whole["psnr"]
    (note,) = found.notes
    assert note.startswith(f"weights of 8 bits change the logits: {found.psnr:.1f} dB beside those of the")
    assert len(list(ane.stream(tmp_path / "out", [5, 60], 5))) == 5


@pytest.mark.slow
def test_a_build_loses_no_more_than_its_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong versions: one packs fewer bits than it says, one holds other numbers than those that are packed."""
    checkpoint = save_checkpoint(tmp_path / "checkpoint", layers=1)
    options: dict[str, Any] = {"context": 40, "prefill": 8, "bits": 8, "quiet": True}
    with monkeypatch.context() as patch:
        patch.setattr(building, "read_mode", lambda _: read_mode("linear-4"))
        with pytest.raises(SurgeryError, match="weights of 8 bits lose more than they must: .* dB"):
            ane.build(checkpoint, tmp_path / "coarse", **options)
    monkeypatch.setattr(building._Builder, "unpacked_package", lambda own, _: own.converted_package())
    with pytest.raises(SurgeryError, match="weights of 8 bits give other logits than the numbers"):
        ane.build(checkpoint, tmp_path / "other", **options)
    assert not any((tmp_path / name / "runner.json").exists() for name in ("coarse", "other"))


@pytest.mark.slow
def test_a_text_says_how_weights_are_rounded(checkpoint: Path, tmp_path: Path) -> None:
    """On text like that of the samples the error is less than with weights that are rounded to the nearest."""
    words = np.random.default_rng(0).choice(["hello", "world", "you?", "I am well,", "how are"], 60)
    (tmp_path / "text.txt").write_text(" ".join(words))
    (tmp_path / "short.txt").write_text("hello")
    options: dict[str, Any] = {"context": 16, "prefill": 8, "bits": 4, "quiet": True}
    near = ane.build(checkpoint, tmp_path / "near", **options)
    made = ane.build(checkpoint, tmp_path / "out", samples=tmp_path / "text.txt", **options)
    assert made.options.samples == "text.txt"
    assert any(note.startswith("weights were rounded by ") for note in made.notes)
    assert made.bytes < 1.2 * near.bytes
    ids = (
        Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
        .encode("hello world, how are you? I am")
        .ids
    )
    expected = logits_of(checkpoint, ids[:16])
    errors = [float(np.square(Decoder(b.folder).feed(ids[:16]) - expected).mean()) for b in (made, near)]
    assert errors[0] < errors[1]
    with pytest.raises(SurgeryError, match="holds . tokens, and a sample is 16 of them"):
        ane.build(checkpoint, tmp_path / "no", samples=tmp_path / "short.txt", **options)
    with pytest.raises(SurgeryError, match="give bits=4 or 8 too"):
        ane.build(checkpoint, tmp_path / "no", samples=tmp_path / "text.txt", quiet=True)


STOPPED = ("converted", "cached", "hashes")


@pytest.mark.quick_cases("converted")
@pytest.mark.parametrize("at", STOPPED)
def test_a_stopped_build_goes_on_to_the_same_bytes(
    checkpoint: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    options: dict[str, Any] = {"context": 40, "prefill": 8, "target": "M4/macOS 15", "quiet": True}
    with monkeypatch.context() as patch:
        if at == "hashes":
            patch.setattr(building, "hashes_of", stop)
        else:
            patch.setattr(
                building._Builder, "compressed_package" if at == "converted" else "write_folder", stop
            )
        with pytest.raises(KeyboardInterrupt):
            ane.build(checkpoint, tmp_path / "out", **options)
    assert not (tmp_path / "out" / "runner.json").exists()
    monkeypatch.setattr(building, "convert", stop)  # what is there already is not made again
    mb._get_free_name("const")  # what another conversion leaves behind
    ane.build(checkpoint, tmp_path / "out", **options)
    files = [
        sorted(p.relative_to(f).as_posix() for p in f.rglob("*") if p.is_file())
        for f in (built, tmp_path / "out")
    ]
    assert files[0] == files[1]
    assert hashes_of(built, files[0]) == hashes_of(tmp_path / "out", files[0])


@pytest.mark.slow
def test_stages_of_other_options_are_made_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(building._Builder, "write_folder", stop)
        with pytest.raises(KeyboardInterrupt):
            ane.build(checkpoint, tmp_path / "out", context=24, prefill=8, quiet=True)
    found = ane.build(checkpoint, tmp_path / "out", context=40, prefill=8, quiet=True)
    assert read_runner(tmp_path / "out").context == found.options.context == 40


def spoil(name: str, content: str | None) -> Callable[[Path], None]:
    """Change or remove a file of a checkpoint."""

    def change(folder: Path) -> None:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(content)

    return change


def configured(**values: Any) -> Callable[[Path], None]:
    """Change a config."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 123\n"
INDEX = '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'


@pytest.mark.one_of(4)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (spoil("config.json", None), "holds no config.json"),
        (spoil("config.json", "{"), "transformers cannot read it"),
        (spoil("config.json", '{"model_type": "vit"}'), "cannot load it as a causal language model"),
        (spoil("model.safetensors", None), r"holds no \.safetensors"),
        (spoil("model.safetensors", "x"), r"model\.safetensors is damaged"),
        (spoil("model.safetensors", POINTER), r"model\.safetensors is a pointer of Git LFS"),
        (spoil("model.safetensors.index.json", INDEX), r"model-2\.safetensors is not there"),
        (spoil("tokenizer.json", "{"), r"tokenizer\.json cannot be read"),
        (configured(num_hidden_layers=9), r"the weights have no model\.layers.*; and \d+ more"),
        (configured(intermediate_size=24), r"mlp\.\w+\.weight is \(.*\) in the weights and \(.*24.*by config"),
    ],
)
def test_bad_checkpoints_are_errors_in_words(
    checkpoint: Path, tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    change(copy)
    with pytest.raises(LoadError, match=words):
        ane.build(copy, tmp_path / "out", context=16, quiet=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 49}, "made for 48 positions"),
        ({"context": 1}, "2 or more"),
        ({"bits": 5}, "4 or 8"),
        ({"limit": "much"}, "is not a size"),
        ({"cache": "disk"}, "'state' or 'io'"),
        ({"shorter": (64,)}, r"shorter=\(64,\); each must be longer than decode"),
        ({"width": 0}, "width=0"),
        ({"target": "M99"}, "M99"),
    ],
)
def test_bad_options_are_errors_in_words(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(SurgeryError, match=words):
        ane.build(checkpoint, tmp_path / "out", quiet=True, **options)
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_not_replaced_unasked(checkpoint: Path, built: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="holds a finished build"):
        ane.build(checkpoint, built, quiet=True)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LoadError, match="is not empty, and holds no build"):
        ane.build(checkpoint, tmp_path, quiet=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def command(*words: str | Path, limit: float | None = None) -> str | None:
    """What a command says; None where it was killed after `limit` seconds."""
    child = subprocess.Popen(
        [sys.executable, "-m", "anesurgery", *map(str, words)], stdout=subprocess.PIPE, text=True
    )
    try:
        said = child.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
        child.communicate()
        return None
    assert child.returncode == 0
    return said


def hashes_in(folder: Path) -> dict[str, str]:
    """Of all its files."""
    return hashes_of(folder, sorted(f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()))


@pytest.mark.slow
def test_a_build_that_is_killed_ten_times_ends_with_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    """From the folder to a chat in one command, which is killed at any time."""
    options = ["--context", "40", "--prefill", "8", "--limit", "30 KB", "--quiet"]
    command("build", checkpoint, tmp_path / "whole", *options)
    expected = hashes_in(tmp_path / "whole")
    draw, most, kills, stages = random.Random(0), 8.0, 0, set[str]()
    while kills < 10 or len(stages) < 3:
        before = set(stages)
        killed = (
            command("build", checkpoint, tmp_path / "out", *options, limit=draw.uniform(0.1, 1) * most) is None
        )
        if killed and not (tmp_path / "out" / NAME).exists():
            kills += 1
            stages |= {file.name for file in (tmp_path / "out" / building.STAGES).glob("*.json")}
            most *= 1.0 if stages > before else 1.2  # a slow machine comes no further
        else:  # it was finished before, or when it was killed: begin anew
            assert hashes_in(tmp_path / "out") == expected
            shutil.rmtree(tmp_path / "out")
    assert stages == {"converted.json", "cached.json", "chunks.json"}  # killed after each of them
    said = command("build", checkpoint, tmp_path / "out", *options, "--chat", "hello")
    assert hashes_in(tmp_path / "out") == expected
    assert said == "".join(ane.chat(tmp_path / "whole", "hello")) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["M4/macOS 15", "M1/macOS 15"])
def test_a_step_has_no_switches_between_its_layers(tmp_path: Path, target: str) -> None:
    """Layers of the size of a model with 0.1 billion weights."""
    sizes: dict[str, Any] = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    }
    usual: dict[str, Any] = {"max_position_embeddings": 512, "initializer_range": 0.02}
    source = save_checkpoint(tmp_path / "checkpoint", layers=4, **sizes, **usual)
    built = ane.build(source, tmp_path / "out", target=target, quiet=True)
    for name in ("decode", "prefill"):
        found = ane.inspect(built.folder / "model.mlpackage", target=target, function=name)
        assert found.residency["ops"] > 0.95
        assert len(found.segments) <= 3
