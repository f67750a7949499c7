"""Collectives in two levels, for ranks on several nodes: inside each node and between nodes, with the same bits."""
