"""Text -> tokens -> bins: what the prepare.py files share.

documents() reads files into pieces of text; tokenize() hands about 4 MB of them at a time to a process, which writes
their tokens as one chunk into a working folder; assemble() puts the chunks together into train.bin, val.bin and
meta.json. A chunk is there whole or not at all and depends on the input alone: a run that was killed goes on where it
stood, and the number of processes changes nothing in the output. Processes, not threads: tiktoken's threads hinder each
other, at two cores they take a quarter longer than two processes.
"""
import argparse
import codecs
import collections
import concurrent.futures
import contextlib
import hashlib
import io
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from configurator import fail, mute, tell
from data.bins import GOLDEN, hash64, load_meta, lock_folder, made_folder, write_file
from data.download import Unavailable, hub_files, tiktoken_files
from data.reading import KINDS, BadInput, counts, documents, kind_of, local_files, need

EOT = "<|endoftext|>"
TOKENIZERS = ("gpt2", "r50k_base", "cl100k_base", "o200k_base", "char", "byte")


# -----------------------------------------------------------------------------
# tokenizers

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
                raise ValueError(f"character {e.args[0]!r} is not among the {len(itos)} that this tokenizer knows: "
                                 "leave it out, or prepare with --tokenizer=byte, which knows all") from None

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
        encoding = load_tiktoken(spec)
        vocab_size, eot, decode = encoding.n_vocab, encoding.eot_token, encoding.decode

        def array(text):
            encode = getattr(encoding, "encode_to_numpy", encoding.encode)  # the newer one spares a list of Python ints
            return np.asarray(encode(text, disallowed_special=()), np.uint32)
    else:
        raise ValueError(f"unknown tokenizer {spec!r}")
    return Tokenizer(spec, vocab_size, eot, lambda text: array(text).tolist(), array, decode)


def load_tiktoken(name):
    tiktoken = need("tiktoken", f"the tokenizer {name}")
    own = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = str(tiktoken_files(name))
    try:
        return tiktoken.get_encoding("gpt2" if name == "r50k_base" else name)
    finally:
        del os.environ["TIKTOKEN_CACHE_DIR"]
        if own is not None:
            os.environ["TIKTOKEN_CACHE_DIR"] = own


# -----------------------------------------------------------------------------
# the command line

def one_line_parser(doc):
    """An argparse parser whose errors are one line. Abbreviations are off: later options may change their sense."""
    if sys.stdout:  # None where it is closed
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may hold what a terminal can not show
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message} (--help lists the options)")
    return parser


def folder_path(name):
    """For argparse: the path of a folder. An empty name, as of an unset shell variable, would mean this one."""
    if not name:
        raise argparse.ArgumentTypeError("the name of the folder is empty")
    return Path(name)


def options(doc, script, downloads=True, **defaults):
    """The command line that all but the Shakespeares have in common. `defaults` are those of the one script."""
    defaults = {"script": script, "default_val_fraction": 0.0005, "download_dir": None} | defaults
    parser = one_line_parser(doc)
    add = parser.add_argument
    add("--input", nargs="+", action="extend", metavar="PATH",
        help=f"files, or folders with {', '.join([*KINDS][:-1])} (a JSON object per line), each also .gz or .zst, "
             "and .parquet; a file with another ending is taken as text")
    add("--out_dir", type=folder_path,
        help=f"where the output goes ({'beside the script' if downloads else 'data/NAME'})")
    add("--overwrite", action="store_true", help="replace another finished dataset there")
    if downloads:
        add("--download_dir", type=folder_path, help="where downloads are kept (OUT_DIR/download)")
    add("--tokenizer", choices=TOKENIZERS, default="gpt2", help="(%(default)s)")
    add("--text_key", default="text", help="column or key of the text, `a.b` for a key within a key (text)")
    add_encoding(parser)
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


def add_encoding(parser):
    def text_encoding(name):
        try:
            "".encode(name)
            codecs.getincrementaldecoder(name)("count_and_replace").decode(b"a")
        except (LookupError, ValueError):
            raise argparse.ArgumentTypeError(f"Python knows no text encoding {name!r}") from None
        return codecs.lookup(name).name
    parser.add_argument("--encoding", type=text_encoding,
                        help="of text and JSON files without a byte order mark (utf-8)")


def check_options(args):
    for name, low, high in (("num_docs", 1, 2**63 - 1), ("val_docs", 1, 2**63 - 1), ("workers", 1, 1024),
                            ("chunk_mb", 1e-6, 1000), ("seed", 0, 2**63 - 1)):
        value = getattr(args, name)
        if value is not None and not value >= low:  # nor nan
            fail(f"--{name} {value}: must be at least {low}")
        if value is not None and value > high:
            fail(f"--{name} {value}: must be at most {high}")
    if args.val_docs and args.val_fraction is not None:
        fail("--val_fraction and --val_docs exclude each other")
    if args.val_docs and args.num_docs and args.val_docs >= args.num_docs:
        fail(f"--val_docs {args.val_docs}: of --num_docs {args.num_docs} some must be left for training")
    if args.val_fraction is not None and not 0 < args.val_fraction < 1:
        fail(f"--val_fraction {args.val_fraction}: must lie between 0 and 1")
    args.out_dir = (args.out_dir or Path(args.script).resolve().parent).absolute()
    args.download_dir = args.download_dir or args.out_dir / "download"
    args.val_fraction = args.val_fraction or args.default_val_fraction


def find_files(args, repo, places, suffix):
    """The files that are to be read, local or of the hub, with all that they need being there."""
    try:
        files = local_files(args.input, args) if args.input else hub_files(repo, places, suffix)
    except Unavailable as e:
        fail(f"{e}; or give local files with --input", 1)
    except OSError as e:
        fail(f"--input {e.filename}: {e.strerror}")
    for kind, packed in {kind_of(f["name"]) for f in files}:
        if kind == "parquet":
            need("pyarrow", "reading .parquet")
        if packed == ".zst":
            need("zstandard", "reading .zst")
    if args.tokenizer not in ("char", "byte"):  # loading the vocabulary takes the workers' time, not ours
        need("tiktoken", f"--tokenizer {args.tokenizer}")
    return files


def prepare(args, repo=None, places=(), suffix=".parquet", source=None):
    """Tokenizes args.input, or else files of the hub (download.hub_files says which) into args.out_dir. args: of
    options(); source: what meta.json says of the hub's files."""
    check_options(args)
    files = find_files(args, repo, places, suffix)
    # What decides on the chunks names their folder: other arguments never meet these, not even through a process that
    # outlived its killed parent. Split, seed and shuffle come later, so that they may change without tokenizing anew,
    # and --skip_bad goes on where a run without it stopped.
    facts = [1, [[f.get(k) for k in ("name", "path", "url", "size", "mtime", "sha256")] for f in files],
             args.tokenizer, args.text_key, args.domain_key, args.num_docs, args.skip_bad, args.chunk_mb]
    if args.encoding:
        facts.append(args.encoding)
    work = args.out_dir / f".prepare-{hashlib.sha256(json.dumps(facts[:6] + facts[7:]).encode()).hexdigest()[:16]}"
    facts += [args.val_fraction, args.val_docs, args.shuffle, args.seed]
    prepared_from = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    used = os.path.exists(args.out_dir)
    hold_folder(args.out_dir)
    try:
        there, tokens = finished(args.out_dir)
        same = there.get("prepared_from") == prepared_from
        if same and not (work / "val.out").exists():  # the last to leave its folder
            tell(f"nothing to do: {args.out_dir} holds this very dataset (delete its meta.json to prepare it again)",
                 sys.stdout)
            return
        if tokens and not same and not args.overwrite:
            refuse(args.out_dir, there, tokens)
        if args.tokenizer not in ("char", "byte"):
            tiktoken_files(args.tokenizer)  # here, since each worker would look for them on its own
        try:
            work.mkdir(exist_ok=True)
        except OSError as e:
            fail(f"--out_dir {args.out_dir}: {e.strerror}; name a folder that can be written")
        tokenize(files, work, args)
        assemble(work, args, {"source": list(args.input) if args.input else source, "prepared_from": prepared_from})
    except BadInput as e:
        shutil.rmtree(work, ignore_errors=True)
        fail(*e.args)
    except KeyboardInterrupt:
        fail("stopped; the same command goes on from here", 130)
    except concurrent.futures.BrokenExecutor:
        fail(f"a process was killed, perhaps for want of memory: go on with fewer --workers than {args.workers}", 1)
    except (RuntimeError, Unavailable) as e:
        fail(str(e), 1)
    except OSError as e:
        fail(f"{e.filename or args.out_dir}: {e.strerror or e}; mend that, and the same command goes on from here", 1)
    finally:
        for folder in (work,) if used else (work, args.out_dir):
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
    for leftover in args.out_dir.glob(".prepare-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def finished(out_dir):
    """(its record, its tokens) of the complete dataset in a folder, nanoGPT's too; ({}, 0) where there is none."""
    try:
        meta, tokens = load_meta(out_dir), 0
        itemsize = np.dtype(meta.get("dtype", "uint16")).itemsize
        for split in ("train", "val"):
            size = (out_dir / f"{split}.bin").stat().st_size
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


def hold_folder(out_dir):
    """Makes the output's folder where there is none, and keeps other prepares out of it."""
    try:
        with made_folder(out_dir):
            lock_folder(out_dir)
    except BlockingIOError:
        fail(f"--out_dir {out_dir}: another prepare.py is at work in it; wait for its end, or name another folder", 1)
    except OSError as e:
        if not os.path.isdir(out_dir):  # Path's own fails for a name that is too long
            fail(f"--out_dir {out_dir}: {e.strerror}; name a folder that can be written")


# -----------------------------------------------------------------------------
# text to chunks of tokens

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
        tell(f"going on after {done} chunks, {number:,} documents", sys.stdout)
    jobs = chunks(files, work, args, done, start, number)
    first = next(jobs)
    small = first["final"]  # done before a process has started
    jobs, tokens, begin = itertools.chain([first], jobs), 0, time.time()
    with progress_bar(first["done"], show=not small) as show:
        for share, number, n in written(jobs, 1 if small else args.workers):
            tokens += n
            show(share, f"{number:,} documents, {tokens / 1e6:,.1f}M tokens in this run, "
                        f"{tokens / (time.time() - begin) / 1e6:.2f}M tokens/s")
    seconds = max(time.time() - begin, 1e-3)
    tell(f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds / 1e6:.2f}M tokens/s", sys.stdout)


@contextlib.contextmanager
def progress_bar(first, show):
    """Gives a function show(share of the input read, text beside it) that moves a bar on stderr: on a terminal twice a
    second, in a file every 20 seconds. `first`: the share that a run before this one has done."""
    if show:
        try:
            from tqdm import tqdm
        except Exception:       # a broken one too
            tell("no progress is shown, for that needs the package tqdm: pip install tqdm", sys.stdout)
            show = False
    if not show or sys.stderr is None:      # None: it was closed at the start
        yield lambda share, text: None
        return
    every = 0.5 if sys.stderr.isatty() else 20
    with tqdm(total=100, initial=100 * first, mininterval=every, delay=every, leave=False, dynamic_ncols=True,
              bar_format="{percentage:5.1f}% {bar:20} {elapsed}, {remaining} left{postfix}") as bar:
        def move(share, text):
            bar.set_postfix_str(text, refresh=False)
            try:
                bar.update(max(0, 100 * share - bar.n))
            except OSError:     # a closed pipe, a full disk: no reason to stop
                mute(sys.stderr)
        yield move


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
            raise BadInput(f"--domain_key {args.domain_key}: more than 1,000 different values in {number + 1:,} "
                           "documents", 2)
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


def written(jobs, workers):
    """Has the chunks written by so many processes; yields (share of the input read, documents, tokens in the chunk)."""
    if workers == 1:
        for job in jobs:
            yield job["done"], job["number"], write_chunk(job)
        return
    context = multiprocessing.get_context("spawn")  # not forked: alike on every platform, and safe beside threads
    with concurrent.futures.ProcessPoolExecutor(workers, context, start_worker) as pool:
        running = {}

        def ready():
            for future in concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)[0]:
                yield (*running.pop(future), future.result())
        try:
            for job in jobs:
                with without_ctrl_c():
                    future = pool.submit(write_chunk, job)
                running[future] = job["done"], job["number"]
                if len(running) > 2 * workers:  # the bound on memory
                    yield from ready()
            while running:
                yield from ready()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextlib.contextmanager
def without_ctrl_c():
    """A process that is started in here never gets ctrl-C, not even before its first line; its parent does, later."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def start_worker():
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
        if spec not in _tokenizers:
            _tokenizers[spec] = get_tokenizer(spec)
        tokenizer = _tokenizers[spec]
        vocab_size, eot = tokenizer.vocab_size, tokenizer.eot
    dtype = token_dtype(vocab_size)
    tokens, lengths, size = [np.zeros(0, dtype)], [], 0
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
    tokens = np.concatenate(tokens)
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
# chunks to a dataset

def token_dtype(vocab_size):
    return "<u2" if vocab_size <= 65536 else "<u4"


def document_keys(seed, document):
    """A pseudo-random uint64 for each document number, a pure function of both: no library's generator, which a later
    version may change. What splitmix64 gives after `document` steps from a start that depends on the seed."""
    start = np.uint64((seed * 0xD1342543DE82EF95 - GOLDEN) % 2**64)
    return hash64(document.astype(np.uint64) * np.uint64(GOLDEN) + start)


def split_sizes(documents, fraction, total):
    """How many of each domain's documents are for validation: the fraction, or its part of a total; at least one and
    not all, so that both splits hold every domain that has two documents."""
    documents = np.asarray(documents)
    aim = documents * fraction if total is None else documents * (total / documents.sum())
    some = np.minimum(np.maximum(np.round(aim), 1), documents - 1).astype(int)
    while total is not None and some.sum() != total:  # rounding, and domains that are too small
        step = 1 if some.sum() < total else -1
        if step > 0:
            able = some < documents - 1
        else:
            able = some > min(1, some.max() - 1)    # a domain's only one goes when none has more
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
    if not n_documents:
        raise BadInput("there is no text in the input" +
                       "".join(f", {n} {k.replace('_', ' ')}" for k, n in totals.items()), 1)
    chunk_dtype, spec, table = np.dtype(token_dtype(vocab_size)), args.tokenizer, None
    if spec == "char":
        itos = [chr(c) for c in sorted(characters - {eot})] + [EOT]
        table = np.zeros(vocab_size, np.uint32)  # code point -> id
        table[[*map(ord, itos[:-1]), eot]] = np.arange(len(itos))
        spec, vocab_size, eot = {"type": "char", "itos": itos}, len(itos), len(itos) - 1
    dtype = token_dtype(vocab_size)

    names = sorted(domain_documents)
    for_val = split_sizes([domain_documents[d] for d in names], args.val_fraction, args.val_docs)
    problem = None
    if args.val_docs and args.val_docs >= n_documents:
        problem = f"there are {n_documents} documents, of which some must be left for training"
    elif args.val_docs and sum(for_val) != args.val_docs:
        problem = f"only {sum(for_val)} can be had if every domain keeps one for training"
    if problem and len(chunk_files) > 1:
        fail(f"--val_docs {args.val_docs}: {problem}")  # another --val_docs can use the chunks
    if problem:  # a single one is made anew in a second
        raise BadInput(f"--val_docs {args.val_docs}: {problem}", 2)
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
        raise BadInput(f"train.bin would get {out['train']['tokens']} tokens and val.bin {out['val']['tokens']}, each "
                       "needs two: more text, or another --val_fraction", 1)
    meta = {"vocab_size": vocab_size, "tokenizer": spec, "eot": eot, "documents": n_documents, "bytes": size,
            **totals, **facts}
    if args.domain_key:
        meta.update(domains=out["train"]["domains"], val_domains=out["val"]["domains"])
    publish(args.out_dir, meta, {s: (work / f"{s}.out", {"tokens": o["tokens"], "documents": o["documents"],
                                                         "sha256": o["sha256"].hexdigest()}) for s, o in out.items()})


def domain_rows(chunk_files, name):
    """Where the tokens of a domain are, four arrays with an entry for each document, or piece of one, in the order of
    the input: its chunk, the first of its tokens in there, their number, and the document."""
    found = []
    for c, path in enumerate(chunk_files):
        with np.load(path) as index:
            domains, rows, length = index["domains"].tolist(), index["rows"], index["length"]
            if name in domains:
                at = domains.index(name)
                these = slice(int(rows[:at].sum()), int(rows[:at + 1].sum()))
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
        tell(f"{split}.bin: {has['tokens']:,} tokens", sys.stdout)
    tell(f"vocabulary {meta['vocab_size']:,}, {meta['dtype']}, {meta['bytes']:,} bytes of text, in {out_dir}",
         sys.stdout)
    for key, what in (("invalid_bytes", "bytes were no text in the files' encoding and became U+FFFD"),
                      ("empty_documents", "empty documents were left out"), ("bad_lines", "bad lines were left out")):
        if meta.get(key):
            tell(f"{meta[key]:,} {what}", sys.stdout)
