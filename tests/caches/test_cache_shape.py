"""How tokens lie in a page, and shapes that are invalid."""

from __future__ import annotations

import pytest
from stores import store_of

from attnserve_server.caches.shape import CacheShape, half_page
from attnserve_server.errors import InvalidRequest


@pytest.mark.parametrize(
    ("shape", "page_bytes", "tokens", "head_bytes"),
    [
        (CacheShape(8, 64, 64, 1, "float32"), 256 * 1024, 64, 16 * 1024),
        (CacheShape(8, 64, 64, 1, "bfloat16"), 256 * 1024, 128, 16 * 1024),
        # Half a page holds 21 tokens of two heads, of which 20 are a multiple of 4; the keys of a head take 1920 bytes.
        (CacheShape(2, 48, 16, 3, "float16"), 8192, 20, 2048),
        # Half a page of 131,072 bytes cannot be divided by 12 heads: heads lie as close together as possible.
        (CacheShape(12, 64, 64, 1, "float32"), 256 * 1024, 40, 10240),
        # 100 bytes are rounded down to 64, which hold eight tokens of eight bytes.
        (CacheShape(1, 1, 2, 1, "float32"), 200, 8, 64),
    ],
)
def test_half_a_page_holds_aligned_heads(shape: CacheShape, page_bytes: int, tokens: int, head_bytes: int) -> None:
    assert shape.tokens_per_page(page_bytes) == tokens
    assert shape.head_bytes(page_bytes, shape.head_dim) == head_bytes
    for width in (shape.head_dim, shape.value_dim):
        assert tokens * width * shape.item_bytes <= shape.head_bytes(page_bytes, width)
        assert shape.num_kv_heads * shape.head_bytes(page_bytes, width) <= half_page(page_bytes)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ((0, 8, 8, 1, "float32"), "num_kv_heads"),
        ((1, 0, 8, 1, "float32"), "head_dim"),
        ((1, 8, 0, 1, "float32"), "value_dim"),
        ((1, 8, 8, 0, "float32"), "layers"),
        ((1, 8, 8, 1, "float64"), "dtype"),
    ],
)
def test_shapes_that_are_none(fields: tuple[int, int, int, int, str], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        CacheShape(*fields)  # type: ignore[arg-type]
    assert error.value.field == field


def test_a_token_must_fit_a_page() -> None:
    store = store_of(4)
    with pytest.raises(InvalidRequest, match="at most 128 bytes"):
        store.create(CacheShape(4, 16, 16, 1, "float32"), None, 0.0)
    assert len(store) == 0
