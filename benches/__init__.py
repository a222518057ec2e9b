"""Benchmarks of ferrohook against PyTorch: `python -m benches`.

Each file with a list `ROWS` contributes its rows. See `benches.harness.Row` for what a row is.
"""
