"""Recurrent layers as torch.export writes them: `lstm.input` and its siblings give a tuple."""

from __future__ import annotations

from typing import Any

from anesurgery.frontend.arguments import Convert

OUTPUTS = {"lstm": 3, "gru": 2, "rnn_tanh": 2, "rnn_relu": 2}
"""Torch operation -> how many values it gives."""


def of_export(kind: str) -> Convert:
    """The converter of `<kind>.input`, by that of the trace's operation, which names its outputs one by one."""

    def convert(context: Any, node: Any) -> None:
        from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRNode
        from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

        names = [f"{node.name}_output_{i}" for i in range(OUTPUTS[kind])]
        traced = InternalTorchIRNode(
            kind=kind, name=names[0], inputs=node.inputs, outputs=names, blocks=[], meta=node.meta
        )
        _TORCH_OPS_REGISTRY.get_func(kind)(context, traced)
        context.add(tuple(context[name] for name in names), torch_name=node.name)

    return convert
