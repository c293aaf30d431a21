"""Tiny Shakespeare in GPT-2 tokens: train.bin, val.bin and meta.json in this folder.

python data/shakespeare/prepare.py [--input FILE] [--out_dir FOLDER] [--overwrite]
"""
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])
from data.shakespeare.plays import shakespeare

if __name__ == "__main__":
    shakespeare(__file__, __doc__, lambda text: "gpt2")
