from attnserve.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Layer(_message.Message):
    __slots__ = ("name", "kind", "dtype", "parameters", "bytes", "version", "input_width", "context_width", "output_width", "num_query_heads", "num_kv_heads", "head_dim", "blocks", "vocabulary", "causal", "value_dim", "positions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INPUT_WIDTH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_WIDTH_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_WIDTH_FIELD_NUMBER: _ClassVar[int]
    NUM_QUERY_HEADS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    CAUSAL_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    dtype: _tensor_pb2.DataType
    parameters: int
    bytes: int
    version: int
    input_width: int
    context_width: int
    output_width: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    blocks: int
    vocabulary: int
    causal: bool
    value_dim: int
    positions: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., parameters: _Optional[int] = ..., bytes: _Optional[int] = ..., version: _Optional[int] = ..., input_width: _Optional[int] = ..., context_width: _Optional[int] = ..., output_width: _Optional[int] = ..., num_query_heads: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., blocks: _Optional[int] = ..., vocabulary: _Optional[int] = ..., causal: bool = ..., value_dim: _Optional[int] = ..., positions: _Optional[int] = ...) -> None: ...

class LayerServiceListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LayerServiceListResponse(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[Layer]
    def __init__(self, layers: _Optional[_Iterable[_Union[Layer, _Mapping]]] = ...) -> None: ...

class LayerServiceGetRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class LayerServiceGetResponse(_message.Message):
    __slots__ = ("layer",)
    LAYER_FIELD_NUMBER: _ClassVar[int]
    layer: Layer
    def __init__(self, layer: _Optional[_Union[Layer, _Mapping]] = ...) -> None: ...

class LayerServiceLoadRequest(_message.Message):
    __slots__ = ("definitions", "names")
    DEFINITIONS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    definitions: str
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, definitions: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class LayerServiceLoadResponse(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[Layer]
    def __init__(self, layers: _Optional[_Iterable[_Union[Layer, _Mapping]]] = ...) -> None: ...

class LayerServiceUnloadRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class LayerServiceUnloadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
