"""Edit compressed weights without decoding them: the result decodes bit for bit to the edited weight.

`edit_weight(mb, weight, edit, name)` is what passes call; an `Edit` transposes, cuts, pads or merges axes.
Indices, quantized numbers and masks are edited as the weight is; scales, offsets and tables as the blocks of
elements that they belong to. Padding must decode to its fill: a palette may need an entry for that. What a form
cannot hold is refused, unless the caller allows it to be decoded or encoded again (`stored_like`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from anesurgery.errors import Refused
from anesurgery.files import sub_byte
from anesurgery.interpret.ops.constexpr import decompress
from anesurgery.mil import Array, Maker, Operation, Var, is_compressed, is_stored, operands, types
from anesurgery.regions.weight_edits import Edit
from anesurgery.semantics.bounds import facts_of_array

PALETTE_BITS = (1, 2, 3, 4, 6, 8)
"""The index widths of palettes, in bits."""
PACKED_BITS = (1, 2, 4, 6, 8)
"""The same in the packed form of iOS 16."""


@dataclass(frozen=True, eq=False)
class Form:
    """A decoding op that is still to be built: its inputs are arrays, or results of other such ops."""

    op_type: str
    inputs: Mapping[str, Any]

    @property
    def arrays(self) -> dict[tuple[str, str], Any]:
        """(op type, input) -> array or number, for this op and the ops that it reads."""
        arrays: dict[tuple[str, str], Any] = {}
        for name, value in self.inputs.items():
            arrays |= value.form.arrays if isinstance(value, Result) else {(self.op_type, name): value}
        return arrays

    def of(self, change: Callable[[Array], Array]) -> Form:
        """Return the same ops with changed arrays; an op whose results several inputs read stays one op."""
        changed_forms: dict[Form, Form] = {}

        def changed_form(form: Form) -> Form:
            if form not in changed_forms:
                inputs = {name: changed_input(value) for name, value in form.inputs.items()}
                changed_forms[form] = Form(form.op_type, inputs)
            return changed_forms[form]

        def changed_input(value: Any) -> Any:
            if isinstance(value, Result):
                return Result(changed_form(value.form), value.number)
            return change(value) if isinstance(value, np.ndarray) else value

        return changed_form(self)


@dataclass(frozen=True, eq=False)
class Result:
    """One result of a decoding op."""

    form: Form
    number: int = 0
    """Which of its results: ops with a mask give the mask as 0, and the numbers as 1."""


Part = Array | Result
"""An edited input: an array, or the result of an op that decodes it."""
LEAST_SHARED = 1 << 20
"""Bytes from which the results of edits are shared. A choice: smaller ones are computed quickly."""


def decoded(var: Var) -> Array:
    """Return the numbers of a stored weight, compressed or not."""
    numbers: dict[Var, Array] = {}
    for op in _decoding_ops(var):
        numbers |= zip(op.outputs, decompress(op, numbers), strict=True)
    return np.asarray(numbers.get(var, var.val))


def _decoding_ops(var: Var) -> list[Operation]:
    """Return the ops that decode a weight, in an order in which they run."""
    if not is_compressed(var):
        return []
    assert var.op is not None
    before = [op for _, v in operands(var.op) for op in _decoding_ops(v)]
    return list(dict.fromkeys([*before, var.op]))


def edited(var: Var, edit: Edit, fill: float = 0.0) -> Part:
    """Return a stored weight after an edit, in the form in which it is stored.

    Raises:
        Refused: that form cannot hold it; the message says why.
    """
    if not is_stored(var):
        raise Refused(f"%{var.name} is not stored")
    if not is_compressed(var):
        return edit.apply(np.asarray(var.val), fill)
    assert var.op is not None
    if var.op.op_type not in FORMS:
        raise Refused(f"%{var.name} is stored as {var.op.op_type}, which no edit is known for")
    form = FORMS[var.op.op_type](var.op, edit, fill)
    return Result(form, var.op.outputs.index(var))


def edit_weight(mb: Maker, weight: Var, edit: Edit, name: str) -> Var:
    """Build a stored weight after an edit, once for all who ask; a compressed one keeps its form.

    Raises:
        Refused: its compressed form cannot hold it; the rewrite is then refused.
    """
    key = ("edited", weight, edit.key)
    if not is_compressed(weight):
        return mb.shared(key, lambda: _shared_edit(edit, np.asarray(weight.val)), name)
    try:
        new_weight: Var = mb.shared_value(key, [weight], lambda maker: build(maker, edited(weight, edit), name))
    except Refused as reason:
        new_weight = mb.stored_like(weight, lambda: edit.apply(decoded(weight)), key, name, edit, str(reason))
    return new_weight


def _shared_edit(edit: Edit, array: Array) -> Array:
    """Return an array after an edit; large results are shared with other copies of the program."""
    if array.nbytes < LEAST_SHARED:
        return edit.apply(array)
    results: Any = facts_of_array(array).setdefault("edits", WeakValueDictionary())
    result: Array | None = results.get(edit.key)
    if result is None:
        result = results[edit.key] = edit.apply(array)
    return result


def build(mb: Maker, part: Part, name: str) -> Var:
    """Build the ops that decode an edited weight."""
    by_form: dict[Form, tuple[Var, ...]] = {}

    def build_part(part: Any, name: str) -> Any:
        if not isinstance(part, Result):
            return part
        if part.form not in by_form:
            inputs = {k: build_part(v, f"{name}_{k}") for k, v in part.form.inputs.items()}
            var = getattr(mb, part.form.op_type)(**inputs, name=name)
            by_form[part.form] = tuple(var) if isinstance(var, (tuple, list)) else (var,)
        return by_form[part.form][part.number]

    if not isinstance(part, Result):
        return mb.const(val=part, name=name)
    return build_part(part, name)


def _cast(op: Operation, edit: Edit, fill: float) -> Form:
    parts = {"source_val": edited(op.source_val, edit, fill), "output_dtype": op.output_dtype.val}
    return Form(op.op_type, parts)


def _affine(op: Operation, edit: Edit, fill: float) -> Form:
    """Edit the iOS 16 form: one scale and zero point for all, or one for each index along an axis.

    If rows 3 and 1 of a weight (4, 6) with a scale for each row are taken and transposed, the result (6, 2) has
    the old scales 3 and 1, along axis 1. Padding gets scale 0.
    """
    scale, zero = np.asarray(op.scale.val), np.asarray(op.zero_point.val)
    axis = int(op.axis.val) % len(edit.shape)
    new_axis = next(i for i, new in enumerate(edit.axes) if axis in new.sources)
    counts = [n if i == axis else 1 for i, n in enumerate(edit.shape)]
    numbers = np.append(edit.numbers(edit.axes[new_axis], counts), 0)  # the last one is for padding
    chosen = numbers[edit.axes[new_axis].index]
    scale, zero = (v[chosen] if v.ndim else v for v in (scale, zero))
    data = edit.apply(np.asarray(op.quantized_data.val))
    if edit.pads:
        _require_zero_fill(fill, op)
        _require_positive(scale, op)
        broadcast = [-1 if i == new_axis else 1 for i in range(data.ndim)]
        zeros = np.broadcast_to(zero.reshape(broadcast) if zero.ndim else zero, data.shape)
        data[edit.padding()] = zeros[edit.padding()]
    return Form(
        op.op_type, {"quantized_data": data, "zero_point": zero, "scale": scale, "axis": np.int32(new_axis)}
    )


def _require_zero_fill(fill: float, op: Operation) -> None:
    """Refuse a fill other than 0."""
    if fill != 0:
        raise Refused(f"%{op.outputs[0].name} is padded with {fill:g}, which {op.op_type} may not hold")


def _require_positive(scale: Array, op: Operation) -> None:
    """Refuse negative scales, which would decode padding to -0.0."""
    if bool((scale < 0).any()):
        raise Refused(f"%{op.outputs[0].name} has a negative scale, which makes -0.0 of padding")


def _scales(op: Operation, edit: Edit) -> dict[str, Part]:
    """Edit the scales and offsets of blocks."""
    blocks = edit.of_blocks(op.scale.shape)
    offset = op.inputs.get("offset")
    parts: dict[str, Part] = {"scale": edited(op.scale, blocks)}
    return parts if offset is None else {**parts, "offset": edited(offset, blocks)}


def _blockwise(op: Operation, edit: Edit, fill: float) -> Form:
    parts = _scales(op, edit)
    if not edit.pads:
        return Form(op.op_type, {"data": edited(op.data, edit), **parts})
    _require_zero_fill(fill, op)
    _require_positive(decoded(op.scale), op)
    if "offset" not in parts:
        return Form(op.op_type, {"data": edited(op.data, edit), **parts})
    offset = parts["offset"]
    if not isinstance(offset, np.ndarray):
        raise Refused(f"the offsets of %{op.outputs[0].name} are compressed: no number is known to decode to 0")
    kind = np.asarray(op.data.val).dtype if not is_compressed(op.data) else None
    zero_codes = edit.spread(offset)[edit.padding()]
    if kind is None:
        if len(set(zero_codes.tolist())) != 1:
            raise Refused(f"the blocks of %{op.outputs[0].name} have offsets of their own over a palette")
        return Form(op.op_type, {"data": edited(op.data, edit, float(zero_codes[0])), **parts})
    if not np.array_equal(zero_codes.astype(kind), zero_codes):
        raise Refused(f"the offsets of %{op.outputs[0].name} are no whole numbers: nothing decodes to 0")
    data = edit.apply(np.asarray(op.data.val))
    data[edit.padding()] = zero_codes.astype(kind)
    return Form(op.op_type, {"data": data, **parts})


def _sparse(op: Operation, edit: Edit, fill: float) -> Form:
    """Edit numbers where a mask is set, zero elsewhere; the iOS 16 form has a shape and a packed mask."""
    if op.inputs.get("shape") is None:
        return Form(op.op_type, _masked(op, "mask", "nonzero_data", edit, fill))
    if edit.pads:
        _require_zero_fill(fill, op)
    old = unpacked(op.mask.val, 1, edit.shape)
    mask = edit.apply(old)
    data = _nonzero(np.asarray(op.nonzero_data.val), old, edit, mask)
    shape = np.array(edit.result, np.uint32)
    return Form(op.op_type, {"nonzero_data": data, "mask": sub_byte.pack(mask, 1), "shape": shape})


def _nonzero(data: Array, old: Array, edit: Edit, mask: Array) -> Array:
    """Return the numbers of a sparse weight in their new order.

    For the mask 0 1 1 0 and the numbers 7 8, `places` is 0 0 1 0; reversed, both give the numbers 8 7.
    """
    places = np.zeros(old.shape, np.int64)
    places[old != 0] = np.arange(data.size)
    return data[edit.apply(places)[mask != 0]].view(data.dtype)


def _sparse_blockwise(op: Operation, edit: Edit, fill: float) -> Form:
    """Edit quantized numbers where a mask is set."""
    return Form(op.op_type, {**_masked(op, "data_mask", "nonzero_data", edit, fill), **_scales(op, edit)})


def _masked(op: Operation, mask_name: str, data_name: str, edit: Edit, fill: float) -> dict[str, Part]:
    """Edit the mask and the numbers of a sparse form; a compressed mask is a result of the numbers' op too."""
    if edit.pads:
        _require_zero_fill(fill, op)
    mask, data = op.inputs[mask_name], op.inputs[data_name]
    if is_compressed(data):
        numbers = edited(data, edit)
        assert isinstance(numbers, Result)
        new_mask = Result(numbers.form, 0) if is_compressed(mask) else edited(mask, edit)
        return {mask_name: new_mask, data_name: numbers}
    old = np.asarray(mask.val)
    new = edit.apply(old)
    return {mask_name: new, data_name: _nonzero(np.asarray(data.val), old, edit, new)}


def _sparse_palette(op: Operation, edit: Edit, fill: float) -> Form:
    """Edit indices of a palette where a mask is set."""
    inner, vector = _vectors(op, edit)
    parts = _masked(op, "indices_mask", "indices_nonzero_data", inner, fill)
    blocks = inner.of_blocks(op.lut.shape[:-2]).followed_by(op.lut.shape[-2:])
    return Form(op.op_type, {**parts, "lut": edited(op.lut, blocks), **vector})


def _vectors(op: Operation, edit: Edit) -> tuple[Edit, dict[str, Any]]:
    """Return the edit of a palette's indices (entries may be vectors), and the vector axis as an input."""
    width = int(op.lut.shape[-1])
    vector_axis: Any = op.inputs.get("vector_axis")
    if width == 1:
        return edit, {} if vector_axis is None else {"vector_axis": np.int32(0)}
    regrouped = edit.of_vectors(int(vector_axis.val) % len(edit.shape), width)
    if regrouped is None:
        raise Refused(f"the edit cuts vectors of {width} numbers of the palette of %{op.outputs[0].name}")
    return regrouped[0], {"vector_axis": np.int32(regrouped[1])}


def _palette(op: Operation, edit: Edit, fill: float) -> Form:
    """Edit indices into tables, one table for each block."""
    if op.inputs.get("shape") is not None:
        return _packed_palette(op, edit, fill)
    inner, vector = _vectors(op, edit)
    blocks = inner.of_blocks(op.lut.shape[:-2])
    parts = {"indices": inner.apply(np.asarray(op.indices.val))}
    tail = op.lut.shape[-2:]
    lut = edited(op.lut, blocks.followed_by(tail))
    if inner.pads:
        tables = decoded(op.lut) if is_compressed(op.lut) else np.asarray(op.lut.val)
        palette = _Palette(parts["indices"], blocks.followed_by(tail).apply(tables), inner, fill)
        return Form(op.op_type, {**_padded(op, palette, lut), **vector})
    return Form(op.op_type, {**parts, "lut": lut, **vector})


def _padded(op: Operation, palette: _Palette, lut: Part) -> dict[str, Part]:
    """Return indices and tables whose padding decodes to the fill, in the fewest bytes.

    Tried in turn: an entry that holds the fill, an entry that no index uses, and then the smaller of wider
    indices and tables of its own for the padding.
    """
    if (with_fill := palette.with_entry()) is not None:
        return {"indices": with_fill.indices, "lut": lut}
    is_plain = isinstance(lut, np.ndarray)
    if is_plain and (with_fill := palette.with_free_entry()) is not None:
        return {"indices": with_fill.indices, "lut": with_fill.tables}
    apart = palette.edit.of_blocks(op.lut.shape[:-2], apart=True).followed_by(op.lut.shape[-2:])
    more_tables = edited(op.lut, apart, palette.fill)
    wider = palette.wider(PALETTE_BITS) if is_plain else None
    if (
        wider is not None
        and isinstance(more_tables, np.ndarray)
        and wider.bytes <= replace(palette, tables=more_tables).bytes
    ):
        return {"indices": wider.indices, "lut": wider.tables}
    # padding has index 0, of tables whose entries all hold the fill
    return {"indices": palette.indices, "lut": more_tables}


def _packed_palette(op: Operation, edit: Edit, fill: float) -> Form:
    """Edit the iOS 16 form: one table for all, and packed indices."""
    table = np.asarray(op.lut.val)
    bits = int(table.size).bit_length() - 1
    indices = edit.apply(unpacked(op.indices.val, bits, edit.shape))
    if edit.pads:
        palette = _Palette(indices, table.reshape(*[1] * len(edit.result), -1, 1), edit, fill)
        packed = palette.with_entry() or palette.with_free_entry() or palette.wider(PACKED_BITS)
        if packed is None:
            raise Refused(
                f"the palette of %{op.outputs[0].name} has {table.size} entries, and none is {fill:g}"
            )
        indices, table = packed.indices, packed.tables.ravel()
        bits = int(table.size).bit_length() - 1
    shape = np.array(edit.result, np.uint32)
    return Form(op.op_type, {"indices": sub_byte.pack(indices, bits), "lut": table, "shape": shape})


def unpacked(packed: Any, bits: int, shape: tuple[int, ...]) -> Array:
    """Return numbers of a few bits, in a byte each, that were packed in the form of iOS 16."""
    return np.asarray(sub_byte.unpack(np.asarray(packed), bits, False, shape)).astype(np.uint8)


@dataclass(frozen=True, eq=False)
class _Palette:
    """Edited indices and tables whose padding must still decode to the fill."""

    indices: Array
    tables: Array
    """[blocks along each axis ..., entries, numbers of an entry]."""
    edit: Edit
    """The edit of the indices."""
    fill: float

    @property
    def groups(self) -> Array:
        """The number of its table for each index."""
        blocks = self.tables.shape[:-2]
        return self.edit.spread(np.arange(int(np.prod(blocks))).reshape(blocks))

    @property
    def bits(self) -> int:
        """The number of bits of an index."""
        return int(self.tables.shape[-2]).bit_length() - 1

    @property
    def bytes(self) -> int:
        """The number of bytes of indices and tables."""
        return self.indices.size * self.bits // 8 + self.tables.nbytes

    def with_entry(self) -> _Palette | None:
        """Use an entry of each table that holds the fill already; None where a table has none."""
        same = (self.tables == self.fill) & (np.signbit(self.tables) == np.signbit(self.fill))
        return self._with(same.all(axis=-1), self.tables)

    def with_free_entry(self) -> _Palette | None:
        """Put the fill into an entry of each table that no index uses; None where all are used."""
        entries = self.tables.shape[-2]
        kept = ~self.edit.padding()
        count = int(np.prod(self.tables.shape[:-2]))
        named = self.groups[kept] * entries + self.indices[kept].astype(np.int64)
        free = np.bincount(named, minlength=count * entries)[: count * entries] == 0
        first = np.zeros_like(free.reshape(count, entries))
        rows = np.arange(count)
        first[rows, free.reshape(count, entries).argmax(axis=1)] = free.reshape(count, entries).any(axis=1)
        chosen = first.reshape(self.tables.shape[:-1])
        tables = np.where(chosen[..., None], np.asarray(self.fill, self.tables.dtype), self.tables)
        return self._with(chosen, tables.view(self.tables.dtype))

    def wider(self, allowed: tuple[int, ...]) -> _Palette | None:
        """Add entries to the tables, with wider indices; None where no wider index is allowed."""
        bits = next((b for b in allowed if b > self.bits), None)
        if bits is None:
            return None
        entries = self.tables.shape[-2]
        more = [(0, 0)] * self.tables.ndim
        more[-2] = (0, 2**bits - entries)
        tables = np.pad(self.tables, more, constant_values=self.fill).view(self.tables.dtype)
        kind = types.nptype_from_builtin(types.string_to_builtin(f"uint{bits}"))
        indices = self.indices.astype(np.uint8)
        indices[self.edit.padding()] = entries
        return replace(self, indices=indices.view(kind), tables=tables)

    def _with(self, usable: Array, tables: Array) -> _Palette | None:
        """Set padding to the first usable entry of each table; None where a table that is needed has none."""
        needed = np.unique(self.groups[self.edit.padding()])
        flat = usable.reshape(-1, usable.shape[-1])
        if not flat[needed].any(axis=1).all():
            return None
        indices = np.array(self.indices)
        pads = self.edit.padding()
        indices[pads] = flat.argmax(axis=1)[self.groups[pads]]
        return replace(self, indices=indices.view(self.indices.dtype), tables=tables)


FORMS: dict[str, Callable[[Operation, Edit, float], Form]] = {
    "constexpr_affine_dequantize": _affine,
    "constexpr_blockwise_shift_scale": _blockwise,
    "constexpr_cast": _cast,
    "constexpr_lut_to_dense": _palette,
    "constexpr_lut_to_sparse": _sparse_palette,
    "constexpr_sparse_blockwise_shift_scale": _sparse_blockwise,
    "constexpr_sparse_to_dense": _sparse,
}
"""Op type -> the function that returns the same form of the edited weight."""
