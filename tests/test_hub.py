"""Names to folders, and the real download code against a small hub on the loopback address."""

import errno
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

from lfm2.errors import ModelNotFound
from lfm2.hub import resolve

REPO = "tester/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEXT_COMMIT = "fedcba9876543210fedcba9876543210fedcba98"
LARGE = "model-00001-of-00002.safetensors"
NEEDED = {
    "config.json": b'{"model_type": "lfm2"}',
    "tokenizer.json": b"{}",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    LARGE: bytes(range(256)) * 400,
    "model-00002-of-00002.safetensors": b"second",
}
NOT_NEEDED = {
    "README.md": b"# tiny",
    "pytorch_model.bin": b"pickle",
    "tiny-Q4.gguf": b"GGUF",
    "original/params.json": b"{}",
    "onnx/model.safetensors": b"copy",
}


class Hub(ThreadingHTTPServer):
    """One repository, served the way the hub does, with faults to switch on.

    `cuts` maps a file to the number of bytes after which the connection closes, once; with
    `is_breaking` the whole hub fails from then on. `log` holds the (method, path, Range header)
    of each request.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = NEEDED | NOT_NEEDED
        self.commit = COMMIT
        self.is_gated = False
        self.is_failing = False
        self.is_breaking = False
        self.cuts = {}
        self.log = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers the three requests of a snapshot download: revision, tree, file.

    HTTP/1.0 closes each connection, so that a stopped server answers nothing more.
    """

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        hub = self.server
        path = unquote(urlsplit(self.path).path)
        hub.log.append((self.command, path, self.headers.get("Range")))
        match = re.fullmatch(
            r"(?:/api/models)?/([^/]+/[^/]+)/(revision|tree|resolve)/([^/]+)(?:/(.+))?", path
        )
        repo, kind, revision, file = match.groups()
        if hub.is_failing:
            self.reply(500, b"")
        elif repo != REPO:
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", hub.commit):
            self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif kind == "revision":
            siblings = [{"rfilename": name} for name in hub.files]
            self.reply_json({"id": REPO, "sha": hub.commit, "siblings": siblings})
        elif kind == "tree":
            self.reply_json(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": f"{name}-oid"}
                    for name, content in hub.files.items()
                ]
            )
        elif hub.is_gated:
            self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        else:
            self.reply_file(file, hub.files[file])

    def reply_json(self, value):
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def reply_file(self, file, content):
        headers = {
            "ETag": f'"{file.replace("/", "-")}-{len(content)}"',
            "X-Repo-Commit": self.server.commit,
            "Accept-Ranges": "bytes",
        }
        first = 0
        if "Range" in self.headers:
            first = int(re.match(r"bytes=(\d+)-", self.headers["Range"])[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        status = 206 if first else 200
        cut = self.server.cuts.pop(file, None) if self.command == "GET" else None
        self.reply(status, content[first:], headers, cut)

    def reply(self, status, body, headers=None, cut=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:cut])
        if cut is not None and self.server.is_breaking:
            self.server.is_failing = True

    def log_message(self, *args):
        """Keep the test's output quiet."""


@pytest.fixture
def hub(monkeypatch):
    # The machine's own settings must not decide whether the loopback server is asked.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Hub()
    yield server
    server.stop()


@pytest.fixture
def fetch(hub, tmp_path):
    """`resolve` bound to the loopback hub and an empty cache."""

    def bound(name=REPO):
        return resolve(name, endpoint=hub.url, cache_dir=tmp_path / "cache")

    return bound


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_fetches_what_a_model_needs_and_nothing_else(fetch):
    assert contents(fetch()) == NEEDED


def test_cached_model_costs_one_request_and_a_pinned_one_none(hub, fetch):
    first = fetch()
    hub.log.clear()
    assert fetch() == first
    assert [path for _, path, _ in hub.log] == [f"/api/models/{REPO}/revision/main"]
    hub.log.clear()
    assert fetch(f"{REPO}@{COMMIT}") == first
    assert hub.log == []


def test_follows_the_branch_when_it_moves(hub, fetch):
    old = fetch()
    hub.commit = NEXT_COMMIT
    hub.files = NEEDED | {"config.json": b'{"model_type": "lfm2", "new": 1}'}
    new = fetch()
    assert contents(new) == hub.files
    assert contents(old) == NEEDED


def test_works_from_the_cache_when_the_hub_is_down(hub, fetch):
    folder = fetch()
    hub.stop()
    assert fetch() == folder
    assert fetch(f"{REPO}@{COMMIT}") == folder
    with pytest.raises(ModelNotFound, match="cannot be reached.*tester/other"):
        fetch("tester/other")


def test_works_from_the_cache_when_access_is_switched_off(hub, fetch, monkeypatch):
    folder = fetch()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.log.clear()
    assert fetch() == folder
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE.*tester/other"):
        fetch("tester/other")
    assert hub.log == []


def test_works_from_the_cache_when_the_hub_is_broken(hub, fetch):
    folder = fetch()
    hub.is_failing = True
    assert fetch() == folder


def fail(hub):
    hub.is_failing = True


def gate(hub):
    hub.is_gated = True


def only_gguf(hub):
    hub.files = {"config.json": b"{}", "tiny-Q4.gguf": b"GGUF"}


def no_config(hub):
    hub.files = {"model.safetensors": b"weights"}


@pytest.mark.parametrize(
    "fault, name, message",
    [
        (None, "tester/absent", "no model tester/absent.*spelling"),
        (None, f"{REPO}@v9", f"{REPO} has no revision 'v9'"),
        (None, "tester/a--b", "tester/a--b is not a valid hub name"),
        (gate, REPO, f"{REPO} is gated.*hf auth login"),
        (fail, REPO, f"status 500.*{REPO}"),
        (only_gguf, REPO, f"{REPO} holds no \\*.safetensors weights"),
        (no_config, REPO, f"{REPO} holds no config.json"),
    ],
)
def test_says_in_one_line_what_is_wrong(hub, fetch, fault, name, message):
    if fault:
        fault(hub)
    with pytest.raises(ModelNotFound, match=message) as caught:
        fetch(name)
    assert "\n" not in str(caught.value)


def test_dropped_connection_is_resumed_where_it_stopped(hub, fetch, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)
    hub.cuts = {LARGE: 70_000}
    assert contents(fetch()) == NEEDED
    spans = [span for _, path, span in hub.log if path.endswith(LARGE) and span]
    assert spans == [f"bytes={70_000 // 1024 * 1024}-"]


def test_broken_download_leaves_nothing_broken(hub, fetch, tmp_path):
    hub.cuts = {LARGE: 70_000}
    hub.is_breaking = True
    with pytest.raises(ModelNotFound, match=f"{REPO} broke off.*run again"):
        fetch()
    with pytest.raises(ModelNotFound, match="status 500.*no complete"):
        fetch()
    hub.is_failing = False
    assert contents(fetch()) == NEEDED
    assert not list(tmp_path.rglob("*.incomplete"))


@pytest.mark.parametrize(
    "error, message",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left.*free some"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "cannot store.*denied: /x"),
        (RuntimeError("transfer failed\nfurther lines"), "broke off.*: transfer failed$"),
    ],
)
def test_names_what_broke_the_download(monkeypatch, error, message):
    def refuse(*args, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFound, match=message):
        resolve(REPO)


def test_no_name_is_the_builtin_model():
    folder = resolve(None)
    assert (folder / "config.json").is_file()
    assert (folder / "model.safetensors").is_file()


def test_local_names_do_not_load_the_hub_library(tmp_path):
    program = (
        "import sys; from lfm2.hub import resolve; resolve(None); resolve(sys.argv[1]);"
        "sys.exit('huggingface_hub' in sys.modules)"
    )
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", program, tmp_path], cwd=root).returncode == 0


def test_folder_wins_over_a_hub_name(tmp_path, monkeypatch):
    (tmp_path / REPO).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(REPO) == Path(REPO)
    assert resolve(tmp_path / REPO) == tmp_path / REPO
    assert resolve(f"~/{REPO}") == tmp_path / REPO


@pytest.mark.parametrize(
    "name", ["./absent", "/absent", "~/absent", "a/b/c", "absent/", "../a/b", ".absent"]
)
def test_what_looks_like_a_path_is_never_asked_of_the_hub(name):
    with pytest.raises(ModelNotFound, match=f"no such folder: {re.escape(name)}"):
        resolve(name)


def test_file_is_not_a_folder(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelNotFound, match="model.safetensors is a file: give the folder"):
        resolve(os.fspath(file))


@pytest.mark.parametrize(
    "name, message",
    [
        ("LFM2-350M", "did you mean LiquidAI/LFM2-350M"),
        ("lfm2.5-1.2b@main", "did you mean LiquidAI/lfm2.5-1.2b@main"),
        ("qwen", "form org/name"),
        ("", "no folder named ''"),
    ],
)
def test_bare_name_gets_a_hint(name, message):
    with pytest.raises(ModelNotFound, match=message):
        resolve(name)
