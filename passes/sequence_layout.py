"""Use the layout of Apple's transformers: sequences channels first, and attention head by head, in one step.

The pass runs `channels_first` and then `split_heads`; with `block`, also `tile_queries`. `encoder_ane` and
`auto` use it for text encoders on the chips on which it was measured to help: M1 (and M1 Max) and A15. All
family recipes use it on request, `layout="channels_first"`, and never with `layout="as_given"`. If it makes
anything worse, it is undone as a whole, unless you asked for it: then a warning says what is worse. It is
proved one layer at a time; layers that differ only in their weights are proved once.

Refuses when `channels_first` and `split_heads` do; and with `layout="by_evidence"` where nothing was measured.

Why it helps: Apple's port of DistilBERT in this layout went from 55 to 8.7 ms (measured, M1 Max:
apple/ml-ane-transformers) and was up to 10 times as fast (Apple, iPhone 13). A SigLIP that was on the engine as
a whole gained 10 to 13 % and lost on the GPU (measured, M4 Pro and M5 Max:
erwinzhang7/coreml-compute-placement).

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Pass, Program, Refusal, Session, Var, mb
from anesurgery.files.copying import copy_program
from anesurgery.files.package import Loaded
from anesurgery.passes.channels_first import ChannelsFirst
from anesurgery.passes.split_heads import SplitHeads
from anesurgery.passes.tile_queries import TileQueries
from anesurgery.placement.rules import finds_sequence_layout
from anesurgery.placement.score import OFF, Score, placed
from anesurgery.rewriting.passes import run_pass


@dataclass(frozen=True)
class SequenceLayout(Pass):
    """`channels_first`, `split_heads`, and on request `tile_queries`, as one step."""

    name = "sequence_layout"
    follows = (*SplitHeads.follows, "padding_mask_tensor", "rerank", "split_head")
    layout: str = an.option("channels_first", among=("channels_first", "as_given", "by_evidence"))
    """Either "channels_first", or "as_given": then the step does nothing; or the first "by_evidence" only."""
    most: int = 64
    """Heads above which an attention is not split."""
    block: int = 0
    """Most queries that are computed together; 0 for all."""

    @classmethod
    def variants(cls, target: an.Target) -> tuple[Pass, ...]:
        """Return the pass where the layout was seen to help."""
        return (cls(),) if ChannelsFirst.variants(target) else ()

    def parts(self) -> tuple[Pass, ...]:
        """Return the passes of the layout."""
        if self.layout == "as_given":
            return ()
        tiled = (TileQueries(block=self.block),) if self.block else ()
        return (ChannelsFirst(), SplitHeads(most=self.most), *tiled)

    def known_gain(self, graph: Program, target: an.Target) -> str:
        """Return what was measured of such models on such chips; "" for nothing."""
        evidence = finds_sequence_layout.evidence(graph, target)
        return "" if isinstance(evidence, Refusal) else "; ".join(map(str, evidence))

    def run(self, program: Program, session: Session) -> None:
        """Run the parts; by evidence only if there is some, which a note then gives."""
        if self.layout != "by_evidence":
            return self.run_parts(program, session)
        evidence = finds_sequence_layout.evidence(program, an.Target.parse(session.target))
        if not isinstance(evidence, Refusal) and (lost := self.lost(program, session)):
            evidence = Refusal(f"not taken: {lost}")
        if not isinstance(evidence, Refusal):
            edits = len(session.changes)
            self.run_parts(program, session)
            words = f"layout: channels first, head by head: {'; '.join(map(str, evidence))}"
            session.notes += [words] if len(session.changes) > edits else []
        elif session.target is not None:
            session.refuse(self.name, evidence)
        return None

    def lost(self, program: Program, session: Session) -> str:
        """Return which flop would leave the ANE, as tried on a copy; "" for none."""
        trial, target = copy_program(program), an.Target.parse(session.target)
        self.run_parts(trial, session.again(prove_sites=False))
        before, after = (Score.of(placed(Loaded(p, session.spec), target)) for p in (program, trial))
        return after.loss(before, OFF)

    def run_parts(self, program: Program, session: Session) -> None:
        """Run the parts one after another."""
        for step in self.parts():
            run_pass(step, program, session)


@an.example((1, 3, 4))
def example(x: Var) -> Var:
    """One head over three tokens, from products to a product."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((4, 4)).astype(np.float32) for _ in range(4)]
    q, k, v = (
        mb.reshape(x=mb.linear(x=x, weight=w, name=n), shape=[1, 1, 3, 4], name=f"{n}h")
        for w, n in zip(weights, "qkv", strict=False)
    )
    shares = mb.softmax(x=mb.matmul(x=q, y=k, transpose_y=True, name="scores"), axis=-1, name="shares")
    seen = mb.reshape(x=mb.matmul(x=shares, y=v, name="seen"), shape=[1, 3, 4], name="rows")
    return mb.linear(x=seen, weight=weights[3], name="y")
