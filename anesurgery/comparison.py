"""Compare two models by the numbers they give: PSNR, errors, KL divergence, top-k, first diverging op."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anesurgery.adapter import InterfaceChange, adapt_inputs, adapt_outputs
from anesurgery.errors import InterfaceError
from anesurgery.mil import Array
from anesurgery.program import load
from anesurgery.sampling import sample_inputs

TOP_K = 5
"""How many of the best entries count for top-k containment."""


@dataclass(frozen=True)
class OutputComparison:
    """The difference of one output; `a` is the reference."""

    name: str
    shape: tuple[int, ...]
    psnr: float
    """20 log10(largest |a| / root mean square of a - b), in dB; infinite when equal."""
    max_abs: float
    max_rel: float
    """`max_abs` over the largest |a|."""
    kl: float | None
    """Mean KL(softmax a || softmax b) over the last axis in nats; None for an output without rows."""
    top_k: float | None
    """Share of rows whose best entry in `a` is among the five best of `b`."""
    bad: int
    """Elements that are NaN or infinite on one side only."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` found, against a stated gate."""

    outputs: tuple[OutputComparison, ...]
    precision: str
    gate: float
    """PSNR in dB that every output must reach."""
    first_divergence: str | None = None
    """The first op (in file order of `b`) whose value differs by more than the gate, when not `ok`."""
    words: tuple[str, ...] = field(default=())
    """The declared interface changes under which the models were compared."""

    @property
    def psnr(self) -> float:
        """The PSNR of the worst output."""
        return min((o.psnr for o in self.outputs), default=math.inf)

    @property
    def ok(self) -> bool:
        """Does every output reach the gate, with nothing undefined on one side only?"""
        return all(o.psnr >= self.gate and o.bad == 0 for o in self.outputs)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [{k: _plain(v) for k, v in vars(o).items()} for o in self.outputs]
        return {
            "ok": self.ok,
            "precision": self.precision,
            "gate_db": self.gate,
            "psnr_db": _plain(self.psnr),
            "first_divergence": self.first_divergence,
            "outputs": rows,
            "interface_changes": list(self.words),
        }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def compare(
    a: Any,
    b: Any,
    inputs: Mapping[str, Array] | None = None,
    *,
    precision: str = "fp32",
    contract: Sequence[InterfaceChange] = (),
    gate: float = 60.0,
    function: str | None = None,
    seed: int = 0,
) -> Comparison:
    """Run two models on the same inputs with the interpreter and measure how far apart they are.

    Args:
        a: the reference: path, MLModel or program.
        b: the candidate.
        inputs: of `a`, by name; made by `sample_inputs` when absent.
        precision: "fp32", or "fp16" for the arithmetic as stored.
        contract: declared interface changes from `a` to `b` (`Surgery.contract`).
        gate: PSNR in dB that `ok` asks of every output.
        function: which function to run; `main` or the first by default.
        seed: of the sampled inputs.

    Raises:
        InterfaceError: the models give different outputs although nothing was declared.
    """
    from anesurgery.divergence import first_divergence
    from anesurgery.interpret import run

    first, second = load(a).program, load(b).program
    if inputs is None:
        inputs = sample_inputs(first, function=function, seed=seed)
    old = run(first, inputs, precision=precision, function=function)
    expected = adapt_outputs(contract, old, inputs)
    new_inputs = adapt_inputs(contract, inputs)
    found = run(second, new_inputs, precision=precision, function=function)
    if set(expected) != set(found):
        raise InterfaceError(
            f"the outputs {sorted(expected)} became {sorted(found)}; compare models of the same interface, "
            "or pass the contract of the surgery"
        )
    rows = tuple(compare_arrays(n, *_numbers(expected[n], found[n])) for n in expected)
    words = tuple(change.words for change in contract)
    result = Comparison(rows, precision, gate, None, words)
    if result.ok:
        return result
    where = first_divergence(
        first, second, inputs, precision=precision, gate=gate, contract=contract, function=function
    )
    return Comparison(rows, precision, gate, None if where is None else str(where), words)


def _numbers(a: Any, b: Any) -> tuple[Array, Array]:
    """An output as numbers: those of a dictionary in the order of its keys, 1 for a label that is equal."""
    if isinstance(a, Mapping):
        keys = sorted(a.keys() | b.keys())
        x, y = (np.array([value.get(key, np.nan) for key in keys]) for value in (a, b))
        return x, y
    x, y = np.asarray(a), np.asarray(b)
    if x.dtype.kind in "US":
        return np.ones(x.shape), np.asarray(x == y).astype(np.float64)
    return x, y


def compare_arrays(name: str, a: Array, b: Array) -> OutputComparison:
    """The measures of one output.

    Raises:
        InterfaceError: the shapes differ.
    """
    if a.shape != b.shape:
        raise InterfaceError(f"output {name!r} has shape {a.shape} in one model and {b.shape} in the other")
    x, y = a.astype(np.float64), b.astype(np.float64)
    agree = (x == y) | (np.isnan(x) & np.isnan(y))
    finite = np.isfinite(x) & np.isfinite(y)
    apart = np.where(agree | ~finite, 0.0, np.abs(np.where(finite, x, 0) - np.where(finite, y, 0)))
    peak = float(np.abs(np.where(np.isfinite(x), x, 0)).max(initial=0.0))
    max_abs = float(apart.max(initial=0.0))
    kl, top_k = _rows(x, y)
    return OutputComparison(
        name,
        tuple(a.shape),
        psnr(peak, float(np.sqrt(np.mean(apart**2))) if apart.size else 0.0),
        max_abs,
        max_abs / peak if peak else max_abs,
        kl,
        top_k,
        int((~agree & ~finite).sum()),
    )


def psnr(peak: float, rms: float) -> float:
    """Peak signal to noise ratio in dB; infinite without noise, minus infinite without signal."""
    if rms == 0:
        return math.inf
    return 20 * math.log10(peak / rms) if peak else -math.inf


def _rows(x: Array, y: Array) -> tuple[float | None, float | None]:
    """KL divergence and top-k containment over the last axis."""
    if x.ndim == 0 or x.shape[-1] < 2 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None, None
    a, b = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    log_p, log_q = _log_softmax(a), _log_softmax(b)
    kl = float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)))
    k = min(TOP_K, a.shape[-1])
    best = np.argpartition(-b, k - 1, axis=-1)[:, :k]
    return max(kl, 0.0), float(np.mean((best == a.argmax(-1)[:, None]).any(-1)))


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
