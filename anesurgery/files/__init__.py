"""Models on disk: packages, specifications, weights, and what is written beside them."""
