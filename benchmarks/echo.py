"""The ceiling of transport: the same service's stream and unary calls, answered with replies that were encoded before.

Run by the benchmark as `python -m benchmarks.echo`; says on which address it serves. A request is known by what it asks
for and its length, which say how long its reply has to be.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

import grpc
from grpc import aio

from attnserve._operation import OPERATIONS
from attnserve.v1 import attention_pb2 as pb
from attnserve_server.calls import Call, read_message
from attnserve_server.reply import stream_reply
from attnserve_server.stream import MAX_JOINED_BYTES
from benchmarks.workloads import WORKLOADS

MAX_CALLS: Final = 4096
FIELDS: Final = {name: pb.AttendStreamReply.DESCRIPTOR.fields_by_name[name].number for name in OPERATIONS}


def encoded_replies() -> dict[tuple[str, int], bytes]:
    """The reply to every request of every workload, by operation and length of the request."""
    found = {}
    for workload in WORKLOADS.values():
        by_length = {length: number for number, length in enumerate(workload.lengths)}
        for number in by_length.values():
            found[workload.operation.field, len(workload.request(number))] = workload.reply(number)
    return found


async def answer_stream(replies: dict[tuple[str, int], bytes], context: aio.ServicerContext[bytes, bytes]) -> None:
    """Answers one stream; reads and writes overlap as they do in the service."""
    due: deque[Call] = deque()
    ready = asyncio.Event()

    async def write() -> None:
        while True:
            await ready.wait()
            ready.clear()
            while due:
                pieces, joined = [], 0
                while due and joined < MAX_JOINED_BYTES:
                    call = due.popleft()
                    assert call.operation is not None
                    _, begin, end = call.request
                    reply = replies[call.operation, end - begin]
                    more, size = stream_reply(call.id, FIELDS[call.operation], [reply], len(reply))
                    pieces += more
                    joined += size
                await context.write(b"".join(pieces))

    writer = asyncio.create_task(write())
    try:
        while isinstance(message := await context.read(), bytes):
            due.extend(read_message(message, MAX_CALLS)[1])
            ready.set()
    finally:
        writer.cancel()


async def serve() -> None:
    """Answers until it is ended."""
    replies = encoded_replies()

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
    asyncio.run(serve())
