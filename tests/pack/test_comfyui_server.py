"""The start of a ComfyUI for tests, held to stand-ins for ComfyUI that start in a moment."""

import sys

import pytest

from scripts.comfyui_server import STARTS, ComfyUIServer

SERVER = """
import http.server, json, pathlib, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
starts = pathlib.Path("starts")
with starts.open("a") as file:
    print(port, file=file)
number = len(starts.read_text().split())

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"system": {"argv": sys.argv}}).encode())

"""
SAID = "sys.exit(f'Port {port} is already in use on address 127.0.0.1. Please close the other application')"


def server(folder, code: str) -> ComfyUIServer:
    """`code`: what its main.py does at a start, the `number` of which is from 1 on."""
    (folder / "main.py").write_text(f"{SERVER}{code}\nhttp.server.HTTPServer(('127.0.0.1', port), Answer).serve_forever()\n")
    return ComfyUIServer(folder, folder / "base", sys.executable)


def starts(folder) -> int:
    return len((folder / "starts").read_text().split())


def test_a_port_that_another_process_took_is_given_up_for_another_one(tmp_path):
    with server(tmp_path, f"if number == 1: {SAID}"):
        assert starts(tmp_path) == 2


def test_a_port_that_is_always_taken_and_any_other_end_are_errors(tmp_path):
    with pytest.raises(RuntimeError, match="did not start:\nPort"), server(tmp_path, SAID):
        pass
    assert starts(tmp_path) == STARTS
    with pytest.raises(RuntimeError, match="did not start:\nno torch"), server(tmp_path, "sys.exit('no torch')"):
        pass
    assert starts(tmp_path) == STARTS + 1


def test_a_comfyui_that_took_the_port_is_not_taken_for_the_one_that_was_started(tmp_path, monkeypatch):
    """It answers while the one that was started still imports."""
    (tmp_path / "other").mkdir()
    (tmp_path / "this").mkdir()
    with server(tmp_path / "other", "") as other:
        this, request = server(tmp_path / "this", f"if number == 1: {SAID}"), ComfyUIServer._request
        asked = []

        def first_of_the_other(self, path, body):
            asked.append(path)
            return request(other if len(asked) == 1 else self, path, body)

        monkeypatch.setattr(ComfyUIServer, "_request", first_of_the_other)
        with this:
            assert starts(tmp_path / "this") == 2
