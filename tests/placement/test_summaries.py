"""An inspection begins with one sentence: share, time, what runs elsewhere and why, what may help."""

from __future__ import annotations

from typing import Any

import numpy as np

import anesurgery as ane
from anesurgery.mil import Program, Var, mb, types


def half_and_half() -> Program:
    """A product that the engine runs, and a running sum that it does not."""
    weight = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 512, 1024), dtype=types.fp16)])
    def program(x: Var) -> Any:
        y = mb.linear(x=x, weight=weight, name="product")
        return mb.relu(x=mb.cumsum(x=y, axis=1, name="running"), name="y")

    return program


def test_it_says_where_how_long_why_and_what_helps() -> None:
    found = ane.inspect(half_and_half(), target="M1/macOS 14")
    share, away, may_help = found.summary.split("; ")
    assert share.startswith("ANE: ")
    assert f"{found.counts['ane']} of {len(found.ops)} ops" in share
    assert share.endswith(f"on M1/macOS 14, about {found.time}")
    assert away == "cumsum running runs elsewhere: cumsum: the ANE has no running sum"
    assert "decompose_ops" in may_help
    assert str(found).startswith("ANE: ")
    assert found.to_json()["summary"] == found.summary


def test_where_everything_runs_there_it_says_no_more() -> None:
    weight = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 512, 1024), dtype=types.fp16)])
    def program(x: Var) -> Any:
        return mb.linear(x=mb.linear(x=x, weight=weight, name="a"), weight=weight, name="y")

    assert ane.inspect(program, target="M4/macOS 15").summary.startswith("ANE: every op on M4/macOS 15, about ")


def test_it_needs_none_of_our_words() -> None:
    said = ane.inspect(half_and_half(), target="M1/macOS 14").summary
    assert not {"site", "grade", "refusal", "residency", "verdict"} & set(said.lower().split())


def test_an_op_in_a_loop_names_the_loop_and_its_remedy() -> None:
    @mb.program(input_specs=[mb.TensorSpec((4,), dtype=types.fp16)])
    def program(x: Var) -> Any:
        rounds = mb.while_loop(
            _cond=lambda i, y: mb.less(x=i, y=3),
            _body=lambda i, y: (mb.add(x=i, y=1), mb.mul(x=y, y=y, name="inner")),
            loop_vars=(0, x),
            name="loop",
        )
        return mb.identity(x=rounds[1], name="y")

    (finding,) = [f for f in ane.inspect(program).row("inner").findings if f.rule == "control-flow"]
    assert finding.message == "inside while_loop %loop"
    assert finding.remedy == "unroll_loop"
