"""AG News, 127,600 short news texts of four classes: train.csv, val.csv and test.csv for scripts/classify.py.

python data/ag_news/prepare.py                              downloads two parquet files, 20 MB (needs pyarrow)
python data/ag_news/prepare.py --input train.csv test.csv   from files that are there already: parquet, or the
                                                            original CSV (class index from 1, title, description)
"""
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])
from configurator import fail, one_line, tell
from data.bins import open_file, said, shuffled
from data.corpus import folder_path, one_line_parser
from data.download import Unavailable, fetch, hub_files
from data.labelled import KINDS, read_labelled, write_labelled
from data.reading import need

REPO = "fancyzhx/ag_news"
CLASSES = "World", "Sports", "Business", "Sci/Tech"


def download(folder):
    """The paths of the hub's train and test file, fetched where they are not there yet."""
    need("pyarrow", "reading the hub's .parquet")
    paths = []
    try:
        files = hub_files(REPO, [("main", "data")], ".parquet")
        for split in ("train", "test"):
            found = [file for file in files if file["name"].startswith(split)]
            if len(found) != 1:
                raise Unavailable(f"{REPO} has not one {split} file any more, but {[f['name'] for f in files]}")
            path = folder / found[0]["name"]
            if not path.is_file() or path.stat().st_size != found[0]["size"]:
                fetch(found[0], path)
            paths.append(path)
    except Unavailable as e:
        fail(f"{e}; or give local files: --input train.csv test.csv", 1)
    return paths


def read(path):
    """[(name of the class, text)] of a file. ValueError (one line) with file and row for a bad one."""
    if path.suffix.lower() in KINDS:
        columns = ()
        if path.is_file():      # some copies of the original have a header
            with open(path, "rb") as file:
                if b"Class Index" in file.readline():
                    columns = "Class Index", "Title,Description"
        labels, texts, lines = read_labelled(path, *columns)
        rows = [(label, text, f"{path} line {line}") for label, text, line in zip(labels, texts, lines)]
        numbers = {str(number): name for number, name in enumerate(CLASSES, 1)}
    else:
        pyarrow, parquet = need("pyarrow", "reading .parquet"), need("pyarrow.parquet", "reading .parquet")
        try:
            with open_file(path) as file:
                table = parquet.read_table(file, columns=["label", "text"]).to_pylist()
        except (pyarrow.ArrowException, OSError) as e:
            raise ValueError(f"{path}: can not be read ({said(e)})") from None
        rows = [(row.get("label"), row.get("text"), f"{path} row {i}") for i, row in enumerate(table, 1)]
        numbers = dict(enumerate(CLASSES))
    for label, text, where in rows:
        if label not in numbers:
            raise ValueError(f"{where}: class {label!r}, not one of {', '.join(map(str, numbers))}")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}: no text")
    missing = numbers.keys() - {label for label, _, _ in rows}
    if missing:
        raise ValueError(f"{path}: no row of class {', '.join(map(str, sorted(missing)))}: it is not the whole file")
    return [(numbers[label], text) for label, text, _ in rows]


if __name__ == "__main__":
    parser = one_line_parser(__doc__)
    parser.add_argument("--input", nargs=2, metavar=("TRAIN", "TEST"), type=Path, help="local files instead")
    parser.add_argument("--out_dir", default=Path(__file__).resolve().parent, type=folder_path,
                        help="where the output goes (beside the script)")
    parser.add_argument("--download_dir", type=folder_path, help="where downloads are kept (OUT_DIR/download)")
    parser.add_argument("--val_fraction", type=float, default=0.05, help="share of train that goes to val.csv (0.05)")
    parser.add_argument("--seed", type=int, default=1337, help="of the choice of these rows (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace other rows there")
    args = parser.parse_args()
    if not 0 < args.val_fraction < 1:
        fail(f"--val_fraction {args.val_fraction}: must be above 0 and below 1")
    if not 0 <= args.seed < 2**63:
        fail(f"--seed {args.seed}: must be at least 0 and below {2**63}")
    try:
        train_path, test_path = args.input or download(args.download_dir or args.out_dir / "download")
        with one_line():
            train, test = read(train_path), read(test_path)
            val_rows = round(len(train) * args.val_fraction)
            place = shuffled(range(len(train)), len(train), args.seed, 0)  # of each row in a shuffle
            splits = {"train": [row for row, at in zip(train, place) if at >= val_rows],
                      "val": [row for row, at in zip(train, place) if at < val_rows], "test": test}
            tell(write_labelled(args.out_dir, ("label", "text"), splits, args.overwrite), sys.stdout)
    except OSError as e:
        fail(f"{e.filename or args.out_dir}: {e.strerror or e}", 1)
