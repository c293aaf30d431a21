"""Looks at a prepared dataset and says whether it is sound: counts, checksums, token ids, domains, the ends as text.

python scripts/inspect_data.py NAME     of data/NAME, or a path to a folder with train.bin and val.bin; nanoGPT's too
Exit code 0: sound. 1: not, with the reasons at the end.
"""
import argparse
import hashlib
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from configurator import fail
from data.bins import GPT2_VOCAB, find_folder, load_meta
from data.corpus import get_tokenizer
from scripts.common import printing

BLOCK = 1 << 22  # tokens read at a time, so that memory does not grow with the file


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    parser.add_argument("name", help="a folder in data/, or a path")
    parser.add_argument("--top", type=int, default=10, help="how many of the most frequent tokens to list")
    args = parser.parse_args()
    if args.top < 1:
        fail(f"--top={args.top}: must be at least 1")
    folder = find_folder(args.name)
    if not folder.is_dir():
        prepared = sorted(p.parent.name for p in (ROOT / "data").glob("*/train.bin"))
        fail(f"no folder data/{args.name} nor {args.name}; prepared in data: {', '.join(prepared) or 'none'}")
    bad = []
    meta = record_of(folder, bad)
    vocab, dtype = meta["vocab_size"], np.dtype(meta.get("dtype", "uint16")).newbyteorder("<")
    tokenizer, eot = tokenizer_of(meta, bad), meta.get("eot")
    print_record(folder, meta, dtype)
    histogram, ends = np.zeros(vocab, np.int64), 0
    for split in ("train", "val"):
        path = folder / f"{split}.bin"
        tokens = path.stat().st_size // dtype.itemsize if path.is_file() else None
        if tokens is None:
            bad.append(f"{split}.bin is missing")
            continue
        if path.stat().st_size % dtype.itemsize:
            bad.append(f"{split}.bin: {path.stat().st_size:,} bytes are no whole number of {dtype.name}")
        if tokens == 0:
            bad.append(f"{split}.bin is empty")
            continue
        seen, sha256 = count_ids(path, dtype, vocab, bad)
        judgement = compare(split, tokens, sha256, meta, bad)
        line = f"\n{split}.bin: {tokens:,} tokens"
        if eot is not None:
            ended = int(seen[eot]) if 0 <= eot < vocab else 0
            ends += ended
            line += f", {ended:,} documents ended"
        print(f"{line}, {np.count_nonzero(seen):,} different, sha256 {sha256[:12]}... {judgement}")
        print_ends(np.memmap(path, dtype, "r", shape=(tokens,)), eot, tokenizer)
        check_domains(split, tokens, meta, bad)
        histogram += seen
    if histogram.any():
        words = int(histogram.sum()) - ends
        if isinstance(meta.get("bytes"), int) and words:
            print(f"\n{meta['bytes'] / words:.3f} bytes/token over {meta['bytes']:,} bytes of text")
        print_frequent(histogram, args.top, tokenizer)
    if bad:
        print("\nBAD: " + "; ".join(bad))
    elif "splits" in meta:
        print("\nOK: sound")
    else:
        print("\nOK: sound, as far as can be told without a record of counts and checksums")
    sys.exit(1 if bad else 0)


def record_of(folder, bad):
    """The folder's record, or one that says GPT-2 where there is none or it can not be read."""
    try:
        meta = load_meta(folder)
        for key in ("domains", "val_domains"):
            for d in meta.get(key) or []:
                if not (isinstance(d, dict) and isinstance(d.get("name"), str)
                        and isinstance(d.get("start"), int) and isinstance(d.get("end"), int)):
                    raise ValueError(f"meta.json: the {key} can not be read, as {str(d)[:80]}")
        return meta or {"vocab_size": GPT2_VOCAB, "dtype": "uint16", "tokenizer": "gpt2", "eot": GPT2_VOCAB - 1}
    except (ValueError, TypeError) as e:  # TypeError: the domains are no list
        bad.append(str(e))
        return {"vocab_size": GPT2_VOCAB}


def tokenizer_of(meta, bad):
    """The tokenizer, or None: then ids are shown."""
    if meta.get("tokenizer") is None:
        return None
    try:
        tokenizer = get_tokenizer(meta["tokenizer"])
    except (ValueError, OSError, SystemExit) as e:
        print(f"no text shown: {e}")
        return None
    if tokenizer.vocab_size != meta["vocab_size"]:
        bad.append(f"meta.json: vocab_size {meta['vocab_size']}, but the tokenizer has {tokenizer.vocab_size}")
    return tokenizer


def print_record(folder, meta, dtype):
    tokenizer = meta.get("tokenizer")
    if isinstance(tokenizer, dict):
        tokenizer = tokenizer.get("type")
    beside = "no meta.json"
    for name in ("meta.pkl", "meta.json"):
        if (folder / name).is_file():
            beside = name if "splits" in meta else f"{name} without counts and checksums"
    print(f"{folder}: tokenizer {tokenizer}, vocabulary {meta['vocab_size']:,}, {dtype.name}, {beside}, "
          f"source {meta.get('source', 'unknown')}")


def count_ids(path, dtype, vocab, bad):
    """(how often each id is in a bin, int64 (vocab,), and the bin's sha256)."""
    sha256, seen, at = hashlib.sha256(), np.zeros(vocab, np.int64), 0
    with open(path, "rb") as f:
        while data := f.read(BLOCK * dtype.itemsize):
            sha256.update(data)
            ids = np.frombuffer(data[:len(data) // dtype.itemsize * dtype.itemsize], dtype)
            outside = np.flatnonzero(ids >= vocab)
            if len(outside) and not any("vocab_size is" in line and path.name in line for line in bad):
                bad.append(f"{path.name}: token {at + outside[0]:,} is {ids[outside[0]]}, vocab_size is {vocab}")
            seen += np.bincount(ids[ids < vocab], minlength=vocab)
            at += len(ids)
    return seen, sha256.hexdigest()


def compare(split, tokens, sha256, meta, bad):
    """A word on a bin's sha256 against the record."""
    if "splits" not in meta:
        return "not recorded"
    recorded = meta["splits"].get(split, {})
    if recorded.get("tokens") != tokens:
        bad.append(f"{split}.bin: {tokens:,} tokens, but meta.json says {recorded.get('tokens')}")
    elif recorded.get("sha256") != sha256:
        bad.append(f"{split}.bin: sha256 is {sha256}, but meta.json says {recorded.get('sha256')}")
    return "as recorded" if recorded.get("sha256") == sha256 else "WRONG"


def print_ends(tokens, eot, tokenizer):
    """The first and the last document of a bin; without ends of documents, its first and last tokens."""
    first, last = tokens[:BLOCK], tokens[-BLOCK:]
    ends = np.flatnonzero(first == eot) if eot is not None else []
    print("  first document: " + shown(tokenizer, first[:ends[0]] if len(ends) else first))
    ends = np.flatnonzero(last[:-1] == eot) if eot is not None else []
    print("  last document:  " + shown(tokenizer, last[ends[-1] + 1:] if len(ends) else last[-300:]))


def shown(tokenizer, ids, most=300):
    if tokenizer is None:
        return " ".join(map(str, ids[:50].tolist()))
    text = tokenizer.decode([i for i in ids[:most].tolist() if i < tokenizer.vocab_size])
    return repr(text[:most])[1:-1] + ("..." if len(ids) > most or len(text) > most else "")


def check_domains(split, tokens, meta, bad):
    at, domains = 0, meta.get("domains" if split == "train" else "val_domains") or []
    for d in domains:
        print(f"  {d['name']:<24} {d['start']:>16,} to {d['end']:>16,}  {(d['end'] - d['start']) / tokens:7.2%}")
        if d["start"] != at or d["end"] <= d["start"]:
            bad.append(f"{split}.bin: domain {d['name']} runs from {d['start']} to {d['end']}, expected from {at}")
        at = d["end"]
    if domains and at != tokens:
        bad.append(f"{split}.bin: the domains end at {at:,}, the file at {tokens:,}")


def print_frequent(histogram, top, tokenizer):
    print(f"most frequent of {np.count_nonzero(histogram):,} ids:")
    for i in np.argsort(-histogram, kind="stable")[:top]:
        if histogram[i]:
            text = shown(tokenizer, np.array([i])) if tokenizer else ""
            bar = "#" * max(1, round(40 * histogram[i] / histogram.max()))
            print(f"  {i:>6} {text:<16} {histogram[i]:>14,} {histogram[i] / histogram.sum():7.2%} {bar}")


if __name__ == "__main__":
    with printing():
        main()
