"""The version of the SDK and of the server, which are released together."""

__version__ = "0.1.0"
