"""What can go wrong with caches, apart from unknown names and unexpected lengths: no room."""

from __future__ import annotations

from attnserve_server.errors import Overloaded
from attnserve_server.no_room import NoRoom


class CacheFull(Overloaded):
    """The pool has fewer free bytes than are needed; `free_bytes` in the ErrorInfo's metadata says how many."""

    def __init__(self, needed_bytes: int, free_bytes: int, retry_delay: float) -> None:
        super().__init__(
            NoRoom(
                bound="cache_bytes",
                message=f"the pool of the caches has no room for {needed_bytes} bytes, in whole pages: "
                f"{free_bytes} bytes are free; retry in {retry_delay:.3f} s",
                reason="CACHE_FULL",
                retry_delay=retry_delay,
                rejection="cache_bytes",
                more={"free_bytes": str(free_bytes)},
            )
        )
