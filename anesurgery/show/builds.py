"""Show what `build` made: its size, where its functions run, and how near it is to the checkpoint."""

from __future__ import annotations

from typing import Any

from rich.console import Group

from anesurgery.byte_counts import byte_words
from anesurgery.semantics.reading import in_decibels
from anesurgery.show.console import plain, shows


@shows("Build")
def build_group(build: Any) -> Group:
    """A `Build` as lines, the first with its folder and size."""
    parts = f" in {build.chunks} chunks" if build.chunks > 1 else ""
    context = " or ".join(map(str, (build.options.context, *build.options.contexts)))
    first = f"{build.folder}: {byte_words(build.bytes)}{parts}, a context of {context} tokens"
    lines = [
        *(f"{name}: {words}" for name, words in build.placed.items()),
        f"Beside the checkpoint: {in_decibels(build.psnr)}, and the same likeliest token for {build.top:.1%} "
        "of the sampled tokens (fp16 arithmetic).",
        f"A logit is at most {build.off:.1e} of the range away. Where two tokens are nearer than twice that, "
        "the text may take the other one.",
        *(f"note: {words}" for words in build.notes),
    ]
    return Group(plain(first, "bold"), *map(plain, lines))
