"""How much memory a part of a reply keeps for as long as it waits to be sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def kept_bytes(part: memoryview) -> int:
    """The bytes of the memory that a part of a reply is in, with all that others have there."""
    owner: Any = part.obj
    while isinstance(owner, np.ndarray | memoryview):
        behind = owner.base if isinstance(owner, np.ndarray) else owner.obj
        if behind is None:
            return int(owner.nbytes)
        owner = behind
    return owner.untyped_storage().nbytes() if isinstance(owner, torch.Tensor) else len(owner)
