"""train.py's loader on a file far larger than it may hold in memory, and at sizes no test could list."""
import json
import os
import re

import numpy as np
import pytest

from conftest import ROOT

TOKENS = 10**10         # 20 GB of uint16
WINDOWS = (TOKENS - 1) // 32
SMALL = ('--n_layer=1', '--n_head=1', '--n_embd=8', '--eval_iters=1')


@pytest.fixture(scope='session')
def huge(tmp_path_factory):
    """A folder whose train.bin is TOKENS zeros that take no room, and val.bin 1,000."""
    folder = tmp_path_factory.mktemp('huge')
    for name, tokens in ('train', TOKENS), ('val', 1000):
        with open(folder / f'{name}.bin', 'wb') as f:
            try:
                f.truncate(2 * tokens)
            except OSError as error:
                pytest.skip(f'no file of 20 GB here: {error}')
    if getattr((folder / 'train.bin').stat(), 'st_blocks', 2**62) > 2**20:
        (folder / 'train.bin').unlink()
        pytest.skip('this file system has no sparse files')
    (folder / 'meta.json').write_text('{"vocab_size": 64}')
    yield folder
    (folder / 'train.bin').unlink()


def told(fork, cwd, code, *args, **options):
    """What the code, run with train.py's globals g after an evaluation, leaves in `answer`."""
    after = f'{code}\nprint("ANSWER", json.dumps(answer))'
    out = fork(cwd, *SMALL, '--eval_only=True', *args, after=after, **options).out
    return json.loads(re.search('^ANSWER (.*)$', out, re.M)[1])


@pytest.mark.parametrize('order', ['random', 'epoch'])
def test_20_gigabytes_train(fork, tmp_path, huge, order):
    fork(tmp_path, f'--dataset={huge}', *SMALL, '--out_dir=a', '--max_iters=2', f'--data_order={order}')
    assert len((tmp_path / 'a' / 'log.jsonl').read_text().splitlines()) >= 3    # two steps, and evaluations


def test_memory_is_bounded(fork, tmp_path, huge):
    """10,000 batches from all over the file add less than 50 MB; a memory map would keep a page of each sample."""
    pytest.importorskip('psutil')
    low, high, grown = told(fork, tmp_path, '''
import psutil
low, high, held = 2**62, 0, psutil.Process().memory_info
for i in range(10100):
    if i == 100:
        before = held().rss
    offsets = g['train_offsets'](i, numpy.arange(4))
    X, Y = g['read_windows']('train', offsets)
    low, high = min(low, offsets.min()), max(high, offsets.max())
answer = [int(low), int(high), held().rss - before]
''', f'--dataset={huge}')
    assert 0 <= low < TOKENS // 1000 and TOKENS - TOKENS // 1000 < high <= TOKENS - 33      # drawn from the whole file
    assert grown < 50e6


def test_epoch_order_of_millions_of_windows_needs_no_table(fork, tmp_path, huge):
    """The offsets of a step take no more memory than its own samples: a table would be 2.5 GB. None comes twice in
    400,000 samples, two epochs and two seeds agree by chance only, and a batch is the same wherever it is cut."""
    first, peak = told(fork, tmp_path, f'''
import tracemalloc
offsets = g['train_offsets']
offsets(0, numpy.arange(8))
tracemalloc.start()
offsets(1, numpy.arange(8))
peak = tracemalloc.get_traced_memory()[1]
tracemalloc.stop()
a = offsets(0, numpy.arange(400_000))
b = offsets(0, numpy.arange({WINDOWS}, {WINDOWS} + 400_000))    # of the second epoch
assert a.min() >= 0 and max(a.max(), b.max()) <= 32 * ({WINDOWS} - 1) and not (a % 32).any()
assert len(set(a.tolist())) == len(set(b.tolist())) == 400_000 and (a == b).sum() < 10
assert all((offsets(s, numpy.arange(3, 7)) == a[8 * s + 3:8 * s + 7]).all() for s in (0, 1, 999, 12345))
answer = [a[:1000].tolist(), peak]
''', f'--dataset={huge}', '--data_order=epoch')
    assert peak < 100_000
    other, _ = told(fork, tmp_path, 'answer = [g["train_offsets"](0, numpy.arange(1000)).tolist(), 0]',
                    f'--dataset={huge}', '--data_order=epoch', '--seed=7')
    assert sum(x == y for x, y in zip(first, other)) < 3


def test_random_order_reaches_the_last_window(fork, tmp_path):
    """A file of block_size + 2 tokens has two windows; one token less, one."""
    for tokens, windows in (34, [0, 1]), (33, [0]):
        folder = tmp_path / str(tokens)
        folder.mkdir()
        for name in 'train', 'val':
            np.arange(tokens, dtype='<u2').tofile(folder / f'{name}.bin')
        (folder / 'meta.json').write_text('{"vocab_size": 64}')
        seen, last = told(fork, tmp_path, '''
seen = sorted({int(o) for step in range(50) for o in g['train_offsets'](step, numpy.arange(8))})
answer = seen, g['read_windows']('train', numpy.array(seen))[1][:, -1].tolist()
''', f'--dataset={folder}')
        assert seen == windows and last == [w + 32 for w in windows]        # the last target is the file's last token


@pytest.mark.parametrize('order', ['random', 'epoch'])
def test_global_batch_is_the_same_at_any_world_size(fork, tmp_path, huge, order):
    """Which rank reads a sample in which micro-batch changes nothing: together they read every sample once."""
    code = '''
read = []
g['read_windows'].__globals__['read_windows'] = lambda split, offsets: read.extend(offsets.tolist())
for step in range(3):
    for micro in range(g['micro_batches']):
        g['train_batch'](step, micro)
import pathlib
pathlib.Path(f'read_{g["world_size"]}_{g["rank"]}.json').write_text(json.dumps(read))
answer = 0
'''
    batches = []
    for world in None, 2, 4:
        fork(tmp_path, *SMALL, '--eval_only=True', f'--dataset={huge}', f'--data_order={order}', '--batch_size=2',
             '--gradient_accumulation_steps=4', nproc=world, after=code)
        ranks = [json.loads((tmp_path / f'read_{world or 1}_{r}.json').read_text()) for r in range(world or 1)]
        assert all(len(r) == 3 * 8 // len(ranks) for r in ranks)
        batches.append([sorted(sum((r[len(r) // 3 * s:len(r) // 3 * (s + 1)] for r in ranks), [])) for s in range(3)])
    assert batches[0] == batches[1] == batches[2] and len(set(sum(batches[0], []))) == 24


def test_bench_measures_it(fork, tmp_path, tiny):
    bench = os.path.join(ROOT, 'scripts', 'bench.py')
    args = '--data', f'--dataset={tiny}', '--device=cpu', '--batch_size=2', '--block_size=32', '--json=figures.json'
    out = fork(tmp_path, *args, script=bench, tiny_args=False).out
    rows = json.loads((tmp_path / 'figures.json').read_text())['rows']
    assert [r['order'] for r in rows] == [line.split()[0] for line in out.splitlines()[1:]] == ['random', 'epoch']
    assert all(0 < r['offsets_us'] < r['batch_us'] and r['open_s'] > 0 for r in rows)
    line = fork(tmp_path, *args, '--batch_sizes=2,4', rc=2, script=bench, tiny_args=False)
    assert '--data' in line and '--batch_sizes' in line
