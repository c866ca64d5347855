"""`encode_attend` by the name of the module that it used to be in."""

from attnserve._attend import encode_attend

__all__ = ["encode_attend"]
