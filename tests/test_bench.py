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


def bench(tmp_path, *args):
    """-> the run of bench.py on a dataset of its own whose window at offset o holds o, o + 1, ..."""
    for split in 'train', 'val':
        np.arange(400, dtype='<u2').tofile(tmp_path / f'{split}.bin')
    argv = [sys.executable, BENCH, *TINY, f'--dataset={tmp_path}', *args]
    return subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=ENV, timeout=300)


def figures(run, tmp_path):
    assert run.returncode == 0, run.stderr
    return json.loads((tmp_path / 'figures.json').read_text())['rows']


def test_modes_and_peer_take_turns_on_the_same_batches(tmp_path):
    (tmp_path / 'peer').mkdir()
    (tmp_path / 'peer' / 'model.py').write_text(PEER)
    run = bench(tmp_path, '--modes=plain,ghost', f'--peer={tmp_path}/peer', '--json=figures.json', '--profile=traces')
    rows = figures(run, tmp_path)
    assert [r['name'] for r in rows] == ['plain', 'peer', 'plain+ghost']
    for r in rows:
        assert (r['batch_size'], r['micro_batches'], r['world_size']) == (4, 3, 1)
        assert len(r['ratios']) == len(r['steps_ms']) == 2      # one of each per timed step
        assert r['micro_ms'] > 0
        assert r['tokens_per_s'] == pytest.approx(4 * 3 * 16 / r['step_ms'] * 1e3)
        assert r['ratios'] == pytest.approx([a / b for a, b in zip(rows[0]['steps_ms'], r['steps_ms'])])
    assert 0 <= rows[0]['data_share'] < 1
    for r in rows:      # a row of the printed table each
        assert any(line.split()[:1] == [r['name']] for line in run.stdout.splitlines())
        name = r['name'].replace('+', '_') + '_4'
        assert json.loads((tmp_path / 'traces' / f'{name}.json').read_text())['traceEvents']
        assert 'aten::' in (tmp_path / 'traces' / f'{name}.txt').read_text()
    assert not (tmp_path / 'out').exists()

    # what train.py itself would read: the samples of steps 1, 2, ... in order, whole windows of the dataset
    seen = [json.loads(line) for line in (tmp_path / 'peer' / 'seen.txt').read_text().splitlines()]
    windows = np.array(seen).reshape(-1, 16)
    assert len(seen) == 3 * (2 + 2 + 1)                         # first, warm-up, two timed, one profiled
    assert (windows == windows[:, :1] + np.arange(16)).all()
    own = subprocess.run([sys.executable, '-c', f'''
import sys; sys.argv = ["train.py", "--device=cpu", "--eval_only=True", "--eval_iters=1", "--dataset={tmp_path}",
    *"{' '.join(TINY[1:-1])}".split()]
source = open({os.path.join(ROOT, 'train.py')!r}).read()
space = {{"__name__": "__main__", "__file__": {os.path.join(ROOT, 'train.py')!r}}}
import contextlib, io; sys.path.insert(0, {ROOT!r})
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    exec(compile(source, "train.py", "exec"), space)
import numpy as np; print([space["train_offsets"](step, np.arange(12)).tolist() for step in range(4)])
'''], capture_output=True, text=True, cwd=tmp_path, env=ENV)
    assert own.returncode == 0, own.stderr
    expected = np.array(json.loads(own.stdout))                 # (step, sample) -> offset
    got = windows[:, 0].reshape(-1, 12)
    assert got[1:4].tolist() == expected[1:4].tolist()          # got[0], the peer's first step, has step 1's too


@pytest.mark.parametrize('args, words', [
    (['--modes=plain,dpp'], ['dpp', 'ddp']), (['--peer=nowhere'], ['model.py', 'nowhere']), (['--steps=0'], ['steps']),
    (['--steps=x'], ['--steps', "'x'"]), (['--nproc=0'], ['nproc=0']), (['--n_layr=2'], ['n_layr', 'n_layer']), (['--samples=-1'], ['samples=-1']),
    (['--modes=ghost', '--peer=.'], ['plain']), (['--batch_sizes=7'], ['480', '7']),
    (['--batch_sizes=a'], ['batch_sizes'])])
def test_bad_arguments_end_in_one_line(fork, tmp_path, args, words):
    line = fork(tmp_path, *args, rc=2, script=BENCH, tiny_args=False)
    assert all(word in line for word in words)


@pytest.mark.parametrize('prepared', [True, False])
def test_tokens_are_of_the_dataset_that_a_config_file_names(tiny, tmp_path, prepared):
    (tmp_path / 'model.py').write_text(PEER)
    (tmp_path / 'config.py').write_text(f'dataset = {str(tiny) if prepared else "not-here"!r}\n')
    run = subprocess.run([sys.executable, BENCH, *TINY, '--steps=1', '--peer=.', 'config.py'], capture_output=True,
                         text=True, cwd=tmp_path, env=ENV, timeout=300)
    assert run.returncode == 0, run.stderr
    assert ('not-here is not prepared' in run.stderr) != prepared, run.stderr
    ids = {i for line in (tmp_path / 'seen.txt').read_text().splitlines() for i in json.loads(line)}
    vocab_size = json.loads((tiny / 'meta.json').read_text())['vocab_size']
    assert vocab_size < 100 and (max(ids) < vocab_size) == prepared


def test_what_train_refuses_ends_in_its_line(tmp_path):
    run = bench(tmp_path, '--n_embd=17')
    assert run.returncode == 2 and run.stdout == '' and len(run.stderr.splitlines()) == 1, run.stderr
    assert run.stderr.startswith('train.py: n_embd=17')


def test_torchrun_and_batch_sizes(tmp_path):
    run = bench(tmp_path, '--modes=plain,fsdp', '--batch_sizes=4', '--samples=8', '--steps=1', '--json=figures.json',
                '--profile=traces')
    rows = figures(run, tmp_path)
    for name in 'plain_4', 'fsdp_4':
        assert json.loads((tmp_path / 'traces' / f'{name}.json').read_text())['traceEvents']
        assert 'aten::' in (tmp_path / 'traces' / f'{name}.txt').read_text()
    assert len(list((tmp_path / 'traces').iterdir())) == 4
    assert [(r['name'], r['batch_size'], r['micro_batches'], r['world_size']) for r in rows] == \
        [('plain', 4, 2, 1), ('fsdp', 4, 1, 2)]
    per_process = rows[1]['tokens_per_s'] / 2
    assert rows[1]['ratio'] == pytest.approx(per_process / rows[0]['tokens_per_s'])
    run = bench(tmp_path, '--batch_sizes=2,8', '--samples=8', '--steps=1', '--json=figures.json')
    rows = figures(run, tmp_path)
    assert [(r['batch_size'], r['micro_batches']) for r in rows] == [(2, 4), (8, 1)]
    best = max(rows, key=lambda r: r['tokens_per_s'])
    assert run.stdout.splitlines()[-1] == \
        f'best: --batch_size={best["batch_size"]} --gradient_accumulation_steps={best["micro_batches"]}'


def test_modes_hold_whatever_a_config_file_says(tmp_path):
    """Its use_fsdp would want torchrun, and its six validation samples, with ghost, fit no micro-batch of four."""
    (tmp_path / 'all.py').write_text('use_fsdp = True\nuse_ghost = True\nghost_val_batch_size = 6\n')
    run = bench(tmp_path, 'all.py', '--modes=plain')
    assert run.returncode == 0 and 'plain' in run.stdout, run.stderr


def test_a_step_that_is_not_finite_is_told(tmp_path):
    run = bench(tmp_path, '--learning_rate=1e18', '--decay_lr=False')
    assert run.returncode == 1 and 'stopped before the update' in run.stderr.splitlines()[-1], run.stderr
