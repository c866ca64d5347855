"""How a real CUDA device fails, in a separate process: a lost context cannot be recovered."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(300),
]

FAULTS = """
import torch
from attnserve_server.devices.cuda import CudaDevice

device = CudaDevice(0)
for what in (
    lambda: torch.empty(1 << 50, dtype=torch.uint8, device=device.torch_device),
    lambda: torch.ones(2, device=device.torch_device) @ torch.ones(3, device=device.torch_device),
    lambda: torch.ones(2, device=device.torch_device)[torch.tensor([7], device=device.torch_device)].item(),
):
    try:
        what()
    except Exception as error:
        print(device.blame(error), flush=True)
"""


def test_who_is_to_blame() -> None:
    """Out of memory, mismatched shapes, and an index that trips a kernel's assertion, after which nothing works."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.split() == ["memory", "request", "device"], done.stderr
