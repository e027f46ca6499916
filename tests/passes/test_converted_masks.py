"""Causal masks as real conversions write them: by trace and by export, for several targets, fp16 and fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from conversion import convert as convert_module

from anesurgery import frontend
from anesurgery.mil import Array, Program, np_dtype, producer, walk_ops
from anesurgery.passes.causal_mask_tensor import CausalMaskTensor
from anesurgery.testing import apply_pass, assert_same_numbers, reasons

Tensor = torch.Tensor
T, D, H = 8, 16, 2
LEAST = torch.finfo(torch.float32).min


class Attention(torch.nn.Module):
    """Two layers in nanoGPT's manner; `spelling` is a name in SPELLINGS or PADDED."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.wte, self.norm = torch.nn.Embedding(50, D), torch.nn.LayerNorm(D)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(D, 3 * D) for _ in range(2)])
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, ids: Tensor, *padding: Tensor) -> Tensor:
        x = self.wte(ids)
        for layer in self.layers:
            parts = layer(self.norm(x)).split(D, 2)
            q, k, v = (t.view(1, T, H, D // H).transpose(1, 2) for t in parts)
            b = self.bias[:, :, :T, :T]  # type: ignore[index]
            y = self.attend(q, k, v, b, *(p[:, None, None, :] for p in padding))
            x = x + y.transpose(1, 2).reshape(1, T, D)
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor, b: Tensor, *p: Tensor) -> Tensor:
        if self.spelling in FUSED:
            return F.scaled_dot_product_attention(q, k, v, **FUSED[self.spelling](b, *p))
        w = (q @ k.transpose(-2, -1)) * (1 / math.sqrt(D // H))
        if self.spelling == "view":
            return (torch.softmax((w + (1 - b) * -3e4).view(H, T, T), -1) @ v[0])[None]
        return torch.softmax({**SPELLINGS, **PADDED}[self.spelling](w, b, *p), -1) @ v


def steps() -> tuple[Tensor, Tensor]:
    return torch.arange(T)[:, None], torch.arange(T)[None, :]


def at_run_time(w: Tensor, b: Tensor) -> Tensor:
    n = torch.arange(w.size(-2))
    return w + (n[None, :] > n[:, None]).float() * -1e9


def window(w: Tensor, b: Tensor) -> Tensor:
    i, j = steps()
    return w.masked_fill((i - j < 0) | (i - j >= 3), -math.inf)


SPELLINGS: dict[str, Callable[..., Tensor]] = {
    "nanogpt": lambda w, b: w.masked_fill(b == 0, -math.inf),
    "products": lambda w, b: w * b - 1e4 * (1 - b),
    "one product": lambda w, b: w + (1 - b) * -1e9,
    "triu": lambda w, b: w + torch.triu(torch.full((T, T), -1e9), diagonal=1),
    "tril": lambda w, b: w.masked_fill(torch.tril(torch.ones(T, T)) == 0, -math.inf),
    "arange": lambda w, b: torch.where(steps()[1] <= steps()[0], w, LEAST),
    "run time": at_run_time,
    "where": lambda w, b: torch.where(b.bool(), w, torch.full_like(w, -1e4)),
    "floor": lambda w, b: torch.max(w + (1 - b) * LEAST, torch.tensor(LEAST)),
    "scaled": lambda w, b: w.masked_fill(b == 0, -1e9) / 4,
    "wide": lambda w, b: w.masked_fill(b == 0, -math.inf).float(),
    "biased": lambda w, b: (w - 0.5 * (steps()[0] - steps()[1]).abs()).masked_fill(b == 0, -math.inf),
    "window": window,
}
FUSED: dict[str, Callable[..., dict[str, Any]]] = {
    "flash": lambda b: {"is_causal": True},
    "boolean": lambda b: {"attn_mask": b == 1},
    "float": lambda b: {"attn_mask": (1 - b) * -1e9},
    "boolean and padding": lambda b, p: {"attn_mask": (b == 1) & p.bool()},
}
PADDED: dict[str, Callable[..., Tensor]] = {
    "add": lambda w, b, p: w.masked_fill(b == 0, -1e4) + (1 - p.float()) * -1e4,
    "sum": lambda w, b, p: w + ((1 - b) * -1e4 + (1 - p.float()) * -1e4),
    "or": lambda w, b, p: w.masked_fill((b == 0) | (p == 0), -math.inf),
    "not and": lambda w, b, p: w.masked_fill(~((b == 1) & (p == 1)), -1e4),
}


def program_and_inputs(
    module: torch.nn.Module, example: list[Tensor], how: str, ios: int, precision: str
) -> tuple[Program, dict[str, Array]]:
    """The program and what its inputs were; each keeps the name that the front end gives it."""
    named = dict(zip(("ids", "mask"), example, strict=False))
    program: Program = convert_module(module, named, how, f"iOS{ios}", precision)._mil_program
    arrays = [t.numpy().astype(np.int32) for t in example]
    return program, dict(zip(program.functions["main"].inputs, arrays, strict=True))


@cache
def convert(spelling: str, how: str, ios: int, precision: str) -> tuple[Program, dict[str, Array]]:
    frontend.register()
    torch.manual_seed(0)
    module = Attention(spelling).eval()
    example = [torch.randint(0, 50, (1, T))]
    if spelling in PADDED or spelling.endswith("padding"):
        example.append(torch.tensor([[1] * 6 + [0] * 2]))
    return program_and_inputs(module, example, how, ios, precision)


def masks_of(program: Program) -> list[Any]:
    """What is added to scores, or given to attention as its mask; the scores' dtype is the mask's."""
    found = []
    for op in walk_ops(program):
        if op.op_type == "scaled_dot_product_attention":
            found.append(op.attn_mask)
        elif op.op_type == "softmax":
            end = op.x
            while (behind := producer(end, "cast", "reshape", "mul", "real_div")) is not None:
                end = behind.x
            while constant_add(end):
                end = end.op.x
            found.append(end.op.y)
            assert np_dtype(end.op.x) == np_dtype(end.op.y)
    return list(dict.fromkeys(found))


def constant_add(var: Any) -> bool:
    """Is this a sum whose first term is a sum of scores and mask?"""
    op = producer(var, "add")
    return op is not None and producer(op.x, "add") is not None and op.x.shape == op.y.shape


def shut_out(program: Program) -> list[Array]:
    """The constants that shut something out."""
    values = [op.outputs[0].val for op in walk_ops(program) if op.op_type == "const"]
    arrays = [v for v in values if isinstance(v, np.ndarray) and v.dtype.kind == "f" and v.size > 1]
    return [v for v in arrays if v.min() <= -5000]


GONE = {
    "band_part",
    "range_1d",
    "fill",
    "tile",
    "logical_and",
    "logical_or",
    "less_equal",
    "greater",
    "maximum",
}


def check(program: Program, inputs: dict[str, Array], dtype: str) -> Program:
    """One tensor, checked and equal in numbers, and nothing else that makes a mask; the program afterwards."""
    after, session = apply_pass(CausalMaskTensor(), program)
    assert len(session.changes) == 2, reasons(session)
    assert all(c.proof is not None and c.proof.max_abs == 0 for c in session.changes)
    (mask,) = masks_of(after)
    assert str(np_dtype(mask)) == dtype
    assert mask.rank == 4
    (constant,) = shut_out(after)
    assert set(np.unique(constant)) == {0, -1e4}
    types = [op.op_type for op in walk_ops(after)]
    assert not GONE & set(types)
    guards = [op for op in walk_ops(after) if op.op_type == "select"]  # of the embedding's ids
    assert all(op.outputs[0].rank == 2 for op in guards)
    assert_same_numbers(program, after, inputs)
    assert not apply_pass(CausalMaskTensor(), after)[1].changes
    return after


VARIANTS = [("trace", 15, "FLOAT32"), ("export", 17, "FLOAT16"), ("trace", 18, "FLOAT16")]


COMMON = ("nanogpt", "flash", "float", "boolean and padding")
"""These are converted in each variant, the rarer ones in one of them, in turn."""
RARE = [name for name in (*SPELLINGS, *FUSED, *PADDED, "view") if name not in COMMON]


@pytest.mark.quick_cases(
    "nanogpt-trace-15-FLOAT32",
    "flash-trace-18-FLOAT16",
    "float-trace-15-FLOAT32",
    "boolean and padding-trace-15-FLOAT32",
    "one product-export-17-FLOAT16",
    "triu-trace-18-FLOAT16",
    "tril-trace-15-FLOAT32",
    "run time-trace-18-FLOAT16",
    "where-trace-15-FLOAT32",
    "window-trace-18-FLOAT16",
    "add-export-17-FLOAT16",
    "boolean-trace-15-FLOAT32",
    "sum-trace-18-FLOAT16",
    "or-trace-15-FLOAT32",
    "view-trace-18-FLOAT16",
)
@pytest.mark.one_of(15)
@pytest.mark.parametrize(
    ("spelling", "how", "ios", "precision"),
    [(name, *variant) for name in COMMON for variant in VARIANTS]
    + [(name, *VARIANTS[i % 3]) for i, name in enumerate(RARE)],
)
def test_every_spelling(spelling: str, how: str, ios: int, precision: str) -> None:
    program, inputs = convert(spelling, how, ios, precision)
    check(program, inputs, precision.lower())


@pytest.mark.one_of(4)
@pytest.mark.parametrize("spelling", ["nanogpt", "flash", "or"])
def test_in_fp16_arithmetic(spelling: str) -> None:
    program, inputs = convert(spelling, "trace", 18, "FLOAT16")
    after, _ = apply_pass(CausalMaskTensor(), program)
    assert_same_numbers(program, after, inputs, precision="fp16", rtol=1e-3)


@pytest.mark.quick_cases("nanogpt-15", "boolean and padding-18")
@pytest.mark.one_of(2)
@pytest.mark.parametrize("ios", [15, 18])
@pytest.mark.parametrize("spelling", ["nanogpt", "flash", "boolean and padding", "sum"])
def test_the_mask_as_an_input(spelling: str, ios: int) -> None:
    program, inputs = convert(spelling, "trace", ios, "FLOAT16")
    after, session = apply_pass(CausalMaskTensor(as_input=True), program)
    assert len(session.changes) == 2, reasons(session)
    assert not shut_out(after)
    (change,) = session.contract
    assert change.names == ("causal_mask",)
    held = np_dtype(after.functions["main"].inputs["causal_mask"])
    assert held == (np.float32 if ios == 15 else np.float16)
    assert_same_numbers(program, after, inputs, session=session)
