"""From a checkpoint to a folder that writes: build, the file that a runner reads, and text."""
