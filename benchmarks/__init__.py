"""Benchmarks: the service against the same computation in process and against its transport without computation."""
