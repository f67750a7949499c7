"""State in host memory between optimizer steps: `zeroamp.sleep` and `wake`, and the key `offload_between_steps`."""
