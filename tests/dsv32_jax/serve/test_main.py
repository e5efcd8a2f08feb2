import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys

import httpx2
import openai
import pytest

from dsv32_jax import config
from dsv32_jax.serve.__main__ import main

OPTIONS = ["--tokenizer", "bytes", "--dtype", "float32", "--max-len", "64", "--slots", "2"]


@pytest.fixture
def checkpoint(official, draw):
    cfg = dataclasses.replace(config.tiny(), n_layers=2, vocab_size=264)
    return official(cfg, draw(cfg))[0]


def wrong(capsys, *argv):
    assert main([str(arg) for arg in argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_missing_extra_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = wrong(capsys, tmp_path)
    assert "starlette and uvicorn and prometheus_client must be installed" in line


def test_a_missing_checkpoint_is_one_line(capsys, tmp_path):
    assert "no folder" in wrong(capsys, tmp_path / "x")


def test_a_checkpoint_without_a_tokenizer_is_one_line(capsys, tmp_path):
    assert "--tokenizer" in wrong(capsys, tmp_path)


def test_wrong_options_are_one_line(capsys, tmp_path):
    common = (tmp_path, "--tokenizer", "bytes")
    assert "max_len=1" in wrong(capsys, *common, "--max-len", 1)
    assert "-5 must be a number" in wrong(capsys, *common, "--timeout=-5")
    assert "timeout=0 must be above 0" in wrong(capsys, *common, "--timeout", 0)
    assert "0 must be a whole number" in wrong(capsys, *common, "--max-waiting", 0)
    assert "--port 70000" in wrong(capsys, *common, "--port", 70000)
    (tmp_path / "key").write_text("\n")
    assert "not empty" in wrong(capsys, *common, "--api-key-file", tmp_path / "key")
    assert "No such file" in wrong(capsys, *common, "--api-key-file", tmp_path / "nokey")


def test_a_port_in_use_is_one_line(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = wrong(capsys, tmp_path, "--tokenizer", "bytes", "--port", port)
    assert f"can not listen on 127.0.0.1 port {port}" in line


def test_a_tokenizer_with_more_tokens_than_the_model_is_wrong_usage(capsys, official, draw):
    cfg = dataclasses.replace(config.tiny(), n_layers=2)
    folder, _, _ = official(cfg, draw(cfg))
    assert main([str(folder), *OPTIONS, "--port", "0"]) == 2
    assert "the tokenizer has 259 tokens, the model 97" in capsys.readouterr().err


def test_the_command_serves_until_it_is_told_to_stop(checkpoint):
    command = [sys.executable, "-m", "dsv32_jax.serve", str(checkpoint), *OPTIONS, "--port", "0"]
    env = os.environ | {"DSV32_API_KEY": "k", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "ready on" in line:
                    break
            url = re.search(r"ready on (http://127\.0\.0\.1:\d+)", lines[-1]).group(1)
            with (
                openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
                httpx2.Client(base_url=url, headers={"authorization": "Bearer k"}) as http,
            ):
                answer = client.completions.create(model="official", prompt="hi", max_tokens=4)
                assert answer.usage.completion_tokens >= 1
                body = {"model": "official", "prompt": "hi", "max_tokens": 60, "stream": True}
                with http.stream("POST", "/v1/completions", json=body) as response:
                    events = response.iter_lines()
                    next(events)
                    process.send_signal(signal.SIGTERM)
                    assert [line for line in events if line][-1] == "data: [DONE]"
            rest = process.stderr.read()
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert "/v1/completions 200" in rest
    assert "stopping" in rest
    assert "Traceback" not in rest
