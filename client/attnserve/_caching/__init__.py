"""Resident caches: the operations on one, in order, each through all it takes."""
