"""Models of Core ML in Model Explorer, `pip install 'anesurgery[explorer]'`.

::

    model-explorer before.mlpackage after.mlpackage --extensions=anesurgery.explorer

`main` is what Model Explorer imports; nothing else here does.
"""
