"""Pipeline parallelism by torch's schedules: the gradient norm over all parts of a model, and weights of two stages."""
