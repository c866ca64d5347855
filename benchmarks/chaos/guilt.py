"""Requests whose computation fails, among requests that are in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from attnserve import AttnServeError, Client, OverloadedError, ServerError
from benchmarks.chaos.faulty import FAULTS
from benchmarks.chaos.outcome import Figure, exactly
from benchmarks.chaos.questions import TOLERANCE, Array, Question, Verdict, exact
from benchmarks.chaos.victim import Victim

PROMISE: Final = (
    "A kernel that fails, or a device that has no memory: only the request at fault gets an error, its own (INTERNAL, "
    "or RESOURCE_EXHAUSTED). The others in its batch are answered, what they append to caches is there once, and what "
    "the request at fault would have appended is not there."
)
GUILTY: Final = {"kernel": ServerError, "memory": OverloadedError}
ROUNDS: Final = 20
INNOCENT: Final = 16
CACHES: Final = 12


def run(minutes: float) -> list[Figure]:
    """Runs the experiment, on a device that fails when a request asks for it."""
    del minutes
    verdicts: Counter[str] = Counter()
    with (
        Victim("--max-batch-requests", "32", module="benchmarks.chaos.faulty") as victim,
        Client(victim.address) as client,
    ):
        for number, fault in _rounds():
            _ask(client, number, fault, verdicts)
        _append(client, verdicts)
        log = victim.stderr()
    failed_together = [int(size) for size in re.findall(r"a batch of (\d+) failed", log) if size != "1"]
    return [
        Figure("failed batches with innocent requests in them", len(failed_together), at_least=1),
        Figure("requests in the largest of them", max(failed_together, default=0)),
        exactly("guilty requests that got their own error", verdicts["guilty"], 3 * ROUNDS),
        exactly("guilty requests that got another, or none", verdicts["unpunished"], 0),
        exactly("innocent requests answered", verdicts["right"], 2 * ROUNDS * INNOCENT),
        exactly("innocent requests that failed", verdicts["failed"], 0),
        exactly("wrong answers", verdicts["wrong"], 0),
        exactly("appends beside failures", verdicts["appended"], ROUNDS * (CACHES - 1)),
        exactly("caches without exactly what was appended", verdicts["damaged"], 0),
    ]


def _rounds() -> Iterator[tuple[int, str]]:
    return ((number, fault) for number in range(ROUNDS) for fault in GUILTY)


def _ask(client: Client, number: int, fault: str, verdicts: Counter[str]) -> None:
    """Sends questions of one shape together; one of them fails."""
    questions = [Question.numbered(1000 * number + place, number) for place in range(INNOCENT + 1)]
    guilty = number % (INNOCENT + 1)
    questions[guilty].query.flat[0] = FAULTS[fault]
    futures = [client.submit(each.query, each.key, each.value, causal=each.causal) for each in questions]
    for place, (question, future) in enumerate(zip(questions, futures, strict=True)):
        error = future.exception()
        if place == guilty:
            verdicts["guilty" if type(error) is GUILTY[fault] else "unpunished"] += 1
        elif error is not None:
            verdicts["failed"] += 1
        else:
            verdicts["right" if question.judge(future.result().output) is Verdict.RIGHT else "wrong"] += 1


def _append(client: Client, verdicts: Counter[str]) -> None:
    """Makes steps of decoders, of which one fails in each round. In the end, the caches must have all the others."""
    caches = [client.create_cache(2, 8) for _ in range(CACHES)]
    tokens: list[list[tuple[Array, Array]]] = [[] for _ in caches]
    for number in range(ROUNDS):
        random = np.random.default_rng(number)
        steps = random.standard_normal((CACHES, 3, 2, 1, 8), dtype=np.float32)
        guilty = number % CACHES
        steps[guilty, 0].flat[0] = FAULTS["kernel" if number % 2 else "memory"]
        futures: list[Any] = [
            client.submit(step[0], step[1], step[2], caches=cache, causal=True)
            for cache, step in zip(caches, steps, strict=True)
        ]
        for place, future in enumerate(futures):
            error = future.exception()
            if place == guilty:
                verdicts["guilty" if isinstance(error, AttnServeError) else "unpunished"] += 1
            elif error is not None:
                verdicts["failed"] += 1
            else:
                tokens[place].append((steps[place, 1], steps[place, 2]))
                verdicts["appended"] += 1
    for cache, appended in zip(caches, tokens, strict=True):
        key, value = (np.concatenate(each, axis=1) for each in zip(*appended, strict=True))
        query = np.random.default_rng(0).standard_normal((2, 3, 8), dtype=np.float32)
        (length,) = cache.info().lengths
        output = cache.attend(query).output
        damaged = length != len(appended) or np.abs(output - exact(query, key, value, False)).max() > TOLERANCE
        verdicts["damaged"] += bool(damaged)
