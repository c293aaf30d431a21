"""FineWeb-Edu, the sample of 10 billion tokens: 9.7 million documents in 14 parquet files, 28 GB to download.

python data/fineweb_edu/prepare.py                     downloads the files, one after the other
python data/fineweb_edu/prepare.py --num_docs=100000   a part: only the files that hold it are downloaded
python data/fineweb_edu/prepare.py --input=FOLDER      from files that are there already
"""
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])
from data.corpus import options, prepare

if __name__ == "__main__":
    args = options(__doc__, __file__).parse_args()
    repo = "HuggingFaceFW/fineweb-edu"
    prepare(args, repo, [("main", "sample/10BT")], ".parquet", f"{repo} sample/10BT")
