"""Print the layers of a network in one canonical form, as `anesurgery.text` prints programs.

::

    network(%x: 1x3x8x8) {
      %y: 1x3x8x8 = activation(%x, linear={alpha=-1})
      return %y
    }

Fields that have the default of the format are left out, weights of more than eight numbers stand as
``const<24>``, and shapes that are not known as ``?``.
"""

from __future__ import annotations

from typing import Any

from anesurgery.network_editing.network import Network
from anesurgery.text import INLINE


def network_text(network: Network) -> str:
    """The text of a network (no trailing newline)."""
    args = ", ".join(_typed(network, name) for name in network.inputs)
    lines = [f"network({args}) {{"]
    for node in network.nodes:
        outputs = ", ".join(_typed(network, name) for name in node.outputs)
        words = [*(f"%{name}" for name in node.inputs), *_fields(node.params)]
        lines.append(f"  {outputs} = {node.kind}({', '.join(words)})")
    results = ", ".join(f"%{f.name}" for f in network.spec.description.output)
    return "\n".join([*lines, f"  return {results}", "}"])


def _typed(network: Network, blob: str) -> str:
    shape = network.shape(blob)
    dims = "?" if shape is None else "x".join("?" if d is None else str(d) for d in shape)
    return f"%{blob}: {dims or 'scalar'}"


def _fields(message: Any) -> list[str]:
    return [f"{field.name}={_value(field, value)}" for field, value in message.ListFields()]


def _value(field: Any, value: Any) -> str:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return "{" + ", ".join(f"{k}={_scalar(inner, value[k])}" for k in sorted(value)) + "}"
    if hasattr(value, "__len__") and not isinstance(value, (str, bytes)):
        return f"[{', '.join(_scalar(field, v) for v in value)}]"
    return _scalar(field, value)


def _scalar(field: Any, value: Any) -> str:
    if field.message_type is not None and field.message_type.name == "WeightParams":
        return _weights(value)
    if field.message_type is not None:
        return f"{{{', '.join(_fields(value))}}}"
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[value].name)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _weights(params: Any) -> str:
    numbers = list(params.floatValue)
    if numbers and len(numbers) <= INLINE:
        return f"[{', '.join(f'{v:g}' for v in numbers)}]"
    if numbers:
        return f"const<{len(numbers)}>"
    if params.float16Value:
        return f"const<{len(params.float16Value) // 2}xfp16>"
    return f"const<{len(params.rawValue or params.int8RawValue)} bytes>"
