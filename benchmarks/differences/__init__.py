"""Kinds of differences between ranks, for `benchmarks.rank_differences`."""
