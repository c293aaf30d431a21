"""Imports: our modules whatever else is installed under their names, and nobody's sys.path is touched."""
import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENV, ROOT

NAMES = ('data', 'scripts', 'model', 'muon', 'kernels', 'checkpoint', 'weights', 'configurator', 'common', 'bins',
         'corpus', 'tests', 'train', 'plot', 'sample', 'export', 'bench', 'profiles', 'labelled', 'reading', 'download',
         'classify', 'retrain', 'leave_one_out', 'docs', 'config')


def below(*patterns):
    return [path for pattern in patterns for path in sorted(Path(ROOT).glob(pattern))]


def relative(path):
    return os.path.relpath(path, ROOT)


COMMANDS = [str(path) for path in below('train.py', 'scripts/*.py', 'data/*/prepare.py')
            if path.name not in ('__init__.py', 'common.py')]


@pytest.fixture(scope='module', params=['packages', 'modules'])
def foreign(request, tmp_path_factory):
    """A folder with foreign packages, or modules, of our names, which may not be imported."""
    folder = tmp_path_factory.mktemp(request.param)
    for name in NAMES:
        path = folder / f'{name}.py'
        if request.param == 'packages':
            path = folder / name / '__init__.py'
            path.parent.mkdir()
        path.write_text(f'raise SystemExit("a foreign {name}")')
    return folder


@pytest.mark.parametrize('script', COMMANDS, ids=relative)
def test_foreign_modules_of_our_names_are_not_imported(fork, foreign, tmp_path, script):
    """PYTHONPATH's place in sys.path is the second, after the script's folder."""
    before = f'sys.path.insert(1, {str(foreign)!r})\ndel sys.modules["kernels"]'      # which the server has imported
    out = fork(tmp_path, '--help', script=script, tiny_args=False, before=before).out
    assert 'usage' in out or 'python scripts/' in out


@pytest.mark.parametrize('foreign, script', [
    ('packages', 'train.py'), ('modules', 'scripts/plot.py'), ('packages', 'data/local/prepare.py')],
    indirect=['foreign'])
def test_as_a_user_sets_pythonpath(foreign, script):
    done = subprocess.run([sys.executable, os.path.join(ROOT, script), '--help'], capture_output=True, text=True,
                          env={**ENV, 'PYTHONPATH': str(foreign)}, cwd=foreign)
    assert (done.returncode, done.stderr) == (0, '') and 'usage' in done.stdout


def test_importing_leaves_the_path_alone(fork, tmp_path):
    """In Python from the repository's folder, as README shows it."""
    modules = ('checkpoint, weights, configurator, data.bins, data.corpus, kernels, model, scripts.common, '
               'scripts.data_value, scripts.export, scripts.load_grads, scripts.plot')
    (tmp_path / 'look.py').write_text(f'''import os, sys
del sys.modules['kernels']      # which the server has imported
os.chdir({ROOT!r})
sys.path[0] = ''
path = list(sys.path)
import {modules}
from scripts.load_grads import load_keys, get_checkpoint_metadata
assert sys.path == path, sys.path
''')
    fork(tmp_path, script=str(tmp_path / 'look.py'), tiny_args=False, warn=False)


def imported(path):
    """The first names of all modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition('.')[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or '').partition('.')[0]


@pytest.mark.parametrize('path', below('*.py', 'data/**/*.py', 'config/**/*.py'), ids=relative)
def test_nothing_else_imports_from_scripts(path):
    assert 'scripts' not in imported(path)


@pytest.mark.parametrize('path', below('*.py', 'data/bins.py', 'data/corpus.py', 'scripts/common.py'),
                         ids=relative)
def test_modules_do_not_speak_of_the_path(path):
    tree = ast.parse(path.read_text(encoding='utf-8'))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == 'path'
                and isinstance(node.value, ast.Name) and node.value.id == 'sys']
