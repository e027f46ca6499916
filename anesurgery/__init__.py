"""See, fix and prove Core ML models for the Apple Neural Engine, before you own a Mac.

::

    import anesurgery as ane
    from anesurgery import recipes

    recipes.gpt2_ane("gpt2.mlpackage").save("gpt2_ane.mlpackage")

Importing this module loads neither torch nor coremltools; each name loads what it needs when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anesurgery import passes, recipes
    from anesurgery.checking.against_torch import AgainstTorch, against_torch
    from anesurgery.checking.comparison import Comparison, compare
    from anesurgery.checking.divergence import first_divergence
    from anesurgery.checking.grades import Tolerance
    from anesurgery.checking.ranges import ranges
    from anesurgery.compressing.cache_codes import CompressedCache, compress_cache
    from anesurgery.compressing.compression import Compression, compress
    from anesurgery.compressing.sensitivity import Sensitivity, sensitivity
    from anesurgery.errors import Refusal, SurgeryError, SurgeryWarning
    from anesurgery.examples.example_models import example
    from anesurgery.files.compiled_package import decompile
    from anesurgery.files.executorch_program import ExecuTorch, executorch
    from anesurgery.files.package import save
    from anesurgery.interpret import Predictor, run
    from anesurgery.interpret.decoding import generate, stream
    from anesurgery.interpret.sampler import Sampler
    from anesurgery.loading import load, to_text
    from anesurgery.network_editing.upgrade import upgrade
    from anesurgery.placement import Inspection, Target
    from anesurgery.placement.certifying import Certificate, certify
    from anesurgery.placement.folders import Folder, inspect_folder, ranges_folder
    from anesurgery.placement.inspector import inspect
    from anesurgery.placement.registered import register_rule
    from anesurgery.registry import register
    from anesurgery.rewriting.builder import Builder
    from anesurgery.rewriting.passes import Pass, Pipeline
    from anesurgery.rewriting.pattern import Match, OpPattern, Ops, any_of, var
    from anesurgery.rewriting.rewrite import Rewrite
    from anesurgery.shipping.building import Build, build
    from anesurgery.shipping.chatting import chat
    from anesurgery.shipping.several_sizes import SizedModel, sizes
    from anesurgery.shipping.size_times import SizeTimes, size_times
    from anesurgery.shipping.swift_package import swift
    from anesurgery.show.pictures import Picture, draw
    from anesurgery.splitting.merge import extract, merge
    from anesurgery.splitting.size_choice import choose_sizes
    from anesurgery.splitting.split import split
    from anesurgery.surgery import Recipe, Surgery, apply

__version__ = "0.1.0"

_HOMES = {
    "Inspection": "placement",
    "Target": "placement",
    "Build": "shipping.building",
    "Builder": "rewriting.builder",
    "Comparison": "checking.comparison",
    "CompressedCache": "compressing.cache_codes",
    "Compression": "compressing.compression",
    "Match": "rewriting.pattern",
    "OpPattern": "rewriting.pattern",
    "Ops": "rewriting.pattern",
    "Picture": "show.pictures",
    "Pass": "rewriting.passes",
    "Pipeline": "rewriting.passes",
    "Recipe": "surgery",
    "Refusal": "errors",
    "Rewrite": "rewriting.rewrite",
    "Surgery": "surgery",
    "SurgeryError": "errors",
    "SurgeryWarning": "errors",
    "Predictor": "interpret",
    "Sampler": "interpret.sampler",
    "Tolerance": "checking.grades",
    "any_of": "rewriting.pattern",
    "AgainstTorch": "checking.against_torch",
    "against_torch": "checking.against_torch",
    "apply": "surgery",
    "build": "shipping.building",
    "Certificate": "placement.certifying",
    "certify": "placement.certifying",
    "chat": "shipping.chatting",
    "choose_sizes": "splitting.size_choice",
    "compare": "checking.comparison",
    "compress": "compressing.compression",
    "compress_cache": "compressing.cache_codes",
    "draw": "show.pictures",
    "decompile": "files.compiled_package",
    "example": "examples.example_models",
    "ExecuTorch": "files.executorch_program",
    "executorch": "files.executorch_program",
    "extract": "splitting.merge",
    "first_divergence": "checking.divergence",
    "Folder": "placement.folders",
    "generate": "interpret.decoding",
    "load": "loading",
    "inspect": "placement.inspector",
    "inspect_folder": "placement.folders",
    "merge": "splitting.merge",
    "ranges": "checking.ranges",
    "ranges_folder": "placement.folders",
    "register": "registry",
    "register_rule": "placement.registered",
    "run": "interpret",
    "save": "files.package",
    "Sensitivity": "compressing.sensitivity",
    "sensitivity": "compressing.sensitivity",
    "SizedModel": "shipping.several_sizes",
    "SizeTimes": "shipping.size_times",
    "size_times": "shipping.size_times",
    "sizes": "shipping.several_sizes",
    "split": "splitting.split",
    "stream": "interpret.decoding",
    "swift": "shipping.swift_package",
    "to_text": "loading",
    "upgrade": "network_editing.upgrade",
    "var": "rewriting.pattern",
}

__all__ = [
    "AgainstTorch",
    "Build",
    "Builder",
    "Certificate",
    "Comparison",
    "CompressedCache",
    "Compression",
    "ExecuTorch",
    "Folder",
    "Inspection",
    "Match",
    "OpPattern",
    "Ops",
    "Pass",
    "Picture",
    "Pipeline",
    "Predictor",
    "Recipe",
    "Refusal",
    "Rewrite",
    "Sampler",
    "Sensitivity",
    "SizeTimes",
    "SizedModel",
    "Surgery",
    "SurgeryError",
    "SurgeryWarning",
    "Target",
    "Tolerance",
    "against_torch",
    "any_of",
    "apply",
    "build",
    "certify",
    "chat",
    "choose_sizes",
    "compare",
    "compress",
    "compress_cache",
    "decompile",
    "draw",
    "example",
    "executorch",
    "extract",
    "first_divergence",
    "generate",
    "inspect",
    "inspect_folder",
    "load",
    "merge",
    "passes",
    "ranges",
    "ranges_folder",
    "recipes",
    "register",
    "register_rule",
    "run",
    "save",
    "sensitivity",
    "size_times",
    "sizes",
    "split",
    "stream",
    "swift",
    "to_text",
    "upgrade",
    "var",
]


def __getattr__(name: str) -> Any:
    if name in ("passes", "recipes"):
        return importlib.import_module(f"anesurgery.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"anesurgery.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'anesurgery' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
