"""The models that the interpreter is measured on: torch modules with random weights, and their packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery.mil import Array


class _Only(torch.nn.Module):
    """A model of transformers, giving its logits or else its first output."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x: torch.Tensor) -> Any:
        made = self.model(x, **self.options)
        return made.logits if hasattr(made, "logits") else made[0]


def _gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _Only(GPT2LMHeadModel(GPT2Config()), use_cache=False)


def _resnet50() -> torch.nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return _Only(ResNetForImageClassification(ResNetConfig()))


def _whisper() -> torch.nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return _Only(WhisperEncoder(WhisperConfig()))


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...], bool]] = {
    "GPT-2 124M, 512 tokens": (_gpt2, (1, 512), True),
    "GPT-2 124M, 1 token": (_gpt2, (1, 1), True),
    "ResNet-50, 224x224": (_resnet50, (1, 3, 224, 224), False),
    "Whisper-tiny encoder": (_whisper, (1, 80, 3000), False),
}
"""Name -> what builds it, the shape of its input, and whether that holds tokens."""


def module(name: str) -> torch.nn.Module:
    """The torch module; biases are random too, since a zero one would be left out by the converter."""
    torch.manual_seed(0)
    made = MODELS[name][0]().eval()
    for place, parameter in made.named_parameters():
        if place.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.02)
    return made


def example(name: str) -> torch.Tensor:
    """An input for it."""
    _, shape, tokens = MODELS[name]
    random = torch.Generator().manual_seed(1)
    if tokens:
        return torch.randint(0, 50257, shape, generator=random)
    return torch.randn(shape, generator=random)


def values(name: str) -> dict[str, Array]:
    """The same input for its package."""
    made = example(name).numpy()
    return {"x": made.astype(np.int32 if made.dtype.kind == "i" else np.float32)}


def package(name: str, half: bool, folder: Path) -> Path:
    """Convert it, to fp16 or to fp32."""
    from anesurgery import frontend
    from anesurgery.mil import ct, quiet_host

    frontend.register()
    (given,) = values(name).values()
    with torch.no_grad(), quiet_host():
        traced: Any = torch.jit.trace(  # type: ignore[no-untyped-call]
            module(name), example(name), check_trace=False
        )
        model = ct.convert(
            traced,
            inputs=[ct.TensorType("x", shape=given.shape, dtype=given.dtype)],
            compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )
    path = folder / f"{list(MODELS).index(name)}-{'fp16' if half else 'fp32'}.mlpackage"
    model.save(str(path))
    return path
