"""Attention on a processor by a kernel of our own, in C, that is built with the package where there is a compiler."""
