"""How each op of Core AI is built in MIL: each file, a family of ops, fills `TABLE`."""

from anesurgery.coreai.lifts import elementwise, graphs, indexing, products, tensors  # noqa: F401
from anesurgery.coreai.lifts.table import TABLE as TABLE
