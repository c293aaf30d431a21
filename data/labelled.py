"""Files with a label and a text a row, in CSV, TSV or JSONL: what scripts/classify.py reads and prepare.py files write.

Needs Python's own library alone. Text is UTF-8. In CSV and TSV a field that holds the separator, a quote or a line
break stands in double quotes, and a quote in it is doubled. In JSONL a line is an object.
"""
import csv
import io
import itertools
import json
import os
import sys
from pathlib import Path

from configurator import tell
from data.bins import made_folder, read_file, write_file

KINDS = {".csv": ",", ".tsv": "\t", ".jsonl": None}  # how a file's name ends: what separates its columns
SPLITS = "train", "val", "test"
MOST_LABELS = 1000


def read_dataset(folder, label_column="", text_column=""):
    """
    {split: (path, labels, texts, lines)} of a folder with the files train, val and perhaps test; the rest is as
    read_labelled gives it. ValueError (one line) if train or val is missing, a file is there twice, a row is bad, all
    of train has one label or there are over 1,000, or another file has a label that train has not. stderr says which
    tables have no header.
    """
    splits = {}
    for split in SPLITS:
        found = [path for path in sorted(Path(folder).glob("*"))      # TRAIN.CSV too
                 if path.stem.lower() == split and path.suffix.lower() in KINDS and path.is_file()]
        if len(found) > 1:
            raise ValueError(f"{found[0]} and {found[1].name}: which one? Move the other away")
        if not found and split != "test":
            raise ValueError(f"no {split}.csv, .tsv or .jsonl in {folder}: run its prepare.py, such as "
                             "data/shakespeare_genre/prepare.py, or name another dataset")
        if found:
            splits[split] = found[0], *read_labelled(found[0], label_column, text_column)
            is_table, first_line = found[0].suffix.lower() != ".jsonl", splits[split][3][0]
            if is_table and first_line == 1 and os.environ.get("LOCAL_RANK", "0") == "0":   # one rank of a machine
                tell(f"{found[0]}: no header: the first row is data, its first column the label", sys.stderr)
    path, labels, _, _ = splits["train"]
    known = sorted(set(labels))
    if len(known) > MOST_LABELS:
        raise ValueError(f"{path}: {len(known):,} labels in {len(labels):,} rows, and at most {MOST_LABELS:,} are "
                         "taken: is that column a text or an id? See label_column")
    if len(known) == 1:
        raise ValueError(f"{path}: all rows have the label {known[0]!r}, so there is nothing to learn")
    known_set = set(known)
    for path, labels, _, lines in splits.values():
        for label, line in zip(labels, lines):
            if label not in known_set:
                raise ValueError(f"{path} line {line}: label {label!r:.80} is none of train's: {listed(known)}")
    return splits


def listed(names):
    """Names for an error line, cut short."""
    text = ", ".join(names)
    return text if len(text) <= 200 else f"{text[:200]}..."


def decode(content, name):
    """Bytes of UTF-8, with a byte order mark or without, as str. ValueError (one line) with the line of the first bad
    byte."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = e.object[:e.start].count(b"\n") + 1
        raise ValueError(f"{name} line {line}: byte 0x{e.object[e.start]:02x} is no UTF-8; save it as UTF-8") from None


def read_labelled(path, label_column="", text_column=""):
    """
    The rows of a file, blank lines left out: (labels, texts, lines), lists of str, str and int, the line where a row
    begins, from 1. The columns, or keys in JSONL, are "label" and "text", or those that are named here; text_column may
    name several, with commas between, which are joined by a space. In CSV and TSV the first row holds their names; but
    where nothing is named and it begins with an integer, it is a row as in AG News: the label, and the rest is text.
    ValueError (one line) with file and line for the first row without label or text, of another number of columns, with
    bad quoting or bad encoding; and for a file without rows.
    """
    path = Path(path)
    if path.suffix.lower() not in KINDS:
        raise ValueError(f"{path}: the name must end in one of {', '.join(KINDS)}")
    try:
        content = decode(read_file(path), path)
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}") from None
    read = json_rows if KINDS[path.suffix.lower()] is None else table_rows
    labels, texts, lines = [], [], []
    text_names = [name.strip() for name in (text_column or "text").split(",")]
    for line, label, parts in read(path, content, label_column.strip() or "label", text_names,
                                   named=bool(label_column or text_column)):
        if not label.strip():
            raise ValueError(f"{path} line {line}: no label")
        if not any(part.strip() for part in parts):
            raise ValueError(f"{path} line {line}: no text")
        labels.append(label.strip())
        texts.append(" ".join(parts))
        lines.append(line)
    if not labels:
        raise ValueError(f"{path}: no rows")
    return labels, texts, lines


def table_rows(path, content, label_name, text_names, named):
    """Yields (line, label, [text]) of CSV and TSV."""
    separator = KINDS[path.suffix.lower()]
    rows = numbered(path, csv.reader(io.StringIO(content, newline=""), delimiter=separator, strict=True))
    line, first = next(rows, (1, []))
    if not named and len(first) > 1 and first[0].strip().lstrip("-").isdecimal():
        label, texts, rows = 0, range(1, len(first)), itertools.chain([(line, first)], rows)
    elif first:
        names = [name.strip() for name in first]
        for name in [label_name, *text_names]:
            if name not in names:
                raise ValueError(f"{path} line {line}: no column {name!r:.80}, only {listed(names)}; "
                                 "see label_column and text_column")
            if names.count(name) > 1:
                raise ValueError(f"{path} line {line}: {names.count(name)} columns have the name {name!r}: rename all "
                                 "but one; text_column may name several")
        label, texts = names.index(label_name), [names.index(name) for name in text_names]
    for line, row in rows:
        if len(row) != len(first):
            raise ValueError(f"{path} line {line}: {len(row)} columns, and {len(first)} in the first row")
        if separator == "\t" and any("\t" in field and "\n" in field for field in row):
            raise ValueError(f"{path} line {line}: a field with a tab and a line break, so it seems that a quote has "
                             "no other, and rows are lost in it; a quote that is text is doubled, in a quoted field")
        yield line, row[label], [row[i] for i in texts]


def numbered(path, reader):
    """Yields (line where it begins, row) of a csv.reader; blank lines are left out."""
    csv.field_size_limit(2**31 - 1)  # the reader's own limit, 131072, is shorter than some texts
    row = []
    while row is not None:
        line = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as e:
            raise ValueError(f"{path} line {line}: bad quoting ({e}); a quote within quotes is doubled") from None
        if row:
            yield line, row


def each_once(pairs):
    """The dict of an object of JSON. ValueError if a key is there twice."""
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError("a key is there twice")
    return row


def json_rows(path, content, label_name, text_names, named):
    """Yields (line, label, [text]) of JSONL; a label may be an integer."""
    for line, text in enumerate(content.split("\n"), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text, object_pairs_hook=each_once)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{path} line {line}: not JSON ({e})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path} line {line}: not an object but a {type(row).__name__}")
        for name in [label_name, *text_names]:
            what, kinds, means = "text", str, "not text"
            if name == label_name:
                what, kinds, means = "label", (str, int), "not text or integer"
            if name not in row:
                raise ValueError(f"{path} line {line}: no {what} under {name!r:.80}; it has {listed(row)}")
            if not isinstance(row[name], kinds) or isinstance(row[name], bool):
                raise ValueError(f"{path} line {line}: no {what} under {name!r:.80}, but {json.dumps(row[name]):.40}, "
                                 f"which is {means}")
        yield line, str(row[label_name]), [row[name] for name in text_names]


def write_labelled(out_dir, columns, splits, overwrite):
    """Writes out_dir/train.csv, val.csv and test.csv. splits: {split: rows}, a row as long as `columns`, the header.
    train.csv comes last: where it is, all are complete. ValueError (one line), before anything is written, if one is
    there with other rows and overwrite is False. Returns a line that says what was written."""
    contents = {}
    for split, rows in splits.items():
        if not rows:
            raise ValueError(f"no rows for {split}.csv: give more text")
        table, quoting = io.StringIO(newline=""), csv.QUOTE_MINIMAL
        if any("\r" in str(field) for row in rows for field in row):     # older Pythons leave such a field unquoted
            quoting = csv.QUOTE_ALL
        csv.writer(table, lineterminator="\n", quoting=quoting).writerows([columns, *rows])
        contents[split] = table.getvalue().encode()
    there = [path for split in SPLITS for kind in KINDS if (path := Path(out_dir, f"{split}{kind}")).exists()]
    other = [path for path in there if path.suffix != ".csv" or path.read_bytes() != contents[path.stem]]
    if other and not overwrite:
        raise ValueError(f"{other[0]} holds other rows: --overwrite replaces them, --out_dir leaves them")
    with made_folder(out_dir):
        for path in other:
            path.unlink()
        for split in reversed(SPLITS):
            write_file(Path(out_dir, f"{split}.csv"), contents[split])
    return f"{out_dir}: " + ", ".join(f"{len(splits[split]):,} rows in {split}.csv" for split in SPLITS)


def encode_rows(rows, encoder, labels, block_size):
    """
    The rows of a file, (path, labels, texts, lines), as (tokens, targets, cut): the first block_size token ids of each
    text, [int64 (length,)]; the index of each label among `labels`, [int]; and how many texts were longer. ValueError
    (one line) with file and line for a label that is not among them, or a character that the tokenizer does not know.
    """
    path, names, texts, lines = rows
    tokens, cut = [], 0
    for text, line in zip(texts, lines):
        try:
            ids = encoder.array(text)
        except ValueError as e:
            raise ValueError(f"{path} line {line}: {e}") from None
        cut += len(ids) > block_size
        tokens.append(ids[:block_size].astype("int64"))
    numbers = {name: number for number, name in enumerate(labels)}
    for name, line in zip(names, lines):
        if name not in numbers:
            raise ValueError(f"{path} line {line}: label {name!r:.80} is none of the checkpoint's: {listed(labels)}")
    return tokens, [numbers[name] for name in names], cut


def read_texts(path):
    """The texts of a file with one a line, '-' is stdin, as rows: (path, [], texts, lines). ValueError (one line) with
    the line of the first that is empty or no UTF-8."""
    if path == "-" and sys.stdin is None:
        raise ValueError("-: standard input is closed: name a file")
    try:
        if path == "-":
            content = sys.stdin.buffer.read()
        else:
            content = read_file(path)
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}; - reads standard input") from None
    texts = [text.removesuffix("\r") for text in decode(content, path).removesuffix("\n").split("\n")]
    for line, text in enumerate(texts, 1):
        if not text.strip():
            raise ValueError(f"{path} line {line}: no text")
    return path, [], texts, range(1, len(texts) + 1)
