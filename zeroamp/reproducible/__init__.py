"""`zeroamp.reproducible`: the same bits on any number of ranks. Order, sums, seeds, sampler and checks."""
