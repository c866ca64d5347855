"""Tables of text, as commands print them."""

from __future__ import annotations

from attnserve._commands.table import table


def test_words_are_on_the_left_of_their_columns_and_numbers_on_the_right() -> None:
    rows = [("name", "kind", "bytes"), ("a", "linear", "12"), ("decoder", "", "")]
    assert table(rows, words=2).splitlines() == [
        "name     kind    bytes",
        "a        linear     12",
        "decoder",
    ]
