"""Benchmarks of ferrohook against PyTorch and others (`python -m benches`), and the load test."""
