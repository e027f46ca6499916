"""Each program and network that the tests build, rewritten by passes and compared with what it was."""

from __future__ import annotations

from typing import Any

import numpy as np
from comparing import RECORD

GATE = 100.0
"""PSNR in dB, in fp32 arithmetic: what a new order of the same sums may cost, and no more."""


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
        self.on_layers = [name for name in known if name in layered]
        self.on_ops = [name for name in known if name not in layered]

    def check(self, spec: Any, predictor: Any, given: dict[str, Any]) -> None:
        """Rewrite a model by each pass; run both on the inputs of the test, and compare.

        Args:
            spec: its specification.
            predictor: of the model as it is.
            given: arrays by input name.
        """
        from anesurgery.interpret import features
        from anesurgery.neuralnetwork.spec import NETWORKS

        if len(predictor.parts) != 1:
            return
        network = spec.WhichOneof("Type") in NETWORKS
        values = {k: np.asarray(v) for k, v in features.bind(predictor.inputs, given).items()}
        for name in self.on_layers if network else self.on_ops:
            row = {"name": name, "changes": 0, "refusals": 0, "outcome": "same", "why": ""}
            RECORD.rewritten.append(row)
            self._check_one(name, spec if network else None, predictor, values, row)

    def _check_one(
        self, name: str, spec: Any, predictor: Any, values: dict[str, Any], row: dict[str, Any]
    ) -> None:
        import anesurgery as ane
        from anesurgery.checking.comparison import compare
        from anesurgery.errors import InterfaceError, PassError, ProofError, SurgeryError

        loaded = predictor.parts[0]
        proof = None if spec is None else "sites"
        try:
            surgery = ane.apply(loaded if spec is None else spec, name, prove=proof, quiet=True)
        except (InterfaceError, PassError, ProofError) as error:
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
        result = compare(
            loaded, surgery.program, values, contract=surgery.contract, gate=GATE, function=function
        )
        if not result.ok:
            row["outcome"], row["why"] = ("wrong", f"{result.psnr:.1f} dB at {result.first_divergence}")
        assert result.ok, f"{name} changed the numbers: {row['why']}"
