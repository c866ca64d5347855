"""`python stepping_decoders.py LIBRARY COUNT`: random decoders, stepped over caches in one call, by several threads.

In: the path of a library, and the number of decoders. Out: `sound` if all results have the bits of block by block, also
while another caller has the team. With a library built with sanitizers, these find nothing.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import random_layers as make
import torch
from bits import assert_same_bits
from decoding import Decoding, Part, random_decoder

from attnserve_server.devices.cpu import CpuDevice
from attnserve_server.native import library

HELPERS = 2


def helped(instructions: str) -> CpuDevice:
    """A device whose steps are always shared by all its threads."""
    device = CpuDevice(1 + HELPERS, 0, library.Library(instructions))
    team = device._team
    assert team is not None
    assert len(team) == HELPERS
    device._threads_for = lambda flops: library.Threads(team, HELPERS)  # type: ignore[method-assign]
    return device


def step(device: CpuDevice, number: int) -> None:
    """Steps a decoder twice, and once with a sequence that is not finite. Raises if anything is wrong."""
    random = Random(number)
    architecture = random_decoder(random)
    width, page_tokens = architecture.block.self_attention.inputs, random.choice((1, 3, 16))
    one, other = (Decoding(device, architecture, "float32", page_tokens) for _ in range(2))
    caches = [(one.create(), other.create()) for _ in range(2)]
    caches.append((one.fork(caches[0][0]), other.fork(caches[0][1])))
    for attempt in range(3):
        lengths = [random.choice((1, 1, 2, 9)) for _ in caches]
        rows = [make.random_rows(length, width, 10 * number + attempt, "float32") for length in lengths]
        if attempt == 2:
            rows[1][0, 0] = torch.nan
        together, by_blocks = ([[Part(each[n], own)] for each, own in zip(caches, rows, strict=True)] for n in range(2))
        found, expected = one.run(*together), other.run(*by_blocks, by_blocks=True)
        for place in (0, 2) if attempt == 2 else range(3):
            assert_same_bits(found[place].numpy(), expected[place].numpy())
    assert [succeeded for _, succeeded in one.stepped] == [True, True, False, True]


def main() -> None:
    """Raises, or the process is killed, if anything is wrong."""
    library.PATH = Path(sys.argv[1])  # type: ignore[misc]
    library._found.cache_clear()
    devices = [helped(instructions) for instructions in library.available()]
    with ThreadPoolExecutor(2) as callers:
        for device in devices:
            list(callers.map(lambda number, device=device: step(device, number), range(int(sys.argv[2]))))
            device.close()
    print("sound")


if __name__ == "__main__":
    main()
