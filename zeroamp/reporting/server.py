"""`zeroamp report --serve`: serves a page of runs on the loopback interface, which is updated during the runs."""

from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from zeroamp.policies.errors import ConfigError
from zeroamp.reporting.page import data_text, html_page

HOST = "127.0.0.1"


def page_server(port: int, title: str, subtitle: str, read: Callable[[], Mapping[str, Any]]) -> "ThreadingHTTPServer":
    """Return an HTTP server: the page is at /, its data at /data.json.

    The caller runs it with `serve_forever` and closes it with `server_close`. It listens on 127.0.0.1 only, and answers
    only requests whose Host is 127.0.0.1 or localhost: so a web site cannot read the data by DNS rebinding.

    Args:
        port: 0 takes any free port.
        title: see `html_page`.
        subtitle: see `html_page`.
        read: returns the data of the page. Called at each request.

    Raises:
        ConfigError: the port is taken, or plotly is not installed.
    """
    html_page("runs", title, subtitle, read(), live=True)  # an error is raised here, not at the first request

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            names = (f"{HOST}:{self.server.server_port}", f"localhost:{self.server.server_port}")  # type: ignore[attr-defined]
            if self.headers.get("Host") not in names:
                self.send_error(403)
            elif self.path == "/":
                self._send(html_page("runs", title, subtitle, read(), live=True), "text/html; charset=utf-8")
            elif self.path == "/data.json":
                self._send(data_text(read()), "application/json")
            else:
                self.send_error(404)

        def _send(self, text: str, kind: str) -> None:
            content = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_arguments: object) -> None:
            """Print nothing per request."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"--serve: port {port} cannot be used ({why}). Name another with --port.") from error
