"""Core AI: Apple's format for neural networks since iOS 27, `pip install 'anesurgery[coreai]'`."""
