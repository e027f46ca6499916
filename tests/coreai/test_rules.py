"""Each row about Core AI speaks of the form that it means, and of no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from core_ai_models import needs_core_ai, save_asset
from torch import nn
from torch_modules import Formula

import anesurgery as ane
from anesurgery.coreai.rules import CARRIED, LOWER, OVER, RULES, carried
from anesurgery.errors import LoadError
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.rules import numeric
from anesurgery.placement.target import Target
from anesurgery.show.costs import costs

pytestmark = needs_core_ai

PHONE = "A19 Pro/iOS 27"


class Head(nn.Module):
    """Scores, the best of them, and rows at their places."""

    def forward(self, scores: torch.Tensor, boxes: torch.Tensor) -> Any:
        best, places = torch.topk(scores, 3)
        return best.sum() + boxes[0, places[0]].sum()


class HardSwish(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Linear(4, 4) if rank == 2 else nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.hardswish(self.inner(x))


def of(f: Callable[..., Any]) -> nn.Module:
    return Formula(lambda s, *inputs: f(*inputs))


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


ROWS: dict[str, tuple[nn.Module, list[torch.Tensor], nn.Module, list[torch.Tensor]]] = {
    "coreai-folded-cast": (of(lambda x: x.int().float()), [torch.ones(3)], of(torch.abs), [torch.ones(3)]),
    "coreai-floor": (of(torch.floor), [half(3)], of(torch.round), [half(3)]),
    "coreai-avg-pool": (
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        [half(1, 2, 9, 9)],
        nn.AvgPool2d(3, 2, 1),
        [half(1, 2, 9, 9)],
    ),
    "coreai-long-kernel": (
        nn.ConvTranspose1d(2, 3, 8, 2),
        [torch.randn(1, 2, 5)],
        nn.ConvTranspose1d(2, 3, 7, 8),
        [torch.randn(1, 2, 5)],
    ),
    "fault-argmax-narrow": (
        of(lambda x: x.argmax(1)),
        [half(1, 5, 4)],
        of(lambda x: x.float().argmax(1)),
        [half(1, 5, 4)],
    ),
    "coreai-empty": (of(lambda x: x[:, :0]), [half(1, 9)], of(lambda x: x[:, :1]), [half(1, 9)]),
    "coreai-topk-time": (of(lambda x: x.topk(2).values), [half(1, 9)], of(torch.abs), [half(1, 9)]),
    "fault-topk-gather": (
        Head(),
        [half(1, 9), half(1, 9, 4)],
        Head(),
        [torch.randn(1, 9), torch.randn(1, 9, 4)],
    ),
    "fault-hard-swish-rank-2-elsewhere": (
        HardSwish(2).half(),
        [half(2, 4)],
        HardSwish(4).half(),
        [half(1, 4, 1, 2)],
    ),
    "num-exp": (of(lambda x: torch.log(x.exp() + 1)), [half(2, 8)], of(torch.sigmoid), [half(2, 8)]),
}
"""Rule -> a module in the form that it means, and one that is right, with inputs."""


def rules_at(path: Path, target: str = PHONE) -> set[str]:
    return {finding.rule for finding in ane.lint(path, target).findings}


@pytest.mark.parametrize("is_output", [True, False])
def test_an_update_at_computed_positions_is_found_also_as_an_output(is_output: bool, tmp_path: Path) -> None:
    specs = [mb.TensorSpec(s, dtype=t) for s, t in (((1, 8, 4), types.fp16), ((3,), types.int32))]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Var, begin: Var) -> Var:
        end = mb.add(x=begin, y=np.array([1, 1, 4], np.int32))
        updated = mb.slice_update(x=x, update=np.zeros((1, 1, 4), np.float16), begin=begin, end=end)
        return updated if is_output else mb.relu(x=updated)

    ane.to_coreai(program, tmp_path / "m.aimodel")
    assert "coreai-computed-place" in rules_at(tmp_path / "m.aimodel")


class Cached(nn.Module):
    """A cache whose row is written at a computed place."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, 4, 8).half())

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        place: Any = step.item()
        torch._check(place >= 0)  # type: ignore[no-untyped-call]
        torch._check(place < 4)  # type: ignore[no-untyped-call]
        self.cache[:, place : place + 1] = x
        return self.cache.sum(1)


def boxes_and_scores(x: torch.Tensor) -> torch.Tensor:
    boxes, scores, _ = torch.split_with_sizes(x, [4, 5, 0], dim=1)
    return boxes * scores.amax(1, keepdim=True)


CRASHES: dict[str, tuple[nn.Module, list[torch.Tensor], list[str]]] = {
    "coreai-empty": (of(boxes_and_scores), [half(1, 9)], []),
    "coreai-computed-place": (Cached(), [half(1, 1, 8), torch.tensor([3], dtype=torch.int32)], ["cache"]),
}


@pytest.mark.parametrize("rule", CRASHES)
def test_a_reported_crash_comes_first_and_has_a_repair(rule: str, tmp_path: Path) -> None:
    module, values, states = CRASHES[rule]
    asset = save_asset(tmp_path / "m.aimodel", module, values, state_names=states)
    first = costs(ane.inspect(asset, target=PHONE))[0]
    assert first.rule == rule
    surgery = ane.apply(asset, first.remedies[0], target=PHONE, quiet=True)
    ane.to_coreai(surgery.program, tmp_path / "after.aimodel")
    assert rule not in rules_at(tmp_path / "after.aimodel")


@pytest.mark.parametrize("rule", ROWS)
def test_a_row_speaks_of_its_form_alone(rule: str, tmp_path: Path) -> None:
    wrong, values, right, others = ROWS[rule]
    assert rule in rules_at(save_asset(tmp_path / "wrong.aimodel", wrong, values))
    assert rule not in rules_at(save_asset(tmp_path / "right.aimodel", right, others))


def scaled(scales: int, palette: bool = False) -> Program:
    """A convolution of 64 channels whose weight has so many scales for each output channel."""

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 1, 8), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        data: Any = np.ones((32, 64, 1, 1), np.int8)
        if palette:
            indices: Any = data.astype(types.nptype_from_builtin(types.uint4))
            data = mb.constexpr_lut_to_dense(indices=indices, lut=np.ones((1, 1, 1, 1, 16, 1), np.float16))
        scale = np.linspace(0.5, 1, 32 * scales, dtype=np.float16).reshape(32, scales, 1, 1)
        return mb.conv(x=x, weight=mb.constexpr_blockwise_shift_scale(data=data, scale=scale), name="y")

    return program


@pytest.mark.parametrize(
    ("program", "target", "rule"),
    [
        (scaled(2), "iPhone 16 Pro Max/iOS 27", "fault-block-scales"),
        (scaled(2), "M5/macOS 27", "fault-block-scales-elsewhere"),
        (scaled(2, palette=True), "M5/macOS 27", "fault-palette-block-scales"),
        (scaled(1), "iPhone 16 Pro Max/iOS 27", ""),
        (scaled(1, palette=True), "M5/macOS 27", ""),
    ],
)
def test_scales_of_blocks_are_wrong_on_the_engine(
    program: Program, target: str, rule: str, tmp_path: Path
) -> None:
    ane.to_coreai(program, tmp_path / "m.aimodel")
    found = {name for name in rules_at(tmp_path / "m.aimodel", target) if "block-scales" in name}
    assert found == ({rule} if rule else set())


@pytest.mark.parametrize(
    ("width", "units", "said"), [(6, "ALL", True), (8, "ALL", False), (6, "CPU_AND_NE", False)]
)
def test_values_of_another_width_than_the_queries(width: int, units: str, said: bool, tmp_path: Path) -> None:
    shapes = ((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, width))

    @mb.program(input_specs=[mb.TensorSpec(s, dtype=types.fp16) for s in shapes], opset_version=ct.target.iOS18)
    def program(q: Var, k: Var, v: Var) -> Var:
        return mb.scaled_dot_product_attention(query=q, key=k, value=v)

    ane.to_coreai(program, tmp_path / "m.aimodel")
    found = ane.lint(tmp_path / "m.aimodel", Target.parse(PHONE, units)).findings
    assert ("coreai-uneven-heads" in {f.rule for f in found}) == said


def test_inspect_has_the_findings_and_apply_repairs_them(tmp_path: Path) -> None:
    path = save_asset(tmp_path / "m.aimodel", of(lambda x: x.argmax(1)), [half(1, 5, 4)])
    inspection = ane.inspect(path, PHONE)
    (finding,) = (f for f in inspection.all_findings if f.rule == "fault-argmax-narrow")
    assert finding.remedy == "replace_faulty_ops"
    assert "carried over" in "".join(inspection.notes)
    with pytest.warns(ane.SurgeryWarning, match="expected time would rise"):
        repaired = ane.apply(path, [finding.remedy], target=PHONE, quiet=True)
    assert "fault-argmax-narrow" not in {f.rule for f in ane.inspect(repaired.model, PHONE).all_findings}


def test_what_is_carried_over_from_core_ml_has_a_lower_grade(tmp_path: Path) -> None:
    model = of(lambda x: torch.cumsum(x, 1)[:, :3] + F.layer_norm(x, (3,)))
    asset = save_asset(tmp_path / "m.aimodel", model, [half(4, 3)])
    package = ane.save(ane.load(asset), tmp_path / "m.mlpackage")
    core_ai, core_ml = ({f.rule: f for f in ane.inspect(m, PHONE).all_findings} for m in (asset, package))
    lowered = [name for name, f in core_ai.items() if OVER in f.scope]
    assert lowered
    assert all(core_ai[name].grade is LOWER[core_ml[name].grade] for name in lowered)
    assert not any(OVER in f.scope for f in core_ml.values())
    own = [rule for rule in numeric.RULES if "apple/coreai-models" in rule.source]
    assert own
    assert all(carried(rule) is rule for rule in own)


def test_an_older_system_has_no_core_ai(tmp_path: Path) -> None:
    path = save_asset(tmp_path / "m.aimodel", of(torch.abs), [torch.ones(3)])
    assert rules_at(path, "A19 Pro/iOS 26") == {"coreai-release"}
    assert rules_at(path) == set()


def test_every_row_says_where_and_who() -> None:
    assert all(rule.source and rule.because and str(rule.scope) for rule in RULES)
    assert not CARRIED.keys() & {rule.id for rule in RULES}


def test_lint_is_of_core_ai_models(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="anesurgery see"):
        ane.lint(tmp_path / "m.mlpackage")


def test_a_target_of_all_chips_is_a_word() -> None:
    assert str(ane.Lint((), Target.parse(None))).endswith("this model on any chip")
