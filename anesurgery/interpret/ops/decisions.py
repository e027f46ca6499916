"""What a detector or a classifier decides: which boxes stay, which label it is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.table import impl

Tensor = torch.Tensor


@impl("classify")
def classify(probabilities: Tensor, classes: Any) -> tuple[Any, dict[Any, float]]:
    """The most probable class, and the probability of each."""
    names = [n.item() if hasattr(n, "item") else n for n in getattr(classes, "ls", classes)]
    flat = probabilities.reshape(-1)
    return names[int(flat.argmax())], dict(zip(names, flat.tolist(), strict=True))


def _overlap(box: Tensor, others: Tensor) -> Tensor:
    """Intersection over union of one box [4] with others [n, 4] (center x, center y, width, height)."""
    low = torch.maximum(box[:2] - box[2:] / 2, others[:, :2] - others[:, 2:] / 2)
    high = torch.minimum(box[:2] + box[2:] / 2, others[:, :2] + others[:, 2:] / 2)
    shared = (high - low).clamp(min=0).prod(-1)
    union = box[2:].prod() + others[:, 2:].prod(-1) - shared
    return torch.where(union > 0, shared / union, torch.zeros_like(union))


def _survivors(
    boxes: Tensor, scores: Tensor, iou: float, least: float | None, most: int, by_class: bool
) -> Tensor:
    """Places of the boxes [n, 4] that stay, best first; scores are [n, classes]."""
    score, label = scores.max(-1)
    left = torch.argsort(score, descending=True, stable=True)
    if least is not None:
        left = left[score[left] >= least] if bool((score >= least).any()) else left[:1]
    kept: list[int] = []
    while len(left) and len(kept) < most:
        best, left = left[0], left[1:]
        kept.append(int(best))
        suppressed = _overlap(boxes[best], boxes[left]) > iou
        if by_class:
            suppressed &= label[left] == label[best]
        left = left[~suppressed]
    return torch.tensor(kept, dtype=torch.int64)


@impl("non_maximum_suppression")
def non_maximum_suppression(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    max_boxes: int,
    score_threshold: float | None = None,
    per_class_suppression: bool = False,
) -> tuple[Tensor, ...]:
    """The best boxes, without those that overlap a better one by more than `iou_threshold`.

    Boxes are [batch, n, 4] and scores [batch, n, classes], with a score threshold; without one (iOS 17) the
    last two axes are swapped. Gives boxes, scores (padded with 0), their places (padded with -1) and, with a
    score threshold, how many there are; where no score reaches it, the best box alone stays.
    """
    most, swapped = int(max_boxes), score_threshold is None
    if swapped:
        boxes, scores = boxes.transpose(1, 2), scores.transpose(1, 2)
    best: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for box, score in zip(boxes, scores, strict=True):
        at = _survivors(box, score, iou_threshold, score_threshold, most, per_class_suppression)
        gap = most - len(at)
        padded = [F.pad(v[at], [0, 0, 0, gap]) for v in (box, score)]
        best.append((padded[0], padded[1], F.pad(at, [0, gap], value=-1), torch.tensor(len(at))))
    kept, kept_scores, places, counts = (torch.stack(each) for each in zip(*best, strict=True))
    if swapped:
        return kept.transpose(1, 2), kept_scores.transpose(1, 2), places
    return kept, kept_scores, places, counts
