"""What a surgery did, in one sentence that needs none of our words: share, time, numbers, interface."""

from __future__ import annotations

import math

from anesurgery.checking.comparison import Comparison
from anesurgery.checking.grades import Grade
from anesurgery.placement.durations import Change, factor
from anesurgery.placement.inspection import percent
from anesurgery.placement.standing import Standing
from anesurgery.placement.target import Target
from anesurgery.surgery import Surgery


def headline(surgery: Surgery) -> str:
    """The sentence: ``ANE: 33 % -> 97 % of flop on M1/macOS 14, about 6.3 times as fast (2 to 71); ...``."""
    if not surgery.changes:
        return "; ".join(filter(None, ["nothing was changed", _as_it_is(surgery)]))
    said = [", ".join(filter(None, [_shares(surgery), _speed(surgery.time)])), _exactness(surgery)]
    return "; ".join(filter(None, [*said, *(change.words for change in surgery.contract)]))


def _as_it_is(surgery: Surgery) -> str:
    stands, _ = surgery.stands
    if stands is None or surgery.target is None:
        return ""
    what = "flop" if stands.flop else "ops"
    return f"ANE: {_share(stands, what)} of {what} on {Target.parse(surgery.target)}"


def _shares(surgery: Surgery) -> str:
    """The shares of the ANE before and after, on the target that was named."""
    before, after = surgery.stands
    if before is None or after is None or surgery.target is None:
        return ""
    what = _measure(before, after)
    old, new = _share(before, what), _share(after, what)
    both = f"{old} -> {new}" if old != new else new
    return f"ANE: {both} of {what} on {Target.parse(surgery.target)}{', as before' if old == new else ''}"


def _measure(before: Standing, after: Standing) -> str:
    """The flop, where they tell both apart or all is told; else the ops."""
    if not (before.flop and after.flop):
        return "ops"
    return "ops" if _share(before, "flop") == _share(after, "flop") != "100 %" else "flop"


def _share(stands: Standing, what: str) -> str:
    """A share in percent; a range where it is not known of some ops whether they run there."""
    least = stands.share[what]
    if what != "flop" or not stands.perhaps_flop:
        return percent(least)
    most = percent(least + stands.perhaps_flop / stands.flop)
    return most if most == percent(least) else f"{percent(least).removesuffix(' %')} to {most}"


def _speed(time: Change | None) -> str:
    """How much faster, with the band; or that no difference can be told."""
    if time is None:
        return ""
    if time.high < 1:
        return (
            f"about {factor(1 / time.ratio)} times as fast ({factor(1 / time.high)} to {factor(1 / time.low)})"
        )
    if time.low > 1:
        return f"about {factor(time.ratio)} times as slow ({factor(time.low)} to {factor(time.high)})"
    return f"{time.after.ms:.3g} ms after {time.before.ms:.3g} ms, too near to tell apart"


def _exactness(surgery: Surgery) -> str:
    """How near the outputs are: of whole models where they were run, else by the edits."""
    if surgery.proof is not None:
        return _outputs(surgery.proof)
    proofs = [change.proof for change in surgery.changes]
    known = [proof.grade for proof in proofs if proof is not None]
    if not known:
        return "the outputs were not compared"
    if len(known) < len(proofs) or min(known) <= Grade.NUMBERS:
        proved, tried = (sum((grade > Grade.NUMBERS) == sure for grade in known) for sure in (True, False))
        alone = f", {len(proofs) - len(known)} left to a comparison of the outputs" * (len(known) < len(proofs))
        return f"of {len(proofs)} changes {proved} proved equal, {tried} tried on numbers{alone}"
    return "every change gives the same bits" if min(known) == Grade.BITS else "every change is proved equal"


def compared(comparison: Comparison) -> str:
    """A comparison in one sentence: how near the outputs are, and how near they were asked to be."""
    how = f"{comparison.precision} arithmetic"
    if not comparison.ok:
        return f"FAILED: {comparison.verdict} ({how})"
    if math.isinf(comparison.psnr):
        return f"ok: the outputs are identical ({how})"
    asked = f"at least {comparison.gate:g} dB were asked for"
    return f"ok: the outputs are equal to {comparison.psnr:.1f} dB; {asked} ({how})"


def _outputs(proof: Comparison) -> str:
    if not proof.ok:
        return "the outputs differ: " + proof.verdict.splitlines()[0]
    return "outputs identical" if math.isinf(proof.psnr) else f"outputs equal to {proof.psnr:.0f} dB"
