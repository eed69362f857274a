"""The status page: what it reads while requests run, and, in the soak, the page itself in headless Chromium."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.test_server import QUESTION, _client, _get, ids_of, serving, until

SLOW = {"steps": 32, "remasking": "low_confidence_static"}
LONG = {"ignore_eos": True, "skip_special_tokens": False}


@pytest.fixture
def base() -> Iterator[str]:
    with serving(max_num_seqs=6, keys=["k", "l"]) as found:
        yield found


def status(base: str, key: str = "k") -> dict[str, Any]:
    code, _, body = _get(f"{base}/status", Authorization=f"Bearer {key}")
    assert code == 200
    return dict(json.loads(body))


class Running:
    """Requests that run in threads of their own until they have ended or are left."""

    def __init__(
        self, base: str, count: int, tokens: int, temperature: float = 0.0, *, whole: bool = True, key: str = "k"
    ) -> None:
        self._client = _client(base, default_headers={"Authorization": f"Bearer {key}"})
        self.texts, self._left = [""] * count, False
        self.threads = [
            threading.Thread(target=self._read, args=(at, tokens, temperature, whole), daemon=True)
            for at in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def _read(self, at: int, tokens: int, temperature: float, whole: bool) -> None:
        with self._client.completions.create(
            model="small-sdar", prompt=ids_of(QUESTION), max_tokens=tokens, temperature=temperature, stream=True, seed=at,
            extra_body=SLOW | LONG if whole else SLOW,
        ) as pieces:  # fmt: skip
            for piece in pieces:
                self.texts[at] += piece.choices[0].text if piece.choices else ""
                if self._left:
                    break

    def leave(self) -> None:
        self._left = True

    def join(self) -> list[str]:
        for thread in self.threads:
            thread.join(120)
        return self.texts


def test_a_status_shows_to_each_key_its_own_canvases_which_become_its_answers(base: str) -> None:
    """And numbers of all: the answers to two keys have lengths of their own."""
    assert _get(f"{base}/")[0] == 200 and _get(f"{base}/status")[0] == 401
    tokens, asked = {"k": 200, "l": 168}, dict[str, Running]()
    for key, count in tokens.items():
        assert status(base, key)["canvases"] == []
        asked[key] = Running(base, 1, count, key=key)
    seen: dict[str, list[list[str | None]]] = {key: [] for key in tokens}
    together, numbers = False, {key: set[int]() for key in tokens}
    while any(thread.is_alive() for running in asked.values() for thread in running.threads):
        for key, count in tokens.items():
            found = status(base, key)
            assert found["running"] <= 2 and found["state"] == "ready"
            together |= found["running"] == 2 and bool(found["canvases"])
            for one in found["canvases"]:
                assert one["length"] == count and one["masked"] >= one["texts"].count(None) and 0 <= one["first"] < 200
                numbers[key].add(one["number"])
                if one["first"] == 0:
                    seen[key].append(one["texts"])
        time.sleep(0.05)
    assert together and all(len(found) == 1 for found in numbers.values())
    for key, drawn in seen.items():
        (whole,) = asked[key].join()
        runs = [one[: one.index(None)] if None in one else one for one in drawn]
        assert all(whole.startswith("".join(filter(None, run[:-4]))) for run in runs) and any(runs)
    found = status(base)
    assert (
        found["tokens"] == status(base, "l")["tokens"] == 368
        and found["steps"] >= 200 // 32
        and found["plan"]["total_bytes"] > 0
    )
    assert {"weights", "workspace"} <= {*found["memory"]} and found["rows"].get("kv", 0) >= 0
    assert found["history"][-1]["running"] == 0 and max(one["tokens_s"] for one in found["history"]) > 0
    code, _, page = _get(f"{base}/status/plan", Authorization="Bearer k")
    assert code == 200 and b"small-sdar" in page and b"<script" in page
    more = {"prompt": ids_of(QUESTION), "max_tokens": 2, "n": 8, "temperature": 1.0}  # more answers than places
    code, _, whole_body = _get(f"{base}/v1/completions", json.dumps(more).encode(), Authorization="Bearer k")
    assert code == 200 and len(json.loads(whole_body)["choices"]) == 8


@pytest.mark.soak
def test_a_key_sees_its_canvas_behind_many_of_another() -> None:
    with serving(max_num_seqs=64, keys=["k", "l"]) as base:
        many = Running(base, 40, 400)
        until(lambda: len(status(base)["canvases"]) == 32, 60)
        one = Running(base, 1, 40, key="l")
        until(lambda: [canvas["length"] for canvas in status(base, "l")["canvases"]] == [40], 60)
        many.leave()
        assert one.join() != [""]


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Any]:
    """A headless browser; yields what calls a method of its protocol."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("Chromium is not installed")
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--remote-debugging-port=0", f"--user-data-dir={folder}",
        "--window-size=1280,1150", "--force-device-scale-factor=1", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen([found, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until((folder / "DevToolsActivePort").exists, 60)
        port = (folder / "DevToolsActivePort").read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                (page,) = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                numbers = iter(range(1, 10**6))

                async def call(method: str, **params: Any) -> Any:
                    number = next(numbers)
                    await socket.send_json({"id": number, "method": method, "params": params})
                    while True:
                        said = await asyncio.wait_for(socket.receive_json(), 60)
                        if said.get("id") == number:
                            assert "error" not in said, said
                            return said["result"]

                yield call
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.soak
def test_the_page_is_driven_by_keys_in_a_browser(base: str, tmp_path: Path) -> None:
    asyncio.run(_drive(base, tmp_path))


async def _drive(base: str, folder: Path) -> None:
    async with chromium(folder / "profile") as call:

        async def value(script: str) -> Any:
            found = await call("Runtime.evaluate", expression=script, returnByValue=True)
            assert "exceptionDetails" not in found, found
            return found["result"].get("value")

        async def press(key: str) -> None:
            for kind in ("keyDown", "keyUp"):
                text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "") if kind == "keyDown" else ""
                await call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text)

        async def holds(script: str) -> None:
            for _ in range(800):
                if await value(script):
                    return
                await asyncio.sleep(0.05)
            raise AssertionError(f"{script} did not become true: {await value('document.body.innerText')}")

        await call("Runtime.enable")
        await call("Page.navigate", url=base)
        await holds("!!document.getElementById('key') && !document.getElementById('key').hidden")
        await value("document.getElementById('given').focus()")
        await call("Input.insertText", text="k")
        await press("Enter")
        await holds("document.getElementById('key').hidden && document.getElementById('state').textContent === 'ready'")
        running = await asyncio.to_thread(Running, base, 8, 4000, 1.1)
        await holds(
            "document.querySelectorAll('.card').length === 6 && document.querySelectorAll('.card i').length > 10"
        )
        await holds(
            "document.querySelectorAll('.card p span').length > 20 && document.querySelectorAll('#memory tr').length > 2"
        )
        await holds("/places/.test(document.getElementById('outlook').textContent)")
        await value("document.querySelector('.card').focus()")
        await press("ArrowRight")
        assert await value("document.activeElement === document.querySelectorAll('.card')[1]")
        await press("Enter")
        assert await value("document.querySelectorAll('.card')[1].classList.contains('tall')")
        await press("p")
        assert await value("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
        before = await value("document.getElementById('facts').innerText")
        await asyncio.sleep(1.5)
        assert await value("document.getElementById('facts').innerText") == before, "it stands still"
        await press("p")
        for scheme in ("dark", "light"):
            await call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            ground = await value("getComputedStyle(document.body).backgroundColor")
            assert ground == {"dark": "rgb(20, 24, 29)", "light": "rgb(255, 255, 255)"}[scheme]
        running.leave()
        await holds("document.querySelectorAll('.card').length === 0")
        assert not await value("document.getElementById('none').hidden")
        stories = await asyncio.to_thread(Running, base, 16, 64, 0.9, whole=False)
        await holds(
            "document.querySelectorAll('.card').length >= 4 && document.querySelectorAll('.card p span').length > 60"
        )
        picture = base64.b64decode((await call("Page.captureScreenshot", format="png"))["data"])
        assert len(picture) > 20_000
        if "MOSAIC_STATUS_PICTURE" in os.environ:
            Path(os.environ["MOSAIC_STATUS_PICTURE"]).write_bytes(picture)
        stories.leave()
        await asyncio.to_thread(stories.join)
