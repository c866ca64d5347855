"""Everything that can be asked of a layer with one attention, over the wire, against the oracle in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import forward
import numpy as np
import oracle
import pytest
from bits import assert_same_results
from checkpoints import PLAIN
from conftest import Models, Server
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Array, Floats

from attnserve import AsyncClient, Client, LayerResult
from attnserve_server.layers.checkpoint import load
from attnserve_server.layers.definitions import load_definitions
from attnserve_server.layers.specification import Attention, LayerSpecification, LearnedScore

TOLERANCE = 1e-11
CONTEXT_WIDTHS = {"rotary": 24, "alibi": 24, "single": 10, "additive": 10, "general": 10}


@dataclass(frozen=True)
class Question:
    """A request: its sequences, one by one, and the options that apply to all of them."""

    xs: list[Floats]
    zs: list[Floats] | None
    offsets: list[int] | None = None
    mask: Array | None = None
    bias: Array | None = None
    options: dict[str, Any] = field(default_factory=dict)
    stage: str | None = None
    average: bool = False

    def ask(self, layer: str, layout: str) -> dict[str, Any]:
        """The arguments of `apply` for packed or padded sequences."""
        arguments: dict[str, Any] = {"layer": layer, "lengths": [len(x) for x in self.xs], **self.options}
        arguments |= {"return_lse": True, "return_scores": self.stage, "average_scores": self.average}
        join = np.concatenate if layout == "packed" else padded
        arguments["input"] = join(self.xs)
        if self.zs is not None:
            arguments |= {"context": join(self.zs), "context_lengths": [len(z) for z in self.zs]}
        given = {"query_offset": self.offsets, "mask": self.mask, "bias": self.bias}
        return arguments | {name: value for name, value in given.items() if value is not None}


def padded(sequences: list[Floats]) -> Floats:
    """Sequences as one array [B, longest, width], padded with NaN, which must never be read."""
    longest = max(map(len, sequences))
    return np.stack([np.pad(x, ((0, longest - len(x)), (0, 0)), constant_values=np.nan) for x in sequences])


@cache
def resident(directory: Path, name: str) -> tuple[LayerSpecification, dict[str, Floats]]:
    """A layer's specification and its parameters."""
    (specification,) = load_definitions(directory / "layers.toml", directory, [name])
    parameters = load(specification, directory, "cpu")
    return specification, {key: tensor.double().numpy() for key, tensor in parameters.items()}


def inside(models: Models, name: str, x: Floats, z: Floats, **options: Any) -> tuple[Floats, oracle.Expected]:
    """The output of one sequence, and the oracle's result for the attention inside."""
    specification, parameters = resident(models.directory, name)
    layer = specification.architecture
    if isinstance(layer, Attention):
        output, expected = forward.attended(x, z, layer, parameters, options["query_offset"] or 0, **options)
        return output, expected
    assert isinstance(layer, LearnedScore)
    score: oracle.General | oracle.Additive = (
        oracle.General(parameters["score.weight"])
        if layer.score == "general"
        else (
            oracle.Additive(
                parameters["query.weight"], parameters["key.weight"], parameters["bias"], parameters["score.weight"]
            )
        )
    )
    values = forward.linear(z, parameters, "value") if layer.value else z
    expected = oracle.attend(x[None], z[None], values[None], score=score, **options)
    return expected.output[0], expected


def check(models: Models, name: str, question: Question, layout: str, result: LayerResult[Array]) -> None:
    """Asserts that a reply equals the oracle's result for each sequence, wherever the layout puts it."""
    lengths, zs = [len(x) for x in question.xs], question.zs or question.xs
    heads = getattr(resident(models.directory, name)[0].architecture, "heads", 1)
    full = (len(lengths), heads, max(lengths), max(map(len, zs)))
    masks, biases = (None if each is None else np.broadcast_to(each, full) for each in (question.mask, question.bias))
    assert result.lse is not None
    assert result.output.shape[:-1] == ((sum(lengths),) if layout == "packed" else (len(lengths), max(lengths)))
    start = 0
    for n, (x, z) in enumerate(zip(question.xs, zs, strict=True)):
        i, j = len(x), len(z)
        output, expected = inside(
            models,
            name,
            x,
            z,
            query_offset=None if question.offsets is None else question.offsets[n],
            mask=None if masks is None else masks[n, :, :i, :j],
            bias=None if biases is None else biases[n, :, :i, :j],
            **question.options,
        )
        if layout == "packed":
            own, lse = result.output[start : start + i], result.lse[:, start : start + i]
            scores = None if result.scores is None else result.scores[..., start : start + i, :]
        else:
            own, lse = result.output[n, :i], result.lse[n, :, :i]
            scores = None if result.scores is None else result.scores[n][..., :i, :]
            assert (result.output[n, i:] == 0).all()
            assert (result.lse[n, :, i:] == -np.inf).all()
        near(own, output)
        near(lse, expected.lse)
        if question.stage is not None:
            wanted = getattr(expected, question.stage)
            assert scores is not None
            near(scores[..., :j], wanted.mean(0) if question.average else wanted)
            assert (scores[..., j:] == (0 if question.stage == "weights" else -np.inf)).all()
        start += i


def near(found: Array, expected: Floats) -> None:
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"causal": True},
    "not causal": {"causal": False},
    "bottom right": {"causal": "bottom_right"},
    "window": {"window": (1, 2)},
    "no window": {"window": (-1, -1)},
    "priority": {"priority": -3},
}


def question(name: str, seed: int = 0, *, self_attention: bool | None = None, **fields: Any) -> Question:
    rng = np.random.default_rng(seed)
    lengths, context_lengths = fields.pop("lengths", [5, 1, 3]), fields.pop("context_lengths", [4, 6, 1])
    width = CONTEXT_WIDTHS[name]
    zs = None if self_attention else [rng.standard_normal((length, width)) for length in context_lengths]
    return Question([rng.standard_normal((length, 24)) for length in lengths], zs, **fields)


def answer(client: Client, models: Models, name: str, asked: Question) -> None:
    """Applies the layer to it packed and padded, and checks both."""
    for layout in ("packed", "padded"):
        arguments = asked.ask(name, layout)
        check(models, name, asked, layout, client.apply(arguments.pop("layer"), arguments.pop("input"), **arguments))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", PLAIN)
def test_an_option(layer_client: Client, models: Models, name: str, options: str) -> None:
    given = dict(OPTIONS[options])
    priority = {"priority": given.pop("priority")} if "priority" in given else {}
    asked = question(name, options=given, stage="weights")
    result = layer_client.apply(name, **_without_layer(asked.ask(name, "packed")), **priority)
    check(models, name, asked, "packed", result)
    answer(layer_client, models, name, asked)


def _without_layer(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key != "layer"}


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("stage", oracle.STAGES)
@pytest.mark.parametrize("name", ["rotary", "alibi", "additive"])
def test_scores(layer_client: Client, models: Models, name: str, stage: str, average: bool) -> None:
    answer(layer_client, models, name, question(name, stage=stage, average=average))


@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (3, 1, 5, 6), (1, 4, 1, 6), (5, 1), (6,), (3, 1, 1, 6), ()])
@pytest.mark.parametrize("name", ["rotary", "alibi"])
def test_masks_and_biases_broadcast(layer_client: Client, models: Models, name: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    mask, bias = np.array(rng.random(shape) > 0.3), np.array(rng.standard_normal(shape))
    answer(layer_client, models, name, question(name, mask=mask))
    answer(layer_client, models, name, question(name, bias=bias, stage="masked"))
    answer(layer_client, models, name, question(name, mask=mask, bias=bias))


@pytest.mark.parametrize("self_attention", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["rotary", "alibi"])
def test_query_offsets(layer_client: Client, models: Models, name: str, causal: bool, self_attention: bool) -> None:
    """Rotations and masks count from them; negative ones leave the first queries with nothing to attend to."""
    asked = question(name, offsets=[2, -1, 4], options={"causal": causal}, self_attention=self_attention)
    answer(layer_client, models, name, asked)


def test_one_offset_for_all(layer_client: Client) -> None:
    arguments = _without_layer(question("rotary", offsets=[3, 3, 3]).ask("rotary", "padded"))
    expected = layer_client.apply("rotary", **arguments)
    for one in (3, [3], np.array(3)):
        assert_same_results(layer_client.apply("rotary", **arguments | {"query_offset": one}), expected)


def test_decoding_token_by_token_over_a_context(layer_client: Client) -> None:
    """A token's row, computed alone at its position over all tokens, is that of the whole sequence."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((6, 24))
    whole = layer_client.apply("rotary", x, causal=True)
    for place in range(6):
        one = layer_client.apply("rotary", x[place : place + 1], context=x, causal=True, query_offset=place)
        near(one.output[0], whole.output[place])
        aligned = layer_client.apply("rotary", x[place : place + 1], context=x[: place + 1], query_offset=place)
        near(aligned.output[0], whole.output[place])


@pytest.mark.parametrize("lengths", [[0, 0], [3, 0, 2], [0, 4]])
@pytest.mark.parametrize("name", PLAIN)
def test_sequences_without_anything(layer_client: Client, models: Models, name: str, lengths: list[int]) -> None:
    """Inputs over an empty context are 0 inside, so the output is its bias; nothing is NaN."""
    asked = question(name, lengths=lengths, context_lengths=[0, 3, 0][: len(lengths)], stage="weights")
    for layout in ("packed", "padded"):
        arguments = _without_layer(asked.ask(name, layout))
        result = layer_client.apply(name, **arguments)
        check(models, name, asked, layout, result)


def test_no_sequences_at_all(layer_client: Client) -> None:
    result = layer_client.apply("rotary", np.zeros((0, 24)), lengths=np.zeros(0, np.int64), return_lse=True)
    assert list(result.output.shape) == [0, 20]
    result = layer_client.apply("rotary", np.zeros((0, 5, 24)), return_lse=True, return_scores="raw")
    assert list(result.output.shape) == [0, 5, 20]
    assert result.lse is not None
    assert list(result.lse.shape) == [0, 4, 5]
    assert result.scores is not None
    assert list(result.scores.shape) == [0, 4, 5, 5]


@st.composite
def questions(draw: st.DrawFn) -> tuple[str, Question]:
    name = draw(st.sampled_from(sorted(PLAIN)))
    count = draw(st.integers(1, 4))
    lengths, context_lengths = (draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)) for _ in range(2))
    self_attention = CONTEXT_WIDTHS[name] == 24 and draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    heads = 4 if CONTEXT_WIDTHS[name] == 24 else 1
    full = (count, heads, max(lengths), max(lengths if self_attention else context_lengths))
    fields: dict[str, Any] = {}
    for kept in ("mask", "bias"):
        if draw(st.booleans()):
            drawn = rng.standard_normal([size if draw(st.booleans()) else 1 for size in full])
            fields[kept] = drawn > -0.7 if kept == "mask" else drawn
    if draw(st.booleans()):
        fields["offsets"] = [draw(st.integers(-2, 6)) for _ in lengths]
    options: dict[str, Any] = {}
    if (causal := draw(st.sampled_from([None, True, False, "bottom_right"]))) is not None:
        options["causal"] = causal
    if (window := draw(st.sampled_from([None, (-1, -1), (2, 0), (0, 3)]))) is not None:
        options["window"] = window
    fields["stage"] = draw(st.sampled_from([None, *oracle.STAGES]))
    fields["average"] = fields["stage"] is not None and draw(st.booleans())
    seed = int(rng.integers(1 << 30))
    return name, question(
        name,
        seed,
        lengths=lengths,
        context_lengths=context_lengths,
        self_attention=self_attention,
        options=options,
        **fields,
    )


@settings(max_examples=60)
@given(drawn=questions())
def test_everything_at_random(layer_client: Client, models: Models, drawn: tuple[str, Question]) -> None:
    answer(layer_client, models, *drawn)


async def test_transports(layer_client: Client, layer_server: Server) -> None:
    """Sync and async, streaming and unary: the same bits, and everything that comes with a result."""
    arguments = _without_layer(question("rotary", stage="capped").ask("rotary", "padded"))
    expected = layer_client.apply("rotary", **arguments)
    with Client(layer_server.address, transport="unary") as client:
        results = [client.apply("rotary", **arguments), client.submit_apply("rotary", **arguments).result()]
    async with (
        AsyncClient(layer_server.address) as stream,
        AsyncClient(layer_server.address, transport="unary") as unary,
    ):
        results += [await client.apply("rotary", **arguments) for client in (stream, unary)]
    version = layer_client.layers.get("rotary").version
    for result in (expected, *results):
        assert_same_results(result, expected)
        assert result.layer_version == version > 0
        assert result.batch_size == 1
        timings = result.timings
        assert 0 < timings.compute < timings.total
