"""The dtypes of tensors that the library computes with, as it encodes them."""

from __future__ import annotations

from typing import Final

import torch

from attnserve_server.native.library import BFLOAT16, FLOAT16, FLOAT32

DTYPES: Final = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
