"""The older `.mlmodel` format: networks of layers, read and built anew as ML Programs.

`upgrade` is the way in, `context` builds the layers one after the other by the table of `layers`, whose
functions stand in a module for each family; `ports` knows inputs and outputs, `spec` weights.
`editing` rewrites networks.
"""
