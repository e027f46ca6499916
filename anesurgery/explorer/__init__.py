"""Models of Core ML in Model Explorer, `pip install 'anesurgery[explorer]'`.

::

    model-explorer model.mlpackage --extensions=anesurgery.explorer
    python -m anesurgery.explorer.side_by_side before.mlpackage after.mlpackage

`main` is what Model Explorer imports; nothing else here does.
"""
