"""The last axis of products is padded by their weights, carried by elementwise ops, cut once at the edge."""
