"""Files -> text: what data/corpus.py reads. A record of a file is a line, a row, or the whole of a text file.

documents() at the end gives all of it piece by piece, from any place on: a run which was killed goes on where it stood.
"""
import codecs
import collections
import collections.abc
import contextlib
import gzip
import importlib
import io
import json
import os
import re
import sys
import zlib
from pathlib import Path

import numpy as np

from configurator import broken, fail, tell
from data.download import fetch

KINDS = {".txt": "txt", ".md": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
PIECE = 1 << 20  # characters; a longer document is tokenized in pieces
# A document is cut only where no token of any of the tokenizers can lie across: before a single space between two other
# characters, so that the tokens are those of the whole. A very long run of blanks is cut before its last one, which for
# GPT-2 begins a new token as well; tiktoken can not take a million of them at once.
CUT = re.compile(r"(?<=\S)(?= \S)")
BLANKS = re.compile(r"(?<!\s)\s{100000,}(?=\s\S)")
# What a file may begin with, in this order: UTF-32's mark begins as UTF-16's does.
MARKS = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
         (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
counts = collections.Counter()  # of what was met on the way: empty documents, invalid bytes, bad lines
here = collections.Counter()  # of the present file: bytes read, bytes that are no text


def _count_and_replace(error):
    counts["invalid_bytes"] += error.end - error.start
    here["wrong"] += error.end - error.start
    return "\ufffd", error.end


codecs.register_error("count_and_replace", _count_and_replace)


class BadInput(Exception):
    """(message, exit code). The input or an argument must change, so that no later run can use what is tokenized."""


def need(module, purpose):
    """The module of an optional package; one line and the end of the program if it is missing or broken."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        package = module.split(".")[0]
        fail(f"{purpose} needs the package {package}: pip install {package}{broken(error)}")


def kind_of(name):
    """("txt" | "jsonl" | "parquet", "" | ".gz" | ".zst") by the end of a file's name; (None, "") for others."""
    name = name.lower()
    stem, packed = name, Path(name).suffix
    if packed in (".gz", ".zst"):
        stem = name[:-len(packed)]
    else:
        packed = ""
    kind = KINDS.get(Path(stem).suffix)
    if kind is None or (kind == "parquet" and packed):
        return None, ""
    return kind, packed


def local_files(paths, args):
    """The given files, and those in and below the given folders in the order of their names, each once, as [{"name",
    "path", "size", "mtime"}]. Says what it passes over."""
    files, seen, passed = [], set(), collections.defaultdict(list)
    for path in map(Path, paths):
        if path.is_dir():
            found = files_below(path, args.out_dir, passed)
        elif path.is_file():
            found = [path]
        elif path.exists():
            fail(f"--input {path}: not a plain file; write its content into one")
        else:
            fail(f"--input {path}: no such file or folder")
        if not found:
            fail(f"--input {path}: no {', '.join(KINDS)} in this folder (.gz and .zst of these are fine too)" +
                 "".join(f"; {line}" for line in passed_over(passed)))
        for p in found:
            stat, real = p.stat(), str(p.resolve())
            same = (stat.st_dev, stat.st_ino) if stat.st_ino else real
            if same in seen:
                passed["given twice, or another name of a file that is read"].append(p)
                continue
            seen.add(same)
            files.append({"name": str(p), "path": real, "size": stat.st_size, "mtime": stat.st_mtime_ns})
            if not kind_of(p.name)[0] and not args.encoding:
                with open(p, "rb") as f:
                    start = f.read(4096)
                if b"\0" in start and encoding_of(start, None) == "utf-8":
                    fail(f"--input {p}: not a text file, and its name ends in none of {', '.join(KINDS)}")
    for line in passed_over(passed):
        tell(line, sys.stdout)
    return files


def passed_over(passed):
    return [f"passed over {len(paths):,} ({reason}), the first: {paths[0]}" for reason, paths in passed.items()]


def files_below(folder, out_dir, passed):
    """The files to read in and below a folder, links to folders followed, in the order of their names; what is passed
    over goes into `passed`, {reason: [path]}."""
    found, folders, been, out_dir = [], [folder], set(), os.path.realpath(out_dir)

    def unreadable(error):
        passed["a folder that can not be read"].append(error.filename)
    for top in folders:  # it grows: links to folders come after the folders themselves
        for at, subfolders, names in os.walk(top, onerror=unreadable):
            real = os.path.realpath(at)
            if real in been:
                passed["a link to a folder that is read already"].append(at)
                subfolders.clear()
                continue
            been.add(real)
            for path in [Path(at, name) for name in subfolders]:
                if path.name.startswith("."):
                    passed["a hidden folder"].append(path)
                    subfolders.remove(path.name)
                elif path.is_symlink():
                    folders.append(path)
            for path in [Path(at, name) for name in names]:
                if path.name.startswith("."):
                    passed["a hidden file"].append(path)
                elif not kind_of(path.name)[0]:
                    passed["another ending than " + ", ".join(KINDS)].append(path)
                elif not path.is_file():
                    passed["a broken link or no plain file"].append(path)
                elif path.name == "meta.json" and (real == out_dir or Path(at, "train.bin").exists()):
                    passed["the record of a prepared dataset"].append(path)
                else:
                    found.append(path)
    return sorted(found, key=lambda p: p.parts)


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
            domain = Path(file["path"]).parent.name if args.domain_key else ""
            yield 0, domain, text_parts(stream, file["name"], args), 0.0


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
    any_good, code = skip > 0, encoding_of(stream.peek(4), args.encoding)
    if len("\n".encode(code)) > 1:  # UTF-16 or UTF-32: Python's reader finds the lines' ends; it must be sound
        stream = io.TextIOWrapper(stream, code, newline="\n")
    for i, line in enumerate(stream):
        if i < skip or not line.strip():
            continue
        if i == 0 and isinstance(line, bytes):
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            row = json.loads(line if isinstance(line, str) else decoded(line, code))
            problem = None if isinstance(row, dict) else f"but a {type(row).__name__}"
        except ValueError as e:
            problem = str(e)
            if "\0" in str(line[:200]) or b"\0" in line[:200]:
                problem += "; zero bytes: perhaps UTF-16, see --encoding"
        except RecursionError:
            problem = "nested too deeply"
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


def encoding_of(start, encoding):
    """The encoding of a file: what its first bytes `start` mark, else the given one, else UTF-8."""
    for mark, marked in MARKS:
        if start.startswith(mark):
            return marked
    return encoding or "utf-8"


def decoded(data, code="utf-8"):
    here["read"] += len(data)
    return data.decode(code, "count_and_replace")


PACKED = {b"PK\3\4": "zip", b"\x1f\x8b": "gzip", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstandard", b"BZh": "bzip2",
          b"PAR1": "parquet"}       # how files of these kinds begin


def text_parts(stream, name, args):
    """Yields a text file's text in parts, CRLF as LF, without a mark at its beginning."""
    start = stream.read(1 << 20)
    packed = next((kind for mark, kind in PACKED.items() if start.startswith(mark)), None)
    if packed and args.encoding is None:
        raise BadInput(f"{name}: no text but {packed} data: unpack it, or give the file the ending that says so", 1)
    code = encoding_of(start, args.encoding)
    if codecs.lookup(code).name == "utf-8":
        code = "utf-8-sig"
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(code)("count_and_replace"), translate=True)
    while start:
        part = decoder.decode(start)
        here["read"] += len(start)
        here["wrong"] += part.count("\0")  # as UTF-16 has it
        check_encoding(name, args)
        yield part
        start = stream.read(1 << 20)
    yield decoder.decode(b"", final=True)


def check_encoding(name, args):
    """BadInput if more than one byte in a thousand (and 16) of the present file so far is no text in its encoding, and
    the user has named none."""
    if args.encoding is None and here["wrong"] > max(16, here["read"] / 1000):
        raise BadInput(f"{name}: {here['wrong']:,} of {here['read']:,} bytes are no UTF-8 text; name its encoding "
                       "(--encoding=cp1252, gb18030, utf-16-le), or take it as it is with --encoding=utf-8", 1)


def read_text(path, args):
    """All of a text file, packed or not."""
    here.clear()
    with plain_errors(path), open(path, "rb") as raw, unpacked(raw, kind_of(str(path))[1]) as stream:
        return "".join(text_parts(stream, path, args))


@contextlib.contextmanager
def plain_errors(name):
    """Around the reading of a file: what its content can raise becomes one line."""
    try:
        yield
    except (EOFError, zlib.error) as e:
        raise BadInput(f"{name}: the compressed data are damaged ({e})", 1) from None
    except UnicodeDecodeError as e:
        raise BadInput(f"{name}: {e}; see --encoding", 1) from None
    except (RecursionError, OverflowError) as e:
        raise BadInput(f"{name}: can not be read ({type(e).__name__}: {e})", 1) from None
    except MemoryError:
        fail(f"{name}: it takes more memory than there is", 1)
    except Exception as e:  # each of the optional packages has errors of its own
        if type(e).__module__.split(".")[0] in ("pyarrow", "zstandard", "gzip"):
            fail(f"{name}: can not be read ({str(e).splitlines()[0]})", 1)  # perhaps for want of memory
        raise


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
        here.clear()
        with plain_errors(file["name"]):
            for record, domain, text, share in records(file, start[1] if i == start[0] else 0, args):
                if isinstance(text, bytes):
                    text = decoded(text)
                if here["read"] > 1 << 20:  # before that, a few bad bytes may be all there are
                    check_encoding(file["name"], args)
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
                if number + 1 == args.num_docs:
                    check_encoding(file["name"], args)
                yield (i, record + 1, 0), number, domain, waiting, True, done
                number += 1
                if number == args.num_docs:
                    return
            check_encoding(file["name"], args)
