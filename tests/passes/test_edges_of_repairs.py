"""Repairs at the edges of floats: where the old form is right, the new one is no worse in the same arithmetic.

Zeros of both signs, subnormals, what rounds to 0 in fp16, and large numbers, against the old form in fp64.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from hazard_graphs import HAZARDS

from anesurgery import registry
from anesurgery.checking.adversarial import near_edges
from anesurgery.checking.grades import EarlierChecks
from anesurgery.files.copying import copy_program
from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic.precision import Double
from anesurgery.mil import Array, Program, np_dtype
from anesurgery.rewriting.passes import run_pass
from anesurgery.rewriting.session import Session

SCALING = "powers products cosines spectra roots scores shares after_product"
OTHERS = """
    stable_angle halve_exponent hold_guards shift_scores fuse_exponential centre_variance mean_quotient
    clip_product rms_norm group_norm mean_of_means sum_to_mean causal_mask_tensor padding_mask_tensor
    decompose_attention
"""
NAMES = sorted({*(f"scale_{what}" for what in SCALING.split()), *OTHERS.split()})
LARGE = (250.0, 300.0, 1e3, 6e4, float(np.finfo(np.float16).max))
SETS, FEW = 12, 1 << 12
"""Sets of inputs; numbers that a program reads at most: subnormals take processors long."""
STEPS = 16
"""Steps of the largest value by which the new form may be further off: a few more roundings."""
STEP = {"fp16": 2.0**-11, "fp32": 2.0**-24}
FOUR = "a composition of comparisons takes -0 for 0; test_stable_angle compares with atan2"
TRADED = {
    ("logarithm of a hyperbolic cosine", "small"): "a result below 1e-4 is a difference of rounded numbers",
    (
        "variance as a difference of means",
        "large",
    ): "squares of differences overflow below 256; reports name it",
    ("angle in four quadrants", "small"): FOUR,
    ("angle in four quadrants", "mixed"): FOUR,
}
"""Where a repair is worse for other numbers than those that it is for."""

CHECKS: dict[str, EarlierChecks] = {}
"""The checks of sites, which are the same for all kinds of numbers."""


def drawn(program: Program, kind: str, rng: np.random.Generator) -> dict[str, Array]:
    """Values of one kind for each float; conditions and ids at random."""
    values = {}
    for name, var in program.functions["main"].inputs.items():
        dtype, shape = np_dtype(var), tuple(var.shape)
        normal, edges = rng.standard_normal(shape), rng.choice(near_edges(dtype), shape)
        sizes = {
            "zeros": 0.0,
            "small": np.abs(edges),
            "mixed": np.where(rng.random(shape) < 0.5, np.abs(edges), np.abs(normal)),
            "large": rng.choice(LARGE) * rng.choice([np.ones(shape), rng.uniform(0.5, 1, shape)]),
        }[kind]
        floats = np.copysign(sizes, normal if rng.random() < 0.7 else np.full(shape, rng.choice([-1, 1])))
        values[name] = (floats if dtype.kind == "f" else rng.integers(0, 2, shape)).astype(dtype)
    return values


def computed(program: Program, values: dict[str, Array], arithmetic: str | Double) -> list[Array]:
    function = program.functions["main"]
    given = {var: torch.from_numpy(values[name]) for name, var in function.inputs.items()}
    outputs = Evaluator(function.operations, function.outputs, arithmetic)(given)
    return [value.double().numpy() for value in outputs]


def worse(before: Array, after: Array, exact: Array, step: float) -> Array:
    """Where the new form is further off than the old one is, and than some steps of the largest value."""
    with np.errstate(invalid="ignore"):
        old, new = (np.nan_to_num(np.abs(value - exact), nan=np.inf) for value in (before, after))
    right = np.isfinite(exact)
    most = np.abs(exact[right]).max(initial=0.0)
    with np.errstate(over="ignore"):
        allowed = 4 * old.max(initial=0.0, where=np.isfinite(old)) + STEPS * step * most
    return right & np.isfinite(old) & (new > allowed)


def programs_of(name: str) -> dict[str, Program]:
    """What a pass shows, and the hazards that it repairs, by name."""
    hazards = [h for h in HAZARDS if h.repair == name and h.inputs.size <= FEW]
    example: Program = importlib.import_module(f"anesurgery.passes.{name}").example()
    return {name: example} | {hazard.name: hazard.graph for hazard in hazards}


def apart(name: str, before: Program, kind: str) -> list[str]:
    """What a repair makes worse; it is given the inputs, and may refuse because of them."""
    rng = np.random.default_rng(0)
    sets = [drawn(before, kind, rng) for _ in range(SETS)]
    after, session = copy_program(before), Session(inputs=sets, checks=CHECKS)
    run_pass(registry.make_pass(name), after, session)
    half = any(np_dtype(v) == np.float16 for v in before.functions["main"].inputs.values())
    said = []
    for values in sets if session.changes else ():
        exact = computed(before, values, Double())
        for arithmetic in ("fp16",) if half else ("fp16", "fp32"):
            both = (computed(program, values, arithmetic) for program in (before, after))
            for old, new, meant in zip(*both, exact, strict=True):
                if (bad := worse(old, new, meant, STEP[arithmetic])).any():
                    at = tuple(np.argwhere(bad)[0])
                    said.append(f"{arithmetic}: {old[at]} became {new[at]}, meant {meant[at]}")
    return said


@pytest.mark.parametrize("kind", ["zeros", "small", "mixed", "large"])
@pytest.mark.parametrize("name", NAMES)
def test_a_repair_is_no_worse_at_the_edges(name: str, kind: str) -> None:
    for label, program in programs_of(name).items():
        said = apart(name, program, kind)
        assert bool(said) == ((label, kind) in TRADED), (label, said[:3])


def test_a_wrong_sign_and_an_overflow_are_seen() -> None:
    exact = np.array([1.0, -1.0, 100.0])
    for wrong in (np.array([1.0, 1.0, 100.0]), np.array([1.0, -1.0, np.inf]), np.array([np.nan, -1.0, 100.0])):
        assert worse(exact, wrong, exact, STEP["fp16"]).sum() == 1
        assert not worse(wrong, exact, exact, STEP["fp16"]).any()
