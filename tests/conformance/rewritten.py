"""Each program that the tests build, rewritten by passes and compared with what it was."""

from __future__ import annotations

from typing import Any

import numpy as np
from comparing import RECORD

GATE = 100.0
"""PSNR in dB, in fp32 arithmetic: what a new order of the same sums may cost, and no more."""


class Rewriting:
    """The passes and recipes to try on every program.

    Args:
        names: separated by commas; "all" for every registered one.
    """

    def __init__(self, names: str) -> None:
        from anesurgery import registry

        known = [*registry.op_pass_names(), *registry.recipe_names()]
        self.names = known if names == "all" else names.split(",")

    def check(self, predictor: Any, given: dict[str, Any]) -> None:
        """Rewrite the program of a model by each pass; run both on the inputs of the test, and compare."""
        from anesurgery.interpret import features

        if len(predictor.parts) != 1:
            return
        values = {k: np.asarray(v) for k, v in features.bind(predictor.inputs, given).items()}
        for name in self.names:
            row = {"name": name, "changes": 0, "refusals": 0, "outcome": "same", "why": ""}
            RECORD.rewritten.append(row)
            self._check_one(name, predictor, values, row)

    def _check_one(
        self, name: str, predictor: Any, values: dict[str, Any], row: dict[str, Any]
    ) -> None:
        import anesurgery as ane
        from anesurgery.comparison import compare
        from anesurgery.errors import InterfaceError, PassError, ProofError, SurgeryError

        loaded = predictor.parts[0]
        try:
            surgery = ane.apply(loaded, name, prove=None, quiet=True)
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
            loaded, surgery.program, values, contract=surgery.contract, gate=GATE, function=function,
        )  # fmt: skip
        if not result.ok:
            row["outcome"], row["why"] = (
                "wrong",
                f"{result.psnr:.1f} dB at {result.first_divergence}",
            )
        assert result.ok, f"{name} changed the numbers: {row['why']}"
