"""Ranks of converted models: a transformer, windows of rank 6, and packages of others."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import assert_close
from conversion import convert

from anesurgery.interpret import run
from anesurgery.loading import load
from anesurgery.mil import Program, Var, constant, ct, np_dtype, operands, walk_ops
from anesurgery.ops import BROADCASTING
from anesurgery.passes.explicit_broadcast import ExplicitBroadcast
from anesurgery.passes.negate_subtract import NegateSubtract
from anesurgery.passes.rerank import Rerank
from anesurgery.regions.views import FRAMES
from anesurgery.rewriting.host import pass_pipeline
from anesurgery.rewriting.passes import Pass
from anesurgery.testing import apply_pass, assert_same_numbers, random_inputs
from anesurgery.text import to_text


class Block(torch.nn.Module):
    """Attention with a mask and a relative bias of lower rank, an MLP, gates and scales."""

    bias: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48)
        self.gate = torch.nn.Parameter(torch.randn(16))
        self.register_buffer("bias", torch.randn(8, 8))
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)) == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, 8, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)).masked_fill(self.mask, -1e4) - self.bias
        y = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(1, 8, 16)
        return x + torch.tanh(y) * self.gate


class Windows(torch.nn.Module):
    """Swin's partition into windows and back, with a bias for each place in a window: rank 6 in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(1, 1, 4, 1, 4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.view(1, 2, 4, 2, 4, 3) + self.bias
        y = torch.relu(y).permute(0, 1, 3, 2, 4, 5).reshape(4, 16, 3)
        y = torch.softmax(y, -1).view(1, 2, 2, 4, 4, 3).permute(0, 1, 3, 2, 4, 5)
        return y.amax(dim=(2, 4)).reshape(1, 4, 3)


@cache
def converted(
    kind: type[torch.nn.Module], how: str, ios: int, precision: str, step: Pass | None = None
) -> Program:
    torch.manual_seed(0)
    module, x = kind().eval(), torch.zeros(1, 8, 16) if kind is Block else torch.zeros(1, 8, 8, 3)
    pipeline = ct.PassPipeline.DEFAULT if step is None else pass_pipeline([step])
    made = convert(module, {"x": x}, how, f"iOS{ios}", precision, pass_pipeline=pipeline)
    program: Program = made._mil_program
    return program


SPELLINGS = [
    (how, ios, precision)
    for how in ("trace", "export")
    for ios, precision in ((15, "FLOAT16"), (16, "FLOAT32"), (17, "FLOAT16"), (18, "FLOAT16"))
]


def weight_bytes(program: Program) -> int:
    values = [constant(v) for op in walk_ops(program) if op.op_type == "const" for v in op.outputs]
    return sum(v.nbytes for v in values if isinstance(v, (np.ndarray, np.generic)))


@pytest.mark.one_of(9)
@pytest.mark.parametrize(("how", "ios", "precision"), SPELLINGS)
def test_operands_of_one_rank(how: str, ios: int, precision: str) -> None:
    program = converted(Block, how, ios, precision)
    after, session = apply_pass(ExplicitBroadcast(), program)
    assert session.changes, session.refusals
    assert all(change.proof and change.proof.max_abs == 0 for change in session.changes)
    for op in walk_ops(after):
        if op.op_type in BROADCASTING:
            read = [v for _, v in operands(op) if v.shape]
            assert {len(v.shape) for v in read} == {len(op.outputs[0].shape)}, to_text(op)
    assert weight_bytes(after) <= weight_bytes(program) + 1000
    for arithmetic in ("fp32", "fp16"):
        assert_same_numbers(program, after, precision=arithmetic)
    assert not apply_pass(ExplicitBroadcast(), after)[1].changes


@pytest.mark.one_of(9)
@pytest.mark.parametrize(("how", "ios", "precision"), SPELLINGS)
def test_the_legacy_form(how: str, ios: int, precision: str) -> None:
    """No subtraction, full shapes, rank 4: what the older format has layers for."""
    step = ExplicitBroadcast(rank4=True, tile=True, materialize_limit=5000)
    program = converted(Block, how, ios, precision)
    middle, _ = apply_pass(NegateSubtract(), program)
    after, session = apply_pass(step, middle)
    assert session.changes
    for op in walk_ops(after):
        floats = any(np_dtype(v).kind == "f" for v in op.outputs)
        if op.op_type in FRAMES and floats and op.outputs[0].shape and op.op_type != "cast":
            high = {len(v.shape) for v in op.outputs} | {len(op.x.shape) if op.inputs.get("x") else 4}
            assert high <= {4, 5}, to_text(op)
        if op.op_type in BROADCASTING:
            wide = {tuple(v.shape) for _, v in operands(op) if v.shape}
            assert wide == {tuple(op.outputs[0].shape)}, to_text(op)
    assert_same_numbers(program, after, rtol=1e-5)
    assert not apply_pass(step, after)[1].changes


@pytest.mark.one_of(20)
@pytest.mark.parametrize("step", [ExplicitBroadcast(), Rerank()], ids=str)
@pytest.mark.parametrize(("how", "ios", "precision"), SPELLINGS)
def test_windows_of_many_axes_are_converted_by_either(how: str, ios: int, precision: str, step: Pass) -> None:
    after = converted(Windows, how, ios, precision, step)
    assert max(len(v.shape or ()) for op in walk_ops(after) for v in op.outputs) <= 5
    assert not apply_pass(step, after)[1].changes
    (name,) = after.functions["main"].inputs
    x = np.random.default_rng(0).standard_normal((1, 8, 8, 3)).astype(np.float32)
    torch.manual_seed(0)
    expected = Windows()(torch.from_numpy(x)).detach().numpy()
    (found,) = run(after, {name: x}).values()
    assert_close(found, expected, rtol=2e-3 if precision == "FLOAT16" else 1e-5)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("package", ["basic_pitch_nmp", "silero_unified"])
@pytest.mark.parametrize("step", [ExplicitBroadcast(), Rerank(at_least=4)], ids=str)
def test_packages_of_others_keep_their_numbers(
    corpus: Path, package: str, step: ExplicitBroadcast | Rerank
) -> None:
    program = load(corpus / f"{package}.mlpackage").program
    after, session = apply_pass(step, program)
    for change in session.changes:
        assert change.proof is not None or change.unchecked
    assert isinstance(next(iter(after.functions["main"].inputs.values())), Var)
    assert_same_numbers(program, after, random_inputs(program), rtol=1e-4)
