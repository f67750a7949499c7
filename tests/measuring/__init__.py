"""What counts or measures a run: collectives, bytes, allocations, calls, errors. Asserts nothing, and never a time."""
