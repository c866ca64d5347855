"""Messages that ask for little attention, read, computed and answered as a whole by the library.

In: messages, and layouts of requests, learnt from some that came before. Out: what a message asks for, and the message
that answers it. What has no known layout, or is unusual in any way, is for others: nothing is refused here.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from google.protobuf.duration_pb2 import Duration

from attnserve._fields import LENGTH_DELIMITED
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.native import library
from attnserve_server.native.library import CALL_BYTES, Function, Library, Threads, pack
from attnserve_server.native.payloads import ALIGNMENT, address_of_bytes, applies
from attnserve_server.native.requests import planned
from attnserve_server.reply import reply_template

if TYPE_CHECKING:
    from attnserve_server.problem import Problem
    from attnserve_server.request import Request

MOST_REQUESTS: Final = 64
MOST_SEQUENCES: Final = 256
MOST_LAYOUTS: Final = 256
"""Of a message, of a request, and as many as are remembered: see `messages.h`."""
MOST_RESULT_BYTES: Final = 1 << 20
"""What the results of a message may take."""

_LAYOUT: Final = struct.Struct("=21q")
_NOWHERE: Final = (0,) * 9
TAGS: Final = tuple(
    number << 3 | wire_type
    for number, wire_type in (
        (pb.AttendStreamRequest.CALLS_FIELD_NUMBER, LENGTH_DELIMITED),
        (pb.AttendStreamCall.ID_FIELD_NUMBER, 0),
        (pb.AttendStreamCall.TIMEOUT_FIELD_NUMBER, LENGTH_DELIMITED),
        (pb.AttendStreamCall.ATTEND_FIELD_NUMBER, LENGTH_DELIMITED),
        (Duration.SECONDS_FIELD_NUMBER, 0),
        (Duration.NANOS_FIELD_NUMBER, 0),
        (pb.AttendStreamResponse.REPLIES_FIELD_NUMBER, LENGTH_DELIMITED),
        (pb.AttendStreamReply.ID_FIELD_NUMBER, 0),
        (pb.AttendStreamReply.ATTEND_FIELD_NUMBER, LENGTH_DELIMITED),
        (pb.AttendResponse.TIMINGS_FIELD_NUMBER, LENGTH_DELIMITED),
        (pb.AttendResponse.BATCH_SIZE_FIELD_NUMBER, 0),
        (pb.Timings.DECODE_NS_FIELD_NUMBER, 0),
        (pb.Timings.QUEUE_NS_FIELD_NUMBER, 0),
        (pb.Timings.COMPUTE_NS_FIELD_NUMBER, 0),
    )
)
"""Of the fields of messages, in the order of `struct known`."""
_COUNT: Final = len(TAGS)
_LENGTHS: Final = _COUNT + 1
_LAYOUTS: Final = _LENGTHS + MOST_LAYOUTS
_USED: Final = _LAYOUTS + MOST_LAYOUTS
_KNOWN_WORDS: Final = _USED + MOST_LAYOUTS
"""Places in a `struct known`."""
_ASKED: Final = struct.Struct("=9q")
_COMPUTE, _ANSWER_BYTES, _IDS = 9, 10, 20
_ASKED_WORDS: Final = _IDS + 4 * MOST_REQUESTS
"""Places in a `struct asked`."""

_new_bytes: Final = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = [ctypes.c_char_p, ctypes.c_ssize_t], ctypes.py_object


class _Kept(NamedTuple):
    """A layout that is known, where the library has it, and the problem of all requests that have it."""

    problem: Problem
    memory: ctypes.Array[ctypes.c_char]


class Asked(NamedTuple):
    """What a message asks for: so many requests; 0 if it is for others, and -1 if that is for a layout that is not
    known. Bytes, costs, FLOPs and tokens are of all together; `timeout` is the shortest, in nanoseconds.
    """

    requests: int
    calls: int
    request_bytes: int
    result_bytes: int
    cost: int
    effort: int
    flops: int
    tokens: int
    timeout: int


class Messages:
    """Who reads and answers them, one after the other, and the layouts that are known."""

    def __init__(self, kernel: Library, threads_for: Callable[[int], Threads | None]) -> None:
        """Everything is computed by `kernel`, what takes some effort by the threads for that. Raises OSError if the
        library is of another version.
        """
        self._attend = kernel.attend_function.address
        self._threads_for = threads_for
        functions, address, size = ctypes.PyDLL(str(library.PATH)), ctypes.c_void_p, ctypes.c_int64
        self._read_message, self._read_request = functions.attnserve_read_message, functions.attnserve_read_request
        self._write = functions.attnserve_write_message
        self._read_message.argtypes = [address, ctypes.c_char_p, size, size, address, size, address]
        self._read_request.argtypes = [address, ctypes.c_char_p, size, address, size, address]
        self._write.argtypes = [address, address, address]
        for function in (self._read_message, self._read_request, self._write):
            function.restype = None
        self._compute = Function("compute_message", None, address, address, size, size, address)
        sizes = (functions.attnserve_layout_bytes, functions.attnserve_known_bytes, functions.attnserve_asked_bytes)
        for function in sizes:
            function.restype = size
        layout_bytes, known_bytes, asked_bytes = (function() for function in sizes)
        self._layout_bytes = layout_bytes
        if (known_bytes, asked_bytes) != (8 * _KNOWN_WORDS, 8 * _ASKED_WORDS + MOST_SEQUENCES * CALL_BYTES):
            raise OSError(f"{library.PATH} is of another version, which reads messages otherwise")
        self._known_memory, self._asked_memory = bytearray(known_bytes), bytearray(asked_bytes)
        self._results_memory = bytearray(MOST_RESULT_BYTES + ALIGNMENT)
        self._known, self._asked = memoryview(self._known_memory).cast("q"), memoryview(self._asked_memory).cast("q")
        self._known[:_COUNT] = memoryview(struct.pack(f"={_COUNT}q", *TAGS)).cast("q")
        self._known_at, self._asked_at = map(_address, (self._known_memory, self._asked_memory))
        self._results_at = -(-_address(self._results_memory) // ALIGNMENT) * ALIGNMENT
        self._kept: list[_Kept] = []
        self._places: dict[Problem, int] = {}
        self._next = 0

    def read_message(self, message: bytes, most: int) -> Asked:
        """What a message of a stream asks for, which has at most so many requests."""
        self._read_message(
            self._known_at, message, len(message), most, self._results_at, MOST_RESULT_BYTES, self._asked_at
        )
        return Asked._make(_ASKED.unpack_from(self._asked_memory))

    def read_request(self, message: bytes) -> Asked:
        """What the message of a unary call asks for."""
        self._read_request(self._known_at, message, len(message), self._results_at, MOST_RESULT_BYTES, self._asked_at)
        return Asked._make(_ASKED.unpack_from(self._asked_memory))

    def ids(self, asked: Asked) -> list[int]:
        """The ids of the requests of the message that was read last."""
        return self._asked[_IDS : _IDS + asked.requests].tolist()

    def compute(self, asked: Asked, decode_ns: int, queue_ns: int) -> int:
        """Computes what that message asks for, which must still be there, and whose decoding and waiting took each
        request so long; returns how many nanoseconds computing took. Raises MemoryError, and ArithmeticError if results
        are not all finite.
        """
        threads = self._threads_for(asked.effort)
        if self._compute(threads, self._known_at, self._asked_at, decode_ns, queue_ns, self._attend):
            raise ArithmeticError("not all results are finite")
        return self._asked[_COMPUTE]

    def write(self) -> bytes:
        """The answer to it, which must have been computed: replies on a stream, or that to a unary call."""
        answer: bytes = _new_bytes(None, self._asked[_ANSWER_BYTES])  # which nobody else has yet
        self._write(self._known_at, self._asked_at, address_of_bytes(answer))
        return answer

    def knows(self, problem: Problem) -> bool:
        """Whether the layout of its requests is known."""
        return problem in self._places

    def learn(self, request: Request, message: bytes, begin: int) -> bool:
        """Knows the layout of a request, which begins at a place of a message, from now on. Returns False if requests
        like it are for others: there is something else to do for them.
        """
        problem, payloads, extent = request.problem, request.payloads, request.extent
        if not (payloads.buffer is message and len(payloads) == len(problem.tensors) == 3 and applies(problem)):
            return False
        if not (
            problem.query_length and 0 < problem.batch <= MOST_SEQUENCES and extent.reply_bytes <= MOST_RESULT_BYTES
        ):
            return False
        plan = planned(problem, request.spans)
        (sequences,) = plan.sequences
        sizes = [plan.output_bytes, *([plan.reply_bytes - plan.lse_at] if plan.lse_at else [])]
        head, *others = reply_template(problem, sizes)
        middle, tail = (others[0], others[1]) if plan.lse_at else (b"", others[0])
        offset = payloads.at - begin
        places = [(offset + start, offset + end) for start, end in payloads.places]
        edges = [0, *chain.from_iterable(places), request.received_bytes]
        pieces = [(start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]
        fixed = b"".join(message[begin + start : begin + start + length] for start, length in pieces)
        fields = _LAYOUT.pack(
            request.received_bytes,
            len(pieces),
            len(fixed),
            sequences.number,
            *(places[place][0] for place in plan.inputs),
            *plan.steps[:5],
            plan.output_bytes,
            sum(sizes) - plan.output_bytes,
            len(head),
            len(middle),
            len(tail),
            request.cost,
            request.effort,
            request.flops,
            request.query_tokens,
        )
        behind = struct.pack(f"={2 * len(pieces)}q", *chain.from_iterable(pieces)) + fixed + head + middle + tail
        self._keep(problem, request.received_bytes, fields + pack(_NOWHERE, sequences.shape), behind)
        return True

    def _keep(self, problem: Problem, length: int, layout: bytes, behind: bytes) -> None:
        """Remembers a layout: if there are as many as can be, in the place of one that was not used of late."""
        place = self._next
        while len(self._kept) == MOST_LAYOUTS and self._known[_USED + place]:
            self._known[_USED + place] = 0
            place = (place + 1) % MOST_LAYOUTS
        self._next = (place + 1) % MOST_LAYOUTS
        assert len(layout) == self._layout_bytes
        memory = ctypes.create_string_buffer(layout + behind, len(layout) + len(behind))
        if place < len(self._kept):
            del self._places[self._kept[place].problem]
        self._kept[place : place + 1] = [_Kept(problem, memory)]
        self._places[problem] = place
        self._known[_LENGTHS + place], self._known[_LAYOUTS + place] = length, ctypes.addressof(memory)
        self._known[_USED + place] = 1
        self._known[_COUNT] = len(self._kept)


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
