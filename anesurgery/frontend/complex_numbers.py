"""Complex numbers as rotary positions use them: made from angles or pairs, and multiplied."""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.frontend.arguments import Convert, inputs_of, keyword, known_value
from anesurgery.mil import Var, mb, types


def polar(context: Any, node: Any) -> None:
    """`torch.polar(length, angle)`."""
    length, angle = inputs_of(context, node)[:2]
    real, imaginary = (mb.mul(x=length, y=side) for side in (mb.cos(x=angle), mb.sin(x=angle)))
    context.add(mb.complex(real_data=real, imag_data=imaginary, name=node.name))


def view_as_complex(context: Any, node: Any) -> None:
    """`torch.view_as_complex(x)`: the last axis holds the real and the imaginary part."""
    x = inputs_of(context, node)[0]
    real, imaginary = (mb.squeeze(x=v, axes=[-1]) for v in mb.split(x=x, num_splits=2, axis=-1))
    context.add(mb.complex(real_data=real, imag_data=imaginary, name=node.name))


def _complex(x: Var) -> tuple[Var, Var]:
    return mb.complex_real(data=x), mb.complex_imag(data=x)


def _parts(x: Var) -> tuple[Var, Var | None]:
    """The real and the imaginary part, as floats; a real number has none."""
    if types.is_complex(x.dtype):
        return _complex(x)
    return x if types.is_float(x.dtype) else mb.cast(x=x, dtype="fp32"), None


def multiplying(host: Convert) -> Convert:
    """A product, of complex numbers as well."""

    def mul(context: Any, node: Any) -> None:
        factors = inputs_of(context, node)[:2]
        if not any(isinstance(v, Var) and types.is_complex(v.dtype) for v in factors):
            host(context, node)
            return
        (a, b), (c, d) = map(_parts, sorted(factors, key=lambda v: not types.is_complex(v.dtype)))
        real, imaginary = mb.mul(x=a, y=c), mb.mul(x=b, y=c)
        if d is not None:
            real = mb.sub(x=real, y=mb.mul(x=b, y=d))
            imaginary = mb.add(x=imaginary, y=mb.mul(x=a, y=d))
        context.add(mb.complex(real_data=real, imag_data=imaginary, name=node.name))

    return mul


COMPLEX = (9, 10)
"""Torch's numbers of complex64 and complex128."""


def keeping_complex(host: Convert) -> Convert:
    """A cast: complex numbers are of one dtype and stay what they are; real ones get 0 as the other part."""

    def to(context: Any, node: Any) -> None:
        x, *rest = inputs_of(context, node)
        asked = [known_value(v) for v in (*rest[:1], keyword(context, node, "dtype")) if v is not None]
        if isinstance(x, Var) and types.is_complex(x.dtype):
            context.add(x, torch_name=node.name)
        elif any(np.ndim(v) == 0 and not isinstance(v, (bool, str)) and v in COMPLEX for v in asked):
            real = mb.cast(x=x, dtype="fp32")
            context.add(mb.complex(real_data=real, imag_data=mb.mul(x=real, y=np.float32(0)), name=node.name))
        else:
            host(context, node)

    return to


def by_parts(host: Convert) -> Convert:
    """What only moves numbers, of complex numbers as well: of the real and of the imaginary parts."""

    def convert(context: Any, node: Any) -> None:
        x = inputs_of(context, node)[0]
        if not (isinstance(x, Var) and types.is_complex(x.dtype)):
            host(context, node)
            return
        moved = []
        for part in _complex(x):
            context.push(([node.inputs[0]], [part]))
            host(context, node)
            moved.append(context[node.name])
            context.pop()
        context.add(mb.complex(real_data=moved[0], imag_data=moved[1]), torch_name=node.name)

    return convert
