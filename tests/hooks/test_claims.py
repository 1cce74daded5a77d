"""hooks/claims.py: the ledger and its states."""

import pytest
import yaml
from fake_results import project, record

import hooks
from hooks import claims
from hooks.claims import ClaimError

GOOD = {
    "id": "rms-bandwidth",
    "page": "precision-alignment.md",
    "text": "RMSNorm 达到拷贝带宽的 90%",
    "source": "spec",
    "expr": 'one("kernels.bench", "speed", kernel="rms_norm", impl="ours").ratio',
    "accept": [0.9, None],
}


@pytest.fixture(autouse=True)
def root(tmp_path):
    before = hooks.root()
    hooks.use_root(project(tmp_path))
    yield tmp_path
    hooks.use_root(before)


def ledger(root, *items):
    (root / "claims.yml").write_text(yaml.safe_dump(list(items), allow_unicode=True), encoding="utf-8")
    return claims.load()


def test_no_file_means_no_claims(root):
    assert claims.load() == []


def test_a_good_claim_is_read(root):
    (claim,) = ledger(root, GOOD)
    assert (claim.id, claim.low, claim.high, claim.band) == ("rms-bandwidth", 0.9, None, "≥ 0.9")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"expect": 1}, "unknown keys expect"),
        ({"id": "Bad Id"}, "a-z"),
        ({"page": "nope.md"}, "does not exist"),
        ({"page": "../docs/precision-alignment.md"}, "does not exist"),
        ({"page": "."}, "does not exist"),
        ({"source": "my head"}, "'spec', 'project' or a URL"),
        ({"text": ""}, "text must be text"),
        ({"known": " "}, "known must be text"),
        ({"known": True}, "known must be text"),
        ({"accept": [1]}, "[low, high]"),
        ({"accept": [2, 1]}, "low is above high"),
        ({"accept": [None, None]}, "not both"),
        ({"accept": [float("nan"), 1]}, "[low, high]"),
        ({"accept": [True, 1]}, "[low, high]"),
        ({"expr": "1"}, "reads no experiment"),
        ({"expr": "one("}, "not an expression"),
        ({"expr": 'one("kernels.bnch", "speed").ratio'}, "unknown experiment"),
        ({"expr": 'one("kernels.bench", "speed").ratoi'}, "no column 'ratoi'"),
    ],
)
def test_a_bad_claim_is_named_with_its_fault(root, changes, says):
    with pytest.raises(ClaimError) as caught:
        ledger(root, GOOD | {"id": "other"}, GOOD | changes)
    assert says in str(caught.value) and "claim 2" in str(caught.value) and "claim 1" not in str(caught.value)


def test_missing_keys_duplicates_and_broken_files(root):
    for items, says in [([{k: v for k, v in GOOD.items() if k != "accept"}], "lacks accept"), ([GOOD, GOOD], "used before"), (["x"], "mapping")]:
        with pytest.raises(ClaimError, match=says):
            ledger(root, *items)
    for text, says in [("a: 1", "list of claims"), ("- {id: [", "cannot be read"), ("- {id: a, id: b}", "given twice")]:
        (root / "claims.yml").write_text(text, encoding="utf-8")
        with pytest.raises(ClaimError, match=says):
            claims.load()


def test_all_faults_are_listed_at_once(root):
    with pytest.raises(ClaimError) as caught:
        ledger(root, GOOD | {"page": "a.md"}, GOOD | {"id": "b", "source": "x"})
    assert "claim 1" in str(caught.value) and "claim 2" in str(caught.value)


def states(claim, *records):
    return claims.states(claim, lambda id: {r.device["slug"]: r for r in records})


def test_states_per_device(root):
    (claim,) = ledger(root, GOOD)
    weak = record(slug="nvidia-h100", name="NVIDIA H100")
    weak.tables["speed"][0]["ratio"] = 0.8
    found = states(claim, record(), weak)
    assert [(s.device, s.state, s.value) for s in found] == [("NVIDIA H100", "不成立", 0.8), ("NVIDIA H200", "成立", 0.942)]
    assert [s.state for s in states(claim)] == ["未测"]


def test_the_band_is_closed_on_both_sides(root):
    (claim,) = ledger(root, GOOD | {"accept": [0.942, 0.942]})
    assert [s.state for s in states(claim, record())] == ["成立"]
    for band in ([0.9421, None], [None, 0.9419]):
        (claim,) = ledger(root, GOOD | {"accept": band})
        assert [s.state for s in states(claim, record())] == ["不成立"]


def test_smoke_proves_nothing_and_stale_is_said(root):
    (claim,) = ledger(root, GOOD)
    (smoke,) = states(claim, record(mode="smoke"))
    (stale,) = states(claim, record(stale=True))
    assert (smoke.state, smoke.weak) == ("未测", "冒烟") and (stale.state, stale.weak) == ("成立", "过期")


def test_a_smoke_record_without_the_row_measures_nothing(root):
    (claim,) = ledger(root, GOOD | {"expr": GOOD["expr"].replace("ours", "nobody")})
    (state,) = states(claim, record(mode="smoke"))
    assert (state.state, state.value, state.weak) == ("未测", None, "冒烟")


def test_an_expression_that_fails_on_the_record_or_gives_text_is_an_error(root):
    for expr, says in [(GOOD["expr"].replace("ours", "nobody"), "no row"), (GOOD["expr"].replace(".ratio", ".impl"), "must give a number")]:
        (claim,) = ledger(root, GOOD | {"expr": expr})
        with pytest.raises(ClaimError, match=says):
            states(claim, record())
