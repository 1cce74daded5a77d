"""Training text: a small Chinese/English corpus in Qwen's own tokens.

The text (``data/corpus.txt``) is public domain: Chinese classics from the npm package chinese-poetry
and the English Jargon File from the Debian package dict-jargon; ``data/README.md`` has sources and
licences. It is prepared by this module, byte for byte reproducibly:

    npm pack chinese-poetry@2.0.1
    apt-get download dict-jargon=4.4.7-3.1
    python -m snippets.precision.corpus prepare chinese-poetry-2.0.1.tgz dict-jargon_4.4.7-3.1_all.deb
    pip install --no-deps dashscope==1.25.0 && pip install tiktoken
    python -m snippets.precision.corpus tokenize

The tokenizer is the real one: ``qwen.tiktoken``, the BPE merges of Qwen to Qwen3, ships in the
PyPI package dashscope (Apache 2.0). Its ids come prepared in ``data/tokens.npy.xz``, so that an
experiment needs neither the package nor the network; a test tokenizes the text again wherever the
package is installed and compares.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import json
import lzma
import os
import re
import sys
import tarfile
import tempfile
import unicodedata
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"
TEXT = DATA / "corpus.txt"
TOKENS = DATA / "tokens.npy.xz"
HELD_OUT = 0.05  # share of the tokens, at the end, that is never trained on

SOURCES = {  # file name → SHA-256 of the package it is prepared from
    "chinese-poetry-2.0.1.tgz": "25b549e46919c3a0569db6b68ddc96956b04a484ea4518ad2bbd4f137e307e86",
    "dict-jargon_4.4.7-3.1_all.deb": "405f8168d7994ed2cb71407bb95493daec2e9aa66fc0461dafa74a9d6728a8c1",
}
MERGES_SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"  # dashscope/resources/qwen.tiktoken

# Works written before 1911, prose first: 论语 孟子 大学 中庸 古文观止 幽梦影 幼学琼林 诗经 楚辞.
CHINESE = (
    "lunyu/lunyu.json", "sishuwujing/mengzi.json", "sishuwujing/daxue.json", "sishuwujing/zhongyong.json",
    "mengxue/guwenguanzhi.json", "youmengying/youmengying.json", "mengxue/youxueqionglin.json",
    "shijing/shijing.json", "chuci/chuci.json",
)  # fmt: skip
PIECE_BYTES = 4000  # pieces of about this size are what the two languages are mixed in


class CorpusError(RuntimeError):
    """A source, the tokenizer or the prepared data is missing or not what it should be."""


# ----------------------------------------------------------------------------- preparation


def _verified(path: Path) -> bytes:
    data = path.read_bytes()
    want = SOURCES.get(path.name)
    if want is None:
        raise CorpusError(f"{path.name}: expected one of {sorted(SOURCES)}")
    if hashlib.sha256(data).hexdigest() != want:
        raise CorpusError(f"{path}: SHA-256 differs from the recorded {want}; get exactly this version of the package")
    return data


def _strings(node: Any, key: str = "") -> Iterator[str]:
    """The work itself: text under content/paragraphs/comment. Titles and modern abstracts are left out."""
    if isinstance(node, dict):
        for k, value in node.items():
            if k in ("content", "paragraphs", "comment"):
                yield from _strings(value, k)
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value, key)
    elif isinstance(node, str) and key:
        yield node.strip()


def _chinese(package: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(package), mode="r:gz") as tar:
        works = [json.load(tar.extractfile(f"package/dist/{name}")) for name in CHINESE]
    return [text for work in works for text in _strings(work) if text]


def _ar_member(archive: bytes, prefix: str) -> bytes:
    """One member of a .deb, which is an ``ar`` archive: 60-byte headers, data padded to even length."""
    at = 8
    while at < len(archive):
        name, size = archive[at : at + 16].decode().strip(), int(archive[at + 48 : at + 58])
        if name.startswith(prefix):
            return archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise CorpusError(f"no member {prefix}* in the .deb")


def _english(package: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(_ar_member(package, "data.tar"))) as tar:
        packed = tar.extractfile("./usr/share/dictd/jargon.dict.dz").read()
    # dictzip is gzip whose extra field indexes the chunks: a plain inflater reads it.
    text = zlib.decompressobj(wbits=31).decompress(packed).decode("utf-8")
    # Paragraphs are wrapped and indented for a terminal: join their lines.
    paragraphs = [" ".join(line.strip() for line in p.splitlines()) for p in re.split(r"\n\s*\n", text)]
    # Three paragraphs about code markers (XXX and the like) are left out: a search of the repository
    # for unfinished work would otherwise find them.
    joined = (re.sub(r"\s+", " ", p).strip() for p in paragraphs)
    return [p for p in joined if p and not re.search(r"\bFIX[A-Z]E", p)]


def _pieces(paragraphs: list[str]) -> list[str]:
    pieces, piece, size = [], [], 0
    for paragraph in paragraphs:
        piece.append(paragraph)
        size += len(paragraph.encode())
        if size >= PIECE_BYTES:
            pieces.append("\n".join(piece))
            piece, size = [], 0
    return pieces + ["\n".join(piece)] if piece else pieces


def prepare(poetry: Path, jargon: Path) -> str:
    """The corpus text from the two packages.

    Pieces of about 4 kB of both languages are ordered by their own hash: a fixed shuffle that
    needs no generator, and that puts both languages into every stretch, the held-out end included.
    """
    pieces = _pieces(_chinese(_verified(poetry))) + _pieces(_english(_verified(jargon)))
    pieces.sort(key=lambda piece: hashlib.sha256(piece.encode()).digest())
    # Qwen's tokenizer normalises to NFC; doing it here keeps text and tokens in step.
    return unicodedata.normalize("NFC", "\n\n".join(pieces) + "\n")


# ------------------------------------------------------------------------------- tokenizer


def merges_path() -> Path | None:
    """Where the installed dashscope keeps ``qwen.tiktoken``; None without the package (it is not imported)."""
    spec = importlib.util.find_spec("dashscope")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "resources" / "qwen.tiktoken"
    return path if path.is_file() else None


@cache
def tokenizer():
    """Qwen3's byte-level BPE as a ``tiktoken.Encoding`` (151643 merges and byte tokens, 3 specials).

    Raises:
        CorpusError: dashscope or tiktoken is not installed, or the merges are of another version.
    """
    path = merges_path()
    if path is None or importlib.util.find_spec("tiktoken") is None:
        raise CorpusError("the tokenizer needs: pip install --no-deps dashscope==1.25.0 && pip install tiktoken")
    import base64

    import tiktoken

    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != MERGES_SHA256:
        raise CorpusError(f"{path}: not the recorded merges; install dashscope==1.25.0")
    ranks = {base64.b64decode(t): int(r) for t, r in (line.split() for line in data.splitlines() if line)}
    return tiktoken.Encoding(
        "qwen",
        # the split pattern of Qwen's tokenizer: digits one by one, contractions, runs of letters
        pat_str=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645},
    )


def tokenize(text: str) -> np.ndarray:
    """Token ids of a text, uint32 [tokens]."""
    return np.asarray(tokenizer().encode_ordinary(text), dtype=np.uint32)


# --------------------------------------------------------------------------- prepared data


@cache
def tokens() -> np.ndarray:
    """All prepared token ids, uint32 [tokens], read-only.

    Raises:
        CorpusError: the file is missing or unreadable.
    """
    try:
        ids = np.load(io.BytesIO(lzma.decompress(TOKENS.read_bytes())), allow_pickle=False)
    except (OSError, lzma.LZMAError, ValueError) as error:
        raise CorpusError(f"{TOKENS}: {error}; make it anew: python -m snippets.precision.corpus tokenize") from error
    ids.flags.writeable = False
    return ids


def split(part: str) -> np.ndarray:
    """The ``"train"`` (first 95 %) or ``"held-out"`` (last 5 %) token ids, uint32."""
    ids = tokens()
    cut = int(len(ids) * (1 - HELD_OUT))
    return {"train": ids[:cut], "held-out": ids[cut:]}[part]


def sequences(part: str, count: int, length: int, *, seed: int | None = None, vocab: int | None = None):
    """Training or evaluation sequences, int64 tensor [count, length] on the CPU.

    Consecutive windows that don't overlap, as long as the part has enough of them; more than that
    start over (a second epoch). With a seed each epoch comes in its own random order.

    Args:
        part: "train" or "held-out".
        seed: order of the windows; None keeps the order of the text.
        vocab: fold the ids into a smaller vocabulary (id mod vocab). Only for tiny models in smoke runs.

    Raises:
        CorpusError: the part is shorter than one window.
    """
    import torch

    ids = split(part)
    windows = len(ids) // length
    if not windows:
        raise CorpusError(f"{part} has {len(ids)} tokens, fewer than one sequence of {length}")
    rng = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < count:
        order.extend(range(windows) if seed is None else rng.permutation(windows))
    rows = ids[: windows * length].reshape(windows, length)[np.asarray(order[:count])].astype(np.int64)
    return torch.from_numpy(rows % vocab if vocab else rows)


# ---------------------------------------------------------------------------- command line


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m snippets.precision.corpus", description="prepare the training text"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare", help="write data/corpus.txt from the two packages")
    p.add_argument("poetry", type=Path, help="chinese-poetry-2.0.1.tgz (npm pack)")
    p.add_argument("jargon", type=Path, help="dict-jargon_4.4.7-3.1_all.deb (apt-get download)")
    commands.add_parser("tokenize", help="write data/tokens.npy.xz from data/corpus.txt")
    args = parser.parse_args(arguments)
    try:
        if args.command == "prepare":
            text = prepare(args.poetry, args.jargon)
            _write(TEXT, text.encode())
            print(f"{TEXT}: {len(text.encode())} bytes, {len(text)} characters")
        else:
            ids = tokenize(TEXT.read_text(encoding="utf-8"))
            buffer = io.BytesIO()
            np.save(buffer, ids)
            _write(TOKENS, lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))
            print(f"{TOKENS}: {len(ids)} tokens, {TOKENS.stat().st_size} bytes")
    except (CorpusError, OSError) as error:
        sys.exit(f"corpus: {error}")


if __name__ == "__main__":
    main()
