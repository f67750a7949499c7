"""A training run before it runs: memory, bytes between ranks and time of one optimizer step, from shapes alone."""
