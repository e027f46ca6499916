"""Refuse a network that cannot be built for what its specification says as a whole, before any layer is."""

from __future__ import annotations

from collections import Counter
from typing import Any

from anesurgery.errors import LoadError, UnknownName
from anesurgery.mil import ct
from anesurgery.neuralnetwork.spec import DAMAGED, network_of

NEWEST = max(int(target.value) for target in ct.target)
"""The newest specification that coremltools knows."""


def check(spec: Any) -> None:
    """Refuse what no layer can be blamed for.

    Args:
        spec: specification of a model that is a network.

    Raises:
        LoadError: it is too new, without layers, or its description contradicts itself.
    """
    if spec.specificationVersion > NEWEST:
        raise LoadError(
            f"specification {spec.specificationVersion} is newer than {NEWEST}, the newest that coremltools "
            f"{ct.__version__} knows; upgrade coremltools"
        )
    network, description = network_of(spec), spec.description
    if not network.layers:
        raise LoadError(f"the network has no layers; {DAMAGED}")
    if not description.output:
        raise LoadError(f"the model has no outputs; {DAMAGED}")
    _check_names(description)
    _check_preprocessing(network, description)
    if "ClassLabels" in network.DESCRIPTOR.oneofs_by_name:
        _check_classifier(network, description)


def _check_names(description: Any) -> None:
    """Each input has a name of its own, and each output; an output may be an input as well."""
    for what, features in (("input", description.input), ("output", description.output)):
        for name, count in Counter(f.name for f in features).items():
            if not name:
                raise LoadError(f"an {what} has no name; {DAMAGED}")
            if count > 1:
                raise LoadError(f"{count} {what}s are called {name!r}; give each a name of its own")


def _check_preprocessing(network: Any, description: Any) -> None:
    """Each preprocessing is of a known kind, and for an input that exists."""
    inputs = [f.name for f in description.input]
    for step in network.preprocessing:
        if step.featureName and step.featureName not in inputs:
            raise LoadError(
                f"a preprocessing is for no input: {UnknownName('input', step.featureName, inputs)}"
            )
        if step.WhichOneof("preprocessor") is None:
            raise LoadError(
                f"the preprocessing of {step.featureName!r} is neither a scaler nor a mean image; "
                "upgrade coremltools, or export the model again"
            )


def _check_classifier(network: Any, description: Any) -> None:
    """It has labels, and outputs for its decision."""
    if network.WhichOneof("ClassLabels") is None:
        raise LoadError("the classifier has no class labels; export it again with labels")
    if not description.predictedFeatureName:
        raise LoadError("the classifier does not say which output is the label; set predictedFeatureName")
    outputs = [f.name for f in description.output]
    for field in ("predictedFeatureName", "predictedProbabilitiesName"):
        name = getattr(description, field)
        if name and name not in outputs:
            raise LoadError(f"{field} names no output: {UnknownName('output', name, outputs)}")
