"""A server's caches, and both ways of answering messages to them: at once, by the native library, and the ordinary way.

For tests that compare the two, or check what either leaves behind. The ordinary way is a request's life cycle here,
without the queue: enter, begin, run, end, leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any, Final

import messages
import numpy as np
import pytest
import torch
from limits import LIMITS
from stores import store_of

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.callers import ALL_ROLES, Caller
from attnserve_server.caches.cache import Cache
from attnserve_server.caches.fast_path import CacheFastPath, Turn
from attnserve_server.caches.pages import PagePool
from attnserve_server.caches.request import CachedRequest, read_attend
from attnserve_server.caches.shape import CacheShape
from attnserve_server.caches.work import CacheHost
from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.errors import RequestError
from attnserve_server.native import library
from attnserve_server.native.messages import Messages
from attnserve_server.requests.request import Request
from attnserve_server.requests.work import Phases

PAGE_BYTES: Final = 1024
PAGES: Final = 256
SHAPE: Final = CacheShape(2, 8, 8, 1, "float32")
"""A page holds 8 tokens of this shape."""
MOST: Final = 10**9
"""The most that a message may cost."""
Array = np.ndarray[Any, np.dtype[Any]]


def caller(name: str | None = None) -> Caller:
    """A caller who may do everything."""
    return Caller(name, ALL_ROLES, f"the share of {name}")


class Stepping:
    """The caches, and what answers requests to them."""

    def __init__(self, device: CpuDevice, of: Messages, pages: int = PAGES) -> None:
        self.device = device
        self.messages = of
        self.store = store_of(pages, 1000, page_bytes=PAGE_BYTES)
        self.host = CacheHost(self.store, PagePool.of(device, pages * PAGE_BYTES, PAGE_BYTES), "")
        self.fast_path = CacheFastPath(self.host, of, LIMITS)

    def create(
        self,
        tokens: int = 0,
        shape: CacheShape = SHAPE,
        ttl: float | None = None,
        owner: str | None = None,
        seed: int = 0,
    ) -> Cache:
        """A cache with `tokens` unit-normal tokens in each layer."""
        cache = self.store.create(shape, ttl, monotonic(), owner)
        generator = torch.Generator().manual_seed(seed)
        for layer in range(shape.layers):
            reservation = self.store.reserve([(cache, layer, tokens)], monotonic())
            (placement,) = self.store.place(reservation, monotonic())
            key, value = (
                torch.randn(shape.num_kv_heads, tokens, width, generator=generator)
                for width in (shape.head_dim, shape.value_dim)
            )
            self.host.pages.write(shape, placement, key, value)
            self.store.cancel(reservation)
        return cache

    def read(self, message: bytes, owner: str | None = None, begin: int = 0) -> Request | CachedRequest:
        """A request as the ordinary way reads it, from `begin` to the end of a message. Raises RequestError."""
        read = read_attend(self.host, caller(owner), message, begin, len(message), LIMITS)
        assert isinstance(read, Request | CachedRequest)
        return read

    def learn(self, *requests: pb.AttendRequest, owner: str | None = None) -> list[bool]:
        """Makes the requests' layouts known. Returns for each whether it could be learnt."""
        found = []
        for request in requests:
            message = request.SerializeToString()
            read = self.read(message, owner)
            assert isinstance(read, CachedRequest)
            layout = self.fast_path.layout_of(read)
            found.append(
                layout is not None
                and self.messages.learn(self.fast_path.key_of(read), layout, read.payloads, 0, len(message))
            )
        return found

    def turn(self, message: bytes, owner: str | None = None, most: int = MOST) -> Turn | None:
        """The turn of the requests in a message, all of them to caches; None if they cannot be answered at once."""
        asked = self.messages.read_message(message, 64)
        return self.fast_path.begin(owner, asked, message, most) if asked.requests > 0 else None

    def answer(self, message: bytes, owner: str | None = None) -> list[pb.AttendResponse] | None:
        """The replies, if the message can be answered at once."""
        turn = self.turn(message, owner)
        if turn is None:
            return None
        computed = False
        try:
            self.messages.compute(turn.effort, 1, 2, 3)
            computed = True
        except ArithmeticError:
            return None
        finally:
            turn.end(failed=not computed)
        return [reply.attend for reply in pb.AttendStreamResponse.FromString(self.messages.write()).replies]

    def ordinary(self, request: pb.AttendRequest, owner: str | None = None) -> pb.AttendResponse | type[RequestError]:
        """The reply to one request by the ordinary way, or the type of its error."""
        try:
            read = self.read(request.SerializeToString(), owner)
            assert isinstance(read, CachedRequest)
            read.enter()
        except RequestError as error:
            return type(error)
        failed = True
        try:
            read.begin()
            (result,) = self._run(read)
            failed = False
        except RequestError as error:
            return type(error)
        finally:
            read.end(failed)
            read.leave()
        pieces, _ = read.encode(result, Phases(0.0, 0.0, 0.0, 0.0, 0.0), 1)
        return pb.AttendResponse.FromString(b"".join(pieces))

    def _run(self, request: CachedRequest) -> Any:
        done = request.run_batch(self.device, [request])
        while done.again:
            done = request.run_batch(self.device, [request])
        return done.results

    def assert_at_rest(self) -> None:
        """Asserts that no cache is in use and no page is reserved."""
        assert self.store.reserved_pages == 0
        assert all(cache.users == 0 for cache in self.store._caches.values())


def step(
    *caches: Cache | str,
    seed: int = 0,
    append: bool = False,
    expected: Sequence[int | None] = (),
    append_id: int = 0,
    layer: int = 0,
    heads: int = 2,
    dtype: Any = np.float32,
    shape: CacheShape = SHAPE,
    **fields: Any,
) -> pb.AttendRequest:
    """A request of one query for each cache, optionally with a token to append to each; the seed gives the contents."""
    rng = np.random.default_rng(seed)

    def tokens(count: int, width: int) -> Array:
        return rng.standard_normal((len(caches), count, 1, width)).astype(dtype)

    lengths = [*expected, *[None] * (len(caches) - len(expected))]
    references = [
        pb.CacheReference(
            name=each if isinstance(each, str) else each.name,
            layer=layer,
            expected_length=length,
            append_id=append_id,
        )
        for each, length in zip(caches, lengths, strict=True)
    ]
    fields["query"] = tokens(heads, shape.head_dim)
    if append:
        fields |= {
            "key": tokens(shape.num_kv_heads, shape.head_dim),
            "value": tokens(shape.num_kv_heads, shape.value_dim),
        }
    given = {name: messages.tensor(each) if isinstance(each, np.ndarray) else each for name, each in fields.items()}
    return pb.AttendRequest(caches=references, **given)


def message_of(*requests: pb.AttendRequest) -> bytes:
    """A message of a stream with these requests."""
    return pb.AttendStreamRequest(
        calls=[pb.AttendStreamCall(id=number, attend=request) for number, request in enumerate(requests, 1)]
    ).SerializeToString()


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(2, 0, library.best("auto"))
    yield device
    device.close()


@pytest.fixture
def stepping_(device: CpuDevice) -> Iterator[Stepping]:
    stepping_ = another(device)
    yield stepping_
    stepping_.assert_at_rest()


def another(device: CpuDevice, **options: Any) -> Stepping:
    """New caches on a device."""
    assert device.native is not None
    return Stepping(device, Messages(device.native.library, device._threads_for), **options)


def assert_same(found: pb.AttendResponse, expected: object) -> None:
    """Asserts that two replies are the same to the bit, but for timings and batch sizes."""
    assert isinstance(expected, pb.AttendResponse), expected
    for reply in (found, expected):
        reply.ClearField("timings")
        reply.ClearField("batch_size")
    assert found == expected
