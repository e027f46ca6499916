"""Can the OS of a target load the model at all? Each specification version needs a release of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from anesurgery.mil import ct
from anesurgery.placement.evidence import Finding, Grade, general
from anesurgery.placement.target import CHIPS, Target

KIND = "load"
"""Of findings that say that the model does not load; each is an error, and comes before all others."""

TOO_NEW = general(
    "opset",
    "an OS refuses a model with a newer specification, so nothing runs there",
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
    newest = _newest(target.platform, target.os)
    if newest is None or version <= newest:
        return ()
    version_of = releases(target.platform)
    first = min((release for release, value in version_of.items() if value >= version), default=None)
    needs = "a newer release" if first is None else f"{target.platform} {first}"
    return (
        TOO_NEW.finding(
            f"{target.platform} {target.os} cannot load it: specification {version} needs {needs}, and "
            f"{target.platform} {target.os} takes up to {newest}"
        ),
    )


def newest_for(target: Target) -> int:
    """The newest specification version that loads on the OS of a target, or the oldest of each of its chips."""
    systems = {(CHIPS[chip].platform, CHIPS[chip].first_os) for chip in target.chips}
    if target.platform is not None and target.os is not None:
        systems = {(target.platform, target.os)}
    newest = [_newest(*each) for each in systems]
    return min((n for n in newest if n is not None), default=max(releases("iOS").values()))


def _newest(platform: str, os: int) -> int | None:
    """The newest specification version of a release; None beyond those that coremltools knows."""
    version_of = releases(platform)
    if os > max(version_of):
        return None
    return max(value for release, value in version_of.items() if release <= os)


def refusal(findings: Sequence[Finding]) -> str:
    """Why the model does not load, in words; "" where nothing says that it does not."""
    return next((f.message for f in findings if f.kind == KIND), "")
