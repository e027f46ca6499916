"""What passes share that builds ops: parts of a program at another layout, rank, type or length."""
