"""The older `.mlmodel` format: networks of layers, read and rebuilt as ML Programs.

`importing` makes the program, `context` builds layer after layer by the functions in
`layers/` (a file for each family), `ports` knows inputs and outputs, `spec` reads weights.
"""
