"""Padding in fp16, in the default pipeline, in any graph, and in converted models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from conversion import convert
from hypothesis import given, settings
from hypothesis import strategies as st
from padded_axes import EVEN, ODD, RTOL, STEP, hidden, kinds, program_of, weight
from pass_cases import rewrites, table

from anesurgery.facts.dependence import slice_back
from anesurgery.mil import Program, Var, mb, types
from anesurgery.passes.pad_last_axis import PadLastAxis
from anesurgery.testing import apply_pass, assert_same_numbers
from anesurgery.text import to_text

FP16 = types.fp16


# fp16, versions, the default pipeline


# Any program


CARRIERS: dict[str, Callable[[Var], Var]] = {
    "relu": lambda v: mb.relu(x=v),
    "tanh": lambda v: mb.tanh(x=v),
    "gelu": lambda v: mb.gelu(x=v, mode="TANH_APPROXIMATION"),
    "exp": lambda v: mb.exp(x=mb.tanh(x=v)),
    "square": lambda v: mb.square(x=mb.sigmoid(x=v)),
    "clip": lambda v: mb.clip(x=v, alpha=-1.0, beta=2.0),
    "half": lambda v: mb.mul(x=v, y=np.float32(0.5)),
    "row": lambda v: mb.add(x=v, y=weight(v.shape[-1])),
    "from one": lambda v: mb.sub(x=np.float32(1), y=v),
    "cube": lambda v: mb.pow(x=mb.tanh(x=v), y=np.float32(3)),
    "divided": lambda v: mb.real_div(x=mb.tanh(x=v), y=mb.add(x=mb.exp(x=mb.tanh(x=v)), y=np.float32(1))),
    "mean": lambda v: mb.add(x=v, y=mb.reduce_mean(x=v, axes=[-1], keep_dims=True)),
    "softmax": lambda v: mb.softmax(x=v, axis=-1),
    "log": lambda v: mb.log(x=mb.add(x=mb.abs(x=v), y=np.float32(1))),
    "norm": lambda v: mb.layer_norm(x=v, axes=[-1], epsilon=1e-3),
}


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_graph_of_products_and_elementwise_ops(data: st.DataObject) -> None:
    multiple = data.draw(st.sampled_from([4, 8, 32]))
    widths = data.draw(st.lists(st.integers(2, 19), min_size=1, max_size=2))
    lead = data.draw(st.sampled_from([(2,), (1, 3)]))
    steps = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([*CARRIERS, *["linear", "matmul", "add", "mul", "scores"] * 3]),
                st.integers(0, 30),
                st.integers(0, 30),
                st.sampled_from(widths),
            ),
            min_size=2,
            max_size=14,
        )
    )
    outputs = data.draw(st.sets(st.integers(0, 30), min_size=1, max_size=3))

    def body(x: Var) -> Any:
        pool = [hidden(x, widths[0])]
        for n, (kind, i, j, width) in enumerate(steps):
            a, b = pool[i % len(pool)], pool[j % len(pool)]
            if kind in CARRIERS:
                pool.append(CARRIERS[kind](a))
            elif kind == "linear":
                pool.append(hidden(a, width, n))
            elif kind == "matmul":
                y = weight(width, a.shape[-1], seed=n)
                pool.append(mb.matmul(x=a, y=y, transpose_y=True))
            elif a.shape != b.shape:
                pool.append(mb.mul(x=a, y=mb.reduce_mean(x=b, axes=[-1], keep_dims=True)))
            elif kind == "scores":
                pool.append(mb.tanh(x=mb.matmul(x=mb.matmul(x=a, y=b, transpose_y=True), y=b)))
            else:
                pool.append(getattr(mb, kind)(x=a, y=mb.tanh(x=b)))
        return tuple(mb.identity(x=pool[k]) for k in {o % len(pool) for o in outputs})

    program = program_of(body, (*lead, 8))
    step = PadLastAxis(multiple=multiple)
    after, session = apply_pass(step, program)
    assert_same_numbers(program, after, rtol=RTOL)
    assert not apply_pass(step, after)[1].changes, to_text(after)
    assert all(c.proof is not None for c in session.changes)
    cuts = kinds(after, "slice_by_index")
    assert len({id(op.x) for op in cuts}) == len(cuts), to_text(after)
    for op in slice_back(after.functions["main"].outputs, set()):
        if op.op_type == "linear" or (op.op_type == "matmul" and op.y.op.op_type == "const"):
            assert op.outputs[0].shape[-1] % multiple == 0, to_text(after)


def test_products_that_nobody_reads_are_left_alone() -> None:
    def body(x: Var) -> Any:
        h = hidden(x)
        mb.tanh(x=hidden(hidden(h), seed=1))
        return mb.identity(x=h)

    after, session = apply_pass(STEP, program_of(body))
    (edit,) = session.changes
    assert edit.proof is not None
    assert len(kinds(after, "slice_by_index")) == 1


# Converted models


class Mlp(torch.nn.Module):
    """Odd widths, a gate, a residual, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.gate = torch.nn.Linear(12, 45), torch.nn.Linear(45, 77)
        self.up, self.down = torch.nn.Linear(45, 77), torch.nn.Linear(77, 45)
        self.norm, self.head = torch.nn.LayerNorm(45), torch.nn.Linear(45, 101)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.gelu(self.start(x))
        x = x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return self.head(self.norm(x))


class Gpt(torch.nn.Module):
    """One block of nanoGPT with an odd vocabulary and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(101, 24), torch.nn.Embedding(6, 24)
        self.norm, self.qkv = torch.nn.LayerNorm(24), torch.nn.Linear(24, 72)
        self.fc, self.proj = torch.nn.Linear(24, 96), torch.nn.Linear(96, 24)
        self.register_buffer("mask", torch.tril(torch.ones(6, 6)) == 0)
        self.register_buffer("positions", torch.arange(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(self.positions)
        q, k, v = (t.view(1, 6, 2, 12).transpose(1, 2) for t in self.qkv(self.norm(x)).split(24, 2))
        scores = (q @ k.transpose(2, 3) / 12**0.5).masked_fill(self.mask, -1e4)
        x = x + (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(1, 6, 24)
        x = x + self.proj(torch.nn.functional.gelu(self.fc(self.norm(x))))
        return torch.nn.functional.linear(self.norm(x), self.wte.weight)


@cache
def converted(model: str, how: str, ios: int, precision: str) -> tuple[Program, Any, Any]:
    torch.manual_seed(0)
    module = (Mlp() if model == "mlp" else Gpt()).eval()
    example = torch.randn(2, 12) if model == "mlp" else torch.tensor([[0, 100, 64, 7, 99, 1]])
    program = convert(module, {"x": example}, how, f"iOS{ios}", precision)._mil_program
    (name,) = program.functions["main"].inputs
    values = example.numpy().astype(np.int32 if model == "gpt" else np.float32)
    return program, {name: values}, module(example).detach().numpy()


def test_a_converted_model_stays_after_the_default_pipeline(settled: Callable[[Program], Program]) -> None:
    program, inputs, _ = converted("mlp", "trace", 17, "FLOAT16")
    after, _ = apply_pass(STEP, program)
    later = settled(after)
    assert_same_numbers(program, later, inputs, rtol=RTOL)
    assert not apply_pass(STEP, later)[1].changes
    assert len(kinds(later, "slice_by_index")) == 2


def fp16_weights_stay_fp16(x: Var) -> Any:
    h = mb.linear(x=x, weight=weight(ODD, 8, dtype=np.float16), bias=weight(ODD, dtype=np.float16))
    h = mb.mul(x=mb.gelu(x=h, mode="EXACT"), y=weight(ODD, dtype=np.float16))
    return mb.linear(x=h, weight=weight(EVEN, ODD, dtype=np.float16)), mb.softmax(x=h, axis=-1)


test_cases, test_surroundings = table(
    STEP,
    *(rewrites(program_of, fp16_weights_stay_fp16, dtype=FP16, rtol=0.001) for precision in ["fp32", "fp16"]),
)
