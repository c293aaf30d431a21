"""OpenWebText, 8 million documents (24 GB to download, 54 GB of text): 9 billion tokens, 4 million of them for val.

python data/openwebtext/prepare.py                     downloads the parquet files, one after the other
python data/openwebtext/prepare.py --num_docs=100000   a part: only the files that hold it are downloaded
python data/openwebtext/prepare.py --input=FOLDER      from files that are there already
"""
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])
from data.corpus import options, prepare

if __name__ == "__main__":
    args = options(__doc__, __file__).parse_args()
    repo = "Skylion007/openwebtext"  # its own files are tar archives behind a script; the Hub keeps a parquet copy
    places = [("main", "plain_text"), ("refs/convert/parquet", "plain_text/train")]
    prepare(args, repo, places, ".parquet", repo)
