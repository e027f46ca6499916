"""How many numeric findings are false alarms: `make alarms` writes docs/alarms.md.

    python tests/benchmarks/alarms.py [MODEL ...] [--page docs/alarms.md]

Of every model of the corpus, of small models of families and of those written by hand, each finding is
tried: the model runs in exact arithmetic on drawn inputs, on larger and smaller ones, on a click in silence,
and on those that the gradients of the op's values lead to; floats may be any number of fp16, ids are rows of
their table. A finding is triggered where the op then reads or makes what the rule speaks of (`TRIGGERS`). A
rule that speaks of constants, types and lengths alone needs no input, and is counted by itself.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import residency
import torch

import anesurgery as ane
from anesurgery.errors import InterpretError, SurgeryError
from anesurgery.facts.overflow_regions import wide_region
from anesurgery.files.package import Loaded
from anesurgery.interpret import Executable, Listener
from anesurgery.interpret.predictor import Predictor
from anesurgery.loading import load
from anesurgery.mil import Array, Operation, Program, operands, quiet_host, walk_ops
from anesurgery.placement.certifying import Slopes, moved

TARGETS = ("M1/macOS 14", "M3/macOS 26", "M5/macOS 26")
LARGEST, CEILING, SLICE, WHOLE = 65504.0, 32768.0, 4094.0, 2048.0
SOFTPLUS_CLIFF = 10.408
SCALES = (1.0, 0.0, 1e-3, 8.0, 64.0, 512.0, 4096.0, 30000.0)
"""What drawn floats are multiplied with; no number goes beyond fp16."""
CLICKS = (1.0, 30000.0)
"""One number in silence, which is the most that a norm over many can be given."""
CLIMBS = 4
"""Steps along the gradients of an op that nothing else has triggered."""
UPSTREAM = 12
"""Ops before one that are looked at for what overflows."""
Values = dict[str, list[torch.Tensor]]
"""Parameter name, or "" for the results -> values."""


def _most(values: Sequence[torch.Tensor]) -> float:
    numbers = [v.abs().max().item() for v in values if v.numel() and v.is_floating_point()]
    return max([0.0, *(n for n in numbers if n == n)])


def _largest(limit: float) -> Callable[[Values], bool]:
    """A result, or something upstream, is as large."""
    return lambda seen: _most([*seen[""], *seen.get("upstream", [])]) > limit


def _reads(limit: float) -> Callable[[Values], bool]:
    """What is read is as large."""
    return lambda seen: (
        _most([v for name, found in seen.items() if name not in ("", "upstream") for v in found]) > limit
    )


def _exponent(seen: Values) -> bool:
    """An exponent that overflows, here or upstream; a share that vanishes is one too."""
    return _largest(LARGEST)(seen) or any(v.max().item() > 11.09 for v in seen.get("exponent", []))


def _small(limit: float) -> Callable[[Values], bool]:
    """What is read comes as near to 0."""
    return lambda seen: any(
        v.abs().min().item() <= limit for v in seen.get("x", []) + seen.get("y", []) if v.numel()
    )


def _whole(seen: Values) -> bool:
    """A whole number that fp16 may not hold."""
    found = [*seen[""], *seen.get("x", [])]
    return max([0.0, *(v.abs().max().item() for v in found if v.numel())]) > WHOLE


def _cancelled(seen: Values) -> bool:
    """The result is small beside what is subtracted, or beside 1."""
    apart = [v.abs().min().item() for v in seen[""] if v.numel()]
    terms = _most([*seen.get("x", []), *seen.get("y", []), torch.ones(1)])
    return bool(apart) and min(apart) < terms / 64


def _apart_or_small(seen: Values) -> bool:
    """An overflow, or a value too small for fp16, upstream."""
    small = any(0 < v.abs().min().item() < 2.0**-24 for v in seen.get("upstream", []) if v.numel())
    return _largest(LARGEST)(seen) or small


TRIGGERS: dict[str, Callable[[Values], bool]] = {
    **dict.fromkeys(
        ("num-square", "num-root", "num-spectrum", "num-cosine", "num-reduce", "num-quotient"),
        _largest(LARGEST),
    ),
    **dict.fromkeys(("num-exp", "num-softmax", "num-exp-range"), _exponent),
    "num-between": lambda seen: _apart_or_small(seen) or _exponent(seen),
    "num-variance": _cancelled,
    "num-cancel": _cancelled,
    "num-log-softmax": _small(2.0**-24),
    "num-mac-32768": _largest(CEILING),
    "num-scale-after": _largest(CEILING),
    "num-slice-q4": _reads(SLICE),
    "num-scores": _reads(LARGEST),
    "num-count": _whole,
    "num-int": _whole,
    "num-angle": _reads(64.0),
    "num-atan": _small(2.0**-24),
    "num-eps": _small(2.0**-24),
    "num-eps-subnormal": _small(2.0**-14),
    **dict.fromkeys(("fault-softplus-cliff", "fault-softplus-cliff-elsewhere"), _reads(SOFTPLUS_CLIFF)),
    **dict.fromkeys(("fault-log-sum-cliff", "fault-log-sum-cliff-elsewhere"), _reads(math.log(LARGEST))),
}
"""Rule -> does an op trigger it on these values? Others need no input."""


@dataclass
class Tried:
    """One finding of one model, as a line of the rows.

    Attributes:
        model: its name.
        rule: that of the finding.
        op_type: of the op that it is about.
        message: what it says.
        triggered: was there an input that triggers it?
        by: which input, in words.
        numbers: did the op make a number on any input, and not NaN on all?
    """

    model: str
    rule: str
    op_type: str
    message: str
    triggered: bool = False
    by: str = ""
    numbers: bool = False

    @property
    def needs_input(self) -> bool:
        """Does it speak of what inputs do?"""
        return self.rule in TRIGGERS


@dataclass
class Watch(Listener):
    """Looks at the values of ops with findings, and at those upstream."""

    tried: Sequence[tuple[Tried, Operation]]
    by: str = ""
    near: dict[Operation, set[Operation]] = field(default_factory=dict)
    """Op -> those with a finding for which its values count."""
    seen: dict[Operation, Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for _, root in self.tried:
            for op in upstream(root):
                self.near.setdefault(op, set()).add(root)

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        """Keep what ops with findings read."""
        for root in self.near.get(op, ()):
            seen = self.seen.setdefault(root, {"": [], "upstream": []})
            found = {k: v if isinstance(v, (list, tuple)) else [v] for k, v in inputs.items()}
            tensors = {k: [t.detach() for t in v if isinstance(t, torch.Tensor)] for k, v in found.items()}
            if root is op:
                for name, values in tensors.items():
                    seen[name] = values
            if op.op_type in ("exp", "sinh", "cosh"):
                seen["exponent"] = [*seen.get("exponent", []), *tensors.get("x", [])]

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Keep what they make, and judge when the op itself has run."""
        tensors = [t.detach() for t in outputs if isinstance(t, torch.Tensor)]
        for root in self.near.get(op, ()):
            self.seen.setdefault(root, {"": [], "upstream": []})["" if root is op else "upstream"] += tensors
        if op in self.seen:
            values = self.seen.pop(op)
            for one in (one for one, root in self.tried if root is op):
                one.numbers |= not any(bool(v.isnan().any()) for v in tensors if v.is_floating_point())
                if not one.triggered and TRIGGERS[one.rule](values):
                    one.triggered, one.by = True, self.by


def upstream(op: Operation) -> list[Operation]:
    """The op and some before it: those of its region, where there is one."""
    region = wide_region(op)
    if region is not None:
        return list(region.ops)
    found, pending = [op], [op]
    while pending and len(found) < UPSTREAM:
        for _, var in operands(pending.pop(0)):
            if var.op is not None and var.op.op_type != "const" and var.op not in found:
                found.append(var.op)
                pending.append(var.op)
    return found


def inputs_of(predictor: Predictor) -> Iterator[tuple[str, dict[str, Array]]]:
    """In words, and inputs: drawn, with all floats larger or smaller, and a click in silence."""
    for seed, scales in ((0, SCALES), (1, (1.0, 100.0))):
        for scale in scales:
            values = {}
            for name, value in predictor.sample(seed).items():
                drawn = np.asarray(value)
                larger = np.clip(drawn * scale, -LARGEST, LARGEST).astype(drawn.dtype)
                values[name] = larger if drawn.dtype.kind == "f" else drawn
            yield f"drawn inputs times {scale:g}", values
    for size in CLICKS:
        drawn_values = {name: np.asarray(value) for name, value in predictor.sample(0).items()}
        yield f"a click of {size:g} in silence", {n: clicked(v, size) for n, v in drawn_values.items()}


def clicked(drawn: Array, size: float) -> Array:
    """Zeros, and one number in their middle; integers stay as they were drawn."""
    if drawn.dtype.kind != "f" or not drawn.size:
        return drawn
    silence = np.zeros(drawn.size, drawn.dtype)
    silence[drawn.size // 2] = size
    return silence.reshape(drawn.shape)


def findings_of(name: str, loaded: Loaded, function: str) -> list[tuple[Tried, Operation]]:
    """The numeric findings of a function on any of the targets, each once, with its op."""
    ops = {op.name: op for op in walk_ops(loaded.program.functions[function])}
    found = [f for t in TARGETS for f in ane.inspect(loaded.program, target=t, function=function).all_findings]
    rows = {(f.rule, f.op): f for f in found if f.kind == "numeric" and f.op in ops}
    return [(Tried(name, f.rule, ops[f.op].op_type, f.message), ops[f.op]) for f in rows.values()]


def try_model(name: str, path: Path) -> list[Tried]:
    """Every finding of a model, tried."""
    loaded = load(path)
    result = list[Tried]()
    for function in loaded.program.functions:
        found = findings_of(name, loaded, function)
        result += [one for one, _ in found]
        open_ = [(one, op) for one, op in found if one.needs_input]
        if not open_:
            continue
        predictor = Predictor(loaded, function=function)
        executable = Executable(loaded.program, function=function, precision="fp32", fuse=False)
        for words, values in inputs_of(predictor):
            if left := [(one, op) for one, op in open_ if not one.triggered]:
                run_on(executable, left, words, values)
        for one, op in open_:
            if not one.triggered and one.numbers:
                climb(loaded.program, function, executable, one, op, predictor.sample(0))
    return result


def run_on(
    executable: Executable, tried: Sequence[tuple[Tried, Operation]], words: str, values: Mapping[str, Array]
) -> None:
    """One run with a look at each op."""
    with suppress(InterpretError), torch.inference_mode():
        executable(values, listener=Watch(tried, words))


def climb(
    program: Program,
    function: str,
    executable: Executable,
    one: Tried,
    op: Operation,
    point: Mapping[str, Array],
) -> None:
    """Follow the gradient of the op's largest value to the ends of fp16."""
    floats = [n for n, v in point.items() if np.asarray(v).dtype.kind == "f"]
    if not floats:
        return
    slopes = Slopes(program, function, floats)
    ranges = dict.fromkeys(floats, (-LARGEST / 2, LARGEST / 2))
    for k in range(CLIMBS):
        try:
            _, gradients = slopes.of(op, point)
        except RuntimeError:
            return
        point = moved(point, gradients, ranges, 1.0 if k == 0 else 0.1)
        run_on(executable, [(one, op)], "the gradient of its values", point)
        if one.triggered:
            return


HEAD = """# False alarms among numeric findings

A numeric finding of `inspect` is a false alarm if no input triggers it. For each finding on {target},
a script searches for an input that triggers it. We use public models, small models of each family, and
models written by hand.

The search tries two random sets of inputs, multiplied by {scales}. Then it tries inputs that are 0
except at one place, and follows gradients up to the limits of fp16. Random weights give smaller values than
trained ones, so fewer findings trigger. A finding about constants, types or lengths needs no input: it
always holds. If a model always returns NaN, its findings count as NaN. `make alarms` writes this page.

"""


def page(rows: Mapping[str, Sequence[Tried]]) -> str:
    """The page."""
    text = HEAD.format(target=", ".join(TARGETS), scales=", ".join(f"{s:g}" for s in SCALES))
    tried = [one for mine in rows.values() for one in mine]
    counts = Counter(map(outcome, tried))
    seen = counts["triggered"] + counts["not triggered"]
    text += (
        f"{len(rows)} models have {len(tried)} findings. {counts['needs no input']} need no input, and "
        f"{counts['NaN']} are in models that always return NaN. Of the other {seen}, we could trigger "
        f"{counts['triggered']}. We found no input for {counts['not triggered']} "
        f"({100 * counts['not triggered'] / max(seen, 1):.1f} % false alarms).\n\n"
        f"| rule | {' | '.join(OUTCOMES)} |\n|{'---|' * (len(OUTCOMES) + 1)}\n"
    )
    for rule in sorted({one.rule for one in tried}):
        mine = Counter(outcome(one) for one in tried if one.rule == rule)
        text += f"| `{rule}` | {' | '.join(str(mine[o]) for o in OUTCOMES)} |\n"
    missed = [one for one in tried if outcome(one) == "not triggered"]
    if missed:
        text += "\n## Not triggered\n\n| model | rule | op | message |\n|---|---|---|---|\n"
        text += "".join(f"| {o.model} | `{o.rule}` | {o.op_type} | {o.message} |\n" for o in missed)
    return text


OUTCOMES = ("triggered", "not triggered", "needs no input", "NaN")


def outcome(one: Tried) -> str:
    """What came of a finding: one of `OUTCOMES`."""
    if not one.needs_input:
        return "needs no input"
    return "triggered" if one.triggered else "not triggered" if one.numbers else "NaN"


def read(path: Path) -> dict[str, list[Tried]]:
    """Model -> its findings, from lines of JSON."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {model: [Tried(**row) for row in rows] for model, rows in lines}


def main() -> None:
    """Try every finding, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path, help="keep converted models there")
    parser.add_argument("--rows", type=Path, help="JSON lines: models that are there are not tried again")
    parser.add_argument("--page", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, quiet_host():
        file = chosen.rows or Path(scratch) / "rows.jsonl"
        for name, make in residency.models(chosen.folder or Path(scratch), everything=True):
            if (chosen.names and name not in chosen.names) or name in read(file):
                continue
            try:
                tried = try_model(name, make())
            except (SurgeryError, InterpretError) as error:
                print(f"{name}: not tried: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            with file.open("a") as lines:
                print(json.dumps([name, [asdict(one) for one in tried]]), file=lines)
            print(f"{name}: {dict(Counter(map(outcome, tried)))}", file=sys.stderr, flush=True)
        text = page(read(file))
    if chosen.page:
        chosen.page.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
