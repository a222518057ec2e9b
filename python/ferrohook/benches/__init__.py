"""Benchmarks of ferrohook against PyTorch and others: `ferrohook bench`.

Each file with a list `ROWS` contributes its rows. `ferrohook.benches.harness.Row` is what a row is.
"""
