"""Each conversion that coremltools lacks, against torch by the interpreter; then whole model families."""
