"""scripts/classify.py, the files it reads, and the scripts that prepare them."""
import csv
import importlib.util
import io
import json
import os
import random
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ENV, FULL_DISK, ROOT, ckpt_of, log_of, tree

from data.labelled import read_dataset, read_labelled, read_texts, write_labelled
from scripts.common import choose_device
from test_data import hub

CLASSIFY = os.path.join(ROOT, 'scripts', 'classify.py')
ROWS = dict(train=41, val=13, test=11)      # 41: six steps of 8 rows an epoch, the last of a single one
SMALL = ('--device=cpu --tokenizer=byte --n_layer=2 --n_head=2 --n_embd=32 --block_size=24 --batch_size=4 '
         '--gradient_accumulation_steps=2 --epochs=2 --warmup_iters=2 --learning_rate=3e-3 --log_interval=1').split()
WORDS = dict(animal=['cat', 'dog', 'hen'], colour=['red', 'blue', 'green'], 数=['one', 'two', 'six'])


def write_csv(path, rows, **form):
    table = io.StringIO(newline='')
    csv.writer(table, **form).writerows(rows)
    path.write_text(table.getvalue(), encoding='utf-8', newline='')


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """A folder with three labels that single words tell, texts of 1 to 9 words, some longer than block_size."""
    folder, draw = tmp_path_factory.mktemp('labelled'), random.Random(0)
    for split, count in ROWS.items():
        rows = [('text', 'source', 'label')]
        for i in range(count):
            label = list(WORDS)[i % 3]
            words = draw.choices(WORDS[label], k=draw.randint(1, 9))
            rows.append((', '.join(words) + draw.choice(['', '"quoted"\n and more']), i, label))
        write_csv(folder / f'{split}.csv', rows)
    return folder


@pytest.fixture(scope='module')
def run(fork, data):
    """run(cwd, *args, nproc=None): classify.py at SMALL's settings."""
    def call(cwd, *args, **kw):
        return fork(cwd, f'--dataset={data}', *SMALL, *args, script=CLASSIFY, tiny_args=False, **kw)
    return call


@pytest.fixture(scope='module')
def plain(run, tmp_path_factory):
    """A run by one process, without dropout: its folder, and its output."""
    cwd = tmp_path_factory.mktemp('plain')
    return cwd, run(cwd, '--out_dir=out', '--dropout=0').out


def evaluations(out):
    """The lines with losses, accuracies and each label's numbers."""
    return [line for line in out.splitlines() if line.startswith(('[eval]', '[test]', *WORDS))]


IMPATIENT = '''
import datetime, threading, torch.distributed
timer, join = threading.Timer, torch.distributed.init_process_group
threading.Timer = lambda seconds, *args: timer(seconds / 1000, *args)
def slow_join(*args, timeout, **kw):
    assert timeout == datetime.timedelta(minutes=7)
    threading.Event().wait(0.2)
    join(*args, timeout=timeout, **kw)
torch.distributed.init_process_group = slow_join
'''


def test_two_ranks_compute_what_one_does(plain, run, tmp_path):
    """Half the micro-batch per rank, so the same rows a step; in the last step of an epoch rank 1 has none."""
    cwd, out = plain
    two = run(tmp_path, '--out_dir=out', '--dropout=0', '--batch_size=2', '--gradient_accumulation_steps=4',
              '--timeout_minutes=7', nproc=2, before=IMPATIENT)
    assert all(f'rank {rank} waits at 127.0.0.1:' in two.out for rank in (0, 1))
    assert evaluations(two.out) == evaluations(out) and len(evaluations(out)) == 2 + 1 + 3
    (steps, evals), (steps2, evals2) = log_of(cwd / 'out'), log_of(tmp_path / 'out')
    assert list(steps) == list(steps2) == list(range(12)) and list(evals) == list(evals2) == [6, 12]
    for one, other in zip([*steps.values(), *evals.values()], [*steps2.values(), *evals2.values()]):
        for name in one.keys() & {'loss', 'val_loss', 'grad_norm'}:
            assert other[name] == pytest.approx(one[name], rel=1e-6 if name != 'grad_norm' else 1e-5), (one, other)
        assert one.get('accuracy') == other.get('accuracy')
    a, b = ckpt_of(cwd / 'out')['model'], ckpt_of(tmp_path / 'out')['model']
    assert max((a[name] - b[name]).abs().max().item() for name in a) < 5e-5
    assert steps[11]['loss'] < 0.9 * steps[0]['loss']
    # two steps of warm-up, then the first half of a cosine wave over ten: by hand
    lr = [1.5, 3, 3, 2.9265848, 2.7135255, 2.3816779, 1.9635255, 1.5, 1.0364745, 0.6183221, 0.2864745, 0.0734152]
    assert [step['lr'] for step in steps.values()] == pytest.approx([1e-3 * value for value in lr], rel=1e-5)
    table = [line.split() for line in evaluations(out)[-3:]]
    assert [name for name, *_ in table] == sorted(WORDS) and sum(int(rows) for _, rows, *_ in table) == ROWS['test']
    for name in ('ckpt.pt', 'best.pt', 'config.json', 'log.jsonl'):
        assert (cwd / 'out' / name).is_file() and not (cwd / 'out' / f'{name}.tmp').exists()
    if importlib.util.find_spec('matplotlib'):
        assert (cwd / 'out' / 'confusion.png').read_bytes()[:8] == b'\x89PNG\r\n\x1a\n'


# In place of the script's end, at weights that never change: each step's loss and gradient are the mean over its rows;
# every row of an epoch comes once; a row's logits know nothing of the padding and of the other rows in its batch.
AFTER = r'''
import torch.nn.functional as F
model, tokens, targets = g['raw_model'], g['tokens']['train'], g['targets']['train']
with open('out/log.jsonl') as file:
    records = [json.loads(line) for line in file]
records = [record for record in records if 'loss' in record]
orders = []
for epoch in range(2):
    order = g['shuffled'](numpy.arange(41), 41, 1337, epoch).tolist()
    assert sorted(order) == list(range(41))
    orders.append(order)
    for k in range(6):
        model.zero_grad()
        rows = order[8 * k:8 * k + 8]
        alone = [model(torch.from_numpy(tokens[i])[None], torch.tensor([len(tokens[i]) - 1])) for i in rows]
        loss = sum(F.cross_entropy(logits, targets[i:i + 1]) for logits, i in zip(alone, rows)) / len(rows)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
        record = records[6 * epoch + k]
        assert abs(record['loss'] - loss.item()) < 1e-6 * loss.item(), (record, loss)
        assert abs(record['grad_norm'] - norm) < 2e-6 * norm, (record, norm)
        together = g['logits_of'](model, 'train', rows)
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-6, atol=3e-7)
assert orders[0] != orders[1]
idx, last = torch.zeros(2, 24, dtype=torch.long), torch.tensor([4, 23])
first = model(idx, last)
idx[0, 5:] = 77         # padding of other ids
idx[1] = 3              # another neighbour
second = model(idx, last)
assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
'''


def test_steps_are_means_over_their_rows(run, data, tmp_path):
    out = run(tmp_path, '--out_dir=out', '--dropout=0', '--learning_rate=0', nproc=2, after=AFTER).out
    cut = sum(len(text.encode()) > 24 for text in read_dataset(data)['train'][2])
    assert f'train: 41 rows, {cut} of them cut at block_size=24 tokens' in out


# The weights after two steps of warm-up, against torch's AdamW and clip_grad_norm_. AdamW's first step does not depend
# on the gradient's size, but for its eps: clipped to a norm of 1e-6, most of a gradient is below that.
TWO_STEPS = r'''
import torch.nn.functional as F
from model import GPT, GPTConfig
args, torch_seed = g['model_args'], torch.manual_seed
torch_seed(1337)
net = g['Classifier'](GPTConfig(**args, dropout=0.0), 3)
torch_seed(1337)
net.load_state_dict(GPT(GPTConfig(**args)).state_dict(), strict=False)
tokens, targets = g['tokens']['train'], g['targets']['train']
before = {name: p.detach().clone() for name, p in net.named_parameters()}
matrices, vectors = ([p for p in net.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0)])
for k, lr in enumerate([1.5e-3, 3e-3]):
    rows = g['shuffled'](numpy.arange(8 * k, 8 * k + 8), 41, 1337, 0).tolist()
    logits = [net(torch.from_numpy(tokens[i])[None], torch.tensor([len(tokens[i]) - 1])) for i in rows]
    optimizer.zero_grad()
    F.cross_entropy(torch.cat(logits), targets[rows]).backward()
    assert torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-6).item() > 0.1
    for group in optimizer.param_groups:
        group['lr'] = lr
    optimizer.step()
after = dict(g['raw_model'].named_parameters())
assert after.keys() == before.keys()
for name, p in net.named_parameters():
    move = (p - before[name]).abs().max().item()
    assert 1e-5 < move < 4.5e-3, (name, move)
    assert (after[name] - p).abs().max().item() < 5e-5 * move, (name, move, after[name] - p)
'''


def test_two_steps_are_adamws(run, tmp_path):
    """And a standard output that takes nothing does not end it."""
    full = '/dev/full' if os.path.exists('/dev/full') else None
    run(tmp_path, '--out_dir=out', '--dropout=0', '--max_iters=2', '--grad_clip=1e-6', '--weight_decay=0.1',
        after=TWO_STEPS, stdout=full)
    assert list(log_of(tmp_path / 'out')[1]) == [2]


def test_devices_and_dtypes(monkeypatch, capsys):
    """What this machine has not is one line, as in train.py."""
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: True)
    for dtype, says in [('float16', 'does not train on mps'), ('bfloat16', 'mps has no bfloat16')]:
        with pytest.raises(SystemExit):
            choose_device('mps', dtype)
        assert says in capsys.readouterr().err
    assert choose_device('mps', 'auto') == ('mps', 'float32') and choose_device('cpu', 'bfloat16')[1] == 'bfloat16'
    for name, value in dict(RANK='0', LOCAL_RANK='0', WORLD_SIZE='2', MASTER_PORT='1', MASTER_ADDR='here').items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        choose_device('mps', 'float32')
    assert 'mps takes one process' in capsys.readouterr().err


@pytest.mark.parametrize('nproc', [None, 2])
def test_a_resumed_run_equals_an_unbroken_one(run, tmp_path, nproc):
    args = '--eval_interval=2', '--epochs=1'
    run(tmp_path, '--out_dir=whole', *args, nproc=nproc)
    run(tmp_path, '--out_dir=part', *args, '--max_iters=4', nproc=nproc)
    out = run(tmp_path, '--out_dir=part', *args, '--init_from=resume', nproc=nproc).out
    assert 'from part/ckpt.pt' in out
    for name in ('ckpt.pt', 'best.pt'):
        one, other = ckpt_of(tmp_path / 'whole', name), ckpt_of(tmp_path / 'part', name)
        assert one['iter_num'] == other['iter_num'] and one['best_val_loss'] == other['best_val_loss']
        assert all(torch.equal(one['model'][key], other['model'][key]) for key in one['model'])
        for key, entry in one['optimizer']['state'].items():
            assert all(torch.equal(value, other['optimizer']['state'][key][part]) for part, value in entry.items())
    assert log_of(tmp_path / 'whole') == log_of(tmp_path / 'part')


def test_predictions_and_eval_only(plain, run, data, tmp_path):
    """best.pt's labels of the test texts give the accuracy that the run printed; neither writes anything."""
    cwd, out = plain
    before = tree(cwd / 'out')
    _, labels, texts, _ = read_dataset(data)['test']
    texts = [text.replace('\n', ' ') for text in texts]
    (tmp_path / 'texts.txt').write_text('\n'.join(texts) + '\n', encoding='utf-8')
    done = run(cwd, '--out_dir=out', f'--predict={tmp_path / "texts.txt"}', notes=0, warn=False)
    found = [line.split('\t') for line in done.out.splitlines()]
    assert len(found) == len(texts) and all(1 / 3 < float(probability) <= 1 for _, probability in found)
    right = sum(label == name for label, (name, _) in zip(labels, found))
    assert f'acc {right / len(labels):.2%}' in evaluations(out)[2] and 'of them cut' in done.err
    assert evaluations(run(cwd, '--out_dir=out', '--eval_only=True').out) == evaluations(out)[2:]
    assert tree(cwd / 'out') == before


def test_it_starts_from_checkpoints_and_folders_of_others(fork, tiny, tmp_path):
    """Weights of train.py, and the same in Hugging Face form: their shape and tokens, and equal first losses."""
    fork(tmp_path, '--out_dir=lm', '--max_iters=1')
    from scripts.export import export
    export(str(tmp_path / 'lm'), str(tmp_path / 'hf'), 'hf')
    text = (tiny / 'input.txt').read_text()
    rows = [(('a', 'b')[i % 2], text[40 * i:40 * i + 39].replace('\n', ' ')) for i in range(20)]
    for split in ROWS:
        write_csv(tmp_path / f'{split}.tsv', [('label', 'text'), *rows], delimiter='\t')
    losses = []
    for source in ('lm', 'hf'):
        done = fork(tmp_path, f'--dataset={tmp_path}', f'--init_from={source}', f'--out_dir=from-{source}',
                    '--max_iters=1', '--device=cpu', '--dropout=0', script=CLASSIFY, tiny_args=False)
        assert '20 rows, 20 of them cut at block_size=32 tokens' in done.out
        losses.append(log_of(tmp_path / f'from-{source}')[1][1]['val_loss'])
    assert losses[0] == losses[1]
    first = ckpt_of(tmp_path / 'lm')['model']['transformer.h.0.attn.c_attn.weight']
    after = ckpt_of(tmp_path / 'from-lm')['model']['transformer.h.0.attn.c_attn.weight']
    assert 2e-6 < (after - first).abs().max() < 3e-6      # the warm-up's first rate, 5e-5 / 20
    line = fork(tmp_path, f'--dataset={tmp_path}', '--init_from=lm', '--n_layer=5', '--device=cpu', script=CLASSIFY,
                tiny_args=False, rc=2)
    assert 'n_layer=5 (there 2)' in line


@pytest.mark.parametrize('args, says', [
    (['--batch_size=0'], 'batch_size=0: must be at least 1'), (['--n_layer=65536'], 'below 65536'),
    (['--dropout=1'], 'below 1'),
    (['--init_from=nowhere'], 'nowhere'), (['--init_from=resume'], 'ckpt.pt'), (['--predict=nowhere'], 'nowhere'),
    (['--dataset=nowhere'], 'prepare.py'), (['--text_column=body'], "no column 'body'"), (['--n_head=3'], 'n_embd'),
    (['--device=tpu'], 'device=tpu'), (['--dtype=int8'], 'dtype=int8'), (['--tokenizer=words'], 'words')])
def test_settings_that_do_not_work_are_one_line(run, tmp_path, args, says):
    assert says in run(tmp_path, *args, rc=2)


def test_bfloat16_and_scaled_learning_rate(plain, run, tmp_path):
    cwd, _ = plain
    run(tmp_path, '--out_dir=out', '--dropout=0', '--dtype=bfloat16', '--max_iters=6', '--scale_lr=True')
    steps, _ = log_of(tmp_path / 'out')
    reference, _ = log_of(cwd / 'out')
    assert 1e-5 < abs(steps[0]['loss'] - reference[0]['loss']) < 1e-3
    assert all(steps[i]['lr'] == pytest.approx(2 * reference[i]['lr'], rel=1e-12) for i in steps)   # 2 micro-batches


def test_a_full_disk_is_one_line(run, tmp_path):
    err = run(tmp_path, '--out_dir=out', before=FULL_DISK.format(size=500), rc=None, warn=False).err
    assert err.count('\n') == 1 and 'config.json: File too large: make room' in err, err


def test_rotary_positions(run, tmp_path):
    new = '--rope=True', '--qk_norm=True', '--max_iters=2'
    run(tmp_path, '--out_dir=out', *new, nproc=2)
    assert 'transformer.wpe.weight' not in ckpt_of(tmp_path / 'out', 'ckpt.pt')['model']
    run(tmp_path, '--out_dir=out', '--init_from=resume', '--max_iters=3')       # the checkpoint prescribes them


def test_a_used_out_dir_is_refused_and_ranks_must_share_evenly(plain, run, tmp_path):
    cwd, _ = plain
    before = tree(cwd)
    assert '--overwrite=True' in run(cwd, '--out_dir=out', rc=2) and tree(cwd) == before
    assert 'all 2 ranks' in run(tmp_path, '--gradient_accumulation_steps=3', rc=2, nproc=2)


def test_what_a_run_goes_on_from(run, data, tmp_path):
    """A resumed run tells what has changed, refuses what would skip or repeat rows; auto deletes no checkpoint."""
    run(tmp_path, '--out_dir=out', '--epochs=1')
    again = '--out_dir=out', '--init_from=resume', '--epochs=1'
    for args, says in [(['--batch_size=2'], '8 rows a step, now it would be 4'),
                       (['--tokenizer=char'], "has the tokenizer 'byte'")]:
        assert says in run(tmp_path, *again, *args, rc=2)
    assert 'classifier of classify.py' in run(tmp_path, '--init_from=out', rc=2)
    (tmp_path / 'rows').mkdir()
    for split in ROWS:
        text = (data / f'{split}.csv').read_text(encoding='utf-8')
        (tmp_path / 'rows' / f'{split}.csv').write_text(text.replace('cat', 'dog'), encoding='utf-8')
    out = run(tmp_path, *again, f'--dataset={tmp_path / "rows"}').out
    assert '; the rows of train; the rows of val\n' in out and 'tokenizer' not in out
    with open(tmp_path / 'rows' / 'train.csv', 'a') as file:
        file.write('dog,1,animal\n')
    assert '41 rows in train, now it would be 42' in run(tmp_path, *again, f'--dataset={tmp_path / "rows"}', rc=2)
    (tmp_path / 'out' / 'ckpt.pt').rename(tmp_path / 'ckpt.pt')
    (tmp_path / 'out' / 'ckpt.pt').symlink_to('nowhere')
    line = run(tmp_path, '--out_dir=out', '--init_from=auto', '--overwrite=True', rc=2)
    assert 'out/ckpt.pt: a link that leads nowhere' in line
    (tmp_path / 'ckpt.pt').replace(tmp_path / 'out' / 'ckpt.pt')
    (tmp_path / 'out' / 'best.pt').rename(tmp_path / 'best.pt')
    assert 'best.pt is missing' in run(tmp_path, *again, rc=2)
    (tmp_path / 'out' / 'ckpt.pt').rename(tmp_path / 'out' / 'best.pt')
    assert 'holds best.pt, but no ckpt.pt' in run(tmp_path, '--out_dir=out', '--init_from=auto', rc=2)
    (tmp_path / 'out' / 'best.pt').unlink()
    (tmp_path / 'out' / 'grad_dotprods').mkdir()
    assert 'holds grad_dotprods, but' in run(tmp_path, '--out_dir=out', '--init_from=auto', rc=2)
    (tmp_path / 'out' / 'grad_dotprods').rmdir()
    out = run(tmp_path, '--out_dir=out', '--init_from=auto', '--max_iters=1').out
    assert 'starts anew, and deletes log.jsonl in out' in out


# ---- rows ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('name, content, says', [
    ('a.csv', b'', 'a.csv: no rows'), ('a.csv', b'label,text\n', 'a.csv: no rows'), ('a.jsonl', b'\n\n', 'no rows'),
    ('a.csv', b'label,text\nx,y\n,z\n', 'line 3: no label'), ('a.csv', b'label,text\nx," "\n', 'line 2: no text'),
    ('a.csv', b'label,text\nx,"y\n\ny"\nz\n', 'line 5: 1 columns, and 2'),
    ('a.csv', b'1,a,b\n2,a\n', 'line 2: 2 columns'), ('a.csv', b'label,text\nx,y\nz,\xff\n', 'line 3: byte 0xff'),
    ('a.csv', b'label,text\nx,y\nx,"y" z\n', 'line 3: bad quoting'),
    ('a.csv', b'label,text\nx,"y\nx,z\n', 'line 2: bad quoting'),
    ('a.tsv', b'label\ttext\nx\t"y\n', 'line 2: bad quoting'),
    ('a.csv', b'kind,body\nx,y\n', "line 1: no column 'label', only kind, body"), ('a.txt', b'', 'must end in one of'),
    ('a.jsonl', b'{"label": 1, "text": "x"}\n{"label": 1, "text"', 'line 2: not JSON'),
    ('a.jsonl', b'["x"]', 'line 1: not an object'), ('a.jsonl', b'{"text": "x"}', "line 1: no label under 'label'"),
    ('a.jsonl', b'{"label": true, "text": "x"}', 'no label'), ('a.jsonl', b'{"label": 1, "text": null}', 'no text'),
    ('a.jsonl', b'{"label": 1.0, "text": "x"}', 'but 1.0, which is not text or integer'),
    ('a.jsonl', b'{"label": 1, "text": "x", "text": "y"}', 'line 1: not JSON (a key is there twice)'),
    ('a.csv', b'label,text,text\nx,y,z\n', "line 1: 2 columns have the name 'text'"),
    ('a.tsv', b'label\ttext\nx\t"y\nx\tz"\n', 'line 2: a field with a tab and a line break'),
    ('a.jsonl', b'{"label": 1, "text": ""}', 'line 1: no text'), ('b.csv', None, 'b.csv: No such file')])
def test_bad_rows_are_named(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_labelled(tmp_path / name)
    assert says in str(error.value) and str(tmp_path / name) in str(error.value) and '\n' not in str(error.value)


def test_forms_of_rows(tmp_path):
    expected = (['1', '2'], ['a "b", c d\ne', 'f g'], [1, 3])
    write_csv(tmp_path / 'news.csv', [(1, 'a "b", c', 'd\ne'), (2, 'f', 'g')], quoting=csv.QUOTE_ALL)
    assert read_labelled(tmp_path / 'news.csv') == expected     # as AG News: class index, title, description
    rows = [('body', 'kind', 'title'), ('d\ne', 1, 'a "b", c'), ('g', 2, 'f')]
    write_csv(tmp_path / 'named.tsv', rows, delimiter='\t')
    assert read_labelled(tmp_path / 'named.tsv', ' kind', 'title, body') == (*expected[:2], [2, 4])
    rows = [dict(label=1, text='a "b", c d\ne'), dict(label='2', text='f g', more=None)]
    (tmp_path / 'x.jsonl').write_bytes(b'\xef\xbb\xbf' + '\r\n\n'.join(map(json.dumps, rows)).encode())
    assert read_labelled(tmp_path / 'x.jsonl') == expected
    long = 'x' * 200000
    write_csv(tmp_path / 'long.csv', [('label', 'text'), ('a', long)])
    assert read_labelled(tmp_path / 'long.csv')[1] == [long]


def test_bad_datasets(tmp_path, monkeypatch, capsys):
    def says(**files):
        for path in tmp_path.iterdir():
            path.unlink()
        for name, labels in files.items():
            write_csv(tmp_path / name.replace('_', '.'), [('label', 'text'), *[(label, 'x') for label in labels]])
        with pytest.raises(ValueError) as error:
            read_dataset(tmp_path)
        return str(error.value)
    assert 'no val.csv' in says(train_csv='ab') and 'prepare.py' in says(val_csv='ab')
    assert "train.csv: all rows have the label 'a'" in says(train_csv='aa', val_csv='a')
    assert "test.csv line 3: label 'c' is none of train's: a, b" in says(train_csv='ab', val_csv='a', test_csv='ac')
    assert 'train.csv: 1,001 labels in 1,001 rows' in says(train_csv=range(1001), val_csv='1')
    assert len(says(train_csv=range(1000), val_csv='x')) < 500
    assert 'train.csv and train.jsonl: which one?' in says(train_csv='ab', train_jsonl='ab', val_csv='a')
    (tmp_path / 'train.jsonl').unlink()
    (tmp_path / 'train.csv').rename(tmp_path / 'TRAIN.CSV')
    assert read_dataset(tmp_path)['train'][1] == ['a', 'b']
    rows = [('a', 'one\rtwo'), ('b', 'x')]
    write_labelled(tmp_path / 'new', ('label', 'text'), dict.fromkeys(ROWS, rows), overwrite=False)
    assert read_dataset(tmp_path / 'new')['train'][1:3] == (['a', 'b'], ['one\rtwo', 'x'])
    assert not capsys.readouterr().err
    write_csv(tmp_path / 'new' / 'val.csv', [(0, 1), ('a', 'x')])      # a header of pandas'
    with pytest.raises(ValueError, match="label '0' is none of train's"):
        read_dataset(tmp_path / 'new')
    assert capsys.readouterr().err.endswith('val.csv: no header: the first row is data, its first column the label\n')
    monkeypatch.setattr(sys, 'stdin', SimpleNamespace(buffer=io.BytesIO(b'one\r\ntwo')))
    assert read_texts('-')[2] == ['one', 'two']
    (tmp_path / 'texts').write_bytes(b'one\n\nthree\n')
    with pytest.raises(ValueError, match='texts line 2: no text'):
        read_texts(tmp_path / 'texts')


# ---- prepare.py ------------------------------------------------------------------------------------------------------
def prepare(name, *args, code=0, env={}):
    done = subprocess.run([sys.executable, '-W', 'error', f'data/{name}/prepare.py', *map(str, args)], cwd=ROOT,
                          text=True, capture_output=True, env={**ENV, **env}, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    assert not code or (done.stderr.startswith('prepare.py: ') and done.stderr.count('\n') == 1), done.stderr
    return done.stderr if code else done.stdout


def test_ag_news(tmp_path):
    """By the original's CSV files, and by the hub's parquet files from a server on this machine: the same rows."""
    rows = [(i % 4 + 1, f'Title {i}', f'Some "news", number {i}.') for i in range(60)]
    for name, part in (('train', rows[:40]), ('test', rows[40:])):
        write_csv(tmp_path / f'{name}.csv', part, quoting=csv.QUOTE_ALL)
    files = tmp_path / 'train.csv', tmp_path / 'test.csv'
    out = prepare('ag_news', '--input', *files, '--out_dir', tmp_path / 'a', '--val_fraction=0.2')
    assert '32 rows in train.csv, 8 rows in val.csv, 20 rows in test.csv' in out
    found = read_dataset(tmp_path / 'a')
    assert sorted(set(found['train'][1])) == ['Business', 'Sci/Tech', 'Sports', 'World']
    assert sorted(found['train'][2] + found['val'][2]) == sorted(f'{title} {more}' for _, title, more in rows[:40])
    line = prepare('ag_news', '--input', *files, '--out_dir', tmp_path / 'a', '--seed=1', code=2)
    assert '--overwrite' in line and read_dataset(tmp_path / 'a') == found
    write_csv(tmp_path / 'head.csv', [('Class Index', 'Title', 'Description'), *rows[:40]])
    prepare('ag_news', '--input', tmp_path / 'head.csv', files[1], '--out_dir', tmp_path / 'h', '--val_fraction=0.2')
    assert (tmp_path / 'h' / 'train.csv').read_bytes() == (tmp_path / 'a' / 'train.csv').read_bytes()
    write_csv(tmp_path / 'few.csv', rows[:3])
    line = prepare('ag_news', '--input', tmp_path / 'few.csv', files[1], '--out_dir', tmp_path / 'b', code=2)
    assert 'few.csv: no row of class 4' in line
    write_csv(tmp_path / 'bad.csv', [rows[0], (5, 'x', 'y')])
    line = prepare('ag_news', '--input', tmp_path / 'bad.csv', files[1], '--out_dir', tmp_path / 'b', code=2)
    assert "bad.csv line 2: class '5'" in line and not (tmp_path / 'b').exists()
    env = {'HF_ENDPOINT': 'http://127.0.0.1:9', 'no_proxy': '127.0.0.1'}
    assert '--input' in prepare('ag_news', '--out_dir', tmp_path / 'b', env=env, code=1)
    assert not (tmp_path / 'b').exists()
    pyarrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    blobs = {}
    for name, part in (('train', rows[:40]), ('test', rows[40:])):
        table, sink = dict(text=[f'{a} {b}' for _, a, b in part], label=[k - 1 for k, _, _ in part]), io.BytesIO()
        parquet.write_table(pyarrow.table(table), sink)
        blobs[f'{name}-00000-of-00001.parquet'] = sink.getvalue()
    with hub(blobs, folder='data') as (env, _):
        prepare('ag_news', '--out_dir', tmp_path / 'c', '--val_fraction=0.2', env=env)
    for split in ROWS:
        assert (tmp_path / 'c' / f'{split}.csv').read_bytes() == (tmp_path / 'a' / f'{split}.csv').read_bytes()


def test_plays_are_split_by_play(tmp_path):
    script = runpy.run_path(os.path.join(ROOT, 'data', 'shakespeare_genre', 'prepare.py'))
    plays, text = script['PLAYS'], ''
    for title, _, opening in plays:
        text += f'FIRST:\n{opening}\n\n' + ''.join(f'A MAN:\n{title} says {i}\nand more\n\n' for i in range(120))
    (tmp_path / 'input.txt').write_text(text)
    prepare('shakespeare_genre', '--input', tmp_path / 'input.txt', '--out_dir', tmp_path / 'out', '--chars=200')
    found = {}
    for split in ROWS:
        with open(tmp_path / 'out' / f'{split}.csv', newline='') as file:
            found[split] = list(csv.DictReader(file))
    genre = {title: name for title, name, _ in plays}
    for row in sum(found.values(), []):
        assert row['label'] == genre[row['play']] and 'MAN' not in row['text'] and len(row['text']) >= 200
        assert set(row['text'].split(' says')[0].split('\n')[-1:]) & {row['play'], *[p[2] for p in plays]}
    played = {split: {row['play'] for row in rows} for split, rows in found.items()}
    assert played['test'] == set(script['TEST']) and not played['test'] & (played['train'] | played['val'])
    for split in ROWS:
        assert {genre[title] for title in played[split]} == set(genre.values())
    assert not {row['text'] for row in found['train']} & {row['text'] for row in found['val']}
    (tmp_path / 'cut.txt').write_text(text[:len(text) // 2])
    line = prepare('shakespeare_genre', '--input', tmp_path / 'cut.txt', '--out_dir', tmp_path / 'no', code=2)
    assert 'cut.txt: does not hold' in line and not (tmp_path / 'no').exists()


def test_the_baseline(fork, data, tmp_path):
    script = os.path.join(ROOT, 'scripts', 'tfidf.py')
    line = fork(tmp_path, data, script=script, tiny_args=False, rc=1, before='sys.modules["sklearn"] = None')
    assert line.err == 'tfidf.py: the baseline needs scikit-learn: pip install scikit-learn\n'
    pytest.importorskip('sklearn')
    done = fork(tmp_path, data, script=script, tiny_args=False, warn=False)
    assert '[tfidf test] acc 100.00%' in done.out

