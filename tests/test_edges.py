"""Bad surroundings: closed and full streams, signals, broken packages, pipes in place of files, odd names."""
import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ENV, ROOT

import checkpoint
import configurator
from data import bins, corpus, labelled, reading
from scripts import bench, common, data_value, export, leave_one_out, load_grads, retrain, value_kinds
from scripts.common import must_be_writable
from weights import newest_that_loads, read_full, read_json, read_metadata


def shell(line, cwd, code=0):
    """A line of bash, in which python is this one and root the repository; returns what it did."""
    done = subprocess.run(['bash', '-o', 'pipefail', '-c', line], cwd=cwd, capture_output=True, text=True,
                          env={**ENV, 'python': sys.executable, 'root': ROOT}, timeout=60)
    assert done.returncode == code and 'Traceback' not in done.stderr, done
    return done


@pytest.mark.parametrize('streams', ['<&- >&- 2>&-', '2>&-', '>/dev/full 2>/dev/full', '2>&1 | true'])
def test_prepare_needs_no_streams(tmp_path, streams):
    """Its lines are no results: a reader that has gone does not end hours of work."""
    (tmp_path / 'text.txt').write_text('to be or not to be\n' * 2000)
    shell('$python "$root"/data/local/prepare.py --input text.txt --out_dir there --tokenizer=byte --chunk_mb=0.001 '
          f'--workers=1 {streams}', tmp_path)
    assert bins.load_meta(tmp_path / 'there')['splits']['train']['tokens'] > 0
    assert sorted(os.listdir(tmp_path / 'there')) == ['meta.json', 'train.bin', 'val.bin']


def test_shakespeare_and_labelled_rows_need_no_streams(tmp_path):
    (tmp_path / 'text.txt').write_text('to be or not to be\n' * 20)
    (tmp_path / 'rows.csv').write_text(''.join(f'{i % 4 + 1},a title,text {i}\n' for i in range(80)))
    shell('$python "$root"/data/shakespeare_char/prepare.py --input text.txt --out_dir there | true', tmp_path)
    assert (tmp_path / 'there' / 'val.bin').exists()
    shell('$python "$root"/data/ag_news/prepare.py --input rows.csv rows.csv --out_dir news >/dev/full', tmp_path)
    assert (tmp_path / 'news' / 'test.csv').exists()


COMMAND = '''
import os, signal, sys, tempfile
sys.path[0] = sys.argv[1]
from scripts.common import printing
signal.signal(signal.SIGHUP, signal.SIG_DFL)        # nohup, or a shell's &, has them ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
with printing(), tempfile.TemporaryDirectory(dir='.') as folder:
    print('a result')
    if len(sys.argv) > 2:
        os.kill(os.getpid(), int(sys.argv[2]))
'''


@pytest.mark.parametrize('ending, code, told', [
    (' 15', 143, ''), (' 1', 129, ''), (' 2', -2, 'command.py: stopped\n'),
    (' >/dev/full', 1, 'command.py: standard output: No space left on device\n'), (' | true', 1, '')])
def test_a_command_that_is_stopped_takes_its_temporary_folder_along(tmp_path, ending, code, told):
    (tmp_path / 'command.py').write_text(COMMAND)
    assert shell(f'$python command.py "$root"{ending}', tmp_path, code).stderr == told
    assert os.listdir(tmp_path) == ['command.py']


def test_workers_end_with_a_command_that_is_stopped(tmp_path, monkeypatch):
    (tmp_path / 'lasting.py').write_text('import time\ndef do(*task): time.sleep(task[2])\n')
    monkeypatch.syspath_prepend(tmp_path)
    import lasting
    monkeypatch.setattr(retrain, 'do', lasting.do)
    results = retrain.finished('', [('half', 0), ('half', 600)], None, None, jobs=2)
    assert next(results)[0] == ('half', 0)
    workers = multiprocessing.active_children()
    results.close()
    for worker in workers:      # the pool's thread waits for them too: who comes second is not told how they ended
        worker.join(20)
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)


def test_closed_streams_are_held(tmp_path):
    """Else a checkpoint could be file 2, into which libraries print."""
    shell('$python -c "import sys; sys.path.insert(0, sys.argv[1]); import configurator; print(0, '
          'file=open(\'number\', \'w\')); assert open(\'a\', \'w\').fileno() > 2" "$root" <&- >&- 2>&-', tmp_path)


@pytest.mark.parametrize('error, line', [
    (KeyboardInterrupt(), 'stopped'), (MemoryError('8 GB'), 'out of memory: 8 GB'),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nat::empty"), 'out of memory: Default'),
    (FileNotFoundError(2, 'No such file or directory'), 'the working directory has been deleted: cd to another')])
def test_one_line_in_place_of_a_traceback(capsys, monkeypatch, error, line):
    monkeypatch.setattr(sys, 'argv', ['x/y.py'])
    for report in configurator.report_error, checkpoint.excepthook('out'):
        report(type(error), error, None)
        told = capsys.readouterr().err
        assert told.startswith('y.py: ') and told.count('\n') == 1 and line.partition(':')[0] in told


def test_ctrl_c_while_torch_is_imported(tmp_path):
    """A second at the start of each command."""
    (tmp_path / 'torch.py').write_text('raise KeyboardInterrupt')
    for name in ('bench', 'classify', 'export', 'leave_one_out', 'load_grads', 'retrain', 'sample', 'train_parallel',
                 'value_kinds'):
        done = subprocess.run([sys.executable, f'{ROOT}/scripts/{name}.py', '--help'], capture_output=True, text=True,
                              env={**ENV, 'PYTHONPATH': str(tmp_path)})
        assert (done.returncode, done.stderr) == (-2, f'{name}.py: stopped\n'), done


def test_a_broken_package_is_told_as_such(tmp_path, monkeypatch, capsys):
    (tmp_path / 'broken_package.py').write_text('raise ValueError("numpy.dtype size changed")')
    monkeypatch.syspath_prepend(tmp_path)
    for name, told in (('broken_package', 'does not load: ValueError: numpy.dtype size changed\n'),
                       ('absent_package', 'pip install absent_package\n')):
        with pytest.raises(SystemExit):
            reading.need(name, 'this')
        assert capsys.readouterr().err.endswith(told)


def test_a_pipe_is_not_waited_for(tmp_path):
    for name in ('meta.json', 'train.bin', 'train.csv', 'ckpt.pt', '.metadata', 'grad_dotprods/valset.safetensors',
                 'grad_dotprods/iter_000001.safetensors'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    for read in (lambda: bins.load_meta(tmp_path), lambda: bins.find_bin(tmp_path, 'train'),
                 lambda: labelled.read_labelled(tmp_path / 'train.csv'), lambda: read_json(tmp_path / 'meta.json'),
                 lambda: read_full(tmp_path / 'ckpt.pt'), lambda: read_metadata(tmp_path),
                 lambda: labelled.read_texts(tmp_path / 'train.csv'), lambda: retrain.known_windows(tmp_path),
                 lambda: newest_that_loads(tmp_path), lambda: export.export(str(tmp_path), f'{tmp_path}/new', 'full'),
                 lambda: data_value.read_ghost(tmp_path), lambda: load_grads.open_sampled(tmp_path / 'train.csv')):
        with pytest.raises(ValueError, match='a pipe or a device, not a file') as error:
            read()
        assert 'Errno' not in str(error.value)
    with pytest.raises(SystemExit):
        must_be_writable(tmp_path / 'ckpt.pt')      # nor replaced by a file
    os.remove(tmp_path / 'ckpt.pt')     # nor is anything else in its place passed over
    for name in ('ckpt.pt', 'ckpt_dcp'):
        (tmp_path / name).symlink_to('nowhere')
        with pytest.raises(ValueError, match=f'{name}: a link that leads nowhere'):
            newest_that_loads(tmp_path)
        if name == 'ckpt_dcp':
            with pytest.raises(ValueError, match='ckpt_dcp: a run writes a folder of this name'):
                checkpoint.check_out_dir(str(tmp_path), ['grad_dotprods'])
        os.remove(tmp_path / name)
    (tmp_path / 'log.jsonl').symlink_to('nowhere/log.jsonl')
    with pytest.raises(ValueError, match='log.jsonl: a run writes a file of this name'):
        checkpoint.check_out_dir(str(tmp_path), ['grad_dotprods'])
    os.remove(tmp_path / 'log.jsonl')
    (tmp_path / 'ckpt.pt').mkdir()
    with pytest.raises(ValueError, match='a folder, not a file'):
        newest_that_loads(tmp_path)


def test_names_that_torch_cannot_open(tmp_path):
    folder = str(tmp_path / os.fsdecode(b'\xff'))
    with pytest.raises(ValueError, match='name a folder in UTF-8'):
        checkpoint.check_out_dir(folder, [])
    assert not os.path.exists(folder)
    with pytest.raises(ValueError, match='only open names in UTF-8'):
        read_full(f'{folder}/ckpt.pt')
    long = str(tmp_path / ('x' * 300))
    assert newest_that_loads(long) == (None, {}, {})
    with pytest.raises(ValueError, match='out_dir=.*: File name too long'):
        checkpoint.check_out_dir(long, [])
    with pytest.raises(ValueError, match='File name too long'):
        checkpoint.check_out_dir(str(tmp_path / ('deep/' * 1000)), [])
    assert not os.listdir(tmp_path)


def test_folders_that_can_not_be_made(tmp_path, capsys):
    """Nothing is left of them, and a link that leads nowhere is told as such."""
    os.symlink('/nowhere/x', tmp_path / 'link')
    (tmp_path / 'file').touch()
    bad = {'link': 'link is a link that leads nowhere', 'link/sub': 'link is a link that leads nowhere',
           'file/sub': 'file is no folder', f'new/{"x" * 300}': 'File name too long', 'a/' * 2500: 'File name too long'}
    for name, line in bad.items():
        for make in (lambda path: checkpoint.check_out_dir(str(path), []), common.make_out_folder, corpus.hold_folder,
                     lambda path: labelled.write_labelled(path, ['label'], {s: [['a']] for s in labelled.SPLITS}, 0)):
            with pytest.raises((SystemExit, ValueError, OSError)) as error:
                make(tmp_path / name)
            assert line in capsys.readouterr().err + str(getattr(error.value, 'strerror', error.value))
            assert sorted(os.listdir(tmp_path)) == ['file', 'link']


def test_what_a_link_leads_to_is_written(tmp_path, monkeypatch, capsys):
    links = {'to_a_file': 'file', 'to_a_new_one': 'new', 'to_no_folder': 'no/x', 'around': 'and_around',
             'and_around': 'around'}
    for name, to in links.items():
        (tmp_path / name).symlink_to(to)
    (tmp_path / 'file').write_text('before')
    for name, to in (('to_a_file', 'file'), ('to_a_new_one', 'new')):
        must_be_writable(tmp_path / name)
        common.write_result(tmp_path / name, b'after')
        assert (tmp_path / to).read_bytes() == b'after'
    for name, what in (('to_no_folder', 'No such file or directory; it is a link to no/x'), ('around', 'symbolic')):
        monkeypatch.setattr(sys, 'argv', ['bench.py', f'--json={tmp_path / name}'])
        for write in (bench.parse, lambda: must_be_writable(tmp_path / name)):
            with pytest.raises(SystemExit):
                write()
            told = capsys.readouterr().err
            assert f'{name}: cannot be written: ' in told and what in told and told.count('\n') == 1
        with pytest.raises(ValueError, match='cannot be written'):
            common.write_result(tmp_path / name, b'')
    assert all(os.readlink(tmp_path / name) == to for name, to in links.items())
    assert sorted(os.listdir(tmp_path)) == sorted([*links, 'file', 'new'])
    with open(tmp_path / 'file', 'ab') as opened:       # as `> file` does it, and then --out=/dev/stdout
        (tmp_path / 'opened').symlink_to(f'/dev/fd/{opened.fileno()}')
        for name in (tmp_path / 'opened', f'/dev/fd/{opened.fileno()}', f'/proc/self/fd/{opened.fileno()}'):
            with pytest.raises(SystemExit):
                must_be_writable(name)
            assert 'an open file of a process; name a file' in capsys.readouterr().err
    assert (tmp_path / 'file').read_bytes() == b'after'


def test_two_commands_may_write_one_file_at_once(tmp_path, monkeypatch):
    """Each writes its own temporary file, so the file is whole and of one of them, and neither ends in an error."""
    path = tmp_path / 'x.csv'

    def meanwhile(file):
        file.write(b'one, ')
        with monkeypatch.context() as other:
            other.setattr(os, 'getpid', lambda: 2)
            must_be_writable(path)
            common.write_result(path, b'two')
        assert path.read_bytes() == b'two'
        file.write(b'whole')
    common.write_result(path, meanwhile)
    assert path.read_bytes() == b'one, whole' and os.listdir(tmp_path) == ['x.csv']


def test_a_link_that_leads_nowhere_is_not_taken_for_nothing(tmp_path, capsys):
    for name in ('log.jsonl', 'train.bin', 'val.bin', 'ckpt.pt', 'sharded'):
        (tmp_path / name).symlink_to('nowhere')
    assert retrain.json_lines(tmp_path / 'absent.jsonl') == []
    for read in (lambda: retrain.json_lines(tmp_path / 'log.jsonl'), lambda: load_grads.find_dump(tmp_path)):
        with pytest.raises(ValueError, match='(log.jsonl|sharded): .*: mend that, or move it away'):
            read()
    (tmp_path / '.metadata').symlink_to('nowhere')
    with pytest.raises(ValueError, match='has no .metadata'):
        load_grads.get_checkpoint_metadata(tmp_path)
    of_bench = bench.make_data(SimpleNamespace(data=False), {'dataset': str(tmp_path)}, '/random')
    assert of_bench == str(tmp_path)        # train.py says what is wrong with it
    assert data_value.read_metas(tmp_path, tmp_path) == [{}, {}]
    assert 'ckpt.pt: a link that leads nowhere' in capsys.readouterr().err


def test_a_file_in_the_place_of_retrains_folder(tmp_path):
    (tmp_path / 'retrain').touch()
    with pytest.raises(ValueError, match='retrain is no folder: mend that, or move what is there away'):
        retrain.do_all(tmp_path, [], {}, 0, None, None, 1)
    assert os.listdir(tmp_path) == ['retrain']


@pytest.mark.parametrize('main, args, line', [
    (leave_one_out.main, ['run', '--horizon=1000000000'], '--horizon=1000000000: expected numbers of steps'),
    (retrain.main, ['run', '--jobs=1000000'], '--jobs=1000000: must be at most 1024'),
    (value_kinds.main, ['--dataset=DATA', '--size=tiny', '--steps=2', '--visits=1', '--halves=2000000000'], 'GiB'),
    (value_kinds.main, ['--dataset=DATA', '--size=tiny', '--steps=2', '--visits=1', '--seeds=2000000000'], 'GiB'),
    (lambda: common.must_have_memory(2**60, '--windows=9'), [], '--windows=9 needs 1,073,741,824 GiB of memory, and'),
    (bench.parse, ['--nproc=10000000'], '--nproc=10000000: must be at most 1024')])
def test_numbers_that_no_machine_can_hold(tiny, monkeypatch, capsys, main, args, line):
    monkeypatch.setattr(sys, 'argv', ['script.py', *(arg.replace('DATA', str(tiny)) for arg in args)])
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr().err
    assert line in told and told.count('\n') == 1


def test_standard_input_that_is_closed(monkeypatch):
    monkeypatch.setattr(sys, 'stdin', None)
    with pytest.raises(ValueError, match='standard input is closed'):
        labelled.read_texts('-')
