"""A step of a resident decoder: callers send the id of each sequence's next token and get its hidden state; weights,
keys and values stay in the service. Built as Llama is: 4 blocks, 512 wide, 8 heads of 64, float32.

Its weights are random and the same in every run: the service reads them from a file that is written for it, torch in
process uses them directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.numpy import save_file
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from attnserve import AsyncClient, Cache, Client
from attnserve._requests.operation import APPLY
from attnserve.v1 import attention_pb2 as pb
from benchmarks.caches import SequenceCaches
from benchmarks.plain import Array, Plain, PlainAttention, exact_attention
from benchmarks.workload import HEAD_DIM, HEADS, TIMINGS, Batch, Result, Workload, tensor

WIDTH: Final = HEADS * HEAD_DIM
HIDDEN: Final = 1408
"""The width within a feed-forward."""
BLOCKS: Final = 4
VOCABULARY: Final = 1000
PROMPT: Final = 512
"""The number of tokens before a step."""
EPSILON: Final = 1e-5
ROTARY_BASE: Final = 10_000.0
LAYER: Final = "decoder"

_DEFINITION: Final = f"""\
[[layers]]
name = "{LAYER}"
preset = "llama"
file = "decoder.safetensors"
config = false
heads = {HEADS}
norm.epsilon = {EPSILON}
rotary.base = {ROTARY_BASE}
"""


@lru_cache(maxsize=1)
def weights() -> dict[str, Array]:
    """The decoder's parameters by the names of Llama's, scaled to preserve activations' size."""
    random = np.random.default_rng(4)
    linears = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
    linears |= {"mlp.gate_proj": (HIDDEN, WIDTH), "mlp.up_proj": (HIDDEN, WIDTH), "mlp.down_proj": (WIDTH, HIDDEN)}
    found = {"embed_tokens.weight": random.standard_normal((VOCABULARY, WIDTH), dtype=np.float32)}
    norms = ["norm.weight"]
    for block in range(BLOCKS):
        for name, shape in linears.items():
            scale = np.float32(shape[1] ** -0.5)
            found[f"layers.{block}.{name}.weight"] = random.standard_normal(shape, dtype=np.float32) * scale
        norms += [f"layers.{block}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
    for name in norms:
        found[name] = random.uniform(0.5, 1.5, WIDTH).astype(np.float32)
    return found


@dataclass(frozen=True)
class DecoderStep(Workload):
    """Requests of one token for each of some sequences; the length of a request is the number of its sequences."""

    _caches: SequenceCaches = field(default_factory=SequenceCaches, init=False, compare=False, repr=False)

    operation = APPLY

    @property
    def tolerance(self) -> float:
        """Dozens of chained sums: more than the 2e-6 of an attention alone."""
        return 5e-5

    @property
    def description(self) -> str:
        """In words."""
        count = max(self.lengths)
        what = f"1 token through a resident decoder, after {PROMPT:,}"
        return what if count == 1 else f"{count} times in one message: {what}"

    @property
    def cache_bytes(self) -> int:
        """Room for the prompts, and for what is appended."""
        return 1 << 30

    @property
    def peers(self) -> bool:
        """They have no caches."""
        return False

    def plain(self, number: int) -> Plain:
        """Peers are sent none."""
        raise NotImplementedError

    def server_flags(self, directory: Path) -> list[str]:
        """Makes the service load the decoder before it is ready."""
        save_file(weights(), directory / "decoder.safetensors")
        definitions = directory / "layers.toml"
        definitions.write_text(_DEFINITION, "utf-8")
        return ["--layers", str(definitions)]

    def prepare(self, address: str) -> None:
        """Makes the caches and appends the prompts, or cuts off what has been appended to them."""
        self._caches.prepare(address, max(self.lengths), PROMPT, self._prompted)

    def _prompted(self, client: Client, sequence: int) -> Cache:
        cache = client.create_cache(HEADS, HEAD_DIM, layers=BLOCKS)
        client.apply(LAYER, token_ids(sequence)[:-1], cache=cache)
        return cache

    def arrays(self, number: int) -> tuple[Array]:
        """The next token of each sequence, int64 [B]."""
        return (np.stack([token_ids(sequence)[-1] for sequence in range(self.lengths[number])]),)

    def output_shape(self, number: int) -> tuple[int, ...]:
        """[B, 512]."""
        return (self.lengths[number], WIDTH)

    def request(self, number: int) -> bytes:
        """An encoded ApplyRequest."""
        count = self.lengths[number]
        return pb.ApplyRequest(
            layer=LAYER,
            input=tensor(*self.arrays(number)),
            lengths=tensor(np.ones(count, np.int64)),
            caches=[pb.CacheReference(name=name) for name in self._caches.names(count)],
        ).SerializeToString()

    def reply(self, number: int) -> bytes:
        """An encoded reply as long as the service's."""
        output = tensor(np.zeros(self.output_shape(number), np.float32))
        reply = pb.ApplyResponse(timings=TIMINGS, batch_size=1, output=output, layer_version=1)
        reply.cache_lengths.extend([PROMPT + 1] * self.lengths[number])
        return reply.SerializeToString()

    def expected(self, number: int) -> Array:
        """[B, 512], float64: the last rows of all tokens of a sequence at once."""
        return np.stack([_exact(sequence) for sequence in range(self.lengths[number])])

    def batches(self) -> list[Batch]:
        """All sequences of a request together, over keys and values that torch has computed beforehand, in place."""
        return [Batch((number,), _in_process(self.lengths[number])) for number in self.numbers]

    def ask(self, client: Client, arrays: tuple[Array, ...]) -> Result:
        """Sends the arrays of a request and waits for the result."""
        caches = self._caches.of(client)
        return client.apply(LAYER, *arrays, lengths=[1] * len(caches), caches=caches)

    def submit(self, client: Client, arrays: tuple[Array, ...]) -> Future[Any]:
        """Sends the arrays of a request; the future is of a `Result`."""
        caches = self._caches.of(client)
        return client.submit_apply(LAYER, *arrays, lengths=[1] * len(caches), caches=caches)

    def submit_async(self, client: AsyncClient, arrays: tuple[Array, ...]) -> asyncio.Future[Any]:
        """Sends the arrays of a request; the future is of a `Result`."""
        return asyncio.ensure_future(self._submit_async(client, arrays))

    async def _submit_async(self, client: AsyncClient, arrays: tuple[Array, ...]) -> Result:
        caches = await self._caches.of_async(client)
        return await client.apply(LAYER, *arrays, lengths=[1] * len(caches), caches=caches)


def token_ids(sequence: int) -> Array:
    """The tokens of a sequence, int64: its prompt, and one more."""
    return np.random.default_rng(sequence).integers(0, VOCABULARY, PROMPT + 1)


@lru_cache(maxsize=32)
def _exact(sequence: int) -> Array:
    """The hidden state of a sequence's last token, [512] float64, by the definition."""
    exact = {name: array.astype(np.float64) for name, array in weights().items()}

    def norm(rows: Array, name: str) -> Array:
        return np.asarray(rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + EPSILON) * exact[f"{name}.weight"])

    def heads(rows: Array, name: str) -> Array:
        return np.asarray((rows @ exact[f"{name}.weight"].T).reshape(len(rows), HEADS, HEAD_DIM).swapaxes(0, 1))

    def rotated(states: Array) -> Array:
        first, second = np.split(states, 2, axis=-1)
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

    rows = exact["embed_tokens.weight"][token_ids(sequence)]
    angles = np.arange(len(rows))[:, None] * ROTARY_BASE ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cosine, sine = np.cos(angles), np.sin(angles)
    for block in range(BLOCKS):
        name = f"layers.{block}"
        normed = norm(rows, f"{name}.input_layernorm")
        query, key, value = (heads(normed, f"{name}.self_attn.{each}_proj") for each in "qkv")
        attended = exact_attention(PlainAttention(rotated(query), rotated(key), value, causal=True))
        rows = rows + attended.swapaxes(0, 1).reshape(rows.shape) @ exact[f"{name}.self_attn.o_proj.weight"].T
        normed = norm(rows, f"{name}.post_attention_layernorm")
        gate = normed @ exact[f"{name}.mlp.gate_proj.weight"].T
        hidden = gate / (1 + np.exp(-gate)) * (normed @ exact[f"{name}.mlp.up_proj.weight"].T)
        rows = rows + hidden @ exact[f"{name}.mlp.down_proj.weight"].T
    return norm(rows[-1], "norm")


def _in_process(count: int) -> partial[list[torch.Tensor]]:
    """The step of the first `count` sequences by torch's own functions, as a call."""
    parameters = {name.removesuffix(".weight"): torch.from_numpy(array) for name, array in weights().items()}
    for block in range(BLOCKS):
        own = f"layers.{block}."
        for joined, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            room = joined.partition(".")[0]
            parameters[own + joined] = torch.cat([parameters[f"{own}{room}.{part}_proj"] for part in parts])
    ids = torch.from_numpy(np.stack([token_ids(sequence) for sequence in range(count)]))
    # [K or V, B, H, tokens, D] for each block, with room for the token of the step.
    states = [torch.empty(2, count, HEADS, PROMPT + 1, HEAD_DIM) for _ in range(BLOCKS)]
    _forward(parameters, ids[:, :-1], states, 0)
    return partial(_forward, parameters, ids[:, -1:], states, PROMPT)


def _forward(
    parameters: dict[str, torch.Tensor], ids: torch.Tensor, states: Sequence[torch.Tensor], before: int
) -> list[torch.Tensor]:
    """The hidden states of the last of some tokens [B, L] that follow `before` others, as a list of one [B, 512]."""
    batch, length = ids.shape
    rows = parameters["embed_tokens"][ids]
    exponents = torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
    angles = torch.arange(before, before + length)[:, None] * ROTARY_BASE**-exponents
    cosine, sine = angles.cos(), angles.sin()
    for block, own in enumerate(states):
        name = f"layers.{block}"
        normed = rms_norm(rows, (WIDTH,), parameters[f"{name}.input_layernorm"], EPSILON)
        projected = linear(normed, parameters[f"{name}.self_attn.qkv"])
        query, key, value = projected.view(batch, length, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        own[0, :, :, before : before + length] = _rotated(key, cosine, sine)
        own[1, :, :, before : before + length] = value
        key, value = own[:, :, :, : before + length]
        query = _rotated(query, cosine, sine)
        attended = scaled_dot_product_attention(query, key, value, is_causal=length > 1).transpose(1, 2)
        rows = rows + linear(attended.reshape(batch, length, WIDTH), parameters[f"{name}.self_attn.o_proj"])
        normed = rms_norm(rows, (WIDTH,), parameters[f"{name}.post_attention_layernorm"], EPSILON)
        gate, up = linear(normed, parameters[f"{name}.mlp.gate_up"]).chunk(2, dim=-1)
        rows = rows + linear(silu(gate) * up, parameters[f"{name}.mlp.down_proj"])
    return [rms_norm(rows[:, -1], (WIDTH,), parameters["norm"], EPSILON)]


def _rotated(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
