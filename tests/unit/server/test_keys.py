"""Keys: several, from a file that changes; and no way in without one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from deadlines import PATIENCE_S

from holdfast.errors import ConfigurationError
from holdfast.server.http.api_keys import LOOK_S, MAX_FILE_BYTES, Keys


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_no_keys_ask_for_none() -> None:
    assert not Keys().asked_for
    assert not Keys().fit(b"")


def test_each_of_several_fits_and_nothing_else() -> None:
    keys = Keys(["one", "two", "schlüssel"])
    assert all(keys.fit(key.encode()) for key in ("one", "two", "schlüssel"))
    assert not any(keys.fit(wrong) for wrong in (b"", b"on", b"onee", b"ONE", b"one\0", b"one\ntwo", b"\xff" * 9))


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.server.http import api_keys as module

    compared: list[bool] = []
    true_compare = module.hmac.compare_digest

    def counted(left: bytes, right: bytes) -> bool:
        compared.append(len(left) == len(right) == 32)
        return bool(true_compare(left, right))

    monkeypatch.setattr(module.hmac, "compare_digest", counted)
    keys = Keys(["one", "two", "three"])
    for given in (b"one", b"three", b"none of them, and much longer than any"):
        compared.clear()
        keys.fit(given)
        assert compared == [True] * 3


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "keys"
    file.write_text("# ours\n\nfirst\n  second  \r\n")
    keys = Keys(["set"], file, clock)
    assert all(map(keys.fit, (b"set", b"first", b"second")))
    assert not keys.fit(b"# ours")
    file.write_text("third\n")
    assert keys.fit(b"first"), "it is not looked at on every request"
    clock.now_s += LOOK_S
    assert not keys.fit(b"first")
    assert keys.fit(b"third")
    assert keys.fit(b"set")
    file.write_text("")
    clock.now_s += LOOK_S
    assert not keys.fit(b"third")
    assert not keys.fit(b"")
    assert keys.asked_for


def test_a_file_that_goes_away_takes_its_keys_along(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "keys"
    file.write_text("first\n")
    keys = Keys((), file, clock)
    file.write_text("x" * (MAX_FILE_BYTES + 1))
    clock.now_s += LOOK_S
    assert keys.fit(b"first"), "what cannot be read changes nothing"
    file.unlink()
    clock.now_s += LOOK_S
    assert not keys.fit(b"first")
    assert keys.asked_for, "and lets nobody in"
    file.write_text("other\n")
    clock.now_s += LOOK_S
    assert not keys.fit(b"first")
    assert keys.fit(b"other")


@pytest.mark.parametrize("text", [None, "", "# nothing\n", "x" * (MAX_FILE_BYTES + 1)])
def test_a_file_without_a_key_is_refused_at_start(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        Keys((), file)
    assert (caught.value.code, caught.value.field) == ("HF152", "api_key_file")


def test_a_pipe_is_read_once_and_never_waited_for(tmp_path: Path) -> None:
    """A shell's <(command) is one: whoever wrote it is gone."""
    clock, pipe = Clock(), tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = threading.Thread(target=pipe.write_text, args=("one\n",))
    writing.start()
    keys = Keys((), pipe, clock)
    writing.join(PATIENCE_S)
    for _ in range(3):
        clock.now_s += 10
        os.utime(pipe)
        assert keys.fit(b"one")
    file = tmp_path / "keys"
    file.write_text("two\n")
    keys = Keys((), file, clock)
    file.unlink()
    os.mkfifo(file)
    clock.now_s += LOOK_S
    assert keys.fit(b"two")


def test_a_secret_that_kubernetes_replaces_is_read_again(tmp_path: Path) -> None:
    """As a mounted one is laid out: the file is a link into a folder that is a link too, and only that is changed."""
    for version, key in (("..1", "old"), ("..2", "new")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "api-key").write_text(key)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "api-key").symlink_to("..data/api-key")
    clock = Clock()
    keys = Keys(file=tmp_path / "api-key", clock=clock)
    assert keys.fit(b"old")
    (tmp_path / "..data_tmp").symlink_to("..2")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    clock.now_s += LOOK_S
    assert keys.fit(b"new")
    assert not keys.fit(b"old")
