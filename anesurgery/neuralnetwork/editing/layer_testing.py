"""Helpers to test a layer pass: the text after, the numbers before and after, the refusals.

Public: users test their own layer passes with them.
"""

from __future__ import annotations

from typing import Any

from anesurgery.files.protobuf import proto
from anesurgery.neuralnetwork.editing.layer_pass import LayerPass
from anesurgery.neuralnetwork.editing.layer_text import network_text
from anesurgery.neuralnetwork.editing.network import Network
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.rewriting.session import Session
from anesurgery.testing import assert_same_numbers, reasons


def apply_layer_pass(step: LayerPass, spec: Any, *, prove: bool = True) -> tuple[Any, Session]:
    """A rewritten copy of the specification `spec`, and the session with its changes and refusals."""
    after = proto.Model_pb2.Model()
    after.CopyFrom(spec)
    session = Session(prove_sites=prove)
    network = Network(after)
    step.run_network(network, session)
    network.commit()
    return after, session


def spec_text(spec: Any) -> str:
    """The canonical text of the network in a specification."""
    return network_text(Network(spec))


def assert_rewrites_layers(step: LayerPass, spec: Any, after: str, **sampling: Any) -> Session:
    """The pass turns `spec` into exactly this text, and a second run changes nothing.

    Each site is proven, and the whole network gives the same numbers within the promised tolerance.

    Args:
        step: the pass.
        spec: specification of a network.
        after: the text.
        sampling: `inputs` of `assert_same_numbers`.
    """
    rewritten, session = apply_layer_pass(step, spec)
    found = spec_text(rewritten)
    assert found == after.strip("\n"), f"expected:\n{after}\nfound:\n{found}"
    assert session.changes, f"{step.name} changed nothing; refusals: {reasons(session)}"
    assert_same_network(step, spec, rewritten, **sampling)
    again, second = apply_layer_pass(step, rewritten)
    assert not second.changes, f"{step.name} is not idempotent:\n{spec_text(again)}"
    return session


def assert_same_network(step: LayerPass, before: Any, after: Any, **sampling: Any) -> None:
    """Both specifications give the same outputs in fp32, within the promise of the pass."""
    old, new = (import_network(spec, keep_names=True).program for spec in (before, after))
    assert_same_numbers(old, new, rtol=step.tolerance.rtol, **sampling)


def assert_refuses_layers(step: LayerPass, spec: Any, reason: str) -> None:
    """The pass leaves `spec` byte for byte alone and says why, in words that contain `reason`."""
    rewritten, session = apply_layer_pass(step, spec)
    assert rewritten == spec, f"{step.name} changed the network:\n{spec_text(rewritten)}"
    found = reasons(session)
    assert any(reason in r for r in found), f"expected a refusal with {reason!r}; found {found}"
