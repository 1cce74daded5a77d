"""The corpus: text and tokens belong together, the split is clean, the preparation refuses other sources."""

import hashlib
import tarfile

import numpy as np
import pytest

from snippets.precision import corpus

needs_tokenizer = pytest.mark.skipif(corpus.merges_path() is None, reason="the package dashscope is not installed")


def test_text_is_mixed_and_small():
    data = corpus.TEXT.read_bytes()
    text = data.decode("utf-8")
    assert 1_500_000 < len(data) <= 2_500_000
    chinese = sum("\u4e00" <= c <= "\u9fff" for c in text)
    assert chinese > 200_000 and sum(c.isascii() for c in text) > 1_000_000
    assert "\r" not in text and "学而时习之" in text and "jargon" in text


def test_tokens_are_qwen_ids_and_enough_for_1000_steps():
    ids = corpus.tokens()
    assert ids.dtype == np.uint32 and ids.max() < 151643
    assert len(corpus.split("train")) >= 1000 * 512
    assert len(np.unique(ids)) > 15_000  # a real vocabulary is in use, not a few thousand ids


@needs_tokenizer
def test_tokens_are_the_tokenized_text():
    assert np.array_equal(corpus.tokenize(corpus.TEXT.read_text(encoding="utf-8")), corpus.tokens())


@needs_tokenizer
def test_tokenizer_is_lossless_and_splits_digits():
    text = "精度对齐：bf16 的误差是 0.0039，we're  done\n\n"
    ids = corpus.tokenize(text)
    assert corpus.tokenizer().decode(list(map(int, ids))) == text
    assert len(corpus.tokenize("12345")) == 5
    # known ids of Qwen2/Qwen3's vocabulary
    assert corpus.tokenize("Hello, world!").tolist() == [9707, 11, 1879, 0]


@pytest.mark.parametrize("part", ["train", "held-out"])
def test_both_languages_are_in_both_parts(part):
    ids = corpus.split(part)
    assert (ids == 279).mean() > 0.005  # " the"
    assert (ids > 97_000).mean() > 0.2  # the ids of most Chinese words


def test_held_out_is_disjoint_and_at_the_end():
    train, held = corpus.split("train"), corpus.split("held-out")
    assert len(train) + len(held) == len(corpus.tokens())
    assert 0.049 < len(held) / len(corpus.tokens()) < 0.051


def test_sequences_same_seed_same_order_and_each_window_once():
    a = corpus.sequences("train", 50, 512, seed=1)
    assert a.shape == (50, 512)
    assert a.equal(corpus.sequences("train", 50, 512, seed=1))
    assert not a.equal(corpus.sequences("train", 50, 512, seed=2))
    windows = len(corpus.split("held-out")) // 512
    epoch = corpus.sequences("held-out", windows, 512, seed=5)
    plain = corpus.sequences("held-out", windows, 512)
    assert sorted(map(tuple, epoch.tolist())) == sorted(map(tuple, plain.tolist()))
    two = corpus.sequences("held-out", windows + 3, 512)
    assert two[windows:].equal(plain[:3])


def test_sequences_fold_into_a_small_vocabulary():
    assert corpus.sequences("train", 4, 16, vocab=100).max() < 100


def test_sequences_refuse_a_window_longer_than_the_part():
    with pytest.raises(corpus.CorpusError, match="fewer than one sequence"):
        corpus.sequences("held-out", 1, 10**7)


def test_preparation_refuses_a_foreign_package(tmp_path):
    wrong = tmp_path / "chinese-poetry-2.0.1.tgz"
    with tarfile.open(wrong, "w:gz"):
        pass
    with pytest.raises(corpus.CorpusError, match="SHA-256"):
        corpus.prepare(wrong, wrong)
    renamed = tmp_path / "other.tgz"
    renamed.write_bytes(b"")
    with pytest.raises(corpus.CorpusError, match=r"other\.tgz"):
        corpus.prepare(renamed, renamed)
    with pytest.raises(SystemExit, match="corpus: "):
        corpus.main(["prepare", str(wrong), str(wrong)])


def test_preparation_reads_the_two_package_formats(tmp_path, monkeypatch):
    """Small packages of the same formats: JSON in a tgz, a dictzip in the data member of an ar archive."""
    import gzip
    import io
    import json

    def tgz(members):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return buffer.getvalue()

    work = {"title": "无", "abstract": "今人所写", "content": [{"chapter": "一", "paragraphs": [" 子曰 ", "学而"]}]}
    poetry = tmp_path / "chinese-poetry-2.0.1.tgz"
    poetry.write_bytes(tgz({f"package/dist/{n}": json.dumps(work).encode() for n in corpus.CHINESE}))
    data = tgz({"./usr/share/dictd/jargon.dict.dz": gzip.compress(b"one\n  two\n\n three\n")})
    members = b"".join(
        f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n".encode() + body + b"\n" * (len(body) % 2)
        for name, body in {"debian-binary": b"2.0", "data.tar.gz": data}.items()
    )
    jargon = tmp_path / "dict-jargon_4.4.7-3.1_all.deb"
    jargon.write_bytes(b"!<arch>\n" + members)
    sums = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (poetry, jargon)}
    monkeypatch.setattr(corpus, "SOURCES", sums)
    text = corpus.prepare(poetry, jargon)
    assert "one two\nthree" in text and text.count("子曰\n学而") == len(corpus.CHINESE)
    assert "今人所写" not in text and "无" not in text


def test_damaged_tokens_name_the_file_and_the_remedy(tmp_path, monkeypatch):
    bad = tmp_path / "tokens.npy.xz"
    bad.write_bytes(b"not xz")
    monkeypatch.setattr(corpus, "TOKENS", bad)
    with pytest.raises(corpus.CorpusError, match=r"tokens\.npy\.xz.*corpus tokenize"):
        corpus.tokens.__wrapped__()
