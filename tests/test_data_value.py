"""scripts/data_value.py adds up the values of windows and domains: known numbers, a run, damaged folders."""
import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / 'scripts' / 'data_value.py')
TEXT = 'abcd' * 8 + 'wxyz' * 8 + '!'      # 65 characters: domain letters up to 32, then tail
ITOS = sorted(set(TEXT))
LR, CLIP = np.float32([0.5, 0.25, 0.125]), np.float32([1, 0.5, 1])
OFFSETS = [[0, 8], [40, 0], [8, 40]]
DOTS = [[4.0, -2.0], [16.0, 8.0], [-8.0, 0.0]]
# lr * clip_coef * dot / 2 by hand: step 0: 1, -0.5; step 1: 1, 0.5; step 2: -0.5, 0
VALUES, VISITS = {0: 1.5, 8: -1.0, 40: 1.0}, {0: 2, 8: 2, 40: 2}


# the picture takes most of a start's time
WITHOUT_PICTURE = """
import runpy, sys
sys.modules['matplotlib'] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def data_value(*args, rc=0, cwd=None, env=None, picture=False):
    code = [] if picture or rc else ['-c', WITHOUT_PICTURE]
    done = subprocess.run([sys.executable, '-W', 'error', *code, SCRIPT, *map(str, args)], cwd=cwd,
                          env={**os.environ, **(env or {})}, capture_output=True, text=True, encoding='utf-8')
    assert done.returncode == rc, done.stderr
    if rc:
        assert done.stdout == '' and done.stderr.startswith('data_value.py: '), done.stderr
        assert done.stderr.count('\n') == 1, done.stderr
    return done


def make_run(tmp_path, domains=True):
    """A prepared dataset and an out_dir as train.py leaves it after 3 steps of 2 samples, in two files."""
    data, run = tmp_path / 'data', tmp_path / 'run'
    data.mkdir(), (run / 'grad_dotprods').mkdir(parents=True)
    np.array([ITOS.index(c) for c in TEXT], '<u2').tofile(data / 'train.bin')
    meta = dict(vocab_size=len(ITOS), dtype='uint16', tokenizer=dict(type='char', itos=ITOS),
                splits=dict(train=dict(tokens=len(TEXT)), val=dict(tokens=0)))
    if domains:
        meta['domains'] = [dict(name='letters', start=0, end=32), dict(name='tail', start=32, end=65)]
    (data / 'meta.json').write_text(json.dumps(meta))
    (run / 'config.json').write_text(json.dumps(dict(dataset=str(data), block_size=8)))
    for steps, rows in ((2, slice(0, 2)), (3, slice(2, 3))):
        columns = dict(dot_product=np.float32(DOTS), offset=np.int64(OFFSETS), iter=np.arange(3), lr=LR,
                       loss=np.float32([[1, 2], [3, 4], [5, 6]]), clip_coef=CLIP, val_loss=np.float32([3, 2.5, 2]),
                       grad_norm=np.float32([1, 2, 1]))
        save_file({k: v[rows] for k, v in columns.items()}, run / 'grad_dotprods' / f'iter_{steps:06d}.safetensors')
    return run


def read(folder):
    """({offset: row} of windows.csv, {name: row} of domains.csv, objects of windows.jsonl)"""
    tables = []
    for name, key in (('windows', 'offset'), ('domains', 'domain')):
        with open(folder / f'{name}.csv', newline='') as file:
            tables.append({row[key]: row for row in csv.DictReader(file)})
    return *tables, [json.loads(line) for line in (folder / 'windows.jsonl').read_text(encoding='utf-8').splitlines()]


def test_known_numbers(tmp_path):
    run = make_run(tmp_path)
    done = data_value(run.name, '--top=2', cwd=tmp_path)
    windows, domains, lines = read(run / 'data_value')
    assert {int(o): float(row['value']) for o, row in windows.items()} == VALUES
    assert {int(o): int(row['visits']) for o, row in windows.items()} == VISITS
    assert {o: float(row['loss']) for o, row in windows.items()} == {'0': 2.5, '8': 3.5, '40': 4.5}
    assert [int(o) for o in windows] == [line['offset'] for line in lines] == [0, 40, 8]   # the best first
    keys = 'value', 'windows', 'value_per_visit'
    numbers = {name: tuple(float(row[key]) for key in keys) for name, row in domains.items()}
    assert numbers == {'letters': (0.5, 2, 0.125), 'tail': (1.0, 1, 0.5)}
    assert [line['text'] for line in lines] == ['abcdabcd', 'wxyzwxyz', 'abcdabcd']
    assert 'sum of values 1.5 nats/token; the validation loss fell by 1 ' in done.stdout
    best, worst = done.stdout.split('\nbest')[1].split('\nworst')
    assert [int(line.split()[1]) for line in best.splitlines()[1:3]] == [0, 40] and 'wxyzwxyz' in best
    assert [int(line.split()[1]) for line in worst.splitlines()[1:3]] == [8, 40]


def test_half_of_a_negative_sum(tmp_path):
    """Steps add -0.5, -1.5 and 0.5 to -1.5: half of it is passed with the second."""
    run = make_run(tmp_path)
    for path in (run / 'grad_dotprods').iterdir():
        columns = load_file(path)
        save_file({**columns, 'dot_product': -columns['dot_product']}, path)
    assert 'half of the sum was reached at step 1\n' in data_value(run).stdout


def test_dataset_is_a_path_from_here(tmp_path):
    run = make_run(tmp_path)
    (run / 'config.json').write_text('{"dataset": "data", "block_size": 8}')
    data_value(run, cwd=tmp_path)
    assert [line['text'] for line in read(run / 'data_value')[2]] == ['abcdabcd', 'wxyzwxyz', 'abcdabcd']


def test_picture(tmp_path):
    pytest.importorskip('matplotlib')
    run = make_run(tmp_path)
    data_value(run, f'--out={tmp_path / "elsewhere"}', picture=True)
    assert (tmp_path / 'elsewhere' / 'data_value.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'
    written = ['data_value.png', 'domains.csv', 'windows.csv', 'windows.jsonl']
    assert sorted(os.listdir(tmp_path / 'elsewhere')) == written
    assert not (run / 'data_value').exists()


def test_works_without_domains_text_and_matplotlib(tmp_path):
    run = make_run(tmp_path, domains=False)
    (tmp_path / 'block').mkdir(), (tmp_path / 'block' / 'matplotlib.py').write_text('raise ImportError("none")')
    done = data_value(run, env={'PYTHONPATH': str(tmp_path / 'block')}, picture=True)
    assert 'pip install matplotlib' in done.stderr and set(read(run / 'data_value')[1]) == {'all'}
    assert not (run / 'data_value' / 'data_value.png').exists()
    (tmp_path / 'data').rename(tmp_path / 'moved')
    done = data_value(run)
    windows, _, lines = read(run / 'data_value')
    assert 'no text: ' in done.stderr and {int(o): float(row['value']) for o, row in windows.items()} == VALUES
    assert all(line['text'] == '' for line in lines)


def test_other_tokens_than_the_run_saw_are_not_shown(tmp_path):
    run = make_run(tmp_path)
    np.zeros(20, '<u2').tofile(tmp_path / 'data' / 'train.bin')
    done = data_value(run)
    assert 'prepared anew' in done.stderr and all(line['text'] == '' for line in read(run / 'data_value')[2])


@pytest.mark.filterwarnings('ignore:torch.distributed is disabled')
def test_of_two_shuffles_with_the_same_counts_no_text_is_shown(fork, tmp_path):
    """The run's checkpoint records the sha256 of the tokens that it saw."""
    run = make_run(tmp_path)
    meta = json.loads((tmp_path / 'data' / 'meta.json').read_text())
    meta['splits']['train']['sha256'] = 'a' * 64
    folder = run / 'ckpt_dcp' / 'step_3'
    dcp.save({'model': {'w': torch.zeros(2)}}, checkpoint_id=folder, no_dist=True)
    (folder / 'state.json').write_text(json.dumps(dict(meta=meta, model_args={'n_layer': 1}, iter_num=3,
                                                         param_groups=[])))
    for sha256, known in (('a' * 64, True), ('b' * 64, False)):
        meta['splits']['train']['sha256'] = sha256
        (tmp_path / 'data' / 'meta.json').write_text(json.dumps({**meta, 'domains': []}))
        done = fork(tmp_path, run, script=SCRIPT, tiny_args=False, notes=int(not known))
        windows, domains, lines = read(run / 'data_value')
        assert [line['text'] for line in lines] == (['abcdabcd', 'wxyzwxyz', 'abcdabcd'] if known else [''] * 3)
        assert {int(o): float(row['value']) for o, row in windows.items()} == VALUES
        assert set(domains) == {'letters', 'tail'}      # those of the run
        assert ('prepared anew' in done.err) == (not known)


def test_samples_per_step_change_in_mid_run(tmp_path):
    """A third step of 4 samples, lr * clip_coef * dot / 4 each: 1/8 of -8, 0, 16 and 32 / 4."""
    run = make_run(tmp_path)
    path = run / 'grad_dotprods' / 'iter_000003.safetensors'
    columns = load_file(path)
    columns.update(dot_product=np.float32([[-8, 0, 16, 32]]), offset=np.int64([[8, 40, 0, 48]]),
                   loss=np.float32([[5, 6, 7, 8]]))
    save_file(columns, path)
    done = data_value(run, '--top=4')
    windows, domains, _ = read(run / 'data_value')
    assert {int(o): float(row['value']) for o, row in windows.items()} == {0: 2.0, 8: -0.75, 40: 1.0, 48: 1.0}
    assert {int(o): int(row['visits']) for o, row in windows.items()} == {0: 3, 8: 2, 40: 2, 48: 1}
    assert float(domains['letters']['value']) == 1.25 and float(domains['tail']['value']) == 2
    assert '8 samples, 4 windows' in done.stdout and 'sum of values 3.25 nats/token' in done.stdout


def test_any_name_of_a_domain_is_drawn(tmp_path):
    """In matplotlib's labels a $ begins a formula, and a leading _ hides a line from the legend."""
    pytest.importorskip('matplotlib')
    run, names = make_run(tmp_path), {'$x_1$', '_a$b'}
    meta = json.loads((tmp_path / 'data' / 'meta.json').read_text())
    for domain, name in zip(meta['domains'], names):
        domain['name'] = name
    (tmp_path / 'data' / 'meta.json').write_text(json.dumps(meta))
    assert data_value(run, picture=True).stderr == '' and set(read(run / 'data_value')[1]) == names


def test_a_step_in_two_files_counts_once(tmp_path):
    run = make_run(tmp_path)
    file = run / 'grad_dotprods' / 'iter_000003.safetensors'
    save_file(load_file(file), file.with_name('iter_000004.safetensors'))
    data_value(run)
    assert {int(o): int(row['visits']) for o, row in read(run / 'data_value')[0].items()} == VISITS


def test_any_stdout_will_do(tmp_path):
    run = make_run(tmp_path)
    meta = json.loads((tmp_path / 'data' / 'meta.json').read_text())
    meta['domains'][0]['name'] = 'l\u00e9ttres'
    (tmp_path / 'data' / 'meta.json').write_text(json.dumps(meta))
    assert 'l\\xe9ttres ' in data_value(run, env={'PYTHONIOENCODING': 'ascii'}).stdout
    shutil.rmtree(run / 'data_value')
    r, w = os.pipe()
    os.close(r)     # a reader that has gone
    with open(w, 'w') as pipe:
        done = subprocess.run([sys.executable, ROOT / 'scripts' / 'data_value.py', run, '--top=1000'], stdout=pipe,
                              stderr=subprocess.PIPE, env={**os.environ, 'PYTHONUNBUFFERED': '1'})
    assert (done.returncode, done.stderr) == (1, b'') and len(read(run / 'data_value')[2]) == 3


def test_errors_are_one_line(tmp_path):
    run = make_run(tmp_path)
    files = sorted((run / 'grad_dotprods').iterdir())
    assert 'OUT_DIR' in data_value(rc=2).stderr and '--topp=3' in data_value(run, '--topp=3', rc=2).stderr
    assert all('usage' in data_value(run, f'--top={top}', rc=2).stderr for top in ('x', 0, -1))
    assert 'usage' in data_value(run, run, rc=2).stderr
    (tmp_path / 'file').write_text('')
    assert '--out=' in data_value(run, f'--out={tmp_path / "file"}', rc=2).stderr
    config = (run / 'config.json').read_text()
    (run / 'config.json').write_text('{"dataset": ')
    assert 'config.json' in data_value(run, rc=1).stderr
    (run / 'config.json').write_text(config)
    content = files[1].read_bytes()
    files[1].write_bytes(content[:-5])
    assert files[1].name in (line := data_value(run, rc=1).stderr) and 'move it away' in line
    for file in files:
        file.unlink()
    assert 'use_ghost=True' in data_value(run, rc=1).stderr
    assert 'use_ghost=True' in data_value(tmp_path / 'nowhere', rc=1).stderr
    assert sorted(os.listdir(run)) == ['config.json', 'grad_dotprods']     # nothing was written


def test_of_a_run(fork, tmp_path):
    """train.py with ghost: the values are lr * clip_coef * dot / B of its files, the texts the data's."""
    text = ''.join(f'{i} sheep, ' for i in range(700))
    itos = sorted(set(text))
    ids = np.array([itos.index(c) for c in text], '<u2')
    data = tmp_path / 'sheep'
    data.mkdir()
    ids.tofile(data / 'train.bin'), ids[:500].tofile(data / 'val.bin')
    (data / 'meta.json').write_text(json.dumps(dict(
        vocab_size=len(itos), dtype='uint16', tokenizer=dict(type='char', itos=itos),
        splits=dict(train=dict(tokens=len(ids)), val=dict(tokens=500)),
        domains=[dict(name='sheep', start=0, end=len(ids))])))
    settings = dict(dataset=data, out_dir=tmp_path / 'run', device='cpu', use_ghost=True, ghost_save_interval=4,
                    max_iters=6, eval_interval=6, eval_iters=1,
                    n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=4,
                    gradient_accumulation_steps=2, compile=False, warmup_iters=2, lr_decay_iters=6,
                    learning_rate=1e-2, grad_clip=0.5, data_order='epoch')
    fork(tmp_path, *(f'--{k}={v}' for k, v in settings.items()), tiny_args=False)
    fork(tmp_path, 'run', script=SCRIPT, tiny_args=False)
    windows, domains, lines = read(tmp_path / 'run' / 'data_value')
    want, total = {}, 0
    for path in sorted((tmp_path / 'run' / 'grad_dotprods').glob('iter_*.safetensors')):
        file = load_file(path)
        for s in range(len(file['iter'])):
            for offset, dot in zip(file['offset'][s].tolist(), file['dot_product'][s].tolist()):
                value = float(file['lr'][s]) * float(file['clip_coef'][s]) * dot / 8
                want[offset], total = want.get(offset, 0) + value, total + value
    got = {int(o): float(row['value']) for o, row in windows.items()}
    assert len(want) == 48 and got == pytest.approx(want, rel=1e-12, abs=1e-15)
    assert float(domains['sheep']['value']) == pytest.approx(total, rel=1e-12) and total > 0
    assert all(line['text'] == text[line['offset']:line['offset'] + 16] for line in lines)


def test_tokens_without_a_record_are_told_apart_too(fork, tiny, tmp_path):
    """Of a folder without counts and checksums the run's own files say which tokens it saw."""
    (tmp_path / 'bins').mkdir()
    for split in ('train', 'val'):
        (tmp_path / 'bins' / f'{split}.bin').write_bytes((tiny / f'{split}.bin').read_bytes())
    meta = json.loads((tiny / 'meta.json').read_text())
    (tmp_path / 'bins' / 'meta.json').write_text(json.dumps({k: meta[k] for k in ('vocab_size', 'tokenizer', 'dtype')}))
    fork(tmp_path, f'--dataset={tmp_path / "bins"}', '--use_ghost=True', '--max_iters=2')
    for shuffled in (False, True):
        if shuffled:
            tokens = np.fromfile(tmp_path / 'bins' / 'train.bin', '<u2')
            tokens[::-1].tofile(tmp_path / 'bins' / 'train.bin')
        done = fork(tmp_path, 'out', script=SCRIPT, tiny_args=False, notes=int(shuffled))
        lines = read(tmp_path / 'out' / 'data_value')[2]
        assert ('prepared anew' in done.err) == shuffled
        assert all((line['text'] == '') == shuffled for line in lines)
