"""Attention on the CPU by our own kernel in C, which is built with the package where there is a compiler."""
