"""
Settings of a flat script: default < config files < command line, each checked against the type of its default.

A script assigns its settings at module level, a comment beside each, then calls `config, given = configure(globals())`.
Then `python script.py config/small.py --batch_size=4` works from any directory, and `--help` prints its settings.
"""
import ast
import builtins
import difflib
import glob
import io
import os
import re
import shutil
import sys
import textwrap
import time
import tokenize
from contextlib import contextmanager

ROOT = os.path.dirname(os.path.abspath(__file__))  # config/x.py is looked up here after the working directory

# What other trainers call our settings: an error that names an unknown name suggests ours. docs/coming_from.md says
# what differs in meaning. In this order: GhostSuite, OLMo-core's gradient dumper, the Hugging Face Trainer and its
# models' configurations, and tutorials.
ELSEWHERE = dict(
    method='use_ghost', val_batch_size='ghost_val_batch_size', dot_prod_save_interval='ghost_save_interval',
    architecture='n_layer', max_steps='max_iters', warmup_step='warmup_iters', train_set='dataset',
    val_set='ghost_val_dataset', eval_iter='eval_iters', eval_bs='batch_size', train_dtype='dtype', model_dtype='dtype',
    enabled='grad_dump', start_step='grad_dump_start_step', step_interval='grad_dump_step_interval',
    end_step='grad_dump_end_step', save_first_n='grad_dump_save_first_n', save_folder='out_dir',
    model_name_or_path='init_from', resume_from_checkpoint='init_from', output_dir='out_dir',
    overwrite_output_dir='overwrite', train_batch_size='batch_size', per_device_train_batch_size='batch_size',
    dataset_name='dataset', max_seq_length='block_size', num_train_epochs='max_iters', warmup_steps='warmup_iters',
    lr='learning_rate', lr_scheduler_type='decay', max_grad_norm='grad_clip', adam_beta1='beta1', adam_beta2='beta2',
    bf16='dtype', fp16='dtype', torch_compile='compile', fsdp='use_fsdp', full_determinism='deterministic',
    gradient_checkpointing='fsdp_activation_checkpointing', ddp_backend='backend', ddp_timeout='timeout_minutes',
    logging_steps='log_interval', eval_steps='eval_interval', do_eval='eval_only', save_steps='checkpoint_interval',
    save_total_limit='keep_checkpoints', report_to='wandb_log', run_name='wandb_run_name',
    num_hidden_layers='n_layer', num_attention_heads='n_head', hidden_size='n_embd', n_positions='block_size',
    epochs='max_iters', total_epochs='max_iters', save_every='checkpoint_interval', snapshot_path='out_dir',
    accumulation_steps='gradient_accumulation_steps', seq_len='block_size', context_length='block_size',
    num_layers='n_layer', num_heads='n_head', d_model='n_embd')


def tell(text, stream, passing=False):
    """
    Print text on a stream; control characters and what the stream cannot encode come as escapes such as \\xe9. On a
    terminal it takes the place of a passing line before it. Where it cannot be printed, the program goes on.
    """
    if stream is None:      # it was closed at the start
        return
    text = ''.join(c if c.isprintable() or c == '\n' else repr(c)[1:-1] for c in text)
    encoding = getattr(stream, 'encoding', None) or 'utf-8'
    text = text.encode(encoding, 'backslashreplace').decode(encoding)
    end = '\n'
    if stream.isatty():
        text = f'\r\033[K{text}'
        end = '' if passing else '\n'
    try:
        print(text, end=end, flush=True, file=stream)
    except OSError:     # a closed pipe, as in `--help | head -1`, a full disk
        mute(stream)


def mute(stream):
    """From now on nothing is printed on a stream; nor does Python fail at its end for what could not be printed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def hold_streams():
    """Open what was closed at the start, as by `<&- >&- 2>&-`: else the next files opened would have its numbers, 0 to
    2, and get what libraries print."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)      # takes the lowest number that is free


def report_error(kind, error, trace):
    """For sys.excepthook: one line where a traceback does not help. After Ctrl-C Python then ends as by that signal."""
    words = str(error).partition('\n')[0]
    if isinstance(error, KeyboardInterrupt):
        line = 'stopped'
    elif isinstance(error, FileNotFoundError) and error.errno and error.filename is None:   # getcwd's
        line = 'the working directory has been deleted: cd to another'
    elif isinstance(error, MemoryError) or 'allocate memory' in words or 'out of memory' in words:      # torch's
        line = f'out of memory: {words or "it was asked for more than there is"}'
    else:
        return sys.__excepthook__(kind, error, trace)
    tell(f'{os.path.basename(sys.argv[0])}: {line}', sys.stderr)


hold_streams()
if sys.excepthook is sys.__excepthook__:    # of a script of ours, not in a notebook
    sys.excepthook = report_error


def quoted(value, form=repr):
    """A value for an error message, cut short."""
    try:
        text = form(value)
    except Exception:   # an int of more than 4300 digits, or a config file's own class
        text = f'this {type(value).__name__}'
    return text if len(text) <= 200 else f'{text[:200]}...'


def broken(error):
    """What to add to "it needs the package X" when its import has raised this: '' if it is just not there. A package
    that does not fit another one may raise anything."""
    if isinstance(error, ModuleNotFoundError):
        return ''
    return f'; the one that is here does not load: {type(error).__name__}: {quoted(error, str)}'


def under_torchrun():
    """Whether this process is a rank: torchrun sets all of these. A lone RANK is a leftover in the environment. One
    line if they contradict each other: such a rank would wait for ever."""
    names = 'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT'
    texts = [os.environ.get(name, '') for name in names]
    texts.append(os.environ.get('LOCAL_WORLD_SIZE', '1'))       # missing where ranks are started by hand
    if not all(text.isdecimal() for text in texts) or not os.environ.get('MASTER_ADDR'):
        return False
    rank, local_rank, world_size, port, _ = map(int, texts)
    if not local_rank <= rank < world_size or port > 65535:
        fail(f'the environment has RANK={rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={world_size} and '
             f'MASTER_PORT={port}: ranks are below WORLD_SIZE and not below LOCAL_RANK, ports below 65536; set them '
             'right, or unset RANK to train in one process', every_rank=True)
    return True


def check_numbers(config, counts):
    """End with one line if a setting is out of range. counts: names, with spaces between, of those that begin at 1; all
    other numbers begin at 0. counts end below 2^31 and others below 2^63, but for those in limits."""
    limits = {'n_layer': 2**16, 'timeout_minutes': 2**26,       # more would take all memory; 127 years
              'dropout': 1, 'beta1': 1, 'beta2': 1}
    for name, value in config.items():
        low, high = (1, 2**31) if name in counts.split() else (0, 2**63)
        high = limits.get(name, high)
        if isinstance(value, (int, float)) and not low <= value < high:
            bound = f'at least {low}' if value < low else f'below {high}'
            fail(f'{name}={value}: must be {bound}')


def fail(message, code=2, every_rank=False):
    """
    End the program with one line on stderr, `script.py: message`, and an exit code: 2 for a wrong argument, 1 for
    anything else. Under torchrun all ranks of a machine find the same fault, so one of them reports it, unless
    every_rank says that this fault is one rank's own. Ranks that were started by hand report each for itself.
    """
    by_hand = 'LOCAL_WORLD_SIZE' not in os.environ      # torchrun sets it
    if every_rank or by_hand or os.environ.get('LOCAL_RANK') == '0' or not under_torchrun():
        line = f'{os.path.basename(sys.argv[0])}: {message}'
        tell(' '.join(line.split()), sys.stderr)    # one line, whatever the message quotes
    else:
        time.sleep(5)       # torchrun ends all ranks as soon as one has ended: let rank 0 be the first
    sys.exit(code)


@contextmanager
def one_line(before='', every_rank=False):
    """Around calls that raise ValueError for bad input: the program ends by fail() with that error's line."""
    try:
        yield
    except ValueError as error:
        fail(f'{before}{error}', every_rank=every_rank)


def configure(namespace, argv=None):
    """
    Apply the config files named in `argv` (default sys.argv[1:]) in order, then its --name=value's, to `namespace`.

    namespace: the calling script's globals(). Its settings: the int, float, bool, str and None values it has assigned.
    argv: config files (.py) and --name=value or --name value, with - for _ too; --name alone means True.
    Returns (config, given): all settings as {name: value} in source order, and the set of names the user has set.
    A bad argument or config file: one line on stderr, exit code 2. `--help`: the settings on stdout, exit code 0.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    config, comments, sections = read_settings(namespace)
    if '-h' in argv or '--help' in argv:
        if not under_torchrun() or os.environ['LOCAL_RANK'] == '0':  # under torchrun once, not once a rank
            tell(help_text(namespace, config, comments, sections), sys.stdout)
        sys.exit(0)
    choices = {name: listed(default, comments[name]) for name, default in config.items()}
    given = set()

    def put(name, value, where):
        try:
            config[name] = check(value, choices[name])
        except ValueError as error:
            fail(f'{where}: {name} takes {error}, not {quoted(value)}')
        given.add(name)

    files, assignments = split(argv, choices)   # all of them first: a typing error is named before any file is executed
    for file in files:
        path = next((p for p in (file, os.path.join(ROOT, file)) if os.path.isfile(p)), None)
        if path is None:
            hint = near_config(file) or f'; config/ has {", ".join(configs_in("config"))}'
            fail(f'{file}: no such config file in {" or ".join(dict.fromkeys((os.getcwd(), ROOT)))}{hint}')
        for name, (value, line) in run_config(path, config).items():
            if name not in config:
                unknown(f'{path}:{line}', name, f'unknown name {name!r}', config)
            put(name, value, f'{path}:{line}')
    for name, text, where in assignments:
        put(name, from_text(text, choices[name]), where)
    namespace.update(config)
    return config, given


def unknown(where, word, problem, names):
    """Fail because of a word of the command line, or a name in a config file, that is no setting."""
    name, hint = word.strip('-').lower().replace('-', '_'), ''
    name = name.rpartition('.')[2]      # trainer.callbacks.grad_dump.start_step
    near = difflib.get_close_matches(name, names, n=1, cutoff=0)
    if ELSEWHERE.get(name) in names:
        near = [ELSEWHERE[name]]
    if near and re.fullmatch(r'[\w-]+|--[\w.-]+', word):       # not of a path
        hint = f'; nearest name: {near[0]}'
    if not word.startswith('-'):
        hint = near_config(word) or hint
    fail(f'{where}: {problem}; arguments are --name=value or a config file (.py){hint}')


def configs_in(folder):
    """The names of the config files in a folder, looked up as a config file is."""
    folders = folder or '.', os.path.join(ROOT, folder)
    return sorted({os.path.basename(path) for there in folders for path in glob.glob(f'{glob.escape(there)}/*.py')
                   if os.path.isfile(path)})


def near_config(file):
    """A hint at the config file whose name is nearest to that of `file`, which may lack its .py; '' if none is near."""
    name = os.path.basename(file).removesuffix('.py') + '.py'
    for folder in (os.path.dirname(file) or 'config', 'config'):
        near = difflib.get_close_matches(name, configs_in(folder), n=1)
        if near:
            return f'; nearest config file: {os.path.join(folder, near[0])}'
    return ''


def split(argv, choices):
    """([config file], [(name, its value as text, the argument as typed)]) of a command line."""
    files, assignments, words = [], [], list(argv)
    while words:
        word = words.pop(0)
        typed, equals, text = word.partition('=')
        name = typed[2:].replace('-', '_')
        if word.endswith('.py') and not word.startswith('-'):
            files.append(word)
            continue
        if not typed.startswith('--') or typed == '--':
            unknown(word, typed, 'not understood', choices)
        if name not in choices:
            unknown(word, typed, f'unknown name {typed[2:]!r}', choices)
        if not equals:
            switch = any(isinstance(choice, bool) for choice in choices[name])      # --name alone means True
            if words and not words[0].startswith('--') and not (switch and words[0].endswith('.py')):
                text = words.pop(0)
                word = f'{word} {text}'
            elif switch:
                text = 'True'
            else:
                fail(f'{word}: needs a value: {typed}={choices[name][0]}')
        assignments.append((name, text, word))
    return files, assignments


def read_settings(namespace):
    """({name: value}, {name: comment}, {name: section}) of the script whose globals() these are, in source order."""
    with tokenize.open(namespace['__file__']) as file:
        source = file.read()
    beside, titles = {}, []     # {line of code: the comment after it}, [(line, text, has dashes)]
    code, last = 0, 0           # the line of code that the latest comment belongs to, and that comment's own line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        (line, column), text = token.start, token.string.strip('# ')
        if column == 0:
            titles.append((line, text.strip('-=─ '), text[:2] in ('--', '==', '──')))
            continue
        alone = not token.line[:column].strip()
        if not alone or line != last + 1:   # else it goes on with the comment right above
            code = line
        last = line
        beside[code] = f'{beside.get(code, "")} {text}'.strip()
    titles = [title for title in titles if title[1]]
    if any(dashes for _, _, dashes in titles):      # then plain comment lines are remarks
        titles = [title for title in titles if title[2]]
    values, comments, sections = {}, {}, {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign):
            continue
        for name in [target.id for target in node.targets if isinstance(target, ast.Name)]:
            if name not in namespace or name in values or name.startswith('_'):
                continue    # not in the namespace: assigned only after the call
            if type(namespace[name]) in (int, float, bool, str, type(None)):
                values[name] = namespace[name]
                comments[name] = beside.get(node.end_lineno, '')
                sections[name] = next((text for line, text, _ in reversed(titles) if line < node.lineno), 'settings')
    return values, comments, sections


def run_config(path, config):
    """Execute a config file, which sees the present settings; {name: (value, line)} of all that it has assigned."""
    # The settings are among the builtins, so what `left` holds afterwards is the file's own, be it an unchanged value.
    left = {'__builtins__': {**vars(builtins), **config}, '__name__': '__config__', '__file__': path}
    try:
        with open(path, 'rb') as file:
            tree = ast.parse(file.read(), path)
        exec(compile(tree, path, 'exec'), left)
    except KeyboardInterrupt:
        raise
    except BaseException as error:      # whatever the file raises, SystemExit too
        line, trace = getattr(error, 'lineno', None) or 1, error.__traceback__
        while trace:    # the innermost line of the file itself
            if trace.tb_frame.f_code.co_filename == path:
                line = trace.tb_lineno
            trace = trace.tb_next
        fail(f'{path}:{line}: {type(error).__name__}: {quoted(getattr(error, "msg", None) or error, str)}')
    lines = {n.id: n.lineno for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    assigned = {}
    for name, value in left.items():
        helper = callable(value) or isinstance(value, type(os)) or not isinstance(name, str) or name.startswith('_')
        if name in config or not helper:
            assigned[name] = value, lines.get(name, 1)
    return assigned


def listed(default, comment):
    """The default, then what its comment lists between bars, as in  False | 'full' | 'selective'  or  'auto' | True."""
    if '|' not in comment:
        return [default]
    words = re.findall(r"'[\w.-]*'|\"[\w.-]*\"|(?<=\|)\s*(?:True|False|None)\b|\b(?:True|False|None)(?=\s*\|)", comment)
    return [default, *(ast.literal_eval(word.strip()) for word in words)]


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
    """`value` in the setting's type, if it suits the default, choices[0], or is listed; ValueError: what would."""
    default, numpy = choices[0], sys.modules.get('numpy')
    kind = int if default is None else type(default)
    strings = [choice for choice in choices if isinstance(choice, str)]
    if numpy and isinstance(value, numpy.generic):
        value = value.item()
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return value
    if kind is bool and strings:        # False | 'full' | 'selective': what is listed, and True for the first string
        if value is True:
            return strings[0]
        raise ValueError(' or '.join(map(repr, choices)))
    if kind is int and type(value) is float and value.is_integer():     # 1e6
        value = int(value)
    suits = {int: type(value) is int and abs(value) < 2**63, bool: type(value) is bool,
             str: type(value) is str and '\0' not in value,
             float: type(value) in (int, float) and abs(value) <= sys.float_info.max}   # neither nan nor inf
    if suits[kind]:
        return kind(value)
    forms = [{int: 'an int', float: 'a finite number', str: 'a string', bool: 'True or False'}[kind]]
    if kind is int and type(value) is int:
        forms = ['an int below 2**63']
    forms += [repr(choice) for choice in choices if type(choice) is not kind]
    raise ValueError(' or '.join(dict.fromkeys(forms)))


def help_text(namespace, defaults, comments, sections):
    """The --help page: the script's docstring, then every setting under its section with default and comment."""
    script = os.path.basename(namespace['__file__'])
    out = [(namespace.get('__doc__') or '').strip(), f'usage: python {script} [config.py ...] [--name=value ...]']
    names = {name: f'  --{name}={value!r}' for name, value in defaults.items()}
    width = min(48, 2 + max(map(len, names.values()), default=0))       # of the left column
    columns = max(shutil.get_terminal_size((120, 24)).columns, width + 30)
    section = None
    for name, left in names.items():
        if sections[name] != section:
            section = sections[name]
            out.append(f'\n{section}:')
        lines = textwrap.wrap(comments[name], columns - width)
        out.append(left.ljust(width - 1) + ' ' + f'\n{"":{width}}'.join(lines))
    return '\n'.join(line.rstrip() for line in out).strip()
