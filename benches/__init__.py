"""Benchmarks of ferrohook against PyTorch and others (`python -m benches`), and the load test."""

import os

# Read by torch as it is imported: the models are too small for more threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
