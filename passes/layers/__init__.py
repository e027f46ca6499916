"""Passes over the layers of neural networks (`.mlmodel`), each in the file of its name."""
