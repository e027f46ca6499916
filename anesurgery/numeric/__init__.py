"""What goes wrong in numbers: each hazard is found, bounded and repaired in one place."""
