"""Refusals in a report: a line for each cause, and what a named pass itself refused beside its ops."""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery.errors import Refusal
from anesurgery.rewriting.refusals import by_cause, cause, grouped_refusals, refusal_lines


@dataclass(frozen=True)
class Op:
    name: str


def stays(op_type: str, name: str, why: str = "run-time int32", remedy: str = "integers_as_floats") -> Refusal:
    return Refusal(f"{op_type} stays off the ANE: {why} ({remedy})", Op(name))


LEFT = [("apply_remedies", stays("gather" if k % 2 else "cast", f"op_{k}")) for k in range(8)]


def test_one_cause_is_one_line_whatever_the_ops() -> None:
    """The wrong version: a line for each type of op, and each text."""
    assert refusal_lines(LEFT) == [
        "8 ops stay off the ANE: run-time int32 (first at op_0); `integers_as_floats` is named for it"
    ]
    (one,) = refusal_lines(LEFT[:1])
    assert one == "cast stays off the ANE: run-time int32 (at op_0); `integers_as_floats` is named for it"
    assert refusal_lines(LEFT[::2])[0].startswith("4 cast ops stay off the ANE: ")


def test_what_a_named_pass_refused_is_said_with_its_ops() -> None:
    refused = [("integers_as_floats", Refusal(f"%var_{k} may pass 2048", Op(f"op_{k}"))) for k in range(3)]
    other = ("integers_as_floats", Refusal("it is an output", Op("op_3")))
    elsewhere = ("integers_as_floats", Refusal("%y may pass 2048", Op("far")))
    assert refusal_lines([*refused, other, *LEFT, elsewhere]) == [
        "integers_as_floats: %y may pass 2048 (at far)",
        "8 ops stay off the ANE: run-time int32 (first at op_0); "
        "`integers_as_floats` cannot help: %var_0 may pass 2048 (3 times); it is an output",
    ]


def test_what_was_tried_on_the_whole_is_said_once() -> None:
    """A second group of ops that names the same pass does not repeat it."""
    tried = ("integers_as_floats", Refusal("tried and undone: it gains nothing on this target"))
    others = [("apply_remedies", stays("topk", "op_9", "its indices are int32"))]
    first, second = refusal_lines([tried, *LEFT, *others])
    assert first.endswith("`integers_as_floats`: tried and undone: it gains nothing on this target")
    assert second.endswith("(at op_9); `integers_as_floats` is named for it")


def test_names_numbers_and_shapes_are_no_causes_and_types_are() -> None:
    """The wrong version: "fp16" and "fp32" are one cause, since both hold digits."""
    alike = ["%a_1 has the symbolic shape (is20, 128)", "%b_cast_fp16 has the symbolic shape (1, is3, 4)"]
    assert len({cause(Refusal(words)) for words in alike}) == 1
    assert cause(Refusal("50257 outputs of 512 inputs")) == cause(Refusal("1000 outputs of 64 inputs"))
    for one, other in [("it is fp16", "it is fp32"), ("%x is read elsewhere", "%x is read twice")]:
        assert cause(Refusal(one)) != cause(Refusal(other))
    two = [("auto", stays("linear", "l", "too long", name)) for name in ("fold_long_axis", "split_head")]
    assert len(by_cause(two)) == 2


def test_json_keeps_each_reason_and_each_place() -> None:
    rows = grouped_refusals([*LEFT, LEFT[0]])
    assert [(reason.split()[0], len(found)) for _, reason, found in rows] == [("cast", 5), ("gather", 4)]
