"""Fuzzing, from the command line: `python tests/fuzz/fuzz.py codec --inputs 1000000`.

    codec           random and mutated bytes into the wire codec, compared with stock protobuf
    server          the same into every RPC of a live server, which must not crash, hang, leak or return INTERNAL
    guided-codec    the codec, with inputs that atheris chooses by the code that they reach (extra `fuzz`)
    guided-server   the readers and RPCs of a server in the same process, likewise

Findings are written below `fuzz-findings/`, and should become tests. The exit status tells whether there were any.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
FINDINGS = Path("fuzz-findings")
sys.path[:0] = [str(HERE), str(HERE.parent)]

MAX_GROWTH = 1.05
"""The largest ratio of resident memory at the end to that after half of the inputs: until then, caches fill up."""


def codec(inputs: int, seed: int) -> dict[str, Any]:
    """Random and mutated bytes into the codec."""
    from mutation import is_message
    from random_codec import Inputs, check

    source, taken, accepted = Inputs(Random(seed)), 0, 0
    at_first = 0
    for message_type, data in source.take(inputs):
        try:
            check(message_type, data)
        except Exception:
            keep(f"codec-{message_type.__name__}", data)
            raise
        taken += 1
        accepted += is_message(message_type, data)
        if taken == inputs // 2:
            at_first = resident("self")
    growth = _growth(at_first, resident("self"))
    assert growth <= MAX_GROWTH, f"resident memory grew to {growth} of what it was"
    return {"inputs": taken, "messages": accepted, "resident_growth": growth}


def server(inputs: int, seed: int) -> dict[str, Any]:
    """Random and mutated bytes into every RPC of a server."""
    import checkpoints
    import grpc
    from conftest import Server
    from random_service import FLAGS, Attack, Finding

    with tempfile.TemporaryDirectory() as directory:
        checkpoints.write(Path(directory))
        flags = (*FLAGS, "--layers", str(Path(directory) / "layers.toml"))
        process = Server(flags, Path(directory) / "stderr")
        codes: Counter[str] = Counter()
        try:
            with grpc.insecure_channel(process.address) as channel:
                attack = Attack(channel, Random(seed), codes)
                pid = str(process.process.pid)
                residents = []
                for tenth in range(10):
                    attack.run((tenth + 1) * inputs // 10 - sum(attack.sent.values()))
                    residents.append(resident(pid))
                    if not tenth:
                        open_at_first = descriptors(pid)
                more_open = descriptors(pid) - open_at_first
        except Finding as finding:
            keep(f"server-{finding.method.replace('/', '-')}", finding.data)
            raise
        finally:
            status = process.stop()
        faults = [line for line in process.stderr().splitlines() if " error " in line]
        assert status == 0, f"the server ended with {status}"
        assert not faults, faults[:3]
        assert more_open <= 0, f"{more_open} descriptors more are open"
        # Of three each: one may be of a moment in which a large request is in memory.
        growth = _growth(int(median(residents[2:5])), int(median(residents[-3:])))
        assert growth <= MAX_GROWTH, f"resident memory grew: {residents} KiB"
        return {
            "inputs": sum(attack.sent.values()),
            "resident_kib": residents,
            "resident_growth": growth,
            "codes": dict(sorted(codes.items())),
        }


def guided(target: str, inputs: int, seed: int) -> dict[str, Any]:
    """A target of `guided.py`, in one process per processor, each with its own seed. Subprocesses, because libFuzzer
    ends its process itself.
    """
    FINDINGS.mkdir(exist_ok=True)
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    runs = -(-inputs // workers)
    command = [
        sys.executable,
        str(HERE / "guided.py"),
        target,
        f"-runs={runs}",
        f"-artifact_prefix={FINDINGS}/{target}-",
    ]
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(workers)]
        processes = [
            stack.enter_context(subprocess.Popen([*command, f"-seed={seed + number}"], stderr=log))
            for number, log in enumerate(logs, start=1)
        ]
        statuses = [process.wait() for process in processes]
        said = []
        for log in logs:
            log.seek(0)
            said.append(log.read())
    for status, text in zip(statuses, said, strict=True):
        if status:
            print(text[-6000:], file=sys.stderr)
            raise AssertionError(f"{target} ended with {status}")
    last = [[line for line in text.splitlines() if line.startswith(("#", "Done "))][-2:] for text in said]
    return {"inputs": runs * workers, "libfuzzer": last}


def resident(pid: str) -> int:
    """The resident memory of a process, in KiB."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def descriptors(pid: str) -> int:
    """The number of open file descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def keep(name: str, data: bytes) -> None:
    """Saves an input that found something."""
    FINDINGS.mkdir(exist_ok=True)
    (FINDINGS / name).write_bytes(data)


def _growth(before: int, after: int) -> float:
    return round(after / before, 4) if before else 1.0


TARGETS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "codec": codec,
    "server": server,
    "guided-codec": lambda inputs, seed: guided("codec", inputs, seed),
    "guided-server": lambda inputs, seed: guided("server", inputs, seed),
}


def main() -> int:
    """Runs one target and prints its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    figures = TARGETS[arguments.target](arguments.inputs, arguments.seed)
    print(json.dumps({"target": arguments.target, "seconds": round(time.perf_counter() - begin, 1), **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
