"""The check of zeroamp on one GPU, in parts. Run `python -m benchmarks.gpu_check`, or `make gpu-check`."""
