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
from data.bins import find_folder, load_meta
from data.corpus import get_tokenizer
from scripts.common import printing

BLOCK = 1 << 22  # tokens read at a time, so that memory does not grow with the file


def show(tokenizer, ids, most=300):
    if tokenizer is None:
        return " ".join(map(str, ids[:50].tolist()))
    text = tokenizer.decode([i for i in ids[:most].tolist() if i < tokenizer.vocab_size])
    return repr(text[:most])[1:-1] + ("..." if len(ids) > most or len(text) > most else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: sys.exit(print(f"inspect_data.py: {message}", file=sys.stderr) or 2)
    parser.add_argument("name", help="a folder in data/, or a path")
    parser.add_argument("--top", type=int, default=10, help="how many of the most frequent tokens to list")
    args = parser.parse_args()
    if args.top < 1:
        parser.error(f"--top={args.top}: must be at least 1")
    folder = find_folder(args.name)
    if not folder.is_dir():
        has = sorted(p.parent.name for p in (ROOT / "data").glob("*/train.bin"))
        parser.error(f"no folder data/{args.name} nor {args.name}; prepared in data: {', '.join(has) or 'none'}")
    bad, tokenizer = [], None
    try:
        meta = load_meta(folder) or {"vocab_size": 50257, "dtype": "uint16", "tokenizer": "gpt2", "eot": 50256}
        for d in meta.get("domains", []) + meta.get("val_domains", []):
            d["name"], d["start"] + d["end"]
    except (ValueError, LookupError, TypeError) as e:
        meta, bad = {}, [str(e) if isinstance(e, ValueError) else f"meta.json: the domains can not be read ({e!r})"]
    if meta.get("tokenizer") is not None:
        try:
            tokenizer = get_tokenizer(meta["tokenizer"])
        except (ValueError, OSError, SystemExit) as e:
            print(f"no text shown: {e}")
    vocab, dtype = meta.get("vocab_size", 50257), np.dtype("<u4" if meta.get("dtype") == "uint32" else "<u2")
    eot, has_record = meta.get("eot"), "splits" in meta
    kind, found = meta.get("tokenizer"), [n for n in ("meta.json", "meta.pkl") if (folder / n).is_file()]
    beside = found[0] + " without counts and checksums" * (not has_record) if found else "no meta.json"
    print(f"{folder}: tokenizer {kind.get('type') if isinstance(kind, dict) else kind}, vocabulary {vocab:,}, "
          f"{dtype.name}, {beside}, source {meta.get('source', 'unknown')}")
    if tokenizer and tokenizer.vocab_size != vocab:
        bad.append(f"meta.json: vocab_size {vocab}, but the tokenizer has {tokenizer.vocab_size}")

    histogram, all_tokens, all_eot = np.zeros(vocab, np.int64), 0, 0
    for split in ("train", "val"):
        path = folder / f"{split}.bin"
        if not path.is_file():
            bad.append(f"{split}.bin is missing")
            continue
        size = path.stat().st_size
        n, record = size // dtype.itemsize, meta.get("splits", {}).get(split, {})
        if size % dtype.itemsize:
            bad.append(f"{split}.bin: {size:,} bytes are no whole number of {dtype.name}")
        if n == 0:
            bad.append(f"{split}.bin is empty")
            continue
        sha256, seen, outside = hashlib.sha256(), np.zeros(vocab, np.int64), 0
        with open(path, "rb") as f:
            while data := f.read(BLOCK * dtype.itemsize):
                sha256.update(data)
                ids = np.frombuffer(data[:len(data) // dtype.itemsize * dtype.itemsize], dtype)
                if len(ids) and int(ids.max()) >= vocab:
                    if not outside:
                        at = (f.tell() - len(data)) // dtype.itemsize + int(np.argmax(ids >= vocab))
                        bad.append(f"{split}.bin: token {at:,} is {ids[ids >= vocab][0]}, vocab_size is {vocab}")
                    outside += 1
                    ids = ids[ids < vocab]
                seen += np.bincount(ids, minlength=vocab)
        if has_record:
            if record.get("tokens") != n:
                bad.append(f"{split}.bin: {n:,} tokens, but meta.json says {record.get('tokens')}")
            elif record.get("sha256") != sha256.hexdigest():
                bad.append(f"{split}.bin: sha256 is {sha256.hexdigest()}, but meta.json says {record.get('sha256')}")
        ends = int(seen[eot]) if eot is not None and eot < vocab else 0
        print(f"\n{split}.bin: {n:,} tokens" + (f", {ends:,} documents ended" if eot is not None else "")
              + f", {np.count_nonzero(seen):,} different, sha256 {sha256.hexdigest()[:12]}... "
             + ("as recorded" if record.get("sha256") == sha256.hexdigest() else "WRONG" if record else "not recorded"))
        tokens = np.memmap(path, dtype, "r", shape=(n,))
        near, last = tokens[:BLOCK], tokens[-BLOCK:]
        cut = np.flatnonzero(near == eot)[:1] if eot is not None else []
        print("  first document: " + show(tokenizer, near[:cut[0]] if len(cut) else near))
        cuts = np.flatnonzero(last[:-1] == eot)[-1:] if eot is not None else []
        print("  last document:  " + show(tokenizer, last[cuts[0] + 1:] if len(cuts) else last[-300:]))
        domains = meta.get("domains" if split == "train" else "val_domains") or []
        at = 0
        for d in domains:
            print(f"  {d['name']:<24} {d['start']:>16,} to {d['end']:>16,}  {(d['end'] - d['start']) / n:7.2%}")
            if d["start"] != at or d["end"] <= d["start"]:
                bad.append(f"{split}.bin: domain {d['name']} runs from {d['start']} to {d['end']}, expected from {at}")
            at = d["end"]
        if domains and at != n:
            bad.append(f"{split}.bin: the domains end at {at:,}, the file at {n:,}")
        histogram += seen
        all_tokens, all_eot = all_tokens + n, all_eot + ends

    if all_tokens:
        if "bytes" in meta and all_tokens > all_eot:
            print(f"\n{meta['bytes'] / (all_tokens - all_eot):.3f} bytes/token over {meta['bytes']:,} bytes of text")
        print(f"most frequent of {np.count_nonzero(histogram):,} ids:")
        width = max(1, int(histogram.max()))
        for i in np.argsort(-histogram, kind="stable")[:args.top]:
            if histogram[i]:
                text = show(tokenizer, np.array([i])) if tokenizer else ""
                print(f"  {i:>6} {text:<16} {histogram[i]:>14,} {histogram[i] / all_tokens:7.2%} "
                      f"{'#' * max(1, round(40 * histogram[i] / width))}")
    print("\n" + ("BAD: " + "; ".join(bad) if bad else "OK: sound" + ("" if has_record else ", as far as can be told "
          "without a record of counts and checksums")))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    with printing():
        main()
