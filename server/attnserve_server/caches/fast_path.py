"""Requests to caches on the fast path: the turn of each comes as soon as it is read, since nothing is queued before it.

In: messages that have been read, with requests whose layouts the library knows. Out: a `Turn`, which means that what
its requests append has been written, and that the library has all that it needs to compute them. Or None, if anything
is wrong or unusual: then nothing has changed, and the message takes the ordinary path.

Steps come to the same caches again and again. Each finds little but keys and values in the processor's cache, so that
it pays to make few objects anew: a finished request is kept, and reused for the next one that differs from it in its
contents alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from attnserve import _dtypes
from attnserve._wire import Payloads
from attnserve_server.caches.append import append_tokens
from attnserve_server.caches.native_requests import planned
from attnserve_server.caches.references import Reference
from attnserve_server.caches.request import CachedRequest, named, request_to
from attnserve_server.caches.work import CacheHost
from attnserve_server.errors import RequestError
from attnserve_server.native.layouts import MOST_RESULT_BYTES, MOST_SEQUENCES, Layout
from attnserve_server.native.messages import REFERENCE, Asked, Cached, Messages
from attnserve_server.requests.limits import RequestLimits

MOST_KEPT: Final = 8192
"""The most caches of all requests that are kept; some of these caches may be gone by now."""

MOST_ID: Final = 2**64 - 1
"""The largest append id. Ids are unsigned, but the library's numbers are signed, so that they have to be masked by
this.
"""

_PER_SEQUENCE: Final = frozenset(("kv_lengths", "query_offset"))
"""Tensors beside query, key and value that requests of a layout may have, with different contents each time."""

_NAMES: Final = {number: dtype.name for number, dtype in _dtypes.NUMPY.items()}
"""The names of the dtypes of requests, as caches spell them."""

_NO_PAYLOADS: Final = Payloads(b"", 0, ())


@dataclass(slots=True)
class Turn:
    """The requests to caches in one message, at their turn; and the effort and FLOPs of the whole message."""

    effort: int
    flops: int
    requests: list[CachedRequest] = field(default_factory=list)

    def end(self, failed: bool) -> None:
        """Ends the requests: they are computed, or have failed and nothing remains of them."""
        for request in self.requests:
            request.end(failed)
            request.leave()
            request.payloads = _NO_PAYLOADS


class CacheFastPath:
    """The caches of a server on a CPU, as the fast path uses them."""

    def __init__(self, host: CacheHost, messages: Messages, limits: RequestLimits) -> None:
        """`messages` computes the calls."""
        self._host = host
        self._messages = messages
        self._limits = limits
        self._kept: dict[Hashable, CachedRequest] = {}
        self._kept_caches = 0

    @staticmethod
    def key_of(request: CachedRequest) -> Hashable:
        """What all requests of a layout have in common. Their size is part of it: it varies with the lengths that they
        expect of caches.
        """
        return request.problem, request.uses[0].cache.shape, request.received_bytes

    def layout_of(self, request: CachedRequest) -> Layout | None:
        """The layout of a request; None if it appends more than one token to a cache, or such requests need more than
        the library does.
        """
        problem, shape = request.problem, request.uses[0].cache.shape
        names = ("query", "key", "value") if problem.kv_length else ("query",)
        payloads = [spec.payload for spec in problem.tensors.values() if spec.payload >= 0]
        if problem.tensors.keys() - _PER_SEQUENCE != set(names) or problem.kv_length > 1:
            return None
        if len(payloads) != len(request.payloads) or len(payloads) != len(problem.tensors):
            return None
        plan = planned(problem, shape, self._host.pages.memory.layout(shape))
        if plan is None or not problem.query_length or problem.batch > MOST_SEQUENCES:
            return None
        if request.extent.reply_bytes > MOST_RESULT_BYTES:
            return None
        inputs = [problem.tensors[name] for name in (*names, "query", "query")[:3]]  # without keys, the query twice
        query, key, value = (spec.size // problem.batch for spec in inputs)
        return Layout(
            problem=problem,
            sequences=problem.batch,
            shape=plan.shape.packed,
            inputs=tuple(spec.payload for spec in inputs),
            steps=(query, key, value, plan.steps.output, plan.steps.lse),
            output_bytes=plan.output_bytes,
            lse_bytes=plan.lse_bytes,
            tokens=request.extent.query_tokens,
            caches=shape,
        )

    def begin(self, owner: str | None, asked: Asked, message: bytes, most: int) -> Turn | None:
        """Begins the turn of all requests to an owner's caches in the message that was read last: their appends are
        written. None, with nothing changed, if that is impossible or if the whole message costs more than `most`.
        """
        requests, keys, first_calls = [], [], []
        cost, effort, flops, now = asked.cost, asked.effort, asked.flops, monotonic()
        try:
            for cached in self._messages.cached(asked):
                key, request = self._request(owner, cached, message, now)
                if request is None:
                    return None
                requests.append(request)
                keys.append(key)
                first_calls.append(cached.first_call)
                extent, effort = request.extent, effort + request.effort
                cost, flops = cost + extent.cost, flops + extent.flops
        except (RequestError, UnicodeDecodeError):
            return None
        if cost > most or _in_line(requests):
            return None
        turn, whole = Turn(effort, flops), False
        try:
            for first_call, request in zip(first_calls, requests, strict=True):
                request.enter()
                turn.requests.append(request)
                request.begin()
                self._complete(first_call, request)
            whole = True
        except (RequestError, MemoryError):
            return None
        finally:
            if not whole:
                turn.end(failed=True)
        for key, request in zip(keys, requests, strict=True):
            self._keep(key, request)
        return turn

    def _request(
        self, owner: str | None, cached: Cached, message: bytes, now: float
    ) -> tuple[Hashable, CachedRequest | None]:
        """A request whose turn is yet to begin, and the key under which it is to be kept. None in place of the request
        if its caches are not as usual, or are in use. Raises RequestError, and UnicodeDecodeError.
        """
        layout, places, begin, size, _, numbers = cached
        starts, sizes, layers, lengths, ids = (numbers[place::REFERENCE] for place in range(5))
        names = [message[at : at + name_size] for at, name_size in zip(starts, sizes, strict=True)]
        key = id(layout.problem), size, owner, *names, *layers
        payloads = Payloads(message, begin, places)
        expected_lengths = [None if length < 0 else length for length in lengths]
        append_ids = [append_id & MOST_ID for append_id in ids]
        request = self._take(key)  # taken out: an equal one in the same message is a request of its own
        if request is None:
            decoded = [name.decode() for name in names]
            references = list(map(Reference, decoded, layers, expected_lengths, append_ids))
            caches = named(self._host, owner, references)
            request = request_to(self._host, caches, references, layout.problem, payloads, size, self._limits)
        else:
            for use in request.uses:
                if use.cache.gone or use.cache.expired(now):
                    return key, None
            request.renew(payloads, expected_lengths, append_ids)
        if request.uses[0].cache.shape != layout.caches:  # the bytes of a request do not tell that
            return key, None
        for use in request.uses:
            if use.cache.users:
                return key, None
        return key, request

    def _keep(self, key: Hashable, request: CachedRequest) -> None:
        """Keeps a request, to be reused once it is finished, and forgets all others if they are too many."""
        self._take(key)
        if self._kept_caches + len(request.uses) > MOST_KEPT:
            self._kept.clear()
            self._kept_caches = 0
        self._kept[key] = request
        self._kept_caches += len(request.uses)

    def _take(self, key: Hashable) -> CachedRequest | None:
        """Takes out the request that is kept under a key; None if there is none."""
        request = self._kept.pop(key, None)
        if request is not None:
            self._kept_caches -= len(request.uses)
        return request

    def _complete(self, first_call: int, request: CachedRequest) -> None:
        """Writes what a request appends, and points its calls at its caches."""
        pool = self._host.pages
        if request.placements and not _as_they_are(request):
            append_tokens(pool, request)
        elif request.placements:
            self._append(first_call, request)
        found = zip(request.uses, request.kv_lengths, request.offsets, request.lengths, strict=True)
        for call, (use, kv_length, offset, length) in enumerate(found, first_call):
            key, value, _ = pool.memory.addresses(use.cache.table(use.layer))
            self._messages.attend_to(call, key, value, kv_length, offset, length)

    def _append(self, first_call: int, request: CachedRequest) -> None:
        """Writes what a request appends, unconverted, where it has been placed."""
        pool, shape = self._host.pages, request.uses[0].cache.shape
        for call, (copies, ((page, slot, _),)) in enumerate(request.placements, first_call):
            if copies:
                pool.copy(copies)
            finite = self._messages.append(call, *pool.memory.page(page), slot)
            pool.note(shape, page, slot, finite=finite)


def _as_they_are(request: CachedRequest) -> bool:
    """Whether keys and values are stored in the dtype of the request."""
    return _NAMES[request.problem.dtype] == request.uses[0].cache.shape.dtype


def _in_line(requests: Sequence[CachedRequest]) -> bool:
    """Whether one has to wait for another: both use the same cache, and one appends."""
    if len(requests) == 1:
        return False
    times = Counter(name for request in requests for name in request.needs)
    return any(times[name] > 1 for request in requests if not request.shares for name in request.needs)
