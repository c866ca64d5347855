"""Runs transformers models whose attention is computed by the service.

    import torch
    from attnserve import Client
    from attnserve.integrations.transformers import register
    from transformers import AutoModel

    with Client("127.0.0.1:8001") as client:
        register(client)
        model = AutoModel.from_pretrained(path, attn_implementation="attnserve").eval()
        with torch.no_grad():
            model(**inputs)

In: a model's calls of its attention and mask functions. Out: calls of `Client.attend`, one per layer.

A model that generates sends the keys and values of all tokens for each new one, unless they are resident:

        with ResidentCache(client, model.config) as cache:
            model.generate(**inputs, cache=cache)  # before transformers 5.24, past_key_values=cache

**Results** are those of the model's own `eager` attention. If there is a mask, it alone decides what is attended:
neither a module's `is_causal` nor a `sliding_window` argument is used. Rows that attend nothing, such as those of
padding, give 0, where eager gives the mean of all values.

**Models that do not use `AttentionInterface`** do not reach the service: MPNet, BLOOM and DeBERTa for example, and T5
before transformers 5.18. Whatever implementation is asked for, transformers runs them here, with their own attention;
for some, such as Falcon, it raises `KeyError`. Of a model that uses it only in part, that part reaches the service.

**Weights.** Some models, GPT-2 and OPT among them, do not tell their attention that its weights are asked for: as with
`sdpa`, `output_attentions` then gives none. With sinks, the weights are those that the output was made with; the
`eager` attention of `granite_swa` returns the weights before the sinks have their share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

try:
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    raise ImportError(
        f"the integration needs torch and transformers: pip install 'attnserve[transformers]' ({error})"
    ) from error

from attnserve import AttentionResult
from attnserve.integrations._mask_pattern import MaskPattern, recognise
from attnserve.integrations._resident_cache import ResidentCache, ResidentLayer, ResidentStates, check_client

__all__ = ["ResidentCache", "forward_mask", "register"]

if TYPE_CHECKING:
    from attnserve import Client

_MADE_FROM = "_attnserve_made_from"
_registered: set[str] = set()
"""The names that `register` has registered."""


class _Known(NamedTuple):
    """What a mask was made from. Writing to the mask changes its version, and so invalidates this."""

    allowed: torch.Tensor
    """Bool `[B, 1, Lq, S]`, true means attend."""
    pattern: MaskPattern | None
    version: int


def register(client: Client, name: str = "attnserve") -> None:
    """Makes `attn_implementation=name` available to every transformers model; `client` computes the attention.

    Registering a name again replaces its client. To use several clients at once, give them different names.
    The client must be open while a model runs.

    A model with this implementation raises

    - `RuntimeError` if gradients are recorded: the service is for inference, so use `torch.no_grad()` or
      `torch.inference_mode()`;
    - `ValueError` if it asks for dropout while training;
    - `NotImplementedError` for continuous batching, for sinks that differ by query, and for keys chosen in blocks (by
      MiniMax-M3);
    - otherwise the errors of `Client.attend`.

    This function itself raises TypeError for what is no client, and for an `AsyncClient`, since models do not await
    their attention; and ValueError for a name that transformers has an attention of its own for, such as ``sdpa``.
    """
    check_client(client)
    if not isinstance(name, str) or not name:
        raise TypeError(f"name: expected text, not empty, found {name!r}")
    theirs = (AttentionInterface(), AttentionMaskInterface())  # type: ignore[no-untyped-call]
    if name not in _registered and any(name in each for each in theirs):
        raise ValueError(f"name: expected one that transformers has no attention for, found {name!r}")

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _attend(client, module, query, key, value, attention_mask, **arguments)

    _registered.add(name)
    # A compiled model breaks its graph here. With fullgraph=True it may not, and raises an error with this reason.
    reason = "attnserve computes attention over the network, which cannot be traced: compile without fullgraph=True"
    for interface, function in zip(theirs, (attention, forward_mask), strict=True):
        interface.register(name, torch.compiler.disable(function, reason=reason))  # type: ignore[no-untyped-call]


def forward_mask(**arguments: Any) -> torch.Tensor | None:
    """The mask of a forward pass, `[B, 1, Lq, S]`: what is added to the scores, 0 where a query attends a key and the
    dtype's minimum elsewhere; None if nothing is excluded.

    Takes what transformers passes to any mask function. The mask is that of `eager`: a model that does not use
    `AttentionInterface`, or not everywhere, adds it to its own scores. It is not omitted if it is merely causal: the
    attention function would have to guess whether None means that. The mask carries along what it was made from.
    Requests contain it only if no options express the same, and then as bools.
    """
    # Outside inference mode, because inference tensors do not count writes to them.
    with torch.inference_mode(False), torch.no_grad():
        allowed: torch.Tensor | None = sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
        if allowed is None:
            return None
        # Older versions of transformers pass the positions of the queries as `cache_position`, not as `q_offset`.
        positions = arguments.get("cache_position")
        first_query = arguments.get("q_offset", 0) if positions is None else positions[0]
        pattern = recognise(allowed, int(first_query) - int(arguments.get("kv_offset", 0)), arguments.get("local_size"))
        dtype = arguments.get("dtype", torch.float32)
        zero = torch.zeros((), dtype=dtype, device=allowed.device)
        mask = torch.where(allowed, zero, torch.finfo(dtype).min)
        setattr(mask, _MADE_FROM, _Known(allowed, pattern, mask._version))
    return mask


def _attend(
    client: Client,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One call of a model's attention function.

    `query` is `[B, Hq, Lq, D]`, `key` and `value` are `[B, Hk, S, D]` and `[B, Hk, S, Dv]`, or stand for such in a
    `ResidentCache`. `s_aux` are the sinks, `[Hq]`; `position_bias` is added to the scores. `indices`, `[B, Lq, K]`,
    are the only keys that a query may attend to: a model that chooses them, as DeepSeek-V3.2 does, writes them into the
    mask only for `eager` and `sdpa`. Returns the output `[B, Lq, Hq, Dv]`, contiguous, and the weights
    `[B, Hq, Lq, S]` if the model was asked for its attentions.
    """
    if dropout and module.training:
        raise ValueError(f"attnserve has no dropout, and the model asks for {dropout}: call model.eval() first")
    given = (query, key, value, position_bias, s_aux)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given):
        raise RuntimeError("attnserve computes no gradients: run the model under torch.no_grad()")
    if others.get("cache") is not None:
        raise NotImplementedError("attnserve does not read the paged cache of continuous batching: use generate()")
    if others.get("sinks") is not None:
        raise NotImplementedError("attnserve takes one sink per head, and the model gives one per query")
    if others.get("block_indices") is not None:
        raise NotImplementedError("attnserve does not attend to blocks of keys that a model chooses: use eager or sdpa")

    resident = _resident_layer(key, value)
    kv_length = key.shape[2]
    if resident is not None and mask is not None and mask.shape[-1] not in (1, kv_length):
        raise RuntimeError(
            f"the mask is for {mask.shape[-1]} tokens, and layer {resident.index} of the cache has {kv_length}: "
            "an earlier step has failed, so truncate the cache to its length before that"
        )
    options = _mask_options(mask, query.shape[2], kv_length, resident=resident is not None)
    if mask is None and is_causal and query.shape[2] > 1:
        options["causal"] = "top_left"
    if position_bias is not None:
        options["bias"] = position_bias if "bias" not in options else position_bias + options["bias"]
    if indices is not None:
        chosen = torch.zeros(*indices.shape[:2], kv_length, dtype=torch.bool, device=indices.device)
        chosen = chosen.scatter_(-1, indices.long(), True)[:, None]
        options["mask"] = chosen & options["mask"] if "mask" in options else chosen

    batch = max(tensor.shape[0] for tensor in (query, key, value))
    attend: Callable[..., AttentionResult[torch.Tensor]] = client.attend
    if resident is None:
        query, *states = _alike(batch, query, key, value)
    else:
        attend = resident.attend
        query, *states = _alike(batch, query, *resident.take(kv_length))
    # Keys and values are most of what is sent. From a projection they come with the length first, from a cache with
    # the heads first; sent as they are, they need not be copied.
    first = states[0] if states else None
    length_first = first is not None and not first.is_contiguous() and first.transpose(1, 2).is_contiguous()
    if length_first:
        query, *states = (tensor.transpose(1, 2) for tensor in (query, *states))
    config = getattr(module, "config", None)
    wants_weights = others.get("output_attentions", getattr(config, "output_attentions", False))
    result = attend(
        query,
        *states,
        layout="length_first" if length_first else "heads_first",
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        return_scores="weights" if wants_weights else None,
        **options,
    )
    output = result.output if length_first else result.output.transpose(1, 2)
    return output.contiguous(), result.scores


def _resident_layer(key: torch.Tensor, value: torch.Tensor) -> ResidentLayer | None:
    """The layer of a `ResidentCache` that keys and values stand for, if they do."""
    layers = [tensor.layer if isinstance(tensor, ResidentStates) else None for tensor in (key, value)]
    if layers[0] is not layers[1]:
        raise NotImplementedError(
            "attention to the keys of a ResidentCache needs the values of the same layer with them"
        )
    return layers[0]


def _alike(batch: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Query, key and value in the dtype in which autocast computes attention, with one batch size."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        tensors = tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)
    # A model with learned queries has one set of them for the whole batch.
    return tuple(tensor if tensor.shape[0] == batch else tensor.expand(batch, -1, -1, -1) for tensor in tensors)


def _mask_options(mask: torch.Tensor | None, query_length: int, kv_length: int, *, resident: bool) -> dict[str, Any]:
    """The arguments of `Client.attend` that express a model's mask; `resident` if the keys are those of caches."""
    if mask is None:
        return {}
    known: _Known | None = getattr(mask, _MADE_FROM, None)
    if known is not None and mask._version == known.version:
        if known.pattern is not None and mask.shape[2:] == (query_length, kv_length):
            return known.pattern.options(query_length, kv_length, resident=resident)
        mask = known.allowed
    # A mask that is longer than the keys is for a cache with room to grow.
    mask = mask[..., :kv_length]
    for axis in range(mask.ndim):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    if mask.dtype == torch.bool:
        return {"mask": mask}
    return {"bias": mask if mask.is_floating_point() else mask.float()}
