"""scripts/export.py: one file, sharded and Hugging Face form hold the same model, and nothing is lost on the way."""
import contextlib
import io
import json
import math
import os
import runpy
import subprocess
import sys
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT, full_disk
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

SCRIPT = os.path.join(ROOT, 'scripts', 'export.py')
sys.path.insert(0, ROOT)
from data.corpus import get_tokenizer  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from scripts.export import write_hf  # noqa: E402

ARGS = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, bias=True, vocab_size=64, dropout=0.0, gelu='tanh',
            rope=False, qk_norm=False)


def trained(iter_num=7, meta=None, **changes):
    """(model after two steps of AdamW, the checkpoint dict train.py would save)."""
    torch.manual_seed(0)
    args = {**ARGS, **changes}
    model = GPT(GPTConfig(**args))
    with torch.no_grad():
        for p in model.parameters():  # biases away from 0, so that a lost one shows
            p.add_(0.1 * torch.randn_like(p))
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-3, betas=(0.9, 0.95))
    for _ in range(2):
        model(torch.randint(0, 40, (2, 16)), torch.randint(0, 40, (2, 16))).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {'model': model.state_dict(), 'optimizer': get_optimizer_state_dict(model, optimizer), 'model_args': args,
             'iter_num': iter_num, 'best_val_loss': 1.25, 'config': {'seed': 1, 'out_dir': 'out', 'end': None},
             'meta': meta, 'scaler': {}, 'wandb_id': 'abc'}
    return model.eval(), state


def same(a, b):
    """Equal in structure, types and every bit of every tensor."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def load(path):
    return torch.load(path, weights_only=True)


def storages(path):
    """Number of tensors stored in a .pt file."""
    with zipfile.ZipFile(path) as archive:
        return sum('/data/' in name for name in archive.namelist())


def logits(model, length=16):
    ids = torch.randint(0, 40, (3, length), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return ids, torch.stack([model(ids[:, :t + 1]) for t in range(length)], 1).squeeze(2)


def export(*args, rc=0, notes=0):
    """stdout of the script, or its one line on stderr; in this process, since importing torch takes seconds. notes: how
    many lines it has on stderr without failing."""
    argv, path, out, err, code = sys.argv, sys.path[:], io.StringIO(), io.StringIO(), 0
    sys.argv = [SCRIPT, *map(str, args)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter('error')
            warnings.filterwarnings('ignore', 'torch.distributed is disabled')      # as checkpoint.py, imported before
            runpy.run_path(SCRIPT, run_name='__main__')
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv, sys.path[:] = argv, path
    out, err = out.getvalue(), err.getvalue()
    assert code == rc, err
    assert err.count('\n') == (notes or rc > 0), err
    assert all(line.startswith(('export.py: ', 'passed over')) for line in err.splitlines()), err
    return err if rc else out


def files(folder):
    return sorted(os.path.relpath(os.path.join(d, f), folder) for d, _, names in os.walk(folder) for f in names)


def test_full_sharded_full_is_exact(tmp_path):
    _, ckpt = trained(meta={'vocab_size': 60, 'eot': 59})
    (tmp_path / 'run').mkdir()
    torch.save(ckpt, tmp_path / 'run' / 'ckpt.pt')
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    done = subprocess.run([sys.executable, '-W', 'error', SCRIPT, 'run', 'there', '--to=sharded'], cwd=tmp_path,
                          env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout == 'wrote there/ckpt_dcp/step_7 from run/ckpt.pt, step 7\n'
    assert files(tmp_path / 'there') == [f'ckpt_dcp/step_7/{f}' for f in ('.metadata', '__0_0.distcp', 'state.json')]
    export(tmp_path / 'there', tmp_path / 'back', '--to=full')
    export(tmp_path / 'there' / 'ckpt_dcp' / 'step_7', tmp_path / 'named.pt', '--to=full')
    for path in (tmp_path / 'back' / 'ckpt.pt', tmp_path / 'named.pt'):
        again = load(path)
        assert same(again, ckpt)
        assert again['model']['lm_head.weight'].data_ptr() == again['model']['transformer.wte.weight'].data_ptr()
        assert storages(path) == storages(tmp_path / 'run' / 'ckpt.pt') == 4 * len(ckpt['optimizer']['state'])
    assert files(tmp_path / 'back') == ['ckpt.pt']


@pytest.mark.filterwarnings('ignore:torch.distributed is')
def test_sharded_form_is_what_dcp_reads_and_writes(tmp_path):
    """The folder loads by plain dcp.load into the trainer's nested dicts, and one written by dcp.save is understood."""
    _, ckpt = trained()
    torch.save(ckpt, tmp_path / 'a.pt')
    export(tmp_path / 'a.pt', tmp_path / 'a', '--to=sharded')
    tensors = {'model': {k: v for k, v in ckpt['model'].items() if k != 'lm_head.weight'},
               'optimizer': {'state': ckpt['optimizer']['state']}}
    empty = {'model': {k: torch.full_like(v, 9) for k, v in tensors['model'].items()}, 'optimizer': {'state': {
        k: {n: torch.full_like(t, 9) for n, t in e.items()} for k, e in tensors['optimizer']['state'].items()}}}
    dcp.load(empty, checkpoint_id=tmp_path / 'a' / 'ckpt_dcp' / 'step_7', no_dist=True)
    assert same(empty, tensors)
    folder = tmp_path / 'b' / 'ckpt_dcp' / 'step_9'
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    rest = {k: v for k, v in ckpt.items() if k not in tensors}
    rest.update(iter_num=9, param_groups=ckpt['optimizer']['param_groups'])
    (folder / 'state.json').write_text(json.dumps(rest))
    export(tmp_path / 'b', tmp_path / 'c', '--to=full')
    assert same(load(tmp_path / 'c' / 'ckpt.pt'), {**ckpt, 'iter_num': 9})


@pytest.mark.parametrize('changes', [{}, {'bias': False}, {'gelu': 'none'}, {'dropout': 0.3},
                                     {'meta': {'vocab_size': 50, 'eot': 49}}],
                         ids=['tanh', 'no bias', 'exact gelu', 'dropout', 'padded vocabulary'])
def test_hf_folder_gives_the_same_logits(tmp_path, changes):
    model, ckpt = trained(**changes)
    torch.save(ckpt, tmp_path / 'a.pt')
    told = export(tmp_path / 'a.pt', tmp_path / 'hf', '--to=hf', notes=1)       # that there is no tokenizer
    assert ('no biases' in told) == ('bias' in changes)
    assert files(tmp_path) == ['a.pt', 'hf/config.json', 'hf/model.safetensors']
    vocab_size = 50 if 'meta' in changes else 64
    assert len(load_file(tmp_path / 'hf' / 'model.safetensors')['transformer.wte.weight']) == vocab_size
    ids, want = logits(model)
    transformers = pytest.importorskip('transformers')
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / 'hf', output_loading_info=True)
    assert not report['missing_keys'] and not report['unexpected_keys']
    with torch.no_grad():
        got = theirs.eval()(ids).logits
    assert want.abs().max() > 1
    torch.testing.assert_close(got, want[..., :vocab_size], rtol=0, atol=1e-5)
    assert theirs.config.eos_token_id == (49 if 'meta' in changes else None)
    assert [theirs.config.resid_pdrop, theirs.config.embd_pdrop, theirs.config.attn_pdrop] == [0, 0, 0]


def test_hf_folder_comes_back(tmp_path):
    """Our own reader takes the exported folder: weights bit for bit, and no biases where there were none."""
    model, ckpt = trained(bias=False)
    torch.save(ckpt, tmp_path / 'a.pt')
    export(tmp_path / 'a.pt', tmp_path / 'hf', '--to=hf', notes=1)
    export(tmp_path / 'hf', tmp_path / 'b.pt', '--to=full')
    again = load(tmp_path / 'b.pt')
    assert again['model_args'] == {**ARGS, 'bias': False} and again['meta'] is None
    assert same(again['model'], ckpt['model'])
    # biases that another tool has trained since are kept
    weights = load_file(tmp_path / 'hf' / 'model.safetensors')
    weights['transformer.ln_f.bias'] += 1
    save_file(weights, tmp_path / 'hf' / 'model.safetensors', {'format': 'pt'})
    export(tmp_path / 'hf', tmp_path / 'c.pt', '--to=full')
    again = load(tmp_path / 'c.pt')
    assert again['model_args'] == {**ARGS, 'bias': True} and bool((again['model']['transformer.ln_f.bias'] == 1).all())
    assert not again['model']['transformer.h.0.mlp.c_fc.bias'].any()


TEXT = "It's a text, with  spaces.\n\nUnd f\u00fcnf \u4e16\u754c!\r\n\tThe end"
SPECS = {'gpt2': 'gpt2', 'r50k_base': 'r50k_base', 'byte': 'byte',
         'char': {'type': 'char', 'itos': sorted(set(TEXT))},
         'char with an end': {'type': 'char', 'itos': [*sorted(set(TEXT)), '<|endoftext|>']}}


@pytest.mark.parametrize('spec', SPECS.values(), ids=SPECS)
def test_other_tools_take_the_tokenizer_too(tmp_path, spec):
    """transformers reads the folder alone, decodes what it generates, and counts as many bits per byte as we do."""
    transformers = pytest.importorskip('transformers')
    try:
        tokenizer = get_tokenizer(spec)
    except OSError as error:
        pytest.skip(str(error))
    rows = math.ceil(tokenizer.vocab_size / 64) * 64
    model, ckpt = trained(vocab_size=rows, n_embd=8, block_size=64, bias=False,
                          meta={'vocab_size': tokenizer.vocab_size, 'tokenizer': spec, 'eot': tokenizer.eot})
    torch.save(ckpt, tmp_path / 'a.pt')
    export(tmp_path / 'a.pt', tmp_path / 'hf', '--to=hf')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf')
    want = tokenizer.encode(TEXT)
    assert theirs(TEXT)['input_ids'] == want and theirs.decode(want) == TEXT and len(theirs) == tokenizer.vocab_size
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.eot
    if tokenizer.eot is not None:
        assert theirs(TEXT + '<|endoftext|>')['input_ids'] == [*want, tokenizer.eot]
    if isinstance(spec, dict):
        with pytest.raises(Exception, match='UNK'):
            theirs('\u0416')

    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'hf').eval()
    ids = torch.tensor([want])[:, :64]
    with torch.no_grad():
        nats = network(ids, labels=ids).loss.item()
        rows = torch.cat([model(ids[:, :t + 1]) for t in range(ids.size(1) - 1)])
        own = torch.nn.functional.cross_entropy(rows[:, :tokenizer.vocab_size], ids[0, 1:]).item()
    assert nats == pytest.approx(own, rel=1e-5)
    generator = transformers.pipeline('text-generation', model=str(tmp_path / 'hf'), device='cpu')
    found = generator('The', max_new_tokens=12, do_sample=False, return_full_text=True)[0]['generated_text']
    prompt = torch.tensor([tokenizer.encode('The')])
    ours = model.generate(prompt, 12, temperature=0, vocab_size=tokenizer.vocab_size)[0].tolist()
    if tokenizer.eot in ours:       # transformers stops there
        ours = ours[:ours.index(tokenizer.eot)]
    assert found == tokenizer.decode(ours) and len(ours) > prompt.size(1), (found, ours)

    export(tmp_path / 'hf', tmp_path / 'b.pt', '--to=full')     # and the record comes back
    meta = load(tmp_path / 'b.pt')['meta']
    assert meta == {'vocab_size': tokenizer.vocab_size, 'tokenizer': spec, 'eot': tokenizer.eot}


def test_a_tokenizer_without_such_files_is_told(tmp_path):
    pytest.importorskip('tiktoken')
    _, ckpt = trained(meta={'vocab_size': 64, 'tokenizer': {'type': 'char', 'itos': ['a'] * 63}})
    ckpt['model_args']['vocab_size'] = 64
    torch.save(ckpt, tmp_path / 'a.pt')
    export(tmp_path / 'a.pt', tmp_path / 'padded', '--to=hf')      # 63 pad to 64
    ckpt['meta']['tokenizer']['itos'] = ['a'] * 65
    torch.save(ckpt, tmp_path / 'a.pt')
    export(tmp_path / 'a.pt', tmp_path / 'hf', '--to=hf', notes=1)
    assert files(tmp_path / 'hf') == ['config.json', 'model.safetensors']


@pytest.mark.parametrize('name, shape', [
    ('transformer.h.0.mlp.gate.weight', (128, 32)), ('transformer.ln_e.weight', (32,)),
    ('transformer.h.1.mlp.c_fc.weight', (64, 32))])
def test_a_forks_model_has_no_hf_form(tmp_path, name, shape):
    _, ckpt = trained()
    ckpt['model'][name] = torch.zeros(shape)
    with pytest.raises(ValueError, match='--to=full'):
        write_hf(ckpt, tmp_path, None)
    assert not list(tmp_path.iterdir())


def test_hf_folder_in_several_files(tmp_path):
    """Large models come in parts, and an index says which tensor is in which."""
    transformers = pytest.importorskip('transformers')
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / 'one')
    theirs.save_pretrained(tmp_path / 'parts', max_shard_size='20kB')
    assert len([name for name in files(tmp_path / 'parts') if name.endswith('.safetensors')]) > 2
    for name in 'one', 'parts':
        export(tmp_path / name, tmp_path / f'{name}.pt', '--to=full')
    assert same(load(tmp_path / 'parts.pt')['model'], load(tmp_path / 'one.pt')['model'])
    part = sorted((tmp_path / 'parts').glob('*.safetensors'))[1]
    part.write_bytes(part.read_bytes()[:-1])
    assert part.name in export(tmp_path / 'parts', tmp_path / 'x.pt', '--to=full', rc=1)
    part.unlink()
    assert part.name in export(tmp_path / 'parts', tmp_path / 'x.pt', '--to=full', rc=1)
    (tmp_path / 'parts' / 'model.safetensors.index.json').write_text('{"weight_map": [1]}')
    assert 'index.json' in export(tmp_path / 'parts', tmp_path / 'x.pt', '--to=full', rc=1)


@pytest.mark.parametrize('config', ['[]', '[1, 2]', '{', '3', '{}', '{"n_layer": "2"}', '{"n_layer": [2]}', '\ufeff{}'])
def test_hf_config_that_is_none(tmp_path, config):
    _, ckpt = trained()
    torch.save(ckpt, tmp_path / 'a.pt')
    export(tmp_path / 'a.pt', tmp_path / 'hf', '--to=hf', notes=1)
    (tmp_path / 'hf' / 'config.json').write_text(config, encoding='utf-8')
    assert 'config.json' in export(tmp_path / 'hf', tmp_path / 'b.pt', '--to=full', rc=1)


def test_from_transformers_own_folder(tmp_path):
    """What save_pretrained writes becomes a checkpoint at step 0, and goes back bit for bit."""
    transformers = pytest.importorskip('transformers')
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2,
                                     bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / 'hf')
    export(tmp_path / 'hf', tmp_path / 'run', '--to=full')
    ckpt = load(tmp_path / 'run' / 'ckpt.pt')
    assert ckpt['optimizer'] == {} and ckpt['iter_num'] == 0 and ckpt['model_args']['gelu'] == 'tanh'
    model = GPT(GPTConfig(**ckpt['model_args'])).eval()
    model.load_state_dict(ckpt['model'])
    ids, got = logits(model)
    with torch.no_grad():
        torch.testing.assert_close(got, theirs(ids).logits, rtol=0, atol=1e-5)
    export(tmp_path / 'run', tmp_path / 'again', '--to=hf', notes=1)
    assert same(load_file(tmp_path / 'again' / 'model.safetensors'), load_file(tmp_path / 'hf' / 'model.safetensors'))
    export(tmp_path / 'hf', tmp_path / 'run', '--to=sharded')  # AdamW's state is there, at zero, as before a first step
    export(tmp_path / 'run' / 'ckpt_dcp' / 'step_0', tmp_path / 'zero.pt', '--to=full')
    zero = load(tmp_path / 'zero.pt')
    assert same(zero['model'], ckpt['model'])
    assert zero['optimizer']['state'].keys() == zero['model'].keys() - {'lm_head.weight'}
    assert not any(t.any() for entry in zero['optimizer']['state'].values() for t in entry.values())


def test_nanogpt_checkpoint(tmp_path):
    """No gelu, meta or names in it, a prefix from torch.compile, a tensor as best loss, masks among the weights."""
    model, ckpt = trained(gelu='none')
    names = [n for group in ckpt['optimizer']['param_groups'] for n in group['params']]
    number = {name: i for i, name in enumerate(names)}
    old = {'model': {'_orig_mod.' + k: v for k, v in ckpt['model'].items()},
           'model_args': {k: v for k, v in ckpt['model_args'].items() if k not in ('gelu', 'rope', 'qk_norm')},
           'iter_num': 7,
           'best_val_loss': torch.tensor(1.25), 'config': ckpt['config'],
           'optimizer': {'state': {number[n]: e for n, e in ckpt['optimizer']['state'].items()}, 'param_groups': [
               {**g, 'params': [number[n] for n in g['params']]} for g in ckpt['optimizer']['param_groups']]}}
    old['model']['_orig_mod.transformer.h.0.attn.bias'] = torch.ones(1, 1, 16, 16)
    torch.save(old, tmp_path / 'old.pt')
    export(tmp_path / 'old.pt', tmp_path / 'new', '--to=full')
    assert same(load(tmp_path / 'new' / 'ckpt.pt'), {**ckpt, 'wandb_id': None})
    export(tmp_path / 'old.pt', tmp_path / 'hf', '--to=hf', notes=1)
    assert json.loads((tmp_path / 'hf' / 'config.json').read_text())['activation_function'] == 'gelu'


def test_out_dir_means_its_newest_complete_checkpoint(tmp_path):
    for iter_num in (3, 10, 8):
        torch.save(trained(iter_num)[1], tmp_path / 'ckpt.pt')
        if iter_num != 8:
            export(tmp_path / 'ckpt.pt', tmp_path, '--to=sharded')
    (tmp_path / 'ckpt_dcp' / 'step_20').mkdir()  # never finished
    (tmp_path / 'ckpt_dcp' / 'step_20' / 'state.json').write_text('{}')

    def newest(name, incomplete):
        export(tmp_path, tmp_path / name, '--to=full', notes=incomplete)
        return load(tmp_path / name)['iter_num']
    assert newest('a.pt', 1) == 10
    (tmp_path / 'ckpt_dcp' / 'step_10' / '.metadata').unlink()
    assert newest('b.pt', 2) == 8


def test_errors_are_one_line_and_write_nothing(tmp_path):
    _, ckpt = trained()
    src, dst = tmp_path / 'src.pt', tmp_path / 'dst'
    torch.save(ckpt, src)
    for args in ([], [src, dst], [src, dst, '--to=gguf'],
                 [src, '--to=hf'], [src, dst, dst, '--to=hf'], [src, dst, '--x=hf'], [src, '', '--to=full']):
        assert '--to=full|sharded|hf' in export(*args, rc=2)
    assert export(tmp_path / 'nowhere', dst, '--to=hf', rc=1).count('nowhere') == 1
    assert 'no ckpt.pt' in export(tmp_path, dst, '--to=hf', rc=1)

    def refused(changed, word):
        torch.save(changed, tmp_path / 'bad.pt')
        assert word in export(tmp_path / 'bad.pt', dst, '--to=hf', rc=1)
    refused({'weights': 1}, 'not a checkpoint')
    refused([1], 'not a checkpoint')
    refused({**ckpt, 'model_args': {**ARGS, 'n_embd': 64}}, 'another shape')
    refused({**ckpt, 'model_args': {**ARGS, 'n_head': 5}}, 'n_head')
    refused({**ckpt, 'model': {k: v for k, v in ckpt['model'].items() if 'ln_f' not in k}}, 'transformer.ln_f.bias')
    refused({**ckpt, 'model': {**ckpt['model'], 'lm_head.weight': torch.ones(64, 32)}}, 'lm_head.weight')
    for content in (b'', b'a text', src.read_bytes()[:5000], src.read_bytes()[:-1]):
        (tmp_path / 'bad.pt').write_bytes(content)
        line = export(tmp_path / 'bad.pt', dst, '--to=hf', rc=1)
        assert line == f'export.py: {tmp_path / "bad.pt"}: torn, or not a checkpoint\n'
    for to in ('full', 'sharded', 'hf'):
        with full_disk(10000):
            line = export(src, dst / 'deeper', f'--to={to}', rc=1)
        assert line.startswith(f'export.py: {dst / "deeper"}') and 'cannot be written: ' in line, line
        where = src / 'x'  # below a file
        line = export(src, where, f'--to={to}', rc=1)
        assert line.startswith(f'export.py: {where}') and 'is no folder: mend that, or choose another DST' in line
    assert sorted(os.listdir(tmp_path)) == ['bad.pt', 'src.pt']

    export(src, dst, '--to=sharded')
    export(src, tmp_path / 'hf', '--to=hf', notes=1)
    before = files(tmp_path)
    for to, where in (('sharded', dst), ('hf', tmp_path / 'hf'), ('full', src)):
        assert 'exists' in export(src, where, f'--to={to}', rc=1)
    assert files(tmp_path) == before
    folder = dst / 'ckpt_dcp' / 'step_7'
    (folder / '__0_0.distcp').write_bytes((folder / '__0_0.distcp').read_bytes()[:2000])
    assert '__0_0.distcp' in export(folder, tmp_path / 'x.pt', '--to=full', rc=1)
    (folder / 'state.json').write_text('{"iter_num": ')
    assert 'state.json: missing or torn (Expecting value' in export(folder, tmp_path / 'x.pt', '--to=full', rc=1)
    (folder / 'state.json').unlink()
    assert export(folder, tmp_path / 'x.pt', '--to=full', rc=1).count('state.json') == 1
    assert not (tmp_path / 'x.pt').exists()
