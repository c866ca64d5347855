"""A greedy caller, which takes all it can get, beside a modest one, which asks for what it needs.

The greedy one is a process of its own, with the lowest priority that the machine has: it is to take from the other by
what it gets from the server, not by what it takes from this machine.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from attnserve import AttnServeError, Client, OverloadedError, Transport
from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from attnserve_server.access.tokens import digest, format_hash, new_token
from benchmarks.chaos.callers import TRANSPORTS, running
from benchmarks.chaos.outcome import Figure, exactly
from benchmarks.chaos.questions import TOLERANCE, Array, exact
from benchmarks.chaos.traffic import STREAM
from benchmarks.chaos.victim import Victim

PROMISE: Final = (
    "A caller that takes all it can get by requests that take long for their operations, or by large ones, leaves "
    "another at least a third of what that gets alone; by tiny calls on hundreds of streams, a tenth: refusing them "
    "takes the event loop's processor, half of what a machine of two has. Every answer is right, and none of the "
    "other's calls fails, but a hundredth at most may be refused as often as they are retried."
)
SECONDS: Final = 15.0
CALLERS: Final[Mapping[Transport, int]] = {"stream": 32, "unary": 16}
"""How many calls the modest caller has in flight, each made by a thread. With more unary calls, a server under load
refuses some as often as they are retried.
"""
QUESTIONS: Final = 4
STREAMS: Final = 200
TINY_CALLS: Final = 500
IN_FLIGHT: Final = 16
TOKEN: Final = "ATTNSERVE_TOKEN"
"""The environment variable with the greedy caller's token."""


def run(minutes: float) -> list[Figure]:
    """Runs each way to be greedy for 15 seconds, or for a quarter of `minutes` if that is less; with each transport of
    the modest caller.
    """
    seconds = SECONDS * min(minutes, 1.0)
    tokens = {name: new_token() for name in ("greedy", "modest")}
    with tempfile.TemporaryDirectory(prefix="attnserve-greedy-") as directory:
        callers = Path(directory) / "callers.toml"
        callers.write_text(
            "".join(
                f'[[tokens]]\nname = "{name}"\nroles = ["use"]\nhash = "{format_hash(digest(token))}"\n'
                for name, token in tokens.items()
            ),
            "utf-8",
        )
        with Victim("--callers", str(callers), "--log-level", "error") as victim:
            figures = []
            for transport in TRANSPORTS:
                with Client(victim.address, token=tokens["modest"], transport=transport) as client:
                    found = _beside_each(Modest(client, CALLERS[transport]), victim.address, tokens["greedy"], seconds)
                figures += [replace(each, name=f"{transport}: {each.name}") for each in found]
    return figures


def _beside_each(modest: Modest, address: str, token: str, seconds: float) -> list[Figure]:
    """What a modest caller gets alone, and beside each way to be greedy."""
    modest.answers_in(seconds / 3)  # not counted: the server learns how long these requests take
    alone = modest.answers_in(seconds)
    figures = [Figure("answers alone", alone / seconds, "/s")]
    ended = 0
    for way, (_, least) in WAYS.items():
        with beside(way, address, token) as greedy:
            beside_it = modest.answers_in(seconds)
        figures += [
            Figure(f"answers beside {way}", beside_it / alone, "of those alone", at_least=least),
            Figure(f"{way}, answered or refused", greedy.replies, at_least=1),
        ]
        ended += greedy.ended
    return [
        *figures,
        exactly("greedy streams that ended", ended, 0),
        Figure("calls refused with every retry", modest.refused / modest.answered, "of those answered", at_most=0.01),
        exactly("calls that failed", modest.failed, 0),
        exactly("wrong answers", modest.wrong, 0),
    ]


class Modest:
    """A caller with a few calls in flight, of a millisecond or two each, whose answers are checked."""

    def __init__(self, client: Client, callers: int) -> None:
        self._client, self._callers = client, callers
        random = np.random.default_rng(0)
        self._questions = [random.standard_normal((3, 8, 256, 64), dtype=np.float32) for _ in range(QUESTIONS)]
        self._answers = [exact(question[0], question[1], question[2], False) for question in self._questions]
        self.answered = self.refused = self.failed = self.wrong = 0

    def answers_in(self, seconds: float) -> int:
        """How many answers it gets in that time."""
        stop, right = threading.Event(), [0] * self._callers

        def ask(caller: int) -> None:
            for number in itertools.cycle(range(QUESTIONS)):
                if stop.is_set():
                    return
                try:
                    output = self._client.attend(*self._questions[number]).output
                except OverloadedError:
                    self.refused += 1
                    continue
                except AttnServeError:
                    self.failed += 1
                    continue
                if np.abs(output - self._answers[number]).max() > TOLERANCE:
                    self.wrong += 1
                right[caller] += 1

        threads = [
            threading.Thread(target=ask, args=(number,), name=f"modest-{number}") for number in range(self._callers)
        ]
        with running(threads, stop):
            stop.wait(seconds)
        self.answered += sum(right)
        return sum(right)


class Replies:
    """How many replies the greedy caller had, and how many of its streams ended. Known once it has ended itself."""

    replies = ended = 0


@contextmanager
def beside(way: str, address: str, token: str) -> Iterator[Replies]:
    """A greedy caller while the block runs."""
    command = [sys.executable, "-m", "benchmarks.chaos.greedy", way, address]
    known = Replies()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {TOKEN: token}
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()  # it has been answered
            yield known
            process.stdin.close()
            known.replies, known.ended = map(int, process.stdout.readline().split())
        finally:
            process.kill()


class Greedy:
    """Calls without end, and their replies."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._token = os.environ[TOKEN]
        self._lock = threading.Lock()
        self.replies = self.ended = 0
        self.answered = threading.Event()
        """Set at the first reply."""

    def ask(self, *question: Array, **options: Any) -> None:
        """Asks the same again and again, from several threads."""
        client = Client(self._address, token=self._token)

        def again() -> None:
            while True:
                client.attend(*question, **options)
                self._take(1)

        for _ in range(IN_FLIGHT):
            threading.Thread(target=again, daemon=True).start()

    def stream(self, message: bytes) -> None:
        """Sends a message again and again on a connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        channel = grpc.insecure_channel(self._address, options)
        method: Any = channel.stream_stream(STREAM, None, pb.AttendStreamResponse.FromString)
        metadata = (("authorization", f"Bearer {self._token}"),)

        def read() -> None:
            try:
                for reply in method(itertools.repeat(message), metadata=metadata):
                    self._take(len(reply.replies))
            except grpc.RpcError:
                with self._lock:
                    self.ended += 1

        threading.Thread(target=read, daemon=True).start()

    def _take(self, replies: int) -> None:
        with self._lock:
            self.replies += replies
        self.answered.set()


def _slow(greedy: Greedy) -> None:
    random = np.random.default_rng(1)
    greedy.ask(*random.standard_normal((3, 8, 256, 4), dtype=np.float32), return_scores="weights")


def _narrow(greedy: Greedy) -> None:
    greedy.ask(*np.random.default_rng(1).standard_normal((3, 8, 2048, 1), dtype=np.float32))


def _large(greedy: Greedy) -> None:
    greedy.ask(*np.random.default_rng(1).standard_normal((3, 8, 1024, 64), dtype=np.float32))


def _streams(greedy: Greedy) -> None:
    message = pb.AttendStreamRequest()
    for number in range(TINY_CALLS):
        call = message.calls.add(id=number)
        for tensor in (call.attend.query, call.attend.key, call.attend.value):
            tensor.dtype = tensor_pb2.DATA_TYPE_FLOAT32
            tensor.shape.extend((1, 1, 4))
            tensor.data = bytes(16)
    for _ in range(STREAMS):
        greedy.stream(message.SerializeToString())


WAYS: Final[Mapping[str, tuple[Callable[[Greedy], None], float]]] = {
    "weights that are returned": (_slow, 1 / 3),
    "narrow heads": (_narrow, 1 / 3),
    "large requests": (_large, 1 / 3),
    "tiny calls on 200 streams": (_streams, 0.1),
}
"""For each way to be greedy: what the caller does, and how much it must leave to the modest one, as a share of what
that gets alone.
"""


def main(way: str, address: str) -> None:
    """Is greedy until the standard input ends; writes how many replies it had, and how many of its streams ended."""
    os.nice(19)
    greedy = Greedy(address)
    begin, _ = WAYS[way]
    begin(greedy)
    greedy.answered.wait()
    print("answered", flush=True)
    sys.stdin.read()
    print(greedy.replies, greedy.ended, flush=True)
    os._exit(0)  # with calls in flight


if __name__ == "__main__":
    main(*sys.argv[1:])
