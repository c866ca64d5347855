"""How calls travel: streams and unary calls, by gRPC's channel for threads and by that for asyncio."""
