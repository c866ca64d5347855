"""What gRPC's core is told of connections and messages."""

from __future__ import annotations

from pathlib import Path

from grpc._cython import cygrpc

from attnserve import TLS
from attnserve._config import Settings
from attnserve_server.config import Config
from attnserve_server.port import channel_options
from attnserve_server.stream_life import StreamLife


def test_grpc_knows_every_option() -> None:
    """It says nothing of those that it does not know: with one, idle callers were sent away for their pings."""
    settings = Settings("name:1", "stream", None, 0, 1, (), tls=TLS(server_name="other"))
    server = [*channel_options(Config()), *StreamLife(age=1.0, grace=1.0).channel_options]
    core = Path(cygrpc.__file__).read_bytes()
    names = {name for name, _ in (*settings.channel_options("name:1"), *server)}
    assert len(names) > 15
    assert {name for name in names if name.encode() + b"\0" not in core} == set()
