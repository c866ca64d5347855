"""The protos and the code generated from them: in step, documented, lint-free, and compatible with the baseline.

Runs the same functions as `make check`, and asserts that these find the faults that they are meant to find.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from attnserve.v1 import attention_pb2
from scripts import protos


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the protos and the generated code that a test may corrupt; returns the copy of attention.proto."""
    shutil.copytree(protos.PROTOS, tmp_path / "protos")
    shutil.copytree(protos.GENERATED / protos.PACKAGE, tmp_path / "client" / protos.PACKAGE)
    shutil.copy(protos.ROOT / "buf.yaml", tmp_path)
    monkeypatch.setattr(protos, "ROOT", tmp_path)
    monkeypatch.setattr(protos, "PROTOS", tmp_path / "protos")
    monkeypatch.setattr(protos, "GENERATED", tmp_path / "client")
    monkeypatch.setattr(protos, "BASELINE", tmp_path / "protos" / "baseline.binpb")
    return tmp_path / "protos" / protos.PACKAGE / "attention.proto"


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_generated_code_is_in_step() -> None:
    protos.check_generated()


def test_lint() -> None:
    protos.lint()


def test_nothing_that_callers_rely_on_has_changed() -> None:
    protos.breaking()


def test_the_baseline_holds_the_service() -> None:
    """An empty baseline would let anything pass."""
    baseline = descriptor_pb2.FileDescriptorSet.FromString(protos.BASELINE.read_bytes())
    services = {service.name for file in baseline.file for service in file.service}
    assert services == {"AttentionService", "CacheService", "LayerService"}
    assert not any(file.HasField("source_code_info") for file in baseline.file)


def test_the_protocol_as_one_file_has_whatever_it_needs(tmp_path: Path) -> None:
    assert protos.main("descriptors", str(tmp_path / "new" / "protocol.binpb")) == 0
    files = descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "new" / "protocol.binpb").read_bytes()).file
    comments = [at.leading_comments for file in files for at in file.source_code_info.location]
    assert any("The queries: [B, Hq, Lq, D]" in comment for comment in comments), "code made from it explains nothing"
    messages = {f"{file.package}.{message.name}" for file in files for message in file.message_type}
    assert {"attnserve.v1.AttendRequest", "google.rpc.Status", "google.rpc.BadRequest"} <= messages
    known = set[str]()
    for file in files:  # in loading order
        assert known.issuperset(file.dependency)
        known.add(file.name)


def test_a_changed_proto_is_out_of_step(workshop: Path) -> None:
    replace(workshop, "uint32 batch_size = 2;", "uint32 batch_size = 2;\n  // New.\n  uint32 retries = 99;")
    with pytest.raises(protos.ProtoError, match=r"not in step: .*attention_pb2.py"):
        protos.check()
    protos.generate(protos.GENERATED)
    protos.check()
    protos.renew_baseline()
    assert b"retries" in protos.BASELINE.read_bytes()


def test_generated_files_of_no_proto_are_found(workshop: Path) -> None:
    (protos.GENERATED / protos.PACKAGE / "gone_pb2.py").touch()
    with pytest.raises(protos.ProtoError, match=r"not in step: attnserve/v1/gone_pb2\.py"):
        protos.check_generated()


def test_a_comment_that_is_missing_is_found(workshop: Path) -> None:
    replace(workshop, "// Asks for a description of this server.\n", "")
    with pytest.raises(protos.ProtoError, match=r"ServerInfoRequest.*comment"):
        protos.lint()


def test_a_breaking_change_is_found_and_does_not_become_the_baseline(workshop: Path) -> None:
    replace(workshop, "uint32 batch_size = 2;", "uint64 batch_size = 2;")
    before = protos.BASELINE.read_bytes()
    with pytest.raises(protos.ProtoError, match=r"batch_size.*changed type"):
        protos.renew_baseline()
    assert protos.BASELINE.read_bytes() == before


def test_a_broken_proto_is_an_error_with_a_place(workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(workshop, "message Kernel {", "message Kernel (")
    assert protos.main("check") == 1
    assert "attention.proto:" in capsys.readouterr().err


Named = tuple[str, tuple[int, ...]]


def named(file: descriptor_pb2.FileDescriptorProto) -> Iterator[Named]:
    """Every message, field, oneof, enum, enum value, service and rpc of a file, with its path in the descriptor."""

    def messages(found: list[descriptor_pb2.DescriptorProto], path: tuple[int, ...]) -> Iterator[Named]:
        for i, message in enumerate(found):
            here = (*path, i)
            yield message.name, here
            yield from ((f"{message.name}.{field.name}", (*here, 2, j)) for j, field in enumerate(message.field))
            yield from messages(list(message.nested_type), (*here, 3))
            yield from enums(list(message.enum_type), (*here, 4))

    def enums(found: list[descriptor_pb2.EnumDescriptorProto], path: tuple[int, ...]) -> Iterator[Named]:
        for i, enum in enumerate(found):
            yield enum.name, (*path, i)
            yield from ((value.name, (*path, i, 2, j)) for j, value in enumerate(enum.value))

    yield from messages(list(file.message_type), (4,))
    yield from enums(list(file.enum_type), (5,))
    for i, service in enumerate(file.service):
        yield service.name, (6, i)
        yield from ((method.name, (6, i, 2, j)) for j, method in enumerate(service.method))


def test_everything_has_a_comment(tmp_path: Path) -> None:
    image = protos.descriptor_set(tmp_path / "protos.binpb", comments=True)
    files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    ours = [file for file in files if file.package == "attnserve.v1"]
    assert len(ours) == len(protos.sources())
    seen = set()
    for file in ours:
        comments = {tuple(place.path): place.leading_comments.strip() for place in file.source_code_info.location}
        for name, path in named(file):
            assert comments.get(path, ""), f"{name} has no comment"
            seen.add(name)
    assert {"AttendRequest", "AttendRequest.query", "Layout", "LAYOUT_PACKED", "AttentionService", "Attend"} <= seen


def test_code_in_other_languages_is_in_one_package_without_being_told(tmp_path: Path) -> None:
    """Go needs a package to generate anything; Java puts messages into a class for each file unless it is told."""
    image = protos.descriptor_set(tmp_path / "protos.binpb", comments=False)
    files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    packages = {
        (
            file.options.go_package,
            file.options.java_package,
            file.options.java_multiple_files,
            file.options.csharp_namespace,
        )
        for file in files
        if file.package == "attnserve.v1"
    }
    assert packages == {("attnserve/v1;attnservev1", "attnserve.v1", True, "Attnserve.V1")}


def test_the_elements_of_a_tensor_come_last() -> None:
    """A serialised tensor ends with its elements, so that decoders can slice them in place."""
    fields = attention_pb2.AttendRequest.DESCRIPTOR.fields_by_name["query"].message_type.fields
    assert max(fields, key=lambda field: field.number).name == "data"
