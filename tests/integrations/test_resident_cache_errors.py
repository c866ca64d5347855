"""What a resident cache of a transformers model refuses, and how it goes on after a failure."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from random_models import (
    CACHE,
    CAUSAL,
    LLAMA_SIZES,
    Recorder,
    assert_same,
    build,
    no_gradients,
    tokens,
)
from resident_models import client, llama, locally, nothing_left
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnserve import AsyncClient, Cache, Client, InvalidRequestError, NotFoundError, OverloadedError
from attnserve._caching import groups
from attnserve._caching.caches import Caches
from attnserve.integrations.transformers import ResidentCache, register

__all__ = ["client", "llama", "no_gradients", "nothing_left"]


def test_other_attention_is_refused(client: Client) -> None:
    """With eager attention, or any that computes with the keys themselves: an error, not a wrong result."""
    register(client)
    model = build(AutoModelForCausalLM, CAUSAL["llama"]())
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with ResidentCache(client, model.config) as cache, pytest.raises(NotImplementedError, match="in the service"):
            model(tokens(1, 5), **{CACHE: cache})
    with ResidentCache(client, model.config) as cache:
        keys, _ = cache.update(*torch.randn(2, 1, 2, 5, 8), 1)
        assert repr(keys) == "ResidentStates(shape=[1, 2, 5, 8], dtype=torch.float32, layer=1)"


def test_keys_and_values_of_different_layers_are_refused(client: Client) -> None:
    register(client)
    attention = transformers.AttentionInterface()["attnserve"]
    query, states = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
    with ResidentCache(client, transformers.LlamaConfig(**LLAMA_SIZES)) as cache:
        (key, value), (_, other) = (cache.update(states, states, layer) for layer in range(2))
        for pair in ((key, other), (key, states), (states, value)):
            with pytest.raises(NotImplementedError, match="the values of the same layer"):
                attention(torch.nn.Module(), query, *pair, None)


def test_layers_of_several_shapes_are_refused(client: Client) -> None:
    with ResidentCache(client, transformers.LlamaConfig(**LLAMA_SIZES)) as cache:
        cache.update(*torch.randn(2, 1, 2, 5, 8), 0)
        with pytest.raises(
            NotImplementedError, match="layer 1 has 2 heads of 16 and 16, and those before it have 2 of 8"
        ):
            cache.update(*torch.randn(2, 1, 2, 5, 16), 1)


@pytest.mark.parametrize(
    ("field", "value"), [("ttl", -1), ("ttl", 0), ("ttl", "soon"), ("dtype", "int8"), ("dtype", torch.int8)]
)
def test_what_no_cache_has_is_refused_when_it_is_made(client: Client, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: expected") as caught:
        ResidentCache(client, transformers.LlamaConfig(**LLAMA_SIZES), **{field: value})
    assert caught.value.field == field


def test_a_layer_is_not_changed_by_itself(client: Client) -> None:
    cache = ResidentCache(client, transformers.LlamaConfig(**LLAMA_SIZES))
    with pytest.raises(NotImplementedError, match="ask the ResidentCache"):
        cache.layers[0].crop(-1)


def test_a_closed_cache(client: Client, llama: PreTrainedModel) -> None:
    with ResidentCache(client, llama.config) as cache:
        llama(tokens(1, 5), **{CACHE: cache})
    with pytest.raises(RuntimeError, match="this cache is closed"):
        llama(tokens(1, 5), **{CACHE: cache})


def test_layers_with_other_states_are_refused(client: Client) -> None:
    config = transformers.FalconH1Config(num_hidden_layers=2)
    with pytest.raises(NotImplementedError, match="layer 0 keeps more than keys and values: LinearAttention"):
        ResidentCache(client, config)


async def test_an_asyncio_client_is_refused() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match="expected a Client, found AsyncClient"):
            ResidentCache(client, transformers.LlamaConfig(**LLAMA_SIZES))  # type: ignore[arg-type]


def test_what_is_no_client_or_no_config_is_refused(client: Client) -> None:
    config = transformers.LlamaConfig(**LLAMA_SIZES)
    with pytest.raises(TypeError, match="client: expected a Client, found str"):
        ResidentCache("127.0.0.1:8001", config)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="client: expected a Client, found NoneType"):
        register(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config: expected that of a model, found NoneType"):
        ResidentCache(client, None)  # type: ignore[arg-type]


def test_a_config_with_fewer_layers_than_the_model_is_refused(client: Client, llama: PreTrainedModel) -> None:
    fewer = transformers.LlamaConfig(**{**LLAMA_SIZES, "num_hidden_layers": 1})
    with ResidentCache(client, fewer) as cache, pytest.raises(ValueError, match="which has a layer 1, found 1 layers"):
        llama(tokens(1, 5), **{CACHE: cache})


class Failing(Recorder):
    """Fails one call, before or after it has taken place."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.failing: int | None = None
        self.after = False
        self.error: BaseException = OverloadedError("not now")

    def attend(self, query: Tensor, *states: Tensor, **options: Any) -> Any:
        failing = len(self.calls) == self.failing
        if failing and not self.after:
            self.calls.append({})
            raise self.error
        result = super().attend(query, *states, **options)
        if failing:
            # As if the answer had been lost: what the SDK knew before is all that it knows.
            for cache in options["caches"]:
                cache._state.tokens[options["cache_layer"]] -= states[0].shape[2]
            raise self.error
        return result


@pytest.mark.parametrize("error", [OverloadedError("not now"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [False, True])
def test_a_step_that_fails_half_way_can_be_taken_back(
    client: Client, llama: PreTrainedModel, after: bool, error: BaseException
) -> None:
    failing = Failing(client)
    failing.after, failing.error = after, error
    register(failing)  # type: ignore[arg-type]
    ids = tokens(2, 9)
    expected = locally(llama, ids)
    with ResidentCache(failing, llama.config) as cache:  # type: ignore[arg-type]
        llama(ids[:, :5], **{CACHE: cache})
        failing.failing = len(failing.calls) + 1  # in its second layer
        with pytest.raises(type(error)):
            llama(ids[:, 5:], **{CACHE: cache})
        if not after:
            with pytest.raises(RuntimeError, match="mask is for 13 tokens, and layer 1 of the cache has 9: an earlier"):
                llama(ids[:, 5:], **{CACHE: cache})
        cache.truncate(5)
        assert [info.lengths for info in client.caches.list()] == [(5, 5)] * 2
        assert_same(expected[:, 5:], llama(ids[:, 5:], **{CACHE: cache}).logits)


def test_an_append_whose_answer_is_lost(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(2, 2, 2, 5, 8)
    with ResidentCache(client, transformers.LlamaConfig(**LLAMA_SIZES)) as cache:
        cache.update(*states, 0)
        cache.update(*states, 0)
        append = Cache.append

        def lost(self: Cache, *arguments: Any, **options: Any) -> int:
            append(self, *arguments, **options)
            self._state.tokens[0] -= 5
            raise OverloadedError("not now")

        with monkeypatch.context() as patched:
            patched.setattr(Cache, "append", lost)
            with pytest.raises(OverloadedError):
                cache.update(*states, 0)
        cache.truncate(5)
        assert [info.lengths[0] for info in client.caches.list()] == [5, 5]


def fail(self: Caches, *arguments: Any, **options: Any) -> None:
    """In the place of one of its methods."""
    raise OverloadedError("not now")


def test_what_could_not_be_deleted_is_tried_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the body of the `with` matters more than that."""
    cache = ResidentCache(client, transformers.LlamaConfig(**LLAMA_SIZES), ttl=None)
    cache.update(*torch.randn(2, 3, 2, 5, 8), 0)
    with monkeypatch.context() as patched:
        patched.setattr(Caches, "delete", fail)
        with pytest.raises(ZeroDivisionError), cache:
            raise ZeroDivisionError
        with pytest.raises(OverloadedError):
            cache.close()
    assert len(client.caches.list()) == 3
    cache.close()
    assert not client.caches.list()


def test_a_reset_that_could_not_delete_is_one_all_the_same(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it left is deleted the next time that anything is."""
    with ResidentCache(client, transformers.LlamaConfig(**LLAMA_SIZES)) as cache:
        cache.update(*torch.randn(2, 3, 2, 5, 8), 0)
        with monkeypatch.context() as patched:
            patched.setattr(Caches, "delete", fail)
            with pytest.raises(OverloadedError):
                cache.reset()
        assert cache.get_seq_length() == 0
        cache.update(*torch.randn(2, 2, 2, 4, 8), 0)
        assert len(client.caches.list()) == 3 + 2
        cache.batch_select_indices(torch.tensor([0]))
        assert len(client.caches.list()) == 1


def test_a_lost_cache(client: Client, llama: PreTrainedModel) -> None:
    ids = tokens(2, 9)
    with ResidentCache(client, llama.config) as cache:
        llama(ids[:, :5], **{CACHE: cache})
        client.caches.delete([info.name for info in client.caches.list()])
        with pytest.raises(NotFoundError):
            llama(ids[:, 5:], **{CACHE: cache})
        cache.reset()
        assert_same(locally(llama, ids), llama(ids, **{CACHE: cache}).logits)


def test_a_full_pool(start_server: Callable[..., Any], llama: PreTrainedModel) -> None:
    """There is room for three caches: what was made until there was none is gone again."""
    server = start_server("--max-caches", "3")
    with Client(server.address, retries=0) as client, ResidentCache(client, llama.config) as cache:
        with pytest.raises(OverloadedError):
            llama(tokens(4, 5), **{CACHE: cache})
        assert client.caches.list() == ()
        ids = tokens(2, 5)
        assert_same(locally(llama, ids), llama(ids, **{CACHE: cache}).logits)
        with pytest.raises(OverloadedError):
            cache.batch_repeat_interleave(2)
        with pytest.raises(OverloadedError):
            cache.fork()
        assert len(client.caches.list()) == 2
        llama(tokens(2, 1), **{CACHE: cache})


def test_a_truncation_whose_answer_is_lost(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in doubt, like an append: the next one finds out how long the sequences are."""
    truncate = Caches.truncate

    def lost(self: Caches, caches: Any, lengths: Any, **options: Any) -> None:
        before = [list(cache._state.tokens) for cache in caches]
        truncate(self, caches, lengths, **options)
        for cache, known in zip(caches, before, strict=True):
            cache._state.tokens[:] = known
        raise OverloadedError("not now")

    with ResidentCache(client, transformers.LlamaConfig(**LLAMA_SIZES)) as cache:
        cache.update(*torch.randn(2, 2, 2, 5, 8), 0)
        cache.update(*torch.randn(2, 2, 2, 5, 8), 0)
        with monkeypatch.context() as patched:
            patched.setattr(Caches, "truncate", lost)
            with pytest.raises(OverloadedError):
                cache.truncate(3)
        cache.truncate(2)
        assert [info.lengths[0] for info in client.caches.list()] == [2, 2]


def test_more_sequences_than_a_server_takes_in_one_request(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Portions are all made, or none is left; and the error is that of the server, not of another that is out of
    reach.
    """
    monkeypatch.setattr(groups, "LAYERS_AT_ONCE", 5)  # of caches of two layers, two at once
    server = start_server("--max-caches", "9")
    with (
        socket.socket() as nobody,  # where nobody can listen meanwhile
        Client(server.address) as client,
    ):
        nobody.bind(("127.0.0.1", 0))
        both = Client([server.address, f"127.0.0.1:{nobody.getsockname()[1]}"], retries=1)
        with ResidentCache(client, transformers.LlamaConfig(**LLAMA_SIZES)) as cache:
            cache.update(*torch.randn(2, 5, 2, 4, 8), 0)
            cache.update(*torch.randn(2, 5, 2, 3, 8), 0)
            cache.truncate(3)
            assert [info.lengths[0] for info in client.caches.list()] == [3] * 5
            cache.batch_select_indices(torch.tensor([4, 1, 1, 1, 1, 0]))
            assert [info.lengths[0] for info in client.caches.list()] == [3] * 6
        with both, ResidentCache(both, transformers.LlamaConfig(**LLAMA_SIZES)) as cache:
            cache.update(*torch.randn(2, 5, 2, 4, 8), 0)
            cache.update(*torch.randn(2, 5, 2, 4, 8), 0)
            with pytest.raises(OverloadedError):
                cache.fork()
            assert len(client.caches.list()) == 5
