"""A planted wrong module is the first that is named, and a right conversion has none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anesurgery as ane
from anesurgery.checking.against_torch import _orders, _psnr, _Values
from anesurgery.errors import SurgeryError
from anesurgery.examples.example_models import GPT2_SIZES, GPT2Block, causal
from anesurgery.mil import ct, mb, quiet_host


class Stack(nn.Module):
    """Blocks of a GPT-2 around which the input goes, and a table that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 512)
        self.blocks = nn.ModuleList(GPT2Block(GPT2_SIZES) for _ in range(2))
        self.leave = nn.Linear(512, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.enter(x) + torch.linspace(0, 1, 512).sin()
        for block in self.blocks:
            y = block(y, causal(16))
        return self.leave(y)


class Pictures(nn.Module):
    """A convolution that the converter fuses with the norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        nn.init.uniform_(self.norm.running_mean, -1, 1)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 2)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.conv(x)))).permute(0, 2, 3, 1)


def converted(module: nn.Module, shape: tuple[int, ...], **options: Any) -> Any:
    with quiet_host(), torch.no_grad():
        trace: Any = torch.jit.trace
        return ct.convert(
            trace(module.eval(), torch.zeros(shape), check_trace=False),
            inputs=[ct.TensorType("x", shape)],
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
            **options,
        )


@pytest.fixture(scope="module")
def stack() -> tuple[Stack, Any, dict[str, Any]]:
    torch.manual_seed(0)
    module = Stack()
    values = np.random.default_rng(0).standard_normal((1, 16, 64)).astype(np.float32)
    return module, converted(module, (1, 16, 64)), {"x": values}


def test_a_right_conversion_agrees(stack: Any) -> None:
    found = ane.against_torch(*stack)
    assert found.ok
    assert found.rounded
    assert found.first is None
    assert {row.state for row in found.rows} <= {"agrees", "carries", "rounds", "not kept"}
    assert "package and PyTorch agree" in str(found)
    assert found.to_json()["ok"]
    assert all(row.psnr["fp16"] <= row.psnr["fp32"] for row in found.rows)


def heavier(module: Any) -> None:
    with torch.no_grad():
        next(module.parameters()).mul_(1.01)


def guarded(module: Any) -> None:
    module.eps = 1e-2


def slightly_guarded(module: Any) -> None:
    module.eps = 1e-3


def turned(module: Any) -> None:
    with torch.no_grad():
        module.weight.copy_(module.weight.T.clone())


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("enter", heavier),
        ("blocks.0.attn.keys", heavier),
        ("blocks.1.mlp.2", heavier),
        ("blocks.0.ln_2", guarded),
        ("blocks.0.ln_1", slightly_guarded),
        ("blocks.1.attn.out", turned),
        ("blocks.0.attn.keys", turned),  # on which the attention of random weights hardly hangs
    ],
)
def test_a_wrong_module_is_the_first(stack: Any, name: str, spoil: Callable[[Any], None]) -> None:
    module, model, inputs = stack
    wrong = copy.deepcopy(module)
    spoil(wrong.get_submodule(name))
    found = ane.against_torch(wrong, model, inputs, precisions=("fp32",))
    assert found.first is not None
    assert found.first.name == name
    assert f"part in {name}" in str(found)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("precision", ["FLOAT32", "FLOAT16"])
def test_what_the_converter_fused_is_no_difference(precision: str, frozen: bool) -> None:
    torch.manual_seed(1)
    module = Pictures().eval().requires_grad_(not frozen)
    model = converted(module, (1, 3, 12, 12), compute_precision=getattr(ct.precision, precision))
    values = {"x": np.random.default_rng(0).standard_normal((1, 3, 12, 12)).astype(np.float32)}
    states = {row.name: row.state for row in ane.against_torch(module, model, values).rows}
    assert "parts" not in states.values()
    wrong = copy.deepcopy(module)
    heavier(wrong.last)
    found = ane.against_torch(wrong, model, values).first
    assert found is not None
    assert found.name == "last"


class Block(nn.Module):
    """A convolution, its norm and an activation, which may write over what it reads."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), act
        nn.init.uniform_(self.norm.running_mean, -1, 1)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 2)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.conv(x)))


class Residual(nn.Module):
    """Two blocks, and sums and products that write over the result of the block before."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = Block(make()), Block(make())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y += x
        y = self.second(y).exp()
        y *= 0.5
        return y


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("make", [nn.Sigmoid, lambda: nn.ReLU(inplace=True), lambda: nn.SiLU(inplace=True)])
def test_blocks_of_a_network_for_images_agree(make: Callable[[], nn.Module], frozen: bool) -> None:
    torch.manual_seed(0)
    module = Residual(make).eval().requires_grad_(not frozen)
    values = {"x": np.random.default_rng(0).standard_normal((1, 8, 12, 12)).astype(np.float32)}
    package = converted(module, (1, 8, 12, 12))
    found = ane.against_torch(module, package, values)
    assert found.ok, found
    assert {row.name: row.state for row in found.rows}["second.conv"] == "not kept"
    module.second.norm.bias.data += 0.1
    assert (wrong := ane.against_torch(module, package, values).first) is not None
    assert wrong.name == "second.norm" or wrong.name == "second.conv"


class Heads(nn.Module):
    """Gives the last of two heads; a third module reads the shape of its input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = Block(nn.SiLU()), nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(2))
        self.places = Places()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.body(x), self.places(x)
        return [head(y) for head in self.heads][-1]


class Places(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x[:, 0]).add(1).cumsum(1).sin()


@pytest.mark.parametrize("name", ["heads.0", "places"])
def test_what_no_output_depends_on_is_not_blamed(name: str) -> None:
    torch.manual_seed(0)
    module = Heads().eval()
    values = {"x": np.random.default_rng(0).standard_normal((1, 8, 12, 12)).astype(np.float32)}
    package = converted(module, (1, 8, 12, 12))
    found = ane.against_torch(module, package, values)
    assert found.ok, found
    assert {row.name: row.state for row in found.rows}[name] == "not kept"
    nn.init.ones_(module.heads[1].weight)  # type: ignore[arg-type]
    assert (wrong := ane.against_torch(module, package, values).first) is not None
    assert wrong.name == "heads.1"


class Written(nn.Module):
    """Its head writes over the list that it gets, as that of YOLO does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(nn.SiLU()), Block(nn.SiLU()), WritingHead()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.head([y, self.second(y)])


class WritingHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(2))

    def forward(self, x: list[torch.Tensor]) -> torch.Tensor:
        for k, conv in enumerate(self.convs):
            x[k] = conv(x[k])
        return torch.cat(x, 1)


def test_a_module_may_write_over_a_list_that_it_gets() -> None:
    torch.manual_seed(0)
    module = Written().eval()
    values = {"x": np.random.default_rng(0).standard_normal((1, 8, 12, 12)).astype(np.float32)}
    package = converted(module, (1, 8, 12, 12))
    assert ane.against_torch(module, package, values).ok
    module.second.norm.bias.data += 0.1
    assert not ane.against_torch(module, package, values).ok


@pytest.mark.parametrize("options", [{"scale": 1 / 255}, {"scale": 1 / 127.5, "bias": [-1, -1, -1]}])
def test_the_module_reads_the_image_that_the_package_scales(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    trace: Any = torch.jit.trace
    module = Pictures().eval()
    image = ct.ImageType("x", (1, 3, 8, 8), **options)
    traced = trace(module, torch.zeros(1, 3, 8, 8))
    with quiet_host():
        package = ct.convert(traced, inputs=[image], skip_model_load=True)
    values = {"x": np.random.default_rng(0).integers(0, 256, (1, 3, 8, 8)).astype(np.float32)}
    assert ane.against_torch(module, package, values).ok
    nn.init.zeros_(module.last.bias)  # type: ignore[arg-type]
    assert (wrong := ane.against_torch(module, package, values).first) is not None
    assert wrong.name == "last"


def test_a_classifier_is_compared_by_its_probabilities() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.Softmax(-1)).eval()
    package = converted(module, (1, 6), classifier_config=ct.ClassifierConfig(list("abcd")))
    values = {"x": np.random.default_rng(0).standard_normal((1, 6)).astype(np.float32)}
    found = ane.against_torch(module, package, values)
    assert found.ok, found
    assert found.rows[-1].name == ""
    assert found.rows[-1].state == "agrees"


class Norms(nn.Module):
    """66 blocks of a norm, a product and an activation, with what goes round them: 200 modules."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU()) for _ in range(66)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part(x)
        return x


@pytest.fixture(scope="module")
def long() -> tuple[Norms, Any, dict[str, Any]]:
    torch.manual_seed(0)
    module = Norms()
    values = np.random.default_rng(0).standard_normal((1, 8, 24)).astype(np.float32)
    return module, converted(module, (1, 8, 24)), {"x": values}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spoil"), [("parts.3.1", heavier), ("parts.20.0", slightly_guarded), ("parts.65.1", turned)]
)
def test_one_of_200_modules_is_the_first(name: str, spoil: Callable[[Any], None], long: Any) -> None:
    module, model, inputs = long
    wrong = copy.deepcopy(module)
    spoil(wrong.get_submodule(name))
    found = ane.against_torch(wrong, model, inputs, precisions=("fp32",))
    assert found.first is not None
    assert found.first.name == name
    assert len([row for row in found.rows if row.kind != "function"]) == 66 * 4 + 1


def exported(module: nn.Module, shape: tuple[int, ...] = (1, 16, 64)) -> torch.export.ExportedProgram:
    with quiet_host():
        return torch.export.export(module.eval(), (torch.zeros(shape),)).run_decompositions({})


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("name", "spoil"),
    [("blocks.0.mlp.2", heavier), ("blocks.1.ln_2", slightly_guarded), ("blocks.1.attn.keys", turned)],
)
def test_a_wrong_module_of_an_exported_program_is_the_first(
    stack: Any, name: str, spoil: Callable[[Any], None]
) -> None:
    module, model, inputs = stack
    wrong = copy.deepcopy(module)
    spoil(wrong.get_submodule(name))
    found = ane.against_torch(exported(wrong), model, inputs, precisions=("fp32",)).first
    assert found is not None
    assert found.name == name


class Twice(nn.Module):
    """One submodule that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(torch.relu(self.inner(x))))


@pytest.mark.slow
def test_an_exported_program_has_the_calls_of_its_module(stack: Any) -> None:
    module, model, inputs = stack
    by_hooks, by_nodes = (ane.against_torch(m, model, inputs) for m in (module, exported(module)))
    assert by_nodes.ok
    rows = [[row for row in found.rows if row.kind != "function"] for found in (by_nodes, by_hooks)]
    for one, other in zip(*rows, strict=True):
        assert (one.name, one.kind, one.value, one.state) == (other.name, other.kind, other.value, other.state)
    torch.manual_seed(0)
    twice = Twice()
    inputs = {"x": inputs["x"][:, :8, :24]}
    found = ane.against_torch(exported(twice, (1, 8, 24)), converted(twice, (1, 8, 24)), inputs)
    assert [row.name for row in found.rows if row.kind != "function"] == ["inner", "inner#2", ""]
    assert [row.name for row in found.rows if row.kind == "function"] == ["relu", "tanh"]
    with pytest.raises(SurgeryError, match="it takes x"):
        ane.against_torch(exported(twice, (1, 8, 24)), with_two_inputs(), {"a": inputs["x"], "b": inputs["x"]})


def with_two_inputs() -> Any:
    return mb.program(input_specs=[mb.TensorSpec((1, 8, 24)), mb.TensorSpec((1, 8, 24))])(
        lambda a, b: mb.add(x=a, y=b)
    )


@pytest.mark.slow
def test_an_exported_program_stays_as_it_is(stack: Any) -> None:
    module, model, inputs = stack
    program = exported(module)
    before = {name: tensor.clone() for name, tensor in program.state_dict.items()}
    ane.against_torch(program, model, inputs, precisions=("fp32",))
    assert all(torch.equal(before[name], tensor) for name, tensor in program.state_dict.items())


def test_the_nearest_value_is_that_of_a_look_at_all() -> None:
    """The wrong version trusts a bound that the order of axes, infinities or NaN break."""
    rng = np.random.default_rng(0)
    for trial in range(40):
        wanted = rng.standard_normal((3, 4, 5)).astype(np.float32)
        near = wanted + rng.standard_normal(wanted.shape).astype(np.float32) * 10.0 ** -(trial % 6)
        values = {
            str(k): rng.standard_normal((3, 4, 5)).astype(np.float32) * rng.uniform(0, 2) for k in range(9)
        }
        values |= {"near": near.transpose(2, 0, 1), "nan": np.full((60,), np.nan, np.float32)}
        values["inf"] = np.full((60,), np.inf, np.float32)
        found = _Values(values).nearest(wanted)
        every = [(_psnr(wanted, v, o), n) for n, v in values.items() for o in _orders(v, wanted)]
        assert found is not None
        assert (found.psnr, found.name) == max(every)


def test_a_value_that_is_quite_wrong_is_found_by_its_scope(stack: Any) -> None:
    """The wrong version shows the value that is nearest by chance."""
    module, model, inputs = stack
    program = model._mil_program
    right = {row.name: row.value for row in ane.against_torch(module, program, inputs).rows}
    wrong = copy.deepcopy(module)
    turned(wrong.blocks[0].attn.keys)
    by_number, by_scope = (ane.against_torch(wrong, m, inputs).first for m in (model, program))
    assert by_number is not None
    assert by_scope is not None
    assert by_scope.name == by_number.name == "blocks.0.attn.keys"
    assert by_scope.value == right["blocks.0.attn.keys"] != by_number.value


class ChannelsFirst(nn.Sequential):
    """Linear layers as convolutions, as models are written for the engine."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(1, 2)
        layer: Any
        for layer in self:
            y = nn.functional.conv1d(y, layer.weight[..., None], layer.bias)
        return y.transpose(1, 2)


def test_an_error_is_carried_on_through_values_with_their_axes_exchanged() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6).requires_grad_(False) for _ in range(3)]
    spoiled = copy.deepcopy(layers)
    spoiled[0].weight += torch.randn(6, 6)
    model = converted(ChannelsFirst(*spoiled), (2, 5, 6), compute_precision=ct.precision.FLOAT32)
    inputs = {"x": torch.randn(2, 5, 6).numpy()}
    found = ane.against_torch(nn.Sequential(*layers), model, inputs, precisions=("fp32",))
    assert [row.state for row in found.rows] == ["parts", "carries", "carries", "parts"]


def test_bad_input_is_said(stack: Any) -> None:
    module, model, inputs = stack
    with pytest.raises(SurgeryError, match="it takes a Module"):
        ane.against_torch(torch.relu, model, inputs)  # type: ignore[arg-type]
    with pytest.raises(SurgeryError, match="lacks 'fp32'"):
        ane.against_torch(module, model, inputs, precisions=("fp16",))
    with pytest.raises(SurgeryError, match="does not take"):
        ane.against_torch(nn.Linear(3, 3), model, inputs)
    trace: Any = torch.jit.trace
    with pytest.raises(SurgeryError, match="give the module itself"):
        ane.against_torch(nn.Sequential(trace(nn.ReLU(), torch.ones(1, 8, 24))), model, inputs)


def test_the_module_stays_as_it_is(stack: Any) -> None:
    module, model, inputs = stack
    before = copy.deepcopy(module.state_dict())
    ane.against_torch(module, model, inputs, precisions=("fp32",))
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert not any(part._forward_hooks for part in module.modules())


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_a_computed_weight_is_rounded_as_the_package_rounds_it(norm: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        norm(nn.Conv1d(8, 16, 7)), nn.ELU(), norm(nn.Conv1d(16, 8, 5)), nn.LSTM(40, 16)
    ).eval()
    values = {"x": np.random.default_rng(0).standard_normal((1, 8, 50)).astype(np.float32)}
    model = converted(module, (1, 8, 50))
    states = {row.name: row.state for row in ane.against_torch(module, model, values).rows}
    assert {name: states[name] for name in ("0", "1", "2")} == dict.fromkeys("012", "agrees")
    assert states["3"] == states[""] == "rounds"  # the converter adds its biases
    assert not any("parametrizations" in name for name in states)
    heavier(module[2])
    found = ane.against_torch(module, model, values).first
    assert found is not None
    assert found.name == "2"


class Once(nn.Module):
    """Gives something else when it is called again. Its sine makes a rounding larger."""

    calls: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.rows = nn.LSTM(40, 16), [*range(8)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = torch.sin(self.lstm(x)[0] * 20)[:, self.rows]
        return y if self.calls <= 1 else y * (-2) ** self.calls


def test_rounding_adds_up_in_a_module_that_cannot_be_called_again() -> None:
    torch.manual_seed(0)
    module = Once().eval()
    once, other = copy.deepcopy(module), copy.deepcopy(module)
    module.calls, other.rows = -100, [1, 0, *range(2, 8)]
    values = {"x": np.random.default_rng(0).standard_normal((1, 8, 40)).astype(np.float32)}
    package = converted(module, (1, 8, 40))
    found = ane.against_torch(once, package, values)
    assert {row.name: row.state for row in found.rows} == {
        **dict.fromkeys(("lstm", ""), "rounds"),
        **dict.fromkeys(("mul", "sin"), "carries"),
    }
    assert (wrong := ane.against_torch(other, package, values).first) is not None
    assert wrong.name == ""


class Folded(nn.Module):
    """A convolution and its norm, which the converter makes one: two numbers near 100 are subtracted first."""

    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8, 3, 3)), nn.Parameter(100 + torch.rand(8))
        self.register_buffer("mean", 100 + torch.rand(8))
        self.register_buffer("variance", 0.5 + torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.conv2d(x, self.weight, self.bias)
        return nn.functional.batch_norm(y, self.mean, self.variance)


def test_a_difference_no_larger_than_that_of_rounded_weights_is_rounding() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Folded(), nn.ReLU()).eval()
    values = {"x": np.random.default_rng(0).standard_normal((1, 8, 12, 12)).astype(np.float32)}
    package = converted(copy.deepcopy(module), (1, 8, 12, 12))  # coremltools writes into the mean
    row = ane.against_torch(module, package, values).rows[0]
    assert row.state == "rounds"
    assert row.psnr["fp32"] < 70
    part: Any = module[0]
    part.mean.data += 1
    assert (wrong := ane.against_torch(module, package, values).first) is not None
    assert wrong.name == "0"


class Silent(nn.Module):
    """A sum takes nothing from the first part; a gradient through it needs a result that is written over."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(self.enter(x) * 0)
        y *= 0.5
        return self.leave(x) + y


class HandMade(nn.Module):
    """A leaky relu of the input itself, which coremltools fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.middle, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.middle(torch.maximum(x * 0.3, x)).tanh())


def leaking(slope: float) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(slope, inplace=True), nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("make", "spoil", "name"),
    [
        (Silent, lambda module: module.enter.weight.data.neg_(), "enter"),
        (HandMade, lambda module: heavier(module.leave), "leave"),
        (lambda: leaking(0.1), lambda module: setattr(module[1], "negative_slope", 0.102), "1"),
    ],
)
def test_what_is_fused_or_written_over(make: Any, spoil: Callable[[Any], None], name: str) -> None:
    torch.manual_seed(0)
    module = make().eval()
    values = {"x": np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)}
    package = converted(module, (6, 8))
    found = ane.against_torch(module, package, values)
    assert found.ok, found
    spoil(module)
    assert (wrong := ane.against_torch(module, package, values).first) is not None
    assert wrong.name == name


class Codes(nn.Module):
    """Codes of two codebooks; what the second one leaves, and the loss, go into no output."""

    rates: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.books = [nn.Embedding(16, 8) for _ in range(2)]
        self.first, self.second = self.books
        self.register_buffer("rates", torch.logspace(0, -4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(x.shape[1])[:, None] * 50 * self.rates
        rest, codes = self.enter(x + torch.cat([angles.sin(), angles.cos()], -1)), []
        for book in self.books:
            near = book((rest @ book.weight.T - book.weight.square().sum(-1) / 2).argmax(-1))
            codes.append(near[..., 0] * 2)
            loss = nn.functional.mse_loss(rest, near)
            rest = (rest - near) + loss * torch.zeros_like(rest)
        return codes[0], codes[1]


def test_what_goes_into_no_output_is_no_difference() -> None:
    """Nor is a table that the converter computes of a buffer before it rounds."""
    torch.manual_seed(0)
    module = Codes().eval()
    values = {"x": np.random.default_rng(0).standard_normal((1, 6, 8)).astype(np.float32)}
    found = ane.against_torch(module, converted(module, (1, 6, 8)), values)
    assert found.ok
    assert {row.name: row.state for row in found.rows}["mse_loss#2"] == "not kept"


class Remembered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.rows.append(self.out(x))
        return torch.cat(cache.rows, 1) + torch.arange(12)[:, None] / 50


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, rows: list[Any], place: list[int]) -> torch.Tensor:
        row, place[0] = rows[place[0]], place[0] + 1
        return torch.cat([row, self.out(x)], 1) + torch.arange(12)[:, None] / 50


class Remembering(nn.Module):
    """A part writes into what it is given, so that a second call would compute something else, or fail."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.enter, self.part = nn.Sequential(nn.Conv1d(6, 6, 1), nn.BatchNorm1d(6), nn.LSTM(8, 8)), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = ([x], [0]) if isinstance(self.part, Counted) else (SimpleNamespace(rows=[x]),)
        return self.part(self.enter(x)[0], *more)


@pytest.mark.parametrize("part", [Remembered, Counted])
def test_a_part_that_changes_what_it_is_given_is_not_called_again(part: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = Remembering(part()).eval()
    values = {"x": np.random.default_rng(0).standard_normal((1, 6, 8)).astype(np.float32)}
    assert ane.against_torch(module, converted(module, (1, 6, 8)), values).ok


class Joined(nn.Module):
    """Two streams as one, of which only the second is read; a sum is written into the first result."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.mix(x)
        y += self.mix(x * 2)
        y = y / 3
        return y[:, :2], y[:, 2:]


class Streams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.join = nn.Linear(8, 8), Joined()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(self.enter(x))[1].relu()


def test_a_view_that_nothing_reads_is_no_difference() -> None:
    """Nor is a division whose operand was written into since the call that made it."""
    torch.manual_seed(0)
    module = Streams().eval()
    values = {"x": np.random.default_rng(0).standard_normal((1, 6, 8)).astype(np.float32)}
    found = ane.against_torch(module, converted(module, (1, 6, 8)), values)
    assert found.ok, str(found)
    assert {row.name: row.state for row in found.rows}["join"] == "not kept"


class Rows(nn.Module):
    """Writes rows into a tensor that depends on no input until then."""

    factor = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(6, 8)
        rows[1:] = self.enter(x)[1:] * 1000
        return self.leave(torch.tanh(rows * self.factor))


def test_what_rows_are_written_into_depends_on_the_input() -> None:
    torch.manual_seed(0)
    module = Rows().eval()
    values = {"x": np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)}
    package = converted(module, (6, 8))
    assert ane.against_torch(module, package, values).ok
    module.factor = 0.51
    assert (wrong := ane.against_torch(module, package, values).first) is not None
    assert wrong.name == "mul#2"


class Oscillator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A phase between 0 and 1, of which coremltools drops the floor."""
        return self.out(torch.sin(torch.remainder(torch.cumsum(x, 1) / 100, 1.0)))


class Loud(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A square that fp16 does not hold."""
        return torch.sqrt(torch.square(self.enter(x) * 1000).sum(-1, keepdim=True))


@pytest.mark.usefixtures("hosts_own_converters")
def test_a_function_is_blamed_though_what_it_reads_is_rounded() -> None:
    torch.manual_seed(0)
    values = np.abs(np.random.default_rng(0).standard_normal((1, 50, 16))).astype(np.float32) * 20
    module = Oscillator().eval()
    found = ane.against_torch(module, converted(module, (1, 50, 16)), {"x": values})
    assert found.first is not None
    assert found.first.name == "remainder"


def test_it_says_where_fp16_falls() -> None:
    torch.manual_seed(0)
    module = Loud().eval()
    values = np.random.default_rng(0).standard_normal((1, 4, 64)).astype(np.float32)
    found = ane.against_torch(module, converted(module, (1, 4, 64)), {"x": values})
    assert found.ok
    assert "in fp16 square (function) is the first below 40 dB: not finite" in " ".join(str(found).split())


def test_an_output_is_no_value_that_is_right_elsewhere() -> None:
    """The norm changes nothing, so that its result is the input; the package gives another one."""
    norm = nn.InstanceNorm2d(3, affine=True, track_running_stats=True).eval()
    x = np.random.default_rng(0).standard_normal((1, 3, 6, 6)).astype(np.float32) * 3 + 1
    spec = mb.TensorSpec(x.shape)

    @mb.program(input_specs=[spec], opset_version=ct.target.iOS17)
    def normed(x: Any) -> Any:
        return mb.instance_norm(x=x, epsilon=np.float32(1e-5))

    found = ane.against_torch(nn.Sequential(norm), normed, {"x": x})
    assert not found.ok
    assert found.rows[-1].state == "parts"


class Tables(nn.Module):
    """Rows times a matrix, and times another one, in the middle of a network."""

    def __init__(self, first: torch.Tensor, last: torch.Tensor) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(first), nn.Parameter(last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.first @ self.last


class Waves(nn.Module):
    """Sines of positions times frequencies, which are constants."""

    frequencies: torch.Tensor

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.rand(64) * scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * self.frequencies).mean(-1)


def inverse_of_distances() -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix of distances to 64 points, and its inverse: their product cancels to the identity."""
    points = torch.linspace(-1, 1, 64, dtype=torch.float64)
    distances = torch.exp(-((points[:, None] - points[None]) ** 2) * 180)
    return torch.linalg.inv(distances).float(), distances.float()


def orthogonal() -> torch.Tensor:
    return torch.linalg.qr(torch.randn(64, 64))[0]


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (lambda: Tables(*inverse_of_distances()), "matmul#2"),
        (lambda: Tables(*reversed(inverse_of_distances())), "matmul#2"),
        (lambda: nn.Sequential(nn.ReLU(), Waves(scale=3000)), "1"),
        (lambda: Tables(orthogonal(), orthogonal()), ""),
        (lambda: nn.Sequential(nn.ReLU(), Waves(scale=1)), ""),
    ],
)
def test_it_says_that_the_weights_need_more_digits_than_fp16_has(make: Any, first: str) -> None:
    """The wrong version: "package and PyTorch agree", and no more, though what the package gives is useless."""
    torch.manual_seed(0)
    module = make().eval()
    values = {"x": np.random.default_rng(0).standard_normal((1, 8, 64)).astype(np.float32)}
    found = ane.against_torch(module, converted(module, (1, 8, 64)), values)
    assert found.ok
    said = " ".join(str(found).split())
    assert ("convert again with compute_precision=ct.precision.FLOAT32" in said) == bool(first)
    assert not first or f"PyTorch itself is off from {first} on" in said
    in_full = converted(module, (1, 8, 64), compute_precision=ct.precision.FLOAT32)
    assert "FLOAT32" not in str(ane.against_torch(module, in_full, values))
