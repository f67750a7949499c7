"""`zeroamp.param_gather_dtype`: weights of Linears that are all-gathered in float8, by the tensors of torchao."""
