"""A cache in 8 bits: what it holds, what it loses, and where it cannot be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import Decoder as Small
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.compressing import cache_codes
from anesurgery.errors import SurgeryError
from anesurgery.interpret.decoding import Decoder, generate
from anesurgery.mil import Program, ct, mb, quiet_host, types
from anesurgery.passes.add_cache import AddCache
from anesurgery.testing import apply_pass

RNG = np.random.default_rng(3)
TEXTS = [RNG.integers(0, 31, 18).tolist() for _ in range(6)]


def decoder(cache: str = "io", half: bool = True) -> Program:
    return apply_pass(AddCache(prefill=8, cache=cache), Small(half=half).program())[0]


@pytest.fixture(scope="module")
def found() -> ane.CompressedCache:
    return ane.compress_cache(decoder(), TEXTS, target="M5/macOS 26")


def test_the_cache_is_half_and_the_loss_is_said(found: ane.CompressedCache) -> None:
    assert found.bytes[1] * 2 == found.bytes[0]
    assert found.texts == (5, 1)
    assert 0 < found.loss.kl < 0.02
    assert found.loss.psnr > 25
    assert "1 held-out texts: KL" in str(found)
    assert found.to_json()["loss"]["kl"] == found.loss.kl
    functions = found.subject.loaded.program.functions
    assert set(functions) == {"prefill", "decode"}
    for function in functions.values():
        kinds = {n: str(v.dtype) for n, v in function.inputs.items() if n.startswith("cache_")}
        assert kinds
        assert all("int8" in kind or "int" in kind for kind in kinds.values())


@pytest.mark.parametrize("name", ["found", "of_channels"])
def test_a_token_is_rounded_once(name: str, request: pytest.FixtureRequest) -> None:
    """What was kept stays bit for bit, however often it is read and written again."""
    found = request.getfixturevalue(name)
    reader = Decoder(found.subject.loaded)
    reader.feed(TEXTS[0][:5])
    first = {n: v.copy() for n, v in reader.kept.items()}
    for token in TEXTS[0][5:12]:
        reader.feed([token])
    for name, codes in reader.kept.items():
        assert codes.dtype == np.int8
        assert np.abs(codes).max() <= 127
        np.testing.assert_array_equal(codes[:, :, :5], first[name][:, :, :5])


def test_the_codes_are_the_kept_numbers_by_the_scales_of_their_heads(found: ane.CompressedCache) -> None:
    plain, coded = Decoder(decoder()), Decoder(found.subject.loaded)
    for reader in (plain, coded):
        reader.feed(TEXTS[1][:4])  # one call, whose own tokens are not rounded
    for name, codes in coded.kept.items():
        scales = np.array(found.scales[name])[None, :, None, None]
        assert len(set(found.scales[name])) > 1
        off = np.abs(codes * scales - np.clip(plain.kept[name], -127 * scales, 127 * scales))
        assert (off <= 0.51 * scales).all()


def test_one_scale_for_all_heads_is_the_wrong_version(
    found: ane.CompressedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of small numbers would have few codes left."""
    scales = cache_codes._Ranges.scales

    def alike(*given: Any) -> Any:
        one = scales(*given)
        return np.full_like(one, 8 * one.max())

    monkeypatch.setattr(cache_codes._Ranges, "scales", alike)
    assert ane.compress_cache(decoder(), TEXTS, target="M5/macOS 26").loss.kl > 4 * found.loss.kl


@dataclass
class Loud(Small):
    """In each layer the keys of one channel are larger, and its queries smaller: the same function."""

    calls: int = 0

    def head(self, x: Any, heads: int) -> Any:
        """Queries, keys and values come in turn."""
        factor = np.ones((heads, self.width), self.dtype)
        factor[:, 1] = (1 / 32, 32, 1)[self.calls % 3]
        self.calls += 1
        return mb.mul(x=super().head(x, heads), y=factor[None, :, None])


@pytest.fixture(scope="module")
def loud() -> Program:
    return apply_pass(AddCache(prefill=8, cache="io"), Loud(half=True, positions="learned").program())[0]


@pytest.fixture(scope="module")
def of_channels(loud: Program) -> ane.CompressedCache:
    return ane.compress_cache(loud, TEXTS, target="M5/macOS 26")


def test_keys_with_a_large_channel_get_a_scale_for_each(
    loud: Program, of_channels: ane.CompressedCache, tmp_path: Path
) -> None:
    """The wrong version gives each head one scale, of which the small channels have few codes."""
    assert of_channels.each == "channel"
    assert "a scale for each channel" in str(of_channels)
    assert of_channels.tried["channel"] < 0.5 * of_channels.tried["head"]
    wrong = ane.compress_cache(loud, TEXTS, scales="head", target="M5/macOS 26")
    assert (wrong.each, wrong.tried) == ("head", {})
    assert of_channels.loss.kl < 0.5 * wrong.loss.kl
    path = of_channels.save(tmp_path / "small.mlpackage")
    written = generate(of_channels.subject.loaded, TEXTS[2][:4], 6).written
    assert generate(path, TEXTS[2][:4], 6).written == written


def test_where_no_channel_is_large_heads_have_the_scales(found: ane.CompressedCache) -> None:
    """Products beside the ops cost time, so they are left out where they take away little."""
    assert found.each == "head"
    assert found.tried["channel"] > 0
    decode = found.subject.loaded.program.functions["decode"]
    assert [op.op_type for op in decode.operations if op.name in ("cache_0_read", "cache_0_codes_steps")] == [
        "dequantize"
    ]


def test_what_has_a_scale_may_be_said() -> None:
    with pytest.raises(SurgeryError, match="scales='token'; it may be 'head' or 'channel'"):
        ane.compress_cache(decoder(), TEXTS, scales="token")


def test_positions_have_no_scales() -> None:
    """One token fills one of them, whichever way the cache lies."""
    cache = np.zeros((1, 2, 8, 4))
    cache[:, :, 0] = 1
    assert cache_codes._scale_axes(cache)["channel"] == (0, 1, 3)
    assert cache_codes._scale_axes(cache.swapaxes(2, 3))["channel"] == (0, 1, 2)
    assert set(cache_codes._scale_axes(np.zeros((1, 2, 8, 4)))) == {"head"}


def test_it_is_saved_and_read_by_coremltools_and_writes(found: ane.CompressedCache, tmp_path: Path) -> None:
    path = found.save(tmp_path / "small.mlpackage")
    with quiet_host():
        spec: Any = ct.models.MLModel(str(path), skip_model_load=True, function_name="decode").get_spec()
    assert spec.specificationVersion == 10
    kinds = {
        port.name: port.type.multiArrayType.dataType
        for function in spec.description.functions
        for port in (*function.input, *function.output)
        if port.name.startswith("cache_")
    }
    assert len(kinds) >= 2
    assert set(kinds.values()) == {131080}  # INT8
    assert generate(path, TEXTS[2][:4], 6).written == generate(found.subject.loaded, TEXTS[2][:4], 6).written


@pytest.mark.slow
def test_the_command(tmp_path: Path, found: ane.CompressedCache) -> None:
    """A line that holds something else is said with its number, before the work."""
    path, out = ane.save(ane.load(decoder()), tmp_path / "plain.mlpackage"), tmp_path / "small.mlpackage"
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(",".join(map(str, text)) for text in TEXTS) + "\n\n")
    call = ["compress-cache", str(path), "--out", str(out), "--texts", str(texts), "--target", "M5/macOS 26"]
    done = CliRunner().invoke(cli.app, [*call, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["scales"] == found.to_json()["scales"]
    assert generate(out, TEXTS[2][:4], 3).written == generate(found.subject.loaded, TEXTS[2][:4], 3).written
    for content, words in (("3,14\n3 14", "line 2: write the tokens"), (None, "cannot be read")):
        texts.unlink() if content is None else texts.write_text(content)
        error = CliRunner().invoke(cli.app, [*call, "--overwrite"]).exception
        assert words in str(error)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "states": ({"model": "state"}, "states hold fp16 only; ane.apply"),
    "an old OS": ({"target": "M4/macOS 15"}, "int8 inputs, which begin at iOS 26"),
    "a chip that failed": ({"target": "A19"}, "did not compile for the engine of an A19"),
    "one text": ({"texts": TEXTS[:1]}, "give two at least"),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", WRONG)
def test_where_it_cannot_be_is_said(name: str) -> None:
    changed, words = WRONG[name]
    options = {"model": "io", "texts": TEXTS, "target": "M5/macOS 26", **changed}
    with pytest.raises(SurgeryError, match=words):
        ane.compress_cache(decoder(options["model"]), options["texts"], target=options["target"])


@pytest.mark.slow
def test_a_model_without_a_cache_and_a_target_with_a_doubt() -> None:
    with pytest.raises(SurgeryError, match="no input of floats comes back"):
        ane.compress_cache(Small(half=True).program(), TEXTS)
    found = ane.compress_cache(decoder(), TEXTS[:2])
    assert "name your chip by target=" in found.notes[0]
    assert found.texts == (1, 1)


def test_scales_lie_along_one_axis() -> None:
    """The reason why a head has one scale for all of its channels: where this fails, each may have its own."""

    def program(x: Any) -> Any:
        return mb.dequantize(input=x, scale=np.full((4, 8), 0.1, np.float16), axis=np.int32(1))

    with quiet_host(), pytest.raises(ValueError, match="scale"):
        mb.program(input_specs=[mb.TensorSpec((1, 4, 6, 8), types.int8)], opset_version=ct.target.iOS26)(
            program
        )


def test_what_coremltools_admits() -> None:
    """The reason why states stay fp16: where this fails, a newer coremltools takes states of 8 bits."""

    @mb.program(
        input_specs=[mb.TensorSpec((1, 4), types.fp16), mb.StateTensorSpec((1, 4), dtype=types.int8)],
        opset_version=ct.target.iOS26,
    )
    def program(x: Any, cache: Any) -> Any:
        codes = mb.quantize(input=x, scale=np.float16(0.1), output_dtype="int8")
        kept = mb.coreml_update_state(state=cache, value=codes)
        return mb.dequantize(input=kept, scale=np.float16(0.1), name="y")

    with quiet_host(), pytest.raises(ValueError, match="State only support fp16 dtype"):
        ct.convert(
            program,
            minimum_deployment_target=ct.target.iOS26,
            skip_model_load=True,
            pass_pipeline=ct.PassPipeline.EMPTY,
        )


@pytest.mark.parametrize("scales", [None, "head"])
def test_a_text_that_is_held_out_may_also_give_scales(scales: str | None) -> None:
    """The wrong version leaves out every text that is the same list as one that is held out."""
    assert ane.compress_cache(decoder(), [TEXTS[0]] * 2, scales=scales).texts == (1, 1)
