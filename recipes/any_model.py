"""Whatever a model needs: inspect it, run the passes that its findings name, inspect again.

Hazards of numbers that the inputs at hand reach are repaired first: where outputs are below 40 dB of what the
model means, in fp16 or in the arithmetic of the chip, the fewest repairs run that halve the error or more. Then
`auto` has one step, `apply_remedies`. It keeps a pass, or a pair of them, only where the model is expected to
be faster on the target, or to take as long with less that the ANE cannot run. It says what was gained,
what was tried and undone, and what it could not repair::

    ane.apply("model.mlpackage", "auto", target="M1/macOS 14")

An `.mlmodel` of layers is tried in both formats: `neuralnetwork_ane` edits its layers, and the step above its
ML Program. The ML Program is taken only if it is clearly faster, or repairs wrong numbers.
"""

from __future__ import annotations

from anesurgery import passes
from anesurgery.recipes.safety import STEPS
from anesurgery.surgery import Recipe

auto = Recipe(name="auto", steps=(passes.ApplyRemedies(),), repairs=STEPS, on_layers="neuralnetwork_ane")
