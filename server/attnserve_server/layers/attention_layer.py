"""A layer that is a single attention: multi-head with its projections, or one head with a learned score.

Inputs attend to a context or to themselves; one batch may have requests of both sorts.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch

from attnserve_server.devices.compute import Compute
from attnserve_server.layers.application import Application
from attnserve_server.layers.attend import attend_stacks, kinds_of, replies
from attnserve_server.layers.direct import Direct, Plan
from attnserve_server.layers.layer import LayerInput, LayerOutput
from attnserve_server.layers.learned_score import LearnedScoreHead
from attnserve_server.layers.multi_head import MultiHead
from attnserve_server.layers.product import products_of
from attnserve_server.layers.rows import Batch
from attnserve_server.layers.specification import Attention, LayerSpecification, LearnedScore


class AttentionLayer:
    """The layer on its device."""

    def __init__(
        self,
        specification: LayerSpecification,
        architecture: Attention | LearnedScore,
        parameters: MutableMapping[str, torch.Tensor],
        compute: Compute,
    ) -> None:
        self.specification = specification
        self._architecture = architecture
        self._compute = compute
        self._dtype = getattr(torch, specification.dtype)
        self._attention: MultiHead | LearnedScoreHead
        self._direct: Direct | None
        if isinstance(architecture, Attention):
            self._attention = MultiHead(architecture, parameters, "", self._dtype, compute, own=False)
            self._direct = self._attention.direct()
        else:
            self._attention = LearnedScoreHead(architecture, parameters, products_of(compute))
            self._direct = None

    def plan(self, application: Application, lengths: Sequence[int]) -> Plan | None:
        """How to compute requests where they were received; None if they cannot be."""
        return None if self._direct is None else self._direct.plan(application, lengths)

    @torch.inference_mode()
    def run(self, inputs: Sequence[LayerInput]) -> list[LayerOutput]:
        """Computes checked requests together."""
        outputs: dict[int, LayerOutput] = {}
        for crossed in (False, True):
            places = [place for place, each in enumerate(inputs) if (each.context is not None) is crossed]
            if places:
                outputs |= zip(places, self._run([inputs[place] for place in places], crossed), strict=True)
        return [outputs[place] for place in range(len(inputs))]

    def _run(self, requests: list[LayerInput], crossed: bool) -> list[LayerOutput]:
        """Computes requests that all have a context, or that all have none."""
        architecture, attention, compute = self._architecture, self._attention, self._compute
        alibi = attention.scoring.alibi_slopes is not None
        kinds = [kinds_of(each, architecture.causal, architecture.window, alibi=alibi) for each in requests]
        batch = Batch(requests, [kind for of_one in kinds for kind in of_one], multiple=attention.multiple)
        contexts = batch.pack_contexts() if crossed else None
        heads = attention.project_batch(compute, batch, batch.pack_inputs(), contexts)
        attended = attend_stacks(compute, *heads, batch.stacks(0, batch.contexts or batch.inputs), attention.scoring)
        return replies(batch, requests, attention.finish_batch(compute, attended.rows), attended)
