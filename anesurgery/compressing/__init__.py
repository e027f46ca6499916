"""What compressing each weight costs at the outputs, and which weight gets how many bits.

`modes` names what coremltools can do to a weight, `sensitivity` measures it, `assignment` chooses.
"""
