"""Tiny Shakespeare, one token per character: train.bin, val.bin and meta.json in this folder.

python data/shakespeare_char/prepare.py [--input FILE] [--out_dir FOLDER]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tokenbins import cut_at_nine_tenths, get_tokenizer, shakespeare, write_small

if __name__ == "__main__":
    text, source, out_dir = shakespeare(__file__, __doc__)
    tokenizer = get_tokenizer({"type": "char", "itos": sorted(set(text))})
    train, val = cut_at_nine_tenths(text)
    write_small(out_dir, tokenizer, train, val, source=source)
