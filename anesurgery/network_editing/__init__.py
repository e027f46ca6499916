"""Neural networks edited or upgraded: passes over the layers of a specification, and the way to an ML Program.

`network` is the graph, `layer_pass` what a pass is, `neural_network` the model that passes operate on,
`upgrade` turns it into an ML Program.
"""
