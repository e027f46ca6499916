"""What an op means: where its results lie, which axes go where, what it costs."""
