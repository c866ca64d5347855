import datetime

from attnserve.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Layout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYOUT_UNSPECIFIED: _ClassVar[Layout]
    LAYOUT_HEADS_FIRST: _ClassVar[Layout]
    LAYOUT_LENGTH_FIRST: _ClassVar[Layout]
    LAYOUT_PACKED: _ClassVar[Layout]

class Alignment(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ALIGNMENT_UNSPECIFIED: _ClassVar[Alignment]
    ALIGNMENT_TOP_LEFT: _ClassVar[Alignment]
    ALIGNMENT_BOTTOM_RIGHT: _ClassVar[Alignment]

class ScoreStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCORE_STAGE_UNSPECIFIED: _ClassVar[ScoreStage]
    SCORE_STAGE_RAW: _ClassVar[ScoreStage]
    SCORE_STAGE_CAPPED: _ClassVar[ScoreStage]
    SCORE_STAGE_MASKED: _ClassVar[ScoreStage]
    SCORE_STAGE_WEIGHTS: _ClassVar[ScoreStage]

class SettingSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SETTING_SOURCE_UNSPECIFIED: _ClassVar[SettingSource]
    SETTING_SOURCE_DEFAULT: _ClassVar[SettingSource]
    SETTING_SOURCE_ENVIRONMENT: _ClassVar[SettingSource]
    SETTING_SOURCE_FLAG: _ClassVar[SettingSource]
    SETTING_SOURCE_CODE: _ClassVar[SettingSource]
LAYOUT_UNSPECIFIED: Layout
LAYOUT_HEADS_FIRST: Layout
LAYOUT_LENGTH_FIRST: Layout
LAYOUT_PACKED: Layout
ALIGNMENT_UNSPECIFIED: Alignment
ALIGNMENT_TOP_LEFT: Alignment
ALIGNMENT_BOTTOM_RIGHT: Alignment
SCORE_STAGE_UNSPECIFIED: ScoreStage
SCORE_STAGE_RAW: ScoreStage
SCORE_STAGE_CAPPED: ScoreStage
SCORE_STAGE_MASKED: ScoreStage
SCORE_STAGE_WEIGHTS: ScoreStage
SETTING_SOURCE_UNSPECIFIED: SettingSource
SETTING_SOURCE_DEFAULT: SettingSource
SETTING_SOURCE_ENVIRONMENT: SettingSource
SETTING_SOURCE_FLAG: SettingSource
SETTING_SOURCE_CODE: SettingSource

class Window(_message.Message):
    __slots__ = ("left", "right")
    LEFT_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    left: int
    right: int
    def __init__(self, left: _Optional[int] = ..., right: _Optional[int] = ...) -> None: ...

class GeneralScore(_message.Message):
    __slots__ = ("weight",)
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    weight: _tensor_pb2.Tensor
    def __init__(self, weight: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class AdditiveScore(_message.Message):
    __slots__ = ("query_weight", "key_weight", "bias", "output_weight")
    QUERY_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    KEY_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    query_weight: _tensor_pb2.Tensor
    key_weight: _tensor_pb2.Tensor
    bias: _tensor_pb2.Tensor
    output_weight: _tensor_pb2.Tensor
    def __init__(self, query_weight: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., key_weight: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., bias: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., output_weight: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class CacheReference(_message.Message):
    __slots__ = ("name", "layer", "expected_length", "append_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    APPEND_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    layer: int
    expected_length: int
    append_id: int
    def __init__(self, name: _Optional[str] = ..., layer: _Optional[int] = ..., expected_length: _Optional[int] = ..., append_id: _Optional[int] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("layout", "causal", "alignment", "window", "scale", "softcap", "general", "additive", "return_lse", "return_scores", "priority", "caches", "query", "key", "value", "mask", "bias", "alibi_slopes", "sinks", "query_lengths", "kv_lengths", "query_offset")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CAUSAL_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    SOFTCAP_FIELD_NUMBER: _ClassVar[int]
    GENERAL_FIELD_NUMBER: _ClassVar[int]
    ADDITIVE_FIELD_NUMBER: _ClassVar[int]
    RETURN_LSE_FIELD_NUMBER: _ClassVar[int]
    RETURN_SCORES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    ALIBI_SLOPES_FIELD_NUMBER: _ClassVar[int]
    SINKS_FIELD_NUMBER: _ClassVar[int]
    QUERY_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    KV_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    QUERY_OFFSET_FIELD_NUMBER: _ClassVar[int]
    layout: Layout
    causal: bool
    alignment: Alignment
    window: Window
    scale: float
    softcap: float
    general: GeneralScore
    additive: AdditiveScore
    return_lse: bool
    return_scores: ScoreStage
    priority: int
    caches: _containers.RepeatedCompositeFieldContainer[CacheReference]
    query: _tensor_pb2.Tensor
    key: _tensor_pb2.Tensor
    value: _tensor_pb2.Tensor
    mask: _tensor_pb2.Tensor
    bias: _tensor_pb2.Tensor
    alibi_slopes: _tensor_pb2.Tensor
    sinks: _tensor_pb2.Tensor
    query_lengths: _tensor_pb2.Tensor
    kv_lengths: _tensor_pb2.Tensor
    query_offset: _tensor_pb2.Tensor
    def __init__(self, layout: _Optional[_Union[Layout, str]] = ..., causal: bool = ..., alignment: _Optional[_Union[Alignment, str]] = ..., window: _Optional[_Union[Window, _Mapping]] = ..., scale: _Optional[float] = ..., softcap: _Optional[float] = ..., general: _Optional[_Union[GeneralScore, _Mapping]] = ..., additive: _Optional[_Union[AdditiveScore, _Mapping]] = ..., return_lse: bool = ..., return_scores: _Optional[_Union[ScoreStage, str]] = ..., priority: _Optional[int] = ..., caches: _Optional[_Iterable[_Union[CacheReference, _Mapping]]] = ..., query: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., key: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., mask: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., bias: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., alibi_slopes: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., sinks: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., query_lengths: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., kv_lengths: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., query_offset: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("decode_ns", "queue_ns", "staging_ns", "compute_ns", "encode_ns")
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    STAGING_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_NS_FIELD_NUMBER: _ClassVar[int]
    decode_ns: int
    queue_ns: int
    staging_ns: int
    compute_ns: int
    encode_ns: int
    def __init__(self, decode_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., staging_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., encode_ns: _Optional[int] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ("timings", "batch_size", "cache_lengths", "output", "lse", "scores")
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    CACHE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LSE_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    timings: Timings
    batch_size: int
    cache_lengths: _containers.RepeatedScalarFieldContainer[int]
    output: _tensor_pb2.Tensor
    lse: _tensor_pb2.Tensor
    scores: _tensor_pb2.Tensor
    def __init__(self, timings: _Optional[_Union[Timings, _Mapping]] = ..., batch_size: _Optional[int] = ..., cache_lengths: _Optional[_Iterable[int]] = ..., output: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., lse: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., scores: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("layer", "causal", "alignment", "window", "return_lse", "return_scores", "priority", "average_scores", "caches", "input", "context", "mask", "bias", "lengths", "context_lengths", "query_offset", "segments")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    CAUSAL_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    RETURN_LSE_FIELD_NUMBER: _ClassVar[int]
    RETURN_SCORES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_SCORES_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    QUERY_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    layer: str
    causal: bool
    alignment: Alignment
    window: Window
    return_lse: bool
    return_scores: ScoreStage
    priority: int
    average_scores: bool
    caches: _containers.RepeatedCompositeFieldContainer[CacheReference]
    input: _tensor_pb2.Tensor
    context: _tensor_pb2.Tensor
    mask: _tensor_pb2.Tensor
    bias: _tensor_pb2.Tensor
    lengths: _tensor_pb2.Tensor
    context_lengths: _tensor_pb2.Tensor
    query_offset: _tensor_pb2.Tensor
    segments: _tensor_pb2.Tensor
    def __init__(self, layer: _Optional[str] = ..., causal: bool = ..., alignment: _Optional[_Union[Alignment, str]] = ..., window: _Optional[_Union[Window, _Mapping]] = ..., return_lse: bool = ..., return_scores: _Optional[_Union[ScoreStage, str]] = ..., priority: _Optional[int] = ..., average_scores: bool = ..., caches: _Optional[_Iterable[_Union[CacheReference, _Mapping]]] = ..., input: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., context: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., mask: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., bias: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., lengths: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., context_lengths: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., query_offset: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., segments: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class ApplyResponse(_message.Message):
    __slots__ = ("timings", "batch_size", "layer_version", "cache_lengths", "output", "lse", "scores")
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYER_VERSION_FIELD_NUMBER: _ClassVar[int]
    CACHE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LSE_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    timings: Timings
    batch_size: int
    layer_version: int
    cache_lengths: _containers.RepeatedScalarFieldContainer[int]
    output: _tensor_pb2.Tensor
    lse: _tensor_pb2.Tensor
    scores: _tensor_pb2.Tensor
    def __init__(self, timings: _Optional[_Union[Timings, _Mapping]] = ..., batch_size: _Optional[int] = ..., layer_version: _Optional[int] = ..., cache_lengths: _Optional[_Iterable[int]] = ..., output: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., lse: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., scores: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class AttendStreamCall(_message.Message):
    __slots__ = ("id", "timeout", "traceparent", "tracestate", "apply", "attend")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    ATTEND_FIELD_NUMBER: _ClassVar[int]
    id: int
    timeout: _duration_pb2.Duration
    traceparent: str
    tracestate: str
    apply: ApplyRequest
    attend: AttendRequest
    def __init__(self, id: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., apply: _Optional[_Union[ApplyRequest, _Mapping]] = ..., attend: _Optional[_Union[AttendRequest, _Mapping]] = ...) -> None: ...

class AttendStreamRequest(_message.Message):
    __slots__ = ("cancel", "calls")
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    cancel: _containers.RepeatedScalarFieldContainer[int]
    calls: _containers.RepeatedCompositeFieldContainer[AttendStreamCall]
    def __init__(self, cancel: _Optional[_Iterable[int]] = ..., calls: _Optional[_Iterable[_Union[AttendStreamCall, _Mapping]]] = ...) -> None: ...

class AttendStreamReply(_message.Message):
    __slots__ = ("id", "error", "apply", "attend")
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    ATTEND_FIELD_NUMBER: _ClassVar[int]
    id: int
    error: _status_pb2.Status
    apply: ApplyResponse
    attend: AttendResponse
    def __init__(self, id: _Optional[int] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., apply: _Optional[_Union[ApplyResponse, _Mapping]] = ..., attend: _Optional[_Union[AttendResponse, _Mapping]] = ...) -> None: ...

class AttendStreamResponse(_message.Message):
    __slots__ = ("replies", "closing")
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[AttendStreamReply]
    closing: bool
    def __init__(self, replies: _Optional[_Iterable[_Union[AttendStreamReply, _Mapping]]] = ..., closing: bool = ...) -> None: ...

class ServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfoResponse(_message.Message):
    __slots__ = ("version", "device", "device_name", "torch_version", "threads", "dtypes", "limits", "kernels", "features", "settings", "python_version", "grpc_version", "usable_cpus", "cache_pool_bytes", "address", "cache_page_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PYTHON_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRPC_VERSION_FIELD_NUMBER: _ClassVar[int]
    USABLE_CPUS_FIELD_NUMBER: _ClassVar[int]
    CACHE_POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CACHE_PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: str
    device: str
    device_name: str
    torch_version: str
    threads: int
    dtypes: _containers.RepeatedScalarFieldContainer[_tensor_pb2.DataType]
    limits: Limits
    kernels: _containers.RepeatedCompositeFieldContainer[Kernel]
    features: _containers.RepeatedScalarFieldContainer[str]
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    python_version: str
    grpc_version: str
    usable_cpus: int
    cache_pool_bytes: int
    address: str
    cache_page_bytes: int
    def __init__(self, version: _Optional[str] = ..., device: _Optional[str] = ..., device_name: _Optional[str] = ..., torch_version: _Optional[str] = ..., threads: _Optional[int] = ..., dtypes: _Optional[_Iterable[_Union[_tensor_pb2.DataType, str]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., kernels: _Optional[_Iterable[_Union[Kernel, _Mapping]]] = ..., features: _Optional[_Iterable[str]] = ..., settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ..., python_version: _Optional[str] = ..., grpc_version: _Optional[str] = ..., usable_cpus: _Optional[int] = ..., cache_pool_bytes: _Optional[int] = ..., address: _Optional[str] = ..., cache_page_bytes: _Optional[int] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("name", "value", "source", "hidden")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    source: SettingSource
    hidden: bool
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., source: _Optional[_Union[SettingSource, str]] = ..., hidden: bool = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_message_bytes", "max_requests", "max_bytes", "max_flops", "max_batch_flops", "max_batch_requests", "max_message_calls", "max_rank", "max_elements", "max_sequences", "max_request_flops", "max_caches", "max_cache_layers", "max_layers", "max_caller_streams", "max_header_bytes", "max_request_fields", "max_call_fields", "max_plain_message_bytes", "max_axis_length")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_FLOPS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FLOPS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_CALLS_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_FLOPS_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHES_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_CALLER_STREAMS_FIELD_NUMBER: _ClassVar[int]
    MAX_HEADER_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_FIELDS_FIELD_NUMBER: _ClassVar[int]
    MAX_CALL_FIELDS_FIELD_NUMBER: _ClassVar[int]
    MAX_PLAIN_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_AXIS_LENGTH_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_requests: int
    max_bytes: int
    max_flops: int
    max_batch_flops: int
    max_batch_requests: int
    max_message_calls: int
    max_rank: int
    max_elements: int
    max_sequences: int
    max_request_flops: int
    max_caches: int
    max_cache_layers: int
    max_layers: int
    max_caller_streams: int
    max_header_bytes: int
    max_request_fields: int
    max_call_fields: int
    max_plain_message_bytes: int
    max_axis_length: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_requests: _Optional[int] = ..., max_bytes: _Optional[int] = ..., max_flops: _Optional[int] = ..., max_batch_flops: _Optional[int] = ..., max_batch_requests: _Optional[int] = ..., max_message_calls: _Optional[int] = ..., max_rank: _Optional[int] = ..., max_elements: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_request_flops: _Optional[int] = ..., max_caches: _Optional[int] = ..., max_cache_layers: _Optional[int] = ..., max_layers: _Optional[int] = ..., max_caller_streams: _Optional[int] = ..., max_header_bytes: _Optional[int] = ..., max_request_fields: _Optional[int] = ..., max_call_fields: _Optional[int] = ..., max_plain_message_bytes: _Optional[int] = ..., max_axis_length: _Optional[int] = ...) -> None: ...

class Kernel(_message.Message):
    __slots__ = ("name", "description")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...
