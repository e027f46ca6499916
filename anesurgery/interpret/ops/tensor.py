"""Ops that move, select or make elements: shapes, slices, joins, decisions, fills, lists, random numbers.

Random numbers have the documented distributions, and are not the numbers that Core ML draws: the same for the
same seed, and others at each call without one (seed -1). Without a seed they come from torch's global
generator, so `torch.manual_seed` makes a run repeatable. Calls that compare runs give such ops a seed each
(`doors.REPEATABLE`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.errors import InterpretError
from anesurgery.interpret.table import Unsupported, checked_shape, enter_all, impl, ints, wrapped

Tensor = torch.Tensor


@impl("reshape")
def reshape(x: Tensor, shape: Any) -> Tensor:
    """Return x in another shape: -1 is the rest; 0 keeps the length of x there, counted from the right.

    With shape [0, -1], x of (2, 3, 4) becomes (3, 8): the 0 stands over its 3.
    """
    wanted = ints(shape)
    lengths = [1] * (len(wanted) - x.ndim) + list(x.shape[-len(wanted) :])
    resolved = [n if d == 0 else d for n, d in zip(lengths, wanted, strict=False)]
    if x.numel():
        return x.reshape(resolved)
    if -1 not in resolved and 0 not in resolved:
        return x.reshape(wanted)  # computed lengths of a tensor without elements
    return x.reshape([0 if d == -1 else d for d in resolved])


@impl("reshape_like")
def reshape_like(x: Tensor, ref_tensors: list[Tensor], begins: Any, ends: Any, end_masks: Any) -> Tensor:
    """Return x in the shape put together from parts of other tensors' shapes."""
    shape: list[int] = []
    for ref, begin, end, to_end in zip(ref_tensors, ints(begins), ints(ends), end_masks, strict=True):
        shape += ref.shape[begin:] if to_end else ref.shape[begin:end]
    return x.reshape(shape)


@impl("expand_dims")
def expand_dims(x: Tensor, axes: Any) -> Tensor:
    """Return x with new axes of length 1, numbered in the result."""
    new_axes = ints(axes)
    for axis in sorted(a % (x.ndim + len(new_axes)) for a in new_axes):
        x = x.unsqueeze(axis)
    return x


@impl("squeeze")
def squeeze(x: Tensor, axes: Any = None) -> Tensor:
    """Return x without some axes of length 1 (all of them by default)."""
    return x.squeeze() if axes is None else x.squeeze(tuple(ints(axes)))


@impl("transpose")
def transpose(x: Tensor, perm: Any) -> Tensor:
    """Return x with its axes in another order."""
    return x.permute(ints(perm))


@impl("flatten2d")
def flatten2d(x: Tensor, axis: int = 1) -> Tensor:
    """Return x with two axes: those before `axis`, and the rest."""
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@impl("concat")
def concat(values: list[Tensor], axis: int = 0, interleave: bool = False) -> Tensor:
    """Join tensors along an axis, one after the other or element by element; scalars count as one element."""
    values = [v.reshape(1) if v.ndim == 0 else v for v in values]
    if not interleave:
        return torch.cat(list(values), dim=int(axis))
    axis = int(axis) % values[0].ndim
    shape = list(values[0].shape)
    shape[axis] *= len(values)
    return torch.stack(list(values), dim=axis + 1).reshape(shape)


@impl("split")
def split(x: Tensor, axis: int, num_splits: int | None = None, split_sizes: Any = None) -> Any:
    """Split x along an axis, into parts of equal or of given lengths."""
    if split_sizes is not None:
        sizes = ints(split_sizes)
    else:
        count = int(num_splits or 1)
        sizes = [x.shape[axis] // count] * count
    parts = torch.split(x, sizes, dim=int(axis))
    return parts if len(parts) > 1 else parts[0]


@impl("tile")
def tile(x: Tensor, reps: Any) -> Tensor:
    """Repeat x along its axes, each at least once; an axis of up to one element may become empty.

    A selection that keeps nothing (`x[mask] = 0`) asks for no copy. Core ML then gives what PyTorch gives, from
    macOS 13 on: coremltools 9.0, test_torch_ops.py, test_index_put_dynamic_bool_index.

    Raises:
        InterpretError: another count is below 1; nothing says what Core ML does then.
    """
    times = ints(reps)
    if any(n < (0 if d <= 1 else 1) for d, n in zip(x.shape, times, strict=True)):
        raise InterpretError(
            f"reps is {times} for the shape {list(x.shape)}, and each must be 1 or more: "
            "nothing says what Core ML makes of less. A model of coremltools before 9 gets it from an expand "
            "with -1: convert it again"
        )
    checked_shape([d * n for d, n in zip(x.shape, times, strict=True)])
    return x.repeat(times)


@impl("pad")
def pad(x: Tensor, pad: Any, mode: str = "constant", constant_val: float = 0.0) -> Tensor:
    """Return x with more elements at the ends of its last axes: a value, a mirror, or the edge repeated.

    A mirror wider than the axis is mirrored again, as numpy does.
    """
    amounts = ints(pad)
    pairs = list(zip(amounts[::2], amounts[1::2], strict=True))
    if mode == "constant":
        last_axis_first = [n for pair in reversed(pairs) for n in pair]  # as torch counts them
        return F.pad(x, last_axis_first, value=float(constant_val))
    if mode not in ("reflect", "replicate"):
        raise Unsupported(f"pad mode {mode!r} is not known")
    for axis, (begin, end) in enumerate(pairs, start=x.ndim - len(pairs)):
        if begin or end:
            last = x.shape[axis] - 1
            index = torch.arange(-begin, last + 1 + end)
            # four elements are mirrored as 0 1 2 3 2 1, again and again
            there_and_back = index % max(2 * last, 1)
            mirrored = torch.minimum(there_and_back, 2 * last - there_and_back).clamp(min=0)
            x = x.index_select(axis, index.clamp(0, last) if mode == "replicate" else mirrored)
    return x


def _mask(mask: Any, rank: int) -> list[bool]:
    """Return a mask as booleans; all False where there is none."""
    return [bool(m) for m in mask] if mask is not None else [False] * rank


def _index_from_front(index: int, size: int, axis: int) -> int:
    """Return an index counted from the front; raise `InterpretError` if it is outside of the axis."""
    if not -size <= index < size:
        raise InterpretError(f"index {index} on axis {axis} of {size}; it may be {-size} to {size - 1}")
    return index % size


@impl("slice_by_index")
def slice_by_index(
    x: Tensor,
    begin: Any,
    end: Any,
    stride: Any = None,
    begin_mask: Any = None,
    end_mask: Any = None,
    squeeze_mask: Any = None,
) -> Tensor:
    """Slice each axis as Python does; a masked begin or end is the axis's own, a squeezed axis is dropped.

    Raises:
        InterpretError: the index of a squeezed axis is outside of it; a slice is cut, as in Python.
    """
    return _resolve(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask).take_from(x)


def block(x: Tensor, begin: Any, end: Any, *stride_and_masks: Any) -> Tensor:
    """Compute `slice_by_index`, quickly where it has neither strides nor masks, and no index is negative."""
    ranges = list(zip(x.shape, ints(begin), ints(end), strict=False))
    is_plain = all(option is None for option in stride_and_masks)
    if not is_plain or any(not 0 <= first <= stop <= length for length, first, stop in ranges):
        return slice_by_index(x, begin, end, *stride_and_masks)
    for axis, (length, first, stop) in enumerate(ranges):
        if stop - first < length:
            x = x.narrow(axis, first, stop - first)
    return x


class _Slices(NamedTuple):
    """What `slice_by_index` takes from a tensor of one shape."""

    forward: list[slice]
    """One for each axis."""
    backward: dict[int, list[int]]
    """Axis -> its indices, for the axes that are read backwards."""
    dropped: list[int]
    """The axes that the result does not have."""

    def take_from(self, x: Tensor) -> Tensor:
        """Return the part of x: a view, or a copy where an axis is read backwards."""
        x = x[tuple(self.forward)]
        for axis, indices in self.backward.items():
            x = x.index_select(axis, torch.tensor(indices, dtype=torch.int64, device=x.device))
        return x.squeeze(tuple(self.dropped)) if self.dropped else x


def sliced_at(where: Mapping[str, Any]) -> Callable[..., Tensor]:
    """Return `slice_by_index` with all parameters but `x` constant; they are resolved once for each shape."""
    resolved: dict[torch.Size, _Slices] = {}

    def sliced(x: Tensor, **_: Any) -> Tensor:
        if x.shape not in resolved:
            resolved[x.shape] = _resolve(x.shape, *(where.get(name) for name in SLICE))
        return resolved[x.shape].take_from(x)

    # `steps` asks which op a function computes
    sliced.stands_for = slice_by_index  # type: ignore[attr-defined]
    return sliced


def sliced_by(shape: Sequence[int], *where: Any) -> Callable[[Tensor], Tensor]:
    """Return `slice_by_index` for tensors of one shape; `where` are its constant parameters after x."""
    slices = _resolve(shape, *where)
    ranges = [range(length)[part] for part, length in zip(slices.forward, shape, strict=True)]
    shorter = [axis for axis, length in enumerate(shape) if ranges[axis] != range(length)]
    if slices.backward or slices.dropped or len(shorter) != 1 or ranges[shorter[0]].step != 1:
        return slices.take_from
    (axis,) = shorter
    start, length = ranges[axis].start, len(ranges[axis])
    return lambda x: x.narrow(axis, start, length)


def _resolve(
    shape: Sequence[int], begin: Any, end: Any, stride: Any, begin_mask: Any, end_mask: Any, squeeze_mask: Any
) -> _Slices:
    """Resolve the parameters of `slice_by_index` for a shape."""
    rank = len(shape)
    begins, ends, strides = ints(begin), ints(end), ints(stride) if stride is not None else [1] * rank
    from_start, to_end, drops = (_mask(m, rank) for m in (begin_mask, end_mask, squeeze_mask))
    forward, backward = [slice(None)] * rank, dict[int, list[int]]()
    for axis, length in enumerate(shape):
        first = None if from_start[axis] else begins[axis]
        if drops[axis]:
            index = 0 if first is None else _index_from_front(first, length, axis)
            forward[axis] = slice(index, index + 1)
            continue
        stride = strides[axis]
        indices = range(length)[first : None if to_end[axis] else ends[axis] : stride]
        if stride > 0:
            forward[axis] = slice(indices.start, max(indices.stop, indices.start), stride)
        else:
            backward[axis] = list(indices)
    return _Slices(forward, backward, [axis for axis in range(rank) if drops[axis]])


@impl("slice_by_size")
def slice_by_size(x: Tensor, begin: Any, size: Any) -> Tensor:
    """Return the block that starts at `begin`; size -1 reaches to the end."""
    for axis, (first, count) in enumerate(zip(ints(begin), ints(size), strict=True)):
        first = first % x.shape[axis] if first < 0 else first
        x = x.narrow(axis, first, x.shape[axis] - first if count == -1 else count)
    return x


SLICE = ("begin", "end", "stride", "begin_mask", "end_mask", "squeeze_mask")
"""The parameters that say where a slice is."""


@impl("slice_update")
def slice_update(
    x: Tensor,
    update: Tensor,
    begin: Any,
    end: Any,
    stride: Any = None,
    begin_mask: Any = None,
    end_mask: Any = None,
    squeeze_mask: Any = None,
) -> Tensor:
    """Return x with a slice replaced."""
    where = (begin, end, stride, begin_mask, end_mask, squeeze_mask)
    if stride is None or min(ints(stride)) > 0:
        return overwrite(x.clone(), update, *where)
    # a slice that is read backwards is a copy, so elements are replaced by their numbers in x
    flat_indices = slice_by_index(torch.arange(x.numel()).reshape(x.shape), *where)
    updated = x.clone().reshape(-1)
    updated[flat_indices.reshape(-1)] = update.to(x.dtype).expand(flat_indices.shape).reshape(-1)
    return updated.reshape(x.shape)


def overwrite(x: Tensor, update: Tensor, *where: Any) -> Tensor:
    """Replace a slice of x in its memory; `where` is that of `slice_by_index`, with positive strides."""
    slice_by_index(x, *where).copy_(update)
    return x


@impl("band_part")
def band_part(x: Tensor, lower: int = -1, upper: int = -1) -> Tensor:
    """Keep the diagonals from `lower` below to `upper` above the main one (-1: all); the rest is zero."""
    y = x if int(upper) < 0 else torch.tril(x, int(upper))
    return y if int(lower) < 0 else torch.triu(y, -int(lower))


@impl("range_1d")
def range_1d(start: Any, end: Any, step: Any) -> Tensor:
    """Return start, start + step, ... before end; the length is counted in the arithmetic of the inputs."""
    start, end, step = (torch.as_tensor(v) for v in (start, end, step))
    if any(v.is_floating_point() for v in (start, end, step)):
        count = max(math.ceil((end.float() - start.float()) / step), 0)
        checked_shape([count], 8)
        return (torch.arange(count, dtype=torch.float64) * step.double() + start.double()).float()
    count = max(math.ceil((end.double() - start.double()) / step), 0)
    checked_shape([count], 4)
    return torch.arange(count, dtype=torch.int32) * step + start


@impl("one_hot")
def one_hot(
    indices: Tensor, one_hot_vector_size: Any, axis: int = -1, on_value: Any = 1, off_value: Any = 0
) -> Tensor:
    """Return a new axis with `on_value` at the index and `off_value` elsewhere, as for an index outside."""
    size = ints(one_hot_vector_size)[0]
    checked_shape([*indices.shape, size])
    is_on = indices.unsqueeze(-1) == torch.arange(size)
    encoded = torch.where(is_on, torch.as_tensor(on_value), torch.as_tensor(off_value))
    return encoded.movedim(-1, int(axis))


@impl("topk")
def topk(
    x: Tensor,
    k: Any = 1,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,
    return_indices: bool = True,
    output_indices_dtype: str = "",
) -> Any:
    """Return the k largest (or smallest; -1: all) elements and their indices, the first of equals first."""
    axis, (count,) = int(axis), ints(k)
    count = x.shape[axis] if count < 0 else count
    ordered = torch.sort(x, dim=axis, descending=not ascending, stable=True)
    values, indices = (v.narrow(axis, 0, count) for v in ordered)
    return (values, wrapped(indices, output_indices_dtype or "int32")) if return_indices else values


@impl("argsort")
def argsort(x: Tensor, axis: int = -1, ascending: bool = False) -> Tensor:
    """Return the order that sorts an axis, the first of equals first."""
    return torch.argsort(x, dim=int(axis), descending=not ascending, stable=True)


@impl("sliding_windows")
def sliding_windows(x: Tensor, axis: int, size: int, stride: int = 1) -> Tensor:
    """Return all windows of an axis, on a new axis after it: [..., n, ...] -> [..., windows, size, ...]."""
    axis = int(axis) % x.ndim
    return x.unfold(axis, int(size), int(stride)).movedim(-1, axis + 1)


@impl("reverse_sequence")
def reverse_sequence(x: Tensor, lengths: Any, seq_axis: int = 0, batch_axis: int = 0) -> Tensor:
    """Return x with the first `lengths[i]` elements of `seq_axis` reversed, for each i of `batch_axis`."""
    seq, batch = int(seq_axis) % x.ndim, int(batch_axis) % x.ndim
    length = torch.as_tensor(lengths).long().reshape([-1 if a == batch else 1 for a in range(x.ndim)])
    index = torch.arange(x.shape[seq]).reshape([-1 if a == seq else 1 for a in range(x.ndim)])
    source = torch.where(index < length, length - 1 - index, index)
    return torch.gather(x, seq, source.expand(x.shape))


OTHERS: dict[str, Callable[..., Any]] = {
    "stack": lambda values, axis=0: torch.stack(list(values), dim=int(axis)),
    "reverse": lambda x, axes=None: x.flip(list(range(x.ndim)) if axes is None else ints(axes)),
    "fill": lambda shape, value=0.0: torch.full(checked_shape(shape), torch.as_tensor(value).item()),
    "fill_like": lambda ref_tensor, value=0.0: torch.full(ref_tensor.shape, torch.as_tensor(value).item()),
    "shape": lambda x: torch.tensor(x.shape, dtype=torch.int32),
    "non_zero": lambda x: torch.nonzero(x),
}
"""Op type -> function of its parameters."""
enter_all(OTHERS)


def _generator(seed: int) -> torch.Generator | None:
    """Return a generator with a seed; None for -1, which stands for torch's global one."""
    return None if int(seed) == -1 else torch.Generator().manual_seed(int(seed))


RANDOM: dict[str, Callable[..., Tensor]] = {
    "random_uniform": lambda shape, low=0.0, high=1.0, seed=-1: torch.empty(ints(shape)).uniform_(
        float(low), float(high), generator=_generator(seed)
    ),
    "random_normal": lambda shape, mean=0.0, stddev=1.0, seed=-1: torch.empty(ints(shape)).normal_(
        float(mean), float(stddev), generator=_generator(seed)
    ),
    "random_bernoulli": lambda shape, prob=0.5, seed=-1: torch.empty(ints(shape)).bernoulli_(
        float(prob), generator=_generator(seed)
    ),
}
"""Op type -> draws numbers: from [low, high), from a normal distribution, 1 with a probability and else 0."""
enter_all(RANDOM)


@impl("random_categorical")
def random_categorical(x: Tensor, mode: str = "logits", size: int = 1, seed: int = -1) -> Tensor:
    """Draw indices of the last axis of x, with replacement: [..., n] -> [..., size]."""
    weights = torch.softmax(x, -1) if mode == "logits" else x
    flat = weights.reshape(-1, x.shape[-1])
    drawn = torch.multinomial(flat, int(size), replacement=True, generator=_generator(seed))
    return drawn.reshape(*x.shape[:-1], int(size))


@impl("classify")
def classify(probabilities: Tensor, classes: Any) -> tuple[Any, dict[Any, float]]:
    """Return the most probable class, and the probability of each."""
    names = [n.item() if hasattr(n, "item") else n for n in getattr(classes, "ls", classes)]  # `ls`: a MIL list
    flat = probabilities.reshape(-1)
    return names[int(flat.argmax())], dict(zip(names, flat.tolist(), strict=True))


BLOCK = 256
"""How many boxes are compared with all others at once: a choice between calls and memory."""


def _overlap(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the intersection over union of boxes [m, 4] and others [n, 4] (center x and y, width, height)."""
    middle, size = boxes[:, None, :2], boxes[:, None, 2:]
    low = torch.maximum(middle - size / 2, others[:, :2] - others[:, 2:] / 2)
    high = torch.minimum(middle + size / 2, others[:, :2] + others[:, 2:] / 2)
    shared = (high - low).clamp(min=0).prod(-1)
    union = size.prod(-1) + others[:, 2:].prod(-1) - shared
    return torch.where(union > 0, shared / union, torch.zeros_like(union))


def _best_boxes(
    boxes: Tensor, scores: Tensor, iou: float, least: float | None, most: int, by_class: bool
) -> Tensor:
    """Return the indices of the boxes that remain, best first.

    Args:
        boxes: [n, 4].
        scores: [n, classes].
        iou: a box is suppressed if it overlaps a better one by more.
        least: the least score; if none reaches it, the best box remains.
        most: the most boxes.
        by_class: do only boxes of the same class suppress each other?
    """
    score, label = scores.max(-1)
    remaining = torch.argsort(score, descending=True, stable=True)
    if least is not None:
        remaining = remaining[score[remaining] >= least] if bool((score >= least).any()) else remaining[:1]

    def suppresses(some: Tensor, others: Tensor) -> Tensor:
        """Return a mask [some, others]: which of the first would suppress which of the second?"""
        overlaps = _overlap(boxes[some], boxes[others]) > iou
        return overlaps & (label[some, None] == label[others]) if by_class else overlaps

    best = remaining[:0]
    while len(remaining) and len(best) < most:
        block, remaining = remaining[:BLOCK], remaining[BLOCK:]
        stays = torch.ones(len(block), dtype=torch.bool)
        for k, suppressed in enumerate(suppresses(block, block)):
            if stays[k]:  # the boxes before k in the block are better ones
                stays[k + 1 :] &= ~suppressed[k + 1 :]
        best_of_block = block[stays]
        best = torch.cat([best, best_of_block])
        remaining = remaining[~suppresses(best_of_block, remaining).any(0)]
    return best[:most]


@impl("non_maximum_suppression")
def non_maximum_suppression(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    max_boxes: int,
    score_threshold: float | None = None,
    per_class_suppression: bool = False,
) -> tuple[Tensor, ...]:
    """Return the best boxes, without those that overlap a better one by more than `iou_threshold`.

    Boxes are [batch, n, 4] and scores [batch, n, classes], with a score threshold; without one (iOS 17) the
    last two axes are swapped. Returns boxes, scores (padded with 0), their indices (padded with -1) and, with a
    score threshold, how many there are; where no score reaches it, only the best box remains.
    """
    most, swapped = int(max_boxes), score_threshold is None
    if swapped:
        boxes, scores = boxes.transpose(1, 2), scores.transpose(1, 2)
    indices = [
        _best_boxes(box, score, iou_threshold, score_threshold, most, per_class_suppression)
        for box, score in zip(boxes, scores, strict=True)
    ]
    best, best_scores = (
        torch.stack([F.pad(v[i], [0, 0, 0, most - len(i)]) for v, i in zip(values, indices, strict=True)])
        for values in (boxes, scores)
    )
    padded_indices = torch.stack([F.pad(i, [0, most - len(i)], value=-1) for i in indices])
    if swapped:
        return best.transpose(1, 2), best_scores.transpose(1, 2), padded_indices
    return best, best_scores, padded_indices, torch.tensor([len(i) for i in indices])


@impl("make_list")
def make_list(
    init_length: Any = 1, dynamic_length: bool = True, elem_shape: Any = (), dtype: str = "fp32"
) -> list[Any]:
    """Return a list of zeros; elements of unknown shape stay None until they are written."""
    if any(isinstance(d, str) for d in elem_shape):  # a name stands for a dynamic length
        return [None] * ints(init_length)[0]
    torch_dtype = {"int32": torch.int32, "bool": torch.bool}.get(dtype, torch.float32)
    return [torch.zeros([ints(d)[0] for d in elem_shape], dtype=torch_dtype)] * ints(init_length)[0]


@impl("list_write")
def list_write(ls: list[Any], index: Any, value: torch.Tensor) -> list[Any]:
    """Return a list with one element replaced; it grows if the index is beyond its end.

    Raises:
        InterpretError: the index is before its beginning.
    """
    (i,) = ints(index)
    i = _index_from_front(i, len(ls), 0) if i < 0 else i
    longer = ls + [None] * (i + 1 - len(ls))
    return [*longer[:i], value, *longer[i + 1 :]]


@impl("list_scatter")
def list_scatter(ls: list[Any], indices: Any, value: torch.Tensor) -> list[Any]:
    """Return a list with some elements replaced by the rows of `value`."""
    for index, row in zip(ints(indices), value, strict=True):
        ls = list_write(ls, index, row)
    return ls


def _elements(ls: list[Any], indices: list[int]) -> list[torch.Tensor]:
    """Return elements; those never written are zeros of the shape of a written one."""
    written = next((v for v in ls if v is not None), None)
    if written is None:
        raise InterpretError("the list is read before anything was written to it")
    return [torch.zeros_like(written) if ls[i] is None else ls[i] for i in indices]


LISTS: dict[str, Callable[..., Any]] = {
    "list_read": lambda ls, index: _elements(ls, ints(index))[0],
    "list_gather": lambda ls, indices: torch.stack(_elements(ls, ints(indices))),
    "list_length": lambda ls: torch.tensor(len(ls), dtype=torch.int32),
}
"""Op type -> function of its parameters."""
enter_all(LISTS)
