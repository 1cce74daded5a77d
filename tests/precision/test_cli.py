"""The command line as a reader uses it: exit codes, reasons, refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from snippets.precision.__main__ import main

KERNELS = '''
import torch
import torch.nn.functional as F

def rms_good(x, weight, eps=1e-6):
    c = torch.float64 if x.dtype == torch.float64 else torch.float32
    h = x.to(c)
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * weight.to(c)).to(x.dtype)

def rms_bad(x, weight, eps=1e-6):
    return rms_good(x, weight, 1e-5)

def softsign(x, w):
    return w * x / (1 + x.abs())

def softsign_wrong(x, w):
    return w * x / (1 + x.abs() + 1e-4)

def lookup(w, i):
    return F.embedding(i, w)

def noisy(x, weight, eps=1e-6):
    print("hello")
    return rms_good(x, weight, eps)

def leaves(x, weight, eps=1e-6):
    raise SystemExit(0)

class Norm:
    pass

not_callable = 3
'''


@pytest.fixture(autouse=True)
def kernels(tmp_path, monkeypatch):
    (tmp_path / "reader_kernels.py").write_text(KERNELS)
    (tmp_path / "reader_exits.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "reader_broken.py").write_text("import no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("reader_kernels", None)
    return tmp_path


GOOD = ["--op", "rms_norm", "--kernel", "reader_kernels:rms_good"]


def check(*args):
    return main(["check", "--device", "cpu", *args])


def test_a_correct_kernel_gives_0(capsys):
    assert check("--op", "rms_norm", "--kernel", "reader_kernels:rms_good", "--gate", "1") == 0
    out = capsys.readouterr().out
    assert "结论：通过" in out and "Gate 2" not in out


def test_a_wrong_kernel_gives_1_with_the_reason(capsys):
    assert check("--op", "rms_norm", "--kernel", "reader_kernels:rms_bad", "--gate", "1") == 1
    out = capsys.readouterr().out
    assert "结论：拒绝" in out and "✗" in out and "d_x" in out


def test_an_operator_of_the_reader_s_own(capsys):
    common = ["--inputs", "x[R,H] w:weight[H]", "--reference", "reader_kernels:softsign"]
    assert check(*common, "--kernel", "reader_kernels:softsign") == 0
    assert check(*common, "--kernel", "reader_kernels:softsign_wrong") == 1


def test_indices_as_inputs():
    assert check("--inputs", "w[V,H] i:int[R]<V", "--kernel", "reader_kernels:lookup",
                 "--reference", "reader_kernels:lookup", "--gate", "1") == 0  # fmt: skip


def test_json_has_all_findings(capsys):
    assert check("--op", "rms_norm", "--kernel", "reader_kernels:rms_bad", "--gate", "1", "--json") == 1
    verdict = json.loads(capsys.readouterr().out)[0]
    assert verdict["gate"] == "gate1" and not verdict["ok"] and any(not f["ok"] for f in verdict["findings"])


@pytest.mark.parametrize("args, said", [
    (["--kernel", "reader_kernels:rms_good"], "--op"),
    (["--op", "nonsense", "--kernel", "reader_kernels:rms_good"], "rms_norm"),
    (["--op", "rms_norm", "--kernel", "reader_kernels"], "module:callable"),
    (["--op", "rms_norm", "--kernel", "no_such_reader_module:f"], "no_such_reader_module"),
    (["--op", "rms_norm", "--kernel", "reader_broken:f"], "no_such_module_at_all"),
    (["--op", "rms_norm", "--kernel", "reader_kernels:missing"], "missing"),
    (["--op", "rms_norm", "--kernel", "reader_kernels:not_callable"], "not callable"),
    (["--op", "rms_norm", "--kernel", "reader_kernels:rms_good", "--allow-overwrite", "everything"], "grad_output"),
    (["--op", "rms_norm", "--kernel", "reader_exits:f"], "SystemExit"),
    (["--op", "rms_norm", "--kernel", "reader_kernels.py:rms_good"], "my_pkg.kernels:rms_good"),
    (["--op", "rms_norm", "--kernel", ".reader_kernels:rms_good"], "no module name"),
    (["--op", "rms_norm", "--kernel", "reader_kernels:Norm"], ".apply"),
    ([*GOOD, "--reference", "reader_kernels:leaves"], "sys.exit"),
    ([*GOOD, "--device", "nonsense"], "cpu"),
    ([*GOOD, "--device", "meta"], "cpu"),
    ([*GOOD, "--device", "cuda:99"], "--device cpu"),
    ([*GOOD, "--seed", "-1"], "--seed"),
    ([*GOOD, "--seed", str(10**30)], "--seed"),
    (["--inputs", "x[R,H]", "--kernel", "reader_kernels:rms_good"], "--reference"),
    (["--inputs", "x{R}", "--kernel", "reader_kernels:rms_good", "--reference", "reader_kernels:rms_good"], "x{R}"),
])  # fmt: skip
def test_a_request_that_is_wrong_gives_2_and_says_why(args, said, capsys):
    assert check(*args) == 2
    assert said in capsys.readouterr().err


def test_a_kernel_that_exits_with_0_is_not_accepted(capsys):
    assert check("--op", "rms_norm", "--kernel", "reader_kernels:leaves", "--gate", "1") == 1
    assert "sys.exit" in capsys.readouterr().out


def test_what_a_kernel_prints_stays_out_of_the_json(capsys):
    assert check("--op", "rms_norm", "--kernel", "reader_kernels:noisy", "--gate", "1", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["ok"] and "hello" in err


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), SystemExit(0)])
def test_an_error_of_ours_is_no_verdict(error, monkeypatch, capsys):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("snippets.precision.gate1.check", fails)
    assert check(*GOOD, "--gate", "1") == 2
    assert "不是对 kernel 的判决" in capsys.readouterr().err


CURVE = [5 - t * 0.01 for t in range(60)]


@pytest.mark.parametrize("file, text, said", [
    ("candidate", "[]", "no losses"), ("candidate", "", "no losses"), ("candidate", "[5.0]", "equal length"),
    ("candidate", '{"loss": [1]}', "JSON list"), ("candidate", "[[1, 2]]", "JSON list"), ("candidate", f"[1{'0' * 400}]", "JSON list"),
    ("b", json.dumps([*CURVE[:-1], float("nan")]), "step 59"), ("b", json.dumps(CURVE[:-1]), "equal length"),
    ("b", json.dumps(CURVE), "seed"), ("nudged", json.dumps([*CURVE[:-1], float("inf")]), "step 59"),
])  # fmt: skip
def test_curves_that_cannot_be_judged_give_2(kernels, capsys, file, text, said):
    for i, name in enumerate(("a", "b", "c", "candidate", "nudged", "nudged2", "nudged3")):
        (kernels / name).write_text(text if name == file else json.dumps([x + 1e-4 * i for x in CURVE]))
    assert main(["losses", "--baseline", "a", "b", "c", "--candidate", "candidate", "--nudged", "nudged", "nudged2", "nudged3"]) == 2
    assert said in capsys.readouterr().err


def test_a_candidate_that_diverged_is_rejected_and_a_window_of_nothing_refused(kernels, capsys):
    for i, name in enumerate("abc"):
        (kernels / name).write_text(json.dumps([x + 1e-3 * i for x in CURVE]))
    (kernels / "nan").write_text(json.dumps([*CURVE[:30], *[float("nan")] * 30]))
    assert main(["losses", "--baseline", "a", "b", "c", "--candidate", "nan"]) == 1
    assert main(["losses", "--baseline", "a", "b", "c", "--candidate", "a", "--window", "0"]) == 2
    assert "--window" in capsys.readouterr().err


def test_losses(kernels, capsys):
    for name, shift in (("a", 0.0), ("b", 0.01), ("c", -0.01), ("worse", 0.5)):
        losses = [5 - t * 0.01 + shift * (t > 0) + 0.003 * ((t * 7919 + len(name)) % 13) for t in range(100)]
        (kernels / f"{name}.json").write_text(json.dumps(losses))
    base = ["losses", "--baseline", "a.json", "b.json", "c.json"]
    assert main([*base, "--candidate", "a.json"]) == 0
    assert main([*base, "--candidate", "worse.json"]) == 1
    assert main([*base, "--candidate", "absent.json"]) == 2
    (kernels / "text.json").write_text("no numbers")
    assert main([*base, "--candidate", "text.json"]) == 2
    assert main(["losses", "--baseline", "a.json", "--candidate", "a.json"]) == 2
    assert "at least 3" in capsys.readouterr().err


def test_ops_lists_every_operator(capsys):
    assert main(["ops"]) == 0
    assert "rope(q[B,Hq,S,D]" in capsys.readouterr().out


def test_as_a_process_the_exit_code_arrives(kernels):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "snippets.precision", "check", "--op", "swiglu", "--kernel", "nowhere:f"],
        cwd=root, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and "nowhere" in done.stderr
