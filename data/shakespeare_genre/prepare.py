"""Passages of nine plays by genre (comedy, history, tragedy): train.csv, val.csv and test.csv for scripts/classify.py.

python data/shakespeare_genre/prepare.py [--input FILE] [--out_dir FOLDER] [--chars N] [--overwrite]

The text is the quickstart's, data/shakespeare_char/input.txt, so that no network is needed; where that is not there,
it comes as in the quickstart. The genres are those of the First Folio. The test set is the last play of each genre in
the text: Romeo and Juliet, Henry VI part 3 and The Tempest. None of their passages is in train.csv or val.csv. Passages
of the other six plays are shared out between these two, so that val is easier than test. A passage is a run of speeches
without the speakers' names, since these tell the play.
"""
import re
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])
from configurator import fail, one_line, tell
from data.bins import find_folder, shuffled
from data.corpus import add_encoding, folder_path, one_line_parser
from data.labelled import write_labelled
from data.reading import BadInput
from data.shakespeare.plays import text_of

# title, genre, the line of the first speech, in the order of the text
PLAYS = (("Coriolanus", "tragedy", "Before we proceed any further, hear me speak."),
         ("Richard III", "history", "Now is the winter of our discontent"),
         ("Richard II", "history", "Old John of Gaunt, time-honour'd Lancaster,"),
         ("Romeo and Juliet", "tragedy", "Gregory, o' my word, we'll not carry coals."),
         ("Henry VI part 3", "history", "I wonder how the king escaped our hands."),
         ("The Winter's Tale", "comedy", "If you shall chance, Camillo, to visit Bohemia, on"),
         ("Measure for Measure", "comedy", "Escalus."),
         ("The Taming of the Shrew", "comedy", "I'll pheeze you, in faith."),
         ("The Tempest", "comedy", "Boatswain!"))
TEST = "Romeo and Juliet", "Henry VI part 3", "The Tempest"
VAL = 10  # one passage in so many of the other plays goes to val.csv


def passages(text, chars):
    """[text]: speeches without their speakers, joined until there are `chars` characters; what is left over at the end
    of a play is left out."""
    found, speeches = [], []
    for paragraph in text.split("\n\n"):
        speeches.append(paragraph.partition(":\n")[2].strip())
        passage = "\n".join(filter(None, speeches))
        if len(passage) >= chars:
            found.append(passage)
            speeches = []
    return found


def split_plays(text, chars, source):
    """{split: [(genre, passage, title)]}. ValueError (one line) if a play is not there."""
    text = re.sub(r"Prologue:\nTwo households.*?\n\n", "", text, flags=re.S)  # the wheel has it, the known file not
    starts = []
    for title, _, line in PLAYS:
        at = text.find(f":\n{line}\n", starts[-1] if starts else 0)
        if at < 0:
            raise ValueError(f"{source}: does not hold {title}, or not where tiny Shakespeare has it: {line!r}")
        starts.append(text.rfind("\n", 0, at) + 1)
    splits = {"train": [], "val": [], "test": []}
    for (title, genre, _), start, end in zip(PLAYS, starts, [*starts[1:], len(text)]):
        found = passages(text[start:end], chars)
        place = shuffled(range(len(found)), max(1, len(found)), 1337, 0) if found else []
        for passage, at in zip(found, place):
            split = "val" if at < len(found) // VAL else "train"
            splits["test" if title in TEST else split].append((genre, passage, title))
    return splits


if __name__ == "__main__":
    parser = one_line_parser(__doc__)
    parser.add_argument("--input", help="the text, in tiny Shakespeare's form")
    parser.add_argument("--out_dir", default=Path(__file__).resolve().parent, type=folder_path,
                        help="where the output goes (beside the script)")
    parser.add_argument("--chars", type=int, default=400, help="least length of a passage, characters (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace other rows there")
    add_encoding(parser)
    args = parser.parse_args()
    if args.chars < 1:
        fail(f"--chars {args.chars}: must be at least 1")
    there = [find_folder(name) / "input.txt" for name in ("shakespeare_char", "shakespeare")]
    args.input = args.input or next((str(path) for path in there if path.is_file()), None)
    try:
        text, source = text_of(args)
        with one_line():
            splits = split_plays(text, args.chars, source)
            tell(write_labelled(args.out_dir, ("label", "text", "play"), splits, args.overwrite), sys.stdout)
    except BadInput as e:
        fail(*e.args)
    except OSError as e:
        fail(f"{e.filename or args.out_dir}: {e.strerror or e}", 1)
