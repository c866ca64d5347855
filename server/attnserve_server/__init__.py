"""The attention server: requests come in over gRPC, run together on one device, and go back."""

from attnserve._version import __version__

__all__ = ["__version__"]
