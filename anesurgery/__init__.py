"""See, fix and prove Core ML models for the Apple Neural Engine, before you own a Mac."""
