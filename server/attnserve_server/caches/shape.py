"""What the tokens of a cache look like, and how they lie in a page.

A page holds P tokens of one layer: a block of keys [Hk, P, D] and, from the next multiple of 64 bytes on, a block of
values [Hk, P, Dv]. Heads come first, because the kernels are up to twice as slow over other strides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal, TypeAlias

from attnserve_server.errors import LIMIT_EXCEEDED, InvalidRequest

CacheDtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
"""The dtypes in which keys and values can be stored."""

BLOCK_ALIGNMENT: Final = 64
"""The block of values starts at a multiple of so many bytes, and so does every page."""

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
        """Checks that every number is at least 1 and that the dtype is one of storage."""
        for field in fields(self)[:4]:
            if (value := getattr(self, field.name)) < 1:
                raise InvalidRequest(field.name, "a number of at least 1", value)
        if self.dtype not in _ITEM_BYTES:
            raise InvalidRequest("dtype", " or ".join(_ITEM_BYTES), self.dtype)

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's keys and values in one layer."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * _ITEM_BYTES[self.dtype]

    def tokens_per_page(self, page_bytes: int) -> int:
        """P: how many tokens a page holds. Raises InvalidRequest if it cannot hold one."""
        tokens = page_bytes // self.token_bytes
        while tokens and self._value_offset(tokens) + tokens * self._value_bytes > page_bytes:
            tokens -= 1
        if not tokens:
            raise InvalidRequest(
                "head_dim",
                f"tokens of at most {page_bytes} bytes, num_kv_heads * (head_dim + value_dim) of {self.dtype}",
                self.token_bytes,
                LIMIT_EXCEEDED,
            )
        return tokens

    def value_offset(self, page_bytes: int) -> int:
        """Where in a page the block of values starts, in bytes."""
        return self._value_offset(self.tokens_per_page(page_bytes))

    @property
    def _value_bytes(self) -> int:
        return self.num_kv_heads * self.value_dim * _ITEM_BYTES[self.dtype]

    def _value_offset(self, tokens: int) -> int:
        key_bytes = tokens * self.num_kv_heads * self.head_dim * _ITEM_BYTES[self.dtype]
        return -(-key_bytes // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
