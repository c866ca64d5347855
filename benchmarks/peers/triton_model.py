"""The model file for Triton's Python backend: requests of a batch in, their outputs out.

Runs in Triton's stub process, which provides `triton_python_backend_utils`. The name of the model says which function
it computes: `attention` or `layer`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import triton_python_backend_utils as triton  # type: ignore[import-not-found]

# The stub's Python ignores PYTHONPATH, and this file is reached by a symbolic link.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.compute import Attention, Layer, attend, prepare


class TritonPythonModel:
    """The class that the backend looks for in a model file."""

    def initialize(self, args: dict[str, str]) -> None:
        """Called once for each model instance."""
        config = json.loads(args["model_config"])
        parameters = {name: each["string_value"] for name, each in config["parameters"].items()}
        prepare(int(parameters["threads"]))
        self._compute = self._attend if config["name"] == "attention" else self._apply
        self._layer = None if config["name"] == "attention" else Layer(parameters["weights"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """The responses to all requests, in order."""
        outputs = self._compute(requests)
        return [triton.InferenceResponse([triton.Tensor.from_dlpack("OUTPUT", each.contiguous())]) for each in outputs]

    def _attend(self, requests: list[Any]) -> list[torch.Tensor]:
        problems = []
        for request in requests:
            query, key, value = (_array(request, name)[0] for name in ("QUERY", "KEY", "VALUE"))
            causal, scale = _array(request, "OPTIONS")[0].tolist()
            mask = triton.get_input_tensor_by_name(request, "MASK")
            problems.append(
                Attention(
                    query,
                    key,
                    value,
                    None if mask is None else torch.from_numpy(mask.as_numpy())[0],
                    bool(causal),
                    None if math.isnan(scale) else scale,
                )
            )
        return [output.unsqueeze(0) for output in attend(problems)]

    def _apply(self, requests: list[Any]) -> list[torch.Tensor]:
        assert self._layer is not None
        return [output.unsqueeze(0) for output in self._layer([_array(request, "INPUT")[0] for request in requests])]


def _array(request: Any, name: str) -> torch.Tensor:
    return torch.from_numpy(triton.get_input_tensor_by_name(request, name).as_numpy())
