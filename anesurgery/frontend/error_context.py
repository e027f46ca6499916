"""Errors of a conversion say where in the model they arose: coremltools says that in its log only."""

from __future__ import annotations

from typing import Any

from anesurgery.frontend.arguments import Convert, inputs_of
from anesurgery.frontend.complex_numbers import is_complex

COMPLEX = (
    "{kind} is not converted for complex numbers: write it by their real and imaginary parts (x.real, x.imag; "
    "torch.complex puts them together)"
)


def register() -> None:
    """Have every error of a conversion say which operation of which module it is about."""
    from coremltools.converters.mil.frontend.torch import ops

    if ops.convert_single_node.__module__ != __name__:
        ops.convert_single_node = _saying_where(ops.convert_single_node)


def _saying_where(host: Convert) -> Convert:
    def convert_single_node(context: Any, node: Any) -> None:
        try:
            host(context, node)
        except Exception as error:
            if not hasattr(error, "converting") and _reads_complex(context, node):
                error = NotImplementedError(COMPLEX.format(kind=node.kind))
            if error.args and isinstance(error.args[0], str) and not hasattr(error, "converting"):
                error.args = (f"{error.args[0]} (converting {node.kind}{_place(node)})", *error.args[1:])
            error.converting = node.kind  # type: ignore[attr-defined]
            raise error

    return convert_single_node


def _reads_complex(context: Any, node: Any) -> bool:
    try:
        return any(map(is_complex, inputs_of(context, node)))
    except Exception:  # the operands are what could not be converted
        return False


def _place(node: Any) -> str:
    """The module whose operation it is, as a trace or an export records it."""
    if node.model_hierarchy:
        *modules, _ = node.get_scope_info()[0]
        return f" in {'.'.join(modules)}" if modules else ""
    entered = list((node.meta or {}).get("nn_module_stack", {}).values())
    return f" in {entered[-1][0]}" if entered and entered[-1][0] else ""
