"""Code that takes rows by what was computed is traced so that it is right for other rows than those it saw."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from torch.nn.functional import linear, one_hot

from anesurgery import frontend
from anesurgery.errors import NotExpressible
from anesurgery.interpret import run
from anesurgery.mil import Array, ct, quiet_host
from anesurgery.shipping.converting import Traceable, check

TOKENS, WIDTH, EXPERTS, CHOSEN = 6, 4, 3, 2


class Mixture(torch.nn.Module):
    """A router, and experts that are matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = torch.nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def chosen(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares, chosen = torch.topk(self.router(x).softmax(-1), CHOSEN, dim=-1)
        return shares, chosen


class Hit(Mixture):
    """It loops over the experts that some token chose, as DBRX and others do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.chosen(x)
        total = torch.zeros_like(x)
        mask = one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slots, tokens = torch.where(mask[hit[0]])
            rows = linear(x[tokens], self.experts[hit[0]]) + 1
            total.index_add_(0, tokens, rows * shares[tokens, slots, None])
        return total


class Sorted(Mixture):
    """It sorts the rows by their expert, as JetMoe does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.chosen(x)
        counts = torch.zeros(len(x), EXPERTS).scatter(1, chosen, 1).long().sum(0)
        order = chosen.flatten().sort(0)[1]
        tokens = order.div(CHOSEN, rounding_mode="trunc")
        gathered: Any = x[tokens]
        parts = gathered.split(counts.tolist(), dim=0)
        rows = torch.cat([linear(part, w) + 1 for part, w in zip(parts, self.experts, strict=True)], dim=0)
        return torch.zeros_like(x).index_add(0, tokens, rows * shares.flatten()[order][:, None])


class Written(torch.nn.Module):
    """It writes a bool, and joins what is empty."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(TOKENS, WIDTH, dtype=torch.bool).scatter(-1, x.argmax(-1, keepdim=True), False)
        return torch.cat([x[:0], torch.where(hidden, -x, x)], dim=0)


def rows(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


def converted(module: Any, mode: AbstractContextManager[Any]) -> Callable[[torch.Tensor], Array]:
    """The module as it was traced on zeros, of which each token chooses the same experts."""
    frontend.register()
    with quiet_host(), torch.no_grad():
        trace: Any = torch.jit.trace
        with mode:
            graph = trace(module.eval(), (torch.zeros(TOKENS, WIDTH),), check_trace=False)
        model: Any = ct.convert(
            graph,
            inputs=[ct.TensorType("x", (TOKENS, WIDTH))],
            compute_precision=ct.precision.FLOAT32,
            minimum_deployment_target=ct.target.iOS18,
            convert_to="milinternal",
        )
    return lambda x: next(iter(run(model, {"x": x.numpy()}).values()))


@pytest.mark.one_of(3)
@pytest.mark.parametrize("kind", [Hit, Sorted, Written])
def test_other_rows_than_those_of_the_trace(kind: type[Any]) -> None:
    module = kind()
    model = converted(module, Traceable())
    for seed in range(3):
        with torch.no_grad():
            assert_close(model(rows(seed)), module(rows(seed)).numpy(), 2e-6)


def test_torch_computes_the_same_within_it() -> None:
    for kind in (Hit, Sorted, Written):
        module = kind()
        with torch.no_grad():
            with Traceable():
                own = module(rows(1))
            torch.testing.assert_close(own, module(rows(1)))


NAMED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "squeeze": lambda x: x[:, :1].squeeze(dim=1),
    "cat": lambda x: torch.cat(tensors=(x, x), dim=1),
    "where": lambda x: torch.where(condition=x > 0, input=x, other=-x),
    "unbind": lambda x: torch.unbind(input=x, dim=1)[0],
    "an expert's number": lambda x: x[(x[:, 0] < 9).nonzero().squeeze(dim=-1)[0]],
}


@pytest.mark.parametrize("call", NAMED)
def test_arguments_may_be_named(call: str) -> None:
    with Traceable():
        own = NAMED[call](rows(1))
    torch.testing.assert_close(own, NAMED[call](rows(1)))


def test_a_plain_trace_keeps_the_experts_of_its_example() -> None:
    module = Sorted()
    try:
        model = converted(module, nullcontext())
    except Exception:  # of the host: the shapes hang on numbers
        return
    with torch.no_grad():
        assert np.abs(model(rows(1)) - module(rows(1)).numpy()).max() > 0.1


def traced(module: Any, x: torch.Tensor) -> Any:
    trace: Any = torch.jit.trace
    with quiet_host(), torch.no_grad(), Traceable() as mode:
        graph = trace(module, (x,), check_trace=False)
    assert mode.acted
    return graph


class Marked(torch.nn.Module):
    """It does what is not for each row of its own with the rows that are marked."""

    def __init__(self, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(x, x[:, 0] > 0.1)


REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rows by nonzero": lambda x, mask: x + x[mask.nonzero().squeeze(-1)].sum(0),
    "nonzero in a sum": lambda x, mask: x + mask.nonzero().sum(),
    "nonzero as rows of a choice": lambda x, mask: x.index_select(0, mask.nonzero().squeeze(-1)),
    "places in a sum": lambda x, mask: x + torch.where(mask)[0].sum(),
    "rows of another axis": lambda x, mask: x + x.t()[torch.where(mask)[0][:1]].sum(),
    "places behind a slice": lambda x, mask: x + x[:, torch.where(mask)[0]].sum(),
    "groups that are not joined": lambda x, mask: x + _first_half(x),
}
"""What stands in the code of other models, and is no choice of experts."""


def _first_half(x: Any) -> Any:
    sizes = (x[:, :2].long() * 0 + len(x) // 2)[0].tolist()
    return x.split(sizes)[0]


@pytest.mark.parametrize("use", REFUSED)
def test_another_use_of_places_is_refused(use: str) -> None:
    with pytest.raises(NotExpressible, match="a trace would keep|not joined again"):
        traced(Marked(REFUSED[use]), rows(0))


SEEN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "their number": lambda x, mask: x * len(mask.nonzero()),
    "their sum": lambda x, mask: x + x[torch.where(mask)[0]].sum(0),
    "a number of one": lambda x, mask: sum((x[int(i)] for i in mask.nonzero()), x),
}
"""What no list of uses finds, and other inputs do."""


@pytest.mark.parametrize("use", SEEN)
def test_what_a_trace_keeps_is_seen_on_other_inputs(use: str) -> None:
    module = Marked(SEEN[use])
    graph = traced(module, rows(0))
    with (
        quiet_host(),
        torch.no_grad(),
        pytest.raises(NotExpressible, match="keeps what was computed for its example"),
    ):
        check(graph, module, [(rows(1),)])


@pytest.mark.parametrize("kind", [Hit, Sorted, Written])
def test_mixtures_are_the_same_on_other_inputs(kind: type[Any]) -> None:
    module = kind().eval()
    graph = traced(module, torch.zeros(TOKENS, WIDTH))
    with quiet_host(), torch.no_grad():
        check(graph, module, [(rows(1),), (rows(2)[:1].expand(TOKENS, WIDTH),)])
