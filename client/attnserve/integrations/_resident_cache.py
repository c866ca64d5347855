"""A transformers cache whose keys and values are in the service: each step sends only those of its new tokens.

In: a model's calls of the methods of transformers' `Cache`. Out: the operations on `Sequences`.

A model first gives its new keys and values to its cache, then attends to what that returns. `ResidentCache` returns
tensors that have the shape of all keys, but no elements, and that know their layer. The registered attention function
recognises them and sends the new keys and values together with the queries, in one call. Whatever else a model does
with them is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

import torch
from transformers.cache_utils import Cache as ModelCache
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from attnserve import AsyncClient, AttentionResult, AttnServeError
from attnserve._requests import cache_requests
from attnserve.integrations._sequences import Sequences

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from attnserve import Client


class ResidentStates(torch.Tensor):
    """The keys, `[B, Hk, S, D]`, or the values, `[B, Hk, S, Dv]`, of one layer: a shape, a dtype and a device, but no
    elements, because these are in the service.
    """

    layer: ResidentLayer

    @staticmethod
    def __new__(cls, layer: ResidentLayer, like: torch.Tensor, shape: Sequence[int]) -> Self:
        states: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        states.layer = layer
        return states

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise NotImplementedError(
            f"{function}: these keys and values are in the service, and only the attention that `register` registers "
            'can attend to them. If the model has attn_implementation="attnserve", it also computes with the keys '
            "itself, and needs a cache of transformers'"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype}, layer={self.layer.index})"


class _States(NamedTuple):
    """Keys `[B, Hk, T, D]` and values `[B, Hk, T, Dv]`."""

    key: torch.Tensor
    value: torch.Tensor


def check_client(client: object) -> None:
    """TypeError for what computes no attention, and for an `AsyncClient`: models do not await their attention."""
    if isinstance(client, AsyncClient) or not hasattr(client, "attend"):
        raise TypeError(f"client: expected a Client, found {type(client).__name__}")


class ResidentLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a `ResidentCache`: what transformers calls, and the tokens that are not yet sent."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, sequences: Sequences, index: int, dtype: Any) -> None:
        # The base class's `__init__` is not called: it would set keys and values as attributes.
        self.sequences = sequences
        self.index = index
        self._dtype = dtype
        self._like: _States | None = None
        """Keys and values without tokens: their other sizes, their dtype and their device."""
        self._unsent: _States | None = None

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether it has had any tokens."""
        return self._like is not None

    @property
    def keys(self) -> ResidentStates | None:  # type: ignore[override]
        """What stands for all its keys; None before there are any."""
        return None if self._like is None else self._standing_for(self._like.key)

    @property
    def values(self) -> ResidentStates | None:  # type: ignore[override]
        """What stands for all its values; None before there are any."""
        return None if self._like is None else self._standing_for(self._like.value)

    def _standing_for(self, like: torch.Tensor) -> ResidentStates:
        return ResidentStates(self, like, (len(self.sequences), like.shape[1], self.get_seq_length(), like.shape[3]))

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes the resident caches for a batch of keys and values, unless another layer has made them."""
        batch, heads, _, width = key_states.shape
        shape = heads, width, value_states.shape[3]
        if self.sequences and shape != self.sequences.shape:
            raise NotImplementedError(
                f"layer {self.index} has {heads} heads of {width} and {shape[2]}, and those before it have "
                "{} of {} and {}: the layers of a cache have one shape".format(*self.sequences.shape)
            )
        if not self.sequences:
            dtype = self._dtype or key_states.dtype
            if self._dtype is None and dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise NotImplementedError(f"no cache stores {dtype}: say in which dtype to keep keys, as dtype=")
            self.sequences.create(batch, *shape, dtype)
        self._like = _States(*(states.new_empty(0, heads, 0, states.shape[3]) for states in (key_states, value_states)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[ResidentStates, ResidentStates]:
        """Takes new keys `[B, Hk, T, D]` and values `[B, Hk, T, Dv]`; returns what stands for all keys and values."""
        self.send()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if len(key_states) != len(self.sequences):
            raise ValueError(
                f"expected keys of as many sequences as before, {len(self.sequences)}, found {len(key_states)}"
            )
        self._unsent = _States(key_states, value_states)
        return self._standing_for(key_states), self._standing_for(value_states)

    def take(self, length: int) -> Sequence[torch.Tensor]:
        """The keys and values that are still to be sent, for a call that sends them with its queries; from now on they
        count as sent. None if all are sent. `length` is the number of keys that the call attends to: RuntimeError if
        the layer has another number by now.
        """
        if length != self.get_seq_length():
            raise RuntimeError(f"expected attention to the {self.get_seq_length()} tokens in the cache, found {length}")
        unsent, self._unsent = self._unsent, None
        return () if unsent is None else unsent

    def attend(self, *arrays: torch.Tensor, **options: Any) -> AttentionResult[torch.Tensor]:
        """`Client.attend` to all sequences."""
        return self.sequences.attend(self.index, *arrays, **options)

    def send(self) -> None:
        """Appends keys and values that no attention has sent."""
        if self._unsent is not None:
            unsent, self._unsent = self._unsent, None
            self.sequences.append(self.index, *unsent)

    def cut(self, length: int) -> None:
        """Cuts off what is not sent yet and is beyond a length. What is sent must not be longer than that."""
        if self._unsent is not None:
            rest = length - self.sequences.length(self.index)
            self._unsent = _States(*(states[:, :, :rest] for states in self._unsent)) if rest else None

    def forget(self) -> None:
        """Makes it as it was before it had any tokens."""
        self._like = self._unsent = None

    def fork(self, sequences: Sequences) -> ResidentLayer:
        """The same layer of a fork of its sequences."""
        fork = ResidentLayer(sequences, self.index, self._dtype)
        fork._like = self._like
        return fork

    def get_seq_length(self) -> int:
        """How many tokens it has."""
        return self.sequences.length(self.index) + (0 if self._unsent is None else self._unsent.key.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next queries attend to, and the position of the first key, which is 0: all are kept."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: it has no greatest length."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older versions of transformers

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("ask the ResidentCache, for all its layers at once")

    crop = batch_select_indices = batch_repeat_interleave = reorder_cache = reset = offload = prefetch = _refuse


class ResidentCache(DynamicCache):
    """The keys and values of a transformers model, in the service. Each forward pass sends only those of new tokens.

        register(client)
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="attnserve")
        with ResidentCache(client, model.config) as cache:
            model.generate(**inputs, cache=cache)  # before transformers 5.24, past_key_values=cache

    Leaving the `with` closes the cache, which deletes what the service has. `reset` and the end of the `ttl` delete it,
    too.

    - `client`: an open `Client`. It makes one cache for each sequence in the batch, all on one server, and attends to
      them, whichever client is registered.
    - `config`: the model's. A model with an encoder needs two caches, one for its cross-attention:
      ``EncoderDecoderCache(ResidentCache(client, model.config), ResidentCache(client, model.config))``.
    - `dtype`: what the service stores, as in `Client.create_cache`. Default: the dtype of the model's keys.
    - `ttl`: how long the service keeps it after its last use, in seconds. None: as the server is configured.

    It does what transformers asks of a cache: beam search forks what beams share, `crop` truncates (as assisted
    generation does), and a deep copy is a fork, which shares what is there (for a prompt that several texts begin
    with). All tokens are kept, also those that a sliding window has left behind.

    Errors:

    - `InvalidRequestError` for a `dtype` or `ttl` that no cache can have.
    - `NotImplementedError` for models that cannot use it: those that do more with keys than attend to them by their
      `attn_implementation` (as some do whose keys are compressed), that keep other states, or whose keys have several
      shapes or a dtype that no cache can have.
    - `ValueError` for a batch of another size than before.
    - An `AttnServeError` where the service is asked, by its methods or by the model. Some layers may then have more
      tokens than others: `truncate` to the length before the step, and go on. After a `NotFoundError` nothing is left:
      `reset` it (the pair, if it is in one), and start with all tokens.
    """

    def __init__(
        self, client: Client, config: PreTrainedConfig, *, dtype: Any = None, ttl: float | None = 600.0
    ) -> None:
        check_client(client)
        if not hasattr(config, "to_dict"):
            raise TypeError(f"config: expected that of a model, found {type(config).__name__}")
        count = _count_layers(config)
        # Raises here what the model would otherwise raise at its first step.
        cache_requests.create(1, 1, None, count, "float32" if dtype is None else dtype, ttl)
        self._sequences = Sequences(client, count, ttl)
        self._layers = [ResidentLayer(self._sequences, index, dtype) for index in range(count)]
        # Not `DynamicCache.__init__`, which makes layers of its own. The class derives from DynamicCache because the
        # pairs of transformers can do more with one.
        ModelCache.__init__(self, layers=list(self._layers))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the keys and values of a layer, and returns what stands for all."""
        if layer_idx >= len(self._layers):
            raise ValueError(
                f"config: expected that of the model, which has a layer {layer_idx}, found {len(self._layers)} layers"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def truncate(self, length: int) -> None:
        """Cuts all layers off at a length. Layers that are shorter stay as they are."""
        self._sequences.truncate(length)
        for layer in self._layers:
            layer.cut(length)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -`tokens_to_remove` tokens. A positive number is the length to keep, as in older versions of
        transformers; 0 changes nothing.
        """
        if tokens_to_remove < 0:
            length = max(layer.get_seq_length() for layer in self._layers)
            self.truncate(max(length + tokens_to_remove, 0))
        elif tokens_to_remove > 0:
            self.truncate(tokens_to_remove)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Sequence i becomes what sequence `indices[i]` was; those not named are deleted."""
        self._send()
        if self._sequences:
            self._sequences.select(torch.arange(len(self._sequences))[indices.cpu()].tolist())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes what sequence `beam_idx[i]` was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence becomes `repeats` sequences, one after the other."""
        self.batch_select_indices(torch.arange(len(self._sequences)).repeat_interleave(repeats))

    def fork(self) -> ResidentCache:
        """Another cache with the same content, which is shared; what either appends is its own. Constant time. A deep
        copy is a fork.
        """
        self._send()
        fork: ResidentCache = object.__new__(type(self))
        fork._sequences = self._sequences.fork()
        fork._layers = [layer.fork(fork._sequences) for layer in self._layers]
        ModelCache.__init__(fork, layers=list(fork._layers))
        return fork

    def __deepcopy__(self, memo: dict[int, Any]) -> ResidentCache:
        return self.fork()

    def reset(self) -> None:
        """Deletes what the service has. The cache can then be used again, as if it were new."""
        for layer in self._layers:
            layer.forget()
        self._sequences.delete()

    def close(self) -> None:
        """Deletes what the service has. The cache takes no more tokens."""
        self._sequences.close()
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        # An exception from the body matters more than a failure to delete, perhaps because the server is gone.
        with suppress(*() if kind is None else (AttnServeError,)):
            self.close()

    def _send(self) -> None:
        for layer in self._layers:
            layer.send()


def _count_layers(config: PreTrainedConfig) -> int:
    """How many layers the decoder of a model has. NotImplementedError if one keeps more than keys and values."""
    layers = DynamicCache(config=config).layers
    for index, layer in enumerate(layers):
        # A layer that keeps nothing, or uses another layer's keys, is of a class that has neither of these.
        keeps = isinstance(layer, CacheLayerMixin) or hasattr(layer, "update_conv_state")
        if keeps and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise NotImplementedError(f"layer {index} keeps more than keys and values: {type(layer).__name__}")
    return max(len(layers), getattr(config, "num_decoder_layers", None) or 0)
