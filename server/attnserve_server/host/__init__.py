"""What the process has of its machine: processors, memory, the C library's heap, files that change, its event loop."""
