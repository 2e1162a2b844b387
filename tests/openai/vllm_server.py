"""A server on loopback that answers as vLLM 0.32 does: models, adapters, streams, and failures of every kind."""

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RANK = "Worker failed with error 'LoRA rank 64 is greater than max_lora_rank 16.', see the log"
LONG = "This model's maximum context length is 1024 tokens, and the prompt has 1025"


class VllmServer(ThreadingHTTPServer):
    """Engine with one base model; what it was asked is in `bodies`."""

    daemon_threads = True

    def __init__(self, key: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key: str | None = key
        self.reset()

    def reset(self) -> None:
        """Behave as an engine that has just been started."""
        self.bases = ["tiny"]
        self.adapters: dict[str, str] = {}
        """Path of each adapter, by its name."""
        self.loads_adapters = True
        """False: it was started without `VLLM_ALLOW_RUNTIME_LORA_UPDATING`."""
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.refusals: dict[str, tuple[int, dict[str, Any]]] = {}
        """Status and body of an error by path."""
        self.texts: Sequence[str] = ("Hel", "lo")
        self.deltas: Sequence[dict[str, Any]] = ()
        """Parts of the answer to a chat, in place of the texts."""
        self.finish_reason = "stop"
        self.failure: dict[str, Any] | None = None
        """Error that is sent in place of the last chunks."""
        self.is_cut = False
        """True: the connection is closed in place of the last chunks."""
        self.goes_on = threading.Event()
        """Set if the answer goes on behind its first part."""
        self.goes_on.set()
        self.pauses_at_start = False
        """True: the wait for `goes_on` comes before the first part."""
        self.sends_comments = True
        """True: while it waits, comments are sent, so that a closed connection is noticed."""
        self.abandoned = threading.Event()
        """Set once a client has closed the connection before the end of its answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def bodies_of(self, path: str) -> list[dict[str, Any]]:
        """Bodies that were sent to a path, in order."""
        return [body for sent_to, body in self.bodies if sent_to == path]

    def refuse(self, path: str, status: int, message: str, param: str | None = None) -> None:
        """Answer requests to a path with an error."""
        self.refusals[path] = (status, error_body(status, message, param))


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": param, "code": status}}


class _Handler(BaseHTTPRequestHandler):
    server: VllmServer
    protocol_version = "HTTP/1.1"

    def _respond(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _is_refused(self) -> bool:
        if self.server.key is not None and self.headers["authorization"] != f"Bearer {self.server.key}":
            self._respond(401, {"error": "Unauthorized"})
        elif self.path in self.server.refusals:
            self._respond(*self.server.refusals[self.path])
        else:
            return False
        return True

    def do_GET(self) -> None:
        self.server.bodies.append((self.path, {}))
        if self._is_refused():
            return
        base = self.server.bases[0]
        cards = [{"id": name, "object": "model", "root": "/models/tiny", "parent": None} for name in self.server.bases]
        cards += [{"id": name, "root": path, "parent": base} for name, path in list(self.server.adapters.items())]
        self._respond(200, {"object": "list", "data": cards})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append((self.path, body))
        if self._is_refused():
            return
        if self.path == "/v1/load_lora_adapter" and not self.server.loads_adapters:
            self._respond(404, {"detail": "Not Found"})
        elif self.path == "/v1/load_lora_adapter":
            self._load(body["lora_name"], body["lora_path"])
        elif body["model"] not in [*self.server.bases, *self.server.adapters]:
            self._respond(404, error_body(404, f"The model `{body['model']}` does not exist.", "model"))
        else:
            self._stream(body)

    def _load(self, name: str, path: str) -> None:
        if name in self.server.adapters:
            return self._respond(400, error_body(400, f"The lora adapter '{name}' has already been loaded."))
        if not (Path(path) / "adapter_config.json").is_file():
            message = f"Loading lora {name} failed: No adapter found for {path}"
            return self._respond(404, error_body(404, message))
        self.server.adapters[name] = path
        return self._respond(200, f"Success: LoRA adapter '{name}' added successfully.")

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for number, chunk in enumerate(self._chunks(body)):
                if number == (0 if self.server.pauses_at_start else 2 * body["n"]):
                    self._wait_to_go_on()
                self._send(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n")
            if self.server.is_cut:
                self.close_connection = True
            else:
                self._send("data: [DONE]\n\n")
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.server.abandoned.set()
            self.close_connection = True

    def _send(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _wait_to_go_on(self) -> None:
        while not self.server.goes_on.wait(0.02):
            if self.server.sends_comments:
                self._send(": keep-alive\n\n")

    def _chunks(self, body: dict[str, Any]) -> Iterator[Any]:
        server, choices = self.server, range(body["n"])
        head = {"id": "chatcmpl-of-the-engine", "object": "chunk", "created": 1, "model": body["model"]}
        is_chat = "messages" in body
        parts: Sequence[dict[str, Any]] = server.deltas or [{"content": text} for text in server.texts]
        if is_chat:
            parts = [{"role": "assistant", "content": ""}, *parts]
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            if is_last and server.is_cut:
                return
            if is_last and server.failure is not None:
                yield server.failure
                return
            for choice in choices:
                answer = {"delta": part} if is_chat else {"text": part["content"]}
                end = server.finish_reason if is_last else None
                yield {**head, "choices": [{"index": choice, **answer, "logprobs": None, "finish_reason": end}]}
        usage = {"prompt_tokens": 7, "completion_tokens": 2 * len(choices), "total_tokens": 7 + 2 * len(choices)}
        yield {**head, "choices": [], "usage": usage}

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def vllm_server(key: str) -> Iterator[VllmServer]:
    """Run an engine in a thread."""
    server = VllmServer(key)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="vllm")
    thread.start()
    try:
        yield server
    finally:
        with contextlib.suppress(OSError):
            server.goes_on.set()
        server.shutdown()
        thread.join()
        server.server_close()
