"""A resident encoder with random weights, of a size that people deploy: six blocks, 384 wide, 12 heads, token ids in.

Requests are a few hundred bytes and tens of milliseconds of work, so that a server can be offered many times what it
can do by a caller on the same machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from attnserve.v1 import attention_pb2 as pb
from attnserve.v1 import tensor_pb2
from benchmarks.chaos.questions import Array

NAME: Final = "encoder"
BLOCKS, WIDTH, HIDDEN, HEADS, VOCABULARY = 6, 384, 1536, 12, 4096


def write(directory: Path) -> Path:
    """Writes the encoder into a directory. Returns the file of definitions that the server is to load."""
    random = np.random.default_rng(0)
    tensors: dict[str, Array] = {"embedding.token.weight": _matrix(random, VOCABULARY, WIDTH)}
    for block in range(BLOCKS):
        for name in ("query", "key", "value", "output"):
            tensors[f"blocks.{block}.self.{name}.weight"] = _matrix(random, WIDTH, WIDTH)
        tensors[f"blocks.{block}.feed_forward.up.weight"] = _matrix(random, HIDDEN, WIDTH)
        tensors[f"blocks.{block}.feed_forward.down.weight"] = _matrix(random, WIDTH, HIDDEN)
        for name in ("self", "feed_forward"):
            tensors[f"blocks.{block}.{name}.norm.weight"] = np.ones(WIDTH, np.float32)
    save_file(tensors, directory / "encoder.safetensors")
    names = dict.fromkeys(name.replace(".0.", ".{n}.") for name in tensors if ".0." in name or "embedding" in name)
    definition = directory / "layers.toml"
    definition.write_text(
        f'[[layers]]\nname = "{NAME}"\nkind = "transformer"\nfile = "encoder.safetensors"\nheads = {HEADS}\n'
        'pre_norm = true\nactivation = "gelu"\nnorm = { kind = "rms", epsilon = 1e-6 }\n[layers.parameters]\n'
        + "".join(f'"{name}" = "{name}"\n' for name in names),
        "utf-8",
    )
    return definition


def request(length: int, seed: int) -> bytes:
    """An encoded ApplyRequest with so many tokens."""
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, length)
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_INT64, shape=[length], data=ids.astype("<i8").tobytes())
    return pb.ApplyRequest(layer=NAME, input=tensor).SerializeToString()


def _matrix(random: np.random.Generator, outputs: int, inputs: int) -> Array:
    """A random matrix; what it is multiplied with keeps about the same size."""
    return random.standard_normal((outputs, inputs), dtype=np.float32) * np.float32(inputs**-0.5)
