"""What Model Explorer imports: an adapter that opens models of Core ML, and four overlays of their ops.

Model Explorer knows its extensions by their classes, which are made here only where it is installed.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from anesurgery.errors import SurgeryError
from anesurgery.explorer.model_graphs import TARGET, TEXT, Node, function_of_graph, graph_id, graphs, values
from anesurgery.placement.inspector import inspect

SUFFIXES = ("mlpackage", "mlmodel", "mlmodelc", "pte")
ADAPTER = "anesurgery_core_ml"
PREFIX = "anesurgery_"
OVERLAYS = {
    "units": "Unit on which each op is expected to run",
    "time": "Estimated milliseconds of each op",
    "numbers": "Numeric hazards of each op in fp16",
    "findings": "How many rules have something to say of each op",
}
NUMERIC = ("time", "findings")
"""Overlays whose colour says how large the value is."""
LARGEST = "#e8823a"


def make_adapter() -> type:
    """The class by which Model Explorer opens models of Core ML."""
    from model_explorer import Adapter, AdapterMetadata
    from model_explorer.graph_builder import Graph

    class CoreMLAdapter(Adapter):  # type: ignore[misc, unused-ignore]
        """Opens models of Core ML by path."""

        metadata = AdapterMetadata(
            id=ADAPTER,
            name="Core ML (anesurgery)",
            description="Core ML models with estimated units",
            fileExts=list(SUFFIXES),
        )

        def convert(self, model_path: str, settings: dict[str, Any]) -> dict[str, list[Graph]]:
            """A graph for each function of a model."""
            by_function = graphs(model_path, TARGET)
            return {
                "graphs": [Graph(graph_id(model_path, n), [*map(_node, ns)]) for n, ns in by_function.items()]
            }

    return CoreMLAdapter


def _node(node: Node) -> Any:
    from model_explorer.graph_builder import GraphNode, IncomingEdge, KeyValue, MetadataItem

    return GraphNode(
        id=node.name,
        label=node.label,
        namespace=node.group,
        attrs=[KeyValue(*fact) for fact in node.facts.items()],
        incomingEdges=[IncomingEdge(*edge) for edge in node.reads],
        outputsMetadata=[
            MetadataItem(str(i), [KeyValue("__tensor_tag", name), KeyValue("type", words)])
            for i, (name, words) in enumerate(node.gives)
        ],
    )


def make_overlays() -> type:
    """The class by which Model Explorer colours the ops of a model by what `inspect` says of them."""
    from model_explorer import node_data_provider as provider
    from model_explorer.config_editor import TextInputConfigEditor

    class CoreMLOverlays(provider.NodeDataProvider):  # type: ignore[misc, unused-ignore]
        """Gives the values of an overlay."""

        metadata = [  # noqa: RUF012 - Model Explorer reads it from the class
            provider.NodeDataProviderMetadata(
                id=PREFIX + key,
                name=f"anesurgery: {key}",
                description=words,
                filter=provider.NodeDataProviderFilter(adapterIds=[ADAPTER]),
            )
            for key, words in OVERLAYS.items()
        ]

        def get_config_editors(self, provider_id: str) -> Any:
            """The chip and OS for which units and times are estimated."""
            words = "chip and OS, as M4/macOS 15 or iPhone 15 Pro"
            asked = TextInputConfigEditor(id="target", label="target", description=words, defaultValue=TARGET)
            return provider.GetConfigEditorsResult(configEditors=[asked])

        def run(
            self, provider_id: str, model_path: str, graph_id: str, config_values: Any = None, **_: Any
        ) -> Any:
            """The values of one overlay."""
            target = (config_values or {}).get("target") or TARGET
            overlay, function = provider_id.removeprefix(PREFIX), function_of_graph(graph_id)
            try:
                return provider.NodeDataProviderResult(_values(model_path, function, overlay, target))
            except SurgeryError as error:
                return provider.NodeDataProviderResult(error=str(error))

    return CoreMLOverlays


def _values(path: str, function: str, overlay: str, target: str) -> Any:
    from model_explorer.node_data_builder import GradientItem, GraphNodeData, NodeDataResult

    results = {
        name: NodeDataResult(value, colour, TEXT if colour else None)
        for name, (value, colour) in values(inspect(path, target, function=function), overlay).items()
    }
    gradient = [GradientItem(0, "#ffffff", TEXT), GradientItem(1, LARGEST, TEXT)] if overlay in NUMERIC else []
    return GraphNodeData(results, f"{overlay} on {target}", gradient=gradient)


if find_spec("model_explorer") is not None:
    CoreMLAdapter, CoreMLOverlays = make_adapter(), make_overlays()
