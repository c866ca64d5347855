"""The command `attnserve`, for shells."""
