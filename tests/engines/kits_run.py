"""Run SGLang's server test kits against `specsim serve`: python kits_run.py SPECSIM MODEL JOBS RESULTS.

Runs in the engines' environment. SPECSIM is the command of an environment that has this package, MODEL the target's
folder, JOBS a JSON list of kits. The kits are imported as they are; SGLang's launcher of servers is the one thing put
in their place. torchvision, which SGLang imports for images, is an empty stand-in: the kits do not use it.
"""

import importlib
import json
import signal
import subprocess
import sys
import time
import unittest
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import datasets  # noqa: F401  # before the stand-in, which it would take for torchvision
import requests
import transformers  # noqa: F401

TORCHVISION = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")
sys.modules |= {f"torchvision{name}": MagicMock(__spec__=None) for name in TORCHVISION}

from sglang.test.kits import spec_server_kits  # noqa: E402
from sglang.test.server_fixtures.spec_eagle_fixture import Eagle3Base  # noqa: E402

SPECSIM, MODEL = sys.argv[1:3]
START_SECONDS, TEST_SECONDS = 300, 600


def start(options: list[str], port: int = 0) -> tuple[subprocess.Popen, str]:
    """Start a server, and wait until it answers; returns its address too."""
    server = subprocess.Popen([SPECSIM, "serve", "--port", str(port), *options], stdout=subprocess.PIPE, text=True)
    url = server.stdout.readline().rpartition(" at ")[2].strip()
    end = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < end:
        try:
            if requests.get(f"{url}/health", timeout=5).status_code == 200:
                return server, url
        except requests.RequestException:
            time.sleep(0.2)
    raise RuntimeError(f"specsim serve ended with {server.poll()}")


def stop(server: subprocess.Popen) -> None:
    """End a server."""
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()


def launch_plain(model: str, url: str, **_: Any) -> SimpleNamespace:
    """Start a server without speculation, where a kit would start SGLang's."""
    return SimpleNamespace(pid=start(["--drafter", "none"], int(url.rpartition(":")[2]))[0])


spec_server_kits.popen_launch_server = launch_plain
spec_server_kits.kill_process_tree = lambda server, **_: stop(server)


class Host(Eagle3Base):
    """The class that kits are mixed into: SGLang's EAGLE-3 settings and thresholds, this package's server."""

    model = MODEL
    options: tuple[str, ...] = ()

    @classmethod
    def setUpClass(cls) -> None:
        import openai

        cls._tokenizer = None
        cls.server, cls.base_url = start(cls.options)
        cls.process = SimpleNamespace(poll=cls.server.poll)
        cls.client = openai.Client(api_key="EMPTY", base_url=f"{cls.base_url}/v1")

    @classmethod
    def tearDownClass(cls) -> None:
        stop(cls.server)

    def setUp(self) -> None:
        signal.signal(signal.SIGALRM, lambda *_: self.server.kill())  # whatever waits for it fails
        signal.alarm(TEST_SECONDS)

    def tearDown(self) -> None:
        signal.alarm(0)


class Record(unittest.TestResult):
    """Outcome of every test, and the last line of its error."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, dict[str, str]] = {}

    def _add(self, test: Any, status: str, error: Any = None) -> None:
        name = getattr(test, "_testMethodName", "setUpClass")
        cause = error and (error[1].__cause__ or error[1].__context__ or error[1])  # SGLang's retries wrap it
        why = " ".join(f"{type(cause).__name__}: {cause}".split())[:300] if error else ""
        self.outcomes[name] = {"status": status, "why": why}

    def addSuccess(self, test: Any) -> None:  # noqa: N802  # unittest's name
        self._add(test, "passed")

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802  # unittest's name
        self._add(test, "failed", err)

    addError = addFailure

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802  # unittest's name
        if err is not None:
            self._add(test, "failed", err)


def run(job: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Run the tests of a kit that the job does not leave out."""
    kit = getattr(importlib.import_module(f"sglang.test.kits.{job['module']}"), job["kit"])
    case = type(job["kit"], (kit, Host), {"options": job["options"], **job["attributes"]})
    names = [name for name in unittest.TestLoader().getTestCaseNames(case) if name not in job["left_out"]]
    record = Record()
    unittest.TestSuite(map(case, names)).run(record)
    print(job["kit"], record.outcomes, file=sys.stderr, flush=True)
    return record.outcomes


if __name__ == "__main__":
    jobs_file, results_file = map(Path, sys.argv[3:])
    results = {job["kit"]: run(job) for job in json.loads(jobs_file.read_text())}
    results_file.write_text(json.dumps({"sglang": version("sglang"), "results": results}))
