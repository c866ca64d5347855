"""What kernels add to scores, and the scale that they get: against the formulas, key by key."""

from __future__ import annotations

import pytest
import torch

from attnserve_server.kernels.band import Band
from attnserve_server.kernels.bias import LEAST_SCALE, add_sinks, alibi, positive_scale

SLOPES = torch.tensor([0.5, -0.25, 0.0, 4.0])


@pytest.mark.parametrize(
    "band",
    [
        Band(3, 5, 0, -1, -1),
        Band(3, 5, 2, -1, 0),
        Band(4, 6, 0, 1, 2),
        Band(2, 4, 10, 9, -1),
        Band(1, 8, -5, -1, 6),
        Band(5, 3, -2, -1, 0),
        Band(2, 3, -4, -1, -1),
    ],
    ids=str,
)
def test_alibi_is_measured_from_the_key_that_matters_most(band: Band) -> None:
    """Of each row: its bias is 0, those of the others that the row reaches are below, and the lse lacks the rest."""
    biases, shift = alibi(SLOPES, band)
    reached = band.tensor(torch.device("cpu"))
    rows = reached.any(1)
    assert rows.any()
    position = torch.arange(band.query_length).unsqueeze(1) + band.offset
    exact = -SLOPES[:, None, None] * (position - torch.arange(band.kv_length)).abs()
    assert biases.shape == (1, *exact.shape)
    assert shift.shape == (1, len(SLOPES), band.query_length)
    assert torch.equal((biases[0] + shift[0].unsqueeze(-1))[:, reached], exact[:, reached])
    assert (biases[0].masked_fill(~reached, -torch.inf).amax(-1)[:, rows] == 0).all()


@pytest.mark.parametrize("scale", [0.0, -0.0, 1.0, -1.0, 2.0**-60, -(2.0**-60), 2.0**-61, -(2.0**-61), -8.0, 0.125])
def test_a_scale_is_made_positive_without_changing_scores(scale: float) -> None:
    query = torch.tensor([[-3.0, 0.0, 2.0**70]])
    scaled, positive = positive_scale(query, scale)
    assert positive >= LEAST_SCALE
    assert torch.equal(scaled * positive, query * scale)


@pytest.mark.parametrize("length", [1, 31, 32, 100])
@pytest.mark.parametrize("each", [False, True], ids=["a sink for each head", "a sink for each row"])
def test_a_sink_is_a_key_of_value_zero(length: int, each: bool) -> None:
    """Also beside no other key; and a row's bits do not depend on its place."""
    torch.manual_seed(0)
    lse, output = torch.randn(1, 3, length), torch.randn(1, 3, length, 4)
    lse[..., 0], output[..., 0, :] = -torch.inf, 0
    sinks = torch.tensor([0.5, -torch.inf, 40.0])[None, :, None]
    sinks = sinks.expand(lse.shape).contiguous() if each else sinks
    found, total = add_sinks(output, lse, sinks)
    exact = torch.logaddexp(lse.double(), sinks.double())
    share = torch.exp(lse - exact).nan_to_num(0)
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.double(), output * share.unsqueeze(-1), rtol=0, atol=1e-6)
    for row in range(1, length, 7):
        own = slice(row, row + 3)
        some, of_some = add_sinks(output[:, :, own], lse[..., own], sinks[..., own] if each else sinks)
        assert torch.equal(some, found[:, :, own])
        assert torch.equal(of_some, total[..., own])
