import datetime

from attnserve.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Cache(_message.Message):
    __slots__ = ("name", "num_kv_heads", "head_dim", "value_dim", "layers", "dtype", "lengths", "bytes", "shared_bytes", "ttl", "remaining", "address", "alias")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_kv_heads: int
    head_dim: int
    value_dim: int
    layers: int
    dtype: _tensor_pb2.DataType
    lengths: _containers.RepeatedScalarFieldContainer[int]
    bytes: int
    shared_bytes: int
    ttl: _duration_pb2.Duration
    remaining: _duration_pb2.Duration
    address: str
    alias: str
    def __init__(self, name: _Optional[str] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., value_dim: _Optional[int] = ..., layers: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., lengths: _Optional[_Iterable[int]] = ..., bytes: _Optional[int] = ..., shared_bytes: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., remaining: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., address: _Optional[str] = ..., alias: _Optional[str] = ...) -> None: ...

class CacheServiceCreateRequest(_message.Message):
    __slots__ = ("num_kv_heads", "head_dim", "value_dim", "layers", "dtype", "ttl", "request_id", "alias")
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VALUE_DIM_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    num_kv_heads: int
    head_dim: int
    value_dim: int
    layers: int
    dtype: _tensor_pb2.DataType
    ttl: _duration_pb2.Duration
    request_id: bytes
    alias: str
    def __init__(self, num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., value_dim: _Optional[int] = ..., layers: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[bytes] = ..., alias: _Optional[str] = ...) -> None: ...

class CacheServiceCreateResponse(_message.Message):
    __slots__ = ("cache",)
    CACHE_FIELD_NUMBER: _ClassVar[int]
    cache: Cache
    def __init__(self, cache: _Optional[_Union[Cache, _Mapping]] = ...) -> None: ...

class CacheServiceAppendRequest(_message.Message):
    __slots__ = ("name", "layer", "expected_length", "length_first", "append_id", "key", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIRST_FIELD_NUMBER: _ClassVar[int]
    APPEND_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    layer: int
    expected_length: int
    length_first: bool
    append_id: int
    key: _tensor_pb2.Tensor
    value: _tensor_pb2.Tensor
    def __init__(self, name: _Optional[str] = ..., layer: _Optional[int] = ..., expected_length: _Optional[int] = ..., length_first: bool = ..., append_id: _Optional[int] = ..., key: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class CacheServiceAppendResponse(_message.Message):
    __slots__ = ("length",)
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    length: int
    def __init__(self, length: _Optional[int] = ...) -> None: ...

class CacheServiceForkRequest(_message.Message):
    __slots__ = ("names", "ttl", "request_id")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    ttl: _duration_pb2.Duration
    request_id: bytes
    def __init__(self, names: _Optional[_Iterable[str]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[bytes] = ...) -> None: ...

class CacheServiceForkResponse(_message.Message):
    __slots__ = ("caches",)
    CACHES_FIELD_NUMBER: _ClassVar[int]
    caches: _containers.RepeatedCompositeFieldContainer[Cache]
    def __init__(self, caches: _Optional[_Iterable[_Union[Cache, _Mapping]]] = ...) -> None: ...

class CacheServiceTruncateRequest(_message.Message):
    __slots__ = ("truncations",)
    TRUNCATIONS_FIELD_NUMBER: _ClassVar[int]
    truncations: _containers.RepeatedCompositeFieldContainer[Truncation]
    def __init__(self, truncations: _Optional[_Iterable[_Union[Truncation, _Mapping]]] = ...) -> None: ...

class Truncation(_message.Message):
    __slots__ = ("name", "length", "expected_length", "truncation_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRUNCATION_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    length: int
    expected_length: int
    truncation_id: int
    def __init__(self, name: _Optional[str] = ..., length: _Optional[int] = ..., expected_length: _Optional[int] = ..., truncation_id: _Optional[int] = ...) -> None: ...

class CacheServiceTruncateResponse(_message.Message):
    __slots__ = ("caches",)
    CACHES_FIELD_NUMBER: _ClassVar[int]
    caches: _containers.RepeatedCompositeFieldContainer[Cache]
    def __init__(self, caches: _Optional[_Iterable[_Union[Cache, _Mapping]]] = ...) -> None: ...

class CacheServiceGetRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class CacheServiceGetResponse(_message.Message):
    __slots__ = ("cache",)
    CACHE_FIELD_NUMBER: _ClassVar[int]
    cache: Cache
    def __init__(self, cache: _Optional[_Union[Cache, _Mapping]] = ...) -> None: ...

class CacheServiceListRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class CacheServiceListResponse(_message.Message):
    __slots__ = ("caches", "pool_bytes", "free_bytes", "next_page_token")
    CACHES_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    caches: _containers.RepeatedCompositeFieldContainer[Cache]
    pool_bytes: int
    free_bytes: int
    next_page_token: str
    def __init__(self, caches: _Optional[_Iterable[_Union[Cache, _Mapping]]] = ..., pool_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CacheServiceDeleteRequest(_message.Message):
    __slots__ = ("names", "request_ids")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    request_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, names: _Optional[_Iterable[str]] = ..., request_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CacheServiceDeleteResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...
