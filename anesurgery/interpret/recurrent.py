"""Recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anesurgery.interpret.table import Unsupported, impl

Tensor = torch.Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu,
    "linear": lambda x: x, "hard_sigmoid": lambda x: torch.clamp(0.2 * x + 0.5, 0, 1),
    "sigmoid_hard": lambda x: torch.clamp(0.2 * x + 0.5, 0, 1),
}  # fmt: skip


def _activation(name: Any) -> Callable[[Tensor], Tensor]:
    if str(name) not in ACTIVATIONS:
        raise Unsupported(f"recurrent activation {name!r} is not known")
    return ACTIVATIONS[str(name)]


def _one_way(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor | None, peephole: Tensor | None,
    gates: list[Callable[[Tensor], Tensor]], clip: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One direction over [length, batch, width]; gate order is input, forget, output, cell."""
    recurrent, cell_in, cell_out = gates
    made = []
    p_i, p_f, p_o = (None, None, None) if peephole is None else peephole.chunk(3)
    for row in x:
        z = row @ w_ih.T + h @ w_hh.T
        z = z if bias is None else z + bias
        z = z if clip is None else torch.clamp(z, -clip, clip)
        i, f, o, g = z.chunk(4, dim=-1)
        i, f = (i, f) if p_i is None or p_f is None else (i + p_i * c, f + p_f * c)
        c = recurrent(f) * c + recurrent(i) * cell_in(g)
        o = o if p_o is None else o + p_o * c
        h = recurrent(o) * cell_out(c)
        made.append(h)
    return torch.stack(made), h, c


@impl("lstm")
def lstm(
    x: Tensor, initial_h: Tensor, initial_c: Tensor, weight_ih: Tensor, weight_hh: Tensor,
    bias: Tensor | None = None, peephole: Tensor | None = None, weight_ih_back: Tensor | None = None,
    weight_hh_back: Tensor | None = None, bias_back: Tensor | None = None,
    peephole_back: Tensor | None = None, direction: str = "forward", output_sequence: bool = False,
    recurrent_activation: str = "sigmoid", cell_activation: str = "tanh", activation: str = "tanh",
    clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Long short-term memory over [length, batch, width]: (sequence or last output, last h, last c)."""
    gates = [_activation(a) for a in (recurrent_activation, cell_activation, activation)]
    if direction == "bidirectional":
        assert weight_ih_back is not None
        assert weight_hh_back is not None
        (h1, h2), (c1, c2) = initial_h.chunk(2, dim=-1), initial_c.chunk(2, dim=-1)
        y1, h1, c1 = _one_way(x, h1, c1, weight_ih, weight_hh, bias, peephole, gates, clip)
        back = _one_way(
            x.flip(0), h2, c2, weight_ih_back, weight_hh_back, bias_back, peephole_back, gates, clip
        )
        y = torch.cat([y1, back[0].flip(0)], -1)
        h, c = torch.cat([h1, back[1]], -1), torch.cat([c1, back[2]], -1)
        return (y if output_sequence else h.unsqueeze(0)), h, c
    x = x.flip(0) if direction == "reverse" else x
    y, h, c = _one_way(x, initial_h, initial_c, weight_ih, weight_hh, bias, peephole, gates, clip)
    y = y.flip(0) if direction == "reverse" else y
    return (y if output_sequence else h.unsqueeze(0)), h, c
