"""The one typed door to coremltools' MIL: its types, its builder, and small readers.

coremltools ships no type information, so the few members that this project uses are declared here;
everywhere else a `Var` is a `Var` and not `Any`.
"""

from __future__ import annotations

import gc
import hashlib
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol, cast
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from anesurgery.errors import SurgeryError, UnknownName

if TYPE_CHECKING:
    from typing_extensions import Self

# A lock that a forked process is not left with, and silence that is.
#
# A fork copies the locks of every thread, but only the thread that forks. So a fork waits until no other thread
# holds the lock: what is built and patched under it is whole in the new process.


def kept_from_forks() -> threading.RLock:
    """A re-entrant lock for the life of the process, which whoever forks waits for."""
    lock = threading.RLock()
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


class Silence:
    """Off while any thread is inside: what a logger says, and warnings."""

    def __init__(self, logger: str) -> None:
        self._logger = logging.getLogger(logger)
        self._lock, self._inside, self._restore = kept_from_forks(), list[int](), ExitStack()
        os.register_at_fork(after_in_child=self._forked)

    def __enter__(self) -> None:
        with self._lock:
            self._inside.append(threading.get_ident())
            if len(self._inside) > 1:
                return
            # Another level would empty the caches of all loggers, twice for each op that is built.
            self._restore.callback(setattr, self._logger, "disabled", self._logger.disabled)
            self._logger.disabled = True
            self._restore.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside.remove(threading.get_ident())
            if not self._inside:
                self._restore.close()

    def _forked(self) -> None:
        """In a new process the other threads are not there."""
        silent, self._inside = bool(self._inside), [i for i in self._inside if i == threading.get_ident()]
        if silent and not self._inside:
            self._restore.close()


def _free_properties() -> None:
    """In a new process: free the locks of properties that other threads were computing."""
    ours = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == __name__.partition(".")[0]]
    for kind in [v for module in ours for v in vars(module).values() if isinstance(v, type)]:
        for member in vars(kind).values():
            if isinstance(member, cached_property):
                cast(Any, member).lock = threading.RLock()


if sys.version_info < (3, 12):  # from there on they have none
    os.register_at_fork(after_in_child=_free_properties)


Array = NDArray[Any]

_SILENCE = Silence("coremltools")
"""Its lock is taken inside the other one; a fork takes both in the reverse order of these lines."""
HOST = kept_from_forks()
"""Held by one thread around every use of coremltools' builder, whose current block, scopes and symbols are
global. This library's own calls take it, and a fork waits for it. Code that builds programs itself in several
threads (`mb.program`, `ct.convert`) must hold it too: `with anesurgery.mil.HOST:`. Nothing takes it while a
module is imported."""

MOST_AXES = 5
"""The most axes of a tensor that Core ML stores; coremltools refuses to write more."""
CONSTEXPR = "constexpr_"
"""How the types of ops begin that hold compressed weights."""
SELDOM = 20
"""Times as many objects are made between two collections while graphs are built. torch and coremltools keep a
million alive, and each full collection looks at all of them, 0.2 s for nothing."""
_CALLS: list[tuple[int, int, int]] = []
"""The thresholds of the garbage collector before each call in `exclusive`."""


@contextmanager
def exclusive() -> Iterator[None]:
    """Let one thread at a time into a function, or a block, that uses coremltools' builder.

    Meanwhile Python looks for unused cycles less often.
    """
    with HOST:
        _CALLS.append(gc.get_threshold())
        if len(_CALLS) == 1:
            gc.set_threshold(_CALLS[0][0] * SELDOM, *_CALLS[0][1:])
        try:
            yield
        finally:
            often = _CALLS.pop()
            if not _CALLS:
                gc.set_threshold(*often)


@contextmanager
def patched(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute of coremltools another value, while no other thread builds and no process is forked."""
    with exclusive(), patch.object(holder, name, value):
        yield


def quiet_host() -> Silence:
    """Silence what coremltools prints about the platform and untested versions of its neighbours."""
    return _SILENCE


@contextmanager
def silent_host() -> Iterator[None]:
    """Silence coremltools wholly: its progress bars too."""
    with quiet_host(), redirect_stderr(io.StringIO()):
        yield


with quiet_host():
    import coremltools
    from coremltools.converters.mil import mil as _mil
    from coremltools.converters.mil.mil import types as types
    from coremltools.converters.mil.mil.block import curr_block
    from coremltools.converters.mil.mil.input_type import TensorInputType
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry
    from coremltools.converters.mil.mil.scope import VALID_OPS_TO_COPY_SCOPE_INFO
    from coremltools.converters.mil.mil.types.symbolic import any_symbolic as any_symbolic
    from coremltools.converters.mil.mil.types.symbolic import is_symbolic as is_symbolic
    from coremltools.converters.mil.mil.var import InternalVar

ct = coremltools

if TYPE_CHECKING:

    class Var:
        """A value of the program: one output of one op, or an input of a block (then `op` is None)."""

        name: str
        op: Operation | None
        val: Any
        sym_val: Any
        sym_type: Any
        dtype: Any
        shape: tuple[Any, ...]
        rank: int
        child_ops: list[Operation]
        consuming_blocks: list[Block]

    class Operation:
        """One op: its type, name, inputs by parameter name, outputs and nested blocks."""

        op_type: str
        name: str
        inputs: dict[str, Any]
        outputs: list[Var]
        blocks: list[Block]
        enclosing_block: Block | None
        opset_version: Any
        scopes: dict[Any, Any]

        def __getattr__(self, name: str) -> Any: ...

    class Block:
        """A list of ops with inputs and outputs; a function is a block too."""

        name: str
        inputs: Any
        outputs: list[Var]
        operations: Sequence[Operation]
        outer_op: Operation | None

        def __enter__(self) -> Self: ...
        def __exit__(self, *error: object) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    class Function(Block):
        """A top-level block with named inputs and an opset."""

        def __init__(self, inputs: dict[str, Any], opset_version: Any = None) -> None: ...

        opset_version: Any
        input_types: Any
        output_types: Any

    class Program:
        """A MIL program: functions by name."""

        functions: dict[str, Function]

        def __getattr__(self, name: str) -> Any: ...

else:
    Var, Operation, Block, Function, Program = (
        _mil.Var,
        _mil.Operation,
        _mil.Block,
        _mil.Function,
        _mil.Program,
    )


class OpMakers:
    """What makes ops by their type: each makes a value, but for those named here."""

    classify: Callable[..., Any]
    cond: Callable[..., Any]
    constexpr_lut_to_sparse: Callable[..., Any]
    constexpr_sparse_blockwise_shift_scale: Callable[..., Any]
    gru: Callable[..., Any]
    lstm: Callable[..., Any]
    non_maximum_suppression: Callable[..., Any]
    rnn: Callable[..., Any]
    split: Callable[..., Any]
    topk: Callable[..., Any]
    while_loop: Callable[..., Any]

    def __getattr__(self, op_type: str) -> Callable[..., Var]:
        """What makes ops of one type."""
        raise AttributeError(op_type)


class HostBuilder(OpMakers):
    """coremltools' own builder."""

    TensorSpec: Any
    StateTensorSpec: Any
    placeholder: Any
    state_tensor_placeholder: Any
    program: Any
    function: Any
    scope: Any


def new_symbol() -> Any:
    """A length that differs from call to call."""
    return _mil.get_new_symbol()


mb = cast(HostBuilder, _mil.Builder)
"""coremltools' own builder, for programs written by hand (tests and `example()`)."""


def walk_ops(block: Program | Block) -> Iterator[Operation]:
    """Every op of a block or program in file order, nested blocks included (outer op first)."""
    return _walk(block.functions.values() if isinstance(block, Program) else (block,))


def nested_ops(op: Operation) -> Iterator[Operation]:
    """Every op in the blocks of an op, at any depth, in file order; not the op itself."""
    return _walk(op.blocks)


def _walk(blocks: Iterable[Block]) -> Iterator[Operation]:
    """The ops of blocks, at any depth: each is visited once, and no depth is too deep."""
    pending = [iter(list(block.operations)) for block in blocks][::-1]
    while pending:
        for op in pending[-1]:
            yield op
            if op.blocks:
                pending += [iter(list(block.operations)) for block in reversed(op.blocks)]
                break
        else:
            pending.pop()


def nesting(program: Program) -> int:
    """How many blocks of control flow are inside each other, at most."""
    deepest, pending = 0, [(op, 1) for f in program.functions.values() for op in f.operations]
    while pending:
        op, depth = pending.pop()
        if op.blocks:
            deepest = max(deepest, depth)
            pending += [(inner, depth + 1) for block in op.blocks for inner in block.operations]
    return deepest


def reads(op: Operation) -> list[Var]:
    """Everything an op needs, also what its nested blocks read from outside; a value as often as it is read."""
    own = [var for _, var in operands(op)]
    if not op.blocks:
        return own
    makes = {var for block in op.blocks for var in block.inputs}
    inner: list[Var] = []
    for nested in nested_ops(op):
        inner += [var for _, var in operands(nested)]
        makes |= {*nested.outputs, *(var for block in nested.blocks for var in block.inputs)}
    inner += [var for owner in (op, *nested_ops(op)) for block in owner.blocks for var in block.outputs]
    return own + [var for var in inner if var not in makes]


def blocks(program: Program) -> Iterator[Block]:
    """Every block: the functions, and the blocks nested in control flow."""
    for function in program.functions.values():
        yield function
        for op in walk_ops(function):
            yield from op.blocks


def producer(var: Var | None, *op_types: str) -> Operation | None:
    """The op that makes `var`, if there is one and (when given) its type is among `op_types`."""
    op = var.op if var is not None else None
    return op if op is not None and (not op_types or op.op_type in op_types) else None


def consumers(var: Var) -> list[Operation]:
    """The ops that read `var`, each once, in the order in which they were added."""
    return list(dict.fromkeys(var.child_ops))


def operands(op: Operation) -> Iterator[tuple[str, Var]]:
    """The (parameter, var) pairs of an op's inputs; a tuple input gives one pair for each element."""
    for name, value in op._input_vars.items():  # what `inputs` copies at each question
        if value.__class__ is Var:
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((name, var) for var in value if isinstance(var, Var))
        elif isinstance(value, Var) and not isinstance(value, InternalVar):
            yield name, value


def op_inputs(op: Operation, *without: str) -> dict[str, Any]:
    """What a builder makes the same op with: the inputs that are there, by parameter, without the host's own.

    A default that is of another element type than its group is left out: a builder takes none such.

    Args:
        op: the op.
        without: parameters to leave out.
    """
    left_out = {k for k, v in op.inputs.items() if v is None or k.startswith("_")} | set(without)
    return {k: v for k, v in op.inputs.items() if k not in left_out | _defaults_apart(op).keys()}


def retype_defaults(op: Operation) -> None:
    """Give defaults that the host filled in the type of their group, which holds them: others do not load."""
    for name, dtype in _defaults_apart(op).items():
        old, block = op.inputs[name], op.enclosing_block
        assert old.op is not None
        assert block is not None
        if np.asarray(old.val).astype(dtype) != old.val:
            continue
        with block:
            typed = mb.const(val=np.asarray(old.val).astype(dtype)[()], name=old.name, before_op=op)
        op.set_inputs(no_check_var_types=True, **{name: typed})
        if not old.child_ops and old.op.enclosing_block is not None:
            old.op.enclosing_block.remove_ops([old.op])


def replace_uses(block: Block, *, old_var: Var, new_var: Var, **how: Any) -> None:
    """Let ops read another value, with coremltools; it takes no defaults of another type than their group.

    Args:
        block: of the ops.
        old_var: the value that they read.
        new_var: what they read in its place.
        how: the rest of what `Block.replace_uses_of_var_after_op` takes.
    """
    aside = [(op, name, op.inputs[name]) for op in consumers(old_var) for name in _defaults_apart(op)]
    for op, name, _ in aside:
        op._input_vars[name] = None
    try:
        block.replace_uses_of_var_after_op(old_var=old_var, new_var=new_var, **how)
    finally:
        for op, name, default in aside:
            op._input_vars[name] = default


def _defaults_apart(op: Operation) -> dict[str, np.dtype[Any]]:
    """Defaults of another type than their group, which the host fills in as fp32 or int32, and that type."""
    rows = _parameters(cast(Any, type(op)))
    members = {n: op.inputs[n] for n, row in rows.items() if row.group and isinstance(op.inputs.get(n), Var)}
    if len({(rows[n].group, v.dtype) for n, v in members.items()}) == len({rows[n].group for n in members}):
        return {}
    filled = {float: types.fp32, int: types.int32}
    defaults = {n: filled.get(type(value)) for n, value in op.default_inputs().items()}
    apart = {n for n, v in members.items() if n in defaults and v.dtype is defaults[n]}
    dtypes = {rows[n].group: np_dtype(v) for n, v in members.items() if n not in apart}
    return {n: dtypes[rows[n].group] for n in apart if rows[n].group in dtypes}


def is_output(var: Var) -> bool:
    """Does a block return this value?"""
    return bool(var.consuming_blocks)


def constant(var: Var | None) -> Any:
    """The compile-time value of `var` (array, numpy scalar, bool or string), or None.

    Only constants (`const`) count: what could be computed from constants is an op of the program.
    """
    op = producer(var, "const")
    return None if op is None else cast(Var, var).val


def array_digest(array: Any) -> bytes:
    """Return 16 bytes that are equal for arrays with equal elements in order, of one dtype and any shapes."""
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).digest()


def is_constant(var: Var | None, value: float, rtol: float = 1e-6) -> bool:
    """Is `var` a constant equal everywhere to `value`, relatively (`value` 0 must be met exactly)?"""
    held = constant(var)
    if held is None or isinstance(held, str):
        return False
    return bool(np.all(np.abs(np.asarray(held, np.float64) - value) <= rtol * abs(value)))


def is_stored(var: Var | None) -> bool:
    """Is it a constant, plain or compressed?"""
    op = None if var is None else var.op
    return op is not None and ((kind := op.op_type) == "const" or kind.startswith(CONSTEXPR))


def is_compressed(var: Var) -> bool:
    """Is it a weight in a compressed form?"""
    return var.op is not None and is_constexpr(var.op)


def as_scratch(function: Function) -> None:
    """Let a function that is thrown away, in which no value is replaced, be left at no cost.

    Each time that a function is left, coremltools walks all its ops for what must not be replaced.
    """
    setattr(function, "_propagate_nonreplaceable_vars", lambda: None)  # noqa: B010 - a private member


@contextmanager
def visiting(block: Block, edited: Sequence[Operation]) -> Iterator[None]:
    """Enter a block; at the end all ops are walked only if some were edited and some must not be replaced."""
    if not isinstance(block, Function):
        with block:
            yield
        return
    own, walk = vars(block).get("_propagate_nonreplaceable_vars"), block._propagate_nonreplaceable_vars
    vars(block)["_propagate_nonreplaceable_vars"] = lambda: walk() if edited and _holds_back(block) else None
    try:
        with block:
            yield
    finally:
        del vars(block)["_propagate_nonreplaceable_vars"]
        if own is not None:
            as_scratch(block)


def _holds_back(block: Block) -> bool:
    """Is there a value that must not be replaced, or one that knows of such a value before it?"""
    values: Iterator[Any] = (v for op in walk_ops(block) for v in (op.outputs or ()))
    return any(v.nonreplaceable_vars_upstream for v in values)


def is_constexpr(op: Operation) -> bool:
    """Does an op hold a weight in a compressed form?"""
    return op.op_type.startswith(CONSTEXPR)


def is_weight(op: Operation) -> bool:
    """Is it a constant, plain or compressed, and no op that runs?"""
    return (kind := op.op_type) == "const" or kind.startswith(CONSTEXPR)


def static_shape(var: Var) -> tuple[int, ...] | None:
    """The shape as integers, or None when a dimension is symbolic."""
    return _static(var.sym_type)


@lru_cache(maxsize=4096)
def _static(sym_type: Any) -> tuple[int, ...] | None:
    """The shape, asked once for each type."""
    held = sym_type.wrapped_type() if types.is_state(sym_type) else sym_type
    shape = tuple(held.get_shape()) if types.is_tensor(held) else ()
    return None if any_symbolic(shape) else tuple(int(d) for d in shape)


def fixed_shape(var: Var) -> tuple[int, ...]:
    """The shape of a value that is known to have a static one.

    Raises:
        ValueError: it has none.
    """
    shape = static_shape(var)
    if shape is None:
        raise ValueError(f"%{var.name} has the symbolic shape {tuple(var.shape)}")
    return shape


def dtype_name(var: Var) -> str:
    """The element type as MIL prints it: "fp16", "int32", "bool"; "list" or "dict" of what is not a tensor."""
    return _described(var.sym_type)[0]


def np_dtype(var: Var) -> np.dtype[Any]:
    """The element type as numpy's."""
    return np.dtype(_described(var.sym_type)[1])


@lru_cache(maxsize=4096)
def _described(sym_type: Any) -> tuple[str, Any]:
    """The element type, asked once for each type: coremltools describes a type anew at every question."""
    held = sym_type.wrapped_type() if types.is_state(sym_type) else sym_type
    for kind, is_kind in (("list", types.is_list), ("dict", types.is_dict)):
        if is_kind(held):
            return kind, object
    element = held.get_primitive() if types.is_tensor(held) else held
    return str(types.builtin_to_string(element)), types.nptype_from_builtin(element)


def op_types() -> frozenset[str]:
    """Every op type that coremltools knows, of any opset."""
    tables = (SSAOpRegistry.core_ops, SSAOpRegistry.dialect_ops, SSAOpRegistry.custom_ops)
    return frozenset(name for table in tables for name in table)


def op_parameters(op_type: str) -> frozenset[str]:
    """The parameters of an op type, of all opsets taken together."""
    core = SSAOpRegistry.core_ops.get(op_type, {}).values()
    others = [t[op_type] for t in (SSAOpRegistry.dialect_ops, SSAOpRegistry.custom_ops) if op_type in t]
    return frozenset(name for cls in (*core, *others) for name in cls.input_spec.input_types)


@dataclass(frozen=True)
class Parameter:
    """What an op takes for one of its parameters."""

    dtypes: frozenset[np.dtype[Any]]
    """The element types."""
    group: str | None
    """Parameters of one group must have the same element type; None: it agrees with no other."""


def parameters(op_type: str) -> dict[str, Parameter]:
    """The parameters of an op that take tensors, in the opset of the function that is being built."""
    return _parameters(SSAOpRegistry._get_core_op_cls(op_type)) if op_type in SSAOpRegistry.core_ops else {}


@lru_cache(maxsize=1024)
def _parameters(op_class: Any) -> dict[str, Parameter]:
    rows = {}
    for name, kind in op_class.input_spec.input_types.items():
        if isinstance(kind, TensorInputType):
            domain = kind.type_domain or op_class.type_domains.get(kind.type_domain_id, ())
            dtypes = frozenset(np.dtype(types.nptype_from_builtin(t)) for t in domain if t is not types.str)
            rows[name] = Parameter(dtypes, kind.type_domain_id)
    return rows


def add_input(function: Function, name: str, shape: Sequence[int], dtype: Any, state: bool = False) -> Var:
    """A new tensor or state at the end of a function's inputs; `dtype` is one of `types` (`types.fp16`)."""
    make = _mil.program.StateTensorPlaceholder if state else mb.placeholder
    placeholder = make(tuple(shape), dtype, name=name)
    var = placeholder.outputs[0]
    var.name = name
    function._input_dict[name] = var
    function.placeholder_inputs[name] = placeholder
    return cast(Var, var)


def remove_input(function: Function, name: str) -> None:
    """Take away an input that nothing reads."""
    var = function._input_dict.pop(name)
    if var.child_ops or var.consuming_blocks:
        raise ValueError(f"%{name} is still read")
    function.placeholder_inputs.pop(name, None)


def remove_operand(op: Operation, name: str) -> None:
    """Take away a parameter that an op may do without."""
    op.inputs[name].remove_child_op(op)
    op._input_vars[name] = None
    setattr(op, name, None)


def stamp(op: Operation | None, origin: Operation) -> None:
    """Give a new op the scopes of the op it stands for; coremltools, in a pass of its own, then leaves them."""
    assert op is not None, "a new value has an op"
    op.scopes = dict(origin.scopes)
    for waiting in VALID_OPS_TO_COPY_SCOPE_INFO:
        waiting.discard(op)


def first_op_after(vars_: Sequence[Var], root: Operation) -> Operation:
    """The first op, in the block of `root` or around it, at which all of these values are known."""
    block = root.enclosing_block
    assert block is not None
    while block.outer_op is not None and not any(_made_in(v, block) for v in vars_):
        block = cast("Block", block.outer_op.enclosing_block)
    makers = {v.op for v in vars_ if v.op is not None and v.op.enclosing_block is block}
    place = None
    for op in block.operations:
        if not makers:
            place = op
            break
        makers.discard(op)
    assert place is not None, "root comes after all that it reads"
    return place


def _made_in(var: Var, block: Block) -> bool:
    return var in block.inputs if var.op is None else var.op.enclosing_block is block


@contextmanager
def inside(block: Block) -> Iterator[None]:
    """Let the builder work in a block; leaving a block by `with block` looks at each of its ops."""
    if curr_block() is block:
        yield
    else:
        with block:
            yield


def next_op(op: Operation) -> Operation:
    """The op after another one in its block.

    Raises:
        ValueError: it is the last.
    """
    assert op.enclosing_block is not None
    node = op.enclosing_block.operations._get_node_from_op(op).next  # type: ignore[attr-defined]
    if node is None:
        raise ValueError(f"{op.name} is the last op of its block")
    return cast("Operation", node.op)


def function_of(program: Program, name: str | None) -> Function:
    """A function by name; without one: `main`, or the first.

    Raises:
        UnknownName: no such function.
        SurgeryError: the program has none at all.
    """
    functions = program.functions
    if not functions:
        raise SurgeryError("the program has no function; give a program that was built or loaded")
    if name is None:
        return functions["main"] if "main" in functions else next(iter(functions.values()))
    if name not in functions:
        raise UnknownName("function", str(name), functions)
    return functions[name]


class Maker(Protocol):
    """What regions rebuild ops with: the builder of a rewrite, as far as they know it."""

    @property
    def block(self) -> Block:
        """The block in which the ops are made."""

    def before(self, op: Operation) -> Maker:
        """A maker whose ops stand right before another op of the same block."""

    def shared(self, key: tuple[Any, ...], make: Callable[[], Array], name: str) -> Var:
        """One constant for all edits that ask with the same key."""

    def __getattr__(self, op_type: str) -> Callable[..., Var]:
        """What makes ops of one type."""
