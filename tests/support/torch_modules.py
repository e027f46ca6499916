"""Small PyTorch modules of different kinds, with inputs: what coreai-torch writes of them is read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

Case = tuple[Callable[[], nn.Module], Callable[[], list[torch.Tensor]]]


class Formula(nn.Module):
    """A function of its inputs, and of modules that it is given by name."""

    def __init__(self, formula: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.formula = formula
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.formula(self, *inputs)


def formula(f: Callable[..., Any], **modules: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Formula(f, **{name: make() for name, make in modules.items()})


def randn(*shapes: tuple[int, ...]) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.randn(shape) for shape in shapes]


def _attention(s: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return s.inner(q, k, v, need_weights=False)[0]


def _activations(s: Any, x: torch.Tensor) -> Any:
    smooth = F.hardswish(x) + F.softplus(x) + F.mish(x) + F.hardsigmoid(x)
    return smooth + F.leaky_relu(x) + F.relu6(x) + F.softsign(x)


def _functions(s: Any, x: torch.Tensor) -> Any:
    waves = x.sin() + x.cos() + torch.erf(x) + torch.exp(x).log() + x.abs().sqrt()
    return waves + x.pow(2) + (x.abs() + 1).rsqrt() + x.floor() + x.ceil() + x.round() + x.sign() + x // 2


def _inverses(s: Any, x: torch.Tensor) -> Any:
    return torch.asinh(x) + torch.acosh(x.abs() + 1.5) + torch.atan(x) + torch.tan(x / 4) + torch.fmod(x, 0.7)


def _reductions(s: Any, x: torch.Tensor) -> Any:
    return x.mean(1) + x.sum(1) + x.amax(1) + x.amin(1) + x.norm(dim=1) + torch.logsumexp(x, 1)


def _choices(s: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.where((x > y) & (x != 0) | ~(y <= 1), x, y * 2).clamp(-1, 1)


def _moves(s: Any, x: torch.Tensor) -> Any:
    turned = x.reshape(4, 6).t().reshape(2, 12)
    return torch.cat([turned, x.repeat(1, 2).roll(1, 1)[:, :12], x[:, :1].expand(2, 12)], 0)


def _paddings(s: Any, x: torch.Tensor) -> Any:
    sides = (1, 2, 2, 1)
    mirrored = F.pad(x, sides, mode="reflect") + F.pad(x, sides, mode="replicate")
    return mirrored + F.pad(x, sides, value=3.0)


def _rotation(s: Any, x: torch.Tensor) -> Any:
    angles = torch.arange(6.0, dtype=x.dtype)[:, None]
    return x * torch.cos(angles) + torch.cat([-x[..., 4:], x[..., :4]], -1) * torch.sin(angles)


def _loss_of_rank(s: Any, x: torch.Tensor) -> Any:
    return (x[0] @ x[1].T).flatten().unsqueeze(0).squeeze(0) + x.sum()


MODULES: dict[str, Case] = {
    "linear": (lambda: nn.Linear(3, 4), randn((2, 3))),
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh()), randn((2, 8))),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        randn((1, 3, 8, 8)),
    ),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1, groups=4), nn.SiLU(), nn.Conv2d(4, 8, 1)),
        randn((1, 4, 9, 9)),
    ),
    "conv1d": (lambda: nn.Conv1d(3, 5, 3, padding=2, dilation=2), randn((2, 3, 12))),
    "conv3d": (lambda: nn.Conv3d(2, 3, 3, padding=1), randn((1, 2, 4, 5, 6))),
    "conv_transpose": (lambda: nn.ConvTranspose2d(3, 5, 3, 2, 1, output_padding=1), randn((1, 3, 5, 5))),
    "avg_pool": (lambda: nn.AvgPool2d(2), randn((1, 2, 8, 8))),
    "adaptive_pool": (lambda: nn.AdaptiveAvgPool2d(1), randn((1, 2, 8, 8))),
    "max_pool": (lambda: nn.MaxPool2d(3, 2, padding=1), randn((1, 2, 9, 9))),
    "layer_norm": (lambda: nn.LayerNorm(16), randn((2, 5, 16))),
    "group_norm": (lambda: nn.GroupNorm(2, 8), randn((2, 8, 5, 5))),
    "instance_norm": (lambda: nn.InstanceNorm2d(4, affine=True), randn((2, 4, 5, 5))),
    "rms_norm": (lambda: nn.RMSNorm(16), randn((2, 5, 16))),
    "batch_norm": (lambda: nn.BatchNorm1d(6), randn((4, 6, 5))),
    "attention": (
        formula(_attention, inner=lambda: nn.MultiheadAttention(16, 4, batch_first=True)),
        randn((1, 6, 16), (1, 6, 16), (1, 6, 16)),
    ),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), randn((1, 6, 16))),
    "masked": (
        formula(lambda s, q, m: F.scaled_dot_product_attention(q, q, q, m)),
        lambda: [torch.randn(1, 2, 6, 8), torch.ones(6, 6).tril().bool()],
    ),
    "causal": (
        formula(lambda s, q: F.scaled_dot_product_attention(q, q, q, is_causal=True)),
        randn((1, 2, 6, 8)),
    ),
    "embedding": (lambda: nn.Embedding(50, 16), lambda: [torch.randint(0, 50, (2, 7))]),
    "lstm": (
        formula(lambda s, x: s.inner(x)[0], inner=lambda: nn.LSTM(4, 6, batch_first=True)),
        randn((2, 5, 4)),
    ),
    "gru": (
        formula(lambda s, x: s.inner(x)[0], inner=lambda: nn.GRU(4, 6, batch_first=True)),
        randn((2, 5, 4)),
    ),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), randn((1, 2, 5, 6))),
    "aligned": (lambda: nn.Upsample((9, 11), mode="bilinear", align_corners=True), randn((1, 2, 5, 6))),
    "nearest": (lambda: nn.Upsample(scale_factor=2), randn((1, 2, 5, 6))),
    "pixel_shuffle": (lambda: nn.PixelShuffle(2), randn((1, 8, 3, 4))),
    "activations": (formula(_activations), randn((2, 8))),
    "functions": (formula(_functions), randn((2, 8))),
    "inverses": (formula(_inverses), randn((2, 8))),
    "topk": (formula(lambda s, x: torch.topk(x, 3)[0]), randn((2, 8))),
    "argmax": (formula(lambda s, x: x.argmax(-1)), randn((2, 8))),
    "cumsum": (formula(lambda s, x: x.cumsum(1)), randn((2, 8))),
    "slices": (formula(lambda s, x: x[:, 1:5:2].flip(1) + x[:, -2:]), randn((2, 8, 3))),
    "moves": (formula(_moves), randn((2, 12))),
    "paddings": (formula(_paddings), randn((1, 2, 5, 6))),
    "reductions": (formula(_reductions), randn((2, 8))),
    "choices": (formula(_choices), randn((2, 8), (2, 8))),
    "gather": (
        formula(lambda s, x, i: torch.gather(x, 1, i)),
        lambda: [torch.randn(2, 8), torch.randint(0, 8, (2, 3))],
    ),
    "scatter": (
        formula(lambda s, x, i: x.scatter(1, i, 2.0)),
        lambda: [torch.randn(2, 8), torch.tensor([[0, 3, 5], [1, 2, 7]])],
    ),
    "einsum": (
        formula(lambda s, x, y: torch.einsum("bhid,bhjd->bhij", x, y).softmax(-1)),
        randn((1, 2, 3, 4), (1, 2, 5, 4)),
    ),
    "log_softmax": (lambda: nn.LogSoftmax(-1), randn((2, 8))),
    "rotation": (formula(_rotation), randn((1, 2, 6, 8))),
    "chunks": (formula(lambda s, x: sum(a * i for i, a in enumerate(x.chunk(4, 1)))), randn((2, 8))),
    "gated": (lambda: nn.GLU(), randn((2, 8))),
    "ranks": (formula(_loss_of_rank), randn((2, 3, 4))),
}
"""Kind -> the module, and its inputs."""


def made(name: str, half: bool = False) -> tuple[nn.Module, list[torch.Tensor]]:
    """A module with random weights, and inputs; both always the same."""
    torch.manual_seed(0)
    make, inputs = MODULES[name]
    module, values = make().eval(), inputs()
    if half:
        module, values = module.half(), [v.half() if v.is_floating_point() else v for v in values]
    return module, values
