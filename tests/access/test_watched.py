"""What files hold: read again when they change, however that comes, and kept while they cannot be used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from attnserve_server.access import watched
from attnserve_server.access.watched import Watched
from attnserve_server.start_errors import StartError


class Words:
    """What a file holds, and how often it has been read. It must not be empty."""

    def __init__(self, path: Path, interval: float = 0.0) -> None:
        self._path = path
        self.reads = 0
        self.file = Watched("the file", "its words stay as they were", [path], self._load, interval)

    def _load(self) -> list[str]:
        self.reads += 1
        if not self._path.exists() or not (words := self._path.read_text().split()):
            raise StartError("there are no words")
        return words


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file behind a link to its directory, as Kubernetes has them."""
    (tmp_path / "first").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "first")
    (path := tmp_path / "link" / "words").write_text("one two")
    os.utime(path, (0, 0))  # long ago: the kernel's clock may tick only every 4 ms
    return path


def overwrite(path: Path) -> None:
    path.write_text("six ten")


def overwrite_at_the_same_time(path: Path) -> None:
    """As tools that keep a file's time do."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_text("six ten")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    (new := path.with_name("new")).write_text("six ten")
    new.replace(path)


def lead_elsewhere(path: Path) -> None:
    """As Kubernetes does."""
    (directory := path.parents[1] / "second").mkdir()
    (directory / "words").write_text("six ten")
    (link := path.parents[1] / "new link").symlink_to(directory)
    link.replace(path.parent)


@pytest.mark.parametrize("change", [overwrite, overwrite_at_the_same_time, replace, lead_elsewhere])
def test_a_file_is_read_again_whenever_it_has_changed(path: Path, change: Callable[[Path], None]) -> None:
    """Though its length is the same; and only then."""
    words = Words(path)
    before = words.file.current
    assert before == ["one", "two"]
    assert words.file.current is before
    change(path)
    assert words.file.current == ["six", "ten"]
    assert words.file.current is words.file.current
    assert (words.reads, words.file.reload_failed()) == (2, False)


@pytest.mark.parametrize("spoil", [lambda path: path.write_text(""), Path.unlink], ids=["emptied", "removed"])
def test_what_cannot_be_used_is_said_once_and_what_was_before_stays(
    path: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    words = Words(path)
    before = words.file.current
    assert not words.file.reload_failed()
    spoil(path)
    for _ in range(3):
        assert words.file.reload_failed()
        assert words.file.current is before
    assert caplog.messages == ["the file was not reloaded: its words stay as they were"]
    path.write_text("one two three")
    assert words.file.current == ["one", "two", "three"]
    assert not words.file.reload_failed()
    assert caplog.messages[1:] == ["the file was reloaded"]
    assert words.reads == 3


def test_what_could_not_be_used_for_a_while_is_read_without_a_change(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the process had no file descriptors left. Each reason is said once."""
    caplog.set_level("INFO")
    now = [100.0]
    monkeypatch.setattr(watched, "monotonic", lambda: now[0])
    found: list[list[str] | str] = [["one"]]

    def load() -> list[str]:
        if isinstance(found[0], str):
            raise StartError(found[0])
        return found[0]

    file = Watched("the file", "its words stay as they were", [path], load)
    replace(path)
    for now[0], found[0], failed in (  # type: ignore[assignment]
        (101.0, "too many open files", True),
        (101.9, ["two"], True),
        (102.1, "too many open files", True),
        (103.2, "an error of the disk", True),
        (104.3, ["two"], False),
        (106.0, ["three"], False),
    ):
        assert file.reload_failed() is failed
        assert file.current == (["one"] if failed else ["two"])
    not_reloaded = "the file was not reloaded: its words stay as they were"
    assert caplog.messages == [not_reloaded, not_reloaded, "the file was reloaded"]


def test_files_are_looked_at_so_often_and_no_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(watched, "monotonic", lambda: now[0])
    words = Words(path, interval=2.0)
    path.write_text("six ten")
    seen = []
    for now[0] in (100.0, 101.9, 102.1, 103.0, 104.2):
        seen.append(words.file.current)
        if now[0] == 102.1:
            path.write_text("all over")
    assert [each[0] for each in seen] == ["one", "one", "six", "six", "all"]


def test_a_file_that_cannot_be_used_at_first_is_an_error(path: Path) -> None:
    path.unlink()
    with pytest.raises(StartError, match="there are no words"):
        Words(path)
