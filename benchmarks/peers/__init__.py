"""Servers of others that serve the same functions, to compare with: Triton Inference Server and Mosec."""
