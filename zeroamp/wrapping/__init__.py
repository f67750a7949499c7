"""From a `Plan` to an FSDP2 model: checks, sharding, hooks, and what `wrap_model` leaves on the model."""
