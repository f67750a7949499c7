"""A training run before it runs: memory, bytes on the wire and time of one optimizer step, from shapes alone."""
