"""Computes one batch on a device and, if that fails, finds the requests to blame: only they get an error.

In: a device and entries of one group. Out: results or errors, each with the entries that it is for. A batch that fails
is computed again, request by request. A request that finds no memory beside another batch is computed once more,
without that batch (`shared_lock.py`). What a request appends to caches has its place already, so that writing it again
changes nothing. If the device is lost, the whole batch fails. A batch that was launched without waiting, and failed, is
computed again in the same ways.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from attnserve_server.errors import ComputationFailed, DeviceFailed, OutOfMemory, RequestError
from attnserve_server.requests.work import BatchResult, Finish
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
    whole = _attempt_with_room(device, entries, lock)
    if len(entries) == 1 or isinstance(whole, BatchResult | DeviceFailed):
        return [Part(entries, whole)]
    parts: list[Part] = []
    for entry in entries:
        outcome = _attempt_with_room(device, [entry], lock)
        if isinstance(outcome, DeviceFailed):
            return [Part(entries, outcome)]
        parts.append(Part([entry], outcome))
    return parts


def launch(device: Device, entries: list[Entry], lock: SharedLock) -> Callable[[], list[Part]] | None:
    """Launches a batch on this thread, beside others, without waiting. Returns a function that waits for it and, if it
    has failed, computes it again. None if it cannot be launched, or launching it failed.
    """
    if not lock.try_share():
        return None
    finish = None
    try:
        finish = entries[0].request.launch_batch(device, [entry.request for entry in entries])
    except Exception:
        logger.info("a batch of %d could not be launched", len(entries), exc_info=True)
    finally:
        if finish is None:
            lock.unshare()
    return None if finish is None else partial(_finished, device, entries, lock, [finish])


def _finished(device: Device, entries: list[Entry], lock: SharedLock, finish: list[Finish]) -> list[Part]:
    try:
        return [Part(entries, _of_all(finish.pop()(), entries))]  # popped: if it fails, nothing keeps what it holds
    except Exception:
        logger.info("a batch of %d that was launched failed", len(entries), exc_info=True)
    finally:
        lock.unshare()
    return compute(device, entries, lock)


def _of_all(result: BatchResult, entries: Sequence[Entry]) -> BatchResult:
    if len(result.results) != len(entries):
        raise RuntimeError(f"{len(result.results)} results of {len(entries)} requests")
    return result


def _attempt_with_room(device: Device, entries: Sequence[Entry], lock: SharedLock | None) -> BatchResult | RequestError:
    """Computes requests, beside another batch if there is a lock. A single request that finds no memory then is
    computed again with the device to itself.
    """
    if lock is None:
        return _attempt(device, entries)
    with lock.shared():
        found = _attempt(device, entries)
    if len(entries) > 1 or not isinstance(found, OutOfMemory):
        return found
    with lock.exclusive():
        return _attempt(device, entries)


def _attempt(device: Device, entries: Sequence[Entry]) -> BatchResult | RequestError:
    try:
        result = _of_all(entries[0].request.run_batch(device, [entry.request for entry in entries]), entries)
    except RequestError as error:  # of one of them, which gets it once it is computed alone
        return error
    except Exception as error:
        blame = device.blame(error)
        logger.exception("a batch of %d failed", len(entries), extra={"blame": blame})
        if blame == "device":
            return DeviceFailed()
        return OutOfMemory() if blame == "memory" else ComputationFailed(type(error).__name__)
    return result
