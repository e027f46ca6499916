"""Inspect models that are not an ML Program: neural networks, pipelines, chains of chunks, and others.

`inspect` calls `inspect_other` first. A network is inspected layer by layer, a pipeline or chain part by part;
a model without tensor ops, such as a tree ensemble, gets a note.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from anesurgery.errors import LoadError
from anesurgery.files import package as program
from anesurgery.files.package import PIPELINES, Loaded, part_names, read_spec
from anesurgery.files.sequence import Chain, is_chain, is_chunked, is_network, members
from anesurgery.loading import load_chain
from anesurgery.mil import Program, ct
from anesurgery.neuralnetwork.spec import NETWORKS, networks_of
from anesurgery.placement.durations import Time, total
from anesurgery.placement.evidence import Finding, Grade, Scope, general
from anesurgery.placement.inspection import NO_TIME, Inspection
from anesurgery.placement.networks import inspect_network
from anesurgery.placement.rules.loading import of_version
from anesurgery.placement.rules.lost_in_conversion import SCORES
from anesurgery.placement.target import Target
from anesurgery.registry import reader_of

PROGRAM = "mlProgram"

WITHOUT_OPS: dict[str, str] = {
    "treeEnsembleClassifier": "a tree ensemble",
    "treeEnsembleRegressor": "a tree ensemble",
    "glmClassifier": "a generalized linear model",
    "glmRegressor": "a generalized linear model",
    "supportVectorClassifier": "a support vector machine",
    "supportVectorRegressor": "a support vector machine",
    "bayesianProbitRegressor": "a Bayesian probit regressor",
    "kNearestNeighborsClassifier": "a nearest neighbour classifier",
    "itemSimilarityRecommender": "an item similarity recommender",
    "classConfidenceThresholding": "a thresholding of class confidences",
    "oneHotEncoder": "a one-hot encoder",
    "imputer": "an imputer",
    "featureVectorizer": "a feature vectorizer",
    "dictVectorizer": "a dictionary vectorizer",
    "scaler": "a scaler",
    "categoricalMapping": "a categorical mapping",
    "normalizer": "a normalizer",
    "arrayFeatureExtractor": "an array feature extractor",
    "nonMaximumSuppression": "a non-maximum suppression model",
    "identity": "an identity model",
}
"""Type in the specification -> name of the kind of model. Core ML runs these on the CPU; they have no ops."""

CLOSED: dict[str, str] = {
    "customModel": "a custom model: its code is in the app",
    "linkedModel": "a link to another model file; inspect that file",
    "serializedModel": "a serialized model, whose content cannot be read",
    "textClassifier": "a text classifier of the OS",
    "wordTagger": "a word tagger of the OS",
    "visionFeaturePrint": "Apple's image feature extractor, which is part of the OS",
    "soundAnalysisPreprocessing": "Apple's preprocessing of sound, which is part of the OS",
    "gazetteer": "a gazetteer of the OS",
    "wordEmbedding": "a word embedding of the OS",
    "audioFeaturePrint": "Apple's audio feature extractor, which is part of the OS",
}
"""Type in the specification -> name. The file does not contain what these run."""

CLASSES = 80
SUPPRESSED = general(
    "suppressed-classes",
    "if the classes of a YOLO were no multiple of 80, boxes were missing or outside the image after the "
    "non-maximum suppression behind an ML Program. With scores of 0 for more classes, up to a multiple of 80, "
    "they were correct; a network (.mlmodel) did not need them",
    "ultralytics/ultralytics: issues 22309, 14668, pull request 22310",
    grade=Grade.REPORTED,
    kind="numeric",
    scope=Scope(os="seen on iPhones and on an M4 Pro, macOS 26.0; compute units not given"),
    advice="pad the scores with zeros to a multiple of 80 classes and add labels (ultralytics does so from "
    "8.3.207 on), or suppress boxes in the app (nms=False)",
)

SUMS = replace(
    SCORES,
    advice="set spec.treeEnsembleClassifier.postEvaluationTransform = 1 (a softmax) and save the model again",
)
InspectProgram = Callable[[Loaded, Target], Inspection]


def kind_of(model: Any) -> str:
    """Return the type of a model as the specification names it: "mlProgram", "pipeline", "neuralNetwork", ...

    Args:
        model: path, MLModel, MIL program or Loaded.

    Raises:
        LoadError: it cannot be read, or is not a model.
    """
    if _is_program(model):
        return PROGRAM
    return str(spec_of(model).WhichOneof("Type"))


def _is_program(model: Any) -> bool:
    """Is it an ML Program in memory, or a file of another format (ONNX, ...) that is read into one?"""
    if isinstance(model, (str, os.PathLike)):
        return reader_of(Path(model)) is not None
    return isinstance(model, (Program, Loaded))


def spec_of(model: Any) -> Any:
    """Return the specification of a model on disk or of an MLModel.

    Raises:
        LoadError: it cannot be read, or is not a model.
    """
    if isinstance(model, ct.models.MLModel):
        return model.get_spec()
    if not isinstance(model, (str, os.PathLike)):
        raise LoadError(f"cannot inspect a {type(model).__name__}; give a path, an MLModel or a MIL Program")
    return read_spec(program.locate(Path(model).expanduser())[0])


def is_layered(model: Any) -> bool:
    """Is a model a neural network (with layers instead of ops), or a pipeline with one and without ML Programs?

    Raises:
        LoadError: it cannot be read.
    """
    if _is_program(model):
        return False
    if is_chunked(model):
        chain = model if isinstance(model, Chain) else load_chain(model)
        return all(map(is_network, chain.chunks))
    spec = spec_of(model)
    parts = members(spec) if spec.WhichOneof("Type") in PIPELINES else ()
    return bool(networks_of(spec)) and all(part.WhichOneof("Type") != PROGRAM for _, part in parts)


def inspect_other(model: Any, target: Target, inspect_program: InspectProgram) -> Inspection | None:
    """Inspect a model that is not an ML Program.

    Args:
        model: path, MLModel, MIL program or Loaded.
        target: chips, OS and compute units.
        inspect_program: called for each ML Program in a pipeline or chain.

    Returns:
        The inspection; None if the model is an ML Program itself.

    Raises:
        LoadError: it cannot be read, or is not a model.
    """
    if _is_program(model):
        return None
    if isinstance(model, (str, os.PathLike)) and is_chain(Path(model).expanduser()):
        model = load_chain(model)
    if isinstance(model, Chain):
        return _inspect_chain(model, target, inspect_program)
    spec = spec_of(model)
    if spec.WhichOneof("Type") == PROGRAM:
        return None
    inspection = _inspect_part(spec, target, _label(model), _ProgramInspector(model, inspect_program))
    return replace(inspection, findings=(*of_version(spec.specificationVersion, target), *inspection.findings))


def _inspect_chain(chain: Chain, target: Target, inspect_program: InspectProgram) -> Inspection:
    label = "the chain"
    parts = {}
    for number, chunk in enumerate(chain.chunks, 1):
        words = f"chunk {number} of {label}"
        inspection = (
            inspect_network(chunk.spec, target, words) if is_network(chunk) else inspect_program(chunk, target)
        )
        parts[f"chunk_{number}"] = replace(inspection, model=words)
    return _combined(parts, label, target, "a chain")


def _combined(parts: dict[str, Inspection], label: str, target: Target, kind: str, *notes: str) -> Inspection:
    """Return the inspection of models that run one after the other."""
    time, why_not = _total_time(parts)
    first_note = f"{kind} of {len(parts)} models, which run one after the other"
    return Inspection(label, target, (), notes=(first_note, *notes, *why_not), parts=parts, time=time)


def _total_time(parts: Mapping[str, Inspection]) -> tuple[Time | None, tuple[str, ...]]:
    """Return the time of models that run one after the other, and notes: why there is none, if so."""
    with_ops = {name: part for name, part in parts.items() if part.ops or part.parts}
    untimed = [name for name, part in with_ops.items() if part.time is None]
    times = [part.time for part in with_ops.values() if part.time is not None]
    if untimed or not times:
        return None, (f"{NO_TIME}there is none of {', '.join(untimed) or 'a part'}",)
    return total(times), ()


def _label(model: Any) -> str:
    return str(model) if isinstance(model, (str, os.PathLike)) else "the model"


class _ProgramInspector:
    """Inspects the ML Programs of one pipeline, whose weights are in one folder."""

    def __init__(self, model: Any, inspect_program: InspectProgram) -> None:
        path = model.package_path if isinstance(model, ct.models.MLModel) else model
        self._path = None if path is None else Path(path).expanduser()
        self._inspect = inspect_program

    def __call__(self, spec: Any, target: Target, label: str) -> Inspection:
        if self._path is None:
            raise LoadError(f"{label} needs its weights; save the model and give the path")
        folder = program.locate(self._path)[1]
        loaded = program.from_spec(spec, self._path.resolve(), folder, None, graph_only=True)
        return replace(self._inspect(loaded, target), model=label)


def _inspect_part(spec: Any, target: Target, label: str, programs: _ProgramInspector) -> Inspection:
    """Inspect one model of a pipeline, or the model itself, by its type."""
    kind = str(spec.WhichOneof("Type"))
    if kind == PROGRAM:
        return programs(spec, target, label)
    if kind in NETWORKS:
        return inspect_network(spec, target, label)
    if kind in PIPELINES:
        return _inspect_pipeline(PIPELINES[kind](spec), target, label, programs)
    findings = tuple(_about_trees(spec.treeEnsembleClassifier)) if kind == "treeEnsembleClassifier" else ()
    return Inspection(label, target, (), findings=findings, notes=(_note_without_ops(kind),))


def _about_trees(classifier: Any) -> Iterator[Finding]:
    """Yield a finding if boosted trees give sums that no transform turns into probabilities."""
    trees = classifier.treeEnsemble
    sums = (info.evaluationValue for node in trees.nodes for info in node.evaluationInfo)
    if not classifier.postEvaluationTransform and min(sums, default=0) < 0:
        yield SUMS.finding("the trees sum negative scores, without a softmax")


def _inspect_pipeline(pipeline: Any, target: Target, label: str, programs: _ProgramInspector) -> Inspection:
    names = part_names(pipeline)
    parts = {
        name: _inspect_part(spec, target, f"{name} of {label}", programs)
        for name, spec in zip(names, pipeline.models, strict=True)
    }
    without_ops = [name for name, part in parts.items() if not part.ops and not part.parts]
    notes = [f"without ops, and not counted in the status: {', '.join(without_ops)}"] if without_ops else []
    inspection = _combined(parts, label, target, "a pipeline", *notes)
    return replace(inspection, findings=tuple(_about_classes(pipeline)))


def _about_classes(pipeline: Any) -> Iterator[Finding]:
    """Yield a finding for each suppression of boxes behind an ML Program, by the number of its classes."""
    kinds = [model.WhichOneof("Type") for model in pipeline.models]
    for place, model in enumerate(pipeline.models):
        if kinds[place] != "nonMaximumSuppression" or PROGRAM not in kinds[:place]:
            continue
        scores = model.nonMaximumSuppression.confidenceInputFeatureName
        shapes = (i.type.multiArrayType.shape for i in model.description.input if i.name == scores)
        for classes in (shape[-1] for shape in shapes if shape and shape[-1] % CLASSES):
            yield SUPPRESSED.finding(
                f"boxes reported wrong: the suppression is of {classes} classes, no multiple of {CLASSES}"
            )


def _note_without_ops(kind: str) -> str:
    """Return the note about a type of model that has no tensor ops, or whose ops are not in the file."""
    if kind in WITHOUT_OPS:
        return f"{WITHOUT_OPS[kind]} has no tensor ops; Core ML runs it on the CPU"
    what = CLOSED.get(kind, f"a model of type {kind}")
    return f"{what}; what it runs on cannot be told from the file"
