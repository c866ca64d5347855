"""`attnserve bench`: how fast a running server answers, measured from the client with the SDK alone.

In: an address, how long, which loads. Out: a table or JSON.

Each load first runs in a closed loop: each reply is followed by the next request. Then it runs in open loops: requests
are due at random times, at shares of the closed loop's rate. There, latency counts from when a request was due, so that
stalls are not hidden. Each loop is measured in several rounds; the result is the median round, with the spread. The
last row of one answer to each load is compared with float64 NumPy.
"""

from __future__ import annotations

import argparse
import dataclasses
import queue
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from attnserve._client import Client
from attnserve._commands.table import table
from attnserve._errors import AttnServeError, PermissionDeniedError, UnavailableError
from attnserve._requests.result import AttentionResult, Timings

Array: TypeAlias = np.ndarray[Any, Any]
_Submit: TypeAlias = Callable[[], "Future[AttentionResult[Array]]"]

HEADS: Final = 8
HEAD_DIM: Final = 64
CACHED: Final = 2048
WARM_UP: Final = 0.2
"""The warm-up before a measurement, which is not counted, as a share of the measurement's time."""
SHARES: Final = (0.5, 0.9)
KEPT_UP: Final = 0.95
"""An open loop of which less than this share was answered in time is marked."""
NOISY: Final = 0.15
"""A loop whose rounds are further apart is marked."""
MOST_ROUNDS: Final = 1000
TITLES: Final[tuple[str, ...]] = (
    *("load", "loop", "req/s", "tokens/s", "p50", "p99", "p99.9"),
    *("queue", "compute", "client CPU", "batch", "spread"),
)
LEASE_S: Final = 600.0
"""The lease of caches, so that those left behind by a killed process expire."""
TOLERANCE: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of some queries (8 heads of 64, float32) that attend to themselves or to a cache; how many in flight."""

    description: str
    in_flight: int
    queries: int
    cached: bool = False


LOADS: Final = {
    "S": Load("16 tokens, 16 in flight", 16, 16),
    "S1": Load("16 tokens, 1 in flight", 1, 16),
    "M": Load("128 tokens, 8 in flight", 8, 128),
    "L": Load("1024 tokens, 4 in flight", 4, 1024),
    "D": Load("1 query to a cache of 2048 tokens, 1 in flight", 1, 1, cached=True),
}
"""The loads by name. All are causal, and the last appends nothing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of a load in one loop.

    - `share`: for an open loop, at which share of the closed loop's rate requests were due; None for a closed loop.
    - `in_time`: for an open loop, the share of the requests that were answered by the time that no more were due, plus
      the closed loop's p99.
    - `queue_s` and `compute_s`: medians of the server's own times, as reported in replies.
    """

    load: str
    share: float | None
    in_time: float | None
    requests: int
    requests_per_second: float
    tokens_per_second: float
    p50_s: float
    p99_s: float
    p999_s: float
    queue_s: float
    compute_s: float
    batch_size: float
    client_cpu_s: float
    """CPU time of this process per request."""
    spread: float = 0.0
    """Half the range of the rounds' figures, over their median: of the rates in a closed loop, of the p99 in an open
    one.
    """

    @property
    def compared(self) -> float:
        """The figure by which rounds are compared."""
        return self.requests_per_second if self.share is None else self.p99_s

    @property
    def falls_behind(self) -> bool:
        """Whether an open loop asked for more than was answered."""
        return self.in_time is not None and self.in_time < KEPT_UP


class WrongAnswerError(Exception):
    """The server's result is wrong, and so not worth timing."""


class Failure(NamedTuple):
    """Why a load was not measured, or not in all its loops."""

    load: str
    error: AttnServeError | WrongAnswerError


class UnfinishedError(Exception):
    """Not everything could be measured: why not; and the results of what was, as data and as text, None for nothing."""

    def __init__(self, failures: Sequence[Failure], results: tuple[Any, str] | None) -> None:
        super().__init__(f"{failures[0].load}: {failures[0].error}")
        self.failures = failures
        self.results = results


_OF_EVERY_LOAD: Final = (UnavailableError, PermissionDeniedError)
"""Errors with which all further loads would end, too."""


def run(
    client: Client, loads: Sequence[str], seconds: float, rounds: int, opened: bool, timeout: float
) -> tuple[Any, str]:
    """Measures loads, given by name, in so many rounds of `seconds` for each loop, with open loops if `opened`: results
    as data and as text.

    `timeout` is that of the first request, in seconds. A load that fails does not stop the next, unless that would fail
    in the same way; at the end it raises UnfinishedError.
    """
    found: list[Measured] = []
    failures: list[Failure] = []
    try:
        for name in loads:
            try:
                with ExitStack() as stack:
                    submit = _prepared(LOADS[name], client, stack, timeout)
                    closed = _median(rounds, f"{name}: closed loop", partial(_closed, name, submit, seconds))
                    found.append(closed)
                    for share in SHARES if opened else ():
                        rate = share * closed.requests_per_second
                        open_loop = partial(_open, name, submit, share, rate, seconds, closed.p99_s)
                        found.append(_median(rounds, f"{name}: open loop, {share:.0%}", open_loop))
            except (AttnServeError, WrongAnswerError) as error:
                failures.append(Failure(name, error))
                if isinstance(error, _OF_EVERY_LOAD):
                    break
    finally:  # whatever comes next, an error too, has the line to itself
        _say("")
    if failures:
        raise UnfinishedError(failures, _results(found) if found else None)
    return _results(found)


def _median(rounds: int, what: str, measure: Callable[[], Measured]) -> Measured:
    """The median of some rounds, with their spread."""
    found = []
    for number in range(1, rounds + 1):
        _say(f"{what}, round {number} of {rounds}")
        found.append(measure())
    found.sort(key=lambda each: each.compared)
    median = found[(rounds - 1) // 2]
    return dataclasses.replace(median, spread=(found[-1].compared - found[0].compared) / 2 / median.compared)


def _results(found: Sequence[Measured]) -> tuple[Any, str]:
    return [dataclasses.asdict(each) for each in found], _text(found)


def add_flags(parser: argparse.ArgumentParser, seconds: Callable[[str], float]) -> None:
    """Adds the command's own flags."""
    parser.add_argument("--loads", type=_loads, default=["S", "M", "D"], metavar="NAMES", help=_described())
    parser.add_argument("--seconds", type=seconds, default=1.0, help="duration of each round of a loop (%(default)s)")
    parser.add_argument("--rounds", type=_rounds, default=3, help="rounds of each loop (%(default)s)")
    parser.add_argument(
        "--open",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure open loops, at 50 %% and 90 %% of the rate reached (on by default)",
    )


def _loads(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in LOADS]:
        raise argparse.ArgumentTypeError(f"no such loads: {', '.join(unknown)}; there are {', '.join(LOADS)}")
    return names


def _rounds(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= MOST_ROUNDS):
        raise argparse.ArgumentTypeError(f"expected rounds, 1 to {MOST_ROUNDS}, found {text!r}")
    return int(text)


def _described() -> str:
    each = "; ".join(f"{name}: {load.description}" for name, load in LOADS.items())
    return f"the loads to run (S,M,D). {each}. All with {HEADS} heads of {HEAD_DIM}, float32"


def _say(what: str) -> None:
    """On a terminal, shows what is being done, in a line that the next one overwrites."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)


def _prepared(load: Load, client: Client, stack: ExitStack, timeout: float) -> _Submit:
    """A function that sends the load's request; what it needs on the server lives as long as the stack."""
    random = np.random.default_rng(0)
    tokens = CACHED if load.cached else load.queries
    query = random.standard_normal((HEADS, load.queries, HEAD_DIM), dtype=np.float32)
    key, value = (random.standard_normal((HEADS, tokens, HEAD_DIM), dtype=np.float32) for _ in range(2))
    if load.cached:
        cache = stack.enter_context(client.create_cache(HEADS, HEAD_DIM, ttl=LEASE_S, timeout=timeout))
        cache.append(key, value, timeout=timeout)

        def submit() -> Future[AttentionResult[Array]]:
            return client.submit(query, caches=[cache])

    else:

        def submit() -> Future[AttentionResult[Array]]:
            return client.submit(query, key, value, causal=True)

        client.attend(query, key, value, causal=True, timeout=timeout)  # which fails soon if there is no service
    output = submit().result().output
    error = float(np.abs(output[:, -1] - _last_row(query, key, value)).max())
    if not error <= TOLERANCE:  # written so that NaN fails, too
        raise WrongAnswerError(f"the answer is off by {error:.1e}, where {TOLERANCE:.0e} is allowed")
    return submit


def _last_row(query: Array, key: Array, value: Array) -> Array:
    """The attention of the last query, which attends to every key, in float64: [H, D]."""
    last, key, value = (array.astype(np.float64) for array in (query[:, -1], key, value))
    scores = np.einsum("hd,hsd->hs", last, key) / np.sqrt(HEAD_DIM)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(np.einsum("hs,hsd->hd", weights / weights.sum(axis=-1, keepdims=True), value))


class _Answer(NamedTuple):
    """What is kept of an answer: not its arrays, which would soon add up to gigabytes."""

    due: float
    at: float
    timings: Timings
    batch_size: int

    @property
    def latency(self) -> float:
        return self.at - self.due


_Answers: TypeAlias = "queue.SimpleQueue[_Answer | BaseException]"
"""Answers and errors, as they arrive."""


def _send(submit: _Submit, due: float, answers: _Answers) -> None:
    def take(future: Future[AttentionResult[Array]]) -> None:
        at, error = time.perf_counter(), future.exception()
        if error is not None:
            answers.put(error)
            return
        result = future.result()
        answers.put(_Answer(due, at, result.timings, result.batch_size))

    submit().add_done_callback(take)


def _next(answers: _Answers) -> _Answer:
    """The next answer; if it is an error, raises it."""
    answer = answers.get()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _closed(name: str, submit: _Submit, seconds: float) -> Measured:
    """Keeps the load's number of requests in flight, for `seconds` after a warm-up."""
    answers: _Answers = queue.SimpleQueue()
    for _ in range(LOADS[name].in_flight):
        _send(submit, time.perf_counter(), answers)
    begin, cpu = time.perf_counter() + WARM_UP * seconds, time.process_time()
    counted: list[_Answer] = []
    while (answer := _next(answers)).at < begin + seconds:
        if answer.at < begin:
            cpu = time.process_time()
        else:
            counted.append(answer)
        _send(submit, time.perf_counter(), answers)
    counted.append(answer)
    used = time.process_time() - cpu
    for _ in range(LOADS[name].in_flight - 1):
        _next(answers)
    return _measured(name, None, None, counted, answer.at - begin, used)


def _open(name: str, submit: _Submit, share: float, rate: float, seconds: float, soon: float) -> Measured:
    """Poisson arrivals at `rate` per second, for `seconds` after a warm-up; waits for all answers. An answer is in time
    if it comes at most `soon` seconds after those `seconds` are over.
    """
    gaps = np.random.default_rng(1).exponential(1 / rate, int(rate * seconds * 2) + 100)
    times = np.cumsum(gaps)
    warm = WARM_UP * seconds
    times = times[times < seconds + warm]
    answers: _Answers = queue.SimpleQueue()
    begin, cpu = time.perf_counter(), time.process_time()
    for after in times.tolist():
        due = begin + after
        if (left := due - time.perf_counter()) > 0:
            time.sleep(left)
        _send(submit, due, answers)
    done = [_next(answers) for _ in times]
    used = (time.process_time() - cpu) * seconds / (seconds + warm)
    counted = [answer for answer in done if answer.due >= begin + warm]
    if not counted:
        raise WrongAnswerError(f"nothing was due within {seconds:g} s at {rate:.1f} a second")
    last = max(answer.at for answer in done)
    end = begin + warm + seconds + soon
    in_time = sum(answer.at <= end for answer in counted) / len(counted)
    return _measured(name, share, in_time, counted, last - begin - warm, used)


def _measured(
    name: str, share: float | None, in_time: float | None, counted: Sequence[_Answer], seconds: float, cpu: float
) -> Measured:
    p50, p99, p999 = np.percentile([answer.latency for answer in counted], (50, 99, 99.9)).tolist()
    return Measured(
        load=name,
        share=share,
        in_time=in_time,
        requests=len(counted),
        requests_per_second=len(counted) / seconds,
        tokens_per_second=len(counted) * LOADS[name].queries / seconds,
        p50_s=p50,
        p99_s=p99,
        p999_s=p999,
        queue_s=float(np.median([answer.timings.queue for answer in counted])),
        compute_s=float(np.median([answer.timings.compute for answer in counted])),
        batch_size=float(np.mean([answer.batch_size for answer in counted])),
        client_cpu_s=cpu / len(counted),
    )


def _text(found: Sequence[Measured]) -> str:
    """The results as a table; times are in microseconds."""
    rows = [TITLES]
    behind = [each for each in found if each.falls_behind]
    for each in found:
        times = (each.p50_s, each.p99_s, each.p999_s, each.queue_s, each.compute_s, each.client_cpu_s)
        rows.append(
            (
                each.load,
                "closed" if each.share is None else f"open, {each.share:.0%}{' *' * each.falls_behind}",
                f"{each.requests_per_second:,.0f}",
                f"{each.tokens_per_second:,.0f}",
                *(f"{seconds * 1e6:,.0f}" for seconds in times),
                f"{each.batch_size:.1f}",
                f"{'~' * (each.spread > NOISY)}{each.spread:.0%}",
            )
        )
    loads = [f"{name}: {LOADS[name].description}" for name in dict.fromkeys(each.load for each in found)]
    notes = [
        "Times are in µs; in open loops they count from when a request was due. Each line is the median of its rounds;",
        "spread is half the range of their rates, or in open loops of their p99, over the median.",
    ]
    if any(each.spread > NOISY for each in found):
        notes.append(f"~ The rounds differ by more than {NOISY:.0%}: something else was at work, here or there.")
    if behind:
        shares = ", ".join(f"{each.load} {each.share:.0%}: {each.in_time:.0%}" for each in behind)
        notes.append(
            f"* More were due than were answered (in time {shares}), so times say how long this went on, and no more: "
            "the closed loop was faster. Measure longer (--seconds), on a machine that does nothing else."
        )
    return "\n".join([table(rows, words=2), "", *loads, *notes])
