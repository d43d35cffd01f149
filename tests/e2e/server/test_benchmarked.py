"""`holdfast bench` against our own front end: TLS with a certificate of its own, a key, samples of /memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from certificates import self_signed

from holdfast.cli.main import main
from holdfast.config import ServerConfig
from holdfast.engine.fake import FakeEngine
from holdfast.server.http.tls import tls_of


def test_over_tls_and_with_a_key(launch, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    key, certificate = self_signed(tmp_path)
    tls = tls_of(ServerConfig(ssl_keyfile=key, ssl_certfile=certificate))
    server = launch(FakeEngine(), tls=tls, api_key=("k",))
    words = ["bench", f"https://127.0.0.1:{server.port}", "--requests", "4", "--concurrency", "2", "--output", "5"]
    words += ["--prompt", "30", "--json", "--quiet"]
    monkeypatch.setenv("HOLDFAST_API_KEY", "k")
    for trust in (["--certificate", certificate], ["--insecure"]):
        main([*words, *trust])
        found = json.loads(capsys.readouterr().out)
        assert (found["peak"]["completed"], found["peak"]["failed"]) == (4, 0), found["peak"]["errors"]
        assert found["engine"] == "holdfast"
        assert found["samples"][0]["ram_bytes"] is not None
        assert '"k"' not in json.dumps(found["load"])
    assert main(words) == 3
    assert "certificate" in capsys.readouterr().err
    assert main([*words, "--certificate", key + "x"]) == 2
    monkeypatch.setenv("HOLDFAST_API_KEY", "wrong")
    assert main([*words, "--insecure"]) == 3
    assert "HF164" in capsys.readouterr().err


def test_its_own_access_log_is_replayed(launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = launch(FakeEngine())
    words = ["bench", server.url, "--json", "--quiet"]
    main([*words, "--requests", "4", "--concurrency", "2", "--prompt", "300", "--output", "5-9"])
    first = json.loads(capsys.readouterr().out)["requests"]
    asked = [line for line in server.wait_for_lines(6) if line["stream"]]
    log = tmp_path / "access.log"
    log.write_text("starting\n" + "".join(json.dumps(line) + "\n" for line in asked))
    main([*words, "--traffic", str(log), "--speed", "0.5"])
    again = json.loads(capsys.readouterr().out)["requests"]
    assert len(asked) == len(again["sent_s"]) == 4
    assert sorted(again["output_tokens"]) == sorted(first["output_tokens"])
    assert again["prompt_tokens"] == pytest.approx([300] * 4, rel=0.2)
