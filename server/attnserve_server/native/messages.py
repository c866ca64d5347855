"""Messages that ask for little work, read, computed and answered as a whole by the library.

In: messages, and layouts of requests, learnt from earlier ones. Out: what a message asks for, and the message that
answers it. Messages without a known layout, or unusual in any way, are left to other code: nothing is refused here.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final, NamedTuple

from google.protobuf.duration_pb2 import Duration

from attnserve._fields import LENGTH_DELIMITED
from attnserve._wire import Payloads
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.host.cpus import CACHE_LINE
from attnserve_server.native import library
from attnserve_server.native.layouts import LAYOUT_BYTES, MOST_RESULT_BYTES, MOST_SEQUENCES, Layout, packed
from attnserve_server.native.library import CALL_BYTES, Function, Library, Threads
from attnserve_server.native.payloads import address_of_bytes

MOST_REQUESTS: Final = 64
MOST_LAYOUTS: Final = 256
"""Limits on the requests of a message, and on the layouts remembered: see `messages.h`."""

TAGS: Final = tuple(
    number << 3 | wire_type
    for number, wire_type in (
        (pb.AttendStreamRequest.CALLS_FIELD_NUMBER, LENGTH_DELIMITED),
        (pb.AttendStreamCall.ID_FIELD_NUMBER, 0),
        (pb.AttendStreamCall.TIMEOUT_FIELD_NUMBER, LENGTH_DELIMITED),
        (pb.AttendStreamCall.ATTEND_FIELD_NUMBER, LENGTH_DELIMITED),
        (Duration.SECONDS_FIELD_NUMBER, 0),
        (Duration.NANOS_FIELD_NUMBER, 0),
        (pb.AttendRequest.CACHES_FIELD_NUMBER, LENGTH_DELIMITED),
        (pb.CacheReference.NAME_FIELD_NUMBER, LENGTH_DELIMITED),
        (pb.CacheReference.LAYER_FIELD_NUMBER, 0),
        (pb.CacheReference.EXPECTED_LENGTH_FIELD_NUMBER, 0),
        (pb.CacheReference.APPEND_ID_FIELD_NUMBER, 1),
        (pb.AttendStreamResponse.REPLIES_FIELD_NUMBER, LENGTH_DELIMITED),
        (pb.AttendStreamReply.ID_FIELD_NUMBER, 0),
        (pb.AttendStreamReply.ATTEND_FIELD_NUMBER, LENGTH_DELIMITED),
        (pb.AttendResponse.TIMINGS_FIELD_NUMBER, LENGTH_DELIMITED),
        (pb.AttendResponse.BATCH_SIZE_FIELD_NUMBER, 0),
        (pb.AttendResponse.CACHE_LENGTHS_FIELD_NUMBER, LENGTH_DELIMITED),
        (pb.Timings.DECODE_NS_FIELD_NUMBER, 0),
        (pb.Timings.QUEUE_NS_FIELD_NUMBER, 0),
        (pb.Timings.STAGING_NS_FIELD_NUMBER, 0),
        (pb.Timings.COMPUTE_NS_FIELD_NUMBER, 0),
    )
)
"""Tags of the fields of messages, in the order of `struct known`."""
_COUNT: Final = len(TAGS)
_LENGTHS: Final = _COUNT + 1
_LAYOUTS: Final = _LENGTHS + MOST_LAYOUTS
_USED: Final = _LAYOUTS + MOST_LAYOUTS
_KNOWN_WORDS: Final = _USED + MOST_LAYOUTS
"""Indexes into a `struct known`."""
_ASKED: Final = struct.Struct("=10q")
_COMPUTE, _ANSWER_BYTES, _IDS = 10, 11, 21
_BEGINS, _PLACES, _FIRST_CALLS, _REFERENCES = (_IDS + number * MOST_REQUESTS for number in (1, 2, 3, 7))
REFERENCE: Final = 6
_ASKED_WORDS: Final = _REFERENCES + REFERENCE * MOST_SEQUENCES
"""Indexes into a `struct asked`."""
_CACHE_LENGTH: Final = 5
"""Index into a `struct reference`."""
_KEYS: Final = struct.Struct("=2q")
_KEYS_AT, _LENGTH_AT = 8, 96
"""Byte offsets in a `struct call`: of the addresses of keys and values, and of the number of keys and `offset`."""

_new_bytes: Final = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = [ctypes.c_char_p, ctypes.c_ssize_t], ctypes.py_object


class _Kept(NamedTuple):
    """A known layout: what its requests have in common, where their payloads are, and the memory that the library reads
    it from.
    """

    key: Hashable
    layout: Layout
    places: Sequence[tuple[int, int]]
    memory: ctypes.Array[ctypes.c_char]


class Cached(NamedTuple):
    """A request to caches in the message that was read last. `places` are those of its payloads, counted from where it
    begins. `references` has `REFERENCE` numbers for each reference: where the name is in the message, how many bytes it
    has, the layer, the expected length or -1, the append's id (64 bits), and the length that `attend_to` sets.
    """

    layout: Layout
    places: Sequence[tuple[int, int]]
    begin: int
    request_bytes: int
    first_call: int
    references: list[int]


class Asked(NamedTuple):
    """What a message asks for. `requests` is 0 if the message is left to other code, and -1 if that is because of an
    unknown layout. Bytes, costs, FLOPs and tokens are totals, without what depends on caches; `timeout` is the
    shortest, in nanoseconds; `cached` of the requests are to caches.
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
    cached: int


class Messages:
    """Reads and answers messages, one after the other, and keeps the known layouts."""

    def __init__(self, kernel: Library, threads_for: Callable[[int], Threads | None]) -> None:
        """Everything is computed by `kernel`, with the threads that `threads_for` gives for the effort. Raises OSError
        if the library is of another version.
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
        self._append = functions.attnserve_append_token
        self._append.argtypes, self._append.restype = [address, size, address, address, size], size
        self._compute = Function("compute_message", None, address, address, size, size, size, address)
        sizes = (functions.attnserve_layout_bytes, functions.attnserve_known_bytes, functions.attnserve_asked_bytes)
        for function in sizes:
            function.restype = size
        layout_bytes, known_bytes, asked_bytes = (function() for function in sizes)
        ours = LAYOUT_BYTES, 8 * _KNOWN_WORDS, 8 * _ASKED_WORDS + MOST_SEQUENCES * CALL_BYTES
        if (layout_bytes, known_bytes, asked_bytes) != ours:
            raise OSError(f"{library.PATH} is of another version, which reads messages otherwise")
        self._known_memory, self._asked_memory = bytearray(known_bytes), bytearray(asked_bytes)
        self._results_memory = bytearray(MOST_RESULT_BYTES + CACHE_LINE)
        self._known, self._asked = memoryview(self._known_memory).cast("q"), memoryview(self._asked_memory).cast("q")
        self._known[:_COUNT] = memoryview(struct.pack(f"={_COUNT}q", *TAGS)).cast("q")
        self._known_at, self._asked_at = map(_address, (self._known_memory, self._asked_memory))
        self._results_at = -(-_address(self._results_memory) // CACHE_LINE) * CACHE_LINE
        self._kept: list[_Kept] = []
        self._places: dict[Hashable, int] = {}
        self._next = 0

    def read_message(self, message: bytes, most: int) -> Asked:
        """What a message of a stream asks for, which has at most `most` requests."""
        self._read_message(
            self._known_at, message, len(message), most, self._results_at, MOST_RESULT_BYTES, self._asked_at
        )
        return Asked._make(_ASKED.unpack_from(self._asked_memory))

    def read_request(self, message: bytes) -> Asked:
        """What the message of a unary call asks for."""
        self._read_request(self._known_at, message, len(message), self._results_at, MOST_RESULT_BYTES, self._asked_at)
        return Asked._make(_ASKED.unpack_from(self._asked_memory))

    def ids(self, asked: Asked) -> list[int]:
        """The ids of the requests in the message that was read last."""
        return self._asked[_IDS : _IDS + asked.requests].tolist()

    def cached(self, asked: Asked) -> Iterator[Cached]:
        """The requests to caches in the message that was read last. Before the message is computed, `attend_to` must
        say for each of their calls where its keys are.
        """
        words = self._asked
        for number in range(asked.requests):
            place = words[_PLACES + number]
            _, layout, places, _ = self._kept[place]
            if layout.caches is not None:
                first = words[_FIRST_CALLS + number]
                at = _REFERENCES + REFERENCE * first
                references = words[at : at + REFERENCE * layout.sequences].tolist()
                yield Cached(layout, places, words[_BEGINS + number], self._known[_LENGTHS + place], first, references)

    def append(self, call: int, keys: int, values: int, slot: int) -> bool:
        """Appends a call's token to a cache of the request's dtype: at index `slot` of the page whose keys and values
        are at these addresses. Must come before `attend_to`, which overwrites where the token is. Returns whether all
        of the token is finite.
        """
        return bool(self._append(self._asked_at, call, keys, values, slot))

    def attend_to(self, call: int, key: int, value: int, kv_length: int, offset: int, length: int) -> None:
        """Makes a call attend to the first `kv_length` tokens of a cache of length `length`, in pages whose addresses
        are at `key` and `value`, with its first query at position `offset`.
        """
        at = 8 * _ASKED_WORDS + CALL_BYTES * call
        _KEYS.pack_into(self._asked_memory, at + _KEYS_AT, key, value)
        _KEYS.pack_into(self._asked_memory, at + _LENGTH_AT, kv_length, offset)
        self._asked[_REFERENCES + REFERENCE * call + _CACHE_LENGTH] = length

    def compute(self, effort: int, decode_ns: int, queue_ns: int, staging_ns: int) -> int:
        """Computes what the message that was read last asks for; it must still be in memory. `effort` is in FLOPs. The
        times are what decoding, queueing and staging took each request. Returns the nanoseconds that computing took.
        Raises MemoryError, and ArithmeticError if not all results are finite.
        """
        threads = self._threads_for(effort)
        if self._compute(threads, self._known_at, self._asked_at, decode_ns, queue_ns, staging_ns, self._attend):
            raise ArithmeticError("not all results are finite")
        return self._asked[_COMPUTE]

    def write(self) -> bytes:
        """The answer to that message, once it is computed: the replies of a stream, or the reply to a unary call."""
        answer: bytes = _new_bytes(None, self._asked[_ANSWER_BYTES])  # writable, as nobody else has it yet
        self._write(self._known_at, self._asked_at, address_of_bytes(answer))
        return answer

    def knows(self, key: Hashable) -> bool:
        """Whether the layout of the requests with this key is known."""
        return key in self._places

    def learn(self, key: Hashable, layout: Layout, payloads: Payloads, begin: int, length: int) -> bool:
        """Remembers a layout: that of a request of `length` bytes, which begins at `begin` in the message with its
        payloads. When all places are taken, it replaces one that was not used recently. Returns False if the library
        cannot represent it.
        """
        found = packed(layout, payloads, begin, length)
        if found is None:
            return False
        place = self._next
        while len(self._kept) == MOST_LAYOUTS and self._known[_USED + place]:
            self._known[_USED + place] = 0
            place = (place + 1) % MOST_LAYOUTS
        self._next = (place + 1) % MOST_LAYOUTS
        memory = ctypes.create_string_buffer(found, len(found))
        if place < len(self._kept):
            del self._places[self._kept[place].key]
        offset = payloads.at - begin
        places = [(offset + start, offset + end) for start, end in payloads.places]
        self._kept[place : place + 1] = [_Kept(key, layout, places, memory)]
        self._places[key] = place
        self._known[_LENGTHS + place], self._known[_LAYOUTS + place] = length, ctypes.addressof(memory)
        self._known[_USED + place] = 1
        self._known[_COUNT] = len(self._kept)
        return True


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
