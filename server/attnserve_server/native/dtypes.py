"""The dtypes of tensors that the library computes with, as it encodes them; `payloads.py` has those of the wire."""

from __future__ import annotations

from typing import Final

import torch

from attnserve_server.native.library import BFLOAT16, FLOAT16, FLOAT32

NATIVE_FROM_TORCH: Final = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
