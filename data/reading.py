"""Files -> text: what data/corpus.py reads. A record of a file is a line, a row, or the whole of a text file.

documents() at the end gives all of it piece by piece, from any place on: a run which was killed goes on where it stood.
"""
import codecs
import collections
import collections.abc
import gzip
import importlib
import io
import json
import os
import re
import zlib
from pathlib import Path

import numpy as np

from configurator import fail
from data.download import fetch

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


class BadInput(Exception):
    """(message, exit code). The input or an argument must change, so that no later run can use what is tokenized."""


def need(module, purpose):
    """The module of an optional package; one line and the end of the program if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        fail(f"{purpose} needs the package {package}: pip install {package}")


def kind_of(name):
    """("txt" | "jsonl" | "parquet", "" | ".gz" | ".zst") by the end of a file's name; (None, "") for others."""
    stem, packed = name, Path(name).suffix
    if packed in (".gz", ".zst"):
        stem = name[:-len(packed)]
    else:
        packed = ""
    kind = KINDS.get(Path(stem).suffix)
    if kind is None or (kind == "parquet" and packed):
        return None, ""
    return kind, packed


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
    files = []
    for path in found:
        stat = path.stat()
        files.append({"name": str(path), "path": str(path.resolve()), "size": stat.st_size, "mtime": stat.st_mtime_ns})
        if not kind_of(path.name)[0]:
            with open(path, "rb") as f:
                if b"\0" in f.read(4096):
                    fail(f"--input {path}: not a text file, and its name ends in none of {', '.join(KINDS)}")
    return files


def unpacked(raw, packed):
    """The stream of an open file without its compression, "" | ".gz" | ".zst"."""
    if packed == ".gz":
        return gzip.open(raw)
    if packed == ".zst":
        check_frames(raw)
        decompressor = need("zstandard", "reading .zst").ZstdDecompressor(max_window_size=1 << 31)
        return io.BufferedReader(decompressor.stream_reader(raw, read_across_frames=True), 1 << 20)
    return raw


def check_frames(raw):
    """EOFError if a .zst file ends within a frame, where zstandard's reader just stops. Goes from block to block by
    their headers (RFC 8878, 3.1.1) without unpacking them."""
    zstandard = need("zstandard", "reading .zst")
    size, at = os.fstat(raw.fileno()).st_size, 0
    while at < size:
        raw.seek(at)
        start = raw.read(18)  # the longest header of a frame
        if start[1:4] == b"\x2a\x4d\x18":  # a frame of other data: its length follows
            at += 8 + int.from_bytes(start[4:8], "little")
            continue
        at += zstandard.frame_header_size(start)
        last = False
        while not last and at < size:
            raw.seek(at)
            header = int.from_bytes(raw.read(3), "little")  # 1 bit: the last block? 2 bits: its kind; the rest: length
            last, kind, length = header & 1, header >> 1 & 3, header >> 3
            at += 3 + (1 if kind == 1 else length)  # kind 1 is one byte repeated
        at += 0 if last else 1  # no block, or none that is the last: beyond the end
        at += 4 if zstandard.get_frame_parameters(start).has_checksum else 0
    if at > size:
        raise EOFError("they end within a frame")
    raw.seek(0)


def pick(row, key, where):
    """row["a"]["b"] for the key "a.b"; where it is missing, None, or BadInput if `where` is given."""
    for name in key.split("."):
        if not isinstance(row, dict) or name not in row:
            if where:
                has = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                raise BadInput(f"{where}: no {name!r} here, only {has or 'nothing'}; "
                               "see --text_key and --domain_key", 2)
            return None
        row = row[name]
    return row


def domain_of(row, i, file, args):
    """The domain of record i. The first must have one: a misspelt key shows before hours of work."""
    if not args.domain_key:
        return ""
    domain = pick(row, args.domain_key, f"{file['name']}, first record" if i == 0 else None)
    return "unknown" if domain is None else str(domain)


def records(file, skip, args):
    """Yields (number in the file, domain, text, share of the file read) from the record `skip` on. text: a str, bytes,
    None, or an iterator over parts of it. A text file is one record, and its domain is the name of its folder."""
    kind, packed = kind_of(file["name"])
    if kind == "parquet":
        yield from parquet_rows(file, skip, args)
        return
    with open(file["path"], "rb") as raw, unpacked(raw, packed) as stream:
        if kind == "jsonl":
            for i, row in json_lines(stream, file["name"], skip, args):
                text = pick(row, args.text_key, f"{file['name']} line {i + 1}")
                yield i, domain_of(row, i, file, args), text, raw.tell() / max(1, file["size"])
        elif skip == 0:
            yield 0, Path(file["path"]).parent.name if args.domain_key else "", text_parts(stream), 0.0


def parquet_rows(file, skip, args):
    pyarrow, parquet = need("pyarrow", "reading .parquet"), need("pyarrow.parquet", "reading .parquet")
    with parquet.ParquetFile(file["path"]) as table:
        names = table.schema_arrow.names
        if args.text_key.split(".")[0] not in names:
            raise BadInput(f"{file['name']}: no column {args.text_key!r}, only {', '.join(names)}; see --text_key", 2)
        keys = [key for key in (args.text_key, args.domain_key) if key]
        i, total = 0, max(1, table.metadata.num_rows)
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if i + rows <= skip:
                i += rows
                continue
            for batch in table.iter_batches(256, row_groups=[group], columns=keys):
                if args.text_key in batch.schema.names:  # as bytes: nothing has checked that they are UTF-8
                    at = batch.schema.names.index(args.text_key)
                    batch = batch.set_column(at, args.text_key, batch.column(at).cast(pyarrow.large_binary()))
                for row in batch.to_pylist():
                    if i >= skip:
                        text = pick(row, args.text_key, f"{file['name']} row {i + 1}")
                        yield i, domain_of(row, i, file, args), text, i / total
                    i += 1


def json_lines(stream, name, skip, args):
    """Yields (number of the line, its object) from the line `skip` on."""
    any_good = skip > 0
    for i, line in enumerate(stream):
        if i < skip or not line.strip():
            continue
        if i == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            row = json.loads(line.decode("utf-8", "count_and_replace"))
            problem = None if isinstance(row, dict) else f"but a {type(row).__name__}"
        except ValueError as e:
            problem = str(e)
        if problem is None:
            any_good = True
            yield i, row
        elif args.skip_bad:
            counts["bad_lines"] += 1
        else:  # the first of its file may well be the first of an indented one
            advice = "a .jsonl or .json file is read line by line, each line one whole object"
            if any_good:
                advice = "mend it, or pass over such lines with --skip_bad"
            fail(f"{name} line {i + 1}: not a JSON object ({problem}); {advice}", 1)


def text_parts(stream):
    """Yields a text file's text in parts, CRLF as LF; UTF-8 with or without BOM, or UTF-16 with one."""
    start = stream.read(1 << 20)
    code = "utf-16" if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(code)("count_and_replace"), translate=True)
    while start:
        yield decoder.decode(start)
        start = stream.read(1 << 20)
    yield decoder.decode(b"", final=True)


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
        blanks = BLANKS.search(rest, 0, min(end + 2, len(rest)))
        if blanks:
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
            path = args.download_dir / file["name"]
            file = {**file, "path": str(path)}
            if not path.is_file() or path.stat().st_size != file["size"]:
                fetch(file, path)
        try:
            for record, domain, text, share in records(file, start[1] if i == start[0] else 0, args):
                if isinstance(text, bytes):
                    text = text.decode("utf-8", "count_and_replace")
                if text is None or (isinstance(text, str) and not text.strip()):
                    counts["empty_documents"] += 1
                    continue
                if not isinstance(text, (str, collections.abc.Iterator)):
                    found = type(text).__name__
                    raise BadInput(f"{file['name']} record {record + 1}: {args.text_key!r} is {found}, not text", 2)
                done = (sizes[i] + share * file["size"]) / max(1, sizes[-1])
                waiting, n = "", 0  # whether a piece is the last shows when no other comes
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
            raise BadInput(f"{file['name']}: the compressed data are damaged ({e})", 1) from None
        except Exception as e:  # each of the optional packages has errors of its own
            if type(e).__module__.split(".")[0] in ("pyarrow", "zstandard", "gzip"):
                fail(f"{file['name']}: can not be read ({str(e).splitlines()[0]})", 1)  # perhaps for want of memory
            raise
