"""What training reads: find a dataset, its record, the hash and the shuffle of the sampler. Needs numpy alone."""
import errno
import hashlib
import io
import json
import math
import os
import pickle
import pickletools
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

try:
    import fcntl
except ImportError:     # Windows
    fcntl = None

FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # the disk's errors, not the network's
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's step: 2^64 divided by the golden ratio, made odd
GPT2_VOCAB = 50257  # the ids of a folder without a record, as nanoGPT leaves it, are GPT-2's
DATA = Path(__file__).resolve().parent


def write_file(path, data, ending=".tmp"):
    """Writes bytes, or what the function `data` writes into the open file, so that `path` is either absent, as before,
    or complete, whenever the machine stops. An OSError names the file."""
    temporary = Path(f"{path}{ending}")  # with the same ending the next try overwrites what a kill leaves
    try:
        with open(temporary, "wb") as f:
            data(f) if callable(data) else f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as error:    # of a write it does not name the file
        error.filename = error.filename or os.fspath(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def no_pipe(path):
    """OSError if a path is a pipe, a socket or a device, which reading might wait for, or read, for ever."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise OSError(errno.EINVAL, "a pipe or a device, not a file", os.fspath(path))


def leads_nowhere(path):
    """Whether this is a link to what is not there."""
    return os.path.islink(path) and not os.path.exists(path)


def open_file(path):
    """A file, open to read its bytes. OSError if that can't be, as for a folder or no_pipe's."""
    no_pipe(path)
    if leads_nowhere(path):
        raise OSError(errno.ENOENT, "a link that leads nowhere", os.fspath(path))
    return open(path, "rb")


def read_file(path):
    """The bytes of a file; open_file's errors."""
    with open_file(path) as file:
        return file.read()


def said(error):
    """What an error says, in one line: of the system's the words, without the number and the path."""
    return getattr(error, "strerror", None) or " ".join(str(error).split())


@contextmanager
def made_folder(path):
    """Makes a folder, and those it lies in, for what is then done; if that fails, those that it has made go again.
    OSError if it can't be made, in words that say what is in the way."""
    path, made = Path(path).absolute(), []
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)       # the system refuses at once a path that is too long, be it of a thousand folders
        for folder in (*reversed(path.parents), path):
            if os.path.isdir(folder):
                continue
            if os.path.lexists(folder):
                what = "no folder" if os.path.exists(folder) else "a link that leads nowhere"
                raise OSError(errno.EEXIST, f"{folder} is {what}", os.fspath(path))
            folder.mkdir(exist_ok=True)     # another process may have made it just now
            made.append(folder)
        yield
    except BaseException:
        for folder in reversed(made):
            with suppress(OSError):     # it is not empty
                folder.rmdir()
        raise


def lock_folder(path):
    """Keeps other processes that ask for the same out of a folder until this one ends, however it ends. OSError if it
    can't be opened, BlockingIOError if another has it. (On Windows, and on disks without locks, it does nothing.)"""
    if fcntl is None:
        return
    handle = os.open(path, os.O_RDONLY)     # stays open: closing it would give up the lock
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise BlockingIOError(error.errno, "another command is at work in it; wait for its end, or name another folder",
                              os.fspath(path)) from None
    except OSError:
        return


def append_rows(path, rows):
    """Add dicts to a file with one JSON object a line. What a full disk or a kill has left of a line there stays a line
    of its own. OSError if it can't be written."""
    text = ''.join(json.dumps(row) + '\n' for row in rows)
    with open(path, 'ab+') as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read() != b'\n':
                text = '\n' + text
        file.write(text.encode())


def hash64(*parts):
    """Ints or int arrays -> uint64 array, as good as random: splitmix64's finaliser (Steele et al. 2014), chained."""
    h = np.zeros(1, np.uint64)
    for part in parts:
        h = h + np.asarray(part, np.uint64) + np.uint64(GOLDEN)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h = h ^ (h >> np.uint64(31))
    return h


def shuffled(k, n, seed, epoch):
    """Where 0 <= k < n, int64 (m,), go in the shuffle of 0 .. n - 1 of (seed, epoch); epoch an int or (m,).
    A Feistel network permutes 0 .. side^2 - 1 without a table; what it sends to n or beyond goes through it again."""
    side = max(2, math.isqrt(n - 1) + 1)
    k, epoch, todo = np.array(k), np.broadcast_to(epoch, np.shape(k)), np.ones(np.shape(k), bool)
    while todo.any():
        left, right = np.divmod(k[todo], side)
        for i in range(6):      # fewer let one window too often follow another
            mixed = (hash64(seed, epoch[todo], i, right) % np.uint64(side)).astype(np.int64)
            left, right = right, (left + mixed) % side
        k[todo] = left * side + right
        todo = k >= n
    return k


def sample_offsets(order, seed, step, j, seen, tokens, block_size):
    """
    Token offsets, int64 (n,), of samples j (n,) of an optimizer step: a pure function of its arguments. Which rank
    reads a sample in which micro-batch changes nothing, resuming needs no stored position, and a sample has a lasting
    name: its offset in train.bin, which has so many tokens.
    order: 'random', windows with replacement, or 'epoch', each once per epoch; seen: samples before this step.
    """
    if order == 'random':
        return (hash64(seed, step, j) % np.uint64(tokens - block_size)).astype(np.int64)
    windows = (tokens - 1) // block_size
    epoch, k = np.divmod(seen + j, windows)
    return shuffled(k, windows, seed, epoch) * block_size


FILLS = "APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"     # the opcodes that change an object


def check_pickle(content):
    """ValueError, LookupError or TypeError if a pickle, as bytes, would take time, memory or stack out of proportion to
    its length, or is torn. Nothing is built."""
    stack, memo = [], {}    # of each object [depth, objects in it, whether it is in another]; None is a mark
    for opcode, number, _ in pickletools.genops(content):
        name, takes = opcode.name, len(opcode.stack_before)
        if name.endswith("GET"):
            stack.append(memo[number])
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name.endswith("PUT"):
            if number > len(content):       # the memo is a list of that length
                raise ValueError(f"it numbers an object {number:,}")
            memo[number] = stack[-1]
        elif name == "MARK":
            stack.append(None)
        elif takes == 0:        # a number, a text, an empty list; or the head, which is no object
            stack += [[0, 1, False] for _ in opcode.stack_after]
        else:
            taken = []
            if pickletools.markobject in opcode.stack_before:
                takes = opcode.stack_before.index(pickletools.markobject)
                while stack[-1] is not None:
                    taken.append(stack.pop())
                stack.pop()
            taken += [stack.pop() for _ in range(takes)]
            whole = [0, 1, False]
            if name in FILLS:
                whole = taken.pop()
                if whole[2]:        # then the numbers of what it is in would be wrong
                    raise ValueError("it fills an object that another one holds already")
            for part in taken:
                if part is not None:
                    whole[0] = max(whole[0], part[0] + 1)
                    whole[1] += part[1]
                    part[2] = True
            if whole[0] > 100 or whole[1] > 1000 + 100 * len(content):
                raise ValueError(f"its objects are nested {whole[0]} deep, or hold each other {whole[1]:,} times")
            stack += [whole] * len(opcode.stack_after)


class PlainUnpickler(pickle.Unpickler):
    """Reads nanoGPT's meta.pkl, which holds builtin containers only; anything that could run code is refused."""
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, but only plain numbers, texts, lists and dicts are "
                                     "read from a pickle: write it anew with those, int(x) for a numpy number")


def load_meta(folder):
    """The record of a prepared folder: its meta.json, or what nanoGPT's meta.pkl says in that form, or {} where there
    is neither (then the bins hold uint16 ids of GPT-2, GPT2_VOCAB). ValueError when it can not be read."""
    path = next((folder / n for n in ("meta.json", "meta.pkl") if os.path.lexists(folder / n)), None)
    try:
        if path is None:
            return {}
        content = read_file(path)
        if path.suffix == ".json":
            meta = json.loads(content.decode())
        else:
            check_pickle(content)
            old = PlainUnpickler(io.BytesIO(content)).load()
            meta = {"vocab_size": old["vocab_size"], "dtype": "uint16"}
            if "itos" in old:
                meta["tokenizer"] = {"type": "char", "itos": [old["itos"][i] for i in range(old["vocab_size"])]}
        check_meta(meta)
        return meta
    except RecursionError:
        raise ValueError(f"{path} can not be read: it is nested too deeply") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, MemoryError, OverflowError,
            pickle.UnpicklingError) as e:
        raise ValueError(f"{path} can not be read ({type(e).__name__}: {said(e)})") from None


def check_meta(meta):
    """ValueError saying what is wrong with a record."""
    if not isinstance(meta, dict):
        raise ValueError(f"it holds {str(meta)[:40]}, not an object with a vocab_size")
    for key, kind in (("vocab_size", int), ("dtype", str), ("tokenizer", (str, dict)), ("splits", dict),
                      ("eot", (int, type(None)))):
        if (key in meta or key == "vocab_size") and not isinstance(meta.get(key), kind):
            raise ValueError(f"{key} is {meta.get(key)!r}")
    if isinstance(meta.get("tokenizer"), dict):
        itos = meta["tokenizer"].get("itos")
        if meta["tokenizer"].get("type") != "char":
            raise ValueError(f"tokenizer.type is {str(meta['tokenizer'].get('type'))[:40]}")
        if not isinstance(itos, list) or not all(isinstance(character, str) for character in itos):
            raise ValueError(f"tokenizer.itos is {str(itos)[:40]}")
    if meta["vocab_size"] is True or not 0 < meta["vocab_size"] <= 2**24:  # Unicode has 2^20 characters
        raise ValueError(f"vocab_size is {meta['vocab_size']}, not from 1 to 16,777,216")
    if meta.get("dtype", "uint16") not in ("uint16", "uint32"):
        raise ValueError(f"dtype is {meta['dtype']!r}, not uint16 or uint32")
    for split, has in meta.get("splits", {}).items():
        if not isinstance(has, dict) or not isinstance(has.get("tokens", 0), int):
            raise ValueError(f"splits.{split} is {has!r}")


def find_folder(name):
    """The folder of a dataset: data/NAME, or if there is none NAME as a path from here. A name that begins with a dot,
    as ".", ".." or "./mine", is always such a path."""
    if not str(name).startswith(".") and os.path.isdir(DATA / name):
        return DATA / name
    return Path(name)


def lasting_name(name):
    """The name of a dataset, such that scripts which run elsewhere find it: one in data/ keeps its own, another gets an
    absolute path."""
    return name if find_folder(name) == DATA / name else os.path.abspath(name)


def find_bin(name, split):
    """((path, dtype, number of tokens), load_meta's record) of a split, "train" or "val", of the dataset of that name.
    ValueError (one line) when there is no such file, or it is not as long as the record says."""
    if not name:
        raise ValueError("the dataset's name is empty: name a folder in data/, or a path")
    path = find_folder(name) / f"{split}.bin"
    try:
        with open_file(path) as f:
            size = os.fstat(f.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError):
        prepared = sorted(p.parent.name for p in DATA.glob("*/train.bin"))
        place = f"no file {path}"
        if path.parent != DATA / name:
            place += f" and no folder {DATA / name}"
        raise ValueError(f"{place}: run its prepare.py, or name another dataset; data/ holds "
                         f"{', '.join(prepared) or 'none that is prepared'}") from None
    except (OSError, ValueError) as e:  # ValueError: a zero byte in the name
        raise ValueError(f"{path} can not be read: {said(e)}") from None
    meta = load_meta(path.parent)
    dtype = np.dtype(meta.get("dtype", "uint16")).newbyteorder("<")
    tokens, rest = divmod(size, dtype.itemsize)
    recorded = meta.get("splits", {}).get(split, {}).get("tokens", tokens)
    if tokens != recorded or (rest and "splits" in meta):
        raise ValueError(f"{path} has {size:,} bytes, not the {recorded:,} {dtype.name} of its meta.json: "
                         f"prepare {path.parent} again")
    if rest:
        raise ValueError(f"{path} has {size:,} bytes, no whole number of {dtype.name} tokens: it was cut, or holds "
                         "something else")
    return (path, dtype, tokens), meta


def find_data(config):
    """({split: (path, dtype, tokens)}, {split: load_meta's record}, the training data's record with the fingerprint of
    its tokens) of a config's dataset, which from then on has its lasting name there. ValueError (one line) as
    find_bin's; OSError if it can't be read."""
    bins, metas = {}, {}
    for split in ("train", "val"):
        bins[split], metas[split] = find_bin(config["dataset"], split)
    config["dataset"] = lasting_name(config["dataset"])
    return bins, metas, {**metas["train"], "fingerprint": fingerprint(bins["train"][0], metas["train"])}


def check_tokens(bin, meta, block_size, vocab_size):
    """ValueError (one line) if a bin, as find_bin gives it, is shorter than a sample, or holds ids beyond the
    vocabulary: the record's (GPT-2's without one), or vocab_size, how many ids a model has, if that is smaller. Looks
    at the first 2^26 tokens."""
    path, dtype, tokens = bin
    if tokens <= block_size:
        raise ValueError(f'{path} has {tokens:,} tokens, one sample of block_size={block_size} takes {block_size + 1}: '
                         'use more text or a smaller --block_size')
    ids = min(vocab_size, meta.get('vocab_size', GPT2_VOCAB))       # not the ones that only pad the embedding
    largest = np.fromfile(path, dtype, 2**26).max()
    if largest >= ids:
        raise ValueError(f'{path} has token id {largest}, the vocabulary only {ids} ids: wrong dataset?')


def read_tokens(bin, offsets, length, vocab_size):
    """int64 (len(offsets), length): the tokens of a bin, as find_bin gives it, from each offset on. ValueError (one
    line) for an id that a model of vocab_size ids does not have, or where the file ends too soon."""
    path, dtype, _ = bin        # read, not mapped: a memory map's pages would count as ours and pile up
    tokens = np.empty((len(offsets), length), dtype)
    with open(path, 'rb') as file:
        for row, offset in zip(tokens, offsets.tolist()):
            file.seek(offset * dtype.itemsize)
            part = np.fromfile(file, dtype, length)
            if len(part) < length:
                raise ValueError(f'{path} ends at token {offset + len(part):,}, it was longer at the start: '
                                 'restore it, and resume')
            row[:] = part
    if tokens.max() >= vocab_size:
        where = offsets[tokens.max(1).argmax()]
        raise ValueError(f'{path} has token id {tokens.max()} near token {where}, the model only {vocab_size} ids')
    return tokens.astype(np.int64)


def fingerprint(path, meta):
    """A text that tells a bin from another or a later one without reading it all: the sha256 in its record, else a hash
    of its size and of 64 blocks of 4 KB, evenly spread from its beginning to its end. OSError if it can't be read."""
    recorded = meta.get("splits", {}).get(Path(path).stem, {}).get("sha256")
    if recorded:
        return f"sha256:{recorded}"
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for i in range(64):
            f.seek(max(0, size - 4096) * i // 63)
            digest.update(f.read(4096))
    return f"samples:{digest.hexdigest()}"
