"""Two engines on Ray Serve behind one server, one of which is killed; they need `pip install '.[serve-ray]'`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

import mosaic
from mosaic.decoding import GenerationConfig
from tests.test_server import COMPILE, MODEL, QUESTION, TOKENIZER, _client, _get, ids_of, until

pytestmark = pytest.mark.soak
DEPLOYMENT = Path(__file__).parents[1] / "deploy" / "ray-serve.yaml"


@pytest.fixture
def _ray() -> None:
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed")


@contextmanager
def serving(log: Path) -> Iterator[str]:
    """`mosaic serve --replicas 2` in a process of its own; a signal ends it."""
    command = [
        sys.executable,
        "-m",
        "mosaic",
        "serve",
        "small-sdar",
        "--replicas",
        "2",
        "--port",
        "0",
        "--threads",
        "1",
    ]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with log.open("w") as written:
        process = subprocess.Popen([*command, "--max-num-seqs", "3"], stderr=written, stdout=written, env=environment)
    try:
        until(lambda: "serving small-sdar on" in log.read_text() or process.poll() is not None, 150)
        found = re.search(r"serving small-sdar on (http://\S+)", log.read_text())
        assert found is not None, log.read_text()[-2000:]
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def replicas() -> list[int]:
    """The processes of the replicas."""
    found = subprocess.run(
        ["pgrep", "-f", "ray::ServeReplica:mosaic-"], capture_output=True, text=True, check=False
    ).stdout
    return [int(line) for line in found.split()]


def are_idle() -> bool:
    """Whether each replica has an engine, and none of these works for a second: both have started."""
    engines = [
        subprocess.run(
            ["pgrep", "-P", str(one), "-f", "spawn_main"], capture_output=True, text=True, check=False
        ).stdout.split()
        for one in replicas()
    ]

    def spent() -> int:
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pids in engines for pid in pids]
        return sum(int(stat[11]) + int(stat[12]) for stat in stats)

    before = spent()
    time.sleep(1)
    return len(engines) == 2 and all(engines) and spent() - before < 5


@pytest.mark.usefixtures("_ray")
def test_a_killed_replica_loses_only_what_it_had_begun_to_send(tmp_path: Path) -> None:
    prompts = [ids_of(QUESTION[place:]) for place in range(12)]
    with mosaic.compile(MODEL, seed=0, **COMPILE) as model:
        options = GenerationConfig(gen_length=600, stop_at_eos=False)
        ids = [model.generate(torch.tensor(one), options)[0].token_ids.tolist() for one in prompts]
    whole = [TOKENIZER.decode(one, skip_special_tokens=False) for one in ids]
    with serving(tmp_path / "log") as base:
        until(are_idle, 90)
        texts, errors = [""] * 12, list[str | None]([None] * 12)

        def ask(place: int) -> None:
            try:
                pieces = _client(base).completions.create(
                    model="small-sdar", prompt=prompts[place], max_tokens=600, temperature=0, stream=True,
                    extra_body={"ignore_eos": True, "skip_special_tokens": False},
                )  # fmt: skip
                for piece in pieces:
                    texts[place] += piece.choices[0].text
            except openai.APIError as error:
                errors[place] = error.message

        threads = [threading.Thread(target=ask, args=(place,)) for place in range(12)]
        for thread in threads:
            thread.start()
        until(lambda: sum(map(bool, texts)) > 3, 60)  # more than one engine has live at once: both have begun
        os.kill(replicas()[0], signal.SIGKILL)
        for thread in threads:
            thread.join(180)
        lost = [place for place in range(12) if errors[place] is not None]
        assert 0 < len(lost) <= 6, "those that one engine had begun"
        for place in range(12):
            if place in lost:
                assert "failed while it worked" in str(errors[place]) and whole[place].startswith(texts[place])
            else:
                assert texts[place] == whole[place]
        until(lambda: json.loads(_get(f"{base}/health")[2])["restarts"] >= 1 and len(replicas()) == 2, 60)
        time.sleep(2)
        cached = []
        for _ in range(3):
            body = json.dumps({"prompt": ids_of(QUESTION * 9), "max_tokens": 8, "temperature": 0}).encode()
            cached.append(
                json.loads(_get(f"{base}/v1/completions", body)[2])["usage"]["prompt_tokens_details"]["cached_tokens"]
            )
        assert cached[0] == 0 < cached[1] == cached[2], "who has the prefix is asked"
        assert "vllm:generation_tokens_total" in _get(f"{base}/metrics")[2].decode()
    until(lambda: not replicas(), 30)


@pytest.mark.usefixtures("_ray")
def test_the_deployment_file_is_rays() -> None:
    import yaml
    from ray.serve import Application
    from ray.serve.schema import ServeDeploySchema

    from mosaic.errors import UsageError
    from mosaic.serving.replicas import build

    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(DEPLOYMENT.read_text())).applications
    assert application.import_path == "mosaic.serving.replicas:build"
    args: dict[str, Any] = dict(application.args)
    assert isinstance(build({**args, "model": "small-sdar", "compile": {"device": "cpu"}}), Application)
    with pytest.raises(UsageError, match="'nix'"):
        build({**args, "nix": 1})
    with pytest.raises(UsageError, match="'model' is missing"):
        build({"replicas": 2})
