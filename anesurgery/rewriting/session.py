"""What one application of passes knows and collects: changes, refusals, declared interface changes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anesurgery.checking.site import SiteProof
from anesurgery.errors import Refusal
from anesurgery.files.interface_change import InterfaceChange
from anesurgery.mil import Array, Function, Operation, Var, walk_ops


@dataclass(frozen=True)
class Change:
    """One edit: which pass, at which op, which ops went and came, and its proof."""

    pass_name: str
    where: str
    before: tuple[str, ...]
    """Names of the ops that became dead, with their types: ``select mask_12``."""
    after: tuple[str, ...]
    bindings: str = ""
    proof: SiteProof | None = None
    unproven: str = ""
    """Why there is no site proof, when one was wanted."""


@dataclass
class Session:
    """What one application of passes knows and collects."""

    target: str | None = None
    prove_sites: bool = False
    seed: int = 0
    changes: list[Change] = field(default_factory=list)
    refusals: list[tuple[str, Refusal]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What else the caller should know."""
    contract: list[InterfaceChange] = field(default_factory=list)
    artifacts: dict[str, Array] = field(default_factory=dict)
    """Arrays that left the model and are written beside it, by name."""
    timings: dict[str, float] = field(default_factory=dict)
    proof_seconds: float = 0.0
    proven: dict[str, dict[Hashable, SiteProof | str]] = field(default_factory=dict)
    """Site proofs by step and fingerprint: the same computation is run once."""
    names: dict[Function, set[str]] = field(default_factory=dict)
    dropped_inputs: list[tuple[Function, str]] = field(default_factory=list)
    shared: dict[tuple[Any, ...], Var] = field(default_factory=dict)
    """Constants and values that several edits use, by function and key."""
    shared_ops: dict[tuple[Any, ...], list[Operation]] = field(default_factory=dict)
    """The ops that make the shared values."""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def fresh_name(self, function: Function, wish: str) -> str:
        """A name that no op or value of the function bears yet."""
        if function not in self.names:
            taken = {op.name for op in walk_ops(function)} | set(function.inputs)
            taken |= {v.name for op in walk_ops(function) for v in op.outputs}
            self.names[function] = taken
        taken, name, n = self.names[function], wish, 0
        while name in taken:
            n += 1
            name = f"{wish}_{n}"
        taken.add(name)
        return name
