"""How calls travel: as streams and unary calls, over gRPC's synchronous channel and over its asyncio channel."""
