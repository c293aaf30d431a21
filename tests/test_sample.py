"""scripts/sample.py on small runs of train.py."""
import json
import os
import pickle
import shutil
import sys
from functools import partial

import pytest
import torch

from conftest import ROOT, ckpt_of, tree, write_dataset

sys.path.insert(0, ROOT)
from model import GPT, GPTConfig  # noqa: E402
from scripts.export import export  # noqa: E402

LINE = '---------------\n'
EOT = '<|endoftext|>'


@pytest.fixture(scope='module')
def run(fork, tiny, tmp_path_factory):
    """A folder with the run `out` of a dataset that is no longer there."""
    cwd = tmp_path_factory.mktemp('run')
    data = shutil.copytree(tiny, cwd / 'data')
    fork(cwd, f'--dataset={data}', '--out_dir=out', '--learning_rate=3e-3')
    shutil.rmtree(data)
    return cwd


@pytest.fixture(scope='module')
def sample(fork, run):
    """sample(*args): the samples' texts, without anything being written; for rc=2 the message."""
    def call(*args, rc=0, cwd=run):
        before = tree(cwd)
        done = fork(cwd, '--out_dir=out', '--device=cpu', '--max_new_tokens=40', *args,
                    script=os.path.join(ROOT, 'scripts', 'sample.py'), tiny_args=False, rc=rc, notes=1)
        assert tree(cwd) == before
        return done if rc else done.out.split(LINE)[:-1]
    return call


def greedy(run, prompt, n=40):
    c = ckpt_of(run / 'out')
    itos = c['meta']['tokenizer']['itos']
    model = GPT(GPTConfig(**{**c['model_args'], 'dropout': 0.0})).eval()
    model.load_state_dict(c['model'])
    idx = torch.tensor([[itos.index(x) for x in prompt]])
    for _ in range(n):
        with torch.no_grad():
            idx = torch.cat((idx, model(idx[:, -32:]).argmax(-1, keepdim=True)), 1)
    return ''.join(itos[i] for i in idx[0].tolist())


@pytest.mark.parametrize('prompt', ['a', 'be that ', 'a rather long prompt, longer than the block of the model'])
def test_temperature_zero_is_greedy(sample, run, prompt):
    expected = greedy(run, prompt) + '\n'
    assert sample(f'--start={prompt}', '--temperature=0', '--num_samples=2') == [expected] * 2
    assert sample(f'--start={prompt}', '--top_k=1', '--num_samples=1') == [expected]
    assert sample(f'--start={prompt}', '--top_k=0', '--top_p=1e-9', '--num_samples=1') == [expected]


def test_prompts(sample, run, tmp_path):
    (tmp_path / 'prompt.txt').write_text('be that ')
    text, = sample(f'--start=FILE:{tmp_path / "prompt.txt"}', '--num_samples=1')
    assert text.startswith('be that ') and len(text) == 8 + 40 + 1
    (tmp_path / 'prompt.txt').write_bytes(b'\xef\xbb\xbfbe\r\n')      # as Windows' editors write it
    text, = sample(f'--start=FILE:{tmp_path / "prompt.txt"}', '--num_samples=1', '--max_new_tokens=0')
    assert text == 'be\n\n'
    text, = sample('--start=', '--num_samples=1')
    assert len(text) == 40 + 1
    assert sample('--start=ab', '--num_samples=1', '--max_new_tokens=0') == ['ab\n']


def test_seed_decides(sample):
    first = sample('--start=a', '--num_samples=3', '--seed=5')
    assert len(set(first)) == 3 and first == sample('--start=a', '--num_samples=3', '--seed=5') != sample('--start=a',
            '--num_samples=3', '--seed=6')


@pytest.mark.parametrize('temperature', ['1e-300', '1e-7', '1e-40'])
def test_hardly_any_temperature_is_greedy(sample, run, temperature):
    assert sample('--start=a', f'--temperature={temperature}', '--num_samples=1') == [greedy(run, 'a') + '\n']


def test_the_newest_checkpoint_is_taken_and_named(fork, sample, run, tmp_path):
    """As by train.py and export.py; best.pt is one of them, and can be named."""
    args = '--start=a', '--temperature=0', '--num_samples=1'
    expected = sample(*args)
    out = shutil.copytree(run / 'out', tmp_path / 'out')
    c = ckpt_of(out)
    zeros = {**c, 'iter_num': 10, 'model': {k: torch.zeros_like(v) for k, v in c['model'].items()}}
    torch.save(zeros, out / 'best.pt')
    assert sample(*args, cwd=tmp_path) == expected != sample(*args, '--out_dir=out/best.pt', cwd=tmp_path)
    call = partial(fork, tmp_path, '--device=cpu', *args, script=os.path.join(ROOT, 'scripts', 'sample.py'),
                   tiny_args=False, notes=1)
    assert call().err == 'sample.py: from out/ckpt.pt, step 20\n'
    (out / 'ckpt.pt').unlink()
    assert call().err == 'sample.py: from out/best.pt, step 10\n'


@pytest.mark.parametrize('args, words', [
    ('--start=\u0416', ['\u0416']), ('--out_dir=nothing', ['nothing']), ('--temperature=-1', ['temperature=-1.0']),
    ('--top_k=-1', ['top_k=-1']),
    ('--top_p=0', ['top_p=0']), ('--top_p=2', ['top_p=2']), ('--num_samples=0', ['num_samples=0']),
    ('--max_new_tokens=-1', ['max_new_tokens=-1']),
    ('--dtype=float8', ['float8']), ('--device=cuda', ['device=cuda']), ('--device=tpu', ['device=tpu']),
    ('--device=cpu:x', ['device=cpu:x']), ('--device=', ['device=']), ('--device=meta:7:7', ['device=meta:7:7']),
    ('--start=FILE:/dev/zero', ['start=FILE:/dev/zero: a pipe or a device']),
    ('--start=FILE:nothing.txt', ['start=FILE:nothing.txt: No such file']), ('--out_dir=', ['out_dir= does not exist']),
    ('--seed=18446744073709551616', ['seed=18446744073709551616', 'below']), ('stray', ['stray'])])
def test_wrong_arguments(sample, args, words):
    line = sample(args, rc=2)
    assert all(word in line for word in words), line


def test_broken_checkpoint(sample, run, tmp_path):
    (tmp_path / 'out').mkdir()
    for content in (b'', b'hello', (run / 'out' / 'ckpt.pt').read_bytes()[:-1]):
        (tmp_path / 'out' / 'ckpt.pt').write_bytes(content)
        assert 'ckpt.pt: torn, or not a checkpoint' in sample(rc=2, cwd=tmp_path)


def changed(run, folder, change):
    """A copy of the run's checkpoint as folder/ckpt.pt, after change(checkpoint)."""
    c = ckpt_of(run / 'out')
    change(c)
    folder.mkdir(exist_ok=True)
    torch.save(c, folder / 'ckpt.pt')
    return f'--out_dir={folder}'


def test_any_stdout_will_do(fork, run, tmp_path):
    def change(c):
        itos = c['meta']['tokenizer']['itos']
        itos[itos.index('a')] = '\u00e4'
    call = partial(fork, tmp_path, changed(run, tmp_path, change), '--device=cpu', '--max_new_tokens=9',
                   '--start=\u00e4', script=os.path.join(ROOT, 'scripts', 'sample.py'), tiny_args=False)
    assert call(before='sys.stdout.reconfigure(encoding="ascii")', notes=1).out.startswith('\\xe4')
    done = call(before='r, w = os.pipe(); os.close(r); os.dup2(w, 1)', rc=1)     # a reader that has gone
    assert done.err.count('\n') == 1 and 'from' in done.err


def test_an_alphabet_without_the_default_prompt(sample, run, tmp_path):
    """Without a line break the default begins with nothing; one that was asked for is refused."""
    def change(c):
        itos = c['meta']['tokenizer']['itos']
        itos[itos.index('\n')] = '#'
    out_dir = changed(run, tmp_path, change)
    text, = sample(out_dir, '--num_samples=1')
    assert len(text) == 41
    assert "'\\n'" in sample(out_dir, '--start=\n', rc=2)


def test_end_of_text_in_a_prompt_is_one_token(sample, run, tmp_path):
    def change(c):
        itos = c['meta']['tokenizer']['itos']
        itos[itos.index('z')] = EOT
    assert "'<'" in sample(f'--start=a{EOT}b', rc=2)        # no such token: letters like others
    out_dir = changed(run, tmp_path, change)
    text, = sample(out_dir, f'--start={EOT}a{EOT}', '--num_samples=1', '--temperature=0')
    assert text.startswith(f'{EOT}a{EOT}') and text.replace(EOT, 'z') == greedy(run, 'zaz') + '\n'


def test_bytes_end_a_text_with_one_token_too(fork, sample, run, tmp_path):
    def change(c):
        c['meta'] = {'vocab_size': 257, 'tokenizer': 'byte', 'eot': 256}
        c['model_args']['vocab_size'] = 320
        c['model'], c['optimizer'] = GPT(GPTConfig(**c['model_args'])).state_dict(), {}
    text, = sample(changed(run, tmp_path, change), f'--start=\u00e4{EOT}', '--num_samples=1', '--max_new_tokens=0')
    assert text == f'\u00e4{EOT}\n'


def test_weights_and_tokens_that_do_not_belong_together(sample, run, tiny, tmp_path):
    """A table of one character less than the checkpoint has ids would decode everything shifted by one."""
    ids = ckpt_of(run / 'out')['model_args']['vocab_size']
    assert ids < 64

    def one_less(c):
        del c['meta']['tokenizer']['itos'][0]
    line = sample(changed(run, tmp_path / 'a', one_less), rc=2)
    assert f'{ids} token ids' in line and str(ids - 1) in line

    def as_nanogpt(c):
        c.update(meta=None, config={'dataset': str(tmp_path / 'data')})
    out_dir = changed(run, tmp_path / 'b', as_nanogpt)
    line = sample(out_dir, rc=2)        # the dataset is missing
    assert f'{ids} token ids' in line and str(tmp_path / 'data') in line
    shutil.copytree(tiny, tmp_path / 'data')
    assert len(sample(out_dir, '--num_samples=1')[0]) == 42
    (tmp_path / 'data' / 'meta.json').write_text(json.dumps(
        {'vocab_size': 3, 'tokenizer': {'type': 'char', 'itos': ['\n', 'b', 'c']}}))
    line = sample(out_dir, rc=2)
    assert f'{ids} token ids' in line and str(tmp_path / 'data') in line and ' 3' in line


def test_a_folder_in_hugging_face_form_says_its_tokens(sample, run, tmp_path):
    """An export knows the alphabet; a folder that does not is taken for GPT-2's tokens only if it has as many ids."""
    export(str(run / 'out' / 'ckpt.pt'), str(tmp_path / 'hf'), 'hf')
    args = '--start=be that ', '--temperature=0', '--num_samples=1'
    assert sample(f'--init_from={tmp_path / "hf"}', *args) == sample(*args)
    config = json.loads((tmp_path / 'hf' / 'config.json').read_text())
    del config['flatgpt']
    (tmp_path / 'hf' / 'config.json').write_text(json.dumps(config))
    line = sample(f'--init_from={tmp_path / "hf"}', '--start=hello', rc=2)
    assert 'token ids' in line and 'hf' in line, line
    (tmp_path / 'hf' / 'config.json').write_text(json.dumps([config]))
    assert 'config.json' in sample(f'--init_from={tmp_path / "hf"}', rc=2)


def test_padding_ids_are_never_drawn(fork, sample, tmp_path):
    """1,030 characters, 1,088 rows in the model, and a temperature at which all rows are alike."""
    data = write_dataset(tmp_path / 'data', ''.join(chr(0x4E00 + i * 7 % 1030) for i in range(2060)))
    fork(tmp_path, f'--dataset={data}', '--out_dir=out', '--n_layer=1', '--n_embd=8', '--max_iters=1', '--eval_iters=1')
    assert ckpt_of(tmp_path / 'out')['model_args']['vocab_size'] == 1088
    text, = sample('--start=\u4e00', '--temperature=100', '--top_k=0', '--num_samples=1', '--max_new_tokens=400',
                   cwd=tmp_path)
    assert len(text) == 402


def test_nanogpt_checkpoint(sample, run, tiny, tmp_path):
    """No meta inside: the characters come from the dataset that its config names."""
    c = ckpt_of(run / 'out')
    itos = c['meta']['tokenizer']['itos']
    data = tmp_path / 'data'
    data.mkdir()
    (data / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': len(itos), 'itos': dict(enumerate(itos)),
                                                  'stoi': {x: i for i, x in enumerate(itos)}}))
    args = {**{k: v for k, v in c['model_args'].items() if k != 'gelu'}, 'dropout': 0.0}
    (tmp_path / 'out').mkdir()
    torch.save({'model': {'_orig_mod.' + k: v for k, v in c['model'].items()},
                'optimizer': {'state': {}, 'param_groups': []}, 'model_args': args, 'iter_num': 20,
                'best_val_loss': torch.tensor(3.0), 'config': {'dataset': str(data)}}, tmp_path / 'out' / 'ckpt.pt')
    text, = sample('--start=a', '--num_samples=1', cwd=tmp_path)
    assert text.startswith('a') and len(text) == 42
