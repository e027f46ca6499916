"""Random graphs under a limit: equal bit for bit, no dead op, borders as small as brute force finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.files.sequence import Chain
from anesurgery.interpret import Predictor
from anesurgery.mil import Operation, Program, Var, ct, mb, operands, types, walk_ops
from anesurgery.splitting.cuts import Cuts

ROWS, WIDTHS = 4, (12, 16, 24)
Span = tuple[int, int]


@dataclass
class Growth:
    """A graph that grows op by op."""

    rng: np.random.Generator
    found: list[Var] = field(default_factory=list)
    pool: dict[tuple[int, int], list[Var]] = field(default_factory=dict)
    """Weights by shape; some are read more than once."""

    def linear(self, x: Var, wide: int) -> Var:
        shape = (wide, int(x.shape[1]))
        known = self.pool.setdefault(shape, [])
        if not known or self.rng.random() < 0.6:
            known.append(mb.const(val=(self.rng.standard_normal(shape) / 4).astype(np.float16)))
        made: Var = mb.linear(x=x, weight=known[self.rng.integers(len(known))])
        return made

    def step(self) -> None:
        """One more op: a product, a sum with a value of before, or a function."""
        x = self.found[-1] if self.rng.random() < 0.6 else self.found[self.rng.integers(len(self.found))]
        alike = [v for v in self.found if v.shape == x.shape and v is not x]
        if alike and self.rng.random() < 0.45:
            self.found.append(mb.add(x=x, y=alike[self.rng.integers(len(alike))]))
        elif self.rng.random() < 0.25:
            self.found.append(mb.tanh(x=x))
        else:
            self.found.append(self.linear(x, int(self.rng.choice(WIDTHS))))

    def keep(self, state: Var) -> None:
        """A state is read and written."""
        new = mb.add(x=mb.read_state(input=state), y=self.linear(self.found[-1], 16))
        self.found.append(mb.coreml_update_state(state=state, value=new))

    def grow(self, x: Var, states: Sequence[Var]) -> tuple[Var, ...]:
        """All of it; what nobody reads is an output."""
        self.found.append(self.linear(x, 16))
        for number in range(9):
            self.step()
            if states and number in (2, 6):
                self.keep(states[number // 4])
        return tuple(v for v in self.found if not v.child_ops)


def graph(seed: int) -> tuple[Program, int]:
    """Products, sums and skips; some weights are shared, and every other graph has states. And its bytes."""
    growth = Growth(np.random.default_rng(seed))
    x = mb.TensorSpec((ROWS, 8), dtype=types.fp16)
    states = [mb.StateTensorSpec((ROWS, 16), types.fp16) for _ in range(2)]

    def with_states(x: Var, first: Var, second: Var) -> Any:
        return growth.grow(x, (first, second))

    def without(x: Var) -> Any:
        return growth.grow(x, ())

    build, specs = (with_states, [x, *states]) if seed % 2 else (without, [x])
    made: Program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(build)
    return made, sum(v.val.nbytes for known in growth.pool.values() for v in known)


def limited(seed: int) -> tuple[Program, int]:
    """A graph, and the bytes of a chunk at most."""
    program, total = graph(seed)
    return program, int(total * (0.3 + 0.05 * seed))


def ops_of(program: Program) -> list[Operation]:
    return [op for op in walk_ops(program) if op.op_type != "const"]


def reads(op: Operation) -> list[Var]:
    return [v for _, v in operands(op)]


def brute_force(program: Program, limit: int) -> tuple[int, int] | None:
    """The fewest chunks of at most so many bytes, and the fewest bytes at their borders, of all ways to cut."""
    ops = ops_of(program)
    last = {v: i for i, op in enumerate(ops) for v in reads(op)}
    made = {v: i for i, op in enumerate(ops) for v in op.outputs}
    states = [v for v in program.functions["main"].inputs.values() if types.is_state(v.sym_type)]
    used = [[i for i, op in enumerate(ops) if s in reads(op)] for s in states]
    barred = {p for places in used for p in range(places[0] + 1, places[-1] + 1)}
    cost = {
        p: sum(2 * int(np.prod(v.shape)) for v, at in made.items() if at < p <= last.get(v, -1))
        for p in range(1, len(ops))
        if p not in barred
    }

    def weight(span: Span) -> int:
        held = {id(v): v.val.nbytes for op in ops[slice(*span)] for v in reads(op) if is_weight(v)}
        return sum(held.values())

    for count in range(1, len(ops) + 1):
        ways = [(0, *inner, len(ops)) for inner in combinations(cost, count - 1)]
        fitting = [way for way in ways if all(weight(span) <= limit for span in pairwise(way))]
        if fitting:
            return count, min(sum(cost[p] for p in way[1:-1]) for way in fitting)
    return None


def is_weight(var: Var) -> bool:
    return var.op is not None and var.op.op_type == "const" and np.ndim(var.val) > 0  # biases too


def alive(program: Program) -> bool:
    """Does each op serve an output, or write a state?"""
    function, wanted = program.functions["main"], set[Var]()
    pending = [*function.outputs, *(v for op in ops_of(program) if "update" in op.op_type for v in op.outputs)]
    while pending:
        var = pending.pop()
        if var not in wanted:
            wanted.add(var)
            pending += reads(var.op) if var.op is not None else []
    return all(wanted.intersection(op.outputs) for op in ops_of(program))


def runs(model: Any) -> list[bytes]:
    """What three calls give, states kept between them."""
    predictor = Predictor(model, precision="fp16")
    state, rng = predictor.make_state(), np.random.default_rng(1)
    found = [predictor({"x": rng.standard_normal((ROWS, 8)).astype(np.float16)}, state=state) for _ in range(3)]
    return [one[name].tobytes() for one in found for name in sorted(one)]


def cut(program: Program, limit: int) -> Chain | None:
    try:
        return ane.split(ane.load(program), max_bytes=limit)
    except ane.SurgeryError:
        return None


@pytest.mark.one_of(4)
@pytest.mark.parametrize("seed", range(10))
def test_a_random_graph_is_cut_as_brute_force_would(seed: int) -> None:
    program, limit = limited(seed)
    best, chain = brute_force(program, limit), cut(program, limit)
    assert (best is None) == (chain is None)
    if best is None or chain is None:
        return
    assert len(chain.chunks) == best[0]
    assert sum(border.bytes for border in chain.borders) == best[1]
    held = [
        {id(v): v.val.nbytes for op in ops_of(c.program) for v in reads(op) if is_weight(v)}
        for c in chain.chunks
    ]
    assert max(sum(weights.values()) for weights in held) <= limit
    assert all(alive(chunk.program) for chunk in chain.chunks)
    assert runs(chain) == runs(program)


def test_most_of_these_graphs_are_cut_in_several_chunks() -> None:
    counts = [brute_force(*limited(seed)) for seed in range(10)]
    assert sum(found is not None and found[0] > 1 for found in counts) >= 7


def test_cuts_at_the_first_place_that_fits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: bytes at the borders do not count."""
    monkeypatch.setattr(Cuts, "bytes_at", lambda self, place: 0)
    worse = 0
    for seed in range(10):
        program, limit = limited(seed)
        best, chain = brute_force(program, limit), cut(program, limit)
        if best is not None and chain is not None:
            worse += sum(border.bytes for border in chain.borders) > best[1]
    assert worse
