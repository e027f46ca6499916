"""How each op of MIL is written in Core AI: each file, a family of ops, fills `TABLE`."""

from anesurgery.coreai.lowerings import compressed, control, elementwise, images, indexing, products, tensors  # noqa: F401
from anesurgery.coreai.table import TABLE as TABLE
