"""A server on this machine whose answers go wrong as asked, and a disk that is full."""

import contextlib
import hashlib
import resource
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from mmlda.data.download import File

BODY = np.random.default_rng(2).bytes(700_001)


def known(name, content, algorithm="sha256"):
    return File(name, len(content), f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}")


class Server(ThreadingHTTPServer):
    """Serves `files` by path. `faults[path]` is a list of what goes wrong, one for each request, then nothing:
    a number (the connection is cut after that many bytes), "404", "500", "no range", "wrong range"."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.faults, self.log = {}, {}, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}/"

    def ranges(self, path):
        return [asked for requested, asked in self.log if requested == path]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        server, path = self.server, self.path.lstrip("/")
        asked = self.headers.get("Range")
        server.log.append((path, asked))
        faults = server.faults.get(path, [])
        fault = faults.pop(0) if faults else None
        if fault in ("404", "500") or path not in server.files:
            self.send_error(int(fault or 404))
            return
        body = server.files[path]
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and fault != "no range" else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {0 if fault == 'wrong range' else start}-{len(body) - 1}/*")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        end = start + fault if isinstance(fault, int) else len(body)
        self.wfile.write(body[start:end])
        if isinstance(fault, int):
            self.wfile.flush()
            self.close_connection = True


@contextlib.contextmanager
def file_size_limit(size):
    """No file of this process may grow beyond `size`: writing on is an error, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
