"""What a surgery did, in one sentence that needs none of our words: time, numbers, interface."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

from anesurgery import registry
from anesurgery.checking.comparison import Comparison
from anesurgery.checking.grades import Grade
from anesurgery.display import byte_words, counted
from anesurgery.mil import Program
from anesurgery.placement.durations import AS_BEFORE, SHORTEST, Change, change, from_to, rounded
from anesurgery.placement.inspection import Inspection, between
from anesurgery.placement.rules.lost_in_conversion import unmoved_outputs
from anesurgery.placement.score import LEAST_STEP, Score
from anesurgery.placement.target import Target
from anesurgery.rewriting.checks import HALVES, WRONG
from anesurgery.rewriting.choosing import FINITE, NOTHING_FOUND
from anesurgery.rewriting.edit_plan import MAY
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.rewriting.session import INTERFACE, SHAPE
from anesurgery.semantics.reading import in_decibels
from anesurgery.show.summary import sections
from anesurgery.surgery import Surgery


def headline(surgery: Surgery) -> str:
    """Return what a surgery did: "On iPhone 13 (A15): 14.9 ms -> 1.89 ms by estimate, about 7.9 times ..."."""
    if (score := _score(surgery)) is not None and score.refused:
        return _joined(score.refused, _done(surgery), surgery.wrong)
    if not surgery.changes:
        no_gain = surgery.plan.gain if _gains_nothing(surgery) or surgery.plan.gain == NOTHING_FOUND else ""
        return _joined(_done(surgery), no_gain, _as_it_is(surgery), surgery.wrong)
    gain = surgery.plan.gain
    works = gain if gain.startswith("it loads") or gain == FINITE else ""
    repaired = _repaired_outputs(surgery)
    if not repaired:
        exactness = _exactness(surgery)
    elif surgery.proof is not None:
        exactness = f"{_exactness(surgery)} in {surgery.proof.precision}"
    else:
        exactness = ROUNDED * _rounds(surgery)
    return _joined(
        works,
        repaired or _hazards(surgery),
        _gain(surgery),
        exactness,
        FROM_LAYERS * _was_network(surgery),
        _larger(surgery),
        surgery.wrong,
        _unmoved(surgery),
        *(change.words for change in surgery.contract),
    )


def _joined(*parts: str) -> str:
    """Return clauses as one sentence. It begins with a capital, unless with a name such as macOS."""
    sentence = "; ".join(filter(None, parts))
    return sentence[:1].upper() + sentence[1:] if sentence.split(" ", 1)[0].islower() else sentence


def _gain(surgery: Surgery) -> str:
    """Return both times on the target, else what was gained; without a target the chips that gain."""
    gain = surgery.plan.gain
    if surgery.target is None:
        return gain if "gains on" in gain else ""
    if surgery.time is None:  # a share that may fall is not the gain
        return f"on {_target(surgery)}: {gain}" if gain.startswith("switches") else _shares(surgery)
    times = f"on {_target(surgery)}: {_faster(surgery.time)}"
    return f"{times}; {gain}" if times.endswith(AS_BEFORE) and gain.startswith("switches") else times


def _faster(time: Change) -> str:
    """Return two times and their ratio: "14.9 ms -> 1.89 ms by estimate, about 7.9 times as fast"."""
    if max(time.before.high, time.after.high) < SHORTEST:
        return time.verdict
    if math.isclose(time.before.ms, time.after.ms, rel_tol=LEAST_STEP):
        return f"{rounded(time.before.ms, 3)} ms by estimate, {time.verdict}"
    about = "about " if time.verdict == AS_BEFORE else ""
    return f"{from_to(time.before.ms, time.after.ms)} by estimate, {about}{time.verdict}"


def _gains_nothing(surgery: Surgery) -> bool:
    """Would the recipe gain nothing?"""
    return surgery.plan.gain.startswith("nothing to gain")


ROUNDED = "values are rounded now"
NOT_COMPARED = "the outputs were not compared"
LARGER = 1.01
"""Times the weights from which on a model counts as larger."""
MATTERS = 10_000
"""Bytes by which it must grow: a choice, a thousandth of the smallest models that apps ship."""


def _larger(surgery: Surgery) -> str:
    """Say that the weights grow, or the file of a neural network; "" where they do not."""
    what, before, after = "file", surgery.original.file_bytes, surgery.subject.file_bytes
    if before is None or after is None:
        scores = surgery.scores
        what, (before, after) = "weights", (0 if one is None else one.weights for one in scores)
    if not before or not after or after <= max(before * LARGER, before + MATTERS):
        return ""
    return f"{what} {byte_words(before)} -> {byte_words(after)}"


def _unmoved(surgery: Surgery) -> str:
    """Name the outputs that no input moves: what such a model gains says nothing of one that works."""
    programs = [graph for graph in surgery.subject.chosen if isinstance(graph, Program)]
    functions = [function for program in programs for function in program.functions.values()]
    still = dict.fromkeys(f"%{name}" for function in functions for name in unmoved_outputs(function))
    return f"no input changes {', '.join(still)}" if still else ""


FROM_LAYERS = "the neural network became an ML Program"


def _was_network(surgery: Surgery) -> bool:
    return isinstance(surgery.subject, MLProgram) and surgery.subject.layers is not None


def _done(surgery: Surgery) -> str:
    """Return what was done, for a surgery about which nothing else can be said."""
    if surgery.changes:
        return f"{counted(len(surgery.changes), 'edit')} in {counted(len(surgery.steps), 'step')}"
    return f"{FROM_LAYERS}, and nothing else was changed" if _was_network(surgery) else "nothing was changed"


def _as_it_is(surgery: Surgery) -> str:
    """Return the share of the engine in a model that was not changed; "" without a target."""
    score = _score(surgery)
    if score is None or surgery.target is None:
        return ""
    share = _share(score)
    what = _measure(share, share)
    where = "" if _gains_nothing(surgery) else f"on {_target(surgery)}, "
    return _unplaced(surgery, where) or f"{where}{share[what]} {ON_ENGINE[what]}"


def _target(surgery: Surgery) -> str:
    return Target.parse(surgery.target).words


def _unplaced(surgery: Surgery, where: str) -> str:
    """Say that of no op it is known where it runs; "" where it is known of some."""
    score = _score(surgery)
    is_unplaced = score is not None and score.ops and score.unplaced == score.ops
    return f"{where}it is not known where the ops run" if is_unplaced else ""


def _score(surgery: Surgery) -> Score | None:
    """Return the score of the model in the end."""
    before, after = surgery.scores
    return after or before


def compared_shares(before: Inspection, after: Inspection) -> str:
    """Compare two inspections of one model in a sentence: the share of the Neural Engine, and the time."""
    if after.refused:
        return after.summary
    old, new = (_share(Score.of([part for _, part in sections(one)])) for one in (before, after))
    where = f"On {after.target.words}: "
    if before.time is None or after.time is None:
        return where + _moved(old, new)
    return f"{where}{_faster(change(before.time, after.time))}; {_moved(old, new)}"


def _shares(surgery: Surgery) -> str:
    """Return the shares of the Neural Engine before and after, on the target that was named."""
    before, after = surgery.scores
    if before is None or after is None or surgery.target is None:
        return ""
    if unplaced := _unplaced(surgery, f"on {_target(surgery)}, "):
        return unplaced
    return f"on {_target(surgery)}: {_moved(_share(before), _share(after))}"


ON_ENGINE = {"work": "of the work runs on the Neural Engine", "ops": "of the ops run on the Neural Engine"}


def _moved(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return two shares in words: "80% -> 97% of the work runs on the Neural Engine"."""
    what = _measure(before, after)
    old, new = before[what], after[what]
    both = f"{old} -> {new}" if old != new else new
    return f"{both} {ON_ENGINE[what]}{', as before' if old == new else ''}"


def _measure(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return "work" if it tells both apart, or is 100% with as many ops as before; else "ops"."""
    if not ("work" in before and "work" in after):
        return "ops"
    alike = before["ops"] == after["ops"] and before["work"] == "100%"
    return "work" if before["work"] != after["work"] or alike else "ops"


def _share(score: Score) -> dict[str, str]:
    """Return the shares in percent; a range if it is unknown whether some ops run there."""
    counted = {"ops": "ops", **({"work": "flop"} if score.flop else {})}
    return {what: between(score.share[key], score.share_at_most[key]) for what, key in counted.items()}


def _arithmetic(name: str) -> str:
    """Name an arithmetic for a reader: "fp16", "the arithmetic of the Neural Engine (M3)"."""
    engine, _, chip = name.partition(":")
    if engine != "ane":
        return name
    return "the arithmetic of the Neural Engine" + (f" ({chip})" if chip else "")


def _repaired_outputs(surgery: Surgery) -> str:
    """Return how near wrong outputs came, in the arithmetic that was furthest off; "" where none were."""
    before, after = surgery.plan.outputs
    if not before or not after or surgery.below(WRONG):
        return ""
    worst = min(before, key=lambda name: before[name])
    if before[worst] >= WRONG or after.get(worst, -math.inf) < before[worst] + HALVES:
        return ""
    change = f"{in_decibels(before[worst])} -> {in_decibels(after[worst])}"
    return f"the outputs in {_arithmetic(worst)} are repaired: {change} against fp32, on these inputs"


def _hazards(surgery: Surgery) -> str:
    """Name what may go wrong in fp16 and was repaired, by rule; "" if no step is there for that."""
    reasons = [one.why.removeprefix(MAY) for one in surgery.plan.steps if one.why.startswith(MAY)]
    if not (rules := list(dict.fromkeys(", ".join(reasons).split(", ") * bool(reasons)))):
        return ""
    more = f" and {len(rules) - 2} more" if len(rules) > 2 else ""
    return f"numbers that may go wrong in fp16 are repaired ({', '.join(rules[:2])}{more})"


def _exactness(surgery: Surgery) -> str:
    """Return how near the outputs are: of whole models where they were run, else by the edits."""
    if surgery.proof is not None:
        return _outputs(surgery.proof)
    rounded = f"{ROUNDED}; " * _rounds(surgery)
    decibels = surgery.plan.outputs[1]  # of the outputs after the edits, by arithmetic
    if not decibels:
        return rounded + _by_edits(surgery)
    if decibels.blank:
        return rounded + NOT_COMPARED
    worst = min(decibels, key=lambda name: decibels[name])
    is_exact = math.isinf(decibels[worst]) and decibels[worst] > 0
    if not is_exact and not math.isfinite(decibels[worst]):
        return f"{rounded}the outputs in {_arithmetic(worst)} are not finite, on these inputs"
    words = "identical to" if is_exact else f"{in_decibels(decibels[worst], 'within ')} of"
    return f"{rounded}the outputs in {_arithmetic(worst)} are {words} fp32, on these inputs"


def _by_edits(surgery: Surgery) -> str:
    """Return how near the two sides of the edits are."""
    proofs = [change.proof for change in surgery.changes]
    grades = [proof.grade for proof in proofs if proof is not None]
    if not grades:
        return NOT_COMPARED
    if len(grades) < len(proofs) or min(grades) <= Grade.NUMBERS:
        proved, tried = (sum((grade > Grade.NUMBERS) == sure for grade in grades) for sure in (True, False))
        purposely = sum(change.unchecked in (INTERFACE, SHAPE) for change in surgery.changes)
        others = Counter(c.unchecked for c in surgery.changes if c.unchecked not in ("", INTERFACE, SHAPE))
        why = " (" + re.split("[;:,]", max(others, key=others.__getitem__))[0] + ")" if others else ""
        words = {
            "proved equal": proved,
            "checked on test inputs": tried,
            f"{'changes' if purposely == 1 else 'change'} inputs or outputs on purpose": purposely,
            f"not compared{why}": len(proofs) - len(grades) - purposely,
        }
        edits, kinds = counted(len(proofs), "edit"), {word: n for word, n in words.items() if n}
        return f"{edits} {''.join(kinds)}" if len(kinds) == 1 else f"{edits}: {_listed(kinds)}"
    return "every edit gives the same bits" if min(grades) == Grade.BITS else "every edit is proved equal"


def _listed(counts: Mapping[str, int]) -> str:
    """Return counts in words: "3 proved equal, 2 checked on test inputs"."""
    return ", ".join(f"{n} {word}" for word, n in counts.items())


def _rounds(surgery: Surgery) -> bool:
    """Are values in the model rounded? Of inputs and outputs the changes of the interface say so."""
    inside = {change.pass_name for change in surgery.changes if change.unchecked != INTERFACE}
    return any(registry.pass_class(name).rounds for name in inside.intersection(registry.pass_names()))


def compared(comparison: Comparison) -> str:
    """Return a comparison in one sentence: how near the outputs are, and how near they had to be."""
    how = f"{comparison.precision} arithmetic"
    if not comparison.ok:
        return f"FAILED: {comparison.verdict} ({how})"
    is_checked = comparison.proof is None or comparison.proof.grade is not None
    verdict = "ok" if is_checked else "NOT PROVED, as some ops were not compared"
    if math.isinf(comparison.psnr):
        return f"{verdict}: the outputs are identical ({how})"
    near = f"{in_decibels(comparison.psnr)}, {comparison.gate:g} dB are required"
    return f"{verdict}: the outputs agree to {near} ({how})"


def _outputs(proof: Comparison) -> str:
    if not proof.ok:
        return "the outputs differ: " + proof.verdict.splitlines()[0]
    if math.isinf(proof.psnr):
        return "identical outputs"
    asked = math.isfinite(proof.gate)  # else it is measured only, as where weights are stored with fewer bits
    near = in_decibels(proof.psnr, digits=0)
    return f"outputs agree to {near}" if asked else f"outputs near those before ({near})"
