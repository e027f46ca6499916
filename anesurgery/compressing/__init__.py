"""What compressing each weight costs at the outputs, and which weight gets how many bits.

`compression` is the whole way from a model to a smaller one: `weight_forms` says which form a chip runs fast,
`correcting` runs samples and rounds each weight for what its ops see. `modes` names what coremltools can do to
a weight, `sensitivity` measures it, `assignment` chooses.
"""
