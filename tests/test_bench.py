"""bench.py times train.py itself: in turn with a peer on the same batches, under torchrun, and over batch sizes."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ENV, ROOT

BENCH = os.path.join(ROOT, 'scripts', 'bench.py')
TINY = ('--device=cpu --n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --batch_size=4 '
        '--gradient_accumulation_steps=3 --steps=2').split()
# a model with nanoGPT's interface, which writes down what it was given
PEER = '''
import os
from dataclasses import dataclass
import torch


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True


class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(config.vocab_size, 8), torch.nn.Linear(8, config.vocab_size)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)

    def forward(self, idx, targets):
        with open(os.path.join(os.path.dirname(__file__), 'seen.txt'), 'a') as f:
            f.write(f"{idx.flatten().tolist()}\\n")
        logits = self.head(self.embed(idx))
        return logits, torch.nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
'''


@pytest.fixture
def bench(fork, tmp_path):
    """bench(*args): bench.py on a dataset of its own whose window at offset o holds o, o + 1, ..."""
    for split in 'train', 'val':
        np.arange(400, dtype='<u2').tofile(tmp_path / f'{split}.bin')
    return lambda *args, rc=0: fork(tmp_path, *TINY, f'--dataset={tmp_path}', *args, script=BENCH, tiny_args=False,
                                    warn=False, rc=rc)


def figures(tmp_path):
    return json.loads((tmp_path / 'figures.json').read_text())['rows']


def test_modes_and_peer_take_turns_on_the_same_batches(bench, fork, tmp_path):
    (tmp_path / 'peer').mkdir()
    (tmp_path / 'peer' / 'model.py').write_text(PEER)
    (tmp_path / 'traces').mkdir()
    for link, to in (('figures.json', 'real.json'), ('traces/plain_4.json', 'trace.json')):
        (tmp_path / to).touch()
        (tmp_path / link).symlink_to(tmp_path / to)
    out = bench('--modes=plain,ghost', f'--peer={tmp_path}/peer', '--json=figures.json', '--profile=traces').out
    rows = figures(tmp_path)
    assert [r['name'] for r in rows] == ['plain', 'peer', 'plain+ghost']
    for r in rows:
        assert (r['batch_size'], r['micro_batches'], r['world_size']) == (4, 3, 1)
        assert len(r['ratios']) == len(r['steps_ms']) == 2      # one of each per timed step
        assert r['micro_ms'] > 0
        assert r['tokens_per_s'] == pytest.approx(4 * 3 * 16 / r['step_ms'] * 1e3)
        assert r['ratios'] == pytest.approx([a / b for a, b in zip(rows[0]['steps_ms'], r['steps_ms'])])
    assert 0 <= rows[0]['data_share'] < 1
    for r in rows:      # a row of the printed table each
        assert any(line.split()[:1] == [r['name']] for line in out.splitlines())
        name = r['name'].replace('+', '_') + '_4'
        assert json.loads((tmp_path / 'traces' / f'{name}.json').read_text())['traceEvents']
        assert 'aten::' in (tmp_path / 'traces' / f'{name}.txt').read_text()
    assert all((tmp_path / link).is_symlink() for link in ('figures.json', 'traces/plain_4.json'))
    assert not (tmp_path / 'out').exists()

    # what train.py itself would read: the samples of steps 1, 2, ... in order, whole windows of the dataset
    seen = [json.loads(line) for line in (tmp_path / 'peer' / 'seen.txt').read_text().splitlines()]
    windows = np.array(seen).reshape(-1, 16)
    assert len(seen) == 3 * (2 + 2 + 1)                         # first, warm-up, two timed, one profiled
    assert (windows == windows[:, :1] + np.arange(16)).all()
    after = 'print("OWN", [g["train_offsets"](step, numpy.arange(12)).tolist() for step in range(4)])'
    own = fork(tmp_path, *TINY[:-1], f'--dataset={tmp_path}', '--eval_only=True', '--eval_iters=1', tiny_args=False,
               after=after, warn=False).out
    expected = np.array(json.loads(own.split('OWN ')[1]))       # (step, sample) -> offset
    got = windows[:, 0].reshape(-1, 12)
    assert got[1:4].tolist() == expected[1:4].tolist()          # got[0], the peer's first step, has step 1's too


@pytest.mark.parametrize('args, words', [
    (['--modes=plain,dpp'], ['dpp', 'ddp']), (['--peer=nowhere'], ['model.py', 'nowhere']), (['--steps=0'], ['steps']),
    (['--steps=x'], ['--steps', "'x'"]), (['--nproc=0'], ['nproc=0']), (['--n_layr=2'], ['n_layr', 'n_layer']),
    (['--samples=-1'], ['samples=-1']),
    (['--modes=ghost', '--peer=.'], ['plain']), (['--batch_sizes=7'], ['480', '7']),
    (['--batch_sizes=a'], ['batch_sizes'])])
def test_bad_arguments_end_in_one_line(fork, tmp_path, args, words):
    line = fork(tmp_path, *args, rc=2, script=BENCH, tiny_args=False)
    assert all(word in line for word in words)


@pytest.mark.parametrize('prepared', [True, False])
def test_tokens_are_of_the_dataset_that_a_config_file_names(fork, tiny, tmp_path, prepared):
    (tmp_path / 'model.py').write_text(PEER)
    (tmp_path / 'config.py').write_text(f'dataset = {str(tiny) if prepared else "not-here"!r}\n')
    run = fork(tmp_path, *TINY, '--steps=1', '--peer=.', 'config.py', script=BENCH, tiny_args=False, warn=False)
    assert ('not-here is not prepared' in run.err) != prepared, run.err
    ids = {i for line in (tmp_path / 'seen.txt').read_text().splitlines() for i in json.loads(line)}
    vocab_size = json.loads((tiny / 'meta.json').read_text())['vocab_size']
    assert vocab_size < 100 and (max(ids) < vocab_size) == prepared


def test_what_train_refuses_ends_in_its_line(bench):
    run = bench('--n_embd=17', rc=None)
    assert run.codes == [2] and run.out == '' and len(run.err.splitlines()) == 1, run.err
    assert run.err.startswith('train.py: n_embd=17')


def test_torchrun_and_batch_sizes(bench, tmp_path):
    """Here as a user starts it."""
    argv = [sys.executable, BENCH, *TINY, f'--dataset={tmp_path}', '--modes=plain,fsdp', '--batch_sizes=4',
            '--samples=8', '--steps=1', '--json=figures.json', '--profile=traces']
    run = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=ENV, timeout=300)
    assert run.returncode == 0, run.stderr
    rows = figures(tmp_path)
    for name in 'plain_4', 'fsdp_4':
        assert json.loads((tmp_path / 'traces' / f'{name}.json').read_text())['traceEvents']
        assert 'aten::' in (tmp_path / 'traces' / f'{name}.txt').read_text()
    assert len(list((tmp_path / 'traces').iterdir())) == 4
    assert [(r['name'], r['batch_size'], r['micro_batches'], r['world_size']) for r in rows] == \
        [('plain', 4, 2, 1), ('fsdp', 4, 1, 2)]
    per_process = rows[1]['tokens_per_s'] / 2
    assert rows[1]['ratio'] == pytest.approx(per_process / rows[0]['tokens_per_s'])
    out = bench('--batch_sizes=2,8', '--samples=8', '--steps=1', '--json=figures.json').out
    rows = figures(tmp_path)
    assert [(r['batch_size'], r['micro_batches']) for r in rows] == [(2, 4), (8, 1)]
    best = max(rows, key=lambda r: r['tokens_per_s'])
    assert out.splitlines()[-1] == \
        f'best: --batch_size={best["batch_size"]} --gradient_accumulation_steps={best["micro_batches"]}'


def test_modes_hold_whatever_a_config_file_says(bench, tmp_path):
    """Its use_fsdp would want torchrun, and its six validation samples, with ghost, fit no micro-batch of four."""
    (tmp_path / 'all.py').write_text('use_fsdp = True\nuse_ghost = True\nghost_val_batch_size = 6\n')
    assert 'plain' in bench('all.py', '--modes=plain').out


def test_a_step_that_is_not_finite_is_told(bench):
    run = bench('--learning_rate=1e18', '--decay_lr=False', rc=1)
    assert run.codes == [1] and 'stopped before the update' in run.err.splitlines()[-1], run.err
