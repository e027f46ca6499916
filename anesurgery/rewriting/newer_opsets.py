"""Raise a program to a newer opset, so that every op keeps its meaning.

Many ops have a newer form from some opset on. Most newer forms only take more types, or a new input whose
default is the old meaning. `DIFFERENCES` lists them all; a form that it does not list, as of a later
coremltools, is refused. These ops mean something else in the newer form. They are rewritten in the older opset
first, or refused:

==========================  ======  ==========================================================================
op                          since   what is done
==========================  ======  ==========================================================================
gather*, scatter*           iOS 17  a negative index no longer counts from the end: indices that may be negative
                                    become `select(i >= 0, i, i + length)`; constant ones are computed
clip                        iOS 17  `alpha` must be below `beta`: else `minimum(maximum(x, alpha), beta)`
crop_resize                 iOS 17  boxes and results have another form: refused
non_maximum_suppression     iOS 17  no `score_threshold`, other axes, three results of four: refused
constexpr_lut_to_dense      iOS 18  indices with a shape and fewer bits, in place of packed bytes
constexpr_sparse_to_dense   iOS 18  the same for its mask
==========================  ======  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, cast

import numpy as np

from anesurgery.errors import Refusal, SurgeryError
from anesurgery.facts.whole_numbers import never_negative
from anesurgery.files.copying import copy_program
from anesurgery.files.protobuf import (
    InMemoryWeights,
    from_proto,
    nested_operations,
    opset_name,
    opset_version,
    stored_value,
    to_proto,
    version_of,
)
from anesurgery.mil import (
    Array,
    Block,
    Function,
    Operation,
    Program,
    Var,
    ct,
    exclusive,
    inside,
    is_constexpr,
    is_symbolic,
    mb,
    np_dtype,
    quiet_host,
    replace_uses,
    types,
    walk_ops,
)
from anesurgery.regions.compressed_weights import unpacked

with quiet_host():
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

IOS16, IOS17, IOS18 = (int(t.value) for t in (ct.target.iOS16, ct.target.iOS17, ct.target.iOS18))

Rewriter = Callable[[Operation], Refusal | None]
"""Rewrites an op of an older opset so that it means the same in the newer one; or says why it cannot."""

Parts = dict[str, Array]
"""Input of a `constexpr_*` op -> its array."""
AxesOf = Callable[[Operation], list[int]]
"""A gather or scatter -> the axes of its table that the numbers of an index count along."""


@dataclass(frozen=True)
class Difference:
    """What is different in the form of an op that came with an opset."""

    since: int
    """The specification version of the opset."""
    what: str
    rewrite: Rewriter | None = None
    """None: what the older form accepts means the same in the newer one, unless `refused`."""
    refused: bool = False
    """The op cannot be rewritten."""
    recode: Callable[[Operation], Parts] | None = None
    """Returns the parts of a compressed weight in the newer form."""


@exclusive()
def raised(program: Program, version: int, what: str = "the program") -> Program:
    """Return a program in a newer opset, which shares its constants' arrays. The given one is not changed.

    Args:
        program: the program.
        version: the specification version of the opset.
        what: what errors call it.

    Raises:
        SurgeryError: an op would mean something else, or the program is of a newer opset.
    """
    refusal = why_not(program, version)
    if refusal is not None:
        raise SurgeryError(f"{what} {_cannot(program, version)}: {refusal}")
    if all(opset_version(function) == version for function in program.functions.values()):
        return program
    rewritten = copy_program(program)
    for function in rewritten.functions.values():
        if (refusal := _keep_meanings(function, version)) is not None:
            raise SurgeryError(f"{what} {_cannot(program, version)}: {refusal}")
    weights = InMemoryWeights()
    spec = to_proto(rewritten, version_of(rewritten), weights.store)
    for name, message in spec.functions.items():
        _recode(message, rewritten.functions[name], version, weights)
        _rename(message, version)
    newer = from_proto(spec, version, weights.read, what)
    for name, before in program.functions.items():
        new = newer.functions[name]
        new.input_types, new.output_types = before.input_types, before.output_types
    return newer


def why_not(program: Program, version: int) -> Refusal | None:
    """Return why a program cannot be raised to an opset, as far as that is known without trying; else None."""
    if version_of(program) > version:
        return Refusal("an opset is never lowered; convert the model for the older one")
    for op in walk_ops(program):
        for since in _newer_forms(op, version):
            if not any(row.since == since for row in DIFFERENCES.get(op.op_type, ())):
                words = f"what {op.op_type} means from {in_words(since)} on is not known here"
                return Refusal(f"{words}; convert the model for it", op)
        for row in differences(op, version):
            if row.refused:
                return Refusal(f"{row.what}; convert the model again for {in_words(version)}", op)
    return None


def differences(op: Operation, version: int) -> list[Difference]:
    """Return what is different for an op that is raised to the opset of a version."""
    since = _newer_forms(op, version)
    return [row for row in DIFFERENCES.get(op.op_type, ()) if row.since in since]


def _keep_meanings(function: Function, version: int) -> Refusal | None:
    """Rewrite the ops that would mean something else in the opset of a version; or return why one cannot be."""
    with function:
        for op in list(walk_ops(function)):
            for row in differences(op, version):
                refusal = None if row.rewrite is None else row.rewrite(op)
                if refusal is not None:
                    return refusal
    return None


def _newer_forms(op: Operation, version: int) -> list[int]:
    """Return the newer opsets, up to that of a version, that have another form of an op."""
    later = [since for since in changes(op.op_type) if since <= version]  # only core ops tell their opset
    return [since for since in later if since > int(op.opset_version.value)]


@lru_cache(maxsize=1024)
def changes(op_type: str) -> tuple[int, ...]:
    """Return the specification versions of the opsets that gave an op another form."""
    forms = sorted(SSAOpRegistry.core_ops.get(op_type, {}).items(), key=lambda item: int(item[0].value))
    return tuple(int(new.value) for (_, old), (new, form) in pairwise(forms) if form is not old)


def _cannot(program: Program, version: int) -> str:
    return f"is of {in_words(version_of(program))} and cannot become one of {in_words(version)}"


def in_words(version: int) -> str:
    """Return the release that an opset came with: "iOS 18"."""
    return str(ct.target(version).name).replace("iOS", "iOS ")


def _indexed_axis(op: Operation) -> list[int]:
    """Return the one axis that the indices of gather, scatter and their `_along_axis` forms count along."""
    return [int(op.axis.val) if op.inputs.get("axis") is not None else 0]


def _coordinate_axes(op: Operation) -> list[int]:
    """Return the axes that the coordinates of gather_nd and scatter_nd count along, one for each coordinate."""
    first = op.inputs.get("batch_dims")
    start = 0 if first is None else int(first.val)
    return list(range(start, start + int(op.indices.shape[-1])))


def _count_from_front(op: Operation, axes_of: AxesOf, table_name: str) -> Refusal | None:
    """Let the indices of an op count from the front: -1 along an axis of length 10 becomes 9."""
    indices, table, axes = op.indices, op.inputs[table_name], axes_of(op)
    if never_negative(indices):
        return None
    name, sizes = f"{op.name}_from_the_front", [table.shape[a] for a in axes]
    is_static = not any(map(is_symbolic, sizes))
    lengths: Any = np.array(sizes[0] if len(sizes) == 1 else sizes, np.int32)[()] if is_static else None
    if (indices.val is None or not is_static) and np_dtype(indices) != np.int32:
        return Refusal(f"its indices %{indices.name} may be negative, and are no int32", op)
    with inside(cast(Block, op.enclosing_block)):
        if indices.val is not None and is_static:
            wide = np.asarray(indices.val).astype(np.int64)
            from_front = np.where(wide < 0, wide + lengths, wide).astype(np_dtype(indices))
            op.set_inputs(indices=mb.const(val=from_front, name=name, before_op=op))
            return None
        if not is_static:
            shape = mb.shape(x=table, before_op=op, name=f"{name}_shape")
            places = np.array([a % table.rank for a in axes], np.int32)
            lengths = mb.gather(x=shape, indices=places, axis=0, before_op=op, name=f"{name}_ends")
        op.set_inputs(indices=_build_count_from_front(op, lengths, name))
    return None


def _build_count_from_front(op: Operation, lengths: Any, name: str) -> Var:
    """Build `select(i >= 0, i, i + length)` of the indices of an op, right before it."""
    indices = op.indices
    later = mb.add(x=indices, y=lengths, before_op=op, name=f"{name}_later")
    front = mb.greater_equal(x=indices, y=np.int32(0), before_op=op, name=f"{name}_test")
    return mb.select(cond=front, a=indices, b=later, before_op=op, name=name)


def _clip(op: Operation) -> Refusal | None:
    """Rewrite a clip whose limits are equal or exchanged: the older form lets the upper one win."""
    if op.alpha.val < op.beta.val:
        return None
    block, old = cast(Block, op.enclosing_block), op.outputs[0]
    with inside(block):
        low = mb.maximum(x=op.x, y=op.alpha, before_op=op, name=f"{op.name}_above")
        new = mb.minimum(x=low, y=op.beta, before_op=op, name=f"{op.name}_below")
    replace_uses(block, anchor_op=op, old_var=old, new_var=new, force_replace=True)
    block.remove_ops([op])
    new.name = old.name
    cast(Operation, new.op).name = old.name
    return None


def _palette(op: Operation) -> Parts:
    """Return indices in the shape of the weight, and the table: [1, 1, entries, 1] for a weight [4, 8]."""
    shape = tuple(int(n) for n in op.shape.val)
    lut = np.asarray(op.lut.val)
    bits = int(lut.size).bit_length() - 1
    return {
        "indices": _with_bits(unpacked(op.indices.val, bits, shape), bits),
        "lut": lut.reshape(*[1] * len(shape), lut.size, 1),
    }


def _sparse(op: Operation) -> Parts:
    """Return the numbers, and the mask in the shape of the weight."""
    shape = tuple(int(n) for n in op.shape.val)
    return {
        "nonzero_data": np.asarray(op.nonzero_data.val),
        "mask": _with_bits(unpacked(op.mask.val, 1, shape), 1),
    }


def _with_bits(values: Array, bits: int) -> Array:
    """Return numbers in the type of so many bits, such as uint4."""
    return values.view(types.nptype_from_builtin(types.string_to_builtin(f"uint{bits}")))


def _recode(function: Any, old: Function, version: int, weights: InMemoryWeights) -> None:
    """Give the compressed weights of a `Function` protobuf the parts of the newer form.

    The older form stores its parts as attributes of the op, the newer one as inputs. Parts of the same content
    move as they are.
    """
    recoded: dict[str, Parts | None] = {}  # None: the attributes move as they are
    for op in walk_ops(old):
        for row in differences(op, version) if is_constexpr(op) else ():
            recoded[op.outputs[0].name] = None if row.recode is None else row.recode(op)
    for op in nested_operations(function):
        if not recoded.keys() & {v.name for v in op.outputs}:
            continue
        attributes = {name: op.attributes.pop(name) for name in list(op.attributes) if name != "name"}
        parts = recoded[op.outputs[0].name]
        if parts is None:
            values = attributes
        else:
            values = {name: stored_value(array, weights) for name, array in parts.items()}
        for name, value in values.items():
            op.inputs[name].arguments.add().value.CopyFrom(value)


def _rename(function: Any, version: int) -> None:
    """Change the opset of a `Function` protobuf."""
    blocks, old, new = function.block_specializations, function.opset, opset_name(version)
    if new != old:
        blocks[new].CopyFrom(blocks[old])
        del blocks[old]
        function.opset = new


PARAMETERS = "its numbers may have another type than x"
MORE_TYPES = "integers of 8 and 16 bits"
NEGATIVE = "negative indices lie outside"


def _rows(ops: str, since: int, what: str) -> dict[str, tuple[Difference, ...]]:
    return dict.fromkeys(ops.split(), (Difference(since, what),))


def _lookup(ios16: str, axes_of: AxesOf, table_name: str) -> tuple[Difference, ...]:
    """Return the rows of a gather or scatter: what iOS 16 added, "" for nothing, and negative indices.

    Args:
        ios16: what the form of iOS 16 adds.
        axes_of: gives the axes that an index counts along.
        table_name: the input that is indexed.
    """
    older = (Difference(IOS16, ios16),) if ios16 else ()
    rewrite = partial(_count_from_front, axes_of=axes_of, table_name=table_name)
    return (*older, Difference(IOS17, NEGATIVE, rewrite))


DIFFERENCES: dict[str, tuple[Difference, ...]] = {
    **_rows(
        "clamped_relu elu leaky_relu linear_activation prelu scaled_tanh sigmoid_hard softplus_parametric "
        "thresholded_relu conv conv_transpose linear matmul batch_norm instance_norm l2_norm layer_norm "
        "local_response_norm inverse log rsqrt",
        IOS17,
        PARAMETERS,
    ),
    **_rows(
        "cast reshape_like expand_dims squeeze reverse reverse_sequence sliding_windows transpose "
        "slice_by_index slice_by_size",
        IOS17,
        MORE_TYPES,
    ),
    **_rows("lstm rnn", IOS17, "fp16"),
    **_rows("reduce_argmax reduce_argmin", IOS17, "the type of the result may be chosen; int32 by default"),
    **_rows("upsample_bilinear", IOS16, "half_pixel_centers, by default what align_corners is not"),
    **_rows("reshape", IOS17, "a 0 may stand where shape and x differ in rank, which was an error"),
    "resample": (Difference(IOS16, "fp16 coordinates"), Difference(IOS17, MORE_TYPES)),
    "topk": (
        Difference(IOS16, "sort and return_indices, both true by default"),
        Difference(IOS17, "the type of the indices may be chosen; int32 by default"),
    ),
    "gru": (
        Difference(IOS17, "fp16"),
        Difference(IOS18, "reset_after and input_bias: false and none by default"),
    ),
    "gather": _lookup("batch_dims, 0 by default", _indexed_axis, "x"),
    "gather_along_axis": _lookup("indices of 16 bits", _indexed_axis, "x"),
    "gather_nd": _lookup("batch_dims, 0 by default", _coordinate_axes, "x"),
    "scatter": _lookup("", _indexed_axis, "data"),
    "scatter_along_axis": _lookup("", _indexed_axis, "data"),
    "scatter_nd": _lookup("", _coordinate_axes, "data"),
    "clip": (Difference(IOS17, "alpha must be below beta", _clip),),
    "crop_resize": (
        Difference(IOS16, "pad_value, 0 by default"),
        Difference(IOS17, "its boxes and results have another form from iOS 17 on", refused=True),
    ),
    "non_maximum_suppression": (
        Difference(IOS17, "it has no score_threshold, and other axes, from iOS 17 on", refused=True),
    ),
    "constexpr_lut_to_dense": (Difference(IOS18, "indices have the shape of the weight", recode=_palette),),
    "constexpr_sparse_to_dense": (Difference(IOS18, "the mask has the shape of the weight", recode=_sparse),),
    "constexpr_cast": (Difference(IOS18, "its parts are inputs"),),
}
"""Op type -> what is different in each newer form of it."""
