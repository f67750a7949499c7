"""Chromium without a window, driven over the pipe of its DevTools protocol: errors, evaluated scripts."""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page of a browser that has no network but loopback. A context."""

    def __init__(self, *, timeout: float = 90.0) -> None:
        self.errors: list[str] = []
        """What the page wrote to the console as an error or a warning, and uncaught exceptions."""
        self.requests: list[str] = []
        """URLs that the page asked for, its own file included."""
        self._timeout = timeout
        self._number = 0
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

    def __enter__(self) -> Self:
        read_ours, write_theirs = _pipe()
        read_theirs, write_ours = _pipe()

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-pipe", "--disable-background-networking", "--disable-quic"]
        flags += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        command = [str(CHROMIUM), *flags, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(  # the protocol has descriptors 3 and 4
            ["bash", "-c", f'exec "$@" 3<&{read_theirs} 4>&{write_theirs}', "bash", *command],
            pass_fds=(read_theirs, write_theirs),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_theirs)
        os.close(write_theirs)
        self._to, self._from = os.fdopen(write_ours, "wb"), os.fdopen(read_ours, "rb")
        (target,) = [each for each in self._call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        self._session = None
        self._session = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(timeout=30)
        self._to.close()
        self._from.close()
        self._profile.cleanup()

    def open(self, url: str | Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a page, and wait until its scripts have drawn it."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url="about:blank")  # else another hash of the same page would not load it
        self.wait_for("location.href === 'about:blank'")
        self._call("Page.navigate", url=url.resolve().as_uri() if isinstance(url, Path) else url)
        self.wait_for("document.readyState === 'complete' && document.querySelector('#page')?.childElementCount > 0")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + self._timeout
        while not self.evaluate(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} was not true after {self._timeout:g} s; errors: {self.errors}")
            time.sleep(0.1)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def _call(self, method: str, **arguments: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        if getattr(self, "_session", None) is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        content = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            if not byte:
                raise AssertionError(f"Chromium ended with exit code {self._process.wait(timeout=30)}")
            content += byte
        received: dict[str, Any] = json.loads(content)
        return received

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"].get("exception", parameters["exceptionDetails"])))
        elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str([each.get("value", each) for each in parameters["args"]]))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(parameters["entry"]))
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


def _pipe() -> list[int]:
    """Return a pipe of descriptors above 9, so that Chromium's can be moved to 3 and 4 without a collision."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved
