"""The older `.mlmodel` format: networks of layers, read and built anew as ML Programs."""
