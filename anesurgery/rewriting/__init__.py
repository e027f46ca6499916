"""Write rewrites and run them: patterns, the builder, passes, pipelines."""
