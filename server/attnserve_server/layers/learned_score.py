"""One head's attention with an additive or general score of learned parameters; keys are the contexts themselves."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from attnserve_server.devices.compute import ROWS, Compute
from attnserve_server.kernels import AdditiveScore, GeneralScore, written_out
from attnserve_server.layers.attend import Scoring
from attnserve_server.layers.multi_head import Heads
from attnserve_server.layers.product import is_native
from attnserve_server.layers.projection import Projection
from attnserve_server.layers.rows import Batch
from attnserve_server.layers.specification import LearnedScore
from attnserve_server.native.products import Products


class LearnedScoreHead:
    """The head with its parameters. The kernel applies those of the score; values are projected here."""

    def __init__(
        self, specification: LearnedScore, parameters: MutableMapping[str, torch.Tensor], products: Products | None
    ) -> None:
        # In the kernel's dtype: it would convert them again for every sequence.
        wide = {
            name: values.to(written_out.first_dtype(values, learned=True))
            for name, values in parameters.items()
            if not name.startswith("value.")
        }
        score: AdditiveScore | GeneralScore
        if specification.score == "additive":
            score = AdditiveScore(wide["query.weight"], wide["key.weight"], wide.get("bias"), wide.get("score.weight"))
            width = 2 * specification.units
        else:
            score = GeneralScore(wide["score.weight"])
            width = specification.contexts
        self.scoring = Scoring(
            scale=1.0 if specification.scale is None else specification.scale,
            pair_flops=2 * (width + specification.outputs),
            score=score,
        )
        self.multiple = ROWS if specification.value else 1
        """What batches must have a multiple of rows of: without values to project, nothing is computed row by row."""
        self._value, self._parallel = None, False
        if specification.value:
            value, bias = parameters.pop("value.weight"), parameters.pop("value.bias", None)
            self._parallel = is_native(value.dtype, products)
            self._value = Projection.of([value], [bias], products)

    def project_batch(
        self, compute: Compute, batch: Batch, inputs: torch.Tensor, contexts: torch.Tensor | None
    ) -> Heads:
        """The head's queries, keys and values of a batch."""
        contexts = inputs if contexts is None else contexts
        values = contexts
        if self._value is not None:
            flops = len(contexts) * self._value.row_flops
            values = compute.rows(self._value, contexts, flops=flops, parallel=self._parallel)
            values = values[:, self._value.columns[0]]
        return inputs.unsqueeze(1), contexts.unsqueeze(1), values.unsqueeze(1)

    def finish_batch(self, compute: Compute, attended: torch.Tensor) -> torch.Tensor:
        """The outputs of a batch: those of the attention, unchanged."""
        return attended
