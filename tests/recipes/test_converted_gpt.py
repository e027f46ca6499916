"""A converted nanoGPT, in every way that it can be converted: the first and the last op become legal."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from conversion import convert

from anesurgery import apply
from anesurgery.interpret import run
from anesurgery.mil import Program, ct, np_dtype, quiet_host, walk_ops
from anesurgery.passes.embedding_matmul import EmbeddingMatmul
from anesurgery.passes.select_last_token import SelectLastToken
from anesurgery.rewriting.host import pass_pipeline
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import Session
from anesurgery.testing import apply_pass, assert_same_numbers

WORDS, LENGTH = 2500, 40


class Gpt(torch.nn.Module):
    """One block: learned positions, causal attention, an MLP, a tied head."""

    positions: torch.Tensor

    def __init__(self, selects: bool) -> None:
        super().__init__()
        self.selects = selects
        self.wte, self.wpe = torch.nn.Embedding(WORDS, 16), torch.nn.Embedding(LENGTH, 16)
        self.norm, self.qkv = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48)
        self.mlp, self.last_norm = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)) == 0)
        self.register_buffer("positions", torch.arange(LENGTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.logits(ids, self.positions)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(positions)
        q, k, v = self.qkv(self.norm(x)).split(16, dim=2)
        scores = (q @ k.transpose(1, 2)).masked_fill(self.mask, float("-inf"))
        x = x + torch.softmax(scores, dim=-1) @ v
        x = self.last_norm(x + torch.nn.functional.gelu(self.mlp(x)))
        x = x[:, [-1], :] if self.selects else x
        return torch.nn.functional.linear(x, self.wte.weight)


@cache
def converted(how: str, ios: int, precision: str, selects: bool = False) -> Program:
    torch.manual_seed(0)
    module, ids = Gpt(selects).eval(), torch.zeros(1, LENGTH, dtype=torch.int64)
    program: Program = convert(module, {"ids": ids}, how, f"iOS{ios}", precision)._mil_program
    return program


SPELLINGS = [
    (how, ios, precision)
    for how in ("trace", "export")
    for ios in (15, 16, 17, 18)
    for precision in ("FLOAT16", "FLOAT32")
]


def once(step: Pass, program: Program) -> tuple[Program, Session]:
    """The program after one edit, which the pass then leaves alone."""
    after, session = apply_pass(step, program)
    assert len(session.changes) == 1, session.refusals
    assert not apply_pass(step, after)[1].changes
    return after, session


def inputs_of(program: Program) -> dict[str, Any]:
    ids = np.resize(np.array([[0, WORDS - 1, 2048, 2049, 7, 64, 63, 1]], np.int32), (1, LENGTH))
    return {next(iter(program.functions["main"].inputs)): ids}


class OwnPositions(Gpt):
    """Positions are an input too."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.logits(ids, positions)


class FloatIds(Gpt):
    """Ids are given as floats."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.logits(ids.long(), self.positions)


class CountedPositions(Gpt):
    """Positions are counted, and ids become 32 bits long."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.logits(ids.to(torch.int32), torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))


GPTS: dict[str, tuple[type[Gpt], dict[str, torch.dtype]]] = {
    "int64": (Gpt, {"ids": torch.int64}),
    "int32": (Gpt, {"ids": torch.int32}),
    "own positions": (OwnPositions, {"ids": torch.int64, "positions": torch.int64}),
    "counted positions": (CountedPositions, {"ids": torch.int64}),
    "floats": (FloatIds, {"ids": torch.float32}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how", "ios"),
    [
        *[("int64", how, ios) for how in ("trace", "export") for ios in (15, 16, 17, 18)],
        *[
            (kind, how, ios)
            for kind in ("own positions", "floats")
            for how, ios in (("trace", 16), ("export", 18))
        ],
        *[("int32", "trace", 18), ("counted positions", "export", 17)],
    ],
)
def test_of_the_guard_of_ids_nothing_is_left(kind: str, how: str, ios: int) -> None:
    """Neither where the lookup becomes a product, nor where the gate of the recipe keeps the lookup."""
    cls, dtypes = GPTS[kind]
    torch.manual_seed(0)
    examples = {name: torch.zeros(1, LENGTH, dtype=dtype) for name, dtype in dtypes.items()}
    program = (
        converted(how, ios, "FLOAT16")
        if kind == "int64"
        else convert(cls(selects=False).eval(), examples, how, f"iOS{ios}", "FLOAT16")._mil_program
    )
    inputs = program.functions["main"].inputs
    ids, counted = inputs_of(program)[next(iter(inputs))], np.arange(LENGTH)[::-1][None]
    values = {
        name: (ids if i == 0 else counted).astype(np_dtype(var)) for i, (name, var) in enumerate(inputs.items())
    }
    (expected,) = run(program, values).values()
    for target in (None, "M1/macOS 14"):
        surgery = apply(program, "gpt2_ane", target=target, quiet=True)
        kinds = {op.op_type for op in walk_ops(surgery.program)}
        masks = set() if "causal_mask_tensor" not in dict(surgery.refusals) else {"select"}
        assert not kinds & {"greater_equal", "select"} - masks, (target, surgery.refusals)
        undone = "embedding_matmul" in dict(surgery.refusals)
        assumed = "assumed of the inputs: token ids are never negative" in surgery.notes
        assert assumed is (ios >= 17 or not undone), "before iOS 17 a lookup counts back by itself"
        assert ("gather" in kinds) is undone, surgery.refusals
        assert target is not None or not undone
        (after,) = run(surgery.program, values).values()
        assert_close(after, expected[:, -1:], rtol=1e-2)


@pytest.mark.quick_cases(
    "trace-15-FLOAT32-input", "trace-16-FLOAT16-matmul", "trace-18-FLOAT16-input", "export-17-FLOAT16-input"
)
@pytest.mark.one_of(2)
@pytest.mark.parametrize("mode", ["matmul", "input"])
@pytest.mark.parametrize(("how", "ios", "precision"), SPELLINGS)
def test_embedding_matmul(how: str, ios: int, precision: str, mode: str) -> None:
    program = converted(how, ios, precision)
    after, session = once(EmbeddingMatmul(mode=mode), program)
    for arithmetic in ("fp32", "fp16"):
        assert_same_numbers(program, after, inputs_of(program), precision=arithmetic, session=session)
    ops = list(walk_ops(after))
    assert "gather" not in [op.op_type for op in ops]
    tables = [op for op in ops if op.op_type == "const" and np.size(op.val.val) >= WORDS * 16]
    assert len(tables) == 1


@pytest.mark.quick_cases(
    "trace-15-FLOAT16-select_last_token",
    "trace-16-FLOAT32-select_last_token(position='input')",
    "trace-18-FLOAT16-select_last_token(position='input')",
    "export-17-FLOAT16-select_last_token",
)
@pytest.mark.one_of(2)
@pytest.mark.parametrize("step", [SelectLastToken(), SelectLastToken(position="input")], ids=str)
@pytest.mark.parametrize(("how", "ios", "precision"), SPELLINGS)
def test_select_last_token(how: str, ios: int, precision: str, step: SelectLastToken) -> None:
    program = converted(how, ios, precision)
    after, session = once(step, program)
    assert_same_numbers(program, after, inputs_of(program), rtol=1e-5, session=session)
    assert norms(after) == [(1, LENGTH, 16), (1, 1, 16)]
    assert after.functions["main"].outputs[0].shape == (1, 1, WORDS)


@pytest.mark.quick_cases("trace-15")
@pytest.mark.parametrize(("how", "ios"), [("trace", 15), ("trace", 18), ("export", 17)])
def test_a_gpt_that_selects_by_itself(how: str, ios: int) -> None:
    program = converted(how, ios, "FLOAT16", selects=True)
    after, _ = once(SelectLastToken(), program)
    assert_same_numbers(program, after, inputs_of(program), rtol=1e-5)
    assert norms(after) == [(1, LENGTH, 16), (1, 1, 16)]


@pytest.mark.quick_cases("15")
@pytest.mark.parametrize("ios", [15, 18])
def test_both_at_conversion_time(ios: int) -> None:
    """Inside coremltools' own pipeline, where scopes are kept by coremltools."""
    pipeline = pass_pipeline([SelectLastToken(), EmbeddingMatmul()])
    torch.manual_seed(0)
    module, ids = Gpt(selects=False).eval(), torch.zeros(1, LENGTH, dtype=torch.int64)
    with quiet_host():
        made = ct.convert(
            torch.jit.trace(module, ids),  # type: ignore[no-untyped-call]
            inputs=[ct.TensorType("ids", (1, LENGTH), dtype=np.int32)],
            minimum_deployment_target=getattr(ct.target, f"iOS{ios}"),
            pass_pipeline=pipeline,
            skip_model_load=True,
        )
    after = made._mil_program
    assert norms(after) == [(1, LENGTH, 16), (1, 1, 16)]
    assert "gather" not in [op.op_type for op in walk_ops(after)]
    inputs = inputs_of(converted("trace", ios, "FLOAT16"))
    expected = run(converted("trace", ios, "FLOAT16"), inputs)
    (found,) = run(after, inputs).values()
    (whole,) = expected.values()
    assert_close(found, whole[:, -1:], rtol=1e-5)


def norms(program: Program) -> list[tuple[int, ...]]:
    return [op.outputs[0].shape for op in walk_ops(program) if op.op_type == "layer_norm"]
