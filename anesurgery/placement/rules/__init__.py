"""The tables of placement rules: legality, costs, shapes, numbers."""
