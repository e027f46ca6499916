"""Each program and network that the tests build, rewritten by passes and compared with what it was."""

from __future__ import annotations

from typing import Any

import numpy as np
from comparing import RECORD

GATE = 100.0
"""PSNR in dB, in fp32 arithmetic: what a new order of the same sums may cost, and no more."""
ROUNDED = 60.0
"""The same where a pass rounds values to fp16, or stores new constants in fp16 and does not promise equal bits:
what recipes promise."""


def resized(function: Any, values: dict[str, Any]) -> bool:
    """Has a pass fixed an input to another size than that of the test?"""
    from anesurgery.mil import static_shape

    shapes = {name: static_shape(var) for name, var in function.inputs.items() if name in values}
    return any(shape is not None and shape != values[name].shape for name, shape in shapes.items())


class Rewriting:
    """The passes and recipes to try on every program and network.

    Args:
        names: separated by commas; "all" for every registered one.
    """

    def __init__(self, names: str) -> None:
        from anesurgery import registry
        from anesurgery.rewriting.passes import subject_of
        from anesurgery.surgery import find_recipe

        recipes = registry.recipe_names()
        layered = {n for n in recipes if not subject_of(find_recipe(n).steps).converts}
        layered |= set(registry.layer_pass_names())
        known = [*registry.pass_names(), *recipes] if names == "all" else names.split(",")
        self.rounding = {n for n in known if n in ("auto", "apply_remedies") or self._rounds(n)}
        """Those that may round values: they promise the comparison of whole models, and are held to it."""
        self.on_layers = [name for name in known if name in layered]
        self.on_ops = [name for name in known if name not in layered]

    @staticmethod
    def _rounds(name: str) -> bool:
        from anesurgery import registry

        return name in registry.pass_names() and registry.pass_class(name).rounds

    def check(self, spec: Any, predictor: Any, given: dict[str, Any]) -> None:
        """Rewrite a model by each pass; run both on the inputs of the test, and compare.

        Args:
            spec: its specification.
            predictor: of the model as it is.
            given: arrays by input name.
        """
        from anesurgery.interpret import features
        from anesurgery.mil import walk_ops
        from anesurgery.neuralnetwork.spec import NETWORKS

        if len(predictor.parts) != 1:
            return
        network = spec.WhichOneof("Type") in NETWORKS
        kinds = {op.op_type for op in walk_ops(predictor.parts[0].program)}
        values = {k: np.asarray(v) for k, v in features.bind(predictor.inputs, given).items()}
        for name in self.on_layers if network else self.on_ops:
            row = {"name": name, "changes": 0, "refusals": 0, "outcome": "same", "why": ""}
            RECORD.rewritten.append(row)
            if not network and self._begins_nowhere(name, kinds):
                row["outcome"] = "unchanged"
                continue
            self._check_one(name, spec if network else None, predictor, values, row)

    @staticmethod
    def _begins_nowhere(name: str, kinds: set[str]) -> bool:
        """Is it a rewrite whose pattern starts at none of these op types?"""
        from anesurgery import registry
        from anesurgery.rewriting.pattern import op
        from anesurgery.rewriting.rewrite import Rewrite

        step = registry.make_pass(name) if name in registry.pass_names() else None
        if not isinstance(step, Rewrite) or type(step).run is not Rewrite.run:
            return False
        return kinds.isdisjoint(step.pattern(op).op_types)

    def _check_one(
        self, name: str, spec: Any, predictor: Any, values: dict[str, Any], row: dict[str, Any]
    ) -> None:
        import anesurgery as ane
        from anesurgery import registry
        from anesurgery.checking.comparison import compare
        from anesurgery.checking.grades import EXACT
        from anesurgery.errors import InterfaceError, PassError, ProofError, SurgeryError
        from anesurgery.interpret.arithmetic.precision import is_mixed
        from anesurgery.mil import walk_ops

        loaded = predictor.parts[0]
        rounds = name in self.rounding
        proof = "model" if rounds else None if spec is None else "sites"
        try:
            surgery = ane.apply(
                loaded if spec is None else spec,
                name,
                prove=proof,
                inputs=values if rounds else None,
                quiet=True,
            )
        except (InterfaceError, PassError, ProofError) as error:
            if rounds and isinstance(error, ProofError):  # what it promises is this very check
                row["outcome"], row["why"] = "refused", str(error)[:300]
                return
            row["outcome"], row["why"] = "crash", str(error)[:300]
            raise AssertionError(f"{name}: {error}") from error
        except SurgeryError as error:  # a recipe that says that the model is not of its family
            row["outcome"], row["why"] = "refused", str(error)[:300]
            return
        row["changes"], row["refusals"] = len(surgery.changes), len(surgery.refusals)
        if not surgery.changes:
            row["outcome"] = "unchanged"
            return
        names = {f: name for name, f in loaded.program.functions.items()}
        function = names[predictor.executables[0].function]
        if resized(surgery.program.functions[function], values):
            row["outcome"] = "other sizes"
            return
        edited = [registry.pass_class(change.pass_name) for change in surgery.changes]
        halves = is_mixed(walk_ops(loaded.program)) and any(step.tolerance != EXACT for step in edited)
        gate = ROUNDED if halves or any(step.rounds for step in edited) else GATE
        result = compare(
            loaded, surgery.program, values, contract=surgery.contract, gate=gate, function=function
        )
        if not result.ok:
            row["outcome"], row["why"] = ("wrong", f"{result.psnr:.1f} dB at {result.first_divergence}")
        assert result.ok, f"{name} changed the numbers: {row['why']}"
