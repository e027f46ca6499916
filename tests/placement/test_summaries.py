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
    share, time, away, may_help = found.summary.split("; ")
    assert share.startswith("On M1/macOS 14, ")
    assert f"{found.counts['ane']} of {len(found.ops)} ops" in share
    assert time == f"{found.time} by estimate"
    assert away == "cumsum running runs on the CPU: cumsum: the ANE has no running sum"
    assert may_help == "try decompose_ops"
    assert str(found).startswith(share[:60])
    assert found.to_json()["summary"] == found.summary


WHOLE = "On M4/macOS 15, every op runs on the Neural Engine; "


def test_where_everything_runs_there_it_says_no_more() -> None:
    weight = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 512, 1024), dtype=types.fp16)])
    def program(x: Var) -> Any:
        return mb.linear(x=mb.linear(x=x, weight=weight, name="a"), weight=weight, name="y")

    assert ane.inspect(program, target="M4/macOS 15").summary.startswith(WHOLE)


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
