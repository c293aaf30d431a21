"""What users met: weights that are not finite, changed batch sizes, two runs in one folder, lost terminals."""
import contextlib
import json
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import pytest
import torch
from torch.distributed.checkpoint import metadata

from conftest import ENV, ROOT, TINY, TRAIN, ckpt_of, free_port, full_disk, log_of, tree, write_dataset
from modes_helper import read_dots
from checkpoint import log_record
from data.bins import load_meta
from weights import newest_that_loads, read_checkpoint, read_metadata, read_progress


def offsets_of(out):
    return read_dots(out)['offset']


@pytest.mark.parametrize('nproc', [None, 2])
@pytest.mark.parametrize('last', [False, True])
def test_weights_whose_evaluation_is_not_finite_are_not_saved(fork, tmp_path, nproc, last):
    out = tmp_path / 'out'
    fork(tmp_path, '--max_iters=10', nproc=nproc)
    good = (out / 'ckpt.pt').read_bytes(), (out / 'best.pt').read_bytes()
    spoil = ['--init_from=auto', f'--max_iters={11 if last else 20}', '--eval_interval=1', '--decay_lr=False',
             '--learning_rate=1e18', '--weight_decay=0']
    for _ in range(2):      # the second restart is no worse off than the first
        done = fork(tmp_path, *spoil, nproc=nproc, rc=None, warn=False)
        assert set(done.codes) == {1} and 'the evaluation is not finite' in done.out, done.out + done.err
        assert good == ((out / 'ckpt.pt').read_bytes(), (out / 'best.pt').read_bytes())
    done = fork(tmp_path, *spoil, '--on_nonfinite=skip', nproc=nproc, rc=None, warn=False)
    assert set(done.codes) == {1}       # at the end there is still nothing that could be saved
    assert good == ((out / 'ckpt.pt').read_bytes(), (out / 'best.pt').read_bytes())
    if not last:    # checkpoints between evaluations, and one because of a signal
        signalled = 'import torch, os; torch.nn.utils.clip_grad_norm_ = lambda *a: os.kill(os.getpid(), 15) or NORM'
        for args, before in ((['--checkpoint_interval=1'], ''), ([], signalled.replace('NORM', 'torch.ones(())'))):
            done = fork(tmp_path, *spoil, '--eval_interval=1000', *args, before=before, nproc=nproc, rc=None,
                        warn=False)
            assert set(done.codes) == {143 if before else 1} and 'the loss is not finite' in done.out, done.out
            assert good == ((out / 'ckpt.pt').read_bytes(), (out / 'best.pt').read_bytes())
    fork(tmp_path, '--init_from=auto', '--max_iters=12', nproc=nproc)
    assert ckpt_of(out)['iter_num'] == 12


def test_a_missing_dataset_is_told_before_the_ranks_connect(fork, tmp_path):
    unconnected = 'import torch.distributed as d; d.init_process_group = d.rendezvous = None'
    for args in (['--dataset=nowhere'], ['--use_ghost=True', '--ghost_val_dataset=nowhere']):
        assert 'no file nowhere' in fork(tmp_path, *args, nproc=2, before=unconnected, rc=2)


def test_every_group_has_the_timeout(fork, tmp_path):
    """Also those of the mesh, and the one that writes checkpoints in the background."""
    told = '''
import datetime, torch, torch.distributed as d
end = d.destroy_process_group
def destroy():
    for group in d.distributed_c10d._world.pg_map:
        print('TIMEOUT', group._get_backend(torch.device('cpu')).options._timeout, flush=True)
    end()
d.destroy_process_group = destroy
'''
    done = fork(tmp_path, '--use_fsdp=True', '--fsdp_replicate=2', '--checkpoint_format=sharded', '--max_iters=2',
                '--checkpoint_async=True', '--timeout_minutes=7', nproc=2, before=told, warn=False)
    lines = [line for line in done.out.splitlines() if 'TIMEOUT' in line]
    assert len(lines) >= 6 and set(lines) == {'TIMEOUT 0:07:00'}, lines


def test_tokens_are_counted_over_changed_batch_sizes(fork, tmp_path):
    fork(tmp_path, '--max_iters=10')                                            # 10 steps of 2 x 4 x 32 tokens
    fork(tmp_path, '--init_from=resume', '--batch_size=8', '--max_iters=12')    # 2 steps of twice as many
    done = fork(tmp_path, '--init_from=resume', '--batch_size=8', '--max_iters=13')
    steps, evals = log_of(tmp_path / 'out')
    assert [steps[i]['tokens'] for i in (9, 10, 11, 12)] == [2560, 3072, 3584, 4096]
    assert evals[10]['tokens'] == 2560 and evals[13]['tokens'] == 4096
    assert '13 steps see 4,096 tokens' in done.out and ckpt_of(tmp_path / 'out')['samples_seen'] == 4096 // 32


@pytest.mark.parametrize('sizes', [(4, 10), (5, 2, 4)])
def test_each_window_once_per_epoch_over_changed_batch_sizes(fork, tmp_path, sizes):
    """100 windows; in every part of the run another batch size, together one epoch and a half."""
    data = write_dataset(tmp_path / 'data', 'the quick brown fox jumps over the lazy dog' * 100)
    tokens = os.path.getsize(data / 'train.bin') // 2
    block = (tokens - 1) // 100
    windows = (tokens - 1) // block
    step = 0
    for i, size in enumerate(sizes):
        step += (windows * 3 // 2 // len(sizes)) // size
        fork(tmp_path, f'--dataset={data}', f'--block_size={block}', '--data_order=epoch', '--use_ghost=True',
             f'--batch_size={size}', '--gradient_accumulation_steps=1', f'--max_iters={step}', f'--out_dir=out{i}',
             '--ghost_save_interval=1000', '--init_from=auto', '--eval_iters=1')
        if i + 1 < len(sizes):
            shutil.copytree(tmp_path / f'out{i}', tmp_path / f'out{i + 1}')
            shutil.rmtree(tmp_path / f'out{i + 1}' / 'grad_dotprods')
    order = torch.cat([offsets_of(tmp_path / f'out{i}').flatten() for i in range(len(sizes))]) // block
    assert len(order) > windows
    assert len(set(order[:windows].tolist())) == windows                        # the first epoch has each once
    assert len(set(order[windows:].tolist())) == len(order) - windows           # and the second begins anew


@pytest.fixture
def start_train():
    """start_train(cwd, *args): a process of train.py that runs beside the test, and not beyond its end."""
    runs = []

    def start(cwd, *args, stdout=subprocess.PIPE, env={}, **kw):
        runs.append(subprocess.Popen([sys.executable, TRAIN, *TINY, *map(str, args)], cwd=cwd, env={**ENV, **env},
                                     stdout=stdout, stderr=subprocess.PIPE, text=True, **kw))
        return runs[-1]
    yield start
    for run in runs:
        run.kill()
        with run:       # closes its pipes, and waits
            pass


def wait_for(path, seconds=60):
    deadline = time.monotonic() + seconds
    while not (path.is_file() and path.stat().st_size):
        assert time.monotonic() < deadline, f'{path} has not come'
        time.sleep(0.05)


def test_two_runs_in_one_folder(start_train, fork, tiny, tmp_path):
    first = start_train(tmp_path, f'--dataset={tiny}', '--max_iters=100000', '--eval_interval=100000',
                        stdout=subprocess.DEVNULL)       # a full pipe would hold it up
    wait_for(tmp_path / 'out' / 'log.jsonl')
    for args in (['--overwrite=True'], ['--init_from=auto']):
        line = fork(tmp_path, *args, rc=None, warn=False)
        assert line.codes == [2] and f'process {first.pid} on ' in line.err, line.err
    assert first.poll() is None and (tmp_path / 'out' / 'log.jsonl').is_file()
    first.kill()
    first.wait()
    fork(tmp_path, '--overwrite=True', '--max_iters=1')      # a killed run's lock is gone with it


@pytest.mark.parametrize('number', [signal.SIGHUP, signal.SIGTERM])
def test_a_lost_terminal_saves(start_train, tiny, tmp_path, number):
    run = start_train(tmp_path, f'--dataset={tiny}', '--max_iters=100000', '--eval_interval=100000',
                      stdout=subprocess.DEVNULL,
                      preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))     # under nohup one is ignored
    wait_for(tmp_path / 'out' / 'log.jsonl')
    run.send_signal(number)
    assert run.wait(60) == 128 + number, run.stderr.read()
    steps, _ = log_of(tmp_path / 'out')
    assert ckpt_of(tmp_path / 'out')['iter_num'] == len(steps)


def test_nohup_is_respected(start_train, tiny, tmp_path):
    run = start_train(tmp_path, f'--dataset={tiny}', '--max_iters=300', '--eval_interval=100000',
                      preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for(tmp_path / 'out' / 'log.jsonl')
    run.send_signal(signal.SIGHUP)
    assert run.wait(60) == 0 and ckpt_of(tmp_path / 'out')['iter_num'] == 300


def test_a_closed_pipe_does_not_end_training(start_train, tiny, tmp_path):
    run = start_train(tmp_path, f'--dataset={tiny}', '--max_iters=20')
    run.stdout.readline()
    run.stdout.close()
    assert run.wait(60) == 0 and run.stderr.read() == ''
    assert ckpt_of(tmp_path / 'out')['iter_num'] == 20


def test_a_line_of_the_log(tmp_path, capsys):
    """JSON has no infinity; after half a line, which a full disk has left, comes a whole one; a warning if none can be
    written."""
    log = tmp_path / 'log.jsonl'
    assert log_record(log, dict(iter=1, loss=0.5, grad_norm=float('inf'))) == dict(iter=1, loss=0.5, grad_norm=None)
    log.write_text(log.read_text() + '{"iter": 2, "lo')
    log_record(log, dict(iter=3))
    assert log.read_text() == '{"iter": 1, "loss": 0.5, "grad_norm": null}\n{"iter": 2, "lo\n{"iter": 3}\n'
    log_record(tmp_path / 'no' / 'log.jsonl', dict(iter=1))
    assert capsys.readouterr().out.startswith('warning: ')


def test_names_that_the_terminal_can_not_write(start_train, tiny, tmp_path):
    """They are escaped: the run that it replaces is not lost to a traceback."""
    shutil.copytree(tiny, tmp_path / 'Gr\xf6\xdfe')
    for _ in range(2):
        run = start_train(tmp_path, '--dataset=Gr\xf6\xdfe', '--out_dir=\xfc', '--max_iters=1', '--overwrite=True',
                          env={**ENV, 'PYTHONIOENCODING': 'ascii:strict'})
        out, err = run.communicate(timeout=60)
        assert run.returncode == 0 and err == '' and '\\xf6' in out, out + err
    assert ckpt_of(tmp_path / '\xfc')['iter_num'] == 1


def test_a_signal_where_stderr_is_closed(tiny, tmp_path):
    """Its message must not go into a file that got the number 2, nor into stdout, where results are."""
    (tmp_path / 'run.py').write_text(f"""import os, runpy, signal, sys
sys.argv = [{TRAIN!r}, '--dataset={tiny}', *{TINY!r}, '--max_iters=10']
sys.path[0] = {ROOT!r}
import checkpoint
append, left = checkpoint.append_rows, [1]
def append_and_stop(*args):
    append(*args)
    if left:
        left.pop()
        os.kill(os.getpid(), signal.SIGTERM)
checkpoint.append_rows = append_and_stop
runpy.run_path({TRAIN!r}, run_name='__main__')""")
    done = subprocess.run(['bash', '-c', f'{shlex.quote(sys.executable)} run.py 2>&-'], cwd=tmp_path, env=ENV,
                          stdout=subprocess.PIPE, timeout=60)
    assert done.returncode == 143 and b'stopped by a signal' in done.stdout and b'the same signal' not in done.stdout
    files = [path for path in (tmp_path / 'out').rglob('*') if path.is_file()]
    assert (tmp_path / 'out' / 'ckpt.pt') in files
    assert not [path for path in files if b'the same signal' in path.read_bytes()]


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
def test_full_disks_of_others_do_not_end_training(start_train, tiny, tmp_path):
    """What is printed, and the log: training goes on, and says of the log which file it is."""
    with open('/dev/full', 'w') as full:
        run = start_train(tmp_path, f'--dataset={tiny}', '--max_iters=20', stdout=full)
        assert run.wait(60) == 0 and ckpt_of(tmp_path / 'out')['iter_num'] == 20
    (tmp_path / 'out2').mkdir()
    os.symlink('/dev/full', tmp_path / 'out2' / 'log.jsonl')
    run = start_train(tmp_path, f'--dataset={tiny}', '--max_iters=20', '--out_dir=out2', '--init_from=auto',
                      '--overwrite=False')
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0 and ckpt_of(tmp_path / 'out2')['iter_num'] == 20, out + err


@pytest.mark.parametrize('env', [{'RANK': '0'}, {'RANK': ''}, {'LOCAL_RANK': '1'}, {'WORLD_SIZE': '4'},
                                 {'RANK': '1', 'LOCAL_RANK': '1'}, {'RANK': 'x', 'WORLD_SIZE': '2', 'LOCAL_RANK': '0'}])
def test_leftover_ranks_in_the_environment_are_plain_training(fork, tmp_path, env):
    done = fork(tmp_path, '--max_iters=1', env=env)
    assert done.out.startswith('plain, 1 x cpu')
    assert 'batch_size' in fork(tmp_path, '--batch_size=0', env=env, rc=2)


def test_a_lone_rank_says_for_whom_it_waits(start_train, tiny, tmp_path):
    env, port = {'RANK': '0', 'LOCAL_RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1'}, free_port()
    run = start_train(tmp_path, f'--dataset={tiny}', env={**env, 'MASTER_PORT': port})
    line = run.stdout.readline()
    assert f'rank 0 waits at 127.0.0.1:{port} for all 2 ranks' in line, line


def test_a_full_disk_under_ddp_is_one_line(train, fork, tmp_path):
    for nproc, args in ((2, []), (2, ['--use_fsdp=True'])):
        with full_disk(300_000):
            done = train(tmp_path, '--max_iters=3', f'--out_dir=out{len(args)}', *args, nproc=nproc, rc=1)
        own = [line for line in done.err.splitlines() if line.startswith('train.py: ') or 'train.py: ' in line[:40]]
        assert len(own) == 1 and 'make room' in own[0], done.err
        assert done.err.count('Traceback (most recent') == 1, done.err      # torchrun's own


def test_weights_and_text_must_belong_together(fork, tmp_path):
    """nanoGPT's checkpoints do not hold their alphabet: its size tells."""
    small = write_dataset(tmp_path / 'small', 'abcdefg\n' * 1000)
    large = write_dataset(tmp_path / 'large', 'abcdefgh\n' * 1000)
    fork(tmp_path, f'--dataset={large}', '--max_iters=2')
    ckpt = ckpt_of(tmp_path / 'out')
    del ckpt['meta']
    torch.save(ckpt, tmp_path / 'out' / 'ckpt.pt')
    (tmp_path / 'out' / 'best.pt').unlink()
    line = fork(tmp_path, f'--dataset={small}', '--init_from=resume', '--max_iters=3', rc=2)
    assert '9 token ids' in line and 'has 8' in line and '--new_tokenizer=True' in line, line
    line = fork(tmp_path, f'--dataset={small}', '--init_from=out/ckpt.pt', '--out_dir=out2', rc=2)
    assert '--new_tokenizer=True' in line
    fork(tmp_path, f'--dataset={small}', '--init_from=out/ckpt.pt', '--out_dir=out2', '--new_tokenizer=True',
         '--max_iters=1')
    fork(tmp_path, f'--dataset={large}', '--init_from=resume', '--max_iters=3')


class Evil:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.fixture(scope='module')
def sharded(fork, tmp_path_factory):
    cwd = tmp_path_factory.mktemp('sharded')
    fork(cwd, '--checkpoint_format=sharded', '--max_iters=2', '--grad_dump=True', '--grad_dump_end_step=0')
    return cwd / 'out'


def evil_pickles(path):
    """Pickles that write a file if loaded plainly, hidden in the fields of a checkpoint's metadata."""
    real = pickle.loads(path.read_bytes())
    for number in range(8):
        found, mark = pickle.loads(path.read_bytes()), path.parent.parent / f'executed{number}'
        command = f'touch {shlex.quote(str(mark))}'
        evil = Evil(os.system, command)
        name = next(iter(real.state_dict_metadata))
        if number == 0:
            yield pickle.dumps(evil)
        elif number == 1:       # a global whose module only looks like one that belongs there
            yield b'cpathlib\nos.system\n(S"%s"\ntR.' % os.fsencode(command)
        elif number == 2:
            text = os.fsencode(command)
            yield b'\x80\x04\x8c\x07pathlib\x8c\x09os.system\x93X%s%s\x85R.' % (len(text).to_bytes(4, 'little'), text)
        elif number == 3:
            found.planner_data = evil
        elif number == 4:
            found.storage_meta = evil
        elif number == 5:
            found.state_dict_metadata[name] = evil
        elif number == 6:
            found.storage_data[next(iter(found.storage_data))].relative_path = evil
        else:
            found.state_dict_metadata[name].properties.dtype = evil
        if number > 2:
            yield pickle.dumps(found)


@pytest.mark.parametrize('number', range(8))
def test_nothing_in_a_sharded_checkpoint_is_executed(fork, tmp_path, sharded, number):
    shutil.copytree(sharded, tmp_path / 'out')
    folder = tmp_path / 'out' / 'ckpt_dcp' / 'step_2'
    content = list(evil_pickles(folder / '.metadata'))[number]
    (folder / '.metadata').write_bytes(content)
    dump = tmp_path / 'out' / 'gradient_dumper' / 'step0' / 'sharded'
    (dump / '.metadata').write_bytes(content)
    fork(tmp_path, '--init_from=resume', '--max_iters=3', rc=2)
    fork(tmp_path, f'--init_from={folder}', '--out_dir=new', rc=2)
    scripts = (('export.py', folder, 'dst', '--to=full'), ('load_grads.py', 'norms', dump),
               ('sample.py', f'--out_dir={folder}'))
    for script, *args in scripts[number % 4:number % 4 + 1]:        # each in two of the eight
        done = subprocess.run([sys.executable, os.path.join(ROOT, 'scripts', script), *map(str, args)], cwd=tmp_path,
                              env=ENV, capture_output=True, text=True)
        assert done.returncode in (1, 2) and done.stderr.count('\n') == 1, done.stderr
    assert not list(tmp_path.rglob('executed*'))
    if number != 1:     # which a later version of the format alone would find
        with contextlib.suppress(Exception):
            pickle.loads(content)
        assert list(tmp_path.rglob('executed*'))        # what loading it plainly would have done


def test_bytes_in_a_sharded_checkpoint_are_not_unpickled(fork, tmp_path, sharded):
    """torch reads an entry that is no tensor by weights_only=False: ours is not handed to it."""
    shutil.copytree(sharded, tmp_path / 'out')
    folder = tmp_path / 'out' / 'ckpt_dcp' / 'step_2'
    found = pickle.loads((folder / '.metadata').read_bytes())
    index = next(i for i in found.storage_data if i.fqn == 'model.transformer.wte.weight')
    part = found.storage_data[index]
    with open(folder / 'evil.distcp', 'wb') as file:
        torch.save(Evil(os.system, f'touch {shlex.quote(str(tmp_path / "executed"))}'), file)
    part.relative_path, part.offset, part.length = 'evil.distcp', 0, os.path.getsize(folder / 'evil.distcp')
    for entry in (metadata.BytesStorageMetadata(), found.state_dict_metadata['model.transformer.wte.weight']):
        found.state_dict_metadata['model.transformer.wte.weight'] = entry
        found.storage_data = {**found.storage_data, index: part, metadata.MetadataIndex(index.fqn): part}
        (folder / '.metadata').write_bytes(pickle.dumps(found))
        done = fork(tmp_path, '--init_from=resume', '--max_iters=3', rc=None, warn=False)
        assert set(done.codes) == {2} and done.err.count('\n') == 1, done.err
        fork(tmp_path, f'--init_from={folder}', '--out_dir=new', rc=2)
    assert not (tmp_path / 'executed').exists()
    torch.load(folder / 'evil.distcp', weights_only=False)
    assert (tmp_path / 'executed').exists()


def test_sizes_that_no_memory_holds(train, tmp_path):
    done = train(tmp_path, '--n_embd=2097152', '--n_layer=1000', rc=1)
    assert done.err.count('\n') == 1 and 'out of memory' in done.err, done.err
    assert not (tmp_path / 'out').exists()


def test_the_record_of_a_bin_that_shrinks(fork, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / 'data')
    shrink = f'''
import numpy, os
real, calls = numpy.fromfile, [0]
def fromfile(*args, **kw):
    calls[0] += 1
    if calls[0] == 60:
        os.truncate({str(tmp_path / "data" / "train.bin")!r}, 10)
    return real(*args, **kw)
numpy.fromfile = fromfile
'''
    done = fork(tmp_path, f'--dataset={tmp_path / "data"}', before=shrink, rc=None, warn=False)
    assert done.codes == [2] and 'train.bin' in done.err and done.err.count('\n') == 1, done.err


def test_config_says_what_ran(fork, tmp_path):
    fork(tmp_path, '--max_iters=1')
    assert json.loads((tmp_path / 'out' / 'config.json').read_text())['max_iters'] == 1
    before = tree(tmp_path / 'out')
    fork(tmp_path, '--init_from=resume', '--eval_only=True')
    assert tree(tmp_path / 'out') == before


WRONG = {'iter_num': ('x', -1, True, 2**70, 1.5), 'samples_seen': (-1, 'x'), 'best_val_loss': (None, 'x'),
         'config': ([1], {'dataset': 5}, {'batch_size': 'x'}), 'scaler': ([1],), 'wandb_id': (3,), 'optimizer': ([1],),
         'meta': ([1], {'tokenizer': 7}, {'tokenizer': {'type': 'char', 'itos': [1]}}, {'vocab_size': 'x'}),
         'model_args': ('x', {'n_head': 0}, {'n_layer': '2'}, {'n_layer': 10**9}, {'n_embd': 63}, {'gelu': 'relu'})}


@pytest.mark.parametrize('field', WRONG)
def test_a_field_that_no_run_writes_is_refused_in_one_line(sharded, tmp_path, field):
    folder = sharded / 'ckpt_dcp' / 'step_2'
    ckpt, state = read_checkpoint(str(folder)), json.loads((folder / 'state.json').read_text())
    shutil.copytree(folder, tmp_path / 'step_2')
    for value in WRONG[field]:
        spoilt = [dict(ckpt), dict(state)]
        for holder in spoilt:
            if isinstance(value, dict) and value and field in holder:
                holder[field] = {**holder[field], **value}
            else:
                holder[field] = value
        torch.save(spoilt[0], tmp_path / 'spoilt.pt')
        with pytest.raises(ValueError, match=r'spoilt\.pt: [^\n]*$'):
            read_checkpoint(str(tmp_path / 'spoilt.pt'))
        if field != 'optimizer':        # is not in state.json
            (tmp_path / 'step_2' / 'state.json').write_text(json.dumps(spoilt[1]))
            with pytest.raises(ValueError, match=r'state\.json: [^\n]*$'):
                read_progress(tmp_path / 'step_2')


def test_a_field_that_is_missing_is_an_older_checkpoints(sharded, tmp_path):
    folder = shutil.copytree(sharded / 'ckpt_dcp' / 'step_2', tmp_path / 'ckpt_dcp' / 'step_2')
    state = json.loads((folder / 'state.json').read_text())
    (folder / 'state.json').write_text(json.dumps({name: state[name] for name in (
        'model_args', 'iter_num', 'param_groups')}))
    found = newest_that_loads(tmp_path)[1]
    assert found['config'] == found['scaler'] == {} and found['meta'] is None and found['iter_num'] == 2
    (folder / 'state.json').write_text(json.dumps({**state, 'config': None}))
    assert newest_that_loads(tmp_path)[1]['config'] == {}


def test_metadata_that_leaves_values_out_is_refused(sharded, tmp_path):
    """torch would leave them undefined."""
    shutil.copytree(sharded / 'ckpt_dcp' / 'step_2', tmp_path / 'step_2')
    path = tmp_path / 'step_2' / '.metadata'
    content = path.read_bytes()

    def no_parts(entry):
        entry.chunks = []

    def shifted(entry):
        entry.chunks[0].offsets = torch.Size([1, 0])

    def other_type(entry):
        entry.properties.dtype = None

    for change in (no_parts, shifted, other_type):
        found = pickle.loads(content)
        change(found.state_dict_metadata['model.transformer.wte.weight'])
        path.write_bytes(pickle.dumps(found))
        with pytest.raises(ValueError, match=r'\.metadata: torn[^\n]*$'):
            read_checkpoint(str(tmp_path / 'step_2'))


def test_a_folder_in_the_place_of_a_file(fork, tmp_path):
    (tmp_path / 'out' / 'config.json').mkdir(parents=True)
    assert 'config.json: a run writes a file of this name' in fork(tmp_path, rc=2)


DISPROPORTIONATE = {
    'memo': b'\x80\x02}r\xff\xff\xff\x7f.', 'text memo': b'(dp2147483647\n.',
    'frame': b'\x80\x04\x95' + (2**62).to_bytes(8, 'little') + b'}.',
    'bytes': b'\x80\x04\x8e' + (2**62).to_bytes(8, 'little') + b'}.', 'int': b'\x80\x02\x8b\xff\xff\xff\x7f.',
    'deep key': b'\x80\x02}N' + b'\x85' * 300000 + b'Ns.',      # its hash takes all the stack
    'one list many times': b'\x80\x02' + b''.join(b']q%c(' % (i + 1) + (b'h%c' % i if i else b'N') * 10 + b'e'
                                                  for i in range(30)) + b'.'}


@pytest.mark.parametrize('name', DISPROPORTIONATE)
def test_a_pickle_that_takes_more_than_its_length_lets_expect(tmp_path, name):
    """Gigabytes of memory, all of the stack, or years."""
    for file in ('meta.pkl', '.metadata'):
        (tmp_path / file).write_bytes(DISPROPORTIONATE[name])
    with zipfile.ZipFile(tmp_path / 'ckpt.pt', 'w') as archive:
        archive.writestr('ckpt/data.pkl', DISPROPORTIONATE[name])
        archive.writestr('ckpt/version', '3\n')
        archive.writestr('ckpt/byteorder', 'little')
    for read, path in ((load_meta, tmp_path), (read_metadata, tmp_path), (read_checkpoint, tmp_path / 'ckpt.pt')):
        with pytest.raises(ValueError, match=r'(meta\.pkl|\.metadata|ckpt\.pt)[^\n]+$'):
            read(path)
