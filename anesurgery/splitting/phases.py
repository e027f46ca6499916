"""Put ops that must stand apart from the others into phases of their own: as few phases as the order allows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def phases(before: Sequence[Collection[int]], apart: Sequence[bool]) -> list[int]:
    """The phase of each op, from 0; ops that stand apart are in odd phases, the others in even ones.

    Args:
        before: for each op, the earlier ones that must run first.
        apart: does it stand apart?
    """
    phase_of: list[int] = []
    for needed, alone in zip(before, apart, strict=True):
        least = max((phase_of[n] for n in needed), default=0)
        phase_of.append(least + (least % 2 != alone))
    return phase_of


def joined(numbers: Sequence[int], together: Iterable[Collection[int]]) -> list[int]:
    """Phases numbered without gaps, where some ops must be in one phase: all phases between them become one.

    Args:
        numbers: the phase of each op.
        together: sets of ops, each to stay in one phase.
    """
    spans = [(min(numbers[i] for i in ops), max(numbers[i] for i in ops)) for ops in together if ops]
    used = sorted(set(numbers))
    new: dict[int, int] = {}
    for place, phase in enumerate(used):
        inside = any(first < phase <= last for first, last in spans)
        new[phase] = 0 if place == 0 else new[used[place - 1]] + (not inside)
    return [new[phase] for phase in numbers]
