"""Computes one batch on a device and, if that fails, finds the requests to blame: only they get an error.

In: a device and entries of one group. Out: results or errors, each with the entries that it is for. A batch that fails
is computed again request by request; one that then finds no memory beside another batch is computed once more without
that (`shared_lock.py`). What a request appends to caches has its place already, so writing it again changes nothing.
If the device is lost, the whole batch fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from attnserve_server.errors import ComputationFailed, DeviceFailed, OutOfMemory, RequestError
from attnserve_server.requests.work import BatchResult
from attnserve_server.scheduling.entry import Entry
from attnserve_server.scheduling.shared_lock import SharedLock

if TYPE_CHECKING:
    from attnserve_server.devices import Device

logger = logging.getLogger(__name__)


class Part(NamedTuple):
    """Entries of a batch that have one outcome."""

    entries: list[Entry]
    """In the batch's order."""
    outcome: BatchResult | RequestError
    """Their results, or the error that each of them gets."""


def compute(device: Device, entries: list[Entry], lock: SharedLock | None = None) -> list[Part]:
    """Computes a batch. Returns all entries in their order, each with its outcome; `DeviceFailed` is for all of them.

    `lock` is given if the device may compute another batch meanwhile.
    """
    if lock is None:
        whole = _attempt(device, entries)
    elif len(entries) == 1:
        whole = _attempt_with_room(device, entries, lock)
    else:
        with lock.shared():
            whole = _attempt(device, entries)
    if len(entries) == 1 or isinstance(whole, BatchResult | DeviceFailed):
        return [Part(entries, whole)]
    parts: list[Part] = []
    for entry in entries:
        outcome = _attempt(device, [entry]) if lock is None else _attempt_with_room(device, [entry], lock)
        if isinstance(outcome, DeviceFailed):
            return [Part(entries, outcome)]
        parts.append(Part([entry], outcome))
    return parts


def _attempt_with_room(device: Device, entries: Sequence[Entry], lock: SharedLock) -> BatchResult | RequestError:
    """Computes one request, beside another batch or, if there is no memory for both, alone."""
    with lock.shared():
        found = _attempt(device, entries)
    if not isinstance(found, OutOfMemory):
        return found
    with lock.exclusive():
        return _attempt(device, entries)


def _attempt(device: Device, entries: Sequence[Entry]) -> BatchResult | RequestError:
    try:
        result = entries[0].request.run_batch(device, [entry.request for entry in entries])
        if len(result.results) != len(entries):
            raise RuntimeError(f"{len(result.results)} results of {len(entries)} requests")
    except Exception as error:
        blame = device.blame(error)
        logger.exception("a batch of %d failed", len(entries), extra={"blame": blame})
        if blame == "device":
            return DeviceFailed()
        return OutOfMemory() if blame == "memory" else ComputationFailed(type(error).__name__)
    return result
