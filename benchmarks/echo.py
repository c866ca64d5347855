"""The ceiling of transport: the service's stream and unary calls, answered with replies that are encoded beforehand.

Run by the benchmark as `python -m benchmarks.echo DEVICE workloads`, or `curves`: it knows their requests, and prints
the address that it serves on. A request's operation and length determine the reply, whose length depends on them only.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import grpc
from grpc import aio

from attnserve._requests.operation import OPERATIONS
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.host.allocator import keep_one_heap
from attnserve_server.host.event_loop import EventLoop
from attnserve_server.rpc.calls import read_message, stream_reply
from attnserve_server.rpc.outbox import MAX_JOINED_BYTES
from benchmarks.curves import points
from benchmarks.suites import SUITES
from benchmarks.workload import Workload

MAX_CALLS: Final = 4096
HEADER_BYTES: Final = 16
"""The largest difference in length between replies to requests of one length."""
FIELDS: Final = {name: pb.AttendStreamReply.DESCRIPTOR.fields_by_name[name].number for name in OPERATIONS}


def encoded_replies(workloads: Iterable[Workload]) -> dict[tuple[str, int], bytes]:
    """The replies to all requests of some workloads, by the operation and the length of the request."""
    found: dict[tuple[str, int], bytes] = {}
    for workload in workloads:
        for number in {workload.kind(number): number for number in workload.numbers}.values():
            key, reply = (workload.operation.field, len(workload.request(number))), workload.reply(number)
            if abs(len(found.setdefault(key, reply)) - len(reply)) > HEADER_BYTES:
                raise ValueError(f"{workload.name}: another request of {key[1]} bytes has another reply")
    return found


async def answer_stream(replies: dict[tuple[str, int], bytes], context: aio.ServicerContext[bytes, bytes]) -> None:
    """Answers one whole stream; reads and writes overlap as in the service."""
    due: deque[tuple[int, int, bytes]] = deque()
    ready = asyncio.Event()
    reading = True

    async def write() -> None:
        while reading or due:
            await ready.wait()
            ready.clear()
            while due:
                pieces, joined = [], 0
                while due and joined < MAX_JOINED_BYTES:
                    call_id, field, reply = due.popleft()
                    more, size = stream_reply(call_id, field, [reply], len(reply))
                    pieces += more
                    joined += size
                await context.write(b"".join(pieces))

    writer = asyncio.create_task(write())
    try:
        while isinstance(message := await context.read(), bytes):
            for call in read_message(message, MAX_CALLS)[1]:
                assert call.operation is not None
                _, begin, end = call.request
                due.append((call.id, FIELDS[call.operation], replies[call.operation, end - begin]))
            ready.set()
        reading = False
        ready.set()
        await writer
    finally:
        writer.cancel()


async def serve(workloads: Iterable[Workload]) -> None:
    """Answers until the process is ended."""
    replies = encoded_replies(workloads)

    async def stream(_: object, context: aio.ServicerContext[bytes, bytes]) -> None:
        await answer_stream(replies, context)

    def unary(name: str) -> Any:
        async def answer(request: bytes, _: object) -> bytes:
            return replies[name, len(request)]

        return grpc.unary_unary_rpc_method_handler(answer)

    server = aio.server(
        options=(
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
        )
    )
    methods = {operation.path.rpartition("/")[2]: unary(name) for name, operation in OPERATIONS.items()}
    methods["AttendStream"] = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("attnserve.v1.AttentionService", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready: grpc=127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    _, device, known = sys.argv
    keep_one_heap()  # as the service does
    suite = SUITES[device]
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(serve(suite.workloads.values() if known == "workloads" else points(suite.curves)))
