"""Multi-head attention with its weights: from rows to the heads' queries, keys and values, and from heads to rows.

Where all three come from the same rows they are one matrix product; keys and values always are. Where packed weights
cannot be divided, and keys may come from other rows, queries are a separate product.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from attnserve_server.devices.compute import Compute, RowFunction, Rows
from attnserve_server.kernels import accumulation_dtype
from attnserve_server.layers.attend import Scoring
from attnserve_server.layers.direct import Direct, Weights, direct_of
from attnserve_server.layers.positions import Rotation
from attnserve_server.layers.product import NativeProduct, divides, is_native, products_of
from attnserve_server.layers.projection import Linear, Projection
from attnserve_server.layers.rows import Batch, multiple_of
from attnserve_server.layers.specification import Attention
from attnserve_server.native.passages import Turning

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [n, Hq, D], keys [m, Hk, D] and values [m, Hk, Dv]."""


class MultiHead:
    """Attention's projections, which remove their parameters from `parameters`. `project`, `project_apart`,
    `project_queries`, `project_contexts` and `finish` are functions of rows.

    `own`: keys always come from the same rows as queries, by `project`; otherwise `project_queries` and
    `project_contexts` are there too, with `project_apart` for the same rows where a weight cannot be divided.
    """

    def __init__(
        self,
        specification: Attention,
        parameters: MutableMapping[str, torch.Tensor],
        prefix: str,
        dtype: torch.dtype,
        compute: Compute,
        *,
        own: bool,
    ) -> None:
        self._specification = specification
        products = products_of(compute)
        maps = [
            (parameters.pop(f"{prefix}{name}.weight"), parameters.pop(f"{prefix}{name}.bias", None))
            for name in ("query", "key", "value")
        ]
        weights, biases = [weight for weight, _ in maps], [bias for _, bias in maps]
        device = weights[0].device
        alike = specification.inputs == specification.contexts and divides(weights[0], products)
        self._all = Projection.of(weights, biases, products) if own or alike else None
        if own:
            assert self._all is not None
            self.project_flops = self._all.row_flops
            """The cost of `project` for a row, or of `project_apart`."""
        else:
            if self._all is not None:
                self._query, self._context = self._all.part(0, 1), self._all.part(1, 3)
            else:  # the weight is packed for one product, and must not be kept twice
                self._query = Projection.of(weights[:1], biases[:1], products)
                self._context = Projection.of(weights[1:], biases[1:], products)
            self.query_flops, self.context_flops = self._query.row_flops, self._context.row_flops
            """The cost of projecting one row."""
            self.project_flops = self.query_flops + self.context_flops
        self.parallel = is_native(dtype, products)
        """Products divide themselves among the device's threads."""
        self.rotation = None if specification.rotary is None else Rotation(specification.rotary, dtype, compute)
        self.elementwise = () if self.rotation is None else self.rotation.elementwise
        """The widths of rows of torch's elementwise functions."""
        self.multiple = multiple_of(self.parallel, self.elementwise)
        """What batches must have a multiple of rows of."""
        self.output = Linear.of(parameters, f"{prefix}output", products) if specification.output else None
        """From the heads side by side; None: these are the output."""
        wide = accumulation_dtype(dtype)
        heads, width, value_width = specification.heads, specification.head_dim, specification.value_dim
        self.value_width = heads * value_width
        """The width of all heads' outputs, side by side."""
        self.widest = max(width, value_width)
        """The larger one of the widths of a head's keys and values."""
        self.scoring = Scoring(
            scale=width**-0.5 if specification.scale is None else specification.scale,
            pair_flops=2 * heads * (width + value_width),
            softcap=specification.softcap,
            alibi_slopes=torch.tensor(specification.alibi, dtype=wide, device=device) if specification.alibi else None,
        )

    def direct(self) -> Direct | None:
        """The layer for the native library, which computes it in one call, for inputs that attend to themselves; None
        if it cannot.
        """
        project = None if self._all is None or self.rotation is not None else self._all.product
        output = None if self.output is None else self.output.product
        if self._all is None or not isinstance(project, NativeProduct):
            return None
        if not (output is None or isinstance(output, NativeProduct)):
            return None
        query, key, value = self._all.columns
        weights = Weights(
            project.weight, (query.start, key.start, value.start), None if output is None else output.weight
        )
        return direct_of(self._specification, weights, self.scoring)

    def entrance(self, crossed: bool) -> tuple[Projection, tuple[Turning | None, Turning | None]]:
        """The projection of `project` or, if `crossed`, of `project_queries`; and how queries and keys are rotated
        behind it, which they are only in `project`.
        """
        projection = self._query if crossed else self._all
        assert projection is not None
        if self.rotation is None:
            return projection, (None, None)
        query, key, _ = projection.columns
        head_dim = self._specification.head_dim
        return projection, (self.rotation.turning(query, head_dim), self.rotation.turning(key, head_dim))

    @property
    def finish_flops(self) -> int:
        """The cost of one row of the output."""
        return 0 if self.output is None else self.output.row_flops

    def project(self, rows: torch.Tensor, *rotations: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of the same rows, for `heads`; a single rotation is for both queries and keys."""
        assert self._all is not None
        projected = self._all(rows)
        self._rotate(projected, self._all.columns[0], rotations[:1])
        self._rotate(projected, self._all.columns[1], rotations[-1:])
        return projected

    def project_apart(self, rows: torch.Tensor, *rotations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`project_queries` and `project_contexts` of the same rows."""
        return self.project_queries(rows, *rotations[:1]), self.project_contexts(rows, *rotations[-1:])

    def project_queries(self, rows: torch.Tensor, *rotations: torch.Tensor) -> torch.Tensor:
        """Queries, for `heads`."""
        projected = self._query(rows)
        self._rotate(projected, self._query.columns[0], rotations)
        return projected

    def project_contexts(self, rows: torch.Tensor, *rotations: torch.Tensor) -> torch.Tensor:
        """Keys and values, for `heads`."""
        projected = self._context(rows)
        self._rotate(projected, self._context.columns[0], rotations)
        return projected

    def _rotate(self, projected: torch.Tensor, columns: slice, rotations: tuple[torch.Tensor, ...]) -> None:
        if self.rotation is not None:
            self.rotation.rotate(_heads(projected, columns, self._specification.head_dim), *rotations)

    def heads(self, projected: torch.Tensor, contexts: torch.Tensor | None = None) -> Heads:
        """The heads, as views of what `project`, or `project_queries` and `project_contexts`, returned."""
        width, value_width = self._specification.head_dim, self._specification.value_dim
        if contexts is None:
            assert self._all is not None
            query, key, value = self._all.columns
            contexts = projected
        else:
            (query,), (key, value) = self._query.columns, self._context.columns
        return (
            _heads(projected, query, width),
            _heads(contexts, key, width),
            _heads(contexts, value, value_width),
        )

    def finish(self, attended: torch.Tensor) -> torch.Tensor:
        """The heads side by side [n, Hq Dv] to [n, outputs]."""
        return attended if self.output is None else self.output(attended)

    def project_batch(
        self, compute: Compute, batch: Batch, inputs: torch.Tensor, contexts: torch.Tensor | None
    ) -> Heads:
        """The heads of a batch whose keys may come from other rows. Rotations count the positions of inputs from their
        offsets, and those of contexts from 0, even if contexts are the inputs.
        """
        rotations: tuple[torch.Tensor, ...] = ()
        key_rotations: tuple[torch.Tensor, ...] = ()
        if self.rotation is not None:
            device = compute.torch_device
            packing = batch.inputs if batch.contexts is None else batch.contexts
            key_rotations = (self.rotation.of(packing.positions([0] * len(packing.lengths), device)),)
            rotations = (self.rotation.of(batch.positions(device)),)
        if contexts is None:
            flops = len(inputs) * self.project_flops
            if self._all is not None:
                return self.heads(self._rows(compute, self.project, inputs, *rotations, *key_rotations, flops=flops))
            return self.heads(*self._rows(compute, self.project_apart, inputs, *rotations, *key_rotations, flops=flops))
        flops, of_contexts = len(inputs) * self.query_flops, len(contexts) * self.context_flops
        queries = self._rows(compute, self.project_queries, inputs, *rotations, flops=flops)
        keys = self._rows(compute, self.project_contexts, contexts, *key_rotations, flops=of_contexts)
        return self.heads(queries, keys)

    def finish_batch(self, compute: Compute, attended: torch.Tensor) -> torch.Tensor:
        """The outputs of a batch."""
        if self.output is None:
            return attended
        return self._rows(compute, self.finish, attended, flops=len(attended) * self.finish_flops)

    def _rows(self, compute: Compute, function: RowFunction[Rows], *tensors: torch.Tensor, flops: int) -> Rows:
        return compute.rows(function, *tensors, flops=flops, parallel=self.parallel)


def _heads(rows: torch.Tensor, columns: slice, width: int) -> torch.Tensor:
    """A view [n, H, width] of some columns."""
    return rows[:, columns].view(len(rows), (columns.stop - columns.start) // width, width)
