"""Whatever a model needs: inspect it, run the passes that its findings name, inspect again.

`auto` has one step, `apply_remedies`. It never keeps a pass that makes the estimate worse, and says what it
could not repair::

    ane.apply("model.mlpackage", "auto", target="M1/macOS 14")
"""

from __future__ import annotations

from anesurgery.passes.apply_remedies import ApplyRemedies
from anesurgery.surgery import Recipe

auto = Recipe(name="auto", steps=(ApplyRemedies(),), psnr=60.0)
