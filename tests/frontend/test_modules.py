"""PyTorch modules and exported programs where a call takes a model and its inputs."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from torch import nn

import anesurgery as ane
from anesurgery import frontend, recipes
from anesurgery.errors import LoadError, SurgeryError, SurgeryWarning, UnknownName
from anesurgery.frontend.modules import convert_module
from anesurgery.interpret import run
from anesurgery.loading import load

pytestmark = pytest.mark.filterwarnings("ignore:.*was converted for this")


class Scores(nn.Module):
    """Outputs by name, dropout, and a mask that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.dropout = nn.Conv2d(3, 8, 3), nn.Dropout()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Scores of some channels, and the best of them."""
        scores = self.dropout(self.conv(x)).mean((2, 3))
        scores = scores if mask is None else scores.masked_fill(~mask, -1.0)
        return {"scores": scores, "best": scores.argmax(-1)}


IMAGE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
MASK = torch.arange(8)[None] > 4


@pytest.mark.parametrize("inputs", [IMAGE, [IMAGE], (IMAGE, MASK), {"x": IMAGE.numpy(), "mask": MASK}])
def test_what_is_converted_agrees_with_the_module(inputs: Any) -> None:
    module = Scores()
    model, given = convert_module(module, inputs)
    assert given is not None
    assert module.training
    assert module.dropout.training
    found = ane.run(model, given)
    with torch.no_grad():
        expected = module.eval()(*({"x": IMAGE} | ({"m": MASK} if len(given) > 1 else {})).values())
    assert list(found) == ["scores", "best"]
    assert_close(found["scores"], expected["scores"].numpy(), rtol=2e-3)
    assert found["best"] == expected["best"].numpy()


class Step(nn.Module):
    """Takes an input that is named by a word of MIL."""

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the next state."""
        return {"state": state + x}


def test_an_input_may_be_called_state() -> None:
    model, given = convert_module(Step(), {"x": IMAGE, "state": IMAGE + 1})
    assert given is not None
    (found,) = ane.run(model, given).values()
    assert_close(found, (2 * IMAGE + 1).numpy(), rtol=2e-3)
    assert ane.apply(Step(), "auto", inputs=[IMAGE, IMAGE], quiet=True).model is not None


class Rest(nn.Module):
    """Any number of tensors after the first."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Twice the first without the others."""
        x = 2 * x
        for one in others:
            x = x - one
        return x


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        (IMAGE, ["x"]),
        ([IMAGE, IMAGE + 1, 3 * IMAGE], ["x", "others_0", "others_1"]),
        ({"b": IMAGE + 1, "x": IMAGE, "c": 3 * IMAGE}, ["x", "b", "c"]),
    ],
)
def test_a_module_may_take_any_number_of_tensors(inputs: Any, names: list[str]) -> None:
    """The report of one that took a tuple said that it takes none."""
    model, given = convert_module(Rest(), inputs)
    assert given is not None
    assert list(given) == names
    (found,) = ane.run(model, given).values()
    assert_close(found, Rest()(*map(torch.tensor, given.values())).numpy(), rtol=2e-2)


class ByKind(nn.Module):
    """Parameters that are given by place alone, and by name alone."""

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None = None, z: float = 2.0, /, *rest: torch.Tensor, s: Any = 0
    ) -> torch.Tensor:
        """Each counts another number of times."""
        return x - z * (0 if y is None else y) + sum(rest) * 3 - s


@pytest.mark.parametrize(
    ("inputs", "signs"),
    [
        ([IMAGE], {"x": 1}),
        ({"y": IMAGE + 1, "x": IMAGE}, {"x": 1, "y": -2}),
        ({"s": IMAGE + 1, "x": IMAGE}, {"x": 1, "s": -1}),
    ],
)
def test_parameters_may_be_by_place_or_by_name_alone(inputs: Any, signs: dict[str, int]) -> None:
    model, given = convert_module(ByKind(), inputs)
    assert given is not None
    assert set(given) == set(signs)
    (found,) = ane.run(model, given).values()
    assert_close(found, sum(sign * given[name] for name, sign in signs.items()), rtol=2e-2)


def test_a_gap_before_an_input_that_is_given_by_place_is_refused() -> None:
    with pytest.raises(SurgeryError, match="inputs: y is missing, and comes before other; give both"):
        convert_module(ByKind(), {"x": IMAGE, "other": IMAGE})


class Unrolled(nn.Module):
    """Windows of 2x2 pixels side by side, as Hiera cuts its image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The pixels of each place of a window."""
        return x.reshape(1, 28, 2, 28, 2, 96).permute(0, 2, 4, 1, 3, 5).reshape(4, 784, 96) * 2


def test_windows_of_six_axes_are_moved_at_once() -> None:
    """The exchanges of coremltools hold all numbers in one row, which no engine takes."""
    model, given = convert_module(Unrolled(), torch.randn(1, 3136, 96))
    assert given is not None
    moves = [op for op in load(model).program.functions["main"].operations if op.op_type == "transpose"]
    assert [op.x.shape for op in moves] == [(28, 2, 28, 2, 96)]


def test_a_wrong_conversion_would_be_told_apart() -> None:
    model, given = convert_module(Scores(), IMAGE)
    assert given is not None
    with torch.no_grad():
        other = Scores().eval()(IMAGE)["scores"].numpy()
    with pytest.raises(AssertionError):
        assert_close(ane.run(model, given)["scores"], other, rtol=2e-3)


def exported() -> Any:
    return torch.export.export(Scores().eval(), (IMAGE,))


def traced() -> Any:
    trace: Any = torch.jit.trace
    return trace(nn.Conv2d(3, 8, 3).eval(), IMAGE)


@pytest.mark.parametrize(
    ("make", "inputs"), [(exported, None), (exported, [IMAGE]), (traced, IMAGE), (Scores, IMAGE)]
)
def test_each_kind_is_inspected(make: Any, inputs: Any) -> None:
    found = ane.inspect(make(), target="iPhone 13", inputs=inputs)
    assert "conv" in {row.op_type for row in found.ops}
    assert "iPhone 13" in str(found)


def test_inputs_may_follow_a_module() -> None:
    inspect: Any = ane.inspect  # for which a second argument is a target, by its type
    assert inspect(Scores(), IMAGE, target="M1").ops
    assert recipes.auto(Scores(), IMAGE, quiet=True).get_spec().description.input[0].name == "x"
    assert ane.apply(Scores(), ["negate_subtract"], inputs=IMAGE, quiet=True).before["conv"] == 1


def test_an_older_system_gets_a_model_that_it_loads() -> None:
    versions = [convert_module(Scores(), IMAGE, aim)[0].get_spec().specificationVersion for aim in AIMS]
    assert versions == [8, 6, 7, 8]


AIMS = (None, "A15/iOS 15", "M1/macOS 13", "M4/macOS 27")


def test_it_is_said() -> None:
    with pytest.warns(SurgeryWarning, match="Scores was converted for this with frontend.register"):
        ane.inspect(Scores(), inputs=IMAGE)


def test_a_second_argument_that_is_no_chip_is_explained() -> None:
    with pytest.raises(UnknownName, match=r"unknown chip or device 'x'; .* lists what target takes"):
        ane.inspect(Scores(), "x", inputs=IMAGE)
    with pytest.raises(TypeError, match=r"inspect\(\) takes from 1 to 2 positional arguments but 3"):
        ane.inspect(Scores(), "M1", IMAGE)  # type: ignore[call-arg]


def test_a_target_after_the_inputs_counts() -> None:
    """The wrong version: "On any chip", as if there were none."""
    assert str(ane.inspect(Scores(), IMAGE, "M1")).startswith("On M1")  # type: ignore[arg-type,call-arg]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (None, "says nothing of its inputs: give inputs="),
        ([IMAGE, MASK, MASK], "3 are given, and the module takes x, mask"),
        ({"z": IMAGE}, "the module takes no 'z'; it takes x, mask"),
        ("image.npy", "a str is no tensor and no array"),
        (torch.tensor(3.0), "x has no axes, and Core ML takes no such input; give it the shape (1,)"),
        (torch.zeros(1, 4), "Scores does not run on the inputs: "),
    ],
)
def test_bad_inputs_are_explained(inputs: Any, words: str) -> None:
    with pytest.raises(SurgeryError) as raised:
        ane.inspect(Scores(), inputs=inputs)
    assert words in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


class Counting(nn.Module):
    """Writes to one buffer in place, and binds another anew."""

    count: torch.Tensor
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(1))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.total = self.total / 2 + x.sum(0)
        return x * self.count + self.total


def test_a_module_that_writes_to_its_buffers_is_left_as_it_is() -> None:
    """The wrong version: the buffers of a model that ran twice."""
    module, x = Counting().eval(), torch.arange(12.0).reshape(3, 4)
    with pytest.warns(SurgeryWarning, match=r"writes to its buffers \(count, total\): the model keeps no such"):
        model, _ = convert_module(module, [x])
    assert module.count.item() == 1
    assert not module.total.any()
    (found,) = run(model, {"x": x.numpy()}).values()
    np.testing.assert_array_equal(found, Counting()(x).numpy())


def test_buffers_of_an_exported_module_become_states() -> None:
    """The wrong version: "State model is supported only >= iOS18", whatever the target is."""
    x = torch.arange(4.0).reshape(1, 4)
    model, _ = convert_module(torch.export.export(Summing().eval(), (x,)), None, "iPhone 15 Pro/iOS 18")
    predictor = ane.Predictor(model)
    state = predictor.make_state()
    sums = [next(iter(predictor({"x": x.numpy()}, state=state).values())) for _ in range(3)]
    assert_close(np.concatenate(sums), np.concatenate([x.numpy() * n for n in (1, 2, 3)]))


class Summing(nn.Module):
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x
        return self.total * 1


class Dropping(nn.Module):
    """Removes one buffer, and leaves one of NaN as it is."""

    scratch: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scratch", torch.ones(1))
        self.register_buffer("unknown", torch.full((2,), torch.nan))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scratch = None
        return 3 * x


def test_a_buffer_that_is_removed_is_named_and_one_of_nan_is_not() -> None:
    module, x = Dropping().eval(), torch.arange(12.0).reshape(3, 4)
    with pytest.warns(SurgeryWarning, match=r"writes to its buffers \(scratch\): the model"):
        model, _ = convert_module(module, [x])
    assert module.scratch is not None
    assert module.scratch.item() == 1
    (found,) = run(model, {"x": x.numpy()}).values()
    np.testing.assert_array_equal(found, 3 * x.numpy())


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = (lambda x: x + 1), (lambda x: x - 1)
        chosen: torch.Tensor = torch.cond(x.sum() > 0, *branches, (x,))
        return chosen


def test_branches_as_functions_are_refused_with_advice() -> None:
    with pytest.raises(LoadError, match=r"compute both branches, and choose with torch\.where"):
        convert_module(Branching(), [torch.ones(2, 3)])


@pytest.mark.parametrize("sign", [-1, 1])
def test_branches_of_an_exported_module_are_both_computed(sign: int) -> None:
    x = sign * torch.ones(2, 3)
    model, *_ = convert_module(torch.export.export(Branching(), (x,)), None)
    (found,) = run(model, {"x": x.numpy()}).values()
    np.testing.assert_array_equal(found, x.numpy() + sign)


def test_where_no_inputs_are_taken_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot load a Scores; give it to inspect or apply with inputs="):
        ane.load(Scores())
    for name, words in (
        ("m.pt", "is a PyTorch file: load the module"),
        ("m.tflite", "is a LiteRT file, which coremltools does not read"),
        ("m.safetensors", "give the folder of its checkpoint"),
    ):
        (tmp_path / name).write_bytes(b"\xff\xfe\xfd" * 9)
        with pytest.raises(LoadError, match=words):
            ane.load(tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    for name in ("m.safetensors", "pytorch_model.bin"):
        (tmp_path / "m.safetensors").rename(tmp_path / name)
        with pytest.raises(LoadError, match="is a checkpoint of transformers; `anesurgery build`"):
            ane.load(tmp_path)


class Windows(nn.Module):
    """Attention in windows of 4x4: the rows and columns of windows, and three parts, are seven axes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The values of each window, weighted."""
        windows = self.qkv(x).reshape(1, 2, 4, 2, 4, 3, 8).permute(5, 0, 1, 3, 2, 4, 6)
        q, k, v = (part.reshape(4, 16, 8) for part in windows)
        return torch.softmax(q @ k.mT, -1) @ v


class Crossed(nn.Module):
    """A product of six axes, of which each operand has every other one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        return x.reshape(2, 1, 3, 1, 4, 1) * x.reshape(1, 2, 1, 3, 1, 4).sin()


def test_more_than_five_axes_are_converted() -> None:
    x = torch.randn(1, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    module = Windows().eval()
    model, given = convert_module(module, x)
    assert given is not None
    with torch.no_grad():
        assert_close(next(iter(ane.run(model, given).values())), module(x).numpy(), rtol=5e-3)


def test_axes_that_cannot_be_merged_are_named() -> None:
    with pytest.raises(LoadError, match="rank <= 5.*rerank: mul of .* cannot be brought to rank 5"):
        convert_module(Crossed(), torch.randn(24))


def test_an_error_of_the_converter_without_words_names_the_operation() -> None:
    def fails(context: Any, node: Any) -> None:
        raise AssertionError

    node = SimpleNamespace(name="y", kind="clamp_min", inputs=[], model_hierarchy="", meta=None)
    with pytest.raises(AssertionError, match="without a reason .converting clamp_min"):
        frontend._naming_module(fails)(None, node)


class Traced(nn.Module):
    """Gives `change` more where it is traced."""

    def __init__(self, change: float) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        jit: Any = torch.jit
        return x + self.change if jit.is_tracing() else x * 1


def test_a_trace_with_other_numbers_is_told() -> None:
    with pytest.warns(
        SurgeryWarning, match=r"Traced gives other numbers when it is traced \(0\.5 of their range"
    ):
        convert_module(Traced(1.0), torch.tensor([[0.0, 2.0, torch.inf]]))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Traced gives other numbers")
        convert_module(Traced(1e-4), torch.tensor([[0.0, 2.0, torch.inf]]))


@torch.jit.script_if_tracing
def window(length: torch.Tensor, mode: str = "hann") -> torch.Tensor:
    """As transformers writes what depends on a size."""
    if mode in ["flat", "none"]:
        return torch.ones(int(length))
    if mode == "hann":
        return torch.hann_window(int(length))
    raise ValueError(mode)


class Windowed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * window(x.shape[-1])


def test_a_function_that_is_scripted_in_a_trace_is_followed() -> None:
    model, given = convert_module(Windowed(), IMAGE)
    assert given is not None
    (found,) = ane.run(model, given).values()
    assert_close(found, Windowed()(IMAGE).numpy(), rtol=2e-3)


class Hidden(torch.autograd.Function):
    """Calls layers that the tracer does not see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> Any:
        return layer(x)


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        apply: Any = Hidden.apply
        return apply(x, self.layer)


def test_what_only_export_follows_is_told() -> None:
    module, x = Hiding().eval().requires_grad_(False), torch.randn(2, 4)
    with pytest.raises(LoadError, match=r"Hiding runs on the inputs, but torch\.jit\.trace .* torch\.export"):
        convert_module(module, x)
    convert_module(torch.export.export(module, (x,)), None)
