"""Prints the results of the demo.

In: embeddings, timings, readings of metrics. Out: text on stdout, and whether embeddings agree.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from attnserve import ServerInfo, Timings
from attnserve._commands.reading import Reading

TOLERANCE = 1e-5
WIDTH = 88


class Way(NamedTuple):
    """A way to embed: its name, its results, how many seconds it takes, and the service's metrics of it."""

    name: str
    embeddings: torch.Tensor
    seconds: float
    metrics: Reading | None = None


def section(title: str) -> None:
    """Prints a heading."""
    print(f"\n{title}\n{'─' * WIDTH}")


def row(name: str, text: str) -> None:
    """Prints one fact."""
    print(f"  {name:<18}{text}")


def duration(seconds: float) -> str:
    """Seconds as text, in a suitable unit."""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def show_setting(info: ServerInfo, address: str, model: PreTrainedModel, work: str) -> None:
    """Prints which model, service and device compute what."""
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
    row("work", work)


def agreement(local: torch.Tensor, remote: torch.Tensor) -> tuple[float, bool]:
    """The largest difference of embeddings `[1 + sentences, 384]`, and whether they rank the sentences equally."""
    rankings = [(each[1:] @ each[0]).argsort(descending=True) for each in (local, remote)]
    return (local - remote).abs().max().item(), torch.equal(*rankings)


def show_comparison(query: str, sentences: list[str], local: torch.Tensor, remote: torch.Tensor) -> bool:
    """Prints how the embeddings `[1 + sentences, 384]`, the query first, compare; returns whether they agree."""
    difference, same = agreement(local, remote)
    cosines = local[1:] @ local[0], remote[1:] @ remote[0]
    rankings = [cosine.argsort(descending=True).tolist() for cosine in cosines]
    close = difference <= TOLERANCE

    section(f'Which sentences answer "{query}"?')
    print("  local     service   cosine, with attention computed in this process and by the service")
    for index, other in zip(*rankings, strict=True):
        mark = " " if index == other else "≠"
        print(f"  {cosines[0][index]:.5f} {mark} {cosines[1][index]:.5f}   {sentences[index]}")
    print()
    row("ranking", "the same" if same else "NOT THE SAME")
    row("embeddings", f"largest difference {difference:.1e}, {'within' if close else 'BEYOND'} {TOLERANCE:.0e}")
    return close and same


def show_calls(timings: list[Timings]) -> None:
    """Prints how long the SDK's calls took."""
    phases = {
        "decode": "the service reads and checks the request",
        "queue": "it waits while the device is busy",
        "staging": "it is moved to the device",
        "compute": "the attention of its batch is computed",
        "encode": "the result is made into a reply",
    }
    section(f"{len(timings)} attention calls over the wire, as the SDK timed them")
    for phase, meaning in phases.items():
        row(phase, f"{duration(statistics.median(getattr(t, phase) for t in timings)):>9}   {meaning}")
    outside = [t.total - sum(getattr(t, phase) for phase in phases) for t in timings]
    row(
        "outside",
        f"{duration(statistics.median(outside)):>9}   SDK, gRPC and network, both ways, and waiting for a processor",
    )
    row(
        "total",
        f"{duration(statistics.median(t.total for t in timings)):>9}   (each of these is a median of its own)",
    )


def show_metrics(metrics: Reading, http_address: str) -> None:
    """Prints the service's metrics of the run."""
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


def show_ways(local: Way, *remote: Way) -> bool:
    """Prints the ways to embed side by side; returns whether all agree with the first."""
    section("Every attention a call, or the whole model resident in the service")
    print(f"  {'':<26}{'calls':>6}{'sent':>13}{'received':>13}{'time':>11}   difference")
    print(f"  {local.name:<26}{'':>32}{duration(local.seconds):>11}")
    agree = True
    for way in remote:
        assert way.metrics is not None
        difference, same = agreement(local.embeddings, way.embeddings)
        agree &= same and difference <= TOLERANCE
        # What the service received was sent from here.
        sent, received = (way.metrics.total(f"attnserve_{name}_bytes_total") for name in ("received", "sent"))
        calls = way.metrics.total("attnserve_requests_total")
        print(
            f"  {way.name:<26}{calls:>6.0f}{sent / 1024:>9,.1f} KiB{received / 1024:>9,.1f} KiB"
            f"{duration(way.seconds):>11}   {difference:.1e}{'' if same else ', RANKED DIFFERENTLY'}"
        )
    print()
    return agree
