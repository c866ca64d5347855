"""A stack of encoder or decoder blocks, optionally with an embedding before it and a norm after it.

A stack is a list of attentions, with a passage from each to the next.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import replace

import torch

from attnserve_server.devices.compute import Compute
from attnserve_server.layers.application import Application
from attnserve_server.layers.attend import attend_stacks, kinds_of
from attnserve_server.layers.block import build_steps
from attnserve_server.layers.decoder import DecoderSteps
from attnserve_server.layers.direct import Plan
from attnserve_server.layers.embedding import EmbeddingRows
from attnserve_server.layers.layer import LayerInput, LayerOutput
from attnserve_server.layers.norms import build_norm
from attnserve_server.layers.passage import packed_passages, passages_of
from attnserve_server.layers.product import is_native, products_of
from attnserve_server.layers.resident import ResidentAttention, Residents
from attnserve_server.layers.rows import Batch, multiple_of
from attnserve_server.layers.specification import LayerSpecification, Transformer


class TransformerLayer:
    """The stack on its device."""

    def __init__(
        self,
        specification: LayerSpecification,
        architecture: Transformer,
        parameters: MutableMapping[str, torch.Tensor],
        compute: Compute,
    ) -> None:
        self.specification = specification
        self.architecture = architecture
        self._compute = compute
        self._dtype = getattr(torch, specification.dtype)
        self._embedding = None
        if architecture.embedding is not None:
            self._embedding = EmbeddingRows(architecture.embedding, parameters, self._dtype)
        self._steps = [
            step
            for number in range(architecture.blocks)
            for step in build_steps(architecture.block, parameters, f"blocks.{number}.", self._dtype, compute)
        ]
        norm, width = architecture.final_norm, architecture.block.self_attention.inputs
        final_norm = None if norm is None else build_norm(norm, parameters, "norm.")
        self._passages = passages_of(self._steps, final_norm, width, self._dtype, compute)
        attentions = [step.attention for step in self._steps if not step.crossed]
        window = architecture.block.self_attention.window
        self._decoder = DecoderSteps.of(self._passages, attentions, window, self._dtype, compute)
        self._parallel = is_native(self._dtype, products_of(compute))
        # What torch computes element by element: the library leaves embeddings to it.
        widths = set() if packed_passages(self._passages) else {width, architecture.block.feed_forward.hidden}
        if architecture.embedding is not None:
            widths.add(width)
        self._multiple = multiple_of(
            self._parallel, widths.union(*(step.attention.elementwise for step in self._steps))
        )

    @property
    def end_of_positions(self) -> int | None:
        """One beyond the last position that has an embedding; None if every position has one."""
        embedding = self.architecture.embedding
        return None if embedding is None else embedding.end_of_positions

    def plan(self, application: Application, lengths: Sequence[int]) -> Plan | None:
        """None: requests are computed on tensors."""
        return None

    @torch.inference_mode()
    def run(self, inputs: Sequence[LayerInput], residents: Residents | None = None) -> list[LayerOutput]:
        """Computes checked requests together.

        With `residents`, self-attention appends keys and values to caches and attends to everything in them. The
        inputs' offsets are then the caches' earlier lengths, and their masks are None.
        """
        if residents is None or self._decoder is None:
            return self._run(inputs, residents)
        of_requests = residents.of_requests
        steps = [n for n, each in enumerate(inputs) if self._decoder.takes(each, of_requests[n])]
        outputs = self._step(self._decoder, inputs, residents, steps)
        rest = [n for n in range(len(inputs)) if n not in outputs]
        if rest:
            own = Residents(residents.pool, [of_requests[n] for n in rest])
            outputs.update(zip(rest, self._run([inputs[n] for n in rest], own), strict=True))
        return [outputs[n] for n in range(len(inputs))]

    def _step(
        self, decoder: DecoderSteps, inputs: Sequence[LayerInput], residents: Residents, places: Sequence[int]
    ) -> dict[int, LayerOutput]:
        """The outputs of requests, by their places, that the native library computes in one call. Those in which it
        meets NaN or infinities are left out, and the others computed once more without them. If it meets some again,
        all are left out.
        """
        for _ in range(2):
            if not places:
                break
            batch = self._batch([inputs[n] for n in places])
            own = Residents(residents.pool, [residents.of_requests[n] for n in places])
            found = decoder.run(batch, self._embedded(batch), self._rotations(batch), own)
            if isinstance(found, torch.Tensor):
                return dict(zip(places, batch.outputs(found), strict=True))
            places = [n for place, n in enumerate(places) if place not in found]
        return {}

    def _run(self, inputs: Sequence[LayerInput], residents: Residents | None) -> list[LayerOutput]:
        """The outputs of requests, computed block by block."""
        compute, batch = self._compute, self._batch(inputs)
        contexts = None if batch.contexts is None else batch.pack_contexts()
        packings = {False: batch.inputs, True: batch.contexts}
        if residents is not None:
            del packings[False]
        stacks = {crossed: batch.stacks(int(crossed), packing) for crossed, packing in packings.items() if packing}

        rows, attended, block, rotations = self._embedded(batch), None, 0, self._rotations(batch)
        own = None if residents is None else self._resident_attention(batch, residents)
        for step, passage in zip(self._steps, self._passages, strict=False):
            rows, projected = passage(rows, attended, None if step.crossed else rotations)
            projected_contexts = None
            if step.crossed and contexts is not None:
                projected_contexts = compute.rows(
                    step.attention.project_contexts,
                    contexts,
                    flops=len(contexts) * step.attention.context_flops,
                    parallel=self._parallel,
                )
            heads = step.attention.heads(projected, projected_contexts)
            if own is None or step.crossed:
                attended = attend_stacks(compute, *heads, stacks[step.crossed], step.attention.scoring).rows
            else:
                attended, block = own.attend(block, *heads), block + 1
        _, output = self._passages[-1](rows, attended, None)
        return batch.outputs(output)

    def _batch(self, inputs: Sequence[LayerInput]) -> Batch:
        """The requests, ordered for self-attention first, then for cross-attention."""
        block = self.architecture.block
        own, cross = block.self_attention, block.cross_attention
        kinds = [[kind for each in inputs for kind in kinds_of(each, own.causal, own.window, own_keys=True)]]
        if cross is not None:
            unmasked = [replace(each, mask=None) for each in inputs]
            kinds.append([kind for each in unmasked for kind in kinds_of(each, cross.causal, cross.window)])
        return Batch(inputs, *kinds, multiple=self._multiple)

    def _resident_attention(self, batch: Batch, residents: Residents) -> ResidentAttention:
        """Self-attention, which is the same in all blocks but for the weights."""
        window, scoring = self.architecture.block.self_attention.window, self._steps[0].attention.scoring
        return ResidentAttention(self._compute, batch, residents, scoring, window)

    def _rotations(self, batch: Batch) -> torch.Tensor | None:
        """The rotations of self-attention's queries and keys, which are at the same positions; None if they are not
        rotated.
        """
        rotation = self._steps[0].attention.rotation if self._steps else None
        return None if rotation is None else rotation.of(batch.positions(self._compute.torch_device))

    def _embedded(self, batch: Batch) -> torch.Tensor:
        """What the first block gets, [rows, width]."""
        embedding, given = self._embedding, [batch.pack_inputs()]
        if embedding is None:
            return given[0]
        if embedding.takes_positions:
            given.append(batch.positions(self._compute.torch_device))
        if embedding.takes_segments:
            given.append(batch.pack_segments())
        return self._compute.rows(embedding, *given, flops=0)  # too little to divide
