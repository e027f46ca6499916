"""What is known of a whole model reaches its ops: no op is said to prefer the ANE, and the share is a range."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import Any

import coremltools.optimize.coreml as cto
import numpy as np
import pytest
from statement import half, of

import anesurgery as ane
from anesurgery.interpret.arithmetic import engine_faults
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement import inspector, verdicts
from anesurgery.placement.rules import whole_model
from anesurgery.show import summary
from anesurgery.show.costs import costs


def lookup(ids: int, *, small: bool = False) -> Callable[[], Program]:
    """Rows of a table of 151,669, and layers large enough for the ANE."""
    rows = np.zeros((1000 if small else 151669, 32), np.float16)

    def build() -> Program:
        @mb.program(input_specs=[mb.TensorSpec((1, ids), dtype=types.int32)], opset_version=ct.target.iOS18)
        def program(x: Var) -> Any:
            x = mb.gather(x=rows, indices=x, axis=0, validate_indices=False)
            for _ in range(8):
                wide = 4096 if x.shape[-1] < 4096 else 2048
                x = mb.relu(x=mb.linear(x=x, weight=half(wide, int(x.shape[-1]))))
            return x

        made: Program = program
        return made

    return build


def listed(*, enumerated: bool = True) -> Any:
    """A layer_norm of rank 3 before products, with enumerated shapes or a range of them, as a model."""
    import torch

    layers = torch.nn.Sequential(torch.nn.LayerNorm(256), *(torch.nn.Linear(256, 256) for _ in range(4)))
    shape: Any = ct.EnumeratedShapes([(1, n, 256) for n in (64, 512)], default=(1, 512, 256))
    shape = shape if enumerated else (1, ct.RangeDim(64, 512, default=512), 256)
    traced = torch.jit.trace(layers.eval(), torch.zeros(1, 64, 256))  # type: ignore[no-untyped-call]
    return ct.convert(
        traced,
        inputs=[ct.TensorType("x", shape=shape, dtype=np.float16)],
        outputs=[ct.TensorType(dtype=np.float16)],
        skip_model_load=True,
        minimum_deployment_target=ct.target.iOS16,
    )


def listed_norm() -> Program:
    made: Program = listed()._mil_program
    return made


def palettized(model: Any, bits: int = 8) -> Any:
    config = cto.OpPalettizerConfig(mode="uniform", nbits=bits)
    return cto.palettize_weights(model, cto.OptimizationConfig(global_config=config))


def layers(count: int, kind: Any = np.float16) -> Callable[[], Program]:
    """Products of 134 MB of fp16 weights each, or of half as many bytes, which nobody reads from memory."""

    def body(x: Var) -> Var:
        for _ in range(count):
            weight: Any = np.zeros((8192, 8192), kind)
            if kind is np.int8:
                weight = mb.constexpr_blockwise_shift_scale(data=weight, scale=half(8192, 1))
            x = mb.linear(x=x, weight=weight)
        return x

    return of(body, (64, 8192))


CASES: dict[str, tuple[Callable[[], Program], str, str]] = {
    "a large table": (lookup(64), "M4/macOS 27", "embedding-rows"),
    "a small table": (lookup(64, small=True), "M4/macOS 27", ""),
    "one row of a large table": (lookup(1), "M4/macOS 27", ""),
    "a large table on M5": (lookup(64), "M5 Pro/macOS 26", ""),
    "a large table on M1": (lookup(64), "M1 Max/macOS 27", ""),
    "a large table on a phone": (lookup(64), "A19/iOS 26", ""),
    "too much for a phone": (layers(14), "A19/iOS 26", "size-leaves"),
    "too much for a Mac": (layers(28), "M4/macOS 26", "size-leaves"),
    "not too much for a Mac": (layers(11), "M4/macOS 27", ""),
    "bytes that expand to too much": (layers(16, np.int8), "M4/macOS 26", "size-leaves"),
    "fewer bytes": (layers(13, np.int8), "M4/macOS 27", ""),
    "an enumerated norm": (listed_norm, "iPhone/iOS 17", "dyn-enum-norm"),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", CASES)
def test_what_is_known_of_the_whole_reaches_the_ops(name: str) -> None:
    build, target, rule = CASES[name]
    found = ane.inspect(build(), target)
    assert {f.rule for f in found.findings} & {r.id for r in whole_model.RULES} == ({rule} if rule else set())
    if rule:
        assert "ane" not in found.counts
        assert found.residency["ops"] == 0 < found.residency_at_most["ops"]
    if "one row" not in name:  # of one row little is known in any case
        assert bool(rule) == ("ane" not in found.counts)


@pytest.mark.parametrize("name", ["a large table", "an enumerated norm", "too much for a phone"])
def test_ops_in_doubt_name_the_doubt(name: str) -> None:
    """The wrong version: "the CPU may be just as fast, by estimate", below a share of 0 to 100 %."""
    build, target, rule = CASES[name]
    found = ane.inspect(build(), target)
    unknown = {row.name for row in found.ops if row.preferred is None and row.legal}
    groups = [g for g in summary.attention(found) if unknown & {row.name for row in g.rows}]
    assert {g.finding.rule for g in groups if g.finding is not None} == {rule}
    assert all(g.why != summary.UNDECIDED for g in groups)
    assert rule not in {g.finding.rule for g in summary.other_findings(found)}  # it is said once
    assert rule in {problem.rule for problem in costs(found)[:2]}


def test_palettes_with_enumerated_shapes_crash_an_m5() -> None:
    model, seen = palettized(listed()), "M5/macOS 26"
    assert ane.inspect(model, seen).refused == "reported to crash: 8-bit palettes with 2 enumerated shapes"
    assert not ane.inspect(model, seen, compute_units="ALL").refused
    assert not ane.inspect(model, "M4/macOS 26").refused
    for other in (listed(), palettized(listed(), bits=4), palettized(listed(enumerated=False))):
        assert not ane.inspect(other, "M5/macOS 26").refused


def test_ops_that_stay_on_the_cpu_in_either_case_are_known() -> None:
    found = ane.inspect(lookup(64)(), "M4/macOS 27")
    assert found.ops[0].preferred == "cpu"
    assert found.ops[1].preferred is None
    assert found.counts["unknown"] >= 15


def test_a_path_that_forgets_the_doubts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: the findings are shown, and the ops are judged without them."""
    monkeypatch.setattr(inspector, "choose", lambda judged, target, doubts: verdicts.choose(judged, target))
    with pytest.raises(AssertionError):
        test_what_is_known_of_the_whole_reaches_the_ops("a large table")


def test_linear_of_another_chip_may_be_of_the_next_class() -> None:
    """At 20 rows the classes decide otherwise: known on an M4, unknown elsewhere; large products are known."""
    small, large = (of(lambda x: mb.linear(x=x, weight=half(576, 576)), (rows, 576)) for rows in (20, 2048))
    assert ane.inspect(small(), "M4/macOS 27").ops[0].preferred == "ane"
    assert ane.inspect(small(), "M2/macOS 15").ops[0].preferred is None
    assert ane.inspect(large(), "M2/macOS 15").ops[0].preferred == "ane"


def attended(build_mask: Callable[[Var], Any], dtype: Any) -> Callable[[], Program]:
    """Fused attention over 512 tokens between products, and a mask made of the second input."""

    def build() -> Program:
        specs = [mb.TensorSpec((1, 12, 512, 64), dtype=types.fp16), mb.TensorSpec((1, 1, 1, 512), dtype=dtype)]

        @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
        def program(q: Var, mask: Var) -> Any:
            q = mb.linear(x=q, weight=half(64, 64))
            mixed = mb.scaled_dot_product_attention(query=q, key=q, value=q, attn_mask=build_mask(mask))
            return mb.linear(x=mixed, weight=half(4096, 64))

        made: Program = program
        return made

    return build


def of_integers(mask: Var) -> Any:
    """As transformers writes it: cast, subtraction, product."""
    kept = mb.sub(x=np.float16(1), y=mb.cast(x=mask, dtype="fp16"))
    return mb.mul(x=kept, y=np.float16(-3e4))


def beside(mask: Var) -> Any:
    return mb.mul(x=mask, y=np.float16(-3e4))


MASKS = {
    "integers on M5": (attended(of_integers, types.int32), "M5/macOS 27", True),
    "integers on M2": (attended(of_integers, types.int32), "M2/macOS 27", True),
    "integers on the measured chip": (attended(of_integers, types.int32), "M4/macOS 27", False),
    "integers on OS 26": (attended(of_integers, types.int32), "M5/macOS 26", False),
    "fp16 on M5": (attended(beside, types.fp16), "M5/macOS 27", False),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_integers_reaches_the_unit_of_fused_attention(name: str) -> None:
    build, target, doubtful = MASKS[name]
    found = ane.inspect(build(), target)
    (row,) = (row for row in found.ops if row.op_type == "scaled_dot_product_attention")
    assert (row.legal is None) == doubtful == ("sdpa-mask-cast" in {f.rule for f in row.findings})
    assert not doubtful or row.preferred != "ane"
    assert any(f.rule.startswith("fault-attention-mask") for f in row.findings) == ("integers" in name)


def test_a_rule_that_looks_at_the_last_op_alone_misses_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: one step back from the mask."""
    monkeypatch.setattr(engine_faults, "MASK_STEPS", 1)
    with pytest.raises(AssertionError):
        test_a_mask_of_integers_reaches_the_unit_of_fused_attention("integers on M5")


def scores(queries: int, keys: int) -> Callable[[], Program]:
    """Attention between products that are large enough for the ANE."""

    def body(x: Var, k: Var) -> Var:
        for _ in range(6):
            x = mb.linear(x=mb.relu(x=mb.linear(x=x, weight=half(4096, 64))), weight=half(64, 4096))
        return mb.softmax(x=mb.matmul(x=x, y=k, transpose_y=True), axis=-1)

    return of(body, (1, 8, queries, 64), (1, 8, keys, 64))


def kept_state(width: int) -> Callable[[], Program]:
    """Large products, and a state of some width beside them."""

    def build() -> Program:
        inputs = [mb.TensorSpec((1, 64, width), types.fp16), mb.StateTensorSpec((1, 64, width), types.fp16)]

        @mb.program(input_specs=inputs, opset_version=ct.target.iOS18)
        def program(x: Var, kept: Var) -> Var:
            x = mb.add(x=x, y=mb.read_state(input=kept))
            for _ in range(6):
                x = mb.linear(x=mb.relu(x=mb.linear(x=x, weight=half(4096, width))), weight=half(width, 4096))
            mb.coreml_update_state(state=kept, value=x)
            return x

        return program

    return build


FAILED: dict[str, tuple[Callable[[], Program], str, str]] = {
    "no memory": (scores(128, 1024), "A17/iOS 18", "compile-memory"),
    "memory": (scores(130, 1024), "A17/iOS 18", ""),
    "a phone's memory is not a Mac's": (scores(128, 1024), "M4/macOS 27", ""),
    "a long history": (scores(64, 32768), "M5/macOS 26", "compile-history"),
    "a shorter one": (scores(64, 8192), "M5/macOS 26", ""),
    "an odd state": (kept_state(270), "M4/macOS 15", "state-width-32"),
    "a state of whole words": (kept_state(256), "M4/macOS 15", ""),
}


@pytest.mark.parametrize("name", FAILED)
def test_a_compile_that_failed_leaves_the_ane_in_doubt(name: str) -> None:
    build, target, rule = FAILED[name]
    found = ane.inspect(build(), target)
    assert ("ane" not in found.counts) == bool(rule)
    assert not rule or rule in {f.rule for f in found.findings}
    assert len(found.findings) == len(set(found.findings))


def test_findings_that_do_not_reach_the_units_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: what fails to compile is said, and the ops stay on the ANE."""
    monkeypatch.setattr(whole_model, "FAILING", {})
    with pytest.raises(AssertionError):
        test_a_compile_that_failed_leaves_the_ane_in_doubt("no memory")


def test_the_range_of_the_share_is_in_the_data() -> None:
    plain = ane.inspect(lookup(64)(), "M4/macOS 27").to_json()
    assert plain["residency"]["ops"] == 0 < plain["residency_at_most"]["ops"]


def test_off_an_m4_only_what_was_seen_there_is_exact() -> None:
    """The memory class was published of an M1 too; additions and transpositions were not."""

    def body(x: Var) -> Var:
        return mb.transpose(x=mb.add(x=mb.exp(x=mb.relu(x=x)), y=np.float16(1)), perm=[0, 2, 1, 3])

    for target, exact in (("M4/macOS 27", 4), ("M1/macOS 14", 2), ("M2/macOS 15", 0)):
        found = ane.inspect(of(body)(), target)
        assert sum(row.estimate is not None and row.estimate.off == (1, 1) for row in found.ops) == exact


def test_the_work_of_an_inspection_grows_with_the_ops() -> None:
    """Function calls, which no clock disturbs: twice as many ops take about twice as many."""

    def calls(count: int) -> int:
        def body(x: Var) -> Var:
            for _ in range(count):
                x = mb.add(x=x, y=mb.relu(x=mb.conv(x=x, weight=half(8, 8, 1, 1))))
            return x

        built = of(body, (1, 8, 8, 8))()
        profile = cProfile.Profile()
        profile.runcall(ane.inspect, built, "M4/macOS 27")
        return sum(entry.callcount for entry in profile.getstats())

    calls(4)  # what is computed once in a process
    assert calls(80) < 2.3 * calls(40)
