"""Apple's next format for neural networks, Core AI (`.aimodel`): written, run by Apple's runtime, and read."""
