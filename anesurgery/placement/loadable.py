"""Can the OS of a target load the model at all? Each specification version needs a release of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from anesurgery.mil import ct
from anesurgery.placement.evidence import Finding, Grade, general
from anesurgery.placement.target import Target

KIND = "load"
"""Of findings that say that the model does not load; each is an error, and comes before all others."""

TOO_NEW = general(
    "opset",
    "an OS refuses a model whose specification is newer than itself; nothing of it runs there",
    "coremltools: minimum_deployment_target (AvailableTarget)",
    grade=Grade.DOCUMENTED,
    kind=KIND,
    advice="convert for the oldest OS that you support, without ops of newer ones, or require a newer OS",
)


def releases(platform: str) -> dict[int, int]:
    """The specification version that came with each major release, as coremltools lists them."""
    named = {n: re.fullmatch(rf"{platform}(\d+)(_\d+)?", n) for n in ct.target.__members__}
    return {int(m[1]): int(ct.target[name].value) for name, m in named.items() if m and not m[2]}


def of_version(version: int, target: Target) -> tuple[Finding, ...]:
    """What is wrong with a specification version on the OS of a target; nothing where the OS is not said.

    Args:
        version: of the model's specification, or the newest opset of its functions.
        target: chips and OS.
    """
    if target.platform is None or target.os is None:
        return ()
    version_of = releases(target.platform)
    if target.os > max(version_of):  # the newest that coremltools knows loads there
        return ()
    newest = max(value for release, value in version_of.items() if release <= target.os)
    if version <= newest:
        return ()
    first = min((release for release, value in version_of.items() if value >= version), default=None)
    needs = "a newer release" if first is None else f"{target.platform} {first}"
    return (
        TOO_NEW.finding(
            f"{target.platform} {target.os} cannot load it: specification {version} needs {needs}, and "
            f"{target.platform} {target.os} takes up to {newest}"
        ),
    )


def refusal(findings: Sequence[Finding]) -> str:
    """Why the model does not load, in words; "" where nothing says that it does not."""
    return next((f.message for f in findings if f.kind == KIND), "")
