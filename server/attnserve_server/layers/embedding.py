"""From token ids, or activations, to the activations that the first block sees."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import embedding

from attnserve_server.kernels import accumulation_dtype
from attnserve_server.layers.norms import build_norm
from attnserve_server.layers.positions import sinusoids
from attnserve_server.layers.specification import Embedding


class EmbeddingRows:
    """An embedding with its tables: sums and norm are computed in at least float32, and rounded once."""

    def __init__(self, specification: Embedding, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._specification = specification
        self._dtype = dtype
        self._wide = accumulation_dtype(dtype)
        self._token = parameters.get("embedding.token.weight")
        self._position = parameters.get("embedding.position.weight")
        self._segment = parameters.get("embedding.segment.weight")
        self.takes_positions = self._position is not None or specification.sinusoidal
        self.takes_segments = self._segment is not None
        norm = specification.norm
        self._norm = None if norm is None else build_norm(norm, parameters, "embedding.norm.")

    def __call__(self, inputs: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Ids [n] or activations [n, width] to activations [n, width]. `others` are positions [n] and segments [n],
        each if it takes them.
        """
        given = iter(others)
        rows = (inputs if self._token is None else embedding(inputs, self._token)).to(self._wide)
        if self._token is not None and self._specification.scale != 1:
            rows = rows * self._specification.scale
        if self.takes_positions:
            positions = next(given)
            if self._position is not None:
                rows = rows + embedding(positions + self._specification.position_offset, self._position)
            if self._specification.sinusoidal:
                rows = rows + sinusoids(positions, self._specification.width).to(self._wide)
        if self._segment is not None:
            rows = rows + embedding(next(given), self._segment)
        return (rows if self._norm is None else self._norm(rows)).to(self._dtype)
