"""A layer with a single parameter, and the file that has it."""

from __future__ import annotations

from attnserve_server.layers.specification import Dtype, LayerSpecification, LearnedScore, ParameterSource

FILE = "weights.safetensors"


def general(
    source: ParameterSource, inputs: int, contexts: int, dtype: Dtype = "float32", file: str = FILE
) -> LayerSpecification:
    """A layer with one parameter, [inputs, contexts]."""
    return LayerSpecification(
        name="score",
        kind="general",
        architecture=LearnedScore(score="general", inputs=inputs, contexts=contexts, outputs=contexts),
        dtype=dtype,
        file=file,
        parameters={"score.weight": source},
    )
