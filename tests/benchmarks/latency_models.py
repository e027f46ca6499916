"""Build the models whose times were published, from their configurations, with random weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anesurgery.mil import ct, quiet_host

sys.path.append(str(Path(__file__).parent))
from matrix import torchvision_without_kernels

KERNELS = torchvision_without_kernels()

Built = tuple[torch.nn.Module, torch.Tensor]


class Output(torch.nn.Module):
    """One output of a model of transformers, for one input."""

    def __init__(self, module: torch.nn.Module, take: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.module, self.take = module, take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        return self.take(self.module(x))


def picture(batch: int = 1, size: int = 224) -> torch.Tensor:
    """Pixels."""
    return torch.randn(batch, 3, size, size)


def torchvision_model(name: str, batch: int = 1) -> Built:
    """By its name there."""
    import torchvision

    return getattr(torchvision.models, name)(), picture(batch)


def timm_model(name: str, size: int = 224, plain: bool = False) -> Built:
    """By its name there; `plain`: branches of training merged, as its authors measure it."""
    import timm
    from timm.utils.model import reparameterize_model

    module = timm.create_model(name, exportable=True).eval()
    return (reparameterize_model(module) if plain else module), picture(1, size)


def product(inputs: int, outputs: int, rows: int = 1) -> Built:
    """One product with a table of weights."""
    return torch.nn.Linear(inputs, outputs, bias=False), torch.randn(1, rows, inputs)


class Gated(torch.nn.Module):
    """The products of a gated unit, as language models have them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same width."""
        return self.down(torch.nn.functional.gelu(self.gate(x), approximate="tanh") * self.up(x))


def siglip(batch: int) -> Built:
    """The vision tower of SigLIP, base, patches of 16."""
    import transformers as hf

    config = hf.SiglipVisionConfig(
        attn_implementation="eager", image_size=224, patch_size=16, vision_use_head=False
    )
    return Output(hf.SiglipVisionModel(config), lambda y: y.last_hidden_state.mean(dim=1)), picture(batch)


def distilbert(batch: int) -> Built:
    """DistilBERT, base, over 128 tokens."""
    import transformers as hf

    module = hf.DistilBertModel(hf.DistilBertConfig(attn_implementation="eager"))
    ids = torch.randint(1, 1000, (batch, 128), dtype=torch.int32)
    return Output(module, lambda y: y.last_hidden_state.mean(dim=1)), ids


def whisper(width: int, layers: int, heads: int, batch: int) -> Built:
    """An encoder of Whisper, over 3,000 frames."""
    import transformers as hf

    sizes = {"d_model": width, "encoder_layers": layers, "encoder_attention_heads": heads}
    rest = {"decoder_layers": 1, "decoder_attention_heads": heads, "decoder_ffn_dim": 4 * width}
    config = hf.WhisperConfig(attn_implementation="eager", encoder_ffn_dim=4 * width, **sizes, **rest)
    return Output(hf.WhisperModel(config).encoder, lambda y: y.last_hidden_state), torch.randn(batch, 80, 3000)


def mobilenet_hf() -> Built:
    """MobileNetV2 of transformers."""
    import transformers as hf

    module = hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config())
    return Output(module, lambda y: y.logits), picture()


MODELS: dict[str, Callable[[], Built]] = {
    "siglip_b16": lambda: siglip(16),
    "resnet50_b16": lambda: torchvision_model("resnet50", 16),
    "mobilenet_b16": lambda: torchvision_model("mobilenet_v2", 16),
    "bert_b16": lambda: distilbert(16),
    "whisper_b16": lambda: whisper(384, 4, 6, 16),
    "mobilenet_hf_b1": mobilenet_hf,
    "mobilenetv2_b1": lambda: torchvision_model("mobilenet_v2"),
    "mobilenetv3s_b1": lambda: timm_model("mobilenetv3_small_100"),
    **{f"mobileone_{v}": lambda v=v: timm_model(f"mobileone_{v}", plain=True) for v in ("s0", "s2", "s4")},  # type: ignore[misc]
    **{f"efficientformer_{v}": lambda v=v: timm_model(f"efficientformer_{v}") for v in ("l1", "l7")},  # type: ignore[misc]
    "mobilenetv2_140": lambda: timm_model("mobilenetv2_140"),
    "whisper_tiny_b1": lambda: whisper(384, 4, 6, 1),
    "whisper_base_b1": lambda: whisper(512, 6, 8, 1),
    "lm_head_4096x128256": lambda: product(4096, 128256),
    "densenet121_b1": lambda: torchvision_model("densenet121"),
    **{
        f"linear_{n}x{m}": lambda n=n, m=m: product(n, m)  # type: ignore[misc]
        for n, m in ((2016, 4096), (2048, 4096), (4096, 4096), (2048, 8192), (4096, 14336))
    },
    **{f"gate_2560x10240_{n}": lambda n=n: product(2560, 10240, n) for n in (64, 1024)},  # type: ignore[misc]
    "gated_2560x10240_1024": lambda: (Gated(2560, 10240), torch.randn(1, 1024, 2560)),
    **{
        f"fastvit_{v}": lambda v=v: timm_model(f"fastvit_{v}", 256, plain=True)  # type: ignore[misc]
        for v in ("t8", "t12", "s12", "sa12", "sa24", "sa36", "ma36", "mci0", "mci1", "mci2")
    },
    "vit_b_mci": lambda: timm_model("vit_base_mci_224"),
}
"""By the names of `latency_rows.json`; `_b16`: a batch of 16."""


def convert(name: str, path: Path) -> None:
    """Convert a model as its authors would: fp16, one fixed shape."""
    torch.manual_seed(0)
    module, example = MODELS[name]()
    with torch.no_grad():
        traced = torch.jit.trace(module.eval(), example, check_trace=False, strict=False)  # type: ignore[no-untyped-call]
    dtype = np.int32 if example.dtype == torch.int32 else np.float16
    with quiet_host():
        model = ct.convert(
            traced,
            inputs=[ct.TensorType(name="x", shape=tuple(example.shape), dtype=dtype)],
            minimum_deployment_target=ct.target.iOS16,
            compute_precision=ct.precision.FLOAT16,
            skip_model_load=True,
        )
    model.save(str(path))
