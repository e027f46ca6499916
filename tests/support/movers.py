"""One call of each op that only moves data: its operands and attributes by name."""

from __future__ import annotations

from typing import Any

import numpy as np

X = np.arange(1, 33, dtype=np.float32).reshape(1, 4, 4, 2)

MOVES: dict[str, dict[str, Any]] = {
    "batch_to_space": {"x": X.reshape(4, 2, 2, 2), "block_shape": [2, 2], "crops": [[0, 0], [0, 1]]},
    "cast": {"x": X, "dtype": "int32"},
    "concat": {"values": [X, -X], "axis": 1},
    "crop": {"x": X, "crop_height": [1, 1], "crop_width": [0, 1]},
    "depth_to_space": {"x": X, "block_size": 2},
    "expand_dims": {"x": X, "axes": [1]},
    "flatten2d": {"x": X},
    "gather": {"x": X, "indices": np.array([2, 2, 0], np.int32), "axis": 1},
    "gather_along_axis": {"x": X, "indices": np.zeros((1, 1, 4, 2), np.int32), "axis": 1},
    "gather_nd": {"x": X, "indices": np.array([[0, 1], [0, 3]], np.int32)},
    "identity": {"x": X},
    "pad": {"x": X, "pad": [1, 1], "mode": "constant", "constant_val": np.float32(-7)},
    "pixel_shuffle": {"x": X, "upscale_factor": 2},
    "pixel_unshuffle": {"x": X, "downscale_factor": np.uint32(2)},
    "reshape": {"x": X, "shape": [4, 8]},
    "reshape_like": {"x": X, "ref_tensors": (X,), "begins": [0], "ends": [4], "end_masks": [False]},
    "reverse": {"x": X, "axes": [1]},
    "reverse_sequence": {"x": X, "lengths": np.array([3], np.int32), "seq_axis": 1, "batch_axis": 0},
    "slice_by_index": {"x": X, "begin": [0, 1, 0, 0], "end": [1, 3, 4, 1]},
    "slice_by_size": {"x": X, "begin": [0, 1, 0, 0], "size": [1, 2, 2, 2]},
    "sliding_windows": {"x": X, "axis": 1, "size": 2},
    "space_to_batch": {"x": X, "block_shape": [2, 2], "paddings": [[0, 0], [1, 1]]},
    "space_to_depth": {"x": X, "block_size": 2},
    "split": {"x": X, "num_splits": 2, "axis": 1},
    "squeeze": {"x": X, "axes": [0]},
    "stack": {"values": [X, -X], "axis": 1},
    "tile": {"x": X, "reps": [1, 2, 1, 1]},
    "transpose": {"x": X, "perm": [0, 2, 3, 1]},
}
"""Op type -> its inputs; those that are floats are what it moves."""
