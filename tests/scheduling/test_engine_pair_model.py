"""An engine with a device for two batches, checked against a model: requests, batch ends, failures and cancellations
in any order.
"""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from pair_bench import Asked, Batch, PairBench

from attnserve_server.errors import Cancelled, ComputationFailed
from attnserve_server.scheduling.entry import Entry, Outcome

MOST_COST, MOST_REQUESTS = 12, 4

REQUESTS = st.builds(
    Asked,
    cost=st.integers(1, 8),
    kin=st.sampled_from(["one", "one", "two"]),
    needs=st.sampled_from([(), (), ("a",), ("b",), ("a", "b")]),
    failure=st.sampled_from([None, None, None, ValueError]),
)
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.lists(REQUESTS, min_size=1, max_size=4)),
    st.tuples(st.just("end"), st.integers(0, 1)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
)


class Model:
    """The entries submitted so far, and the batches that may be in flight."""

    def __init__(self) -> None:
        self.bench = PairBench(MOST_REQUESTS, MOST_COST)
        self.bench.device.holds_again = False
        self.entries: list[Entry] = []
        self.cancelled: set[Entry] = set()
        self.seen = 0

    def of(self, batch: Batch) -> list[Entry]:
        """The entries of a batch that has reached the device."""
        return [next(each for each in self.entries if each.request is request) for request in batch.requests]

    def under_way(self) -> list[Batch]:
        return [batch for batch in self.bench.device.batches if not batch.may_end.is_set()]

    async def settle(self) -> None:
        """Waits until nothing more happens by itself: the loop is idle, the device has every batch it should have."""
        turns = 0
        while turns < 4:
            await asyncio.sleep(0)
            turns += 1
            while len(self.under_way()) < len(self.bench.engine.worker.runs):
                await self.bench.device.until_entered()
                turns = 0

    def check(self) -> None:
        device, queue, worker = self.bench.device, self.bench.queue, self.bench.engine.worker
        under_way = self.under_way()
        assert len(under_way) == len(worker.runs) <= 2
        needs = [need for batch in under_way for request in batch.requests for need in request.needs]
        assert len(needs) == len(set(needs)), "two have the same thing"
        if queue.requests:
            assert worker.runs, "the device is idle, and somebody waits"
            full = queue.cost >= MOST_COST or queue.requests >= MOST_REQUESTS
            if len(worker.runs) == 1:
                assert not full
                assert queue.cost < worker.runs[0].batch.cost
        for batch in device.batches[self.seen :]:
            assert len({request.group for request in batch.requests}) == 1
            assert len(batch.requests) <= MOST_REQUESTS
            assert len(batch.requests) == 1 or sum(request.cost for request in batch.requests) <= MOST_COST
        self.seen = len(device.batches)
        for need in ("a", "b"):
            in_line = [each for each in self.entries if need in each.request.needs and each not in self.cancelled]
            ended = [bool(self.bench.replies[entry]) for entry in in_line]
            assert ended == sorted(ended, reverse=True), "a later one has ended, and an earlier one has not"

    async def act(self, action: str, given: object) -> None:
        if action == "submit":
            assert isinstance(given, list)
            self.entries += self.bench.submit(*given)
        elif action == "end":
            under_way = self.under_way()
            assert isinstance(given, int)
            if under_way:
                batch = under_way[given % len(under_way)]
                batch.may_end.set()
                await self.bench.answers(self.of(batch))
        elif self.entries:
            assert isinstance(given, int)
            entry = self.entries[given % len(self.entries)]
            self.cancelled.add(entry)
            self.bench.engine.cancel([entry])

    def check_answers(self) -> None:
        """Each entry gets what it would have got alone."""
        for entry in self.entries:
            (reply,) = self.bench.replies[entry]
            if isinstance(reply, Cancelled):
                assert entry in self.cancelled
                assert "begin" not in entry.request.said  # type: ignore[attr-defined]
            elif entry.request.failure is not None:  # type: ignore[attr-defined]
                assert isinstance(reply, ComputationFailed)
            else:
                assert isinstance(reply, Outcome)
            if entry.request.needs:
                last = "failed" if isinstance(reply, ComputationFailed) else "end"
                ran = [] if isinstance(reply, Cancelled) else ["begin", last]
                assert entry.request.said == ["enter", *ran, "leave"]  # type: ignore[attr-defined]


async def live(actions: list[tuple[str, object]]) -> None:
    model = Model()
    for action in actions:
        await model.act(*action)
        await model.settle()
        model.check()
    await model.bench.finish()
    model.check_answers()


@settings(max_examples=max(60, settings().max_examples // 2))
@given(st.lists(ACTIONS, max_size=25))
def test_whatever_comes(actions: list[tuple[str, object]]) -> None:
    asyncio.run(live(actions))
