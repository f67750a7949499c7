"""`deepspeed.ops`: the optimizers of `ops.adam`, as torch's optimizers."""
