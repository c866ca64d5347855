"""The shape of the tokens of a cache, and their layout in a page.

A page has two halves, in two memories: a block of keys [Hk, P, D] in the memory of all keys, and a block of values [Hk,
P, Dv] in the memory of all values. So the keys of adjacent pages lie side by side, as do the values: reading all keys
and then all values is a third faster than alternating. Heads come first, because kernels are up to twice as slow
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal, TypeAlias

from attnserve_server.errors import LIMIT_EXCEEDED, InvalidRequest
from attnserve_server.host.cpus import CACHE_LINE

CacheDtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
"""The dtypes in which keys and values can be stored."""

TOKEN_MULTIPLE: Final = 4
"""Pages of more than a few tokens hold a multiple of this many, so that rows of scores are aligned."""

_ITEM_BYTES: Final[dict[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The heads, widths, layers and storage dtype of a cache. Raises InvalidRequest when built wrongly."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    layers: int
    dtype: CacheDtype

    def __post_init__(self) -> None:
        """Checks that every number is at least 1 and that the dtype can be stored."""
        for field in fields(self)[:4]:
            if (value := getattr(self, field.name)) < 1:
                raise InvalidRequest(field.name, "a number of at least 1", value)
        if self.dtype not in _ITEM_BYTES:
            raise InvalidRequest("dtype", " or ".join(_ITEM_BYTES), self.dtype)

    def differences(self, other: CacheShape) -> tuple[str, str]:
        """What this one has in words, and the other one, where they differ."""
        names = [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]
        own, others = (", ".join(f"{name} {getattr(each, name)}" for name in names) for each in (self, other))
        return own, others

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's keys and values in one layer."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * _ITEM_BYTES[self.dtype]

    def tokens_per_page(self, page_bytes: int) -> int:
        """P: how many tokens a page holds. Raises InvalidRequest if it cannot hold one."""
        half = half_page(page_bytes)
        row_bytes = self.num_kv_heads * max(self.head_dim, self.value_dim) * self.item_bytes
        tokens = half // row_bytes
        if not tokens:
            what, wider = ("values", "value_dim") if self.value_dim > self.head_dim else ("keys", "head_dim")
            raise InvalidRequest(
                wider,
                f"{what} of at most {half} bytes a token, num_kv_heads * {wider} of {self.dtype}",
                row_bytes,
                LIMIT_EXCEEDED,
                limit="cache_page_bytes",
            )
        return tokens - tokens % TOKEN_MULTIPLE if tokens >= TOKEN_MULTIPLE**2 else tokens

    def head_bytes(self, page_bytes: int, width: int) -> int:
        """The stride in bytes from the keys or values of a head in a page, `width` elements each, to those of the next.

        It is also that from the last head to the first of the next page, where half a page can be divided so.
        """
        each, rest = divmod(half_page(page_bytes), self.num_kv_heads * CACHE_LINE)
        return self.tokens_per_page(page_bytes) * width * self.item_bytes if rest else each * CACHE_LINE

    @property
    def item_bytes(self) -> int:
        """The bytes of an element."""
        return _ITEM_BYTES[self.dtype]


def half_page(page_bytes: int) -> int:
    """The bytes of either half of a page."""
    return page_bytes // 2 // CACHE_LINE * CACHE_LINE
