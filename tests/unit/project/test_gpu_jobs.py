"""The runner of a GPU's tests and benchmarks, with small programs for jobs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks import gpu_jobs
from benchmarks.gpu_jobs import Job, Jobs

JOURNAL = """
import os, sys, time
name, waits = sys.argv[1], float(sys.argv[2])
with open("journal", "a") as file:
    file.write(f"+{name} ")
time.sleep(waits)
with open("journal", "a") as file:
    file.write(f"-{name} ")
print("said by", name, os.environ.get("HOLDFAST_TEST_MODEL"), os.environ.get("HOLDFAST_PORT"))
sys.exit(name == "bad")
"""


def ran(folder: Path, *asked: Job, gib: float = 10, end_s: float = 60, model: Path | None = None) -> Jobs:
    (folder / "journal.py").write_text(JOURNAL)
    names = {"out": str(folder), "disk": "", "vllm": "", "commit": "abc"}
    jobs = Jobs(folder, folder, gib, time.monotonic() + end_s, names, model)
    jobs.run(asked)
    return jobs


def job(name: str, gib: float | None = None, waits: float = 0.0, limit_s: float = 30, more: str = "") -> Job:
    return Job(name, "some", f"python journal.py {name} {waits} {more}", limit_s, gib, more == "model")


def test_jobs_share_memory_in_their_order_and_who_says_nothing_is_alone(tmp_path: Path) -> None:
    ran(tmp_path, job("a", 6, 0.8), job("b", 4, 0.8), job("c", 4), job("d"), job("e", 1))
    journal = (tmp_path / "journal").read_text().split()
    assert set(journal[:2]) == {"+a", "+b"}, "together"
    assert journal.index("+c") > min(journal.index("-a"), journal.index("-b")), "there was no room before"
    alone = journal.index("+d")
    assert journal[alone + 1] == "-d"
    assert set(journal[:alone]) == {f"{sign}{name}" for sign in "+-" for name in "abc"}
    assert journal[alone + 2 :] == ["+e", "-e"], "nobody overtakes"


def test_how_each_ended_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_PORT", "1")
    found = ran(
        tmp_path,
        job("good", 1, more="model"),
        job("bad", 1),
        job("late", 1, waits=60, limit_s=0.5),
        Job("disk", "some", "python journal.py disk 0 {disk}", 30, 1),
        model=Path("a-model"),
    ).results
    assert found["good"]["ended"] == 0
    assert found["good"]["last"] == "said by good a-model None", "settings of Holdfast are not passed on"
    assert found["bad"]["ended"] == 1
    assert found["bad"]["last"] == "said by bad None None"
    assert found["late"]["ended"] == "its time was over"
    assert found["late"]["seconds"] < 30
    assert found["disk"]["ended"] == "did not run: without --disk"
    assert json.loads((tmp_path / "jobs.json").read_text())["jobs"] == found


@pytest.mark.parametrize("job_s", [60, 0.5], ids=["late", "by itself"])
def test_a_server_that_a_job_started_ends_with_it(tmp_path: Path, job_s: float) -> None:
    """In a session of its own too, as those of tests are."""
    begins = (
        "import subprocess, sys, time; one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
    )
    code = f"{begins} start_new_session=True); open('server', 'w').write(str(one.pid)); time.sleep({job_s})"
    ran(tmp_path, Job("test", "some", f'python -c "{code}"', 3, 1))
    server = psutil.pid_exists(int((tmp_path / "server").read_text()))
    assert not server or psutil.Process(int((tmp_path / "server").read_text())).status() == psutil.STATUS_ZOMBIE


def test_what_there_is_no_time_or_no_model_for_is_said(tmp_path: Path) -> None:
    assert ran(tmp_path, job("a", 1), end_s=1).results["a"]["ended"] == "did not run: no time was left"
    assert ran(tmp_path, job("a", 1, more="model")).results["a"]["ended"] == "did not run: --model names none"
    assert not (tmp_path / "journal").exists()


def test_jobs_name_files_that_are_there_and_are_chosen_by_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = gpu_jobs.jobs(gpu_jobs.JOBS)
    for one in known:
        for word in one.command.split():
            if word.startswith("tests/") or word.endswith(".py"):
                assert (gpu_jobs.ROOT / word).exists(), word
    assert {one.group for one in gpu_jobs.chosen(known, ["kv-disk", "ranks"])} == {"kv", "ranks"}
    assert {one.group for one in gpu_jobs.chosen(known, ["ranks"])} == {"ranks"}
    with pytest.raises(SystemExit, match="nothing: neither a job nor a group"):
        gpu_jobs.chosen(known, ["nothing"])
    assert gpu_jobs.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(known)


def test_they_run_in_a_copy(tmp_path: Path) -> None:
    listed = tmp_path / "jobs.toml"
    code = "import benchmarks, holdfast; print(benchmarks.__file__, holdfast.__file__)"
    listed.write_text(f"[where]\ngroup = 'some'\ncommand = '''python -c \"{code}\"'''\ngib = 1\nlimit_s = 60\n")
    out = tmp_path / "out"
    assert gpu_jobs.main(["where", "--jobs", str(listed), "--out", str(out)]) == 0
    there = (out / "where.log").read_text().split()
    assert len(there) == 2
    assert not any(path.startswith(str(gpu_jobs.ROOT)) for path in there)
    assert not any(Path(path).exists() for path in there), "it is gone"
