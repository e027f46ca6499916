"""A vision transformer and a UNet, as people write them in PyTorch: small, with random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, LAYERS, PATCH, SIDE = 192, 3, 4, 16, 224
"""The widths of ViT tiny with a third of its layers, so that it converts in seconds."""


class Patches(nn.Module):
    """A picture [1, 3, 224, 224] as 197 tokens: one of the class, and one for each patch."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2 + 1, WIDTH))

    def forward(self, picture: Tensor) -> Tensor:
        """Tokens with their positions."""
        patches = self.project(picture).flatten(2).transpose(1, 2)
        return torch.cat([self.token, patches], 1) + self.positions


class Layer(nn.Module):
    """Norms in front, attention in fused form, exact gelu."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Attend and compute, each added to what came in."""
        tokens = x.shape[1]
        q, k, v = self.qkv(self.norm1(x)).reshape(1, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(1, tokens, WIDTH))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A picture [1, 3, 224, 224] to scores [1, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.head = Patches(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1000)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def forward(self, picture: Tensor) -> Tensor:
        """The scores of the class token."""
        return self.head(self.norm(self.layers(self.patches(picture)))[:, 0])


class Residual(nn.Module):
    """Two convolutions behind group norms, added to what came in."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, channels), nn.GroupNorm(16, out)
        self.conv1, self.conv2 = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.skip, self.act = nn.Conv2d(channels, out, 1), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Convolve twice."""
        return self.skip(x) + self.conv2(self.act(self.norm2(self.conv1(self.act(self.norm1(x))))))


def larger(channels: int, out: int) -> nn.Sequential:
    """Twice the size; the edges are mirrored in front of the convolution."""
    return nn.Sequential(nn.Upsample(scale_factor=2), nn.ReflectionPad2d(1), nn.Conv2d(channels, out, 3))


class UNet(nn.Module):
    """A noisy picture [1, 4, 64, 64] to its noise, of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(4, 64, 3, padding=1), nn.Conv2d(64, 4, 3, padding=1)
        self.down1, self.down2, self.middle = Residual(64, 64), Residual(64, 128), Residual(128, 128)
        self.up2, self.up1 = larger(128, 128), larger(128, 64)
        self.join2, self.join1 = Residual(256, 128), Residual(128, 64)

    def forward(self, noisy: Tensor) -> Tensor:
        """Down, and up again beside what was seen on the way."""
        wide = self.down1(self.enter(noisy))
        half = self.down2(nn.functional.avg_pool2d(wide, 2))
        x = self.middle(nn.functional.avg_pool2d(half, 2))
        x = self.join2(torch.cat([self.up2(x), half], 1))
        return self.leave(self.join1(torch.cat([self.up1(x), wide], 1)))


class OldNetwork(nn.Module):
    """Convolutions whose sums and products broadcast: what iOS 13 brought, and the engine does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 64, 3, padding=1)
        self.third, self.head = nn.Conv2d(64, 64, 3, padding=1), nn.Linear(64, 10)
        self.scale = nn.Parameter(torch.rand(64, 1, 1))

    def forward(self, picture: Tensor) -> Tensor:
        """Scores of a picture."""
        x = self.second(functional.relu(self.first((picture - 0.5) / 0.25))).relu()
        x = x * self.scale - x.mean((2, 3), keepdim=True)
        return self.head((self.third(x) + x).mean((2, 3)))
