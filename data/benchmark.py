"""The whole of prepare against tiktoken's own encode_ordinary_batch, on the same text and cores, in turns.

python data/benchmark.py FILES_OR_FOLDERS [--tokenizer=gpt2] [--workers=N] [--rounds=3]

The rival gets the documents read and lying in memory, and throws its tokens away; prepare starts Python, reads the
files, writes bins and meta.json. Above 1.00 prepare is the faster one.
"""
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
from data import corpus

if __name__ == "__main__":
    parser = corpus.one_line_parser(__doc__)
    parser.add_argument("paths", nargs="+", help="what prepare.py takes as --input")
    parser.add_argument("--tokenizer", choices=corpus.TOKENIZERS[:4], default="gpt2", help="(gpt2)")
    parser.add_argument("--text_key", default="text", help="column or key of the text (text)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes, and threads of the rival (all)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.set_defaults(domain_key=None, num_docs=None, skip_bad=False)  # what documents() asks for beside these
    args = parser.parse_args()
    if min(args.workers, args.rounds) < 1:
        parser.error("--workers and --rounds must be at least 1")
    name = args.tokenizer
    texts = [text for _, _, _, text, _, _ in corpus.documents(corpus.local_files(args.paths), args)]
    try:
        corpus.get_tokenizer(name)  # now its files are in a cache
    except OSError as e:
        corpus.fail(str(e), 1)
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
            done = subprocess.run([sys.executable, script, "--input", *args.paths, "--out_dir", folder, "--tokenizer",
                                   name, "--workers", str(args.workers), "--text_key", args.text_key],
                                  stdout=subprocess.DEVNULL)
            ours = megabytes / (time.perf_counter() - begin)
        if done.returncode:  # it has said why
            sys.exit(done.returncode)
        ratios.append(ours / theirs)
        print(f"encode_ordinary_batch {theirs:.2f} MB/s, prepare {ours:.2f} MB/s, ratio {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {sorted(ratios)[len(ratios) // 2]:.2f}")
