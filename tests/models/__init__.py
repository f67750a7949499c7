"""Small models, their batches, and what is done to a model before training. Plain torch; no collectives, no zeroamp."""
