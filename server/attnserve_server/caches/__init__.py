"""Resident key/value caches: which pages of memory hold whose tokens (pure), and attention over them (torch)."""
