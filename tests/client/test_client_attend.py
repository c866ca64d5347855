"""The arguments of `attend` as a message that stock protobuf reads."""

from __future__ import annotations

import inspect
import pydoc
import re
from dataclasses import fields
from functools import partial
from typing import Any, get_type_hints

import ml_dtypes
import numpy as np
import pytest

from attnserve import (
    AdditiveScore,
    AsyncClient,
    AttendOptions,
    Cache,
    CacheInfo,
    Client,
    GeneralScore,
    InvalidRequestError,
)
from attnserve._requests import cache_requests
from attnserve._requests import call as _call
from attnserve._requests.apply import ApplyOptions, encode_apply
from attnserve._requests.attend import encode_attend
from attnserve.v1 import attention_pb2 as pb

QUERY = np.random.default_rng(0).standard_normal((1, 2, 3, 4)).astype(np.float32)


def request(**options: Any) -> pb.AttendRequest:
    call = encode_attend(QUERY, QUERY, QUERY, **options)
    data = b"".join(call.pieces)
    assert len(data) == call.size
    return pb.AttendRequest.FromString(data)


def test_the_least() -> None:
    message = request()
    for tensor in (message.query, message.key, message.value):
        assert (tensor.dtype, list(tensor.shape), tensor.data) == (1, [1, 2, 3, 4], QUERY.tobytes())
    present = {descriptor.name for descriptor, _ in message.ListFields()}
    assert present == {"query", "key", "value", "layout"}
    assert message.layout == pb.LAYOUT_HEADS_FIRST


def test_everything() -> None:
    weights = np.ones((5, 4), ml_dtypes.bfloat16)
    message = request(
        causal="bottom_right",
        query_offset=-2,
        window=(3, -1),
        mask=np.ones((3, 3), bool),
        bias=[[0.5]],
        alibi_slopes=[0.5, 0.25],
        sinks=np.zeros(2, np.float64),
        kv_lengths=3,
        query_lengths=[3],
        scale=0.0,
        softcap=30,
        score=AdditiveScore(weights, weights, bias=[0, 1, 2, 3, 4]),
        layout="length_first",
        return_lse=True,
        return_scores="masked",
        priority=-3,
        timeout=1.0,
    )
    assert (message.causal, message.alignment) == (True, pb.ALIGNMENT_BOTTOM_RIGHT)
    assert (list(message.query_offset.shape), message.query_offset.data) == ([], np.int64(-2).tobytes())
    assert (message.window.left, message.window.right) == (3, -1)
    assert message.mask.dtype == 5
    assert list(message.bias.shape) == [1, 1]
    assert (message.alibi_slopes.dtype, message.sinks.dtype) == (1, 4)
    assert (list(message.kv_lengths.shape), message.kv_lengths.data) == ([1], np.int64(3).tobytes())
    assert list(message.query_lengths.shape) == [1]
    assert message.HasField("scale")
    assert (message.scale, message.softcap) == (0.0, 30.0)
    assert (message.additive.query_weight.dtype, message.additive.bias.dtype) == (3, 1)
    assert message.additive.HasField("bias")
    assert not message.additive.HasField("output_weight")
    assert message.layout == pb.LAYOUT_LENGTH_FIRST
    assert (message.return_lse, message.return_scores, message.priority) == (True, pb.SCORE_STAGE_MASKED, -3)


@pytest.mark.parametrize(
    ("causal", "expected"),
    [
        (False, (False, pb.ALIGNMENT_UNSPECIFIED)),
        (np.False_, (False, pb.ALIGNMENT_UNSPECIFIED)),
        (None, (False, pb.ALIGNMENT_UNSPECIFIED)),
        (0, (False, pb.ALIGNMENT_UNSPECIFIED)),
        (True, (True, pb.ALIGNMENT_TOP_LEFT)),
        (np.True_, (True, pb.ALIGNMENT_TOP_LEFT)),
        (1, (True, pb.ALIGNMENT_TOP_LEFT)),
        ("top_left", (True, pb.ALIGNMENT_TOP_LEFT)),
        ("bottom_right", (True, pb.ALIGNMENT_BOTTOM_RIGHT)),
    ],
)
def test_causal(causal: Any, expected: tuple[bool, int]) -> None:
    message = request(causal=causal)
    assert (message.causal, message.alignment) == expected


def test_the_window_of_nothing_is_not_no_window() -> None:
    assert request(window=(0, 0)).HasField("window")
    assert not request(window=None).HasField("window")


@pytest.mark.parametrize("window", [(0, 0), (2, 0), (0, -1), (-1, -1)])
def test_both_bounds_of_a_window_are_sent(window: tuple[int, int]) -> None:
    """0 as well: a bound that is not sent is none."""
    sent = request(window=window).window
    assert {field.name: value for field, value in sent.ListFields()} == {"left": window[0], "right": window[1]}


def test_the_general_score() -> None:
    message = request(score=GeneralScore(np.eye(4)))
    assert message.WhichOneof("score") == "general"
    assert message.general.weight.data == np.eye(4).tobytes()


def test_equal_headers_carry_their_own_contents() -> None:
    for number in range(3):
        array = np.full((2, 2), number, np.float32)
        message = pb.AttendRequest.FromString(b"".join(encode_attend(array, array + 1, array + 2).pieces))
        for offset, tensor in enumerate((message.query, message.key, message.value)):
            assert tensor.data == np.full((2, 2), number + offset, np.float32).tobytes()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"causal": "bottom_left"}, "causal"),
        ({"causal": 2}, "causal"),
        ({"causal": 1.0}, "causal"),
        ({"layout": 1}, "layout"),
        ({"return_scores": True}, "return_scores"),
        ({"layout": "rows"}, "layout"),
        ({"return_scores": ["raw"]}, "return_scores"),
        ({"window": 3}, "window"),
        ({"window": (1, 2, 3)}, "window"),
        ({"window": (1.5, 2)}, "window.left"),
        ({"window": (1, 2**63)}, "window.right"),
        ({"window": "3"}, "window"),
        ({"window": {8, 0}}, "window"),
        ({"window": {8: 1, 0: 2}}, "window"),
        ({"scale": "big"}, "scale"),
        ({"scale": "1"}, "scale"),
        ({"scale": np.str_("1")}, "scale"),
        ({"softcap": b"1"}, "softcap"),
        ({"return_lse": "false"}, "return_lse"),
        ({"return_lse": None}, "return_lse"),
        ({"return_lse": 2}, "return_lse"),
        ({"return_lse": np.ones(2)}, "return_lse"),
        ({"scale": 10**400}, "scale"),
        ({"softcap": [1]}, "softcap"),
        ({"priority": 1.0}, "priority"),
        ({"priority": 0.0}, "priority"),
        ({"priority": np.array([0, 0])}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"score": "cosine"}, "score"),
        ({"score": QUERY}, "score"),
        ({"score": GeneralScore(np.eye(4, dtype=int))}, "general.weight"),
        ({"score": GeneralScore(None)}, "general.weight"),
        ({"score": AdditiveScore(None, QUERY)}, "additive.query_weight"),
        ({"score": AdditiveScore(QUERY, None)}, "additive.key_weight"),
        ({"mask": np.ones(3, np.float32)}, "mask"),
        ({"bias": np.ones(3, int)}, "bias"),
        ({"kv_lengths": [1.0]}, "kv_lengths"),
        ({"query_offset": "1"}, "query_offset"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"timeout": 10**400}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"timeout": np.False_}, "timeout"),
        ({"scale": True}, "scale"),
        ({"softcap": np.True_}, "softcap"),
        ({"priority": True}, "priority"),
        ({"priority": False}, "priority"),
        ({"window": (True, 0)}, "window.left"),
        ({"window": True}, "window"),
        ({"query_offset": True}, "query_offset"),
        ({"kv_lengths": True}, "kv_lengths"),
        ({"causal": [1] * 10**5}, "causal"),
        ({"return_lse": [0] * 10**5}, "return_lse"),
        ({"priority": "x" * 10**5}, "priority"),
        ({"priority": 10**9999}, "priority"),
        ({"window": range(10**5)}, "window"),
        ({"window": [0] * 10**5}, "window"),
        ({"window": (10**9999, 0)}, "window.left"),
    ],
)
def test_what_no_server_would_take_names_its_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request(**options)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: expected")
    assert len(str(caught.value)) < 300
    assert isinstance(caught.value, ValueError)


def test_what_is_too_long_for_any_server_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    size = encode_attend(QUERY, QUERY, QUERY).size
    assert _call._LONGEST == 2**31 - 1, "the most that `max_message_bytes` may be"
    monkeypatch.setattr(_call, "_LONGEST", size)
    request()
    monkeypatch.setattr(_call, "_LONGEST", size - 1)
    told = rf"^expected a request of at most {size - 1} bytes \(max_message_bytes\), found {size}$"
    with pytest.raises(InvalidRequestError, match=told):
        request()
    monkeypatch.setattr(_call, "_LONGEST", 100)
    for encode in (
        partial(encode_apply, "layer", QUERY),
        partial(cache_requests.appended, QUERY, QUERY, "heads_first"),
    ):
        with pytest.raises(InvalidRequestError, match="at most 100 bytes") as caught:
            encode()
        assert (caught.value.limit, caught.value.field) == ("max_message_bytes", None)


@pytest.mark.parametrize("flag", [False, True, 0, 1, np.False_, np.True_])
def test_flags_are_of_any_type_that_is_one(flag: Any) -> None:
    assert request(return_lse=flag).return_lse == bool(flag)


def test_the_timeout_of_a_call_wins_over_the_clients() -> None:
    def timeout(**options: Any) -> float | None:
        return encode_attend(QUERY, QUERY, QUERY, default_timeout=60.0, **options).timeout

    assert (timeout(), timeout(timeout=1), timeout(timeout=None), timeout(timeout=0)) == (60.0, 1.0, None, 0.0)


@pytest.mark.parametrize(
    ("score", "formula", "shapes"),
    [
        (GeneralScore, "scale * q W k", {"weight": "[D, Dk]"}),
        (
            AdditiveScore,
            "scale * w tanh(Wq q + Wk k + b)",
            {"query_weight": "[U, D]", "key_weight": "[U, Dk]", "bias": "[U]", "output_weight": "[U]"},
        ),
    ],
)
def test_help_says_what_a_learned_score_takes(score: type, formula: str, shapes: dict[str, str]) -> None:
    text = pydoc.render_doc(score, renderer=pydoc.plaintext)
    assert formula in text
    assert list(shapes) == [field.name for field in fields(score)]
    for name, shape in shapes.items():
        assert re.search(rf"- `{name}`: \w+, ``{re.escape(shape)}``, floating", text)
    assert score.__name__ in pydoc.render_doc(Client.attend, renderer=pydoc.plaintext)


def test_the_typed_options_are_the_arguments() -> None:
    arguments = set(encode_attend.__kwdefaults__) - {"default_timeout"}
    assert set(get_type_hints(AttendOptions)) == arguments


@pytest.mark.parametrize(
    ("method", "arguments", "hint"),
    [
        ("attend", {"is_causal": True}, "'is_causal'; 'causal' is one"),
        ("submit", {"attn_mask": QUERY}, "'attn_mask'; 'mask' is one"),
        ("attend", {"cache": None}, "'cache'; 'caches' is one"),
        ("submit", {"layer": 1}, "'layer'; 'cache_layer' is one"),
        ("apply", {"cashes": None}, "'cashes'; 'caches' is one"),
        ("apply", {"scale": 1.0}, "'scale'; the layer defines its scale$"),
        ("submit_apply", {"softcap": 1.0}, "'softcap'; the layer defines its softcap$"),
        ("attend", {"keys": QUERY}, "'keys'; 'key' is one"),
        ("attend", {"default_timeout": 1.0}, "'default_timeout'"),
        ("submit", {"resident": True}, "'resident'"),
        ("apply", {"is_causal": True}, "'is_causal'; 'causal' is one"),
        ("submit_apply", {"dropout": 0.1}, "'dropout'; there is no dropout here$"),
        ("attend", {"return_weights": True}, r"'return_weights'; return_scores='weights' returns them$"),
        ("attend", {"attention_mask": None}, "'attention_mask'; 'mask' is one, true where a query attends"),
        ("submit", {"dropout_p": 0.0}, "'dropout_p'; there is no dropout here$"),
        ("attend", {"enable_gqa": True}, "'enable_gqa'; heads are grouped by their numbers alone$"),
        ("attend", {"scaling": 1.0}, "'scaling'; 'scale' is one$"),
        ("apply", {"scaling": 1.0}, "'scaling'; the layer defines its scale$"),
        ("submit_apply", {"unknown_to_all": 1}, "'unknown_to_all'$"),
    ],
)
async def test_an_option_that_there_is_not_is_said_to_be_none_of_the_methods(
    method: str, arguments: dict[str, Any], hint: str
) -> None:
    given = ("a layer", QUERY) if "apply" in method else (QUERY, QUERY, QUERY)
    expected = rf"^{method}\(\) got an unexpected keyword argument {hint}"
    for caches in ({}, {"caches": ()}):
        with Client() as client, pytest.raises(TypeError, match=expected):
            getattr(client, method)(*given, **caches, **arguments)
        async with AsyncClient() as in_tasks:
            with pytest.raises(TypeError, match=expected):
                await getattr(in_tasks, method)(*given, **caches, **arguments)


@pytest.mark.parametrize(
    ("method", "encode"),
    [
        (Client.attend, encode_attend),
        (AsyncClient.submit, encode_attend),
        (Cache.attend, encode_attend),
        (Client.apply, encode_apply),
        (AsyncClient.submit_apply, encode_apply),
    ],
)
def test_methods_list_their_options(method: Any, encode: Any) -> None:
    """For `help`, and for what completes names."""
    listed, encoded = (inspect.signature(each).parameters for each in (method, encode))
    options = (AttendOptions if encode is encode_attend else ApplyOptions).__optional_keys__
    assert options <= listed.keys()
    assert all(listed[name] == encoded[name] for name in options)
    assert not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in listed.values())


def test_numbers_that_are_wrong_are_shown_shortly() -> None:
    with Client() as client:
        for field, value in (("scale", 10**400), ("timeout", 10**400), ("timeout", float("inf")), ("causal", 1.0)):
            with pytest.raises(InvalidRequestError, match=f"^{field}: expected") as caught:
                client.attend(QUERY, QUERY, QUERY, **{field: value})
            assert len(str(caught.value)) < 250


def test_a_cache_has_a_layer_of_its_own() -> None:
    for wrong, hint in (("cache_layer", "'layer' is one"), ("caches", "this cache is the one")):
        with Client() as client:
            cache = Cache(client, CacheInfo("name", 2, 4, 4, 1, "float32", (0,), 0, 0, None, None), None)
            with pytest.raises(TypeError, match=f"{wrong!r}; {hint}"):
                cache.attend(QUERY, **{wrong: 0})
