"""hooks/runner.py: what runs when, and that a failure leaves nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import small_project

import hooks
from hooks import experiments, records, runner
from hooks.runner import RunError


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    before = hooks.root()
    for name in ("REFRESH", "SMOKE", "RECORD_COMMIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    runner.reset()
    yield small_project.make(tmp_path)
    runner.reset()
    hooks.use_root(before)


def runs(root):
    return len((root / "runs").read_text().split()) if (root / "runs").exists() else 0


def ensure():
    return runner.ensure("demo.squares")


def set_measure(root, body):
    path = root / "snippets/demo/squares.py"
    text = path.read_text()
    head, tail = text.split('    helper.note("measuring")\n')
    path.write_text(head + '    helper.note("measuring")\n' + body + tail)


def test_replay_runs_nothing(root):
    assert ensure() == {} and runs(root) == 0
    records.store(small_project.record())
    assert ensure()["cpu"].tables and runs(root) == 0


def test_refresh_runs_once_per_build_and_records(root, monkeypatch, capfd):
    monkeypatch.setenv("REFRESH", "all")
    found = ensure()["cpu"]
    assert found.tables["squares"][2] == {"x": "2", "y": 4} and not found.stale and not found.smoke
    assert found.dirty and found.commit == ""  # no git here
    ensure()
    assert runs(root) == 1
    assert "[demo.squares" in (err := capfd.readouterr().err) and "1/1 measuring" in err and " s]" in err
    runner.reset()
    ensure()
    assert runs(root) == 2


@pytest.mark.parametrize(("refresh", "expected"), [("demo.*", 1), ("other.*", 0), ("demo.squares,x.y", 1), ("", 0), (" ", 0)])
def test_refresh_takes_globs(root, monkeypatch, refresh, expected):
    monkeypatch.setenv("REFRESH", refresh)
    ensure()
    assert runs(root) == expected


def test_a_glob_without_a_match_is_an_error(monkeypatch):
    monkeypatch.setenv("REFRESH", "demo.squars")
    with pytest.raises(RunError, match="matches no experiment; known: demo.squares"):
        runner.check_request()
    monkeypatch.setenv("REFRESH", "demo.*,stale")
    runner.check_request()


def test_stale_runs_what_is_missing_stale_smoke_or_damaged_only(root, monkeypatch):
    def build():
        runner.reset()
        ensure()
        return runs(root)

    monkeypatch.setenv("REFRESH", "stale")
    records.store(small_project.record(device=small_project.record()["device"] | {"slug": "nvidia-h200"}))
    assert build() == 1  # the other device's record does not count
    assert build() == 1
    with (root / "snippets/demo/helper.py").open("a") as f:
        f.write("X = 1\n")
    assert build() == 2
    small_project.put("<<<<<<< HEAD\n")
    assert build() == 3
    (root / "records/cpu/demo.squares.json").unlink()
    monkeypatch.setenv("SMOKE", "1")
    assert build() == 4 and ensure()["cpu"].smoke
    assert build() == 4
    monkeypatch.delenv("SMOKE")
    assert build() == 5 and not ensure()["cpu"].smoke


def test_smoke_uses_its_settings_and_keeps_a_full_record(root, monkeypatch):
    records.store(small_project.record())
    monkeypatch.setenv("REFRESH", "all")
    monkeypatch.setenv("SMOKE", "1")
    assert not ensure()["cpu"].smoke and runs(root) == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    raise ValueError('broken kernel')\n", "exit status 1.*broken kernel"),
        ("    import sys; sys.exit(0)\n", "without a readable result"),
        ("    import os; os._exit(0)\n", "without a readable result"),
        ("    import os; os.kill(os.getpid(), 9)\n", "signal 9.*out of memory"),
        ("    return {'squares': []}\n", "empty"),
        ("    return {'squares': [{'x': 1}]}\n", "columns"),
        ("    return {'squares': [{'x': '0', 'y': float('nan')}]}\n", "NaN|nan|finite"),
        ("    return {'squares': [{'x': '0', 'y': 'fast'}]}\n", "'fast', declared is a number"),
        ("    import os; os.kill(os.getpid(), 11)\n", "signal 11; nothing"),
        ("    return {'other': [{'x': '0', 'y': 1}]}\n", "tables"),
        ("    open('snippets/demo/helper.py', 'a').write('X = 1\\n')\n", "edited while it ran"),
    ],
)
def test_a_failure_is_never_stored(root, monkeypatch, body, said):
    set_measure(root, body)
    path = records.store(small_project.record(seconds=7.0))
    before = path.read_bytes()
    monkeypatch.setenv("REFRESH", "all")
    for _ in range(2):  # the second block of the page gets the same answer without a second run
        with pytest.raises(RunError) as error:
            ensure()
        assert "demo.squares" in str(error.value)
        assert re.search(said, str(error.value), re.DOTALL)
    assert path.read_bytes() == before and runs(root) == 1


def test_the_time_limit_kills_the_whole_process_group(root, monkeypatch):
    set_measure(root, "    import subprocess, time\n    p = subprocess.Popen(['sleep', '60'])\n"
                      "    open('child', 'w').write(str(p.pid))\n    time.sleep(60)\n")  # fmt: skip
    monkeypatch.setattr(experiments.Experiment, "limit_seconds", 2.0)
    monkeypatch.setenv("REFRESH", "all")
    start = time.monotonic()
    with pytest.raises(RunError, match="time limit of 2 s"):
        ensure()
    assert time.monotonic() - start < 10
    assert gone(int((root / "child").read_text()))


def test_a_flood_of_output_is_not_kept(root, monkeypatch, capfd):
    set_measure(root, "    import sys\n    for _ in range(50):\n        sys.stderr.write('y' * 200_000)\n    1 / 0\n")
    monkeypatch.setenv("REFRESH", "all")
    with pytest.raises(RunError, match="ZeroDivisionError") as error:
        ensure()
    assert len(str(error.value)) < 40_000
    capfd.readouterr()
    out = runner._child([sys.executable, "-c", "print('x' * 9_000_000); print('end')"], 60, "t", quiet=True)
    assert out.endswith("end\n") and len(out) <= 1_000_000


def test_a_child_left_behind_is_killed(root, monkeypatch):
    set_measure(root, "    import subprocess\n    p = subprocess.Popen(['sleep', '60'])\n    open('child', 'w').write(str(p.pid))\n")
    monkeypatch.setenv("REFRESH", "all")
    start = time.monotonic()
    assert ensure()["cpu"]
    assert time.monotonic() - start < 10 and gone(int((root / "child").read_text()))


def gone(pid):
    for _ in range(50):
        try:
            state = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # dead; whoever inherited it has not asked yet
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


def test_without_torch_a_refresh_says_what_to_install(root, monkeypatch):
    (root / "device").write_text("no torch")
    monkeypatch.setenv("REFRESH", "all")
    with pytest.raises(RunError, match="torch is not installed.*requirements.txt.*unset"):
        ensure()
    monkeypatch.delenv("REFRESH")
    runner.reset()
    assert ensure() == {}


def test_without_a_gpu_a_cuda_experiment_is_refused(root, monkeypatch):
    path = root / "snippets/demo/squares.py"
    path.write_text(path.read_text().replace('"needs": "cpu", "memory_gib": 0', '"needs": "cuda", "memory_gib": 80'))
    monkeypatch.setenv("REFRESH", "all")
    with pytest.raises(RunError, match="needs a CUDA GPU.*REFRESH unset"):
        ensure()
    runner.reset()
    (root / "device").write_text("nvidia-small")
    with pytest.raises(RunError, match="needs 80 GiB.*NVIDIA-SMALL has 16"):
        ensure()
    assert runs(root) == 0
    runner.reset()
    monkeypatch.setenv("SMOKE", "1")
    assert ensure()["nvidia-small"].smoke


def test_commit_and_dirty_flag(root, monkeypatch):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(git + words, cwd=root, check=True)
    commit, dirty = runner.revision()
    assert len(commit) == 40 and not dirty
    (root / "docs/index.md").write_text("prose")
    small_project.put("{}")
    assert runner.revision() == (commit, False)  # neither prose nor records are what was measured
    (root / "snippets/new.py").write_text("")
    assert runner.revision() == (commit, True)
    monkeypatch.setenv("RECORD_COMMIT", "abc-dirty")
    assert runner.revision() == ("abc", True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupting_the_build_kills_the_experiment(root, number):
    set_measure(root, "    import os, time\n    open('child', 'w').write(str(os.getpid()))\n    time.sleep(60)\n")
    code = f"import hooks; hooks.use_root({str(root)!r}); from hooks import runner; runner.ensure('demo.squares')"
    environ = os.environ | {"REFRESH": "all", "PYTHONPATH": str(runner.__file__).rsplit("/hooks/", 1)[0]}
    # What started the tests (nohup, a job in the background) may ignore these signals, and children inherit that.
    build = subprocess.Popen([sys.executable, "-c", code], env=environ, stderr=subprocess.PIPE, text=True,
                             preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))  # fmt: skip
    deadline = time.monotonic() + 20
    while not ((root / "child").exists() and (root / "child").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (root / 'child').exists(), build.communicate(timeout=5)
    build.send_signal(number)
    said = build.communicate(timeout=20)[1]
    assert build.returncode != 0 and "demo.squares] interrupted; nothing was stored" in said
    assert gone(int((root / "child").read_text())) and not (root / "records").exists()


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_before_the_output_is_read_kills_the_experiment_too(root, monkeypatch, capsys, at):
    set_measure(root, "    import os, time\n    open('child', 'w').write(str(os.getpid()))\n    time.sleep(60)\n")
    monkeypatch.setenv("REFRESH", "all")
    start, calls = threading.Thread.start, []

    def interrupted(self):
        calls.append(self)
        if len(calls) > at:
            raise KeyboardInterrupt
        start(self)

    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(runner.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure()
    assert "interrupted; nothing was stored" in capsys.readouterr().err and not (root / "records").exists()
    assert started[-1].poll() is not None


def test_the_real_measure_module_speaks_this_protocol(root, monkeypatch):
    pytest.importorskip("torch")
    real = os.path.join(os.path.dirname(os.path.dirname(hooks.__file__)), "snippets", "measure.py")
    (root / "snippets/measure.py").write_text(open(real, encoding="utf-8").read(), encoding="utf-8")
    monkeypatch.setenv("REFRESH", "all")
    found = ensure()
    (slug, record), = found.items()
    assert record.device["slug"] == slug and record.versions["torch"] and not record.stale
    assert json.loads((root / record.path).read_text())["tables"]["squares"][1] == {"x": "1", "y": 1}
