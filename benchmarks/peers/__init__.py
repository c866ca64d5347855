"""Peers, other servers that serve the same functions, for comparison: Triton Inference Server and Mosec."""
