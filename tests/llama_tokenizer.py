"""A small tokenizer as LLaMA 2 has it: BPE over bytes that are spelled out, `▁` for
spaces, `<s>` before each text.
"""

import json
import pathlib

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

WORDS = (
    "Return the sum of two arrays, or None if there is no value of that name in the file: x = 12."
)


def lines(count):
    """Different lines of text: the code and docstrings of jmat, and what few tokenizers
    agree on.
    """
    odd = [
        "naïve café",
        "数学 mathematics",
        "a  b   c",
        "tab\there",
        "🙂 emoji",
        "e\u0301 x",
        "ﬁrst ＡＢＣ",
        "it's 10 %",
    ]
    folder = pathlib.Path(__file__).parents[1] / "jmat"
    code = [
        line.strip()
        for path in sorted(folder.rglob("*.py"))
        for line in path.read_text("utf-8").split("\n")
    ]
    return [*odd, *dict.fromkeys(line for line in code if len(line) > 20)][:count]


def llama(*, eos=False, bos=True):
    """A tokenizer that puts `<s>` in front of a text, and `</s>` behind it, as asked."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([*[WORDS] * 3, *lines(400)], trainer)
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for token in bytes_:
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    single = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return tokenizer


def save(tokenizer, folder, **config):
    """Writes the tokenizer's files beside the config.json of a LLaMA; returns the
    folder.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "LlamaTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names | config))
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder
