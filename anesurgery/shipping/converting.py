"""A causal language model of transformers as a package: ids of `context` tokens in, logits out.

The experts of a mixture all compute every token, each times its share, as no other form of transformers keeps
the tokens on an axis of their own (`frontend.register_experts`).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Any

import numpy as np

from anesurgery import frontend
from anesurgery.errors import LoadError, NotExpressible, SurgeryError
from anesurgery.frontend.length_choices import LengthError
from anesurgery.frontend.traceable import Traceable, check
from anesurgery.mil import ct, quiet_host

TOKENS, LOGITS = "input_ids", "logits"


def convert(module: Any, context: int, *, half: bool = True) -> Any:
    """Convert a causal language model by trace.

    Args:
        module: of transformers, in fp32.
        context: the tokens that it reads.
        half: is it computed in fp16?

    Raises:
        LoadError: it cannot be traced or converted; says which module and why.
    """
    import torch

    example = torch.zeros(1, context, dtype=torch.int64)
    inputs = [ct.TensorType(TOKENS, shape=example.shape, dtype=np.int32)]
    return converted(module, _logits(module), [example], inputs, [ct.TensorType(LOGITS)], half)


def converted(
    module: Any,
    call: Any,
    examples: Sequence[Any],
    inputs: Sequence[ct.TensorType],
    outputs: Sequence[ct.TensorType],
    half: bool,
) -> Any:
    """Convert what calls a module of transformers, by trace.

    Args:
        module: of transformers.
        call: a module that is traced, which calls it.
        examples: tensors that it is traced with.
        inputs: of the package.
        outputs: likewise.
        half: is it computed in fp16?

    Raises:
        LoadError: it cannot be traced or converted; says which module and why.
    """
    import torch

    prepare(module)
    try:
        with torch.no_grad(), quiet_host(), redirect_stderr(io.StringIO()):  # coremltools' progress bars
            trace: Any = torch.jit.trace
            with Traceable() as mode:
                traced = trace(call, tuple(examples), check_trace=False)
            if mode.acted:
                check(traced, call, _others(examples, int(module.config.get_text_config().vocab_size)))
            model = ct.convert(
                traced,
                inputs=list(inputs),
                outputs=list(outputs),
                minimum_deployment_target=ct.target.iOS18,
                compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
                skip_model_load=True,
            )
    except NotExpressible as error:
        raise NotExpressible(f"{type(module).__name__} was not converted: {error}") from error
    except SurgeryError:
        raise
    except Exception as error:  # torch and coremltools raise what they like
        kind = LoadError if isinstance(error, LengthError) else NotExpressible
        raise kind(f"{type(module).__name__} was not converted: {str(error).strip()}") from error
    return model


def prepare(module: Any) -> None:
    """Let a module be traced: the experts of a mixture all compute every token."""
    frontend.register()
    if getattr(module, "set_experts_implementation", None) is not None:
        frontend.register_experts()
        module.set_experts_implementation("dense")


def _others(examples: Sequence[Any], words: int) -> list[tuple[Any, ...]]:
    """Other tokens than those of a trace: different ones, and one again and again, which few experts get."""
    import torch

    draws = torch.Generator().manual_seed(0)
    ids, *others = examples
    drawn = [torch.randint(0, words, shape, generator=draws) for shape in (ids.shape, ids.shape[:1])]
    return [(tokens.to(ids.dtype).expand(ids.shape), *others) for tokens in drawn]


def _logits(module: Any) -> Any:
    """The module with ids as its input and logits as its output."""
    import torch

    class Logits(torch.nn.Module):
        """Ids to logits, without transformers' own outputs and cache."""

        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, input_ids: Any) -> Any:
            return self.model(input_ids=input_ids, use_cache=False).logits

    return Logits().eval()
