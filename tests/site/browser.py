"""A built site, a server for it on the loopback address, and a Chromium to open it with."""

import functools
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[2]
VIEWPORTS = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}
SCHEMES = {"light": "default", "dark": "slate"}  # preference of the system: Material's scheme
# Nothing but the pages under test may cause a request.
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


def pages():
    """{name: address relative to the site} of every page under docs/."""
    names = sorted(path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    return {name: "" if name == "index" else f"{name}/" for name in names}


def build(directory, origin):
    """Build the site strictly into `directory`, as published at `origin`; raise with the log if that fails."""
    env = os.environ | {"SITE_URL": f"{origin}/", "NO_MKDOCS_2_WARNING": "1"}
    env = {key: value for key, value in env.items() if key not in ("REFRESH", "SMOKE")}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextmanager
def serving(directory):
    """Serve `directory` on a free loopback port; yields the origin, such as http://127.0.0.1:41234."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=str(directory)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def chromium():
    """Path of the machine's Chromium or Chrome."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    for name in names:
        if path := shutil.which(name):
            return path
    raise RuntimeError(f"no browser on this machine (looked for {', '.join(names)}). Remedy: make test installs one")


def launch(playwright):
    """A headless browser of `playwright` (sync API)."""
    return playwright.chromium.launch(executable_path=chromium(), headless=True, args=FLAGS)
