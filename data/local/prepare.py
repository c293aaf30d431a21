"""Your own text: train.bin, val.bin and meta.json in data/NAME (data/local if no name is given).

python data/local/prepare.py --input notes.txt                           a file: one document
python data/local/prepare.py --name=mine --input books/ more.jsonl.gz    folders, and files of several kinds
python data/local/prepare.py --name=mine --input rows.parquet --text_key=body --domain_key=site --tokenizer=cl100k_base
"""
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])
from configurator import fail
from data.corpus import options, prepare

if __name__ == "__main__":
    # the fraction is for short texts; a large corpus wants less
    parser = options(__doc__, __file__, downloads=False, default_val_fraction=0.1)
    parser.add_argument("--name", default="local", help="the dataset's name, for train.py --dataset=NAME (local)")
    args = parser.parse_args()
    if not args.input:
        fail("--input is missing: the files or folders with your text")
    if Path(args.name).name != args.name or args.name in ("", ".."):
        fail(f"--name {args.name}: a plain name, without folders (--out_dir writes elsewhere)")
    args.out_dir = args.out_dir or Path(__file__).resolve().parents[1] / args.name
    prepare(args)
