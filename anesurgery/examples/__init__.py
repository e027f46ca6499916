"""Small models to try the library on: real architectures with random weights, made without transformers."""
