"""Convert a causal language model of transformers by trace: ids of shape (1, context) in, logits out.

`build` calls `convert` for a whole text, and `recurrent_states` calls `traced_package` for one step. All
experts of a mixture compute every token, each times its share: no other form in transformers keeps the tokens
on an axis of their own (`frontend.register_experts`, `traceable_experts`).
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
from anesurgery.mil import ct, quiet_host
from anesurgery.shipping.traceable_experts import Traceable, check

TOKENS, LOGITS = "input_ids", "logits"


def convert(module: Any, context: int, *, half: bool = True) -> Any:
    """Convert a causal language model to an ML Program of iOS 18.

    Args:
        module: of transformers, in fp32.
        context: how many tokens it reads.
        half: compute in fp16, else in fp32.

    Raises:
        LoadError: the module cannot be traced or converted.
    """
    import torch

    example = torch.zeros(1, context, dtype=torch.int64)
    inputs = [ct.TensorType(TOKENS, shape=example.shape, dtype=np.int32)]
    return traced_package(module, _ids_to_logits(module), [example], inputs, [ct.TensorType(LOGITS)], half)


def traced_package(
    module: Any,
    call: Any,
    examples: Sequence[Any],
    inputs: Sequence[ct.TensorType],
    outputs: Sequence[ct.TensorType],
    half: bool,
) -> Any:
    """Trace a module that calls a module of transformers, and convert the trace.

    Args:
        module: of transformers.
        call: the module to trace, which calls `module`.
        examples: example inputs of the trace; the first holds token ids.
        inputs: types of the package's inputs.
        outputs: types of its outputs.
        half: compute in fp16, else in fp32.

    Raises:
        LoadError: the module cannot be traced or converted.
    """
    import torch

    prepare(module)
    try:
        with torch.no_grad(), quiet_host(), redirect_stderr(io.StringIO()):  # coremltools' progress bars
            trace: Any = torch.jit.trace
            with Traceable() as mode:
                traced = trace(call, tuple(examples), check_trace=False)
            if mode.acted:
                check(traced, call, _other_tokens(examples, int(module.config.get_text_config().vocab_size)))
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
    """Prepare a module for the trace: the experts of a mixture all compute every token."""
    frontend.register()
    if getattr(module, "set_experts_implementation", None) is not None:
        frontend.register_experts()
        module.set_experts_implementation("dense")


def _other_tokens(examples: Sequence[Any], vocabulary: int) -> list[tuple[Any, ...]]:
    """Return two other inputs: random tokens, and one token repeated, which few experts get."""
    import torch

    draws = torch.Generator().manual_seed(0)
    ids, *others = examples
    drawn = [torch.randint(0, vocabulary, shape, generator=draws) for shape in (ids.shape, ids.shape[:1])]
    return [(tokens.to(ids.dtype).expand(ids.shape), *others) for tokens in drawn]


def _ids_to_logits(module: Any) -> Any:
    """Wrap a module to take ids and return only logits."""
    import torch

    class Logits(torch.nn.Module):
        """Ids to logits, without the other outputs of transformers and without a cache."""

        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, input_ids: Any) -> Any:
            return self.model(input_ids=input_ids, use_cache=False).logits

    return Logits().eval()
