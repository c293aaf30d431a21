"""scripts/sample.py on small runs of train.py."""
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
                    script=os.path.join(ROOT, 'scripts', 'sample.py'), tiny_args=False, rc=rc)
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
    text, = sample('--start=', '--num_samples=1')
    assert len(text) == 40 + 1
    assert sample('--start=ab', '--num_samples=1', '--max_new_tokens=0') == ['ab\n']


def test_seed_decides(sample):
    first = sample('--start=a', '--num_samples=3', '--seed=5')
    assert len(set(first)) == 3 and first == sample('--start=a', '--num_samples=3', '--seed=5') != sample('--start=a',
            '--num_samples=3', '--seed=6')


def test_best_is_preferred_and_not_needed(sample, run, tmp_path):
    expected = sample('--start=a', '--temperature=0', '--num_samples=1')
    out = shutil.copytree(run / 'out', tmp_path / 'out')
    c = ckpt_of(out)
    torch.save({**c, 'model': {k: torch.zeros_like(v) for k, v in c['model'].items()}}, out / 'ckpt.pt')
    assert sample('--start=a', '--temperature=0', '--num_samples=1', cwd=tmp_path) == expected
    shutil.copy(run / 'out' / 'ckpt.pt', out / 'ckpt.pt')
    (out / 'best.pt').unlink()
    assert sample('--start=a', '--temperature=0', '--num_samples=1', cwd=tmp_path) == expected


@pytest.mark.parametrize('args, words', [
    ('--start=\u0416', ['\u0416']), ('--out_dir=nothing', ['nothing']), ('--temperature=-1', ['temperature=-1.0']),
    ('--top_k=-1', ['top_k=-1']),
    ('--top_p=0', ['top_p=0']), ('--top_p=2', ['top_p=2']), ('--num_samples=0', ['num_samples=0']),
    ('--max_new_tokens=-1', ['max_new_tokens=-1']),
    ('--dtype=float8', ['float8']), ('--device=cuda', ['device=cuda']), ('--device=tpu', ['tpu']),
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


def test_any_stdout_will_do(fork, run, tmp_path):
    c = ckpt_of(run / 'out')
    itos = c['meta']['tokenizer']['itos']
    itos[itos.index('a')] = '\u00e4'
    torch.save(c, tmp_path / 'ckpt.pt')
    call = partial(fork, tmp_path, '--out_dir=ckpt.pt', '--device=cpu', '--max_new_tokens=9', '--start=\u00e4',
                   script=os.path.join(ROOT, 'scripts', 'sample.py'), tiny_args=False)
    assert call(before='sys.stdout.reconfigure(encoding="ascii")').out.startswith('\\xe4')
    assert call(before='r, w = os.pipe(); os.close(r); os.dup2(w, 1)', rc=1).err == ''      # a reader that has gone


def test_a_folder_that_does_not_say_its_tokens(sample, run, tmp_path):
    """A model of characters in Hugging Face form is taken for one of GPT-2's tokens, which it can not be."""
    export(str(run / 'out' / 'ckpt.pt'), str(tmp_path / 'hf'), 'hf')
    line = sample(f'--init_from={tmp_path / "hf"}', '--start=hello', rc=2)
    assert 'token ids' in line and 'hf' in line, line


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
