"""Turn a checkpoint into another form, in a plain process: one file, sharded, or a Hugging Face GPT-2 folder.

python scripts/export.py SRC DST --to=full       DST/ckpt.pt, or DST itself if it ends in .pt
python scripts/export.py SRC DST --to=sharded    DST/ckpt_dcp/step_N
python scripts/export.py SRC DST --to=hf         DST/model.safetensors, DST/config.json and the tokenizer's files

SRC: an out_dir (its newest checkpoint), a .pt file (its best.pt, or nanoGPT's), a ckpt_dcp/step_N or a folder in
Hugging Face form. Nothing that exists is overwritten. From the Hugging Face form comes a checkpoint of step 0 without
optimizer state; sharded, it has the zeros that AdamW starts from.

The Hugging Face form is for transformers' from_pretrained and pipeline, and for tools that read it as they do. Rows of
the embedding that only pad the vocabulary are left out; dropout is 0. The tokenizer's files are there for GPT-2's
tokens, characters and bytes; an alphabet without an end of text has none there either. A model without biases gets
zeros for them, which compute the same, though such tools count and would train them; train.py, sample.py and this
script read the folder as the model without biases again.
"""
import json
import os
import re
import shutil
import sys
from pathlib import Path

if __name__ == '__main__':  # the repository's folder in place of scripts/, whose names would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.common import find_tokenizer, note, one_line_parser, printing     # before torch: it makes Ctrl-C one line

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as to_safetensors

from data.bins import made_folder, write_file
from data.corpus import EOT, tiktoken_files
from weights import TRANSPOSED, newest_checkpoint, one_process_too, read_checkpoint, why


GPT2_NAMES = re.compile(r'transformer\.(wte|wpe)\.weight|lm_head\.weight|transformer\.(ln_f|h\.\d+\.(ln_1|ln_2|'
                        r'attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj))\.(weight|bias)')


def write_sharded(ckpt, folder):
    """Tensors by torch.distributed.checkpoint, all else in state.json."""
    rest = {name: value for name, value in ckpt.items() if name not in ('model', 'optimizer')}
    rest['param_groups'] = ckpt['optimizer'].get('param_groups', [])
    weights = {name: weight for name, weight in ckpt['model'].items() if name != 'lm_head.weight'}  # tied, stored once
    state = ckpt['optimizer'].get('state') or {  # AdamW before its first step
        name: {'step': torch.tensor(0.0), 'exp_avg': torch.zeros_like(w), 'exp_avg_sq': torch.zeros_like(w)}
        for name, w in weights.items()}
    write_file(Path(folder, 'state.json'), json.dumps(rest).encode())
    with one_process_too():
        dcp.save({'model': weights, 'optimizer': {'state': state}}, checkpoint_id=folder, no_dist=True)


def write_hf(ckpt, folder, tokenizer):
    """GPT-2 as transformers keeps it: Linear weights (in, out), all biases, config.json, the tokenizer's files. What
    this form cannot say, weights.load_hf finds under the key "flatgpt" of config.json."""
    args, meta, weights = ckpt['model_args'], ckpt['meta'] or {}, dict(ckpt['model'])
    for name, weight in weights.items():
        if not GPT2_NAMES.fullmatch(name) or (name.endswith('c_fc.weight') and len(weight) != 4 * args['n_embd']):
            raise ValueError(f'{name}, {tuple(weight.shape)}: the Hugging Face form has no place for what GPT-2 does '
                             "not have; --to=full and --to=sharded keep a fork's model")
    record, vocab_size, eot = {'bias': args['bias']}, meta.get('vocab_size') or args['vocab_size'], meta.get('eot')
    if tokenizer:
        vocab_size, eot = tokenizer.vocab_size, tokenizer.eot
        record['meta'] = {'vocab_size': vocab_size, 'tokenizer': tokenizer.spec, 'eot': eot}
    vocab_size = min(vocab_size, args['vocab_size'])
    weights['transformer.wte.weight'] = weights['transformer.wte.weight'][:vocab_size]
    del weights['lm_head.weight']  # tied there too
    if not args['bias']:
        for name in [name for name in weights if '.wte.' not in name and '.wpe.' not in name]:
            weights[name.removesuffix('weight') + 'bias'] = torch.zeros(len(weights[name]))
    weights = {k: (w.t() if k.endswith(TRANSPOSED) else w).contiguous() for k, w in weights.items()}
    config = {
        'architectures': ['GPT2LMHeadModel'], 'model_type': 'gpt2', 'vocab_size': vocab_size,
        'n_positions': args['block_size'], 'n_embd': args['n_embd'], 'n_layer': args['n_layer'],
        'n_head': args['n_head'], 'activation_function': {'tanh': 'gelu_new', 'none': 'gelu'}[args['gelu']],
        'layer_norm_epsilon': 1e-5, 'resid_pdrop': 0.0, 'embd_pdrop': 0.0, 'attn_pdrop': 0.0,
        'tie_word_embeddings': True, 'bos_token_id': eot, 'eos_token_id': eot, 'flatgpt': record}
    for name, content in hf_tokenizer(tokenizer, args['block_size']).items():
        write_file(Path(folder, name), content)
    write_file(Path(folder, 'model.safetensors'), to_safetensors(weights, {'format': 'pt'}))
    write_file(Path(folder, 'config.json'), json.dumps(config, indent=2).encode())


def hf_tokenizer(tokenizer, block_size):
    """{name: bytes} of the files from which transformers builds this tokenizer; {} and a note if that is not known."""
    spec = tokenizer.spec if tokenizer else None
    config = {'model_max_length': block_size, 'add_prefix_space': False, 'clean_up_tokenization_spaces': False}
    special = []
    if tokenizer and tokenizer.eot is not None:
        config.update(bos_token=EOT, eos_token=EOT)
        special = [{'id': tokenizer.eot, 'content': EOT, 'single_word': False, 'lstrip': False, 'rstrip': False,
                    'normalized': False, 'special': True}]
    if spec in ('gpt2', 'r50k_base'):
        config.update(tokenizer_class='GPT2Tokenizer', unk_token=EOT)
        folder = tiktoken_files('gpt2')     # under the sha1 of their addresses
        return {'vocab.json': (folder / '6c7ea1a7e38e3a7f062df639a5b80947f075ffe6').read_bytes(),
                'merges.txt': (folder / '6d1cbeee0f20b3d9449abfede4726ed8212e3aee').read_bytes(),
                'tokenizer_config.json': json.dumps(config, indent=2).encode()}
    if isinstance(spec, dict):      # characters; one that is not in the table is an error there too
        each_character = {'type': 'Split', 'pattern': {'Regex': r'[\s\S]'}, 'behavior': 'Isolated', 'invert': False}
        decoder = {'type': 'Fuse'}
        vocabulary = {'type': 'WordLevel', 'vocab': {c: i for i, c in enumerate(spec['itos'])}, 'unk_token': '<unk>'}
    elif spec == 'byte':            # as GPT-2 writes bytes: the printable ones as themselves, the others from 256 on
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        letters = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
        each_character = decoder = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': False,
                                    'use_regex': False}
        vocabulary = {'type': 'BPE', 'vocab': letters, 'merges': []}
    else:
        if spec:
            note(f'no files of the tokenizer {spec}: other tools have to be given it')
        return {}
    config.update(tokenizer_class='PreTrainedTokenizerFast')
    whole = {'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': special, 'normalizer': None,
             'pre_tokenizer': each_character, 'post_processor': None, 'decoder': decoder, 'model': vocabulary}
    return {'tokenizer.json': json.dumps(whole).encode(),
            'tokenizer_config.json': json.dumps(config, indent=2).encode()}


def write_folder(folder, write):
    """write(temporary folder), which then takes its name: it appears complete or not at all."""
    parent, name = os.path.split(os.path.abspath(folder))
    temporary = os.path.join(parent, f'.{name}.{os.getpid()}.tmp')
    os.makedirs(temporary)
    try:
        write(temporary)
        if os.path.isdir(folder):
            os.rmdir(folder)  # empty, as checked
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def export(src, dst, to):
    """Write the checkpoint at `src` to `dst` in the form `to`; returns a line that tells what was written from what.
    ValueError (one line) if it cannot."""
    source = newest_checkpoint(src) or src
    ckpt = read_checkpoint(source)
    if to == 'full':
        path = dst if dst.endswith('.pt') else os.path.join(dst, 'ckpt.pt')
    elif to == 'sharded':
        path = os.path.join(dst, 'ckpt_dcp', f'step_{ckpt["iter_num"]}')
    else:
        path = dst
        unknown = [name for name in ('rope', 'qk_norm') if ckpt['model_args'][name]]
        if unknown:
            raise ValueError(f'{source}: GPT-2 in Hugging Face form has no {" and no ".join(unknown)}: --to=full or '
                             '--to=sharded, or train a model without')
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path) or os.listdir(path)):
        raise ValueError(f'{path}: exists; choose another DST or move it away')
    told = f'wrote {path} from {source}, step {ckpt["iter_num"]}'
    tokenizer, problem = None, None
    if to == 'hf':
        try:
            tokenizer = find_tokenizer(source, ckpt)
        except (ValueError, OSError, RuntimeError) as error:    # RuntimeError: no home directory
            problem = f'no tokenizer: {error}'
        if not ckpt['model_args']['bias']:
            told += '; it has no biases: other tools count the zeros in their place as parameters'
    try:
        with made_folder(os.path.dirname(os.path.abspath(path))):
            if to == 'full':
                write_file(path, lambda file: torch.save(ckpt, file))
            elif to == 'sharded':
                write_folder(path, lambda folder: write_sharded(ckpt, folder))
            else:
                write_folder(path, lambda folder: write_hf(ckpt, folder, tokenizer))
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
        raise ValueError(f'{path}: cannot be written: {why(error)}: mend that, or choose another DST') from None
    if problem:
        note(problem)
    return told


def main():
    parser = one_line_parser(__doc__, 'SRC DST --to=full|sharded|hf')
    parser.add_argument('src', metavar='SRC')
    parser.add_argument('dst', metavar='DST')
    parser.add_argument('--to', choices=('full', 'sharded', 'hf'), required=True)
    args = parser.parse_args()
    if not args.src or not args.dst:
        parser.error('SRC or DST is empty')
    print(export(args.src, args.dst, args.to))


if __name__ == '__main__':
    with printing():
        main()
