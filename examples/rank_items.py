"""Ranks items for users as a recommender's backend does: target attention over long histories, without torch.

    python examples/rank_items.py                           starts a service of its own, and stops it
    python examples/rank_items.py --address 127.0.0.1:8001  uses a running service; repeat it for several

Each candidate attends to all items that its user has looked at so far, and is scored by the result. Histories have any
length, and stay in the service as resident caches: a request sends its candidates, a click sends one item. Many
requests are in flight at a time, each with a short timeout; if one fails, its items are ranked by popularity instead.
Exit status 1 if the scores differ from NumPy's by more than 1e-4, or there is no service.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
from service_process import Service, ServiceError, address

from attnserve import (
    AsyncCache,
    AsyncClient,
    AttnServeError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)

HEADS, WIDTH = 4, 32
ITEMS = 10_000
LIFE_S = 60.0
"""How long a history stays in the service after its last use."""
CHUNK = 4096
"""The most items of a history in one message: between two of them, other users' requests get a turn."""
ATTEMPTS = 5
"""How often a ranking is tried: lost caches are filled again, idle ones make room."""
PATIENCE_S = 10.0
"""How long the service may take to say that it is there."""

Floats = npt.NDArray[np.float32]


class Ranking:
    """The histories of users: all of them here, as a database would have them; in the service those that were needed.

    Only this process writes to the caches that it makes, and a history only grows. So a cache lacks exactly the items
    of its history beyond the cache's length.
    """

    def __init__(self, client: AsyncClient, embeddings: Floats, *, timeout: float) -> None:
        """`embeddings`: ``[items, HEADS, WIDTH]``. `timeout`: how many seconds a ranking may take."""
        self._client = client
        self._embeddings = embeddings
        self._timeout = timeout
        self._caches: OrderedDict[int, AsyncCache] = OrderedDict()  # by their last use
        self._filling: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._clicks: Counter[int] = Counter()
        self.histories: defaultdict[int, list[int]] = defaultdict(list)
        """The items that each user has looked at, the oldest first."""
        self.failures: Counter[str] = Counter()
        """The errors that made rankings fall back to popularity, counted."""

    @property
    def resident(self) -> int:
        """How many histories are in the service."""
        return len(self._caches)

    def looked_at(self, user: int, items: Sequence[int]) -> None:
        """Adds items to a history; the service gets them with the next ranking."""
        self.histories[user] += items
        self._clicks.update(items)

    async def rank(self, user: int, candidates: Sequence[int]) -> list[int]:
        """The candidates, best first. Never fails: if scores cannot be computed in time, ranks by popularity."""
        try:
            async with asyncio.timeout(self._timeout):
                scores = await self.scores(user, candidates)
        except (AttnServeError, TimeoutError) as error:
            self.failures[type(error).__name__] += 1
            scores = np.array([self._clicks[item] for item in candidates], np.float32)
        return [candidates[n] for n in np.argsort(-scores, kind="stable")]

    async def scores(self, user: int, candidates: Sequence[int]) -> Floats:
        """The score of each candidate, ``[candidates]``: its similarity to the result of its attention."""
        query = self._embeddings[candidates]
        for attempts_left in reversed(range(ATTEMPTS)):
            cache = None
            try:
                cache = await self._resident(user)
                found = (await cache.attend(query, layout="length_first")).output
                break
            except AttnServeError as error:
                if not (attempts_left and await self._recovered(user, cache or self._caches.get(user), error)):
                    raise
        scores: Floats = np.einsum("chd,chd->c", query, found)
        return scores

    async def close(self) -> None:
        """Deletes the caches in the service."""
        with suppress(AttnServeError):  # if a server is away, leases end by themselves
            await self._client.caches.delete(self._caches.values())

    async def _resident(self, user: int) -> AsyncCache:
        """The user's cache, with the whole history. While it is being filled, requests of the same user wait here."""
        async with self._filling[user]:
            cache = self._caches.get(user)
            if cache is None:
                cache = self._caches[user] = await self._client.create_cache(HEADS, WIDTH, ttl=LIFE_S)
            self._caches.move_to_end(user)
            while lacking := self.histories[user][cache.length : cache.length + CHUNK]:
                items = self._embeddings[lacking]
                await cache.append(items, items, layout="length_first")
            return cache

    async def _recovered(self, user: int, cache: AsyncCache | None, error: AttnServeError) -> bool:
        """Does what makes another attempt worthwhile. False if nothing would."""
        match error:
            case FailedPreconditionError() if cache is not None:  # an append that we gave up was carried out
                await cache.refresh()
            case NotFoundError() | UnavailableError():  # its lease has ended, or its server was restarted or is away
                self._forget(user, cache)  # the history is here, for a new cache, perhaps on another server
            case OverloadedError() if error.free_bytes is not None and len(self._caches) > 1:
                idle = next(other for other in self._caches if other != user)
                self._caches.move_to_end(idle)  # so that others who need room look for another one
                cache = self._caches[idle]
                await cache.delete()  # if we give up here, it still is among ours, deleted or not
                self._forget(idle, cache)
            case _:
                return False
        return True

    def _forget(self, user: int, cache: AsyncCache | None) -> None:
        """Forgets a user's cache that is gone, unless another ranking has made the next one."""
        if self._caches.get(user) is cache:
            self._caches.pop(user, None)


def computed_here(embeddings: Floats, history: Sequence[int], candidates: Sequence[int]) -> Floats:
    """The scores by NumPy, ``[candidates]``."""
    # In float64: NumPy's rounding in float32 depends on its version, by more than the differences looked for.
    query, key = embeddings[candidates].astype(np.float64), embeddings[history].astype(np.float64)
    scores = np.einsum("chd,thd->hct", query, key) / np.sqrt(WIDTH)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    found: Floats = np.einsum("chd,hct,thd->c", query, weights, key).astype(np.float32)
    return found


async def demonstrate(options: argparse.Namespace, address: str | list[str]) -> bool:
    """Ranks for many users at the same time and prints the results; returns whether the scores are right."""
    rng = np.random.default_rng(0)
    embeddings = rng.standard_normal((ITEMS, HEADS, WIDTH), np.float32)
    async with AsyncClient(address) as client:
        # Without this, each ranking would find out by itself that no service is there.
        await client.server_info(timeout=PATIENCE_S)
        ranking = Ranking(client, embeddings, timeout=options.timeout)
        for user in range(options.users):
            length = int(np.clip(rng.lognormal(6.5, 1.0), 5, 20_000))
            ranking.looked_at(user, rng.integers(ITEMS, size=length).tolist())
        candidates = rng.integers(ITEMS, size=(options.users, options.requests, options.candidates)).tolist()
        times: list[float] = []

        async def session(user: int) -> None:
            for request in candidates[user]:
                begin = time.perf_counter()
                best, *_ = await ranking.rank(user, request)
                times.append(time.perf_counter() - begin)
                ranking.looked_at(user, [best])

        begin = time.perf_counter()
        await asyncio.gather(*map(session, range(options.users)))
        seconds = time.perf_counter() - begin

        lengths = [len(ranking.histories[user]) for user in range(options.users)]
        some = range(0, options.users, max(1, options.users // 10))
        differences = [
            np.abs(
                await ranking.scores(user, candidates[user][0])
                - computed_here(embeddings, ranking.histories[user], candidates[user][0])
            ).max()
            for user in some
        ]
        resident = ranking.resident
        await ranking.close()

    failures = ", ".join(f"{count} {name}" for name, count in ranking.failures.items()) or "none"
    median, slow = np.quantile(times, [0.5, 0.99]) * 1e3
    print(f"users            {options.users} at the same time, with {min(lengths)} to {max(lengths)} items each")
    print(f"rankings         {len(times)} of {options.candidates} candidates, {len(times) / seconds:.0f} a second")
    print(f"                 p50 {median:.1f} ms, p99 {slow:.1f} ms; the first of each user also sends the history")
    print(f"by popularity    {failures}")
    if late := sum(ranking.failures[kind.__name__] for kind in (TimeoutError, DeadlineExceededError)):
        print(
            f"too late         {late} of {len(times)} rankings were given up after {options.timeout:g} s: more is asked"
        )
        print("                 than the service computes in that time; try fewer --users, or a longer --timeout")
    print(f"in the service   {resident} histories")
    print(f"versus NumPy     largest difference of a score {max(differences):.1e}")
    return bool(max(differences) < 1e-4)


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number of seconds, 0 or more, found {text!r}")
    return seconds


def main() -> int:
    """Runs the example; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", action="append", type=address, help="a running service; repeat it for several")
    parser.add_argument(
        "--users", type=_at_least_one, default=50, help="how many users at the same time (default %(default)s)"
    )
    parser.add_argument("--requests", type=_at_least_one, default=20, help="rankings per user (default %(default)s)")
    parser.add_argument(
        "--candidates", type=_at_least_one, default=50, help="items to rank in each (default %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=2.0, help="how many seconds a ranking may take (default %(default)s)"
    )
    options = parser.parse_args()
    try:
        if options.address:
            return 0 if asyncio.run(demonstrate(options, options.address)) else 1
        with Service("--device", "cpu", "--log-level", "error") as service:
            return 0 if asyncio.run(demonstrate(options, service.address)) else 1
    except (AttnServeError, ServiceError) as error:
        print(f"rank_items: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
