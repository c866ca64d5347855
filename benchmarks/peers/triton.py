"""Triton Inference Server with its Python backend: started from the files in the package nvidia-pytriton, and called by
messages that are encoded beforehand.

The server itself runs, with its own model repository, rather than pytriton's Python class, whose proxy between the
server and the caller's process costs more than the backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from attnserve import _fields
from benchmarks import raw
from benchmarks.arrivals import Arrivals
from benchmarks.meters import Meter
from benchmarks.peers.peer import KEEPING_MEMORY, Peer, free_ports, model_of
from benchmarks.plain import Array, Plain, PlainAttention
from benchmarks.servers import Running, started
from benchmarks.workload import Workload

UNARY: Final = "/inference.GRPCInferenceService/ModelInfer"
STREAM: Final = "/inference.GRPCInferenceService/ModelStreamInfer"

SHARED_MEMORY: Final = Path("/dev/shm")

ID_FIELD: Final = 3
"""The id's field in requests and responses. Of a stream's responses, only this field and the two below are read."""
ERROR_FIELD, RESPONSE_FIELD = 1, 2


def _messages() -> dict[str, Any]:
    """The messages of the KServe protocol, as far as they are needed here, by name."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="benchmarks/kserve.proto", package="inference", syntax="proto3")
    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    tensor = [("name", 1, one, field.TYPE_STRING), ("datatype", 2, one, field.TYPE_STRING)]
    fields: dict[str, list[tuple[Any, ...]]] = {
        "Tensor": [*tensor, ("shape", 3, many, field.TYPE_INT64)],
        "ModelInferRequest": [
            ("model_name", 1, one, field.TYPE_STRING),
            ("inputs", 5, many, field.TYPE_MESSAGE),
            ("raw_input_contents", 7, many, field.TYPE_BYTES),
        ],
        "ModelInferResponse": [
            ("outputs", 5, many, field.TYPE_MESSAGE),
            ("raw_output_contents", 6, many, field.TYPE_BYTES),
        ],
    }
    for message_name, described in fields.items():
        message = file.message_type.add(name=message_name)
        for name, number, label, kind in described:
            added = message.field.add(name=name, number=number, label=label, type=kind)
            if kind == field.TYPE_MESSAGE:
                added.type_name = ".inference.Tensor"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())  # type: ignore[no-untyped-call]
    found = {}
    for name in fields:
        descriptor = pool.FindMessageTypeByName(f"inference.{name}")  # type: ignore[no-untyped-call]
        found[name] = message_factory.GetMessageClass(descriptor)
    return found


MESSAGES: Final = _messages()
DATATYPES: Final = {np.dtype(np.float32): "FP32", np.dtype(np.bool_): "BOOL"}


def request(problem: Plain) -> bytes:
    """An encoded ModelInferRequest; every tensor has a first axis of length 1, for Triton's batches."""
    if isinstance(problem, PlainAttention):
        model = "attention"
        options = np.array([problem.causal, np.nan if problem.scale is None else problem.scale], np.float32)
        tensors = {"QUERY": problem.query, "KEY": problem.key, "VALUE": problem.value, "OPTIONS": options}
        if problem.mask is not None:
            tensors["MASK"] = problem.mask
    else:
        model, tensors = "layer", {"INPUT": problem.input}
    message = MESSAGES["ModelInferRequest"](
        model_name=model,
        inputs=[
            {"name": name, "datatype": DATATYPES[array.dtype], "shape": [1, *array.shape]}
            for name, array in tensors.items()
        ],
        raw_input_contents=[array.tobytes() for array in tensors.values()],
    )
    return bytes(message.SerializeToString())


def call(call_id: int, encoded: bytes) -> list[_fields.Buffer]:
    """The pieces of a message of a stream: a request and its id, which may come last."""
    digits = str(call_id).encode()
    return [encoded, _fields.field_prefix(ID_FIELD, len(digits)), digits]


def replies(message: bytes) -> Iterator[tuple[int, memoryview]]:
    """The id and the encoded ModelInferResponse in a stream's message. RuntimeError for an error, which has no id."""
    for number, _, _, content, end in _fields.fields(message, 0, len(message)):
        if number == ERROR_FIELD:
            raise RuntimeError(message[content:end].decode())
        if number == RESPONSE_FIELD:
            for inner, _, _, begin, behind in _fields.fields(message, content, end):
                if inner == ID_FIELD:
                    yield int(message[begin:behind]), memoryview(message)[content:end]


CONFIGURATION: Final = """\
name: "{model}"
backend: "python"
max_batch_size: {batch}
dynamic_batching {{}}
instance_group [{{ kind: KIND_CPU, count: {instances} }}]
parameters {{ key: "threads" value: {{ string_value: "{threads}" }} }}
parameters {{ key: "weights" value: {{ string_value: "{weights}" }} }}
parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{environment}" }} }}
{inputs}
output [{{ name: "OUTPUT", data_type: TYPE_FP32, dims: {output} }}]
"""
INPUTS: Final = {
    "attention": {
        "QUERY": "data_type: TYPE_FP32, dims: [-1, -1, -1]",
        "KEY": "data_type: TYPE_FP32, dims: [-1, -1, -1]",
        "VALUE": "data_type: TYPE_FP32, dims: [-1, -1, -1]",
        "OPTIONS": "data_type: TYPE_FP32, dims: [2]",
        "MASK": "data_type: TYPE_BOOL, dims: [-1, -1], optional: true",
    },
    "layer": {"INPUT": "data_type: TYPE_FP32, dims: [-1, 512]"},
}
"""Tensors of any shapes may share a batch: without `allow_ragged_batch`, Triton ends a batch at a different shape."""


def write_repository(directory: Path, model: str, settings: Mapping[str, object]) -> None:
    """Writes a model repository with one model; `settings` fill the placeholders in CONFIGURATION."""
    (directory / model / "1").mkdir(parents=True)
    inputs = (f'{{ name: "{name}", {rest}, allow_ragged_batch: true }}' for name, rest in INPUTS[model].items())
    (directory / model / "config.pbtxt").write_text(
        CONFIGURATION.format(
            model=model,
            **settings,
            inputs=f"input [{', '.join(inputs)}]",
            output="[-1, -1, -1]" if model == "attention" else "[-1, 512]",
        )
    )
    (directory / model / "1" / "model.py").symlink_to(Path(__file__).with_name("triton_model.py"))


def link_backend(directory: Path, files: Path) -> None:
    """Links the Python backend together with the stub for this Python's version, which the package keeps separately."""
    backend = directory / "python"
    backend.mkdir(parents=True)
    version = files.parents[1].parent.name.removeprefix("python")
    for source in (
        files / "backends/python/libtriton_python.so",
        files / "backends/python/triton_python_backend_utils.py",
        files / "python_backend_stubs" / version / "triton_python_backend_stub",
    ):
        (backend / source.name).symlink_to(source)


async def unary(address: str, workload: Workload, arrivals: Arrivals, meter: Meter) -> None:
    """Encoded messages by unary calls; nothing is decoded."""
    requests = [request(workload.plain(number)) for number in workload.numbers]
    await raw.unary(address, UNARY, requests, arrivals, meter)


async def stream(address: str, workload: Workload, arrivals: Arrivals, meter: Meter) -> None:
    """Encoded messages over one stream, one request per message; only the ids of replies are decoded."""
    requests = [request(workload.plain(number)) for number in workload.numbers]
    await raw.stream(
        address, STREAM, lambda call_id, number: call(call_id, requests[number]), replies, 0, arrivals, meter
    )


class Triton(Peer):
    """Triton Inference Server."""

    name = "Triton"
    packages = ("nvidia-pytriton", "torch")
    settings: ClassVar = {"batch": 64, "instances": 1, "threads": 1}
    description = (
        "Triton Inference Server with its Python backend: gRPC, dynamic batching without delay, requests of different "
        "shapes in one batch, torch in the backend"
    )
    loads: ClassVar = {"unary": unary, "stream": stream}

    @contextmanager
    def serve(self, problem: Plain, settings: Mapping[str, int], weights: Path, directory: Path) -> Iterator[Running]:
        """Serves one of the models."""
        files = self.site_packages / "pytriton" / "tritonserver"
        filled = {**settings, "weights": weights, "environment": self.environment}
        write_repository(directory / "models", model_of(problem), filled)
        link_backend(directory / "backends", files)
        grpc_port, http_port, metrics_port = free_ports(3)
        shared_memory = f"attnserve-bench-{os.getpid()}-{grpc_port}-"
        command = [
            str(files / "bin" / "tritonserver"),
            *("--model-repository", str(directory / "models"), "--backend-directory", str(directory / "backends")),
            *("--grpc-address", "127.0.0.1", "--grpc-port", str(grpc_port)),
            *("--http-address", "127.0.0.1", "--http-port", str(http_port)),
            *("--metrics-address", "127.0.0.1", "--metrics-port", str(metrics_port)),
            *("--allow-cpu-metrics", "false", "--allow-gpu-metrics", "false", "--log-info", "false"),
            *("--disable-auto-complete-config", "--grpc-infer-allocation-pool-size", "256"),
            *("--backend-config", f"python,shm-region-prefix-name={shared_memory}"),
        ]
        try:
            with started(
                command,
                {**os.environ, **KEEPING_MEMORY, "OMP_WAIT_POLICY": "PASSIVE"},
                directory / "log",
                f"http://127.0.0.1:{http_port}/v2/health/ready",
                address=f"127.0.0.1:{grpc_port}",
                metrics=f"http://127.0.0.1:{metrics_port}/metrics",
                batch_metrics=("nv_inference_exec_count", "nv_inference_count"),
            ) as found:
                yield found
        finally:
            # Killed processes leave their shared memory behind.
            for file in SHARED_MEMORY.glob(f"{shared_memory}*"):
                file.unlink()

    def output(self, shape: tuple[int, ...], reply: bytes) -> Array:
        """The output in an encoded ModelInferResponse, which includes the shape."""
        response = MESSAGES["ModelInferResponse"].FromString(reply)
        found = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(tuple(response.outputs[0].shape)[1:])
        return found.reshape(shape) if found.size == np.prod(shape) else found
