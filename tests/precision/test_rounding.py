"""The yardstick at full depth: the nudged twin parts from the baseline, the repetition does not."""

import pytest

from snippets.measure import MeasureError, check_tables
from snippets.precision import rounding


def test_nudged_run_parts_and_the_repeated_one_does_not():
    tables = rounding.measure(**rounding.EXPERIMENT["smoke"])
    check_tables(rounding.EXPERIMENT["tables"], tables)
    hf, nudged = tables["summary"]
    assert hf["paired_mean_abs"] == 0 < nudged["paired_mean_abs"] < 0.01
    assert abs(nudged["paired_first"]) < 1e-3 * hf["first_loss"]
    assert tables["repeat"] == [{"steps": 2, "different": 0}]
    assert [r["step"] for r in tables["loss"] if r["variant"] == "hf_nudged"] == list(range(1, 21))


def test_more_repeated_steps_than_steps_are_refused():
    with pytest.raises(MeasureError, match="repeated 99"):
        rounding.measure(**(rounding.EXPERIMENT["smoke"] | {"repeated": 99}))
