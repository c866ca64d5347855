"""Packing: every sequence gets its own rows back, whatever order they were computed in; and how rows are divided."""

from __future__ import annotations

import itertools
import math

import pytest
import random_layers as make
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnserve_server.devices.compute import MAX_ROWS, ROWS
from attnserve_server.devices.cpu import SPLIT_FLOPS, CpuDevice
from attnserve_server.devices.division import chunks
from attnserve_server.layers.attend import kinds_of
from attnserve_server.layers.layer import LayerInput
from attnserve_server.layers.options import LayerOptions
from attnserve_server.layers.product import divides
from attnserve_server.layers.projection import WIDTH, Linear, Projection
from attnserve_server.layers.rows import Batch, multiple_of, padding_of
from attnserve_server.layers.specification import Dtype


@st.composite
def batches(draw: st.DrawFn) -> list[LayerInput]:
    """Requests whose rows all differ: each row holds the number of its request, sequence and row."""
    requests = []
    for request in range(draw(st.integers(1, 5))):
        lengths = draw(st.lists(st.integers(0, 4), max_size=5))
        context_lengths = [draw(st.integers(0, 2)) for _ in lengths]
        contexts = [(request, n, row) for n, length in enumerate(context_lengths) for row in range(length)]
        requests.append(
            LayerInput(
                input=numbered(request, lengths),
                lengths=lengths,
                context=torch.tensor(contexts, dtype=torch.float32).view(-1, 3),
                context_lengths=context_lengths,
                mask=torch.ones(1, 1, 1, 1, dtype=torch.bool) if draw(st.booleans()) else None,
                options=LayerOptions(causal=draw(st.booleans()), bottom_right=draw(st.booleans())),
            )
        )
    return requests


def numbered(request: int, lengths: list[int]) -> torch.Tensor:
    rows = [(request, n, row) for n, length in enumerate(lengths) for row in range(length)]
    return torch.tensor(rows, dtype=torch.float32).view(-1, 3)


@pytest.mark.parametrize(
    ("native", "widths", "multiple"),
    [(True, [64, 192], 1), (True, [], 1), (True, [64, 96], ROWS), (False, [64], ROWS), (False, [], ROWS)],
)
def test_what_batches_are_padded_to(native: bool, widths: list[int], multiple: int) -> None:
    assert multiple_of(native, widths) == multiple


@given(requests=batches(), multiple=st.sampled_from((1, ROWS)))
def test_every_sequence_is_in_one_stack_and_comes_back(requests: list[LayerInput], multiple: int) -> None:
    own = [kind for each in requests for kind in kinds_of(each, False, (-1, -1), own_keys=True)]
    crossed = [kind for each in requests for kind in kinds_of(each, False, (-1, -1))]
    batch = Batch(requests, own, crossed, multiple=multiple)
    assert batch.contexts is not None
    inputs, contexts = batch.pack_inputs(), batch.pack_contexts()
    assert inputs.shape == (batch.inputs.rows, 3)
    assert batch.inputs.rows % multiple == 0 <= batch.inputs.rows - batch.inputs.total < multiple
    assert (inputs[batch.inputs.total :] == 0).all()
    for request, rows in zip(requests, batch.unpack(inputs), strict=True):
        assert torch.equal(rows, request.input)

    for attention, (packing, rows, kinds) in enumerate(
        ((batch.inputs, inputs, own), (batch.contexts, contexts, crossed))
    ):
        seen = []
        stacks = batch.stacks(attention, packing)
        for stack in stacks:
            for place in range(stack.count):
                start = stack.query_start + place * stack.kind.query_length
                queries = inputs[start : start + stack.kind.query_length]
                start = stack.kv_start + place * stack.kind.kv_length
                keys = rows[start : start + stack.kind.kv_length]
                owners = {(int(row[0]), int(row[1])) for row in (*queries, *keys)}
                assert len(owners) <= 1, "a stack's queries and keys are of one sequence"
                assert (stack.mask is not None) == (stack.kind.mask is not None)
                seen.append(stack.kind)
        assert sorted(map(repr, seen)) == sorted(map(repr, kinds))
        assert sum(each.pairs for each in stacks) == sum(each.query_length * each.kv_length for each in kinds)
        if not attention:  # for its first attention a batch makes only one call per kind
            assert len(stacks) == len(set(kinds))


@pytest.mark.parametrize(("lengths", "padding"), [([], 0), ([0], 0), ([16], 0), ([3, 2], 27 / 32), ([16, 1], 15 / 32)])
def test_the_share_of_padding(lengths: list[int], padding: float) -> None:
    """Of batches of so many rows, each of two requests: rows count once."""
    outputs = []
    for rows in lengths:
        given = [make.packed(make.random_rows(each, 8, each)) for each in (rows, 0)]
        batch = Batch(given, [kind for each in given for kind in kinds_of(each, False, (-1, -1))], multiple=ROWS)
        outputs += batch.outputs(batch.pack_inputs())
    assert [len(each.output) for each in outputs] == [n for rows in lengths for n in (rows, 0)]
    assert padding_of(outputs) == padding


@given(requests=batches())
def test_positions_count_from_each_sequences_offset(requests: list[LayerInput]) -> None:
    for number, request in enumerate(requests):
        request.offsets = [10 * number + n for n in range(len(request.lengths))] if number % 2 else None
    batch = Batch(requests, [kind for each in requests for kind in kinds_of(each, False, (-1, -1))], multiple=ROWS)
    counted = batch.unpack(batch.positions(torch.device("cpu")))
    for request, positions in zip(requests, counted, strict=True):
        offsets = request.offsets or [0] * len(request.lengths)
        expected = [o + row for o, length in zip(offsets, request.lengths, strict=True) for row in range(length)]
        assert positions.tolist() == expected


@given(blocks=st.integers(0, 200), short=st.integers(0, ROWS - 1), threads=st.integers(1, 9))
def test_ranges_of_rows(blocks: int, short: int, threads: int) -> None:
    """Of any number of rows: the last block may be `short` of some."""
    rows = max(0, blocks * ROWS - short)
    ranges = list(chunks(rows, threads))
    assert [row for each in ranges for row in range(each.start, each.stop)] == list(range(rows))
    assert all(each.start % ROWS == 0 for each in ranges)
    lengths = [-(-(each.stop - each.start) // ROWS) * ROWS for each in ranges]
    assert all(0 < length <= MAX_ROWS for length in lengths)
    assert max(lengths, default=0) - min(lengths, default=0) <= ROWS
    assert len(ranges) % threads == 0 or len(ranges) == blocks


@pytest.mark.parametrize("rows", [0, 1, 16, 40, 512, 528, 1600])
@pytest.mark.parametrize("flops", [0, SPLIT_FLOPS])
def test_row_functions_of_one_and_of_several_results(devices: dict[int, CpuDevice], rows: int, flops: int) -> None:
    tensors = make.random_rows(rows, 5, 0), torch.arange(rows)
    for device in devices.values():
        assert torch.equal(device.rows(lambda x: x * 2, tensors[0], flops=flops), tensors[0] * 2)
        doubled, following = device.rows(lambda x, n: (x * 2, n + 1), *tensors, flops=flops)
        assert torch.equal(doubled, tensors[0] * 2)
        assert torch.equal(following, tensors[1] + 1)


@pytest.mark.parametrize(
    ("rows", "flops", "parallel", "ranges"),
    [
        (64, SPLIT_FLOPS, True, [16] * 4),
        (32, SPLIT_FLOPS, True, [32]),
        (32, SPLIT_FLOPS, False, [16, 16]),
        (32, SPLIT_FLOPS - 1, False, [32]),
        (1000, 0, True, [496, 504]),
    ],
)
def test_rows_are_divided_if_there_are_enough_of_them(rows: int, flops: int, parallel: bool, ranges: list[int]) -> None:
    """Products that divide themselves read all weights for each range: for fewer than there are threads, only once."""
    before = torch.get_num_threads()
    device, seen = CpuDevice(4, 0, None), []
    try:
        device.rows(lambda x: (seen.append(len(x)), x)[1], make.random_rows(rows, 5, 0), flops=flops, parallel=parallel)
    finally:
        device.close()
        torch.set_num_threads(before)
    assert sorted(seen) == ranges


def test_an_error_in_a_range_of_rows_is_the_callers(devices: dict[int, CpuDevice]) -> None:
    def fail(rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    for device, flops in itertools.product(devices.values(), (0, SPLIT_FLOPS)):
        with pytest.raises(RuntimeError, match="out of memory"):
            device.rows(fail, make.random_rows(1600, 5, 0), flops=flops)


@pytest.mark.parametrize("dtype", make.DTYPES)
@pytest.mark.parametrize("widths", [(16, 32), (3, 5), (1,), (20, 7, 16)])
def test_maps_side_by_side_are_each_map(dtype: Dtype, widths: tuple[int, ...]) -> None:
    rows = make.random_rows(32, 21, 0, dtype)
    weights = [make.random_rows(width, 21, width, dtype) for width in widths]
    biases = [make.random_rows(1, width, width, dtype)[0] if place else None for place, width in enumerate(widths)]
    together = Projection.of(weights, biases, None)
    bound = {"float64": 1e-13, "float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-1}[dtype]
    projected = together(rows)
    for columns, weight, bias in zip(together.columns, weights, biases, strict=True):
        wanted = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
        torch.testing.assert_close(projected[:, columns].double(), wanted, rtol=0, atol=bound)
        assert columns.start * projected.itemsize % 32 == 0
    whole = sum(math.ceil(width / WIDTH) * WIDTH for width in widths)
    assert (projected.shape, together.width, together.row_flops) == ((32, whole), whole, 2 * 2 * WIDTH * whole)
    if divides(weights[0], None):
        for place, columns in enumerate(together.columns):
            one = together.part(place, place + 1)
            assert one(rows).shape == (32, math.ceil(widths[place] / WIDTH) * WIDTH) == (32, one.width)
            torch.testing.assert_close(one(rows)[:, one.columns[0]], projected[:, columns], rtol=0, atol=bound)


def test_a_map_costs_what_its_rows_are_padded_to() -> None:
    weight, rows = make.random_rows(5, 21, 0), make.random_rows(3, 21, 1)
    linear = Linear(weight, None, None)
    assert linear.row_flops == 2 * 2 * WIDTH * 5
    torch.testing.assert_close(linear(rows), rows @ weight.T, rtol=0, atol=1e-5)
