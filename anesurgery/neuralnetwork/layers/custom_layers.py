"""Custom layers: their code is not in the file, so the caller says how each class is built."""

from __future__ import annotations

from typing import Any

from anesurgery.errors import UnknownName
from anesurgery.mil import Var
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers.layer_table import Made, layer


@layer("custom", inputs=(0, None))
def custom(ctx: Context, params: Any, inputs: list[Var]) -> Made:
    """What the caller's function for the class makes of (context, params, inputs).

    Returns:
        The `Var` of its output; a `Sequence` of them; None where it has no outputs.

    Raises:
        LoadError: there is no function for the class, or it gives something else.
    """
    name = str(params.className)
    if name in ctx.custom:
        built: Made = ctx.custom[name](ctx, params, inputs)
        for value in [built] if isinstance(built, Var) else built or ():
            if not isinstance(value, Var):
                raise ctx.error(
                    f"the function for class {name!r} gives a {type(value).__name__}; let it give MIL values"
                )
        return built
    near = f" ({UnknownName('class', name, ctx.custom)})" if ctx.custom else ""
    raise ctx.limit(
        f"is a custom layer of class {name!r}, whose code is not in the file{near}; say how to build it, "
        f"upgrade(model, custom={{{name!r}: build}}), where build(context, params, inputs) gives the MIL "
        "values of its outputs"
    )
