"""Both clients against the real server: kinds of arrays, errors, threads, reconnecting."""

from __future__ import annotations

import asyncio
import platform
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from conftest import POOL, STARTUP_S, Server

from attnserve import (
    AsyncClient,
    AttentionResult,
    Client,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    ServerInfo,
    Setting,
    merge_attention,
)
from attnserve._commands import cli
from attnserve._transports.multiplexer import MESSAGE_CALLS

torch = pytest.importorskip("torch")


def expected(query: Any, key: Any, value: Any) -> Any:
    """Plain attention in float64."""
    query, key, value = (np.asarray(array, np.float64) for array in (query, key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


def triple(seed: int, *shape: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape or (1, 2, 5, 8)).astype(np.float32) for _ in range(3)]


@pytest.fixture(params=["stream", "unary"])
def either(request: pytest.FixtureRequest, server: Any) -> Iterator[Client]:
    """A client of each transport."""
    with Client(server.address, transport=request.param) as client:
        yield client


def test_everything_comes_back(either: Client) -> None:
    query, key, value = triple(0)
    result = either.attend(query, key, value, return_lse=True, return_scores="weights")
    assert isinstance(result, AttentionResult)
    np.testing.assert_allclose(result.output, expected(query, key, value), atol=2e-6)
    assert result.lse is not None
    assert (result.lse.shape, result.lse.dtype) == ((1, 2, 5), np.float32)
    assert result.scores is not None
    np.testing.assert_allclose(result.scores.sum(-1), np.ones((1, 2, 5)), atol=1e-6)
    assert result.batch_size >= 1
    timings = result.timings
    phases = [timings.decode, timings.queue, timings.staging, timings.compute, timings.encode]
    assert min(phases) >= 0
    assert 0 < sum(phases) <= timings.total
    result.output[:] = 0  # the caller's own memory


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_numpy_dtypes(client: Client, dtype: Any) -> None:
    arrays = [array.astype(dtype) for array in triple(1)]
    output = client.attend(*arrays).output
    assert output.dtype == dtype
    tolerance = 2e-6 if np.dtype(dtype).itemsize >= 4 else 2e-2
    np.testing.assert_allclose(output.astype(np.float64), expected(*arrays), atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_torch_gives_the_bits_of_numpy(client: Client, dtype: Any) -> None:
    tensors = [torch.from_numpy(array).to(dtype) for array in triple(2)]
    result = client.attend(*tensors, return_lse=True)
    assert isinstance(result.output, torch.Tensor)
    assert (result.output.dtype, result.output.device) == (dtype, tensors[0].device)
    to_numpy = {torch.bfloat16: ml_dtypes.bfloat16}.get(dtype)
    arrays = [t.float().numpy().astype(to_numpy) if to_numpy else t.numpy() for t in tensors]
    same = client.attend(*arrays, return_lse=True)
    np.testing.assert_array_equal(result.output.double().numpy(), same.output.astype(np.float64))
    assert isinstance(result.lse, torch.Tensor)
    np.testing.assert_array_equal(result.lse.numpy(), same.lse)


def test_strides_and_byte_orders_change_nothing(client: Client) -> None:
    query, key, value = triple(3)
    output = client.attend(query, key, value).output
    strided = [
        np.asfortranarray(query),
        key.astype(">f4"),
        torch.from_numpy(value).transpose(1, 2).contiguous().transpose(1, 2),
    ]
    np.testing.assert_array_equal(client.attend(*strided).output, output)


def test_masks_of_any_dtype_mean_the_same(client: Client) -> None:
    arrays = triple(4)
    mask = np.tril(np.ones((5, 5), bool))
    causal = client.attend(*arrays, causal=True).output
    for same in (
        mask,
        mask.astype(np.int64),
        mask.tolist(),
        torch.from_numpy(mask),
        torch.from_numpy(mask.astype("u1")),
    ):
        np.testing.assert_array_equal(
            client.attend(*arrays, mask=same).output, client.attend(*arrays, mask=mask).output
        )
    np.testing.assert_allclose(client.attend(*arrays, mask=mask).output, causal, atol=1e-6)


def test_the_server_names_the_field(either: Client) -> None:
    query, key, value = triple(5)
    with pytest.raises(InvalidRequestError) as caught:
        either.attend(query, key[..., :3], value)
    assert caught.value.field is not None
    assert caught.value.field.startswith("key")
    with pytest.raises(InvalidRequestError) as caught:
        either.attend(query, key, value, priority=9)
    assert caught.value.field == "priority"
    np.testing.assert_allclose(either.attend(query, key, value).output, expected(query, key, value), atol=2e-6)


@pytest.mark.parametrize("input", [np.ones((3, 4), np.float32), [1, 2, 3]], ids=["activations", "ids"])
def test_a_layer_that_is_not_there(either: Client, input: Any) -> None:
    futures = [either.submit(*triple(15)), either.submit_apply("no/such/layer", input), either.submit(*triple(16))]
    with pytest.raises(NotFoundError, match="no/such/layer"):
        futures[1].result()
    for seed, future in ((15, futures[0]), (16, futures[2])):
        np.testing.assert_allclose(future.result().output, expected(*triple(seed)), atol=2e-6)


def test_parts_of_the_keys_merge(client: Client) -> None:
    query, key, value = triple(6)
    whole = client.attend(query, key, value, return_lse=True)
    halves = [
        client.attend(query, key[:, :, part], value[:, :, part], return_lse=True) for part in (slice(2), slice(2, 5))
    ]
    merged = merge_attention(halves)
    np.testing.assert_allclose(merged.output, whole.output, atol=2e-6)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=2e-6)


def test_many_threads_share_a_client_and_each_gets_its_own(either: Client) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(15):
                length, heads = (int(number) for number in rng.integers(1, 9, 2))
                arrays = triple(int(rng.integers(10**9)), 1, heads, length, 8)
                if rng.random() < 0.2:
                    either.submit(*arrays).cancel()
                np.testing.assert_allclose(either.attend(*arrays).output, expected(*arrays), atol=2e-6)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_one_thread_keeps_many_in_flight(either: Client) -> None:
    problems = [triple(seed, 1, 2, seed % 7 + 1, 8) for seed in range(100)]
    futures = [either.submit(*arrays) for arrays in problems]
    for arrays, future in zip(problems, futures, strict=True):
        np.testing.assert_allclose(future.result(timeout=60).output, expected(*arrays), atol=2e-6)


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_asyncio(server: Any, transport: Any) -> None:
    problems = [triple(seed, 1, 2, seed % 7 + 1, 8) for seed in range(60)]
    async with AsyncClient(server.address, transport=transport) as client:
        results = await asyncio.gather(*(client.attend(*arrays) for arrays in problems))
        for arrays, result in zip(problems, results, strict=True):
            np.testing.assert_allclose(result.output, expected(*arrays), atol=2e-6)
        with pytest.raises(InvalidRequestError, match="key"):
            await client.attend(problems[0][0], problems[0][1][..., :3], problems[0][2])
        assert (await client.server_info()).device


def test_a_timeout_of_nothing(either: Client) -> None:
    with pytest.raises(DeadlineExceededError):
        either.attend(*triple(7), timeout=0)


@pytest.fixture(scope="module")
def narrow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server at a unix socket that takes only short messages, with at most as many calls in each as the SDK sends,
    and has room for all of them.
    """
    directory = tmp_path_factory.mktemp("narrow")
    flags = ("--listen", f"unix:{directory}/socket", "--max-message-bytes", "1MiB")
    flags += ("--max-message-calls", str(MESSAGE_CALLS), "--max-requests", "4096", "--max-queue-time", "0", *POOL)
    server = Server(flags, directory / "stderr")
    yield server
    assert server.stop() == 0, server.stderr()


def test_a_message_longer_than_the_server_takes(narrow_server: Server) -> None:
    """Its call alone fails, with an error of its own; calls beside it are unharmed."""
    with Client(narrow_server.address) as client:
        before, after = triple(8), triple(9)
        futures = [client.submit(*before), client.submit(*triple(10, 1, 8, 256, 64)), client.submit(*after)]
        np.testing.assert_allclose(futures[0].result().output, expected(*before), atol=2e-6)
        error = futures[1].exception()
        assert isinstance(error, InvalidRequestError)
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        np.testing.assert_allclose(futures[2].result().output, expected(*after), atol=2e-6)


def test_more_calls_at_once_than_a_message_may_hold(narrow_server: Server) -> None:
    query, key, value = triple(14, 1, 1, 1, 4)
    output = expected(query, key, value)
    with Client(narrow_server.address) as client:
        futures = [client.submit(query, key, value) for _ in range(3 * MESSAGE_CALLS)]
        for future in futures:
            np.testing.assert_allclose(future.result(timeout=60).output, output, atol=2e-6)
        withdrawn = [client.submit(query, key, value) for _ in range(3 * MESSAGE_CALLS)]
        for future in withdrawn:
            future.cancel()
        np.testing.assert_allclose(client.attend(query, key, value).output, output, atol=2e-6)


def test_a_server_that_comes_back(start_server: Callable[..., Any]) -> None:
    """Same client, same address, new server: calls in between wait for it or fail with an error that says so."""
    first = start_server()
    arrays = triple(11)
    with Client(first.address, retries=1000, timeout=STARTUP_S) as client:
        output = client.attend(*arrays).output
        assert first.stop() == 0
        future = client.submit(*arrays)  # while no server is there
        start_server("--listen", first.address)
        np.testing.assert_array_equal(future.result().output, output)


def test_a_unix_socket(narrow_server: Server) -> None:
    assert narrow_server.address.startswith("unix:/")
    arrays = triple(12)
    with Client(narrow_server.address) as client:
        np.testing.assert_allclose(client.attend(*arrays).output, expected(*arrays), atol=2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_on_a_cuda_device_come_back_there(client: Client, dtype: Any) -> None:
    tensors = [torch.from_numpy(array).to("cuda", dtype) for array in triple(13)]
    result = client.attend(*tensors, return_lse=True)
    on_cpu = client.attend(*(tensor.cpu() for tensor in tensors))
    assert result.output.device == tensors[0].device
    assert result.lse is not None
    assert result.lse.device == tensors[0].device
    torch.testing.assert_close(result.output.cpu(), on_cpu.output)


def test_server_info(client: Client) -> None:
    info = client.server_info()
    assert isinstance(info, ServerInfo)
    assert info.device
    assert {"float32", "float16", "bfloat16", "float64"} >= set(info.dtypes) > {"float32"}
    assert info.limits.max_message_bytes > 0
    assert info.limits.max_message_calls >= MESSAGE_CALLS
    assert info.kernels
    assert all(kernel.name and kernel.description for kernel in info.kernels)
    assert info.python_version == platform.python_version()
    assert info.usable_cpus >= 1
    assert info.cache_pool_bytes > 0
    assert info.cache_page_bytes is not None
    assert info.cache_pool_bytes % info.cache_page_bytes == 0
    settings = {setting.name: setting for setting in info.settings}
    assert settings["max_requests"] == Setting("max_requests", f"{info.limits.max_requests}", "default")
    assert settings["listen"] == Setting("listen", None, "flag")


async def test_a_server_without_layers(server: Any, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    async with AsyncClient(server.address) as in_tasks:
        assert client.layers.list() == await in_tasks.layers.list() == ()
        for failing in (client.layers.get, client.layers.unload):
            with pytest.raises(NotFoundError, match="no/such/layer"):
                failing("no/such/layer")
        for awaited in (in_tasks.layers.get, in_tasks.layers.unload):
            with pytest.raises(NotFoundError, match="no/such/layer"):
                await awaited("no/such/layer")
    assert cli.main(["layers", server.address]) == 0
    assert capsys.readouterr().out == "no layers are loaded\n"
