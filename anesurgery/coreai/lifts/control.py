"""Branches, loops, states and calls of other graphs."""

from __future__ import annotations

from collections.abc import Sequence

from anesurgery.coreai.lifts.composites import as_list
from anesurgery.coreai.lifts.table import TABLE, TOKEN, Site, Unliftable, Value, as_var, cast, lift
from anesurgery.mil import mb


@lift("if")
def if_(o: Site) -> Sequence[Value]:
    """One of two blocks."""
    yes, no = o.op["blocks"]
    branches = [lambda block=block: tuple(map(as_var, o.scope.nested(block))) for block in (yes, no)]
    return as_list(mb.cond(pred=cast(o[0], "bool"), _true_fn=branches[0], _false_fn=branches[1]))


@lift("while")
def while_(o: Site) -> Sequence[Value]:
    """A block as long as another one says so. Its condition may hand on what the loop carries, and no more."""
    before, after = o.op["blocks"]
    carried = [argument["number"] for argument in before["arguments"]]
    if before["ops"][-1]["operands"][1:] != carried:
        raise Unliftable("its condition hands other values to the body than the loop carries")
    return as_list(
        mb.while_loop(
            _cond=lambda *values: as_var(o.scope.nested(before, values)[0]),
            _body=lambda *values: tuple(map(as_var, o.scope.nested(after, values))),
            loop_vars=tuple(as_var(o[i]) for i in range(len(o))),
        )
    )


def _write_handle(o: Site) -> Sequence[Value]:
    mb.coreml_update_state(state=o[0], value=as_var(o[1]))
    return [TOKEN]


TABLE |= {
    **dict.fromkeys(("create_token", "join_token"), lambda o: [TOKEN]),
    "read_handle": lambda o: [mb.read_state(input=o[0]), TOKEN],
    "write_handle": _write_handle,
    "invoke": lambda o: o.scope.called(o),
}
"""States, and calls of other graphs. Tokens order reads and writes, which in MIL the order of the ops does."""
