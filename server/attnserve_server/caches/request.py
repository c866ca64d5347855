"""Attention to resident caches: an `AttendRequest` with references, from its bytes to its reply."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from time import monotonic
from typing import TYPE_CHECKING, ClassVar

from attnserve import _dtypes, _fields
from attnserve._wire import Payloads
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.access.callers import Caller
from attnserve_server.caches.cache import Cache
from attnserve_server.caches.references import Reference, read_header
from attnserve_server.caches.stored_range import check_few
from attnserve_server.caches.work import CacheHost, CacheWork, Use, check_distinct
from attnserve_server.errors import InvalidRequest
from attnserve_server.requests.axes import KeyShape
from attnserve_server.requests.extent import CALL_COST, not_finite_cost, reply_bytes
from attnserve_server.requests.limits import RequestLimits
from attnserve_server.requests.options import read_offsets
from attnserve_server.requests.positions import keys_within_reach, pairs_within_reach
from attnserve_server.requests.problem import Problem, problem_of
from attnserve_server.requests.reply import encode_attend_response
from attnserve_server.requests.request import MAX_KNOWN_HEADER, NOT_FINITE, Unfinished, request_of
from attnserve_server.requests.tensors import check_masks, read_integers
from attnserve_server.requests.work import BatchResult, Extent, Finish, Phases, RequestResult, Work

if TYPE_CHECKING:
    from attnserve_server.devices import Device


@dataclass(slots=True, eq=False)
class CachedRequest(CacheWork):
    """One attention to caches: sequence b attends to cache b. `problem.kv_length` is how many tokens are appended to
    each.
    """

    reply_field: ClassVar[int] = pb.AttendStreamReply.ATTEND_FIELD_NUMBER

    problem: Problem
    payloads: Payloads
    limits: RequestLimits
    extent: Extent = field(init=False)
    effort: int = field(init=False)
    """What computing takes, in FLOPs; at least the bytes of the keys and values that it reads: see `Request.effort`."""
    whole_effort: int = field(init=False)
    """Its effort if all queries have to be computed with all keys that any of them reaches."""
    scratch_bytes: int = field(init=False)
    """The memory that the projections of an additive score take."""
    _counted: list[int] | None = field(default=None, init=False)
    """The lengths of caches that its cost was counted with last; None if the cost depends on more than these."""
    _last: int | None = field(init=False)
    """How many of the last keys of its cache each query of a sequence reaches, where 0 stands for all keys; None if
    that has to be found out for each query.
    """
    _varies: bool = field(init=False)
    """Whether what queries reach depends on the contents of tensors."""
    kv_lengths: list[int] = field(default_factory=list, init=False)
    offsets: list[int] = field(default_factory=list, init=False)
    unfinished: Unfinished | None = field(default=None, init=False)
    """Its result so far, if it is to run once more."""

    def __post_init__(self) -> None:
        """Finds out what queries reach: in nearly all steps it is every key, or the last ones."""
        CacheWork.__post_init__(self)
        problem = self.problem
        self._varies = not problem.tensors.keys().isdisjoint(("kv_lengths", "query_offset"))
        self._last = None if self._varies or problem.has_band else 0
        if problem.query_length == 1 and problem.bottom_right and problem.return_scores is None and not self._varies:
            self._last = problem.window[0] + 1

    @property
    def group(self) -> Hashable:
        """Equal for requests that one batch can hold."""
        group = self.uses[0].cache.shape, self.problem.group
        return group if self.unfinished is None else (NOT_FINITE, *group)

    @property
    def kind(self) -> str:
        """Attention to caches reads them by pages, and is a kind of its own."""
        if self.unfinished is not None:
            return f"attend {_dtypes.name(self.problem.dtype)}, with caches, not finite"
        return f"{self.problem.kind}, with caches"

    @property
    def shares(self) -> bool:
        """Whether it only reads its caches."""
        return not self.problem.kv_length

    @property
    def priority(self) -> int:
        """Higher goes first."""
        return self.problem.priority

    @property
    def longest(self) -> tuple[int, int]:
        """The Lq and S of a reply's scores."""
        return self.problem.query_length, max(self.lengths, default=0)

    def count(self, lengths: list[int]) -> None:
        """Counts what it costs with caches of these lengths, after the appends. Raises InvalidRequest."""
        if lengths == self._counted:
            return
        problem = self.problem
        rows = problem.batch * problem.query_length
        if (last := self._last) is None:
            keys, pairs, whole = self._within_reach(lengths)
        else:
            keys = sum([min(length, last) for length in lengths]) if last else sum(lengths)
            pairs = whole = problem.query_length * keys
        whole_flops = problem.flops(whole, rows, keys)
        self.limits.check_flops(problem.weighed(whole_flops, whole))
        flops = whole_flops if pairs == whole else problem.flops(pairs, rows, keys)
        effort = problem.effort(flops, pairs, rows, keys, problem.batch)
        cost = problem.weighed(effort, pairs) + CALL_COST * problem.batch
        self.extent = Extent(flops, cost, rows, reply_bytes(problem, rows, max(lengths)))
        self.effort = max(effort, keys * self.uses[0].cache.shape.token_bytes if rows else 0)
        self.whole_effort = max(effort, whole_flops)
        self.scratch_bytes = problem.scratch_bytes(max(lengths))
        if not self._varies:
            self._counted = lengths

    def _within_reach(self, lengths: list[int]) -> tuple[int, int, int]:
        """Three numbers, for caches of these lengths: the keys within reach of any query; the pairs of a query and a
        key that it reaches itself; and the pairs of all queries with all those keys. Where attention is written out,
        all of the last are computed: then the second number is the same. The lengths and offsets that a request gives
        may not fit its caches yet.
        """
        problem = self.problem
        given = read_integers(problem.tensors.get("kv_lengths"), self.payloads) or lengths
        kept = [max(0, min(each, length)) for each, length in zip(given, lengths, strict=True)]
        offsets: Sequence[int | None] = read_integers(problem.tensors.get("query_offset"), self.payloads) or (None,)
        if len(offsets) < len(lengths):
            offsets = [*offsets] * len(lengths)
        keys = pairs = whole = 0
        queries, (left, right) = problem.query_length, problem.window
        for length, kv_length, offset in zip(lengths, kept, offsets, strict=True):
            if offset is None:
                offset = kv_length - queries if problem.bottom_right else 0
            if problem.return_scores is not None:  # there is a score for each key, attended to or not
                reached = length
            else:
                reached = keys_within_reach(queries, kv_length, offset, left, right)
                pairs += pairs_within_reach(queries, kv_length, offset, left, right)
            keys += reached
            whole += queries * reached
        return keys, whole if problem.written_out else pairs, whole

    def count_at_door(self) -> None:
        """Counts what it costs if it runs after all that is queued before it. Raises InvalidRequest."""
        self.count([use.coming_length() + use.tokens for use in self.uses])

    def renew(self, payloads: Payloads, expected_lengths: Sequence[int | None], append_ids: Sequence[int]) -> None:
        """Turns it, once it is over, into another request to the same caches that differs only in contents, expected
        lengths and append ids. Raises InvalidRequest.
        """
        self.payloads = payloads
        changed = zip(self.uses, expected_lengths, append_ids, strict=True)
        self.uses = tuple(
            [Use(use.cache, use.layer, use.tokens, length, append_id) for use, length, append_id in changed]
        )
        self.count_at_door()

    def fit(self, longest: int) -> None:
        """Sets lengths and offsets. Raises InvalidRequest if those that are given, or masks, do not fit the caches, or
        if what is appended does not fit their dtype.
        """
        problem = self.problem
        check_few(problem.tensors, self.payloads, self.uses[0].cache.shape.dtype)
        check_masks(problem.tensors, (problem.batch, problem.query_heads, problem.query_length, longest), problem.rank)
        lengths = [before + use.tokens for use, before in zip(self.uses, self._before, strict=True)]
        given = read_integers(problem.tensors.get("kv_lengths"), self.payloads)
        for index, length in enumerate(given or ()):
            if not 0 <= length <= lengths[index]:
                raise InvalidRequest(f"kv_lengths[{index}]", f"from 0 to {lengths[index]}", length)
        self.kv_lengths = list(given) if given else lengths
        offsets = read_offsets(problem.tensors.get("query_offset"), self.payloads, problem.batch)
        if offsets is not None:
            self.offsets = offsets
        elif problem.bottom_right:
            self.offsets = [length - problem.query_length for length in self.kv_lengths]
        else:
            self.offsets = [0] * problem.batch

    def but_for(self, sequences: Sequence[int], result: RequestResult | None) -> CachedRequest:
        """The request itself, to run once more in the same turn, with a result that lacks some sequences."""
        assert result is not None
        self.unfinished = Unfinished(sequences, result)
        cost = not_finite_cost(self.whole_effort, len(sequences), self.problem.batch)
        self.extent = replace(self.extent, cost=cost)
        return self

    def begin(self) -> None:
        """Starts its turn. If it has run before, its appends have been placed."""
        if self.unfinished is None:
            CacheWork.begin(self)

    def end(self, failed: bool) -> None:
        """Ends its turn: its result is complete, or it has failed."""
        self.unfinished = None
        CacheWork.end(self, failed)

    def leave(self) -> None:
        """Lets go of everything. A request that was to run once more, and does not, has failed."""
        if self.unfinished is not None:
            self.end(failed=True)
        CacheWork.leave(self)

    def run_batch(self, device: Device, batch: Sequence[CachedRequest]) -> BatchResult:
        """Writes what is appended, then attends."""
        from attnserve_server.caches.run import run_batch

        return run_batch(self.host.pages, device, batch)

    def launch_batch(self, device: Device, batch: Sequence[CachedRequest]) -> Finish | None:
        """Launches what is written and attended."""
        from attnserve_server.caches.run import launch_batch

        return launch_batch(self.host.pages, device, batch)

    def encode(self, result: RequestResult, phases: Phases, batch_size: int) -> tuple[list[_fields.Buffer], int]:
        """The pieces of the encoded reply, and their length together."""
        return encode_attend_response(self, result, phases, batch_size, self.lengths)


def read_attend(host: CacheHost, caller: Caller, buffer: bytes, at: int, end: int, limits: RequestLimits) -> Work:
    """The attention that a caller asks for in a part of a buffer, with or without caches. Raises RequestError."""
    references, header, payloads = read_header(pb.AttendRequest, buffer, at, end, limits)
    if not references:
        return request_of(header, payloads, end - at, limits)
    return _read(host, caller.name, references, header, payloads, end - at, limits)


def _read(
    host: CacheHost,
    owner: str | None,
    references: Sequence[Reference],
    header: bytes,
    payloads: Payloads,
    size: int,
    limits: RequestLimits,
) -> CachedRequest:
    caches = named(host, owner, references)
    shape = caches[0].shape
    resident = KeyShape(shape.num_kv_heads, shape.head_dim, shape.value_dim)
    problem = (_known if len(header) <= MAX_KNOWN_HEADER else _check)(header, resident, limits)
    if len(caches) != problem.batch:
        raise InvalidRequest("caches", f"{problem.batch} caches, one for each sequence", len(caches))
    return request_to(host, caches, references, problem, payloads, size, limits)


def named(host: CacheHost, owner: str | None, references: Sequence[Reference]) -> list[Cache]:
    """The owner's caches that references name, all of one shape. Raises NotFound and InvalidRequest."""
    now = monotonic()
    caches = [host.store.get(reference.name, now, owner) for reference in references]
    shape = caches[0].shape
    for index, (cache, reference) in enumerate(zip(caches, references, strict=True)):
        if cache.shape != shape:
            expected, found = shape.differences(cache.shape)
            raise InvalidRequest(f"caches[{index}].name", f"a cache with {expected}, as the first has", found)
        if reference.layer >= shape.layers:
            expected = f"below {shape.layers}, the layers that the cache has"
            raise InvalidRequest(f"caches[{index}].layer", expected, reference.layer)
    return caches


def request_to(
    host: CacheHost,
    caches: Sequence[Cache],
    references: Sequence[Reference],
    problem: Problem,
    payloads: Payloads,
    size: int,
    limits: RequestLimits,
) -> CachedRequest:
    """A request of a problem to these caches, one for each of its sequences. Raises InvalidRequest."""
    uses = tuple(
        Use(cache, reference.layer, problem.kv_length, reference.expected_length, reference.append_id)
        for cache, reference in zip(caches, references, strict=True)
    )
    if len(uses) > 1:
        check_distinct(uses)
    request = CachedRequest(
        host=host, uses=uses, received_bytes=size, problem=problem, payloads=payloads, limits=limits
    )
    request.count_at_door()
    return request


def _check(header: bytes, resident: KeyShape, limits: RequestLimits) -> Problem:
    problem = problem_of(header, resident)
    limits.check_tensors(problem.tensors)
    return problem


_known = lru_cache(maxsize=1024)(_check)
