"""Text in, text out: templates, whole characters, stops, and what a checkpoint samples with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import WORDS, save_checkpoint, tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands.app import app
from anesurgery.errors import InterpretError, LoadError, SurgeryError
from anesurgery.files.runner_file import read_runner
from anesurgery.interpret.sampler import Sampler
from anesurgery.shipping.chatting import Text, until


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder that writes, and what it answered in the command that built it."""
    folder = tmp_path_factory.mktemp("chat")
    place = str(save_checkpoint(folder / "checkpoint", layers=1))
    options = ["--context", "40", "--prefill", "8", "--quiet", "--chat", "hello"]
    said = CliRunner().invoke(app, ["build", place, str(folder / "out"), *options], catch_exceptions=False)
    return folder / "out", said.stdout


@pytest.fixture(scope="module")
def built(answered: tuple[Path, str]) -> Path:
    """The folder."""
    return answered[0]


def test_a_checkpoint_answers_in_one_command(answered: tuple[Path, str]) -> None:
    folder, said = answered
    assert said == "".join(ane.chat(folder, "hello")) + "\n"
    assert len(said) > 1


def test_a_prompt_is_written_as_transformers_writes_it(built: Path) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(built.parent / "checkpoint")
    text = Text.of(built, read_runner(built))
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "well"},
        {"role": "user", "content": "你好 🙂"},
    ]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)
    assert text.tokens(messages) == list(getattr(expected, "input_ids", expected))
    assert text.tokens("how are you", template=False) == theirs("how are you")["input_ids"]


def test_the_answer_is_the_text_of_the_tokens(built: Path) -> None:
    text = Text.of(built, read_runner(built))
    pieces = list(ane.chat(built, "hello", steps=20))
    written = ane.generate(built, text.tokens("hello"), 20, stop=1, quiet=True).written
    assert "".join(pieces) == text.tokenizer.decode([t for t in written if t != 1])
    assert list(ane.chat(built, "hello", steps=20)) == pieces


def test_characters_of_several_tokens_come_whole() -> None:
    made = tokenizer()
    text = Text(made, "", {})
    tokens = made.encode("🙂 你好 🙃 ok").ids
    pieces = list(text.pieces(tokens))
    assert "".join(pieces) == "🙂 你好 🙃 ok"
    assert len(pieces) < len(tokens)
    assert not [piece for piece in pieces if "�" in piece]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_lacks_its_end_is_given_at_the_end(cut: int) -> None:
    """The wrong version: what the decoder holds back until it is whole never comes."""
    made = tokenizer()
    tokens = made.encode("ok 🙂").ids[:-cut]
    assert "".join(Text(made, "", {}).pieces(tokens)) == made.decode(tokens)
    assert made.decode(tokens) != "ok "


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.text("abc", max_size=3), max_size=8),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
)
def test_text_ends_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    ends = [place for stop in stops if (place := whole.find(stop)) >= 0]
    found = "".join(until(pieces, stops))
    if not ends:
        assert found == whole
    else:
        assert whole.startswith(found)
        assert not [stop for stop in stops if stop in found]
        assert any(whole[len(found) :].startswith(stop) for stop in stops)


def test_stops_of_text_and_of_tokens(built: Path) -> None:
    whole = "".join(ane.chat(built, "hello", steps=20))
    middle = whole[len(whole) // 2 : len(whole) // 2 + 2]
    assert "".join(ane.chat(built, "hello", steps=20, stop=middle)) == whole[: whole.index(middle)]
    token = ane.generate(built, Text.of(built, read_runner(built)).tokens("hello"), 20, quiet=True).written[3]
    shorter = "".join(ane.chat(built, "hello", steps=20, stop=[token]))
    assert whole.startswith(shorter)
    assert len(shorter) < len(whole)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"prompt": ""}, SurgeryError, "the prompt has no tokens"),
        ({"prompt": "hello " * 60}, InterpretError, "do not fit into the context of 40"),
        ({"prompt": [{"role": "user"}]}, SurgeryError, "is no message"),
        ({"stop": 3.5}, SurgeryError, "neither a text nor a token"),
        ({"stop": [999]}, InterpretError, "999 is no token"),
        ({"seed": -1}, SurgeryError, "seed=-1"),
        ({"steps": 0}, InterpretError, "steps=0"),
    ],
)
def test_bad_options_are_errors_in_words(
    built: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    chosen = {"template": None if "prompt" not in options or options["prompt"] else False}
    with pytest.raises(error, match=words):
        "".join(ane.chat(built, **{"prompt": "hello", **chosen, **options}))


def test_templates_run_in_a_sandbox_and_fail_in_words() -> None:
    hostile = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    for template in (hostile, "{% for", "{{ raise_exception('no system') }}", "{{ messages[7].role }}"):
        with pytest.raises(SurgeryError, match="the chat template failed"):
            Text(tokenizer(), template, {}).rendered([{"role": "user", "content": "x"}])
    with pytest.raises(SurgeryError, match="has no chat template"):
        Text(tokenizer(), "", {}).tokens("x", template=True)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content | tojson(ensure_ascii=False) }}", '"ü"'),
        ("{{ messages[0].content | tojson(true) }}", r'"\u00fc"'),
        ("{% if tools is not none or documents is not none %}tools{% endif %}ü", "ü"),
        ("{% for m in messages %}<{% generation %}{{ m.content }}{% endgeneration %}>{% endfor %}", "<ü>"),
    ],
)
def test_what_templates_of_transformers_write(template: str, text: str) -> None:
    assert Text(tokenizer(), template, {}).rendered([{"role": "user", "content": "ü"}]) == text


def test_a_folder_that_was_not_built_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"holds no runner.json; `anesurgery build` makes"):
        ane.chat(tmp_path, "hello")
    with pytest.raises(LoadError, match=r"nowhere does not exist; `anesurgery build` makes"):
        ane.chat(tmp_path / "nowhere", "hello")
    (tmp_path / "runner.json").write_text('{"format": "anesurgery runner", "version": 99}')
    with pytest.raises(LoadError, match="is of version 99"):
        ane.chat(tmp_path, "hello")


def test_unlikely_tokens_and_repetitions() -> None:
    logits, rng = np.log(np.array([0.6, 0.3, 0.1])), np.random.default_rng(0)
    drawn = {Sampler(temperature=1, min_p=0.4)(logits, rng) for _ in range(50)}
    assert drawn == {0, 1}
    assert Sampler(repetition_penalty=4.0)(np.array([2.0, 1.0, -1.0]), rng, [0, 0]) == 1
    assert Sampler(repetition_penalty=4.0)(np.array([-1.0, -2.0]), rng, [0]) == 1
    with pytest.raises(InterpretError, match="min_p=2"):
        Sampler(min_p=2)
    with pytest.raises(InterpretError, match="repetition_penalty=0"):
        Sampler(repetition_penalty=0)


def test_what_it_was_trained_on_survives_the_tokenizer() -> None:
    made = tokenizer()
    assert made.decode(made.encode(WORDS).ids) == WORDS
