"""The schema of a config: all keys of DeepSpeed 0.19.8 and of the `zeroamp` block, each with its type and class."""
