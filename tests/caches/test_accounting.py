"""What a real server says of its caches and its pool after each of some hundred random operations: exactly what follows
from pages that are counted by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

import calls
import grpc
import numpy as np
import pytest
from caller import Caller, Reference, attend_request, result, tokens
from cases import Case
from conftest import Server
from oracle import Array

PAGE, PAGES, LAYERS = 4096, 40, 2
PAGE_TOKENS = 32
"""Of 2 heads, 8 wide, float32."""
QUERY = np.zeros((2, 1, 8), np.float32)
"""It weights all keys alike: the output is the mean of the values."""


@pytest.fixture(scope="module", params=["auto", "off"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a small pool, with and without the native kernel."""
    flags = ("--device", "cpu", "--cache-bytes", str(PAGE * PAGES), "--cache-page-bytes", str(PAGE))
    server = Server((*flags, "--native-kernel", request.param), tmp_path_factory.mktemp("small") / "stderr")
    yield server
    assert server.stop() == 0, server.stderr()


@dataclass(eq=False)
class Model:
    """A cache: the values of each layer, and the pages that they are in, which forks share."""

    name: str
    values: list[Array]
    pages: list[list[int]]


class Books:
    """All caches of a server and their pages, kept beside its own."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.models: list[Model] = []
        self.appends = self.refused = 0
        self._numbers = count()

    def create(self) -> None:
        self.models.append(
            Model(self.caller.create(layers=LAYERS), [tokens(0, 0)[1]] * LAYERS, [[] for _ in range(LAYERS)])
        )

    def fork(self, model: Model) -> None:
        name = self.caller.fork(model.name).name
        self.models.append(Model(name, list(model.values), [list(pages) for pages in model.pages]))

    def delete(self, model: Model) -> None:
        self.caller.delete(model.name)
        self.models.remove(model)

    def truncate(self, model: Model, length: int) -> None:
        self.caller.truncate(model.name, length)
        model.values = [values[:, :length] for values in model.values]
        model.pages = [pages[: -(-length // PAGE_TOKENS)] for pages in model.pages]

    def append(self, models: Sequence[Model], layer: int, tokens_each: int, seed: int) -> None:
        """Appends tokens to several caches by one request, which is refused if they do not fit together."""
        given = [tokens(seed + n, tokens_each) for n in range(len(models))]
        key, value = (np.stack(each) for each in zip(*given, strict=True))
        query = np.stack([QUERY] * len(models))
        references = [Reference(model.name, layer, model.values[layer].shape[1]) for model in models]
        request = attend_request(Case(query, query, query), references, (key, value))
        needed = sum(self._needed(model, layer, tokens_each) for model in models)
        if needed > PAGES - len(self.holders):
            with pytest.raises(grpc.RpcError) as refused:
                self.caller.attend(request)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
            self.refused += 1
            return
        output = result(self.caller.attend(request)).output
        shared = self.holders
        for model, own in zip(models, value, strict=True):
            pages, values = model.pages[layer], np.concatenate((model.values[layer], own), axis=1)
            if model.values[layer].shape[1] % PAGE_TOKENS and shared[pages[-1]] > 1:
                pages[-1] = next(self._numbers)
            pages += [next(self._numbers) for _ in range(-(-values.shape[1] // PAGE_TOKENS) - len(pages))]
            model.values[layer] = values
        means = np.stack([model.values[layer].mean(axis=1, dtype=np.float64) for model in models])
        assert np.abs(output[:, :, 0] - means).max() < 2e-6
        self.appends += len(models)

    def _needed(self, model: Model, layer: int, more: int) -> int:
        length, pages = model.values[layer].shape[1], model.pages[layer]
        copies = length % PAGE_TOKENS > 0 and self.holders[pages[-1]] > 1
        return -(-(length + more) // PAGE_TOKENS) - len(pages) + copies

    @property
    def holders(self) -> Counter[int]:
        """How many caches hold each page."""
        return Counter(page for model in self.models for pages in model.pages for page in pages)

    def check(self) -> None:
        """Compares what a list says."""
        holders, listed = self.holders, self.caller.list()
        assert [cache.name for cache in listed.caches] == [model.name for model in self.models]
        for cache, model in zip(listed.caches, self.models, strict=True):
            own = [page for pages in model.pages for page in pages]
            assert list(cache.lengths) == [values.shape[1] for values in model.values]
            assert (cache.bytes, cache.shared_bytes) == (len(own) * PAGE, sum(holders[page] > 1 for page in own) * PAGE)
        assert (listed.pool_bytes, listed.free_bytes) == (PAGES * PAGE, (PAGES - len(holders)) * PAGE)

    def check_metrics(self, server: Server, appends_before: float) -> None:
        """Compares what the metrics say."""
        _, page = calls.get(server.http_address, "/metrics")
        holders = self.holders
        pool = {"free": PAGES - len(holders), "reserved": 0, "used": len(holders)}
        for state, pages in pool.items():
            assert calls.value(page, "attnserve_cache_pool_bytes", state=state) == pages * PAGE
        for name, value in {
            "attnserve_caches": len(self.models),
            "attnserve_cache_tokens": sum(values.shape[1] for model in self.models for values in model.values),
            "attnserve_cache_shared_bytes_saved": (holders.total() - len(holders)) * PAGE,
            "attnserve_cache_appends_total": appends_before + self.appends,
        }.items():
            assert calls.value(page, name) == value, name


@pytest.mark.parametrize("seed", range(2))
def test_the_server_counts_pages_as_one_does_by_hand(server: Server, seed: int) -> None:
    random, appends = Random(seed), calls.metric(server.http_address, "attnserve_cache_appends_total")
    with grpc.insecure_channel(server.address) as channel:
        books = Books(Caller(channel))
        books.create()
        for step in range(150):
            model = random.choice(books.models)
            match random.choices(("append", "fork", "truncate", "delete", "create"), (10, 5, 4, 3, 1))[0]:
                case "append":
                    models = random.sample(books.models, min(len(books.models), random.choice((1, 1, 2, 3))))
                    more = random.choice((1, 2, PAGE_TOKENS - 1, PAGE_TOKENS, 170))
                    books.append(models, random.randrange(LAYERS), more, 1000 * seed + 5 * step)
                case "fork" if len(books.models) < 12:
                    books.fork(model)
                case "truncate":
                    longest = max(values.shape[1] for values in model.values)
                    books.truncate(
                        model, random.choice((0, longest // 2, longest // PAGE_TOKENS * PAGE_TOKENS, longest))
                    )
                case "delete" if len(books.models) > 1:
                    books.delete(model)
                case _:
                    books.create()
            books.check()
            if step % 10 == 9:
                books.check_metrics(server, appends)
        assert books.appends > 50
        assert books.refused > 3
        while books.models:
            books.delete(random.choice(books.models))
            books.check()
        books.check_metrics(server, appends)
