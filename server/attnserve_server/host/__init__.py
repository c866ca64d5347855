"""What the process has of its machine: processors, memory, the C library's heap, its event loop."""
