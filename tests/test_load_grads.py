"""scripts/load_grads.py against dumps made here: by FSDP2 on 2 gloo processes, by a plain process, and sampled ones."""
import contextlib
import io
import os
import pickle
import runpy
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import ROOT, full_disk
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard

SCRIPTS = os.path.join(ROOT, 'scripts')
sys.path.insert(0, ROOT)
from scripts.load_grads import find_steps, get_checkpoint_metadata, load_keys, load_pairs  # noqa: E402

NAMES = ['transformer.wte.weight', 'transformer.h.0.attn.weight', 'transformer.h.0.attn.bias',
         'transformer.h.1.attn.weight', 'transformer.h.1.attn.bias']


def toy_model():
    """Named like the trainer's; the embedding's 7 rows do not divide by 2."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    blocks = [torch.nn.ModuleDict({'attn': torch.nn.Linear(4, 4)}) for _ in range(2)]
    model.transformer = torch.nn.ModuleDict({'wte': torch.nn.Embedding(7, 4), 'h': torch.nn.ModuleList(blocks)})

    def forward(ids):
        x = model.transformer.wte(ids)
        for block in model.transformer.h:
            x = torch.tanh(block.attn(x))
        return x.square().sum()
    model.forward = forward
    return model


def gradients(step):
    """The whole gradients of a step, by plain autograd: rows 0..3 of the ids are rank 0's, the others rank 1's."""
    model, ids = toy_model(), torch.randint(0, 7, (8,), generator=torch.Generator().manual_seed(step))
    (model(ids) / 2).backward()  # FSDP averages over 2 ranks
    return {name: p.grad for name, p in model.named_parameters()}


def fsdp_rank(rank, port, folder):
    dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank, world_size=2)
    for step in (2, 10):
        model = toy_model()
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh('cpu', (2,)))
        ids = torch.randint(0, 7, (8,), generator=torch.Generator().manual_seed(step))
        model(ids[4 * rank:4 * rank + 4]).backward()
        dcp.save({name: p.grad for name, p in model.named_parameters()}, checkpoint_id=f'{folder}/step{step}/sharded')
    dist.barrier()
    dist.destroy_process_group()


RANK = f'''
import os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_load_grads import fsdp_rank
fsdp_rank(int(os.environ['RANK']), os.environ['MASTER_PORT'], sys.argv[1])
'''


@pytest.fixture(scope='module')
def made(fork, tmp_path_factory):
    """A run with two sharded steps of 2 ranks, and one with the same steps sampled; made once, not to be changed."""
    out = tmp_path_factory.mktemp('dumps')
    (out / 'rank.py').write_text(RANK)
    folder = out / 'run' / 'gradient_dumper'
    fork(out, folder, script=str(out / 'rank.py'), tiny_args=False, nproc=2, warn=False)
    for step in (2, 10):
        folder = out / 'few' / 'gradient_dumper' / f'step{step}' / 'sampled'
        folder.mkdir(parents=True)
        for name, gradient in gradients(step).items():
            rows = gradient[:5].clone()  # n is capped at the rows there are
            save_file({'gradient': rows}, folder / f'{name}_first{len(rows)}.safetensors')
    (out / 'run' / 'gradient_dumper' / 'step30.tmp').mkdir()  # a dump that a kill has left: not a step
    return out


@pytest.fixture
def copy(made, tmp_path):
    shutil.copytree(made, tmp_path / 'copy')
    return tmp_path / 'copy'


def step(out, number, kind='run'):
    return out / kind / 'gradient_dumper' / f'step{number}'


def command(*args, rc=0):
    """stdout of the command, or its one line on stderr; in this process, since importing torch takes seconds."""
    argv, path, out, err, code = sys.argv, sys.path[:], io.StringIO(), io.StringIO(), 0
    sys.argv = ['load_grads.py', *map(str, args)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter('error')
            warnings.filterwarnings('ignore', 'torch.distributed is disabled')      # as checkpoint.py, imported before
            runpy.run_path(os.path.join(SCRIPTS, 'load_grads.py'), run_name='__main__')
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv, sys.path[:] = argv, path
    out, err = out.getvalue(), err.getvalue()
    assert code == rc and not (rc and out), out + err
    assert err.count('\n') == (rc > 0) and err.startswith('load_grads.py: ' if rc else ''), err
    return err if rc else out


def test_as_a_user_runs_it(fork, made):
    """And by the fork server, whose stdout is a file's or a pipe's: a reader may have gone."""
    script = os.path.join(SCRIPTS, 'load_grads.py')
    done = subprocess.run([sys.executable, '-W', 'error', script, 'norms', step(made, 2)],
                          cwd=made, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == '' and done.stdout == command('norms', step(made, 2))
    done = fork(made, 'norms', 'nowhere', script=script, tiny_args=False, rc=1)
    assert done.err.startswith('load_grads.py: nowhere: no gradient dump')
    assert done.err.count('\n') == 1 and done.out == ''
    gone = 'r, w = os.pipe(); os.close(r); os.dup2(w, 1)'
    done = fork(made, 'list', step(made, 2), script=script, tiny_args=False, rc=1, before=gone)
    assert (done.codes, done.err) == ([1], '')


def test_sharded_dump_of_two_ranks(made):
    assert sorted(os.listdir(step(made, 2) / 'sharded')) == ['.metadata', '__0_0.distcp', '__1_0.distcp']
    for number in (2, 10):
        meta, want = get_checkpoint_metadata(step(made, number)).state_dict_metadata, gradients(number)
        assert set(meta) == set(want) == set(NAMES)
        got = dict(load_pairs(step(made, number) / 'sharded'))
        for name in NAMES:
            assert meta[name].size == want[name].shape and meta[name].properties.dtype == torch.float32
            torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-6)
    assert list(find_steps(made / 'run')) == [2, 10] == list(find_steps(made / 'run' / 'gradient_dumper'))


def test_load_keys_is_lazy_and_keeps_the_order(made, copy):
    wte = next(load_keys(str(step(copy, 2)), [NAMES[0]]))       # as OLMo-core's load_keys is used
    order = [NAMES[3], NAMES[0], NAMES[3]]
    got, want = list(zip(order, load_keys(step(copy, 2), iter(order)))), dict(load_pairs(step(copy, 2)))
    assert torch.equal(wte, want[NAMES[0]]) and [name for name, _ in got] == order
    assert all(torch.equal(gradient, want[name]) for name, gradient in got)
    pairs = load_pairs(str(step(copy, 2)), [NAMES[3], NAMES[0]])
    name, gradient = next(pairs)
    assert name == NAMES[3] and gradient.shape == (4, 4)
    for file in (step(copy, 2) / 'sharded').glob('*.distcp'):
        file.unlink()
    with pytest.raises(ValueError, match='missing or torn'):
        next(pairs)


@pytest.mark.filterwarnings('ignore:torch.distributed is disabled')
def test_plain_dump_reads_as_dcp_reads_it(tmp_path):
    want = {'a': torch.randn(3, 5), 'b': torch.randn(2).bfloat16(), 'c': torch.tensor(3.0)}
    dcp.save(want, checkpoint_id=tmp_path / 'd', no_dist=True)
    again = {name: torch.empty_like(t) for name, t in want.items()}
    dcp.load(again, checkpoint_id=tmp_path / 'd', no_dist=True)
    got = dict(load_pairs(tmp_path / 'd'))
    assert all(torch.equal(got[n], again[n]) and got[n].dtype == want[n].dtype for n in want)


def test_sampled_dump(made):
    meta, want = get_checkpoint_metadata(step(made, 2, 'few')).state_dict_metadata, gradients(2)
    assert set(meta) == set(want) and meta[NAMES[0]].size == (5, 4) and meta[NAMES[0]].properties.dtype == torch.float32
    got = dict(load_pairs(step(made, 2, 'few') / 'sampled'))
    assert all(torch.equal(got[name], want[name][:5]) for name in NAMES)
    assert [name for name, _ in load_pairs(step(made, 2, 'few'), NAMES[1:2])] == NAMES[1:2]


def test_folders_of_other_revisions(made, copy):
    for kind, ours, theirs in (('run', 'sharded', 'full_gradients'), ('few', 'sampled', 'sampled_gradients')):
        want = command('norms', step(made, 2, kind))
        os.rename(step(copy, 2, kind) / ours, step(copy, 2, kind) / theirs)
        assert command('norms', step(copy, 2, kind)) == command('norms', step(copy, 2, kind) / theirs) == want
    for file in (step(copy, 2, 'few') / 'sampled_gradients').iterdir():     # the oldest: right in grad_dumper/stepN
        os.rename(file, step(copy, 2, 'few') / file.name)
    os.rename(copy / 'few' / 'gradient_dumper', copy / 'few' / 'grad_dumper')
    assert list(find_steps(copy / 'few')) == [2, 10]
    assert command('norms', copy / 'few' / 'grad_dumper' / 'step2') == want


@pytest.mark.parametrize('kind', ['run', 'few'])
def test_list_and_norms(made, kind):
    rows = [line.split() for line in command('list', step(made, 2, kind)).splitlines()]
    assert {row[0] for row in rows[:-1]} == set(NAMES) and all(row[-1] == 'float32' for row in rows[:-1])
    assert f'{"7" if kind == "run" else "5"}, 4)' in command('list', step(made, 2, kind))
    want = {name: g[:5 if kind == 'few' else 7].norm().item() for name, g in gradients(2).items()}
    rows = [line.split() for line in command('norms', step(made, 2, kind)).splitlines()]
    assert [name for _, name in rows] == sorted(want, key=lambda n: -want[n]) + ['all']
    assert all(float(value) == pytest.approx(want[name], rel=1e-5) for value, name in rows[:-1])
    assert float(rows[-1][0]) == pytest.approx(sum(v * v for v in want.values()) ** .5, rel=1e-5)


def test_compare_and_follow(made):
    a, b = gradients(2), gradients(10)
    rows = [line.split() for line in command('compare', step(made, 2), step(made, 10)).splitlines()[1:]]
    assert {row[2] for row in rows} == set(NAMES)
    for cosine, ratio, name in rows:
        want = torch.nn.functional.cosine_similarity(a[name].flatten(), b[name].flatten(), dim=0).item()
        assert float(cosine) == pytest.approx(want, abs=2e-5)
        assert float(ratio) == pytest.approx((b[name].norm() / a[name].norm()).item(), rel=1e-4)
    assert all(line.split()[:2] == ['+1.00000', '1'] for line in
               command('compare', step(made, 2), step(made, 2)).splitlines()[1:])
    lines = command('follow', made / 'run', NAMES[1], NAMES[2]).splitlines()
    assert lines[0] == NAMES[1] and lines[4] == NAMES[2] and len(lines) == 8
    assert lines[2].split() == ['2', f'{a[NAMES[1]].norm().item():.6e}']
    assert lines[3].split()[0] == '10' and lines[3].split()[2] == next(r[0] for r in rows if r[2] == NAMES[1])


def test_export(made, tmp_path):
    command('export', step(made, 10), tmp_path / 'all.safetensors')
    got, want = load_file(tmp_path / 'all.safetensors'), gradients(10)
    assert set(got) == set(NAMES)
    assert all(torch.allclose(got[name], want[name], rtol=1e-6, atol=1e-6) for name in NAMES)
    command('export', step(made, 10, 'few'), tmp_path / 'one.safetensors', NAMES[0])
    assert torch.equal(load_file(tmp_path / 'one.safetensors')[NAMES[0]], want[NAMES[0]][:5])
    assert sorted(os.listdir(tmp_path)) == ['all.safetensors', 'one.safetensors']
    before = (tmp_path / 'one.safetensors').read_bytes()
    assert 'one.safetensors: exists' in command('export', step(made, 10), tmp_path / 'one.safetensors', rc=2)
    for name in (f'{"x" * 300}.safetensors', 'no/x.safetensors', 'one.safetensors/x.safetensors'):
        assert f'{name}: cannot be written' in command('export', made / 'unread', tmp_path / name, rc=2)
    with full_disk(100):
        line = command('export', step(made, 10), tmp_path / 'x.safetensors', rc=1)
    assert f'{tmp_path / "x.safetensors"}: cannot be written: ' in line
    assert (tmp_path / 'one.safetensors').read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ['all.safetensors', 'one.safetensors']


def test_plot(made, tmp_path):
    pytest.importorskip('matplotlib')
    command('plot', made / 'run', tmp_path / 'p.svg')
    svg = (tmp_path / 'p.svg').read_text()
    assert all(f'<!-- {layer} -->' in svg for layer in ('wte', 'h.0', 'h.1'))
    assert 'must end in one of' in command('plot', made / 'run', tmp_path / 'p.doc', rc=2)
    assert 'no/p.png: cannot be written' in command('plot', made / 'run', tmp_path / 'no' / 'p.png', rc=2)
    with full_disk(100):
        assert 'p.png: cannot be written: ' in command('plot', made / 'run', tmp_path / 'p.png', rc=1)
    assert os.listdir(tmp_path) == ['p.svg']


def test_missing_metadata_and_torn_files(copy):
    folder = step(copy, 2) / 'sharded'
    whole = (folder / '__1_0.distcp').read_bytes()
    (folder / '__1_0.distcp').write_bytes(whole[:len(whole) // 2])
    line = command('norms', step(copy, 2), rc=1)
    assert '__1_0.distcp' in line and 'torn' in line and f'{len(whole) // 2} bytes' in line
    whole = (folder / '.metadata').read_bytes()
    (folder / '.metadata').write_bytes(whole[:len(whole) // 2])
    assert '.metadata' in command('list', step(copy, 2), rc=1)
    (folder / '.metadata').write_bytes(b'')
    assert '.metadata' in command('list', step(copy, 2), rc=1)
    (folder / '.metadata').unlink()
    assert 'no .metadata' in command('list', step(copy, 2), rc=1)
    assert 'no .metadata' in command('follow', copy / 'run', NAMES[0], rc=1)
    file = step(copy, 2, 'few') / 'sampled' / f'{NAMES[0]}_first5.safetensors'
    file.write_bytes(file.read_bytes()[:-4])
    assert file.name in command('list', step(copy, 2, 'few'), rc=1)


def test_metadata_cannot_run_code(copy, tmp_path):
    class Bomb:
        def __reduce__(self):
            return open, (str(tmp_path / 'ran'), 'w')
    (step(copy, 2) / 'sharded' / '.metadata').write_bytes(pickle.dumps(Bomb()))
    assert 'does not belong' in command('list', step(copy, 2), rc=1) and not (tmp_path / 'ran').exists()


def test_wrong_names_and_arguments(made, tmp_path):
    line = command('follow', made / 'run', NAMES[0], 'transformer.h.1.attn.wieght', rc=1)
    assert "'transformer.h.1.attn.wieght'" in line and 'nearest name: transformer.h.1.attn.weight' in line
    assert 'nearest name' in command('export', step(made, 2), tmp_path / 'x.safetensors', 'wte', rc=1)
    assert os.listdir(tmp_path) == []
    assert 'no gradient dump' in command('list', made, rc=1) and 'no stepN' in command('follow', tmp_path, 'x', rc=1)
    assert 'no gradient dump' in command('list', tmp_path / 'nowhere', rc=1)
    assert 'cannot be compared' in command('compare', step(made, 2), step(made, 2, 'few'), rc=1)
    for args in ([], ['lst'], ['list'], ['compare', made]):
        assert 'list, norms, compare, follow, export, plot' in command(*args, rc=2)
    assert 'follow RUN NAME' in command('--help')
