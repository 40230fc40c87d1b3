"""Checks of a machine with one or two GPUs, and the tables of docs/results_gpu.md."""
