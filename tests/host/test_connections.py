"""Closing a connection by whom it is with: that one and no other, in whatever form the address comes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import quote

import pytest
from loopback import loopback

from attnserve_server.host.connections import DESCRIPTORS, disconnect


@contextmanager
def connections(host: str, count: int, dual: bool = False) -> Iterator[tuple[list[socket.socket], list[str]]]:
    """The callers' ends, and what gRPC calls these on the server's side."""
    with ExitStack() as stack:
        if dual:
            listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        stack.enter_context(listener)
        ends, names = [], []
        for _ in range(count):
            end = stack.enter_context(socket.create_connection((host, listener.getsockname()[1])))
            stack.enter_context(listener.accept()[0])
            port = end.getsockname()[1]
            ends.append(end)
            names.append(f"ipv6:{quote(f'[{host}]')}:{port}" if ":" in host else f"ipv4:{host}:{port}")
        yield ends, names


def is_open(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return bool(end.recv(1))
    except BlockingIOError:
        return True


@pytest.mark.parametrize("host", loopback())
def test_one_connection_is_closed_and_no_descriptor_is_left(host: str) -> None:
    with connections(host, 3) as (ends, names):
        before = len(os.listdir(DESCRIPTORS))
        assert disconnect(names[1])
        assert [is_open(end) for end in ends] == [True, False, True]
        assert len(os.listdir(DESCRIPTORS)) == before


def test_several_are_closed_at_once() -> None:
    with connections("127.0.0.1", 3) as (ends, names):
        assert disconnect(*names[:2], "unix:")
        assert [is_open(end) for end in ends] == [False, False, True]


@pytest.mark.skipif("::1" not in loopback(), reason="this machine has no IPv6")
def test_a_socket_for_both_versions_of_ip() -> None:
    with connections("127.0.0.1", 1, dual=True) as ((end,), (name,)):
        assert disconnect(name)
        assert not is_open(end)


def test_sockets_that_have_no_address_are_left_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, connections("127.0.0.1", 1) as ((end,), (name,)):
        assert disconnect("unix:", name)
        assert (is_open(end), is_open(ours), is_open(theirs)) == (False, True, True)


def test_the_server_reads_the_end_of_what_was_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as end:
        accepted, _ = listener.accept()
        with accepted:
            assert disconnect("ipv4:{}:{}".format(*end.getsockname()))
            assert accepted.recv(1) == b""


@pytest.mark.parametrize(
    "peer", ["unix:", "unix:/tmp/socket", "unix:/tmp/socket:1", "ipv4:127.0.0.1:x", "", "ipv4:192.0.2.1:1"]
)
def test_what_is_not_there_is_not_found(peer: str) -> None:
    assert not disconnect(peer)
