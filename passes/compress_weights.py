"""Compress weights into the formats that the target runs fast, corrected on sample inputs.

Before::

    main(%x: 1x8x64xfp16) {
      %y: 1x8x64xfp16 = linear(x=%x, weight=const<64x64xfp16>, bias=const<64xfp16>)
      return %y
    }

After::

    main(%x: 1x8x64xfp16) {
      %w_int4: 64x64xfp16 = constexpr_blockwise_shift_scale(data=const<64x64xint4>, scale=const<64x1xfp16>)
      %y: 1x8x64xfp16 = linear(x=%x, weight=%w_int4, bias=const<64xfp16>)
      return %y
    }

This is `anesurgery.compress` as a step of a recipe. The samples, a few dozen real ones, are its `inputs`, or
those of the surgery. Without any, random samples are used, which say little about a trained model. The whole
model is compressed: every function, and every member of a pipeline. The report has a line for each weight with
its format; the notes give the loss on the held-out samples.

Refuses when evidence shows no fast format for a weight, when an op that reads it would leave the Neural Engine,
when only one member of a pipeline is asked for, when the model is older than iOS 16, when several functions
accept the samples, or none does, and more={"function": name} does not say which is meant, and when random
inputs, drawn because none were given, make NaN or infinity.

Why it helps: fewer bytes are read, and the chosen formats are no slower than fp16 by published times; the
evidence is in docs/compressed-weights.md and docs/latency.md.

Grade: none: weights are rounded; outputs are compared on samples held out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Pass, Program, Refusal, Session, Var, mb
from anesurgery.compressing.compression import Compression, compress
from anesurgery.errors import NotFinite, Unsuited
from anesurgery.files.interface import VERSION
from anesurgery.files.package import Loaded
from anesurgery.interpret.predictor import Predictor
from anesurgery.rewriting.ml_program import MLProgram

ROUNDED = "weights are rounded: the notes have the loss on samples held out"
SAMPLED = "corrected by sampled inputs, which say little about a trained model: give inputs="
DRAWN = "the inputs were drawn, since none were given; give inputs="
SAMPLES = 12
"""The samples that are drawn where none are given: enough that some are held out."""


@dataclass(frozen=True)
class CompressWeights(Pass):
    """Smaller weights, corrected by samples."""

    name: ClassVar[str] = "compress_weights"
    costly: ClassVar[bool] = True
    follows: ClassVar[tuple[str, ...]] = ("*",)
    rounds: ClassVar[bool] = True
    essential: ClassVar[bool] = True
    bits: float = 4
    """The bits of a number; for speed a weight may get more, where a form of so few is slow."""
    for_: str = "speed"
    """"speed" skips forms that were measured slower than fp16; "size" allows them."""
    inputs: Any = field(default=None, compare=False, repr=False)
    """Samples, a list of dictionaries of arrays by input name; those of the surgery by default."""
    target: str | None = None
    """Chips and OS, as "M5"; that of the surgery by default."""
    more: Any = field(default=None, compare=False)
    """Other options of `anesurgery.compress` by name, as {"mixed": True, "jobs": 4}."""

    def run(self, program: Program, session: Session) -> None:
        """Compress the whole model when its first program comes."""
        whole = MLProgram(Loaded(program)) if session.whole is None else session.whole
        if len(whole.chosen) != len(whole.graphs):
            session.refuse(self.name, "a pipeline is compressed as a whole; leave member= out")
        elif program is whole.graphs[0]:
            options = {"for_": self.for_, "target": self.target or session.target, **(self.more or {})}
            try:
                compression = compress(whole, self.bits, inputs=self.samples(whole, session), **options)
            except Unsuited as reason:
                session.refuse(self.name, str(reason))
                return
            except NotFinite as reason:
                if self.given(session) is not None:
                    raise
                session.refuse(self.name, f"{DRAWN}: {reason}")
                return
            self.record(compression, session)
            versions = {each.interface.specification_version for each in (whole, compression.subject)}
            if len(versions) > 1:
                session.contract.append(an.InterfaceChange("it needs iOS 18 or macOS 15", (VERSION,)))
            for old, new in zip(whole.graphs, compression.subject.graphs, strict=True):
                old.functions.clear()
                old.functions.update(new.functions)

    def given(self, session: Session) -> Any:
        """Return the samples given to the pass, or to the surgery; None if there are none."""
        return session.inputs if self.inputs is None else self.inputs

    def samples(self, whole: MLProgram, session: Session) -> Any:
        """What is given to the pass or to the surgery, or sampled."""
        if (given := self.given(session)) is not None:
            return given
        function = (self.more or {}).get("function")
        model = Predictor(whole.runnable, function=function)
        return [model.sample(session.seed + number) for number in range(SAMPLES)]

    def record(self, compression: Compression, session: Session) -> None:
        """Record a change for each weight, why the others stay, and notes about the whole model."""
        function = next(iter(compression.subject.graphs[0].functions.values()))
        edits = an.GraphEdits(self, session, function)
        for row in compression.compressed:
            edits.record(row.ops[0] if row.ops else row.weight, f"{row.form}: {row.why}", unchecked=ROUNDED)
        stay = dict.fromkeys(row.why for row in compression.weights if not row.form)
        session.refusals += [(self.name, Refusal(reason)) for reason in stay]
        session.notes += [f"{self.name}: {SAMPLED}"] if self.given(session) is None else []
        if compression.compressed:
            session.notes += [f"{self.name}: {line}" for line in summary(compression)]


def summary(compression: Compression) -> list[str]:
    """Return the bytes, the loss and the notes of a compression in words."""
    before, after = compression.bytes
    lines = [f"weights: {before:,} to {after:,} bytes, by {compression.samples[0]} samples"]
    if compression.loss is not None:
        lines.append(
            f"on {compression.samples[1]} held-out samples: {compression.loss.words(compression.chooses)}"
        )
    return [*lines, *compression.notes]


def example() -> Program:
    """A linear of numbers that 4 bits hold."""
    weight = (np.arange(64 * 64).reshape(64, 64) * 7 % 15 - 7).astype(np.float16) / 64

    @mb.program(input_specs=[mb.TensorSpec((1, 8, 64), an.types.fp16)], opset_version=an.ct.target.iOS18)
    def program(x: Var) -> Var:
        return mb.linear(x=x, weight=mb.const(val=weight, name="w"), bias=np.ones(64, np.float16), name="y")

    return program
