"""Options that attention and layers have in common, read from their messages: checked, in canonical form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from attnserve.v1 import attention_pb2 as pb
from attnserve_server.errors import InvalidRequest
from attnserve_server.requests.tensors import TensorSpec, read_integers

MAX_POSITION = 1 << 40
"""Offsets beyond this are an error. No axis of a tensor comes close."""

MAX_PRIORITY = 8

ScoreStage: TypeAlias = Literal["raw", "capped", "masked", "weights"]

SCORE_STAGES: Mapping[int, ScoreStage | None] = {
    pb.SCORE_STAGE_UNSPECIFIED: None,
    pb.SCORE_STAGE_RAW: "raw",
    pb.SCORE_STAGE_CAPPED: "capped",
    pb.SCORE_STAGE_MASKED: "masked",
    pb.SCORE_STAGE_WEIGHTS: "weights",
}

Message: TypeAlias = pb.AttendRequest | pb.ApplyRequest


def window_of(message: Message) -> tuple[int, int]:
    """The window: how far queries see to the left and to the right, -1 where there is no bound."""
    if not message.HasField("window"):
        return -1, -1
    return _bound(message.window, "left"), _bound(message.window, "right")


def _bound(window: pb.Window, side: Literal["left", "right"]) -> int:
    if not window.HasField(side):
        return -1
    bound: int = getattr(window, side)
    if bound < -1:
        raise InvalidRequest(f"window.{side}", "-1 or more", bound)
    return -1 if bound > 2 * MAX_POSITION else bound  # wider than the distance between any two positions


def causal_window(causal: bool, window: tuple[int, int]) -> tuple[int, int]:
    """The window in which a causal mask, if there is one, and a window leave keys."""
    left, right = window
    return left, 0 if causal else right


def is_bottom_right(message: Message) -> bool:
    """Whether the last query is aligned with the last key."""
    if message.alignment not in pb.Alignment.values():
        raise InvalidRequest("alignment", "one of the alignments", message.alignment)
    return message.alignment == pb.ALIGNMENT_BOTTOM_RIGHT


def score_stage_of(message: Message) -> ScoreStage | None:
    """Which scores to return."""
    if message.return_scores not in SCORE_STAGES:
        raise InvalidRequest("return_scores", "one of the stages", message.return_scores)
    return SCORE_STAGES[message.return_scores]


def priority_of(message: Message) -> int:
    """The priority."""
    if not -MAX_PRIORITY <= message.priority <= MAX_PRIORITY:
        raise InvalidRequest("priority", f"from {-MAX_PRIORITY} to {MAX_PRIORITY}", message.priority)
    return message.priority


def read_offsets(spec: TensorSpec | None, payloads: Sequence[memoryview], sequences: int) -> list[int] | None:
    """The position of each sequence's first query, one for all being given for each; None for no tensor. Raises
    InvalidRequest for one that is out of range.
    """
    given = read_integers(spec, payloads)
    if given is None:
        return None
    offsets = [check_offset(index, offset) for index, offset in enumerate(given)]
    return offsets * sequences if len(offsets) == 1 else offsets


def check_offset(index: int, offset: int) -> int:
    """The offset, if it is in range. Raises InvalidRequest if not."""
    if not -MAX_POSITION <= offset <= MAX_POSITION:
        raise InvalidRequest(f"query_offset[{index}]", "from -2**40 to 2**40", offset)
    return offset
