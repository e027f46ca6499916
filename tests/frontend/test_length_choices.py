"""What a model chooses by the length of its text is refused where the choice would hold for every text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from anesurgery import frontend
from anesurgery.errors import PassError
from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types, walk_ops
from anesurgery.passes.add_cache import AddCache
from anesurgery.passes.add_cache.cached_function import chosen_by_length
from anesurgery.testing import apply_pass

LIMIT = 8
SHORT, LONG = torch.tensor([1.0, 0.1]), torch.tensor([0.5, 0.02])


class Longrope(torch.nn.Module):
    """Rows of a table, turned by angles whose speeds hang on the number of tokens."""

    speeds: torch.Tensor
    stored = True

    def __init__(self, long: torch.Tensor = LONG) -> None:
        super().__init__()
        self.long = long
        self.register_buffer("speeds", SHORT.clone())
        self.table = torch.nn.Embedding(11, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1])
        speeds = torch.where(torch.max(places) + 1 > LIMIT, self.long, SHORT)
        if self.stored:  # an export makes a state of a buffer that is written
            speeds = self.speeds.copy_(speeds)
        return self.table(ids) * torch.cos(places[:, None] * speeds)


def converted(model: Longrope, tokens: int, how: str) -> Program:
    """By trace or by export, for so many tokens."""
    frontend.register()
    model.stored = how == "trace"
    ids = torch.arange(tokens)[None] % 11
    with quiet_host(), torch.no_grad():
        if how == "trace":
            graph: Any = torch.jit.trace(model, ids, check_trace=False)  # type: ignore[no-untyped-call]
            inputs = [ct.TensorType("ids", shape=ids.shape, dtype=np.int32)]
        else:
            graph, inputs = torch.export.export(model, (ids,), strict=False).run_decompositions({}), None
        made: Program = ct.convert(
            graph,
            inputs=inputs,
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=ct.target.iOS17,
            convert_to="milinternal",
        )
    return made


@pytest.mark.parametrize("how", ["trace", "export"])
def test_a_conversion_for_longer_texts_says_that_shorter_ones_would_be_wrong(how: str) -> None:
    with pytest.raises(
        Exception, match="those for more than 8 tokens, so shorter texts get wrong results; use at"
    ):
        converted(Longrope(), LIMIT + 1, how)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("model", [Longrope(), Longrope(long=SHORT)])
def test_what_is_right_for_every_text_is_converted(how: str, model: Longrope) -> None:
    tokens = LIMIT if model.long is LONG else LIMIT + 4
    program = converted(model.eval(), tokens, how)
    ids = torch.arange(tokens)[None] % 11
    (name,) = next(iter(program.functions.values())).inputs
    (found,) = run(program, {name: ids.numpy().astype(np.int32)}).values()
    with torch.no_grad():
        for count in (3, tokens):  # a text is followed by any tokens
            expected = model(ids[:, :count]).numpy()
            np.testing.assert_allclose(found[:, :count], expected, rtol=1e-5, atol=1e-6)


# -- in a program --------------------------------------------------------------------------------------------

COMPARED: dict[str, tuple[Callable[..., Var], int]] = {
    "greater": (lambda length, n: mb.greater(x=length, y=n), LIMIT),
    "greater_equal": (lambda length, n: mb.greater_equal(x=length, y=n), LIMIT - 1),
    "less": (lambda length, n: mb.less(x=length, y=n), LIMIT - 1),
    "less_equal": (lambda length, n: mb.less_equal(x=length, y=n), LIMIT),
    "greater, turned": (lambda length, n: mb.greater(x=n, y=length), LIMIT - 1),
    "greater_equal, turned": (lambda length, n: mb.greater_equal(x=n, y=length), LIMIT),
    "less, turned": (lambda length, n: mb.less(x=n, y=length), LIMIT),
    "less_equal, turned": (lambda length, n: mb.less_equal(x=n, y=length), LIMIT - 1),
}


def chosen(word: str, tokens: int, long: torch.Tensor = LONG) -> Program:
    """Rows of a table times numbers that the largest position chooses; positions are an input."""
    build, _ = COMPARED[word]
    specs = [mb.TensorSpec((1, tokens), types.int32), mb.TensorSpec((1, tokens), types.int32)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(ids: Var, places: Var) -> Var:
        length = mb.add(x=mb.reduce_max(x=places, axes=[0, 1], keep_dims=False), y=np.int32(1))
        cond = build(length, np.int32(LIMIT))
        a, b = long.numpy(), SHORT.numpy()
        if word in ("less", "less_equal", "greater, turned", "greater_equal, turned"):
            a, b = b, a
        speeds = mb.select(cond=cond, a=a, b=b, name="speeds")
        angles = mb.mul(x=mb.reshape(x=mb.cast(x=places, dtype="fp32"), shape=[tokens, 1]), y=speeds)
        rows = mb.gather(x=np.ones((11, 2), np.float32), indices=ids, axis=0)
        return mb.mul(x=rows, y=mb.cos(x=angles), name="y")

    made: Program = program
    return made


@pytest.mark.one_of(3)
@pytest.mark.parametrize("word", COMPARED)
def test_the_length_from_which_on_the_choice_is_another(word: str) -> None:
    most = COMPARED[word][1]
    for tokens in (most, most + 1):
        positions = {"places": np.arange(tokens)}
        program = chosen(word, tokens)
        _, session = apply_pass(AddCache(prefill=3, fixed=positions), program)
        reasons = [str(r) for _, r in session.refusals]
        if tokens == most:
            assert not any("length of the text" in r for r in reasons)
        else:
            assert reasons == [
                "speeds: its constants depend on the length of the text: the model has those for more than "
                f"{most} tokens, so shorter texts get wrong results; use at most {most} positions to get "
                "those for shorter texts, or give both sets the same values (short_factor and "
                "long_factor of a longrope)"
            ]


def test_a_required_cache_is_an_error() -> None:
    with pytest.raises(PassError, match="constants depend on the length of the text"):
        apply_pass(AddCache(prefill=3, fixed={"places": np.arange(12)}, required=True), chosen("greater", 12))


def test_equal_numbers_and_choices_by_other_things_are_let_be() -> None:
    _, session = apply_pass(
        AddCache(prefill=3, fixed={"places": np.arange(12)}), chosen("greater", 12, long=SHORT)
    )
    assert not any("length of the text" in str(r) for _, r in session.refusals)
    free = [op for op in walk_ops(chosen("greater", 12)) if op.op_type == "select"]
    assert [chosen_by_length(op) for op in free] == [
        None
    ]  # the positions are an input, so that it chooses as it runs
