"""See, fix and prove Core ML models for the Apple Neural Engine, without a Mac.

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
    from anesurgery import passes as passes
    from anesurgery import recipes as recipes
    from anesurgery.checking.against_torch import AgainstTorch as AgainstTorch
    from anesurgery.checking.against_torch import against_torch as against_torch
    from anesurgery.checking.comparison import Comparison as Comparison
    from anesurgery.checking.comparison import compare as compare
    from anesurgery.checking.divergence import first_divergence as first_divergence
    from anesurgery.checking.grades import Tolerance as Tolerance
    from anesurgery.checking.ranges import ranges as ranges
    from anesurgery.compressing.cache_codes import CompressedCache as CompressedCache
    from anesurgery.compressing.cache_codes import compress_cache as compress_cache
    from anesurgery.compressing.compression import Compression as Compression
    from anesurgery.compressing.compression import compress as compress
    from anesurgery.compressing.sensitivity import Sensitivity as Sensitivity
    from anesurgery.compressing.sensitivity import sensitivity as sensitivity
    from anesurgery.coreai.reading import Fallback as Fallback
    from anesurgery.coreai.reading import to_coreml as to_coreml
    from anesurgery.coreai.rules import Lint as Lint
    from anesurgery.coreai.rules import lint as lint
    from anesurgery.coreai.translating import CoreAI as CoreAI
    from anesurgery.coreai.translating import to_coreai as to_coreai
    from anesurgery.errors import Refusal as Refusal
    from anesurgery.errors import SurgeryError as SurgeryError
    from anesurgery.errors import SurgeryWarning as SurgeryWarning
    from anesurgery.examples.example_models import example as example
    from anesurgery.files.executorch_program import ExecuTorch as ExecuTorch
    from anesurgery.files.executorch_program import executorch as executorch
    from anesurgery.files.package import decompile as decompile
    from anesurgery.files.package import save as save
    from anesurgery.interpret import Predictor as Predictor
    from anesurgery.interpret import run as run
    from anesurgery.interpret.decoding import generate as generate
    from anesurgery.interpret.decoding import stream as stream
    from anesurgery.interpret.sampler import Sampler as Sampler
    from anesurgery.loading import load as load
    from anesurgery.loading import to_text as to_text
    from anesurgery.network_editing.upgrade import upgrade as upgrade
    from anesurgery.placement.certifying import Certificate as Certificate
    from anesurgery.placement.certifying import certify as certify
    from anesurgery.placement.evidence import register_rule as register_rule
    from anesurgery.placement.folders import Folder as Folder
    from anesurgery.placement.folders import inspect_folder as inspect_folder
    from anesurgery.placement.folders import ranges_folder as ranges_folder
    from anesurgery.placement.inspection import Inspection as Inspection
    from anesurgery.placement.inspector import inspect as inspect
    from anesurgery.placement.target import Target as Target
    from anesurgery.rewriting.both_formats import Both as Both
    from anesurgery.rewriting.builder import Builder as Builder
    from anesurgery.rewriting.edit_plan import Plan as Plan
    from anesurgery.rewriting.host import register as register
    from anesurgery.rewriting.passes import Pass as Pass
    from anesurgery.rewriting.passes import Pipeline as Pipeline
    from anesurgery.rewriting.pattern import Match as Match
    from anesurgery.rewriting.pattern import OpPattern as OpPattern
    from anesurgery.rewriting.pattern import Ops as Ops
    from anesurgery.rewriting.pattern import any_of as any_of
    from anesurgery.rewriting.pattern import var as var
    from anesurgery.rewriting.rewrite import Rewrite as Rewrite
    from anesurgery.shipping.building import Build as Build
    from anesurgery.shipping.building import build as build
    from anesurgery.shipping.chatting import chat as chat
    from anesurgery.shipping.several_sizes import SizedModel as SizedModel
    from anesurgery.shipping.several_sizes import SizeTimes as SizeTimes
    from anesurgery.shipping.several_sizes import size_times as size_times
    from anesurgery.shipping.several_sizes import sizes as sizes
    from anesurgery.shipping.swift_package import swift as swift
    from anesurgery.show.pictures import Picture as Picture
    from anesurgery.show.pictures import draw as draw
    from anesurgery.splitting.merge import extract as extract
    from anesurgery.splitting.merge import merge as merge
    from anesurgery.splitting.size_choice import choose_sizes as choose_sizes
    from anesurgery.splitting.split import split as split
    from anesurgery.surgery import Recipe as Recipe
    from anesurgery.surgery import Surgery as Surgery
    from anesurgery.surgery import apply as apply
    from anesurgery.surgery import plan as plan

__version__ = "0.1.0"

_NAMES = {
    "checking.against_torch": "AgainstTorch against_torch",
    "checking.comparison": "Comparison compare",
    "checking.divergence": "first_divergence",
    "checking.grades": "Tolerance",
    "checking.ranges": "ranges",
    "compressing.cache_codes": "CompressedCache compress_cache",
    "compressing.compression": "Compression compress",
    "compressing.sensitivity": "Sensitivity sensitivity",
    "coreai.reading": "Fallback to_coreml",
    "coreai.rules": "Lint lint",
    "coreai.translating": "CoreAI to_coreai",
    "errors": "Refusal SurgeryError SurgeryWarning",
    "examples.example_models": "example",
    "files.executorch_program": "ExecuTorch executorch",
    "files.package": "decompile save",
    "interpret": "Predictor run",
    "interpret.decoding": "generate stream",
    "interpret.sampler": "Sampler",
    "loading": "load to_text",
    "network_editing.upgrade": "upgrade",
    "placement.certifying": "Certificate certify",
    "placement.evidence": "register_rule",
    "placement.folders": "Folder inspect_folder ranges_folder",
    "placement.inspection": "Inspection",
    "placement.inspector": "inspect",
    "placement.target": "Target",
    "rewriting.both_formats": "Both",
    "rewriting.builder": "Builder",
    "rewriting.host": "register",
    "rewriting.passes": "Pass Pipeline",
    "rewriting.pattern": "Match OpPattern Ops any_of var",
    "rewriting.edit_plan": "Plan",
    "rewriting.rewrite": "Rewrite",
    "shipping.building": "Build build",
    "shipping.chatting": "chat",
    "shipping.several_sizes": "SizeTimes SizedModel size_times sizes",
    "shipping.swift_package": "swift",
    "show.pictures": "Picture draw",
    "splitting.merge": "extract merge",
    "splitting.size_choice": "choose_sizes",
    "splitting.split": "split",
    "surgery": "Recipe Surgery apply plan",
}
"""Module of the package -> the public names that live in it."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_HOMES, "passes", "recipes"])


def __getattr__(name: str) -> Any:
    if name in ("passes", "recipes"):
        return importlib.import_module(f"anesurgery.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"anesurgery.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'anesurgery' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
