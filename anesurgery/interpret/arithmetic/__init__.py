"""The arithmetics: as stored, fp32, and an estimate of the Neural Engine's."""
