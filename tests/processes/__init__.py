"""Ranks and subprocesses, and what they run: training loops with zeroamp, their configs, injected failures."""
