"""A project of its own in a temporary folder, with experiments that end in milliseconds.

Its snippets/measure.py stands in for the real one: the same command line and payload, without
torch. What device it reports comes from the file `device` in the project.
"""

import json
from pathlib import Path

import hooks
from hooks import experiments, records

MEASURE = '''
import json, sys, datetime, pathlib
def environment():
    slug = pathlib.Path("device").read_text().strip()
    if slug == "no torch":
        raise ModuleNotFoundError("No module named 'torch'")
    return {
        "device": {"name": slug.upper(), "slug": slug, "memory_gib": 16.0, "capability": "", "sm_count": 0, "driver": ""},
        "versions": dict.fromkeys(["python", "torch", "cuda", "triton", "transformers", "liger-kernel"], "1.0"),
    }
def cli(experiment, measure):
    mode = "smoke" if "--smoke" in sys.argv else "full"
    name = sys.modules["__main__"].__spec__.name.removeprefix("snippets.")
    payload = {"experiment": name, "mode": mode, "settings": experiment[mode], **environment(),
               "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "seconds": 0.1,
               "tables": measure(**experiment[mode])}
    pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(payload))
if __name__ == "__main__":
    print(json.dumps(environment()))
'''

EXPERIMENT = '''"""Square numbers."""
from snippets.measure import cli
from snippets.demo import helper

EXPERIMENT = {
    "title": "平方", "needs": "cpu", "memory_gib": 0, "minutes": 0.1,
    "full": {"n": 3}, "smoke": {"n": 1},
    "tables": {"squares": {"x": "", "y": "1"}},
}

def measure(*, n):
    helper.note("measuring")
    return {"squares": [{"x": str(i), "y": helper.square(i)} for i in range(n)]}

if __name__ == "__main__":
    cli(EXPERIMENT, measure)
'''

HELPER = '''
import pathlib, sys

def square(i):
    """Docstring."""
    return i * i  # comment

def note(text):
    """Leave a trace of every run."""
    with open("runs", "a") as f:
        f.write(text + "\\n")
    print("[progress] 1/1", text, file=sys.stderr)
'''

MKDOCS = """
site_name: t
theme: {{name: mkdocs, highlightjs: false}}
plugins: [{{markdown-exec: {{languages: [python, bash]}}}}]
hooks: ["{plugin}"]
markdown_extensions:
  - pymdownx.snippets: {{base_path: [!relative $config_dir], check_paths: true}}
  - pymdownx.superfences
"""

BLOCK = '''```python exec="1" html="1" id="squares"
from hooks.show import experiment
print(experiment("demo.squares").table("squares"))
```'''


def make(root: Path, page: str = f"# Page\n\n{BLOCK}\n") -> Path:
    """Write the project below `root` and make it the current one."""
    (root / "snippets/demo").mkdir(parents=True)
    (root / "docs").mkdir()
    (root / "device").write_text("cpu")
    (root / "snippets/__init__.py").write_text("")
    (root / "snippets/measure.py").write_text(MEASURE)
    (root / "snippets/demo/squares.py").write_text(EXPERIMENT)
    (root / "snippets/demo/helper.py").write_text(HELPER)
    (root / "docs/index.md").write_text(page)
    plugin = Path(hooks.__file__).parent / "plugin.py"
    (root / "mkdocs.yml").write_text(MKDOCS.format(plugin=plugin))
    hooks.use_root(root)
    return root


def record(**changes):
    """A valid record of demo.squares, without checksum."""
    device = {"name": "CPU", "slug": "cpu", "memory_gib": 16.0, "capability": "", "sm_count": 0, "driver": ""}
    return {
        "schema": 1, "experiment": "demo.squares", "mode": "full", "settings": {"n": 3}, "device": device,
        "versions": dict.fromkeys(["python", "torch", "cuda", "triton", "transformers", "liger-kernel"], "1.0"),
        "commit": "", "dirty": False, "started": "2026-11-30T08:00:00+00:00", "seconds": 0.1,
        "digest": experiments.find("demo.squares").digest,
        "tables": {"squares": [{"x": str(i), "y": i * i} for i in range(3)]},
    } | changes  # fmt: skip


def put(value, *, slug="cpu", id="demo.squares", sign=True):
    """Write a record without any check; `sign` adds the checksum."""
    path = records.path_of(slug, id)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, dict):
        value = json.dumps(value | ({"checksum": records.checksum(value)} if sign else {}))
    path.write_bytes(value if isinstance(value, bytes) else value.encode())
    return path
