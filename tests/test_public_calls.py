"""Every public name stays what it is, whatever was imported and called before it: each call is made twice."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from coremltools.converters.mil.mil import get_new_symbol
from decoders import Decoder

import anesurgery as ane
from anesurgery import registry
from anesurgery.errors import SurgeryError
from anesurgery.mil import Program, ct, mb, types
from anesurgery.passes.add_cache import AddCache
from anesurgery.placement import Grade, Rule
from anesurgery.placement.evidence import unregister_rule
from anesurgery.surgery import Recipe
from anesurgery.testing import apply_pass

PACKAGES = {"passes", "recipes"}
"""The public names that are packages on purpose."""
NOT_CALLED = {
    "AgainstTorch",
    "Both",
    "Build",
    "Builder",
    "Certificate",
    "Comparison",
    "CoreAI",
    "ExecuTorch",
    "Fallback",
    "Folder",
    "Inspection",
    "Lint",
    "Match",
    "OpPattern",
    "Ops",
    "Pass",
    "Picture",
    "Plan",
}
NOT_CALLED |= {
    "CompressedCache",
    "Compression",
    "Refusal",
    "Rewrite",
    "Sensitivity",
    "SizeTimes",
    "SizedModel",
    "Surgery",
    "SurgeryError",
    "SurgeryWarning",
}
"""Classes whose objects calls give, or from which users derive."""


def dynamic() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((get_new_symbol(), 4))], opset_version=ct.target.iOS16)(
        lambda x: mb.relu(x=x, name="y")
    )


def wide(shapes: Any) -> Program:
    return mb.program(
        input_specs=[mb.TensorSpec(shapes["x"], dtype=types.fp16)], opset_version=ct.target.iOS18
    )(lambda x: mb.linear(x=x, weight=np.eye(64, dtype=np.float16), name="y"))


def small() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 4))], opset_version=ct.target.iOS16)(
        lambda x: mb.linear(x=mb.relu(x=x), weight=np.eye(4, dtype=np.float32), name="y")
    )


class Doubled(torch.nn.Module):
    """Twice what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def doubled() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 4))], opset_version=ct.target.iOS16)(
        lambda x: mb.mul(x=x, y=np.float32(2), name="y")
    )


def counting() -> Program:
    """A decoder of 8 words that always says the next one."""
    following = np.roll(np.eye(8, dtype=np.float32), 1, axis=1)

    return mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.int32)])(
        lambda ids: mb.gather(x=following, indices=ids, axis=0, name="logits")
    )


def cached() -> Program:
    """A decoder whose cache comes and goes by inputs and outputs."""
    return apply_pass(AddCache(prefill=8, cache="io"), Decoder(layers=1, half=True).program())[0]


def compressed_cache(folder: Path) -> Any:
    """A cache in 8 bits; of one text none can be held out, which is refused in words."""
    texts = [[n, 5, 3, 1, 4, 2, 9, 7] for n in range(4)]
    with pytest.raises(SurgeryError, match="1 texts; give two at least"):
        ane.compress_cache(cached(), texts[:1])
    found = ane.compress_cache(cached(), texts)
    assert isinstance(found, ane.CompressedCache)
    assert found.bytes[1] < found.bytes[0]
    return found.save(folder / "cache.mlpackage", overwrite=True)


def compiled(folder: Path) -> Any:
    """A model that is not compiled, which `decompile` refuses in words."""
    with pytest.raises(SurgeryError):
        ane.decompile(folder / "small.mlpackage", folder / "opened.mlpackage")


def no_program(folder: Path) -> Any:
    """A file that is no program of ExecuTorch, which `executorch` refuses in words."""
    with pytest.raises(SurgeryError):
        ane.executorch(Path(__file__))


def core_ai(folder: Path) -> Any:
    """A small model in Core AI."""
    pytest.importorskip("coreai", reason="coreai-core is not installed; it needs Python 3.11")
    return ane.to_coreai(small(), folder / "small.aimodel", overwrite=True)


def of_core_ai(call: Callable[[Path, Path], Any]) -> Callable[[Path], Any]:
    """A call that takes a Core AI model, and a place to write to."""
    return lambda folder: call(core_ai(folder).path, folder / "fallback.mlpackage")


def checkpoint(folder: Path) -> Path:
    """A checkpoint of Hugging Face; the same one each time."""
    place = folder / "checkpoint"
    return place if place.exists() else save_checkpoint(place, layers=1)


@dataclass(frozen=True)
class Nothing(ane.Pass):
    """A user's own pass that changes nothing."""

    name: ClassVar[str] = "nothing_at_all"

    def run(self, graph: Any, session: Any) -> None:
        """Leave the graph."""


RULE = Rule(
    "own",
    frozenset({"band_part"}),
    "because",
    "not measured",
    test=lambda *_: "",
    kind="speed",
    grade=Grade.GUESS,
    advice="none",
)
X = {"x": np.ones((2, 4), np.float32)}
VARIED = [{"x": np.full((2, 4), n, np.float32)} for n in range(8)]
CALLS: dict[str, Callable[[Path], Any]] = {
    "Pipeline": lambda _: ane.Pipeline((ane.passes.NegateSubtract(),)),
    "Predictor": lambda _: ane.Predictor(small())(X),
    "Recipe": lambda _: ane.Recipe(name="own", steps=(ane.passes.NegateSubtract(),)),
    "Sampler": lambda _: ane.Sampler(),
    "Target": lambda _: ane.Target.parse("M1/macOS 14"),
    "Tolerance": lambda _: ane.Tolerance(1e-5),
    "any_of": lambda _: ane.any_of(ane.var("x"), ane.var("y")),
    "against_torch": lambda _: ane.against_torch(Doubled(), doubled(), {"x": np.ones((2, 4), np.float32)}),
    "apply": lambda _: ane.apply(small(), "negate_subtract", quiet=True),
    "plan": lambda _: ane.plan(small(), "auto"),
    "certify": lambda _: ane.certify(small()),
    "choose_sizes": lambda _: ane.choose_sizes([3, 5], 1),
    "compare": lambda _: ane.compare(small(), small()),
    "compress": lambda _: ane.compress(small(), 8, inputs=VARIED, smallest=1),
    "compress_cache": compressed_cache,
    "decompile": compiled,
    "draw": lambda _: ane.draw(small()),
    "executorch": no_program,
    "extract": lambda at: ane.extract(at / "merged.mlpackage", "one", at / "one.mlpackage", overwrite=True),
    "first_divergence": lambda _: ane.first_divergence(small(), small(), X),
    "generate": lambda _: ane.generate(counting(), [1, 2], 2, quiet=True),
    "inspect": lambda _: ane.inspect(small()),
    "inspect_folder": lambda at: ane.inspect_folder(at),
    "lint": of_core_ai(lambda path, _: ane.lint(path)),
    "load": lambda at: ane.load(at / "small.mlpackage"),
    "merge": lambda at: ane.merge(
        {"one": at / "small.mlpackage", "two": at / "small.mlpackage"}, at / "merged.mlpackage", overwrite=True
    ),
    "ranges": lambda _: ane.ranges(small()),
    "ranges_folder": lambda at: ane.ranges_folder(at),
    "example": lambda at: ane.example("unet", at / "example.mlpackage", overwrite=True),
    "swift": lambda at: ane.swift(at / "built", at / "swift", overwrite=True),
    "stream": lambda _: list(ane.stream(counting(), [1, 2], 2)),
    "build": lambda at: ane.build(
        checkpoint(at), at / "built", context=8, prefill=4, overwrite=True, quiet=True
    ),
    "chat": lambda at: list(ane.chat(at / "built", "hello", steps=2, template=False)),
    "register": lambda _: ane.register(Nothing),
    "register_rule": lambda _: ane.register_rule(RULE),
    "run": lambda _: ane.run(small(), X),
    "save": lambda at: ane.save(ane.load(small()), at / "small.mlpackage", overwrite=True),
    "sensitivity": lambda _: ane.sensitivity(small(), X, ["linear-8"], smallest=1),
    "size_times": lambda _: ane.size_times(wide, {"x": (None, 64)}, [9000, 40000], "M4/macOS 15"),
    "sizes": lambda _: ane.sizes(dynamic(), {"x": [(1, 4), (2, 4)]}),
    "split": lambda _: ane.split(small(), 2),
    "to_coreai": core_ai,
    "to_coreml": of_core_ai(lambda path, out: ane.to_coreml(path, out, overwrite=True)),
    "to_text": lambda _: ane.to_text(small()),
    "upgrade": lambda _: ane.upgrade(small()),
    "var": lambda _: ane.var("x"),
}
ORDER = sorted(CALLS, key=lambda name: (name != "save", name != "merge", name))
"""The files that other calls read come first."""


def modules_in(package: ModuleType) -> list[str]:
    """The names of the modules in a package."""
    return [found.name for found in pkgutil.iter_modules(package.__path__)]


@pytest.fixture(scope="module", autouse=True)
def everything() -> None:
    """Import every module, so that it is an attribute of its package."""
    for found in pkgutil.walk_packages(ane.__path__, "anesurgery."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the calls write."""
    return tmp_path_factory.mktemp("calls")


def test_every_public_name_is_tried() -> None:
    assert sorted(ane.__all__) == sorted({*PACKAGES, *NOT_CALLED, *CALLS})
    assert all(isinstance(getattr(ane, name), type) for name in NOT_CALLED)
    assert all(isinstance(getattr(ane, name), ModuleType) for name in PACKAGES)


@pytest.mark.parametrize("package", [ane, ane.passes, ane.recipes], ids=lambda package: package.__name__)
def test_no_public_name_is_that_of_a_module(package: ModuleType) -> None:
    public = set(getattr(package, "__all__", dir(package)))
    assert public & set(modules_in(package)) <= (PACKAGES if package is ane else set())
    assert not set(registry.recipe_names()) & set(modules_in(ane.recipes))


@pytest.mark.parametrize("name", ORDER)
def test_each_call_works_twice(name: str, folder: Path) -> None:
    for _ in range(2):
        CALLS[name](folder)
    registry.unregister(Nothing.name)
    unregister_rule(RULE.id)


@pytest.mark.parametrize("name", registry.recipe_names())
def test_each_recipe_works_twice(name: str) -> None:
    results = []
    for _ in range(2):
        recipe = getattr(ane.recipes, name)
        assert isinstance(recipe, Recipe)
        try:
            results.append(type(recipe(small(), quiet=True)).__name__)
        except SurgeryError as error:
            results.append(str(error))
    assert results[0] == results[1]
    if name == "auto":
        assert results[0] == "MLModel"


def test_a_former_module_is_there_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"import from anesurgery.recipes.any_model"):
        exec("from anesurgery.recipes.auto import auto", names := dict[str, Any]())
    assert names["auto"] is ane.recipes.auto
    with pytest.warns(DeprecationWarning, match="use anesurgery.recipes.auto, the recipe"):
        assert not hasattr(sys.modules["anesurgery.recipes.auto"], "none_such")


@pytest.mark.slow
def test_the_recipe_is_no_module_though_its_former_module_is_imported_first() -> None:
    code = "import anesurgery.recipes.auto, anesurgery; print(type(anesurgery.recipes.auto).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Recipe"
