"""Any model with smaller weights, corrected by samples.

`compressed` is `anesurgery.compress` as a recipe: it takes a package with any number of functions, those of a
cache among them, a pipeline, and chunks. What a chip needs before comes first, by name or by recipe::

    recipes.compressed("model.mlpackage", bits=4, inputs=samples, target="M5").save("small.mlpackage")
    ane.apply("vit.mlpackage", ["vit_ane", ane.passes.CompressWeights(bits=8, inputs=samples)], target="M1")
    ane.apply("gpt2_chunks", ane.passes.CompressWeights(bits=4, inputs=samples)).save("small_chunks")
"""

from __future__ import annotations

import math

from anesurgery import passes
from anesurgery.surgery import Recipe

compressed = Recipe(name="compressed", steps=(passes.CompressWeights(),), psnr=-math.inf)
