"""Passes over the layers of a network, on the specification itself: an `.mlmodel` goes in and comes out.

`network` is the graph, `layer_pass` what a pass is, `neural_network` the model that passes operate on,
`layer_text` prints it; the others hold what several passes share.
"""
