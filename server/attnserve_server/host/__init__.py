"""What the machine gives the process: processors, memory, the C library's heap, an event loop."""
