"""What only the garbage collector frees, and so much later: on a GPU, tensors in cycles take the memory of others."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_tensors_in_cycles() -> Iterator[None]:
    """Asserts that what is done within leaves no tensors behind that only the garbage collector frees."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [tuple(each.shape) for each in gc.garbage if type(each) is torch.Tensor]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        gc.unfreeze()
    assert not left
