"""Give both operands of an elementwise op the same rank, and where it is asked for the same shape."""
