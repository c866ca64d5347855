"""The real Prometheus with the deployed configuration, on loopback and with short intervals.

`REQUIRE_PROMETHEUS` in the environment makes its absence a failure instead of a skip.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import yaml

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
RULES: dict[str, Any] = yaml.safe_load((MONITORING / "rules.yaml").read_text("utf-8"))
PATIENCE_S = 60.0

# Prometheus 3 names a component in between; Prometheus 2 does not.
_LISTENS = re.compile(r'msg="Listening on" (?:.* )?address=(\S+)')


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`. Skips the test where there is none."""
    path = shutil.which(name)
    if path is None:
        reason = f"there is no {name} (on Debian and Ubuntu: the package prometheus, of later ones promtool as well)"
        if os.environ.get("REQUIRE_PROMETHEUS"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def promtool(*arguments: str, page: str | None = None) -> str:
    """The output of promtool, which must succeed. It computes for many seconds: only the test's own time bounds it."""
    command = [program("promtool"), *arguments]
    done = subprocess.run(command, input=page, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


class Sample(NamedTuple):
    """One series with its value at one time, or its values at scrape times."""

    labels: Mapping[str, str]
    values: list[tuple[float, float]]

    @property
    def value(self) -> float:
        """The value at one time."""
        ((_, value),) = self.values
        return value


class Prometheus:
    """Prometheus, scraping one address every second, until the block ends.

    `job` is further configuration for the scrape job.
    """

    def __init__(self, directory: Path, target: str, **job: Any) -> None:
        config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text("utf-8"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(MONITORING / name) for name in config["rule_files"]]
        (deployed,) = config["scrape_configs"]
        deployed |= {"static_configs": [{"targets": [target]}], **job}
        path = directory / "prometheus.yaml"
        path.write_text(yaml.safe_dump(config), "utf-8")
        command = (
            program("prometheus"),
            f"--config.file={path}",
            f"--storage.tsdb.path={directory / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        )
        self._said: list[str] = []
        self._listens = threading.Event()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.append(line)
            if found := _LISTENS.search(line):
                self._address = found[1]
                self._listens.set()
        self._listens.set()

    def __enter__(self) -> Self:
        try:
            assert self._listens.wait(PATIENCE_S), "".join(self._said)
            assert hasattr(self, "_address"), "".join(self._said)
            self.wait_for("up == 1")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.poll() is None, "".join(self._said)
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def ask(self, path: str, **parameters: str | float) -> Any:
        """The data in an answer of its API."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:  # the error is also an open response
                raise

    def query(self, expression: str, at: float | None = None) -> list[Sample]:
        """The series that an expression gives, now or at a time in seconds."""
        moment = {} if at is None else {"time": at}
        return [
            Sample(series["metric"], [(float(t), float(v)) for t, v in series.get("values") or [series["value"]]])
            for series in self.ask("query", query=expression, **moment)["result"]
        ]

    def value(self, expression: str) -> float:
        """The current value of an expression that gives a single series."""
        (found,) = self.wait_for(expression)
        return found.value

    def by(self, label: str, expression: str) -> dict[str, float]:
        """The current values of an expression, by one of its labels."""
        return {sample.labels[label]: sample.value for sample in self.wait_for(expression)}

    def wait_for(self, expression: str) -> list[Sample]:
        """The series that an expression gives, once it gives any: a late scrape leaves a gap."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if found := self.query(expression):
                    return found
            except OSError:
                pass  # it listens before it can answer
            assert self._process.poll() is None, "".join(self._said)
            assert time.monotonic() < deadline, f"still nothing: {expression}"
            time.sleep(0.05)
