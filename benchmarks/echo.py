"""The ceiling of transport: the same service's stream and unary calls, answered with a reply that was encoded before.

Run by the benchmark as `python -m benchmarks.echo WORKLOAD`; prints its address.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
from grpc import aio

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.reply import stream_reply
from attnserve_server.stream import MAX_JOINED_BYTES, read_message
from benchmarks.workloads import WORKLOADS


async def serve(name: str) -> None:
    """Answers until it is ended."""
    reply = next(workload for workload in WORKLOADS if workload.name == name).reply()

    async def unary(_: bytes, context: Any) -> bytes:
        return reply

    async def stream(_: object, context: Any) -> None:
        # Reads and writes overlap as they do in the service.
        due: list[int] = []
        ready = asyncio.Event()

        async def write() -> None:
            most = max(1, MAX_JOINED_BYTES // len(reply))
            while True:
                await ready.wait()
                ready.clear()
                while due:
                    ids, due[:] = due[:most], due[most:]
                    pieces = (
                        stream_reply(call_id, pb.AttendStreamReply.ATTEND_FIELD_NUMBER, [reply], len(reply))[0]
                        for call_id in ids
                    )
                    await context.write(b"".join(piece for reply_pieces in pieces for piece in reply_pieces))

        writer = asyncio.create_task(write())
        try:
            while isinstance(message := await context.read(), bytes):
                due.extend(call.id for call in read_message(message, 4096)[1])
                ready.set()
        finally:
            writer.cancel()

    server = aio.server(
        options=(
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
        )
    )
    handlers: dict[str, Any] = {
        "Attend": grpc.unary_unary_rpc_method_handler(unary),
        "AttendStream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("attnserve.v1.AttentionService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready: grpc=127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
