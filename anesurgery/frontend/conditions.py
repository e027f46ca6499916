"""Convert `torch.cond`, as torch.export gives it: both branches are computed, and one result is selected.

A branch of torch.export has no effects, so that it may be computed in vain. coremltools takes no op that holds
a graph; loops such as `torch.while_loop` are refused with the reason.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

LOOPS = "{kind} is not converted: write a Python loop with a number of steps that is known"


def without_conditions(exported: Any) -> Any:
    """Return a program of torch.export in which both branches of each condition are computed."""
    if any(isinstance(child, torch.fx.GraphModule) for child in exported.graph_module.children()):
        exported = copy.copy(exported)  # the caller's stays as it is
        exported._graph_module = copy.deepcopy(exported.graph_module)
        _compute_both_branches(exported.graph_module)
    return exported


def _compute_both_branches(module: Any) -> None:
    """Replace each condition in a graph, and in the graphs of its branches, by selections."""
    graph = module.graph
    for node in [n for n in graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)]:
        if node.target is not torch.ops.higher_order.cond:
            raise NotImplementedError(LOOPS.format(kind=node.target))
        condition, *branches, operands = node.args
        sides = []
        for name in branches:
            branch = getattr(module, name.target)
            _compute_both_branches(branch)
            places = (n for n in branch.graph.nodes if n.op == "placeholder")
            with graph.inserting_before(node):
                sides.append(graph.graph_copy(branch.graph, dict(zip(places, operands, strict=True))))
        for result in list(node.users):  # each selects one result of the condition
            chosen = [side[result.args[1]] for side in sides]
            result.target, result.args = torch.ops.aten.where.self, (condition, *chosen)
        graph.erase_node(node)
        for unread in {name for name in branches if not name.users}:
            graph.erase_node(unread)
