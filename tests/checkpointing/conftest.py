"""The smoke run of ``costs``, which takes most of a minute, once for all tests and all workers that need one."""

import json
import os

import pytest
from filelock import FileLock

from snippets.checkpointing import costs


@pytest.fixture(scope="session")
def smoke_costs(tmp_path_factory):
    """Its tables, as they come back from a record."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each worker has a folder of its own below the run's
    file = folder / "smoke_costs.json"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_text(json.dumps(costs.measure(**costs.EXPERIMENT["smoke"])))
    return json.loads(file.read_text())
