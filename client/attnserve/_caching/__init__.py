"""Resident caches: operations on them, in order, each through all its steps."""
