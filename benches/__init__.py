"""The load test of the example; the benchmarks that are installed stand in `ferrohook.benches`."""
