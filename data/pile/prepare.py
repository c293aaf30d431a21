"""The Pile by its domains, which stand together in train.bin with their ranges in meta.json.

python data/pile/prepare.py --num_docs=100000   from the copy without the parts under copyright, 30 jsonl.zst files
python data/pile/prepare.py --input 00.jsonl.zst 01.jsonl.zst   from files that are there already: any jsonl with the
                                                                domain in meta.pile_set_name, or elsewhere: --domain_key
"""
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])
from data.corpus import options, prepare

if __name__ == "__main__":
    args = options(__doc__, __file__, domain_key="meta.pile_set_name").parse_args()
    repo = "monology/pile-uncopyrighted"
    prepare(args, repo, [("main", "train")], ".jsonl.zst", repo)
