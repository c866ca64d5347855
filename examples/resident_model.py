"""A whole model resident in the service: token ids go there, hidden states come back.

In: a client of a service with the layer `minilm`, a tokenizer, sentences. Out: their embeddings. `DEFINITIONS` is the
`layers.toml` that the service needs for it, with the model's own folder as its model directory.
"""

from __future__ import annotations

from typing import Any

import torch

from attnserve import Client

LAYER = "minilm"
DEFINITIONS = f"""\
[[layers]]
name = "{LAYER}"
preset = "bert"
file = "model.safetensors"
"""


def embed_resident(client: Client, tokenizer: Any, sentences: list[str]) -> torch.Tensor:
    """Unit vectors `[len(sentences), 384]`: the normalised mean over a sentence's tokens, as the model was trained.

    One call for all sentences, with their tokens end to end: there is no padding, here or there.
    """
    ids: list[list[int]] = tokenizer(sentences, truncation=True)["input_ids"]
    lengths = [len(of_sentence) for of_sentence in ids]
    tokens = torch.tensor([token for of_sentence in ids for token in of_sentence])
    hidden = client.apply(LAYER, tokens, lengths=lengths).output
    means = [rows.mean(dim=0) for rows in torch.split(hidden, lengths)]
    return torch.nn.functional.normalize(torch.stack(means), dim=1)
