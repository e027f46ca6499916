"""Axes that torch does without: pools without a batch, products with a weight of one row."""

from __future__ import annotations

from typing import Any

from anesurgery.frontend.arguments import Convert, argument, inputs_of
from anesurgery.mil import mb


def pooling(rank: int) -> Any:
    """A pooling of this rank with its batch; the stride is the kernel's size by default."""

    def wrap(host: Convert) -> Convert:
        def convert(context: Any, node: Any) -> None:
            x = inputs_of(context, node)[0]
            if len(node.inputs) == 2:  # as torch.export writes it
                node.inputs = [*node.inputs, node.inputs[1]]
            if x.rank != rank - 1:
                host(context, node)
                return
            name, alone = node.name, f"{node.name}_alone"
            context.add(mb.expand_dims(x=x, axes=[0], name=alone))
            node.inputs, node.name = [alone, *node.inputs[1:]], f"{name}_batch"
            host(context, node)
            node.name = name
            context.add(mb.squeeze(x=context[f"{name}_batch"], axes=[0], name=name))

        return convert

    return wrap


def one_row(host: Convert) -> Convert:
    """`linear(x, weight)` whose weight is a vector: the last axis goes."""

    def convert(context: Any, node: Any) -> None:
        x, weight = inputs_of(context, node)[:2]
        if weight.rank != 1:
            host(context, node)
            return
        bias = argument(context, node, 2, "bias")
        product = mb.matmul(x=x, y=mb.expand_dims(x=weight, axes=[1]))
        product = mb.squeeze(x=product, axes=[-1])
        product = product if bias is None else mb.add(x=product, y=bias)
        context.add(mb.identity(x=product, name=node.name))

    return convert
