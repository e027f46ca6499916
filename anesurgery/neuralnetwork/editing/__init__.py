"""Passes over the layers of a network, on the specification itself: an `.mlmodel` goes in and comes out.

`network` is the graph, `inference` its shapes and constants, `layer_pass` what a pass is and the driver,
`operating` applies passes to a file, `testing` helps to test them; the others hold what several passes share.
"""
