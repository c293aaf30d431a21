"""Settings of a flat script: default < config files < command line, each checked against the type of its default.

A script assigns its settings at module level, a comment beside each, then calls `config, given = configure(globals())`.
Then `python script.py config/small.py --batch_size=4` works from any directory, and `--help` prints its settings.
"""
import ast
import builtins
import difflib
import os
import re
import shutil
import sys
import textwrap
import time
import tokenize
from contextlib import contextmanager

ROOT = os.path.dirname(os.path.abspath(__file__))  # config/x.py is looked up here after the working directory


def under_torchrun():
    """Whether this process is a rank: torchrun sets all of these. A lone RANK is a leftover in the environment."""
    names = 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT'
    return all(os.environ.get(name, '').isdecimal() for name in names) and bool(os.environ.get('MASTER_ADDR'))


def fail(message, code=2, every_rank=False):
    """End the program with one line on stderr, `script.py: message`, and an exit code: 2 for a wrong argument, 1 for
    anything else. Under torchrun all ranks of a machine find the same fault, so one of them reports it, unless
    every_rank says that this fault is one rank's own."""
    if every_rank or not under_torchrun() or os.environ['LOCAL_RANK'] == '0':
        line = f'{os.path.basename(sys.argv[0])}: {message}'
        print(' '.join(line.split()), file=sys.stderr, flush=True)  # one line, whatever the message quotes
    else:
        time.sleep(2)  # torchrun ends all ranks as soon as one has ended: let the line out first
    sys.exit(code)


@contextmanager
def one_line(before='', every_rank=False):
    """Around calls that raise ValueError for bad input: the program ends by fail() with that error's line."""
    try:
        yield
    except ValueError as error:
        fail(f'{before}{error}', every_rank=every_rank)


def configure(namespace, argv=None):
    """Apply the config files named in `argv` (default sys.argv[1:]) in order, then its --name=value's, to `namespace`.

    namespace: the calling script's globals(). Its settings: the int, float, bool, str and None values it has assigned.
    Returns (config, given): all settings as {name: value} in source order, and the set of names the user has set.
    A bad argument or config file: one line on stderr, exit code 2. `--help`: the settings on stdout, exit code 0.
    """
    argv, script = sys.argv[1:] if argv is None else argv, os.path.basename(namespace['__file__'])
    config, comments, sections = read_settings(namespace)
    defaults, given = dict(config), set()

    def unknown(where, word, problem):
        near = difflib.get_close_matches(word.strip('-').lower().replace('-', '_'), config, n=1, cutoff=0)
        near = f'; nearest name: {near[0]}' if near and re.fullmatch(r'[\w-]+', word) else ''  # not of a path
        fail(f'{where}: {problem}; arguments are --name=value or a config file (.py){near}')

    def put(name, value, where):
        try:
            config[name] = check(value, listed(defaults[name], comments[name]))
        except ValueError as error:
            fail(f'{where}: {name} takes {error}, not {value!r}')
        given.add(name)

    if '-h' in argv or '--help' in argv:
        if not under_torchrun() or os.environ['LOCAL_RANK'] == '0':  # once, not once a rank
            print(help_text(script, namespace.get('__doc__'), defaults, comments, sections))
        sys.exit(0)
    for arg in argv:  # the form of every argument first: a typing error is named before any file is executed
        name, equals, _ = arg.partition('=')
        if arg.startswith('--') and equals:
            if name[2:] not in config:
                unknown(arg, name, f'unknown name {name[2:]!r}')
        elif arg.startswith('-') or not arg.endswith('.py'):
            unknown(arg, name, 'not understood')
    for arg in [a for a in argv if not a.startswith('--')]:
        path = next((p for p in (arg, os.path.join(ROOT, arg)) if os.path.isfile(p)), None)
        if path is None:
            fail(f'{arg}: no such config file, neither in {os.getcwd()} nor in {ROOT}')
        for name, (value, line) in run_config(path, config).items():
            if name not in config:
                unknown(f'{path}:{line}', name, f'unknown name {name!r}')
            put(name, value, f'{path}:{line}')
    for arg in [a for a in argv if a.startswith('--')]:
        name, _, text = arg[2:].partition('=')
        put(name, from_text(text, listed(defaults[name], comments[name])), arg)
    namespace.update(config)
    return config, given


def read_settings(namespace):
    """({name: value}, {name: comment}, {name: section}) of the script whose globals() these are, in source order."""
    with tokenize.open(namespace['__file__']) as file:
        comments = [t for t in tokenize.generate_tokens(file.readline) if t.type == tokenize.COMMENT]
        file.seek(0)
        tree = ast.parse(file.read())
    beside, titles, anchor, last = {}, [], 0, 0  # beside: {line: comment after code}; titles: (line, text, has dashes)
    for token in comments:
        (row, column), text = token.start, token.string.strip('# ')
        if column:  # after code, or an indented line right below that goes on with it
            anchor, last = anchor if not token.line[:column].strip() and row == last + 1 else row, row
            beside[anchor] = f'{beside.get(anchor, "")} {text}'.strip()
        elif text.strip('-=─ '):
            titles.append((row, text.strip('-=─ '), text[:2] in ('--', '==', '──')))
    titles = [t for t in titles if t[2]] or titles  # beside dashed titles, plain comment lines are remarks
    found = {}, {}, {}
    for node in tree.body:  # a name assigned only after the call is not in the namespace yet
        for name in [t.id for t in getattr(node, 'targets', []) if isinstance(t, ast.Name) and t.id in namespace]:
            if type(namespace[name]) in (int, float, bool, str, type(None)) and not name.startswith('_'):
                title = next((title for row, title, _ in reversed(titles) if row < node.lineno), 'settings')
                for table, entry in zip(found, (namespace[name], beside.get(node.end_lineno, ''), title)):
                    table.setdefault(name, entry)
    return found


def run_config(path, config):
    """Execute a config file with the present values visible; {name: (value, line)} of all it has assigned."""
    # Reads fall back to builtins, so what `left` holds afterwards was put there by the file, be it an unchanged value.
    left = {'__builtins__': {**vars(builtins), **config}, '__name__': '__config__', '__file__': path}
    try:
        with open(path, 'rb') as file:
            tree = ast.parse(file.read(), path)
        exec(compile(tree, path, 'exec'), left)
    except (Exception, SystemExit) as error:
        line, trace = getattr(error, 'lineno', None) or 1, error.__traceback__
        while trace:  # the innermost line of the file itself
            line, trace = trace.tb_lineno if trace.tb_frame.f_code.co_filename == path else line, trace.tb_next
        fail(f'{path}:{line}: {type(error).__name__}: {getattr(error, "msg", None) or error}')
    lines = {n.id: n.lineno for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return {name: (value, lines.get(name, 1)) for name, value in left.items() if name in config or not (
        name.startswith('_') or callable(value) or isinstance(value, type(os)))}


def listed(default, comment):
    """The default, then what its comment lists between bars, as in  False | 'full' | 'selective'  or  'auto' | True."""
    words = re.findall(r"'[\w.-]*'|\"[\w.-]*\"|(?<=\|)\s*(?:True|False|None)\b|\b(?:True|False|None)(?=\s*\|)", comment)
    return [default, *(ast.literal_eval(word.strip()) for word in words if '|' in comment)]


def from_text(text, choices):
    """The value a command-line text means: verbatim for a str default (choices[0]) but for a bool or None it lists."""
    word = {'True': True, 'true': True, 'False': False, 'false': False, 'None': None}.get(text, text)
    if isinstance(choices[0], (bool, str)) and text in ('0', '1') and any(isinstance(c, bool) for c in choices):
        return text == '1'
    if isinstance(choices[0], str):
        return word if any(type(word) is type(c) and word == c for c in choices) else text
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return word


def check(value, choices):
    """`value` if it suits the default, choices[0], or is another choice (int becomes float); ValueError: what would."""
    default, kind = choices[0], int if choices[0] is None else type(choices[0])
    closed = kind is bool and any(isinstance(c, str) for c in choices)  # False | 'full': True is not among them
    if any(type(value) is type(c) and value == c for c in choices):
        return value
    if kind is float and type(value) in (int, float) and abs(value) < 2**1024:  # neither nan nor inf
        return float(value)
    if type(value) is kind is not float and not closed:
        return value
    forms = [] if closed else [{int: 'an int', float: 'a finite number', str: 'a string', bool: 'True or False'}[kind]]
    forms += [repr(c) for c in choices if closed or default is None or c is not default and type(c) is not kind]
    raise ValueError(' or '.join(dict.fromkeys(forms)))


def help_text(script, doc, defaults, comments, sections):
    """The --help page: the script's docstring, then every setting under its section with default and comment."""
    out, section = [(doc or '').strip(), f'usage: python {script} [config.py ...] [--name=value ...]'], None
    width = min(48, 4 + max(len(f'--{name}={value!r}') for name, value in defaults.items()))
    columns = max(shutil.get_terminal_size((120, 24)).columns, width + 30)
    for name, value in defaults.items():
        out += [f'\n{sections[name]}:'] * (sections[name] != section)
        section, lines = sections[name], textwrap.wrap(comments[name], columns - width)
        out.append(f'  --{name}={value!r}'.ljust(width - 1) + ' ' + f'\n{"":{width}}'.join(lines))
    return '\n'.join(line.rstrip() for line in out).strip()
