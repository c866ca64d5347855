"""`python dismissed.py LIBRARY TEAMS`: teams that are closed while a caller is computing with their helpers.

In: the path of a library, and the number of teams. Out: `sound` if all results are right, whenever the team was closed;
with a library built with sanitizers, also that no freed memory was touched.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from binding import Call, _Packed, assert_right, room
from numpy.random import default_rng
from random_calls import normal

from attnserve_server.native import library


def main() -> None:
    """Raises, or the process is killed, if anything is wrong."""
    library.PATH = Path(sys.argv[1])  # type: ignore[misc]
    library._found.cache_clear()
    kernel, numbers = library.Library(library.available()[-1]), default_rng(0)
    call = Call(*(normal(numbers, (2, length, 16)) for length in (64, 300, 300)))
    packed = _Packed(call, room)

    def compute(team: library.Team, begun: Event, closed: Event) -> int:
        rounds = 0
        while not rounds or not closed.is_set():
            begun.set()
            places = kernel.attend(bytearray(packed.bytes), library.Threads(team, 3))
            assert_right(call, packed.outcome(not places))
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as caller:
        for _ in range(int(sys.argv[2])):
            team, begun, closed = library.Team(2), Event(), Event()
            computing = caller.submit(compute, team, begun, closed)
            begun.wait()
            team.close()
            closed.set()
            computing.result()
    print("sound")


if __name__ == "__main__":
    main()
