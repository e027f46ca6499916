"""Large windows as chains of small ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import anesurgery as ane
from anesurgery.errors import ProofError
from anesurgery.mil import Program, Var, mb, walk_ops
from anesurgery.passes import chain_pools
from anesurgery.passes.chain_pools import ChainPools
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def pool(kind: str, shape: tuple[Any, ...], window: list[int], strides: list[int], **more: Any) -> Program:
    options = {"pad_type": "valid", **more}

    @mb.program(input_specs=[mb.TensorSpec(shape)])
    def program(x: Var) -> Var:
        return getattr(mb, kind)(x=x, kernel_sizes=window, strides=strides, name="y", **options)

    return program


CASES: dict[str, tuple[str, tuple[int, ...], list[int], list[int]]] = {
    "non-overlapping averages": ("avg_pool", (2, 3, 80, 80), [80, 80], [80, 80]),
    "different axes": ("avg_pool", (1, 2, 60, 36), [30, 36], [30, 36]),
    "one long axis": ("avg_pool", (1, 2, 7, 48), [2, 48], [2, 48]),
    "maxima, non-overlapping": ("max_pool", (1, 2, 48, 48), [24, 12], [24, 12]),
    "maxima, overlapping": ("max_pool", (1, 2, 30, 40), [11, 9], [2, 3]),
    "maxima, stride 1": ("max_pool", (1, 2, 40, 40), [1, 15], [1, 1]),
    "maxima of 22": ("max_pool", (1, 2, 40, 50), [3, 22], [1, 4]),
    "one dimension": ("max_pool", (1, 2, 50), [13], [5]),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_kept(name: str) -> None:
    program = pool(*CASES[name])
    after, session = apply_pass(ChainPools(), program)
    windows = [max(op.kernel_sizes.val) for op in walk_ops(after) if "pool" in op.op_type]
    assert max(windows) <= 8, (windows, session.refusals)
    assert session.changes[0].proof is not None
    assert_same_numbers(program, after, rtol=0.0 if CASES[name][0] == "max_pool" else 1e-5)


PADDED: dict[str, Program] = {
    "same": pool("max_pool", (1, 2, 44, 43), [9, 9], [9, 9], pad_type="same"),
    "same, overlapping": pool("max_pool", (1, 2, 40, 41), [13, 9], [2, 1], pad_type="same"),
    "custom": pool("max_pool", (1, 2, 40, 41), [13, 3], [1, 2], pad_type="custom", pad=[6, 5, 1, 0]),
    "averages": pool("avg_pool", (1, 2, 78, 75), [40, 40], [40, 40], pad_type="custom", pad=[1, 1, 2, 3]),
}


@pytest.mark.parametrize("name", PADDED)
def test_the_first_pool_sees_the_edges(name: str) -> None:
    after, session = apply_pass(ChainPools(), PADDED[name])
    assert max(max(op.kernel_sizes.val) for op in walk_ops(after) if "pool" in op.op_type) <= 8, (
        session.refusals
    )
    assert session.changes[0].proof is not None
    assert_same_numbers(PADDED[name], after, rtol=1e-5 if name == "averages" else 0.0)


def test_edges_that_are_forgotten_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: the edges are on the other side."""
    right = chain_pools.window_pads
    monkeypatch.setattr(chain_pools, "window_pads", lambda *given: right(*given)[::-1])
    with pytest.raises((ProofError, ane.SurgeryError)):
        apply_pass(ChainPools(), PADDED["averages"])


def test_small_windows_are_no_match() -> None:
    for kind, size in (("max_pool", 8), ("avg_pool", 14)):
        _, session = apply_pass(ChainPools(), pool(kind, (1, 2, 30, 30), [size] * 2, [1, 1]))
        assert not session.changes
        assert not session.refusals


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (pool("avg_pool", (1, 2, 80, 80), [40, 40], [20, 20]), "averages of 40 elements, 20 apart, overlap"),
        (pool("avg_pool", (1, 2, 37, 37), [37, 37], [37, 37]), "the window 37 has a prime factor above 8"),
        (
            pool("max_pool", (1, 2, 40, 40), [16, 16], [1, 1], pad_type="custom", pad=[9, 0, 0, 0]),
            "the edges are padded by [9, 0, 0, 0], more than",
        ),
        (
            pool(
                "avg_pool",
                (1, 2, 80, 80),
                [40, 40],
                [40, 40],
                pad_type="custom",
                pad=[1, 1, 1, 1],
                exclude_padding_from_average=True,
            ),
            "padded edges do not count",
        ),
        (pool("max_pool", (1, 2, 40, 40), [9, 9], [4, 4], ceil_mode=True), "rounded up (ceil_mode)"),
    ],
    ids=["overlap", "prime", "wide edges", "edges", "ceil"],
)
def test_refusals_name_the_value(program: Program, reason: str) -> None:
    assert_refuses(ChainPools(), program, reason)


def test_a_chain_that_sees_one_element_less_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: the first window is one too short and the last one too long by another amount."""
    monkeypatch.setattr(ChainPools, "links", lambda *_: [(7, 1), (6, 2)])
    with pytest.raises((ProofError, ane.SurgeryError)):
        apply_pass(ChainPools(), pool("max_pool", (1, 2, 30, 30), [11, 11], [2, 2]))


def test_the_pools_of_a_real_network_are_legal(corpus: Path) -> None:
    model = ane.upgrade(corpus / "sinet_portrait_seg.mlmodel", precision="fp16")
    surgery = ane.apply(model, "chain_pools", quiet=True)
    assert len(surgery.changes) == 2
    found = ane.inspect(surgery.program, target="M1/macOS 14")
    assert not any(f.rule == "pool-window" for row in found.ops for f in row.findings)
