"""Every pitfall has both pieces, each runs in a process of its own, and whatever happens there becomes a row."""

import pytest

from snippets.cuda_graph import pitfalls
from snippets.measure import check_tables


def test_each_case_has_both_pieces_and_a_section():
    source = open(pitfalls.__file__, encoding="utf-8").read()
    for case in pitfalls.CASES:
        assert callable(getattr(pitfalls, f"{case.name}_wrong")) and callable(getattr(pitfalls, f"{case.name}_fixed"))
        assert source.count(f"[start:{case.name}]") == source.count(f"[end:{case.name}]") == 1
    pieces = {n.rsplit("_", 1)[0] for n in vars(pitfalls) if n.endswith(("_wrong", "_fixed"))}
    assert pieces == {c.name for c in pitfalls.CASES}


def test_without_a_device_the_row_says_so():
    tables = pitfalls.measure(**pitfalls.EXPERIMENT["smoke"])
    check_tables(pitfalls.EXPERIMENT["tables"], tables)
    (row,) = tables["pitfalls"]
    assert not row["ok"] and row["wrong"] is None and "CUDA" in row["outcome"]


def test_what_happens_in_the_process_becomes_the_row(monkeypatch):
    answers = {"wrong": {"value": 5.0, "error": None, "warnings": ["UserWarning: The CUDA Graph is empty."]}, "fixed": {"value": 8.0, "error": None, "warnings": []}}
    monkeypatch.setattr(pitfalls, "apart", lambda name, way: answers[way])
    row = pitfalls.row(pitfalls.CASES[0])
    assert row["ok"] and row["outcome"] == "没有报错；警告：UserWarning: The CUDA Graph is empty.；四个 1 乘 2 之和：5，应为 8"
    answers["wrong"] = {"value": None, "error": "RuntimeError: no", "warnings": []}
    assert pitfalls.row(pitfalls.CASES[0])["outcome"] == "RuntimeError: no" and pitfalls.row(pitfalls.CASES[0])["ok"]
    answers["wrong"] = {"value": 8.0, "error": None, "warnings": []}
    assert not pitfalls.row(pitfalls.CASES[0])["ok"]
    answers["fixed"] = {"value": None, "error": "GraphError: worse", "warnings": []}
    assert "修好后的写法报错：GraphError: worse" in pitfalls.row(pitfalls.CASES[0])["outcome"]


@pytest.mark.parametrize(("wrong", "fixed", "ok"), [(5.0, 3.0, True), (3.0, 5.0, False), (3.0, 3.0, False), (None, 3.0, False)])
def test_a_fix_without_an_expected_number_has_to_be_less(wrong, fixed, ok):
    case = next(c for c in pitfalls.CASES if c.expected is None)
    said = [{"value": v, "error": None if v else "RuntimeError: no", "warnings": []} for v in (wrong, fixed)]
    assert pitfalls.judged(case, *said)["ok"] is ok


def test_the_message_is_that_of_the_cause_and_the_last_one_stands_behind_it(monkeypatch):
    def broken():
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        finally:
            raise ValueError("due to a previous error")

    monkeypatch.setattr(pitfalls, "shape_wrong", broken)
    assert pitfalls.run("shape", "wrong")["error"] == "RuntimeError: operation not permitted when stream is capturing；最后报 ValueError: due to a previous error"


def test_a_process_that_dies_is_a_row_too(monkeypatch):
    monkeypatch.setattr(pitfalls.sys, "executable", "/bin/false")
    assert "结束" in pitfalls.apart("shape", "wrong")["error"]


def test_an_unknown_name():
    with pytest.raises(ValueError, match="unknown pitfalls"):
        pitfalls.measure(names=["shapes"])
