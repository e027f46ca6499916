"""Passes over the layers of neural networks (`.mlmodel`): a class each, in a file for each kind of edit."""
