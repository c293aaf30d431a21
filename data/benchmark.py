"""The whole of prepare against tiktoken's own encode_ordinary_batch, on the same text and cores, in turns.

python data/benchmark.py FILES_OR_FOLDERS [--tokenizer=gpt2] [--workers=N] [--rounds=3]

The rival gets the documents read and lying in memory, and throws its tokens away; prepare starts Python, reads the
files, writes bins and meta.json. Above 1.00 prepare is the faster one.
"""
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tokenbins

if __name__ == "__main__":
    parser = tokenbins.options(__doc__, __file__)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    texts, name = [], args.tokenizer
    for _, _, _, text, last, _ in tokenbins.documents(tokenbins.local_files(args.paths), args):
        texts.append(text)
    tokenbins.get_tokenizer(name)  # now its files are in a cache
    import tiktoken
    rival = tiktoken.get_encoding("gpt2" if name == "r50k_base" else name)
    megabytes = sum(len(t.encode("utf-8", "replace")) for t in texts) / 1e6
    print(f"{len(texts):,} documents, {megabytes:,.1f} MB, {args.workers} cores")
    ratios = []
    for _ in range(args.rounds):
        begin = time.perf_counter()
        rival.encode_ordinary_batch(texts, num_threads=args.workers)
        theirs = megabytes / (time.perf_counter() - begin)
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            script = Path(__file__).resolve().parent / "local" / "prepare.py"
            subprocess.run([sys.executable, script, "--input", *args.paths, "--out_dir", folder, "--tokenizer", name,
                            "--workers", str(args.workers), "--text_key", args.text_key],
                           check=True, stdout=subprocess.DEVNULL)
            ours = megabytes / (time.perf_counter() - begin)
        ratios.append(ours / theirs)
        print(f"encode_ordinary_batch {theirs:.2f} MB/s, prepare {ours:.2f} MB/s, ratio {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {sorted(ratios)[len(ratios) // 2]:.2f}")
