"""train.py in one process: settings, data, resuming, the loop, and what nanoGPT's users bring along."""
import json
import math
import os
import pickle
import re
import shutil
import sys

import numpy as np
import pytest
import torch

from conftest import FULL_DISK, ROOT, ckpt_of, log_of, tree, write_dataset

sys.path.insert(0, ROOT)
from model import GPT, GPTConfig  # noqa: E402
from scripts.common import lr_at  # noqa: E402

DROPOUT = '--dropout=0.2'
SMALL = ('--n_layer=1', '--n_head=1', '--n_embd=8', '--eval_iters=1')
# runs of tests that look at one thing only
BARE = (*SMALL, '--eval_interval=1000')


def at_step(n, action):
    """Code for fork(before=...): acts in the n-th step, from 0, after its backward passes; p is a parameter."""
    return f'''
import os, signal
steps, nan, inf = [0], float('nan'), float('inf')
real_clip = torch.nn.utils.clip_grad_norm_
def clip(params, *a, **k):
    params = list(params)
    p, steps[0] = params[3], steps[0] + 1
    if steps[0] == {n} + 1:
        {action}
    return real_clip(params, *a, **k)
torch.nn.utils.clip_grad_norm_ = clip
'''


def in_evaluation(n, name='SIGTERM'):
    """Code for fork(before=...): sends itself a signal in the n-th forward pass, from 0, of the run's evaluations."""
    return f'''
import os, signal
import model
passes, real_forward = [0], model.GPT.forward
def forward(self, *args):
    passes[0] += not self.training
    if passes[0] == {n} + 1 and not self.training:
        os.kill(os.getpid(), signal.{name})
    return real_forward(self, *args)
model.GPT.forward = forward
'''


KILL = 'os.kill(os.getpid(), signal.SIGKILL)'
POISON = 'p.grad[0] = nan'


def same_weights(a, b):
    """Weights and optimizer state, bit for bit."""
    a, b = [c if isinstance(c, dict) else ckpt_of(c) for c in (a, b)]
    assert a['iter_num'] == b['iter_num'] and a['model'].keys() == b['model'].keys()
    for k, v in a['model'].items():
        assert torch.equal(v, b['model'][k]), k
    assert a['optimizer']['state'].keys() == b['optimizer']['state'].keys()
    for name, s in a['optimizer']['state'].items():
        assert all(torch.equal(v, b['optimizer']['state'][name][k]) for k, v in s.items()), name


def same_run(a, b):
    """The whole log but for times, and weights and optimizer state: bit for bit."""
    def numbers(out):
        return [[{k: r.get(k) for k in ('tokens', 'loss', 'lr', 'grad_norm', 'train_loss',
                                        'val_loss')} for r in part.values()]
                for part in log_of(out)]
    assert numbers(a) == numbers(b)
    same_weights(a, b)
    assert ckpt_of(a)['best_val_loss'] == ckpt_of(b)['best_val_loss']


@pytest.fixture(scope='session')
def base(train, fork, tmp_path_factory):
    """20 unbroken steps with dropout: `random` in a process of its own from another directory, `epoch` in a fork."""
    cwd = tmp_path_factory.mktemp('base')
    done = train(cwd, '--out_dir=random', DROPOUT)
    fork(cwd, '--out_dir=epoch', '--data_order=epoch', DROPOUT)
    assert done.err == ''
    (cwd / 'stdout.txt').write_text(done.out)
    return cwd


@pytest.fixture
def copy_of(base, tmp_path):
    """copy_of(order): a copy of that run's out_dir in tmp_path."""
    return lambda order='random': shutil.copytree(base / order, tmp_path / order)


# ---- settings --------------------------------------------------------------------------------------------------------

def test_command_line_is_frozen(fork, tmp_path):
    """People's commands and nanoGPT's files use these names."""
    text = fork(tmp_path, '--help').out
    names = re.findall(r'^  --(\w+)=', text, re.M)
    assert set(names) >= set('''
        out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from wandb_log
        wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size block_size n_layer n_head n_embd
        dropout bias learning_rate max_iters weight_decay beta1 beta2 grad_clip decay_lr warmup_iters lr_decay_iters
        min_lr backend device dtype compile seed overwrite scale_lr check_sync_interval on_nonfinite deterministic
        data_order checkpoint_format checkpoint_async checkpoint_interval keep_checkpoints use_fsdp
        fsdp_min_num_params fsdp_activation_checkpointing fsdp_cpu_offload fsdp_replicate fsdp_reshard_after_forward
        use_ghost ghost_val_batch_size ghost_val_dataset ghost_val_resample ghost_interval ghost_save_interval
        ghost_per_param grad_dump grad_dump_start_step grad_dump_step_interval grad_dump_end_step
        grad_dump_save_first_n'''.split())
    for name, value in dict(batch_size=12, block_size=1024, n_layer=12, n_head=12, n_embd=768, learning_rate=6e-4,
                            max_iters=600000,
                            weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0, warmup_iters=2000,
                            lr_decay_iters=600000,
                            min_lr=6e-5, eval_interval=2000, eval_iters=200, gradient_accumulation_steps=40).items():
        assert re.search(rf'^  --{name}={value!r}( |$)', text, re.M), name      # nanoGPT's defaults
    assert len(names) == len(set(names))
    assert all(re.search(rf'^{title}', text, re.M) for title in ('data', 'model', 'optimizer'))


@pytest.mark.parametrize('args, words', [
    ('--batch_size', ['--batch_size:', 'needs a value']), ('stray', ['stray', '--name=value']),
    ('--batch_sise=4', ['batch_sise', 'batch_size']), ('--batch_size=1.5', ['batch_size', 'int', '1.5']),
    ('--n_head=3', ['n_embd=64', 'n_head=3']), ('--n_layer=0', ['n_layer=0', '1']),
    ('--block_size=0', ['block_size=0']),
    ('--batch_size=0', ['batch_size=0']), ('--n_layer=2147483647', ['n_layer=2147483647', '65536']),
    ('--timeout_minutes=67108864', ['timeout_minutes=67108864']),
    ('--gradient_accumulation_steps=0', ['gradient_accumulation_steps=0']),
    ('--max_iters=-1', ['max_iters=-1']), ('--eval_iters=0', ['eval_iters=0']),
    ('--eval_interval=0', ['eval_interval=0']),
    ('--log_interval=0', ['log_interval=0']), ('--dropout=1', ['dropout=1.0']), ('--dropout=-0.1', ['dropout=-0.1']),
    ('--beta2=1', ['beta2=1.0']), ('--learning_rate=-1', ['learning_rate=-1.0']),
    ('--grad_clip=-1', ['grad_clip=-1.0']),
    ('--weight_decay=-1', ['weight_decay=-1.0']), ('--seed=-1', ['seed=-1']),
    ('--warmup_iters=-1', ['warmup_iters=-1']),
    ('--checkpoint_interval=-5', ['checkpoint_interval=-5']), ('--check_sync_interval=-1', ['check_sync_interval=-1']),
    ('--dtype=float8', ['float8', 'bfloat16', 'float16', 'float32']), ('--device=tpu', ['tpu', 'cpu', 'cuda']),
    ('--device=cuda', ['device=cuda', 'cpu']), ('--device=cuda:1', ['device=cuda:1', 'cpu']),
    ('--compile=maybe', ['compile', 'True', 'False']),
    ('--backend=mpi', ['mpi', 'gloo', 'nccl']), ('--backend=nccl', ['nccl', 'gloo']),
    ('--data_order=sorted', ['sorted', 'random', 'epoch']),
    ('--on_nonfinite=ignore', ['ignore', 'stop', 'skip']), ('--use_fsdp=True', ['torchrun']),
    ('--fsdp_replicate=2', ['fsdp_replicate=2', 'use_fsdp']),
    ('--fsdp_cpu_offload=True', ['fsdp_cpu_offload', 'use_fsdp']),
    ('--checkpoint_format=zip', ['zip', 'full', 'sharded']),
    ('--checkpoint_async=True', ['checkpoint_async', 'sharded']),
    ('--batch_size=99999999999', ['batch_size=9', '2147']),
    ('--seed=18446744073709551616', ['seed=18446744073709551616', 'below']), ('--dataset=', ['dataset is empty']),
    ('--dataset=no/where', ['no/where/train.bin', 'data/no/where', 'prepare.py']),
    ('--out_dir=/dev/null/x', ['out_dir=/dev/null/x', 'name a folder']),
    ('--dataset=nowhere', ['nowhere', 'prepare.py']), ('--init_from=nowhere', ['nowhere']),
    ('--init_from=gpt3', ['gpt3']),
    ('--init_from=resume --out_dir=nothing', ['resume', 'nothing']), ('none.py', ['none.py'])])
def test_wrong_settings_are_named(fork, tmp_path, args, words):
    line = fork(tmp_path, *args.split(), rc=2)
    assert all(word in line for word in words), line


@pytest.mark.parametrize('text, words', [('batch_sise = 4', ['bad.py:1', 'batch_sise', 'batch_size']),
                                         ('batch_size = "4"', ['bad.py:1', 'batch_size', 'int'])])
def test_wrong_config_file(fork, tmp_path, text, words):
    (tmp_path / 'bad.py').write_text(text)
    line = fork(tmp_path, 'bad.py', rc=2)
    assert all(word in line for word in words), line


def test_derived_values_follow_the_overrides(fork, tmp_path):
    """On a machine with a GPU, device=cpu on the command line means that nothing asks the GPU."""
    gpu = '''
def refuse(*a, **k): raise RuntimeError('the GPU was asked')
real = torch.cuda.is_available      # torch's own code, which may ask a GPU more, is told the truth: none is visible
torch.cuda.is_available = lambda: sys._getframe(1).f_code.co_filename.endswith('train.py') or real()
torch.cuda.device_count = lambda: 1
torch.cuda.is_bf16_supported = torch.cuda.get_device_name = refuse
torch.cuda.max_memory_allocated = torch.cuda.set_device = refuse
'''
    done = fork(tmp_path, '--out_dir=a', *BARE, '--max_iters=2', before=gpu)
    config = json.loads((tmp_path / 'a' / 'config.json').read_text())
    assert (config['device'], config['dtype'], config['compile']) == ('cpu', 'float32', False)
    assert 'adamw, fused yes' in done.out


def test_start_prints_what_was_derived(base):
    out = (base / 'stdout.txt').read_text()
    for words in (r'4 x block 32 x 2 .*x 1 .*= 256\b', r'\b104,384 parameters',
                  r'\bcpu, float32, compile off, adamw, fused yes',
                  r'20 steps .*\b5,120 tokens, 0.28 epochs of '):
        assert re.search(words, out), words


def test_log_and_config(base):
    steps, evals = log_of(base / 'random')
    assert list(steps) == list(range(20)) and list(evals) == [0, 10, 20]
    for i, r in steps.items():
        assert r['tokens'] == (i + 1) * 256 and r['mfu'] is None and min(r[k] for k in ('loss', 'lr', 'grad_norm',
                'ms', 'tokens_per_s')) > 0
        assert r['tokens_per_s'] == pytest.approx(256 / r['ms'] * 1000)
    for i, r in evals.items():
        assert r['tokens'] == i * 256 and 3 < r['val_loss'] < 4.2 and 3 < r['train_loss'] < 4.2
    out = (base / 'stdout.txt').read_text()
    assert 'MFU n/a' in out and len(re.findall(r'^step \d+: loss', out,
                                               re.M)) == 20 and '\r' not in out and '\033' not in out
    for r in evals.values():
        assert f'{r["iter"]} steps: train loss {r["train_loss"]:.4f}, val loss {r["val_loss"]:.4f}' in out
    config = json.loads((base / 'random' / 'config.json').read_text())
    assert config['dropout'] == 0.2 and config['compile'] is False
    assert (config['device'], config['dtype']) == ('cpu', 'float32')


def test_terminal_gets_a_live_line(fork, tmp_path):
    pty = pytest.importorskip('pty')
    master, slave = pty.openpty()
    fork(tmp_path, '--out_dir=a', *BARE, '--max_iters=5', stdout=os.ttyname(slave))
    text = os.read(master, 65536).decode()
    os.close(slave), os.close(master)
    assert text.count('\r') >= 5 and text.count('\n') < 15
    assert re.search(r'step 4: loss [\d.]+, .*tokens/s, MFU n/a, 0:00:00 left', text)


def test_help_and_imports_are_lean(fork, tmp_path):
    """What makes a start slow, or is not installed everywhere, stays out until it is asked for."""
    fork(tmp_path, '--out_dir=a', *BARE, '--max_iters=1',
         after='''
heavy = {'transformers', 'wandb', 'matplotlib', 'pandas', 'pyarrow', 'torch._inductor.compile_fx'} & set(sys.modules)
assert not heavy, heavy''')


def test_no_linux_only_calls(fork, tmp_path):
    before = '''
import signal
for name in """fork sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate getpgid killpg setsid
    uname getuid getloadavg sendfile statvfs fdatasync sync""".split():
    if hasattr(os, name): delattr(os, name)
for name in """SIGHUP SIGUSR1 SIGUSR2 SIGKILL SIGALRM SIGCHLD SIGCONT SIGQUIT SIGSTOP SIGTSTP""".split():
    if hasattr(signal, name): delattr(signal, name)
for name in ('resource', 'fcntl', 'pwd', 'grp', 'termios', 'pty'): sys.modules[name] = None
'''
    fork(tmp_path, '--out_dir=a', *BARE, '--max_iters=2', before=before)
    fork(tmp_path, '--out_dir=a', *BARE, '--max_iters=4', '--init_from=resume', before=before)


# ---- data ------------------------------------------------------------------------------------------------------------

def dataset(folder, train, val=None, vocab=60, dtype='uint16'):
    """A data folder of these ids, with a meta.json unless vocab is None."""
    folder.mkdir()
    splits = {'train': train, 'val': train if val is None else val}
    for name, ids in splits.items():
        np.asarray(ids).astype(np.dtype(dtype).newbyteorder('<')).tofile(folder / f'{name}.bin')
    if vocab is not None:
        (folder / 'meta.json').write_text(json.dumps(dict(
            vocab_size=vocab, dtype=dtype, tokenizer='numbers', splits={name: {'tokens': len(ids)} for name,
                    ids in splits.items()})))
    return f'--dataset={folder}'


NUMBERS = np.random.default_rng(0).integers(0, 60, 4000)


@pytest.mark.parametrize('block, split, tokens', [(18000, 'train', '18,000'), (17999, 'val', '2,000'),
                                                  (2000, 'val', '2,000')])
def test_split_shorter_than_a_block(fork, tmp_path, block, split, tokens):
    line = fork(tmp_path, f'--block_size={block}', rc=2)
    assert all(word in line for word in (f'{split}.bin', tokens, f'block_size={block}')), line


@pytest.mark.parametrize('order', ['random', 'epoch'])
def test_shortest_split_that_works(fork, tmp_path, order):
    data = dataset(tmp_path / 'd', NUMBERS[:33])
    fork(tmp_path, data, '--out_dir=a', *BARE, '--max_iters=2', f'--data_order={order}')
    assert list(log_of(tmp_path / 'a')[0]) == [0, 1]


@pytest.mark.parametrize('split', ['train', 'val'])
def test_id_beyond_the_vocabulary(fork, tmp_path, split):
    """The last id of the file, found before the first step."""
    bad = np.append(NUMBERS, 60)
    data = dataset(tmp_path / 'd', bad if split == 'train' else NUMBERS, bad if split == 'val' else NUMBERS)
    line = fork(tmp_path, data, rc=2)
    assert all(word in line for word in (f'{split}.bin', '60')), line


def test_the_recorded_dtype_is_read(fork, tmp_path):
    """uint32 and uint16 files of the same ids give the same losses; ids above 65,535 arrive whole."""
    a = dataset(tmp_path / 'a', NUMBERS)
    b = dataset(tmp_path / 'b', NUMBERS, dtype='uint32')
    assert fork(tmp_path, a, *SMALL, '--eval_only=True').out.split('\n')[-2] == fork(tmp_path, b, *SMALL,
            '--eval_only=True').out.split('\n')[-2]
    large = dataset(tmp_path / 'c', NUMBERS + 70000, dtype='uint32', vocab=70060)
    done = fork(tmp_path, large, '--out_dir=out', *SMALL, '--max_iters=2', '--eval_interval=1')
    wte = ckpt_of(tmp_path / 'out')['optimizer']['state']['transformer.wte.weight']['exp_avg']
    assert len(wte) == 70080 and f'{len(wte) * 8 + 32 * 8 + 12 * 64 + 3 * 8:,} parameters' in done.out
    assert '70059' in fork(tmp_path, dataset(tmp_path / 'd', NUMBERS + 70000, vocab=70000, dtype='uint32'), *SMALL,
                           '--out_dir=new', rc=2)


def changed_meta(folder, **changes):
    (folder / 'meta.json').write_text(json.dumps({**json.loads((folder / 'meta.json').read_text()), **changes}))


@pytest.mark.parametrize('spoil, words', [
    (lambda d: (d / 'train.bin').unlink(), ['train.bin', 'prepare.py']),
    (lambda d: (d / 'val.bin').unlink(), ['val.bin', 'prepare.py']),
    (lambda d: (d / 'train.bin').write_bytes(b''), ['train.bin']), (lambda d: (d / 'val.bin').write_bytes(bytes(2001)),
                                                                    ['val.bin', '2,001']),
    (lambda d: (d / 'train.bin').write_bytes(bytes(20000)), ['train.bin', '18,000']),
    (lambda d: (d / 'meta.json').write_text('{"vocab'), ['meta.json']), (lambda d: (d / 'meta.json').write_text('[1]'),
            ['meta.json']),
    (lambda d: changed_meta(d, dtype='text'), ['meta.json', 'text']), (lambda d: changed_meta(d, dtype='float32'),
            ['meta.json', 'float32']),
    (lambda d: ((d / 'val.bin').unlink(), (d / 'val.bin').mkdir()), ['directory', 'val.bin']),
    (lambda d: changed_meta(d, vocab_size=2**40), ['meta.json', 'vocab_size']),
    (lambda d: changed_meta(d, vocab_size=-3), ['meta.json', 'vocab_size is -3']),
    (lambda d: changed_meta(d, tokenizer={'type': 'char', 'itos': 5}), ['meta.json', 'tokenizer.itos is 5']),
    (lambda d: changed_meta(d, splits={'train': 5}), ['meta.json', 'splits.train is 5']),
    (lambda d: (d / 'meta.json').write_text('[]'), ['meta.json', 'not an object']),
    (lambda d: changed_meta(d, vocab_size=0), ['meta.json', 'vocab_size is 0']),
    (lambda d: changed_meta(d, vocab_size='many'), ['meta.json', 'vocab_size'])])
def test_spoilt_dataset(fork, tmp_path, tiny, spoil, words):
    spoil(shutil.copytree(tiny, tmp_path / 'd'))
    line = fork(tmp_path, f'--dataset={tmp_path / "d"}', rc=2)
    assert all(word in line for word in words), line


def test_dataset_by_a_relative_path(fork, tmp_path, tiny):
    shutil.copytree(tiny, tmp_path / 'sub' / 'd')
    fork(tmp_path / 'sub', '--dataset=d', '--eval_only=True')
    fork(tmp_path, '--dataset=sub/d', '--eval_only=True')
    fork(tmp_path / 'sub', '--dataset=./d', '--eval_only=True')


@pytest.mark.parametrize('config, out', [('char', 'char'), ('char_cpu', 'char'), ('char_cpu_fast', 'char-fast')])
def test_20_kilobytes_train_with_the_small_configs(fork, tmp_path, tiny, config, out):
    assert (tiny / 'input.txt').stat().st_size == 20000
    fork(tmp_path, f'config/train_shakespeare_{config}.py', f'--dataset={tiny}', '--device=cpu', '--max_iters=1',
         '--eval_iters=1', '--batch_size=2', tiny_args=False)
    assert list(log_of(tmp_path / f'out-shakespeare-{out}')[0]) == [0]


OFFSETS = '''
draw = g['train_offsets']
print('OFFSETS', json.dumps([draw(step, numpy.arange(n)).tolist() for step in range(steps)]))
print('ONE BY ONE', json.dumps([[draw(step, numpy.array([j])).tolist()[0] for j in range(n)] for step in range(steps)]))
'''


def offsets_of(fork, cwd, *args, steps=40, n=8):
    out = fork(cwd, *BARE, '--max_iters=0', '--eval_only=True', *args, after=f'steps, n = {steps}, {n}' + OFFSETS).out
    whole, single = [json.loads(re.search(rf'^{name} (.*)$', out, re.M)[1]) for name in ('OFFSETS', 'ONE BY ONE')]
    assert whole == single
    return np.array(whole)


@pytest.mark.parametrize('tokens', [33, 64, 65, 200, 330, 4000])
def test_epoch_order_visits_every_window_once_per_epoch(fork, tmp_path, tokens):
    data, windows = dataset(tmp_path / 'd', NUMBERS[:tokens]), (tokens - 1) // 32
    steps = 4 * -(-windows // 8)
    order = offsets_of(fork, tmp_path, data, '--data_order=epoch', steps=steps).flatten()
    epochs = [order[i:i + windows].tolist() for i in range(0, len(order) - windows + 1, windows)]
    assert len(epochs) >= 4 and all(sorted(e) == [32 * i for i in range(windows)] for e in epochs)
    if windows > 4:
        assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])
        other = offsets_of(fork, tmp_path, data, '--data_order=epoch', '--seed=7', steps=steps).flatten()
        assert other.tolist() != order.tolist()


def test_random_order_draws_every_window_alike(fork, tmp_path):
    data = dataset(tmp_path / 'd', NUMBERS[:52])    # windows start at 0 .. 19
    drawn = offsets_of(fork, tmp_path, data, steps=500)
    counts = np.bincount(drawn.flatten(), minlength=20)
    assert len(counts) == 20 and abs(counts - 200).max() < 5 * math.sqrt(200)
    assert len({tuple(row) for row in drawn.tolist()}) == 500       # no step is like another
    again = offsets_of(fork, tmp_path, data, '--batch_size=1', '--gradient_accumulation_steps=8', steps=500)
    other = offsets_of(fork, tmp_path, data, '--seed=7', steps=500)
    assert (again == drawn).all() and (other == drawn).mean() < 0.1


def test_memory_is_bounded(fork, tmp_path):
    """30,000 windows drawn from all over a file of 400 MB, whose pages a memory map would pile up."""
    pytest.importorskip('resource')
    data = dataset(tmp_path / 'd', NUMBERS)
    with open(tmp_path / 'd' / 'train.bin', 'r+b') as f:
        f.truncate(400_000_000)
    meta = json.loads((tmp_path / 'd' / 'meta.json').read_text())
    meta['splits']['train']['tokens'] = 200_000_000
    (tmp_path / 'd' / 'meta.json').write_text(json.dumps(meta))
    peak = 'import resource; print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)'

    def run(accumulation, eval_iters):      # 10 steps, and 2 evaluations of 2 splits
        out = fork(tmp_path, data, '--out_dir=a', '--overwrite=True', *SMALL, '--block_size=8', '--max_iters=10',
                   '--batch_size=32', f'--eval_iters={eval_iters}',
                   f'--gradient_accumulation_steps={accumulation}', after=peak).out
        return int(re.search(r'^PEAK (\d+)', out, re.M)[1]) * (1 if sys.platform == 'darwin' else 1024)
    few, many = run(1, 10), run(20, 200)
    assert many - few < 40e6


# ---- resuming and checkpoints ----------------------------------------------------------------------------------------

def test_killed_and_resumed_run_equals_an_unbroken_one(fork, base, tmp_path):
    """SIGKILL in step 7, the last checkpoint is of step 6; then in real time what a user types."""
    fork(tmp_path, '--out_dir=a', DROPOUT, '--checkpoint_interval=3', rc=-9, before=at_step(7, KILL))
    assert ckpt_of(tmp_path / 'a')['iter_num'] == 6 and list(log_of(tmp_path / 'a')[0]) == list(range(7))
    done = fork(tmp_path, '--out_dir=a', DROPOUT, '--init_from=resume')
    assert re.search(r'resuming from a.ckpt.pt at step 6\b',
                     done.out.replace(os.sep, '/')) and 'checkpoint_interval 3 -> 0' in done.out
    same_run(tmp_path / 'a', base / 'random')


@pytest.mark.parametrize('name', ['SIGTERM', 'SIGINT'])
def test_signal_saves_at_the_next_step_boundary(fork, base, tmp_path, name):
    """The same command, with init_from=auto, starts the run and goes on with it; stopped in step 5, then in step 11."""
    args = '--out_dir=a', DROPOUT, '--data_order=epoch', '--init_from=auto', '--overwrite=True'
    code = {'SIGTERM': 143, 'SIGINT': 130}[name]
    for step, last in ((5, 6), (5, 12)):
        done = fork(tmp_path, *args, rc=code, before=at_step(step, f'os.kill(os.getpid(), signal.{name})'))
        assert ckpt_of(tmp_path / 'a')['iter_num'] == last and f'step {last}' in done.out + done.err
    fork(tmp_path, *args)
    same_run(tmp_path / 'a', base / 'epoch')


def test_signal_in_an_evaluation_does_not_wait_for_its_end(fork, base, tmp_path):
    """In the first one there is nothing to save; the one at step 10 comes again when the run goes on."""
    args = '--out_dir=a', DROPOUT, '--init_from=auto'
    done = fork(tmp_path, *args, rc=130, before=in_evaluation(2, 'SIGINT'))
    assert 'stopping after this step' in done.err and 'after 0 steps; nothing is saved yet' in done.out
    assert not (tmp_path / 'a' / 'ckpt.pt').exists() and 'val loss' not in done.out
    done = fork(tmp_path, *args, rc=143, before=in_evaluation(6 + 4))
    assert ckpt_of(tmp_path / 'a')['iter_num'] == 10 and list(log_of(tmp_path / 'a')[1]) == [0]
    fork(tmp_path, *args)
    same_run(tmp_path / 'a', base / 'random')


@pytest.mark.parametrize('form', [[], ['--checkpoint_format=sharded', '--keep_checkpoints=1'],
                                  ['--checkpoint_format=sharded', '--keep_checkpoints=1', '--checkpoint_async=True']])
def test_the_best_is_not_lost_by_a_stop_before_its_evaluation(fork, tmp_path, form):
    """It is found to be the best by the run that goes on from it, which then gets worse."""
    fork(tmp_path, '--out_dir=a', *form, rc=143, before=in_evaluation(6 + 4))
    fork(tmp_path, '--out_dir=a', *form, '--init_from=auto', '--learning_rate=3', '--min_lr=3')
    evals = {i: r['val_loss'] for i, r in log_of(tmp_path / 'a')[1].items()}
    assert evals[10] < min(evals[0], evals[20])
    if form:
        kept = {p.name: json.loads((p / 'state.json').read_text()) for p in (tmp_path / 'a' / 'ckpt_dcp').iterdir()}
        assert kept.keys() == {'step_10', 'step_20'}
        assert (kept['step_10']['best'], kept['step_20']['best']) == (True, False)
        assert kept['step_10']['best_val_loss'] == kept['step_20']['best_val_loss'] == evals[10]
    else:
        best = ckpt_of(tmp_path / 'a', 'best.pt')
        assert (best['iter_num'], best['best_val_loss']) == (10, evals[10])
        assert ckpt_of(tmp_path / 'a')['best_val_loss'] == evals[10]


def test_goes_on_from_best_pt_if_nothing_is_newer(fork, base, tmp_path):
    fork(tmp_path, '--out_dir=a', DROPOUT, '--checkpoint_interval=1000', rc=-9, before=at_step(14, KILL))
    assert not (tmp_path / 'a' / 'ckpt.pt').exists()
    fork(tmp_path, '--out_dir=a', DROPOUT, '--init_from=auto')
    same_run(tmp_path / 'a', base / 'random')


def test_resuming_takes_the_shape_from_the_checkpoint(fork, copy_of, base, tiny):
    out = copy_of()
    fork(out.parent, f'--out_dir={out}', '--init_from=resume', f'--dataset={tiny}', '--device=cpu', '--batch_size=4',
         '--gradient_accumulation_steps=2',
         '--max_iters=22', '--eval_iters=3', tiny_args=False)
    assert list(log_of(out)[0]) == list(range(22)) and list(log_of(out)[1]) == [0, 10, 20, 22]
    assert ckpt_of(out)['iter_num'] == 22 and ckpt_of(out)['model_args'] == ckpt_of(base / 'random')['model_args']
    config = json.loads((out / 'config.json').read_text())
    assert (config['n_layer'], config['block_size']) == (2, 32)


def test_resuming_a_finished_run_changes_nothing(fork, copy_of, base):
    out = copy_of()
    fork(out.parent, f'--out_dir={out}', DROPOUT, '--init_from=resume')
    same_run(out, base / 'random')
    fork(out.parent, f'--out_dir={out}', DROPOUT, '--init_from=resume', '--max_iters=12')
    same_weights(out, base / 'random')


def test_evaluation_and_logging_never_change_the_training(fork, base, tmp_path):
    fork(tmp_path, '--out_dir=a', DROPOUT, '--eval_interval=3', '--eval_iters=7', '--log_interval=4',
         '--checkpoint_interval=5', '--check_sync_interval=2',
         '--always_save_checkpoint=False')
    same_weights(tmp_path / 'a', base / 'random')
    steps, expected = log_of(tmp_path / 'a')[0], log_of(base / 'random')[0]
    assert set(steps) >= {0, 4, 8, 12, 16} and all(steps[i]['loss'] == expected[i]['loss'] for i in steps)


def test_seed_order_and_dropout_matter(base, fork, tmp_path):
    """In steps after an evaluation, which turns dropout off for its time."""
    fork(tmp_path, '--out_dir=a', DROPOUT, '--seed=7')
    fork(tmp_path, '--out_dir=b')
    for other in (base / 'epoch', tmp_path / 'a', tmp_path / 'b'):
        assert log_of(other)[0][3]['loss'] != log_of(base / 'random')[0][3]['loss']


@pytest.mark.parametrize('extra', [[], ['--init_from=resume'], ['--init_from=auto'], ['--overwrite=True'],
                                   ['--init_from=resume', '--max_iters=100']])
def test_eval_only_never_trains_or_writes(fork, copy_of, base, extra):
    out = copy_of()
    before = tree(out.parent)
    text = fork(out.parent, f'--out_dir={out}', '--eval_only=True', '--always_save_checkpoint=True', *extra).out
    assert tree(out.parent) == before and 'loss' in text and 'lr ' not in text
    if any('resume' in e or 'auto' in e for e in extra):
        assert f'val loss {log_of(base / "random")[1][20]["val_loss"]:.4f}' in text
    fork(out.parent, '--out_dir=new', '--eval_only=True')
    assert tree(out.parent) == before


@pytest.mark.parametrize('args, words', [
    ('--block_size=16', ['block_size=16', '32']), ('--block_size=64', ['block_size=64', '32']),
    ('--n_layer=3', ['n_layer=3', '2']),
    ('--n_head=4', ['n_head=4', '2']), ('--n_embd=32', ['n_embd=32', '64']), ('--bias=True', ['bias=True', 'False'])])
@pytest.mark.parametrize('mode', ['resume', 'auto'])
def test_resuming_with_another_shape(fork, copy_of, mode, args, words):
    out = copy_of()
    line = fork(out.parent, f'--out_dir={out}', f'--init_from={mode}', '--max_iters=30', args, rc=2)
    assert all(word in line for word in words), line


def test_resuming_with_another_alphabet(fork, copy_of, tmp_path):
    out = copy_of()
    other = write_dataset(tmp_path / 'other', 'abcdefgh ' * 1000)
    line = fork(tmp_path, f'--out_dir={out}', '--init_from=resume', f'--dataset={other}', '--max_iters=30', rc=2)
    assert 'other' in line and 'ckpt.pt' in line


@pytest.mark.parametrize('spoil, words', [
    (lambda f: f.write_bytes(f.read_bytes()[:5000]), ['ckpt.pt']), (lambda f: f.write_bytes(b''), ['ckpt.pt']),
    (lambda f: f.write_text('hello'), ['ckpt.pt']),
    (lambda f: torch.save(torch.nn.Linear(2, 2), f), ['ckpt.pt: torn', 'Linear was not an allowed global by default)']),
    (lambda f: torch.save({'a': 1}, f), ['ckpt.pt']), (lambda f: torch.save([1], f), ['ckpt.pt']),
    (lambda f: f.unlink(), ['init_from=resume', 'random']),
    (lambda f: torch.save({k: v for k, v in ckpt_of(f.parent).items() if k != 'optimizer'}, f), ['ckpt.pt']),
    (lambda f: torch.save({**ckpt_of(f.parent), 'model': {}}, f), ['ckpt.pt']),
    (lambda f: torch.save({**ckpt_of(f.parent), 'iter_num': '20'}, f), ['ckpt.pt', 'no iter_num']),
    (lambda f: torch.save({**(c := ckpt_of(f.parent)), 'optimizer': {
        **c['optimizer'], 'state': dict(list(c['optimizer']['state'].items())[1:])}}, f), ['ckpt.pt', 'wte.weight'])])
@pytest.mark.parametrize('mode', ['resume', 'auto'])
def test_resuming_from_a_broken_checkpoint(fork, copy_of, spoil, words, mode):
    out = copy_of()
    (out / 'best.pt').unlink()
    spoil(out / 'ckpt.pt')
    if (out / 'ckpt.pt').exists() or mode == 'resume':
        line = fork(out.parent, f'--out_dir={out}', f'--init_from={mode}', rc=2)
        assert all(word.replace('resume', mode) in line for word in words), line


@pytest.mark.parametrize('mode', ['resume', 'auto'])
def test_a_broken_newest_checkpoint_is_passed_over(fork, copy_of, mode):
    """The newest that loads is taken, the one that does not is told, kept out of the way, and replaced."""
    out = copy_of()
    shutil.copy(out / 'ckpt.pt', out / 'best.pt')
    (out / 'ckpt.pt').write_bytes((out / 'ckpt.pt').read_bytes()[:-1000])
    torn = (out / 'ckpt.pt').read_bytes()
    done = fork(out.parent, f'--out_dir={out}', f'--init_from={mode}', DROPOUT, '--max_iters=22')
    assert 'passed over' in done.out and 'ckpt.pt: torn' in done.out
    assert f'resuming from {out}/best.pt at step 20' in done.out
    assert ckpt_of(out)['iter_num'] == 22 and (out / 'ckpt.pt.torn').read_bytes() == torn


@pytest.mark.parametrize('spoil', ['.metadata', '__0_0.distcp', 'state.json', 'incomplete'])
def test_a_broken_newest_sharded_checkpoint_is_passed_over(fork, tmp_path, spoil):
    args = '--out_dir=out', '--checkpoint_format=sharded', '--checkpoint_interval=2'
    fork(tmp_path, *args, '--max_iters=6')
    folder = tmp_path / 'out' / 'ckpt_dcp'
    if spoil == 'incomplete':
        (folder / 'step_6' / '.metadata').unlink()
        shutil.copytree(folder / 'step_4', folder / 'step_9.tmp')
    else:
        (folder / 'step_6' / spoil).write_bytes((folder / 'step_6' / spoil).read_bytes()[:40])
    done = fork(tmp_path, *args, '--init_from=auto', '--max_iters=8')
    assert 'passed over' in done.out and 'step_6' in done.out and 'step_4 at step 4' in done.out
    kept = {path.name for path in folder.iterdir()}
    assert kept == {'step_2', 'step_4', 'step_6', 'step_8'} | (set() if spoil == 'incomplete' else {'step_6.torn'})


def test_auto_never_deletes_parts_of_checkpoints(fork, tmp_path):
    fork(tmp_path, '--out_dir=out', '--checkpoint_format=sharded', '--max_iters=2')
    (tmp_path / 'out' / 'ckpt_dcp' / 'step_2' / '.metadata').unlink()
    for mode in ('auto', 'resume'):
        line = fork(tmp_path, '--out_dir=out', f'--init_from={mode}', rc=2)
        assert 'step_2' in line and '.metadata' in line and '--overwrite=True' in line
    fork(tmp_path, '--out_dir=out', '--overwrite=True', '--max_iters=2')


@pytest.mark.parametrize('name', ['.metadata', '__0_0.distcp', 'state.json', '-state.json', '{state.json'])
def test_resuming_from_a_torn_sharded_checkpoint(fork, tmp_path, name):
    fork(tmp_path, '--out_dir=out', '--checkpoint_format=sharded', '--max_iters=2')
    torn = tmp_path / 'out' / 'ckpt_dcp' / 'step_2' / name.strip('-{')
    torn.write_bytes(b'{}' if name[0] == '{' else torn.read_bytes()[:40])
    if name[0] == '-':
        torn.unlink()
    line = fork(tmp_path, '--out_dir=out', '--init_from=resume', '--max_iters=4', rc=2)
    assert 'step_2' in line and 'torn' in line, line


@pytest.mark.parametrize('out_dir', ['file', 'file/below'])
def test_out_dir_that_can_not_be_made(fork, tmp_path, out_dir):
    (tmp_path / 'file').write_text('mine')
    assert 'out_dir=file' in fork(tmp_path, f'--out_dir={out_dir}', rc=2)
    assert (tmp_path / 'file').read_text() == 'mine'


def test_what_the_system_refuses_is_one_line(fork, copy_of):
    """Here a folder in a file's place; and a log with lines of others is no obstacle."""
    out = copy_of()
    (out / 'best.pt').unlink(), (out / 'best.pt').mkdir()
    with open(out / 'log.jsonl', 'ab') as f:
        f.write(b'{"mine": 1}\n[2]\n\xff\xfe\n{"iter": 2')
    done = fork(out.parent, f'--out_dir={out}', DROPOUT, '--init_from=resume', '--max_iters=30', rc=None)
    assert done.codes != [0] and done.err.count('\n') == 1 and 'best.pt' in done.err, done.err


def test_a_full_disk_is_one_line_and_leaves_the_checkpoint(fork, copy_of):
    pytest.importorskip('resource')
    out = copy_of()
    before = (out / 'ckpt.pt').read_bytes()
    done = fork(out.parent, f'--out_dir={out}', '--init_from=resume', '--max_iters=21', rc=1,
                before=FULL_DISK.format(size=600_000))
    assert done.err.count('\n') == 1 and 'train.py: ' in done.err and 'make room' in done.err
    assert (out / 'ckpt.pt').read_bytes() == before and not list(out.glob('*.tmp'))


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), 'w')


def test_nothing_in_a_checkpoint_is_executed(fork, copy_of, tmp_path):
    out = copy_of()
    (out / 'best.pt').unlink()
    torch.save({**ckpt_of(out), 'config': Evil(tmp_path / 'executed')}, out / 'ckpt.pt')
    fork(tmp_path, f'--out_dir={out}', '--init_from=resume', rc=2)
    assert not (tmp_path / 'executed').exists()
    for folder in ('', 'data', 'scripts'):
        for name in os.listdir(os.path.join(ROOT, folder)):
            if name.endswith('.py'):
                with open(os.path.join(ROOT, folder, name), encoding='utf-8') as f:
                    for call in re.findall(r'torch\.load\((?:[^()]|\([^()]*\))*\)', f.read()):
                        assert 'weights_only=True' in call, f'{name}: {call}'


def test_a_new_run_does_not_touch_an_old_one(fork, copy_of):
    out = copy_of()
    (out / 'notes.txt').write_text('mine')
    line = fork(out.parent, f'--out_dir={out}', rc=2)
    assert all(word in line for word in (str(out), '--overwrite=True', '--init_from=auto')), line
    fork(out.parent, f'--out_dir={out}', '--overwrite=True', '--max_iters=3', '--eval_interval=1000')
    assert ckpt_of(out)['iter_num'] == 3 and list(log_of(out)[0]) == [0, 1, 2]
    assert (out / 'notes.txt').read_text() == 'mine'
    assert not (out / 'best.pt').exists() or ckpt_of(out, 'best.pt')['iter_num'] <= 3


def test_overwrite_does_not_delete_what_the_run_starts_from(fork, copy_of):
    out = copy_of()
    for source in (out, out / 'best.pt'):
        line = fork(out.parent, f'--out_dir={out}', f'--init_from={source}', '--overwrite=True', rc=2)
        assert 'another --out_dir' in line      # and the files are as before
    fork(out.parent, f'--out_dir={out}', f'--init_from={out}', '--overwrite=True', '--eval_only=True', *SMALL[3:])


def test_overwrite_takes_a_link_away_not_what_it_points_to(fork, copy_of, tmp_path):
    out = copy_of()
    (tmp_path / 'elsewhere').mkdir()
    (tmp_path / 'elsewhere' / 'mine').touch()
    (out / 'ckpt_dcp').symlink_to(tmp_path / 'elsewhere')
    fork(out.parent, f'--out_dir={out}', '--overwrite=True', *BARE, '--max_iters=1')
    assert not (out / 'ckpt_dcp').exists() and (tmp_path / 'elsewhere' / 'mine').exists()


def test_a_datasets_path_is_kept_for_scripts_that_run_elsewhere(fork, tmp_path, tiny):
    shutil.copytree(tiny, tmp_path / 'd')
    fork(tmp_path, '--dataset=d', '--out_dir=a', *BARE, '--max_iters=1')
    assert json.loads((tmp_path / 'a' / 'config.json').read_text())['dataset'] == str(tmp_path / 'd')


def test_every_machine_says_why(fork, tmp_path):
    """The first rank of the second of two machines: its fault may be its own, such as a dataset that is only here."""
    env = {'RANK': '1', 'LOCAL_RANK': '0', 'WORLD_SIZE': '2'}
    assert 'nothere' in fork(tmp_path, '--dataset=nothere', env=env, rc=2)


def test_a_validation_loss_that_is_not_finite_is_no_best(fork, base, tmp_path):
    """Nor does it keep later ones from being the best."""
    nan = """
import model
evaluated, real_forward = [0], model.GPT.forward
def forward(self, *args):
    evaluated[0] += not self.training
    return real_forward(self, *args) * (float('nan') if not self.training and 6 < evaluated[0] <= 12 else 1)
model.GPT.forward = forward
"""
    fork(tmp_path, '--out_dir=a', DROPOUT, '--on_nonfinite=skip', before=nan)
    assert math.isnan(log_of(tmp_path / 'a')[1][10]['val_loss'] or math.nan)
    same_weights(ckpt_of(tmp_path / 'a', 'best.pt'), ckpt_of(base / 'random', 'best.pt'))


def test_overwrite_deletes_nothing_until_all_is_checked(fork, copy_of):
    out = copy_of()
    for args in (['--block_size=100000'], ['--init_from=nowhere'], ['--dataset=nowhere']):
        fork(out.parent, f'--out_dir={out}', '--overwrite=True', *args, rc=2)     # and the files are as before


def test_max_iters_is_the_number_of_steps(fork, tmp_path):
    fork(tmp_path, '--out_dir=a', *SMALL, '--max_iters=7', '--eval_interval=4')
    steps, evals = log_of(tmp_path / 'a')
    assert list(steps) == list(range(7)) and list(evals) == [0, 4, 7] and ckpt_of(tmp_path / 'a')['iter_num'] == 7
    assert all(s['step'] == 7 for s in ckpt_of(tmp_path / 'a')['optimizer']['state'].values())


def test_best_and_last(fork, tmp_path):
    """`best` only improves, also over resumes; `last` is the last."""
    out = tmp_path / 'a'
    fork(tmp_path, '--out_dir=a', '--max_iters=10', '--eval_interval=5')
    evals = log_of(out)[1]
    assert evals[0]['val_loss'] > evals[5]['val_loss'] > evals[10]['val_loss']
    best = ckpt_of(out, 'best.pt')
    assert best['iter_num'] == 10 and best['best_val_loss'] == evals[10]['val_loss']
    same_weights(best, out)
    saved = tree(out)['best.pt']
    fork(tmp_path, '--out_dir=a', '--max_iters=15', '--eval_interval=5', '--init_from=resume', '--decay_lr=False',
         '--learning_rate=0.1')
    fork(tmp_path, '--out_dir=a', '--max_iters=18', '--eval_interval=3', '--init_from=resume', '--decay_lr=False',
         '--learning_rate=1e-3')
    evals = log_of(out)[1]
    # worse, then better than before, but not best
    assert evals[15]['val_loss'] > evals[18]['val_loss'] > evals[10]['val_loss']
    assert tree(out)['best.pt'] == saved
    assert ckpt_of(out)['iter_num'] == 18 and ckpt_of(out)['best_val_loss'] == evals[10]['val_loss']
    fork(tmp_path, '--out_dir=a', '--max_iters=100', '--eval_interval=100', '--init_from=resume', '--decay_lr=False',
         '--learning_rate=1e-2')
    assert log_of(out)[1][100]['val_loss'] < evals[10]['val_loss'] and ckpt_of(out, 'best.pt')['iter_num'] == 100


def test_always_save_checkpoint_false(fork, tmp_path):
    """Without improvement only the end is saved. (Nothing learns at a rate of 0.)"""
    rate = '--learning_rate=0', '--min_lr=0', '--eval_interval=2', '--max_iters=6', *SMALL
    assert fork(tmp_path, '--out_dir=a', *rate, '--always_save_checkpoint=False').out.count('saved') == 1
    assert ckpt_of(tmp_path / 'a')['iter_num'] == 6
    assert fork(tmp_path, '--out_dir=b', *rate).out.count('saved') == 3


KILL_IN_SAVE = '''
import os, signal
saves, replaced = [0], [0]
real_save, real_replace = torch.save, os.replace
def save(obj, f, *a, **k):
    saves[0] += 1
    if saves[0] == 2 and moment == 'half':
        f.write(b'PK' * 1000); f.flush(); os.kill(os.getpid(), signal.SIGKILL)
    real_save(obj, f, *a, **k)
def replace(a, b):
    replaced[0] += str(b).endswith(name)
    if replaced[0] == 2 and moment == 'before': os.kill(os.getpid(), signal.SIGKILL)
    real_replace(a, b)
    if replaced[0] == 2 and moment == 'after': os.kill(os.getpid(), signal.SIGKILL)
torch.save, os.replace = save, replace
'''


@pytest.mark.parametrize('moment, name', [('half', ''), ('before', 'ckpt.pt'), ('after', 'ckpt.pt'),
                                          ('before', 'best.pt')])
def test_killed_while_saving(fork, base, tmp_path, moment, name):
    """Both checkpoints, of steps 10 and 20, improve on the validation loss; the kill comes in the second save."""
    fork(tmp_path, '--out_dir=a', DROPOUT, rc=-9, before=f'moment, name = {moment!r}, {name!r}' + KILL_IN_SAVE)
    assert ckpt_of(tmp_path / 'a')['iter_num'] in (10, 20) and ckpt_of(tmp_path / 'a',
            'best.pt')['iter_num'] in (10, 20)
    fork(tmp_path, '--out_dir=a', DROPOUT, '--init_from=resume')
    same_run(tmp_path / 'a', base / 'random')
    same_weights(ckpt_of(tmp_path / 'a', 'best.pt'), tmp_path / 'a')
    assert not [p.name for p in (tmp_path / 'a').iterdir() if p.name.endswith('.tmp')]


def test_checkpoint_content(base):
    c = ckpt_of(base / 'random')
    plain = GPT(GPTConfig(**{**c['model_args'], 'dropout': 0.0}))
    assert c['model'].keys() == plain.state_dict().keys()
    plain.load_state_dict(c['model'])
    assert c['model']['lm_head.weight'].data_ptr() == c['model']['transformer.wte.weight'].data_ptr()
    size, n = (base / 'random' / 'ckpt.pt').stat().st_size, plain.num_params()
    assert size < 3 * 4 * n + 60_000        # weights once and two moments
    assert c['optimizer']['state'].keys() == dict(plain.named_parameters()).keys()
    assert c['config']['dropout'] == 0.2 and c['meta']['vocab_size'] == c['model_args']['vocab_size']


@pytest.mark.parametrize('how', ['True', 'blocks'])
def test_compiled_run_saves_plain_names(fork, base, tmp_path, how):
    """torch.compile, with a backend that needs no C++ compiler. What it saves goes on uncompiled."""
    eager = 'import functools; torch.compile = functools.partial(torch.compile, backend="eager")'
    done = fork(tmp_path, '--out_dir=a', DROPOUT, '--max_iters=10', f'--compile={how}', before=eager, warn=False)
    assert f'compile {"on" if how == "True" else how}' in done.out
    assert ckpt_of(tmp_path / 'a')['model'].keys() == ckpt_of(base / 'random')['model'].keys()
    steps, expected = log_of(tmp_path / 'a')[0], log_of(base / 'random')[0]
    assert [steps[i]['loss'] for i in range(10)] == pytest.approx([expected[i]['loss'] for i in range(10)], rel=2e-6)
    fork(tmp_path, '--out_dir=a', DROPOUT, '--init_from=resume')


# ---- the loop --------------------------------------------------------------------------------------------------------

def test_steps_equal_plain_autograd(fork, base, tmp_path, tiny):
    """Three steps from the checkpoint of step 10 done by hand: loss, clipping by one norm, AdamW's two groups."""
    fork(tmp_path, '--out_dir=a', '--max_iters=10')
    c, settings = ckpt_of(tmp_path / 'a'), ('--init_from=resume', '--out_dir=a', '--max_iters=13', '--grad_clip=0.3',
                                            '--weight_decay=0.5', '--beta2=0.9',
                                            '--learning_rate=2e-3')
    out = fork(tmp_path, *settings,
               after='print("OFFSETS", json.dumps([g["train_offsets"](s, numpy.arange(8)).tolist() for s in '
                     'range(10, 13)]))').out
    model = GPT(GPTConfig(**{**c['model_args'], 'dropout': 0.0}))
    model.load_state_dict(c['model'])
    tokens = torch.from_numpy(np.fromfile(tiny / 'train.bin', '<u2').astype(np.int64))
    moments = c['optimizer']['state']
    for i, offsets in zip((10, 11, 12), json.loads(re.search('OFFSETS (.*)', out)[1])):
        X, Y = [torch.stack([tokens[o + shift:o + shift + 32] for o in offsets]) for shift in (0, 1)]
        loss = model(X, Y).mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        logged = log_of(tmp_path / 'a')[0][i]
        assert logged['loss'] == pytest.approx(loss.item(),
                                               rel=2e-6) and logged['grad_norm'] == pytest.approx(norm.item(), rel=1e-5)
        lr = 1e-4 + (2e-3 - 1e-4) * (1 + math.cos(math.pi * (i - 4) / 16)) / 2
        assert logged['lr'] == pytest.approx(lr) and norm > 0.3
        with torch.no_grad():
            for (name, p), grad in zip(model.named_parameters(), grads):
                m, v = moments[name]['exp_avg'], moments[name]['exp_avg_sq']
                grad = grad * 0.3 / norm
                m.mul_(0.9).add_(0.1 * grad), v.mul_(0.9).add_(0.1 * grad ** 2)
                p.mul_(1 - lr * 0.5 if p.dim() >= 2 else 1)
                p.sub_(lr * (m / (1 - 0.9 ** (i + 1))) / ((v / (1 - 0.9 ** (i + 1))).sqrt() + 1e-8))
    for name, p in ckpt_of(tmp_path / 'a')['model'].items():
        assert torch.allclose(p, model.state_dict()[name], rtol=0, atol=2e-6), name


@pytest.mark.parametrize('batch, accumulation', [(8, 1), (1, 8)])
def test_accumulation_is_the_mean_over_micro_batches(fork, tmp_path, base, batch, accumulation):
    fork(tmp_path, '--out_dir=a')
    fork(tmp_path, '--out_dir=b', f'--batch_size={batch}', f'--gradient_accumulation_steps={accumulation}')
    a, b = log_of(tmp_path / 'a')[0], log_of(tmp_path / 'b')[0]
    assert [r['loss'] for r in b.values()] == pytest.approx([r['loss'] for r in a.values()], rel=2e-6)
    assert [r['grad_norm'] for r in b.values()] == pytest.approx([r['grad_norm'] for r in a.values()], rel=1e-4)
    for k, v in ckpt_of(tmp_path / 'a')['model'].items():
        assert torch.allclose(v, ckpt_of(tmp_path / 'b')['model'][k], rtol=0, atol=5e-5), k


@pytest.mark.parametrize('warmup, decay, steps', [(4, 8, 10), (0, 0, 3), (0, 4, 6), (1, 1, 3), (5, 5, 7), (6, 3, 8),
                                                  (3, 100, 6), (100, 100, 5), (0, 1, 3)])
def test_learning_rate(fork, tmp_path, warmup, decay, steps):
    fork(tmp_path, '--out_dir=a', *BARE, f'--max_iters={steps}', f'--warmup_iters={warmup}',
         f'--lr_decay_iters={decay}')
    rates = [r['lr'] for r in log_of(tmp_path / 'a')[0].values()]
    assert rates == [lr_at(ckpt_of(tmp_path / 'a')['config'], i) for i in range(steps)]     # as the scripts have it
    assert len(rates) == steps and min(rates) > 0 and max(rates) <= 1e-3
    for i, lr in enumerate(rates):
        if i < warmup:
            assert lr == pytest.approx(1e-3 * (i + 1) / warmup)      # above 0 at first, the maximum in the end
        elif i >= decay:
            assert lr == pytest.approx(1e-4)
        else:
            assert lr == pytest.approx(1e-4 + 9e-4 * (1 + math.cos(math.pi * (i - warmup) / (decay - warmup))) / 2)


def test_warmup_stable_decay(fork, tmp_path):
    fork(tmp_path, '--out_dir=a', *BARE, '--decay=wsd', '--max_iters=15', '--warmup_iters=2', '--lr_decay_iters=12')
    rates = [r['lr'] for r in log_of(tmp_path / 'a')[0].values()]
    by_hand = [0.5, *[1] * 8, 0.775, 0.55, 0.325, *[0.1] * 3]       # of the maximum; min_lr is a tenth
    assert rates == pytest.approx([1e-3 * share for share in by_hand])
    config = ckpt_of(tmp_path / 'a')['config']
    assert rates == [lr_at(config, i) for i in range(15)]
    del config['decay']     # a run from before the setting: cosine
    assert lr_at(config, 7) == pytest.approx(1e-4 + 9e-4 / 2)
    with pytest.raises(ValueError, match="decay='linear' is not known to lr_at in scripts/common.py"):
        lr_at({**config, 'decay': 'linear'}, 7)     # of a fork, whose train.py alone has it


def test_constant_and_scaled_learning_rate(fork, tmp_path):
    fork(tmp_path, '--out_dir=a', *BARE, '--max_iters=6', '--decay_lr=False')
    assert {r['lr'] for r in log_of(tmp_path / 'a')[0].values()} == {1e-3}
    fork(tmp_path, '--out_dir=b', *BARE, '--max_iters=21', '--scale_lr=True', '--gradient_accumulation_steps=3')
    rates = [r['lr'] for r in log_of(tmp_path / 'b')[0].values()]
    assert rates[3] == pytest.approx(3e-3) and rates[20] == pytest.approx(3e-4)


def test_overfits_ten_windows(fork, tmp_path):
    data = dataset(tmp_path / 'd', NUMBERS[:321])
    fork(tmp_path, data, '--out_dir=a', '--data_order=epoch', '--batch_size=10', '--gradient_accumulation_steps=1',
         '--max_iters=200', '--eval_interval=200',
         '--lr_decay_iters=200', '--learning_rate=5e-3', '--log_interval=10')
    losses = [r['loss'] for r in log_of(tmp_path / 'a')[0].values()]
    assert losses[0] > 4 and losses[-1] < 0.1


@pytest.mark.parametrize('action', [POISON, POISON.replace('nan', 'inf')])
def test_nonfinite_gradient_stops(fork, tmp_path, action):
    done = fork(tmp_path, '--out_dir=a', '--checkpoint_interval=3', rc=1, before=at_step(5, action))
    assert re.search(r'step 5\b.*(nan|inf)', done.out + done.err) and 'Traceback' not in done.err
    c = ckpt_of(tmp_path / 'a')
    assert c['iter_num'] == 3 and all(v.isfinite().all() for v in c['model'].values())
    assert list(log_of(tmp_path / 'a')[0])[:5] == [0, 1, 2, 3, 4]


def nan_loss(n):
    """Code that makes the loss of a micro-batch of the n-th step, from 0, not a number."""
    return at_step(n - 1, 'pass') + '''
import model
real_forward = model.GPT.forward
def forward(self, *a, **k):
    loss = real_forward(self, *a, **k)
    return loss * nan if self.training and steps[0] == N else loss
model.GPT.forward = forward
'''.replace('== N', f'== {n}')


def test_nonfinite_loss_stops(fork, tmp_path):
    done = fork(tmp_path, '--out_dir=a', rc=1, before=nan_loss(5))
    assert re.search(r'step 5\b.*nan', done.out + done.err) and 'Traceback' not in done.err


@pytest.mark.parametrize('before', [nan_loss(5), at_step(5, POISON)])
def test_nonfinite_step_is_skipped_if_asked(fork, tmp_path, before):
    """The step counts, and leaves weights and optimizer as they were."""
    fork(tmp_path, '--out_dir=a', '--max_iters=5')
    done = fork(tmp_path, '--out_dir=b', '--max_iters=6', '--on_nonfinite=skip', before=before)
    assert re.findall(r'step (\d+): .*nan: skipped$', done.out, re.M) == ['5']
    a, b = ckpt_of(tmp_path / 'a'), ckpt_of(tmp_path / 'b')
    assert (a['iter_num'], b['iter_num']) == (5, 6)
    same_weights({**a, 'iter_num': 6}, b)
    fork(tmp_path, '--out_dir=b', '--init_from=resume', '--max_iters=9')
    assert all(v.isfinite().all() for v in ckpt_of(tmp_path / 'b')['model'].values())

    def no_constant(name):
        raise AssertionError(f'{name} is no JSON')
    for line in (tmp_path / 'b' / 'log.jsonl').read_text().splitlines():
        json.loads(line, parse_constant=no_constant)


@pytest.mark.parametrize('dtype, rel', [('bfloat16', 1e-2), ('float16', 2e-3)])
def test_narrow_types(fork, base, tmp_path, dtype, rel):
    """Losses and norms (before clipping, after unscaling) stay near float32's; a resumed run keeps its loss scale."""
    fork(tmp_path, '--out_dir=f', '--max_iters=10')
    fork(tmp_path, '--out_dir=a', '--max_iters=10', f'--dtype={dtype}')
    a, f = log_of(tmp_path / 'a')[0], log_of(tmp_path / 'f')[0]
    for k in ('loss', 'grad_norm'):
        assert [r[k] for r in a.values()] == pytest.approx([r[k] for r in f.values()],
                                                           rel=rel if k == 'loss' else 5 * rel)
    c = ckpt_of(tmp_path / 'a')
    assert all(v.dtype == torch.float32 for v in c['model'].values())
    assert bool(c['scaler']) == (dtype == 'float16')
    fork(tmp_path, '--out_dir=a', '--max_iters=12', f'--dtype={dtype}', '--init_from=resume')
    fork(tmp_path, '--out_dir=b', '--max_iters=12', f'--dtype={dtype}')
    same_weights(tmp_path / 'a', tmp_path / 'b')


def test_float16_overflow_lowers_the_scale_and_goes_on(fork, tmp_path):
    """An infinite scaled gradient is everyday life of a loss scale, no reason to stop."""
    done = fork(tmp_path, '--out_dir=a', '--max_iters=4', '--dtype=float16', '--on_nonfinite=skip',
                before=at_step(1, POISON.replace('nan', 'inf')))
    assert 'skipped' not in done.out
    c = ckpt_of(tmp_path / 'a')
    assert c['iter_num'] == 4 and c['scaler']['scale'] == 2.0 ** 15
    assert all(v.isfinite().all() for v in c['model'].values())
    assert {float(s['step']) for s in c['optimizer']['state'].values()} == {3.0}


def test_float16_does_not_skip_for_ever(fork, tmp_path):
    """Once the loss scale can not be to blame, a gradient that is not finite stops the run as in any other type."""
    always = at_step(0, POISON).replace('if steps[0] == 0 + 1', 'if True')
    done = fork(tmp_path, '--out_dir=a', '--max_iters=30', '--dtype=float16', rc=1, before=always)
    assert re.search(r'step 16: .*nan', done.out), done.out     # 65536 has been halved 16 times


def test_no_wait_per_micro_batch(fork, tmp_path):
    """A number fetched from the device makes the host wait: their count must not grow with accumulation."""
    count = '''
fetched = [0]
for name in ('item', 'tolist', '__float__', '__bool__', '__int__', 'cpu', 'numpy'):
    def counted(self, *a, real=getattr(torch.Tensor, name), **k):
        fetched[0] += 1
        return real(self, *a, **k)
    setattr(torch.Tensor, name, counted)
'''
    got = [re.search(r'FETCHED (\d+)', fork(tmp_path, f'--out_dir={n}', *BARE, '--max_iters=6', '--batch_size=1',
                                            f'--gradient_accumulation_steps={n}',
                                             before=count,
                                             after='print("FETCHED", fetched[0])').out)[1] for n in (1, 8)]
    assert got[0] == got[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_fused_on_a_numbered_gpu(train, tmp_path):
    done = train(tmp_path, '--out_dir=a', '--device=cuda:0', '--compile=False', '--max_iters=2',
                 env={'CUDA_VISIBLE_DEVICES': '0'})
    assert 'adamw, fused yes' in done.out


# ---- wandb -----------------------------------------------------------------------------------------------------------

def test_wandb_missing(fork, copy_of):
    out = copy_of()
    for args in (['--out_dir=new'], [f'--out_dir={out}', '--overwrite=True'],
                 [f'--out_dir={out}', '--init_from=resume']):
        line = fork(out.parent, *args, '--wandb_log=True', before='sys.modules["wandb"] = None', rc=2)
        assert 'pip install wandb' in line


def test_wandb_without_a_key(fork, copy_of):
    pytest.importorskip('wandb')
    out = copy_of()
    home = {'HOME': str(out.parent), 'NETRC': str(out.parent / 'none'), 'WANDB_MODE': 'online',
            'WANDB_BASE_URL': 'http://127.0.0.1:9'}
    line = fork(out.parent, f'--out_dir={out}', '--overwrite=True', '--wandb_log=True', env=home, rc=2)
    assert 'wandb' in line and 'WANDB_MODE=offline' in line


def test_wandb_offline_run_is_continued(fork, tmp_path):
    pytest.importorskip('wandb')
    args, env = ('--out_dir=a', *SMALL, '--eval_interval=2', '--wandb_log=True'), {'WANDB_MODE': 'offline',
            'HOME': str(tmp_path)}
    fork(tmp_path, *args, '--max_iters=4', env=env, warn=False)
    name = ckpt_of(tmp_path / 'a')['wandb_id']
    fork(tmp_path, *args, '--max_iters=6', '--init_from=resume', env=env, warn=False)
    assert name and ckpt_of(tmp_path / 'a')['wandb_id'] == name
    runs = sorted((tmp_path / 'a' / 'wandb').glob('offline-run-*'))
    assert len(runs) >= 1 and all(run.name.endswith('-' + name) for run in runs)


# ---- nanoGPT's config files, data folders and checkpoints; pretrained weights ----------------------------------------

def pickled_meta(folder):
    """The dataset of NUMBERS as nanoGPT's character-level prepare.py leaves it."""
    chars = [chr(48 + i) for i in range(60)]
    data = dataset(folder, NUMBERS, NUMBERS[:400], vocab=None)
    with open(folder / 'meta.pkl', 'wb') as f:
        pickle.dump({'vocab_size': 60, 'itos': dict(enumerate(chars)), 'stoi': {c: i for i, c in enumerate(chars)}}, f)
    return data


def test_nanogpt_config_and_data(fork, tmp_path):
    pickled_meta(tmp_path / 'chars')
    (tmp_path / 'train_chars.py').write_text(f'''# a small character model, as one writes it for nanoGPT
import time

out_dir = 'out-chars'
eval_interval = 5 # keep frequent because we'll overfit
eval_iters = 2
log_interval = 1 # don't print too too often

# we expect to overfit, so only save when val improves
always_save_checkpoint = False

wandb_log = False # override via command line if you like
wandb_project = 'chars'
wandb_run_name = 'ft-' + str(time.time())

dataset = {str(tmp_path / "chars")!r}
gradient_accumulation_steps = 1 * 2
batch_size = 4
block_size = 16 # context

n_layer = 2
n_head = 2
n_embd = 32
dropout = 0.2

learning_rate = 1e-3 # with baby networks can afford to go a bit higher
max_iters = 10
lr_decay_iters = 10 # make equal to max_iters usually
min_lr = 1e-4 # learning_rate / 10 usually
beta2 = 0.99 # make a bit bigger because number of tokens per iter is small
warmup_iters = 2
weight_decay = 1e-1

device = 'cpu'  # run on cpu only
compile = False # do not torch compile the model
''')
    fork(tmp_path, 'train_chars.py', tiny_args=False)
    out = tmp_path / 'out-chars'
    assert list(log_of(out)[0]) == list(range(10)) and list(log_of(out)[1]) == [0, 5, 10]
    assert ckpt_of(out)['model_args']['vocab_size'] == 60
    (tmp_path / 'eval_chars.py').write_text(f'''batch_size = 8
eval_iters = 50 # use more iterations to get good estimate
eval_only = True
wandb_log = False
init_from = 'resume'
out_dir = 'out-chars'
dataset = {str(tmp_path / "chars")!r}
''')
    before = tree(tmp_path)
    assert 'val loss' in fork(tmp_path, 'eval_chars.py', '--device=cpu',
                              tiny_args=False).out and tree(tmp_path) == before


def test_nanogpt_bins_alone_mean_gpt2_tokens(fork, tmp_path):
    data = dataset(tmp_path / 'd', NUMBERS + 50000, NUMBERS, vocab=None)
    fork(tmp_path, data, '--out_dir=a', *BARE, '--max_iters=1')
    assert ckpt_of(tmp_path / 'a')['model_args']['vocab_size'] == 50304
    np.append(NUMBERS, 50304).astype('<u2').tofile(tmp_path / 'd' / 'val.bin')
    assert '50304' in fork(tmp_path, data, *BARE, rc=2)


def test_nanogpt_meta_with_vocab_size_only(fork, tmp_path):
    """Its trainer reads nothing else of meta.pkl."""
    data = dataset(tmp_path / 'd', NUMBERS, vocab=None)
    (tmp_path / 'd' / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 60}))
    fork(tmp_path, data, '--out_dir=a', *BARE, '--max_iters=1')
    assert ckpt_of(tmp_path / 'a')['model_args']['vocab_size'] == 60


def test_nothing_in_a_pickle_is_executed(fork, tmp_path):
    data = pickled_meta(tmp_path / 'd')
    for meta in ({'vocab_size': 60, 'itos': Evil(tmp_path / 'executed')}, Evil(tmp_path / 'executed')):
        (tmp_path / 'd' / 'meta.pkl').write_bytes(pickle.dumps(meta))
        assert 'meta.pkl' in fork(tmp_path, data, rc=2)
        assert not (tmp_path / 'executed').exists()
    for content in (b'', b'hello', pickle.dumps([1])):
        (tmp_path / 'd' / 'meta.pkl').write_bytes(content)
        assert 'meta.pkl' in fork(tmp_path, data, rc=2)


@pytest.mark.parametrize('bias', [False, True])
def test_nanogpt_checkpoint_is_continued(fork, tmp_path, bias):
    """As its trainer saves it: compiled names, numbered optimizer state, a tensor as best loss, the exact GELU."""
    data = pickled_meta(tmp_path / 'd')
    torch.manual_seed(3)
    args = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, bias=bias, vocab_size=60, dropout=0.0)
    model = GPT(GPTConfig(**args, gelu='none'))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    params = list(model.parameters())
    decay, others = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
    optimizer = torch.optim.AdamW([{'params': decay, 'weight_decay': 0.1}, {'params': others, 'weight_decay': 0.0}],
                                  lr=1e-3, betas=(0.9, 0.95))
    tokens = torch.from_numpy(NUMBERS)
    for i in range(5):
        X, Y = tokens[i * 64:i * 64 + 64].view(4, 16), tokens[i * 64 + 1:i * 64 + 65].view(4, 16)
        model(X, Y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {'_orig_mod.' + k: v for k, v in model.state_dict().items()}
    for i in range(2):
        weights[f'_orig_mod.transformer.h.{i}.attn.bias'] = torch.ones(16, 16).tril()[None, None]
    (tmp_path / 'a').mkdir()
    torch.save({'model': weights, 'optimizer': optimizer.state_dict(), 'model_args': args, 'iter_num': 5,
                'best_val_loss': torch.tensor(9.0),
                'config': {'dataset': 'd', 'batch_size': 4, 'gradient_accumulation_steps': 1, 'wandb_log': False,
                           'compile': True}}, tmp_path / 'a' / 'ckpt.pt')

    settings = [data, '--out_dir=a', '--init_from=resume', '--device=cpu', '--batch_size=4',
                '--gradient_accumulation_steps=2', '--max_iters=6', '--eval_iters=1',
                '--grad_clip=0', '--decay_lr=False', '--learning_rate=1e-3', '--log_interval=1']
    out = fork(tmp_path, *settings, tiny_args=False,
               after='print("OFFSETS", json.dumps(g["train_offsets"](5, numpy.arange(8)).tolist()))').out
    offsets = json.loads(re.search('OFFSETS (.*)', out)[1])
    X, Y = [torch.stack([tokens[o + shift:o + shift + 16] for o in offsets]) for shift in (0, 1)]
    loss = model(X, Y).mean()
    loss.backward()
    optimizer.step()
    c = ckpt_of(tmp_path / 'a')
    assert log_of(tmp_path / 'a')[0][5]['loss'] == pytest.approx(loss.item(), rel=2e-6)
    assert c['iter_num'] == 6 and c['model'].keys() == model.state_dict().keys() and type(c['best_val_loss']) is float
    for name, p in model.state_dict().items():
        assert torch.allclose(p, c['model'][name], rtol=0, atol=1e-6), name
    for name, p in model.named_parameters():
        assert torch.allclose(optimizer.state[p]['exp_avg_sq'], c['optimizer']['state'][name]['exp_avg_sq'], rtol=1e-4,
                              atol=1e-9), name
    fork(tmp_path, *settings, '--max_iters=8', tiny_args=False)


@pytest.fixture(scope='module')
def hf(tmp_path_factory):
    """(folder of a tiny GPT-2 in Hugging Face form, mean loss of the constant sequence 7 7 7 ... in a block of 16)."""
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=24,
                                                                  vocab_size=60)).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.3 * torch.randn_like(p))
        x = torch.full((1, 16), 7)
        loss = torch.nn.functional.cross_entropy(theirs(x).logits[0], x[0]).item()
    folder = tmp_path_factory.mktemp('hf')
    theirs.save_pretrained(folder)
    return folder, loss


def test_pretrained_folder(fork, tmp_path, hf):
    folder, loss = hf
    data = dataset(tmp_path / 'd', np.full(500, 7))
    args = [data, f'--init_from={folder}', '--device=cpu', '--batch_size=2', '--gradient_accumulation_steps=1',
            '--eval_iters=1', '--max_iters=2', '--eval_interval=1']
    fork(tmp_path, *args, '--out_dir=a', '--block_size=16', tiny_args=False,
         before='sys.modules["transformers"] = None')
    assert log_of(tmp_path / 'a')[1][0]['val_loss'] == pytest.approx(loss, rel=1e-5)
    c = ckpt_of(tmp_path / 'a')
    assert c['model_args'] == dict(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=60, bias=True, gelu='tanh',
                                   rope=False, qk_norm=False)
    fork(tmp_path, *args[:1], '--out_dir=a', '--init_from=resume', *args[2:], '--max_iters=3', tiny_args=False)
    line = fork(tmp_path, *args, '--block_size=32', tiny_args=False, rc=2)
    assert '24' in line
    bad = shutil.copytree(folder, tmp_path / 'bad')
    (bad / 'model.safetensors').write_bytes((bad / 'model.safetensors').read_bytes()[:1000])
    assert 'model.safetensors' in fork(tmp_path, *args, f'--init_from={bad}', '--block_size=16', tiny_args=False, rc=2)


@pytest.mark.parametrize('source', ['', 'ckpt.pt'])
def test_a_new_run_from_a_checkpoints_weights(fork, base, tmp_path, source):
    """Its weights alone: steps, optimizer and best loss start anew, and the context may be shorter."""
    start = f'--init_from={base / "random" / source}'
    fork(tmp_path, '--out_dir=a', start, '--max_iters=3', '--weight_decay=0')
    (steps, evals), (_, before) = log_of(tmp_path / 'a'), log_of(base / 'random')
    assert list(steps) == [0, 1, 2] and evals[0]['val_loss'] == before[20]['val_loss']
    assert all(s['step'] == 3 for s in ckpt_of(tmp_path / 'a')['optimizer']['state'].values())
    fork(tmp_path, '--out_dir=b', start, '--max_iters=1', '--block_size=16')
    assert ckpt_of(tmp_path / 'b')['model_args']['block_size'] == 16


def test_a_pretrained_model_has_to_fit(fork, base, hf, tmp_path):
    """What the user sets of its shape, and the dataset's characters: --init_from=gpt2 makes no medium of it."""
    assert 'n_layer=3 (there 2)' in fork(tmp_path, f'--init_from={base / "random"}', '--n_layer=3', rc=2)
    data = dataset(tmp_path / 'd', np.full(500, 7))
    line = fork(tmp_path, data, f'--init_from={hf[0]}', '--block_size=16', '--n_head=1', tiny_args=False, rc=2)
    assert 'n_head=1 (there 2)' in line
    meta = {'vocab_size': 60, 'tokenizer': {'type': 'char', 'itos': [chr(200 + i) for i in range(60)]}}
    (tmp_path / 'd' / 'meta.json').write_text(json.dumps(meta))
    assert 'tokenizer' in fork(tmp_path, data, f'--init_from={base / "random"}', '--n_layer=2', tiny_args=False, rc=2)


def test_downloads_gpt2(fork, tmp_path, hf):
    """init_from=gpt2 from a server that stands in for the Hub; a second run needs none."""
    import hashlib
    import http.server
    import threading
    folder, loss = hf

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name, body = self.path.split('?')[0].rsplit('/', 1)[-1], None
            files = {n: (folder / n).read_bytes() for n in ('config.json', 'model.safetensors')}
            if '/api/models/openai-community/gpt2/' in self.path:
                siblings = [{'rfilename': n, 'size': len(data), 'blobId': '0' * 40} for n, data in files.items()]
                weights = {'sha256': hashlib.sha256(files['model.safetensors']).hexdigest(), 'pointerSize': 130}
                siblings[1]['lfs'] = {**weights, 'size': len(files['model.safetensors'])}
                about = {'id': 'openai-community/gpt2', 'sha': '0' * 40, 'private': False, 'disabled': False,
                         'downloads': 0, 'likes': 0, 'tags': [], 'siblings': siblings}
                body = json.dumps(about).encode()
            elif '/gpt2/' in self.path:
                body = files.get(name)
            self.send_response(404 if body is None else 200)
            self.send_header('Content-Type', 'application/json')
            self.send_header('Content-Length', str(len(body or b'')))
            self.end_headers()
            self.wfile.write(b'' if self.command == 'HEAD' else body or b'')

        do_HEAD = do_GET

        def log_message(self, *args):
            pass
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    env = {'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}', 'HOME': str(tmp_path / 'home'),
           'HF_HOME': str(tmp_path / 'home' / 'hf'),
           'XDG_CACHE_HOME': str(tmp_path / 'home' / 'cache')}
    (tmp_path / 'home').mkdir()
    data = dataset(tmp_path / 'd', np.full(500, 7))
    args = [data, '--init_from=gpt2', '--device=cpu', '--batch_size=2', '--gradient_accumulation_steps=1',
            '--eval_iters=1', '--max_iters=1', '--block_size=16']
    try:
        fork(tmp_path, *args, '--out_dir=a', tiny_args=False, env=env)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert log_of(tmp_path / 'a')[1][0]['val_loss'] == pytest.approx(loss, rel=1e-5)
    fork(tmp_path, *args, '--out_dir=b', tiny_args=False, env=env)
    line = fork(tmp_path, *args, '--init_from=gpt2-medium', '--out_dir=c', tiny_args=False, env=env, rc=2)
    assert 'gpt2-medium' in line
