"""Fourier transforms over two axes, and `torch.istft`, with which vocoders end."""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.frontend.arguments import argument, inputs_of, known_value
from anesurgery.frontend.complex_numbers import is_complex
from anesurgery.mil import Array, Var, is_symbolic, mb, np_dtype

ALIASES = {f"fft_{half}fft2": f"fft_{half}fftn" for half in ("", "i", "r", "ir")}
"""Transform over two axes -> the transform over any number of axes, which has the same arguments."""


def istft(context: Any, node: Any) -> None:
    """Convert `torch.istft(x, n_fft, ...)` of real signals to one transposed convolution.

    The inverse transform of each frame, its window and the sum of overlapping frames are linear: the weight has
    a cosine and a sine for each frequency. The result is divided by the sum of the squared windows.
    """
    x = inputs_of(context, node)[0]
    n, hop, window, options = _arguments(context, node)
    frames = x.shape[-1]
    if not is_complex(x) or is_symbolic(frames) or not options["onesided"] or options["return_complex"]:
        raise NotImplementedError(f"{node.name}: istft of one-sided spectra with a fixed number of frames only")
    real, imaginary = mb.complex_real(data=x), mb.complex_imag(data=x)
    if x.rank == 2:
        real, imaginary = (mb.expand_dims(x=v, axes=[0]) for v in (real, imaginary))
    scale = np.sqrt(n) if options["normalized"] else 1.0
    y = mb.conv_transpose(
        x=mb.concat(values=[real, imaginary], axis=1),
        weight=(_waves(n) * window * scale).astype(np_dtype(real)),
        strides=[hop],
        pad_type="valid",
    )
    begin = n // 2 if options["center"] else 0
    total = n + hop * (frames - 1)
    end = total - begin if options["length"] is None else min(begin + options["length"], total)
    share = _overlapped(window[0, 0] ** 2, hop, frames)[begin:end]
    y = mb.slice_by_index(
        x=y, begin=[0, 0, begin], end=[0, 0, end], begin_mask=[True, True, False], end_mask=[True, True, False]
    )
    y = mb.mul(x=y, y=(1 / np.maximum(share, 1e-11)).astype(np_dtype(y)))
    missing = (options["length"] or 0) - (end - begin)
    if missing > 0:
        y = mb.pad(x=y, pad=[0, 0, 0, 0, 0, missing], mode="constant", constant_val=np_dtype(y).type(0))
    context.add(mb.squeeze(x=y, axes=[0, 1] if x.rank == 2 else [1], name=node.name))


def _arguments(context: Any, node: Any) -> tuple[int, int, Array, dict[str, Any]]:
    """Return the length of a frame, the hop, the window, and the other arguments by name."""
    names = ("n_fft", "hop_length", "win_length", "window", "center", "normalized", "onesided", "length")
    given = {
        name: known_value(argument(context, node, i, name, None))
        for i, name in enumerate((*names, "return_complex"), 1)
    }
    if isinstance(given["window"], Var):
        raise NotImplementedError(f"{node.name}: istft with a window that is computed; make it a buffer")
    n = int(given["n_fft"])
    width = n if given["win_length"] is None else int(given["win_length"])
    hop = width // 4 if given["hop_length"] is None else int(given["hop_length"])
    window = np.ones(width) if given["window"] is None else np.asarray(given["window"], np.float64)
    before = (n - width) // 2
    window = np.pad(window, (before, n - width - before))[None, None]
    options = {name: given[name] for name in (*names[4:], "return_complex")}
    options["center"] = True if options["center"] is None else bool(options["center"])
    options["onesided"] = True if options["onesided"] is None else bool(options["onesided"])
    return n, hop, window, options


def _waves(n: int) -> Array:
    """The inverse transform of real signals: a cosine and a sine for each frequency, (channels, 1, n)."""
    frequencies = np.arange(n // 2 + 1)
    twice = np.where((frequencies == 0) | (2 * frequencies == n), 1, 2)[:, None] / n
    angles = 2 * np.pi * frequencies[:, None] * np.arange(n) / n
    return np.concatenate([twice * np.cos(angles), -twice * np.sin(angles)])[:, None]


def _overlapped(squares: Array, hop: int, frames: int) -> Array:
    """The sum of a window's squares over frames."""
    total = np.zeros(len(squares) + hop * (frames - 1))
    for frame in range(frames):
        total[frame * hop : frame * hop + len(squares)] += squares
    return total
