"""Recognises boolean attention masks that a few numbers can describe.

In: a mask `[B, 1, Lq, S]` (true means attend), the position of its first query, the width of its local attention.
Out: a `MaskPattern`, or None if no options of a request can express the mask.

A causal mask of 1024 by 1024 tokens is a megabyte on the wire, once per layer; "causal" is two bytes, and lets the
server choose a kernel that skips what is excluded. The pattern is checked against the mask's elements, never guessed
from where the mask came from, so that both always mean the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_Window = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """What a mask excludes, as options of a request. They combine with AND."""

    causal: bool = False
    """Whether query i attends key j only if `j <= query_offset + i`."""
    window: _Window | None = None
    """How many keys a query sees to the left and to the right of its position; -1 for no bound."""
    query_offset: int = 0
    """The position of the first query among the keys. It matters only for `causal` and `window`."""
    kv_lengths: torch.Tensor | None = None
    """Int64 `[B]`: keys from that length on are excluded."""
    keys: torch.Tensor | None = None
    """Bool `[B, 1, 1, S]`: which keys may be attended at all."""

    def options(self, query_length: int, kv_length: int, *, resident: bool) -> dict[str, Any]:
        """The arguments of `Client.attend` that express this pattern; none for what it does not restrict. `resident`
        says whether the keys are in caches: there, queries are by default at the end.
        """
        options: dict[str, Any] = {}
        if self.window is not None:
            options["window"] = self.window
        if self.causal:
            options["causal"] = True
        if (self.query_offset or resident) and (self.causal or self.window is not None):
            # An alignment is part of the request's header; an offset is one more tensor.
            if self.causal and self.query_offset == kv_length - query_length and self.kv_lengths is None:
                options["causal"] = "bottom_right"
            else:
                options["query_offset"] = self.query_offset
        if self.kv_lengths is not None:
            options["kv_lengths"] = self.kv_lengths
        if self.keys is not None:
            options["mask"] = self.keys
        return options


def recognise(mask: torch.Tensor, query_offset: int, local_size: int | None) -> MaskPattern | None:
    """The pattern of a bool mask `[B, 1, Lq, S]`.

    `query_offset` is the position of the first query relative to the first key. `local_size` is the width of a
    sliding window, if there may be one: a causal query sees that many keys, itself included; a bidirectional one
    that many to either side. If these two are wrong, a pattern may be missed, but a wrong one is never returned.
    """
    if mask.shape[1] != 1:
        return None
    batch, _, query_length, kv_length = mask.shape
    # An axis of stride 0 comes from broadcasting: its first element stands for all.
    allowed = (mask[:1] if mask.stride(0) == 0 else mask)[:, 0]
    attended = allowed.any(dim=1)

    index = torch.arange(kv_length, device=mask.device)
    distance = torch.arange(query_length, device=mask.device)[:, None] + query_offset - index
    candidates: list[tuple[bool, _Window | None]] = [(False, None), (True, None)]
    if local_size is not None:
        candidates += [(True, (local_size - 1, -1)), (False, (local_size, local_size))]
    found = None
    for causal, window in candidates:
        shape = _shape(distance, causal, window)
        # If the mask is this shape combined with a choice of keys, the choice is the keys that any query attends.
        if torch.equal(shape & attended[:, None], allowed):
            lengths, keys = _key_choice(attended, shape.any(dim=0))
            pattern = MaskPattern(
                causal=causal,
                window=window,
                query_offset=query_offset,
                kv_lengths=None if lengths is None else lengths.expand(batch),
                keys=None if keys is None else keys[:, None, None, :],
            )
            if keys is None:
                return pattern
            found = found or pattern
    return found


def _shape(distance: torch.Tensor, causal: bool, window: _Window | None) -> torch.Tensor:
    """Which pairs are allowed, `[Lq, S]`, from how far each key lies behind each query."""
    shape = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        shape &= distance >= 0
    if window is not None:
        left, right = window
        if left >= 0:
            shape &= distance <= left
        if right >= 0:
            shape &= distance >= -right
    return shape


def _key_choice(attended: torch.Tensor, reached: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A choice of keys, `attended`, bool `[B, S]`: as lengths `[B]` if these express it, else as keys, bool `[B, S]`;
    neither if all keys are chosen.

    Keys that no query reaches (`reached` is bool `[S]`) are never attended, so they may count as chosen or not.
    """
    keys = attended | ~reached
    if bool(keys.all()):
        return None, None
    index = torch.arange(len(reached), device=reached.device)
    lengths = torch.where(attended, index + 1, 0).amax(dim=1)
    if bool((keys | (index >= lengths[:, None])).all()):
        return lengths, None
    return None, keys
