"""The collectives of a group: all-gather, reduce-scatter, accumulation, and what they move."""
