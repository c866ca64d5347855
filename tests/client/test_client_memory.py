"""The memory of messages: a process that exchanges large ones keeps what it frees, unless its environment decides."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or sys.platform != "linux", reason="of glibc on Linux alone"
)

# Makes six messages and frees them, again and again; prints how many pages have faulted for each time. The arguments:
# what the SDK sees of messages, those that are sent, one that is received, or nothing; and the size of their pieces.
PROGRAM = """
import resource, sys
from attnserve._memory import joined
from attnserve._requests.reply import decode_replies
from attnserve.v1 import attention_pb2 as pb

piece = bytes(int(sys.argv[2]))
join = joined if sys.argv[1] == "sent" else b"".join
if sys.argv[1] == "received":
    reply = pb.AttendStreamReply(id=1, attend=pb.AttendResponse(output={"data": piece}))
    decode_replies(pb.AttendStreamResponse(replies=[reply] * 8).SerializeToString())
for times in (3, 20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        messages = [join([piece] * 8) for _ in range(6)]
        del messages
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // times)
"""
PIECE = 100_000
PAGES = 6 * 8 * PIECE // os.sysconf("SC_PAGE_SIZE")
SMALL = 15_000
"""Of a message that by itself would be kept, but not several of them."""


def faults(seen: str, piece: int = PIECE, **variables: str) -> int:
    """The number that the program prints, run with only these variables for the allocator."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, seen, str(piece)],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(done.stdout)


@pytest.mark.parametrize("piece", [PIECE, SMALL])
@pytest.mark.parametrize("seen", ["sent", "received"])
def test_memory_of_messages_is_kept(seen: str, piece: int) -> None:
    assert faults(seen, piece) < PAGES / 20 * piece / PIECE


@pytest.mark.parametrize(
    "variables",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}],
)
def test_what_the_environment_decides_stays(variables: dict[str, str]) -> None:
    assert faults("sent", **variables) > PAGES / 2


def test_glibc_alone_keeps_little() -> None:
    """Else the others would show nothing."""
    assert faults("nothing") > PAGES / 2
    assert faults("nothing", SMALL) > PAGES / 4 * SMALL / PIECE
