"""Estimates of ops that only the CPU runs: what they read, write and compute, and no artefact of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from statement import conv, of

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement import cost


def lookup(rows: int) -> Program:
    table = np.zeros((rows, 384), np.float16)

    return mb.program(input_specs=[mb.TensorSpec((1,), dtype=types.int32)], opset_version=ct.target.iOS17)(
        lambda ids: mb.gather(x=table, indices=ids, axis=0, name="row")
    )


def recurrent(op_type: str, steps: int) -> Program:
    rng, gates = np.random.default_rng(0), {"lstm": 4, "gru": 3}[op_type]
    weights = {f"weight_{k}": rng.standard_normal((128 * gates, 128)).astype(np.float32) for k in ("ih", "hh")}

    @mb.program(input_specs=[mb.TensorSpec((steps, 1, 128))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        start = {"initial_h": np.zeros((1, 128), np.float32)}
        if op_type == "lstm":
            start["initial_c"] = np.zeros((1, 128), np.float32)
        return getattr(mb, op_type)(x=x, **start, **weights, name="made")[0]

    return program


def cpu(program: Program, name: str) -> float:
    estimate = ane.inspect(program).row(name).estimate
    assert estimate is not None
    assert estimate.ane is None
    assert estimate.cpu is not None
    return estimate.cpu


def test_a_row_costs_the_same_whatever_the_table() -> None:
    assert cpu(lookup(50257), "row") == cpu(lookup(100), "row") < 1


@pytest.mark.parametrize("op_type", ["lstm", "gru"])
def test_a_step_costs_its_products(op_type: str) -> None:
    one, ten = (cpu(recurrent(op_type, n), "made_0") for n in (1, 10))
    assert ten == pytest.approx(10 * one)
    assert 1 < one < 100


def heads(equation: str) -> Program:
    """A product of one head, channels before tokens."""
    specs = [mb.TensorSpec(s, dtype=types.fp16) for s in ((1, 64, 1, 32), (1, 128, 1, 64))]

    return mb.program(input_specs=specs, opset_version=ct.target.iOS17)(
        lambda q, k: mb.relu(x=mb.einsum(values=(k, q), equation=equation, name="scores"))
    )


def test_the_einsum_of_a_head_is_estimated_as_a_product_of_its_flop() -> None:
    row = ane.inspect(heads("bkhc,bchq->bkhq")).row("scores")
    assert (row.legal, row.flop) == (True, 2 * 128 * 32 * 64)
    assert row.estimate is not None
    assert row.estimate.off[0] > 1.5  # no einsum is among the cases


def test_another_einsum_stays_unknown() -> None:
    row = ane.inspect(heads("nchw,nwhu->nchu")).row("scores")
    assert (row.legal, row.estimate) == (None, None)


def enlarged(op_type: str) -> Program:
    """Convolutions around an op that makes 64x64 of 32x32: those behind it have 71 operations per byte."""
    factor: Any = {"depth_to_space": {"block_size": 2}, "pixel_shuffle": {"upscale_factor": 2}}[op_type]

    def body(x: Var) -> Var:
        for _ in range(2):
            x = mb.relu(x=conv(64, 64, 3, 3)(x))
        x = getattr(mb, op_type)(x=x, **factor)
        for _ in range(2):
            x = mb.relu(x=conv(16, 16, 3, 3)(x))
        return x

    return of(body)()


ENLARGED = ("depth_to_space", "pixel_shuffle")


@pytest.mark.parametrize("op_type", ENLARGED)
def test_convolutions_above_the_cut_have_one_rate(op_type: str) -> None:
    found = ane.inspect(enlarged(op_type), "M4/macOS 27")
    assert {row.estimate.or_else for row in found.ops if row.estimate is not None} == {()}
    assert "unknown" not in found.counts


@pytest.mark.parametrize("op_type", ENLARGED)
def test_a_cut_that_is_open_too_far_is_noticed(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Any = (replace(cost.CONV_RATES[0], edge=1.2), *cost.CONV_RATES[1:])
    monkeypatch.setattr(cost, "CONV_RATES", rows)
    assert ane.inspect(enlarged(op_type), "M4/macOS 27").counts["unknown"] >= 8


def test_between_the_classes_nobody_knows() -> None:
    """62 operations per byte lie at the cut."""
    row = ane.inspect(of(conv(14, 14, 3, 3), (1, 14, 64, 64))(), "M4/macOS 27").ops[0]
    assert row.estimate is not None
    assert len(row.estimate.or_else) == 1
