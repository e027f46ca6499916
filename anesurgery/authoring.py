"""The words that most passes are written with.

::

    from anesurgery import authoring as an
    from anesurgery.authoring import Builder, Match, OpPattern, Ops, Refusal, Rewrite, Var, mb, var

The words that every pass has are imported by name; others are read as `an.constant(m.y)`. What few passes need
is imported from where it lives, so that a file says what it depends on: `from anesurgery.facts import masks`.
docs/authoring.md has a line for each word.
"""

from __future__ import annotations

from anesurgery import fp16 as fp16
from anesurgery import ops as ops
from anesurgery.checking.grades import REASSOCIATED as REASSOCIATED
from anesurgery.checking.grades import Tolerance as Tolerance
from anesurgery.errors import NO_MATCH as NO_MATCH
from anesurgery.errors import PassError as PassError
from anesurgery.errors import PatternError as PatternError
from anesurgery.errors import Refusal as Refusal
from anesurgery.errors import Refused as Refused
from anesurgery.files.interface import InterfaceChange as InterfaceChange
from anesurgery.files.interface import Values as Values
from anesurgery.mil import Array as Array
from anesurgery.mil import Function as Function
from anesurgery.mil import Operation as Operation
from anesurgery.mil import Program as Program
from anesurgery.mil import Var as Var
from anesurgery.mil import constant as constant
from anesurgery.mil import consumers as consumers
from anesurgery.mil import ct as ct
from anesurgery.mil import dtype_name as dtype_name
from anesurgery.mil import is_constant as is_constant
from anesurgery.mil import is_output as is_output
from anesurgery.mil import is_stored as is_stored
from anesurgery.mil import is_symbolic as is_symbolic
from anesurgery.mil import mb as mb
from anesurgery.mil import np_dtype as np_dtype
from anesurgery.mil import op_inputs as op_inputs
from anesurgery.mil import operands as operands
from anesurgery.mil import producer as producer
from anesurgery.mil import static_shape as static_shape
from anesurgery.mil import types as types
from anesurgery.placement.target import Target as Target
from anesurgery.regions.compressed_weights import decoded as decoded
from anesurgery.regions.compressed_weights import edit_weight as edit_weight
from anesurgery.regions.weight_edits import Edit as Edit
from anesurgery.rewriting.builder import Builder as Builder
from anesurgery.rewriting.graph_edits import GraphEdits as GraphEdits
from anesurgery.rewriting.passes import Pass as Pass
from anesurgery.rewriting.passes import example as example
from anesurgery.rewriting.passes import option as option
from anesurgery.rewriting.pattern import Match as Match
from anesurgery.rewriting.pattern import OpPattern as OpPattern
from anesurgery.rewriting.pattern import Ops as Ops
from anesurgery.rewriting.pattern import var as var
from anesurgery.rewriting.rewrite import Rewrite as Rewrite
from anesurgery.rewriting.session import Session as Session
from anesurgery.semantics import intervals as intervals
from anesurgery.semantics import reading as reading
from anesurgery.semantics.reading import flag as flag
from anesurgery.semantics.reading import ints as ints
from anesurgery.semantics.reading import number as number
from anesurgery.semantics.reading import shape_in_words as shape_in_words

__all__ = [name for name in dir() if not name.startswith("_") and name != "annotations"]
