"""The feed-forward part of a block: down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial

import torch
from torch.nn.functional import gelu, relu, silu

from attnserve_server.layers.projection import Linear, Projection
from attnserve_server.layers.specification import Activation, FeedForward
from attnserve_server.native.products import Products


def _gelu(rows: torch.Tensor) -> torch.Tensor:
    """For contiguous inputs torch has another implementation than for others. The gate of a single row is always
    contiguous, so all are made so.
    """
    return gelu(rows.contiguous())


ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": relu,
    "gelu": _gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "silu": silu,
}
"""All of them are 0 at 0."""


class FeedForwardRows:
    """A feed-forward part with its parameters, which it removes from `parameters`: `up` has the gate's columns first.

    The hidden units are padded to whole vectors with units that are 0 and weigh nothing.
    """

    def __init__(
        self,
        specification: FeedForward,
        parameters: MutableMapping[str, torch.Tensor],
        prefix: str,
        products: Products | None,
    ) -> None:
        names = ("gate", "up") if specification.gated else ("up",)
        self.up = Projection.of(
            [parameters.pop(f"{prefix}{name}.weight") for name in names],
            [parameters.pop(f"{prefix}{name}.bias", None) for name in names],
            products,
        )
        self.gated = specification.gated
        self.activation = specification.activation
        self.down = Linear.of(parameters, f"{prefix}down", products)

    @property
    def row_flops(self) -> int:
        """The cost of one row."""
        return self.up.row_flops + self.down.row_flops

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, width] to [n, width]."""
        hidden, activate = self.up(rows), ACTIVATIONS[self.activation]
        if self.gated:
            gate, up = hidden.chunk(2, 1)
            return self.down(activate(gate) * up)
        return self.down(activate(hidden))
