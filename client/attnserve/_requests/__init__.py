"""Requests and their results: arguments to encoded requests, replies to results. No I/O."""
