"""Tokenizers of checkpoints are what their files say: tokenizer.json, vocabularies
alone, SentencePiece by any name.
"""

import dataclasses
import importlib.util
import json
import pathlib
import sys
import types

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

import jmat
from jmat.checkpoint import tokenizer as checkpoint_tokenizer
from jmat.checkpoint.load import find
from jmat.checkpoint.tokenizer import check_tokenizer, load_tokenizer
from jmat.data import tokenize
from tests import llama_tokenizer
from tests.test_load import fake_hub
from tests.test_reference import REFERENCE

TEXT = [
    "Return the sum of two arrays",
    "The ﬁrst ＡＢＣ of the file",
    "Hello World",
    "x = 10 and",
    "it's e\u0301",
] * 20
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
ALPHABET = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "vocab_size": 330}


def train(model, trainer, pre_tokenizer, *, normalizer=None, decoder=None, **options):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    if decoder:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator(TEXT, trainer(show_progress=False, **options))
    return tokenizer


@pytest.fixture(scope="module")
def made():
    """Tokenizers that differ from what the classes of their families build by default."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = (models.BPE(), trainers.BpeTrainer, byte_level)
    piece, piece_trainer = models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer
    unigram = {
        "special_tokens": ROBERTA,
        "vocab_size": 120,
        "unk_token": "<unk>",
        "normalizer": normalizers.NFKC(),
    }
    return {
        "word level": train(
            models.WordLevel(unk_token="[UNK]"),
            trainers.WordLevelTrainer,
            pre_tokenizers.WhitespaceSplit(),
            special_tokens=BERT,
        ),
        "cased": train(
            piece, piece_trainer, pre_tokenizers.Whitespace(), special_tokens=BERT, vocab_size=300
        ),
        "lower-cased": train(
            *bpe, normalizer=normalizers.Lowercase(), decoder=decoders.ByteLevel(), **ALPHABET
        ),
        "byte level": train(
            *bpe,
            special_tokens=["<|endoftext|>", *ROBERTA],
            decoder=decoders.ByteLevel(),
            **ALPHABET,
        ),
        "unigram": train(
            models.Unigram(), trainers.UnigramTrainer, pre_tokenizers.Metaspace(), **unigram
        ),
    }


def write(folder, model_type, files, config=None):
    """Writes files of a tokenizer, and a config.json that says no more than the family."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in (
        files | ({} if config is None else {"tokenizer_config.json": json.dumps(config)})
    ).items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


CASES = [  # tokenizer, family, class in tokenizer_config.json
    ("word level", "gpt2", None),
    ("word level", "gpt2", "PreTrainedTokenizerFast"),
    ("cased", "roberta", "RobertaTokenizer"),
    ("cased", "bert", None),
    ("cased", "distilbert", "DistilBertTokenizerFast"),
    ("lower-cased", "gpt2", "GPT2TokenizerFast"),
    ("lower-cased", "opt", "GPT2Tokenizer"),
    ("byte level", "gpt_neox", None),
    ("byte level", "bloom", "BloomTokenizerFast"),
    ("unigram", "xlm-roberta", "XLMRobertaTokenizerFast"),
    ("unigram", "camembert", None),
    ("unigram", "gemma", "GemmaTokenizer"),
    ("byte level", "llama", "LlamaTokenizer"),
    ("lower-cased", "mistral", "LlamaTokenizerFast"),
]


@pytest.mark.parametrize(("name", "family", "named"), CASES)
def test_the_file_decides_and_not_the_class(made, name, family, named, tmp_path):
    truth = made[name]
    config = (
        None
        if named is None
        else {"tokenizer_class": named, "do_lower_case": True, "add_prefix_space": True}
    )
    write(tmp_path, family, {"tokenizer.json": truth.to_str()}, config)
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXT[:5]:
        wanted = truth.encode(text, add_special_tokens=False).ids
        assert tokenize([text], tokenizer, 512, special_tokens=False)[0].tolist() == wanted
        assert tokenizer.decode(wanted) == truth.decode(wanted)


def test_special_tokens_have_their_names_from_the_family_if_no_file_says_them(made, tmp_path):
    write(tmp_path, "bert", {"tokenizer.json": made["cased"].to_str()})
    assert load_tokenizer(tmp_path).mask_token_id == 4
    write(tmp_path, "gpt2", {"tokenizer.json": made["word level"].to_str()})
    toy = load_tokenizer(tmp_path)
    # none is added to the vocabulary
    assert (toy.bos_token, len(toy)) == (None, made["word level"].get_vocab_size())
    write(tmp_path, "gpt2", {"tokenizer.json": made["byte level"].to_str()})
    assert load_tokenizer(tmp_path).eos_token_id == 0
    write(tmp_path, "gpt2", {"special_tokens_map.json": json.dumps({"eos_token": "</s>"})})
    assert load_tokenizer(tmp_path).eos_token == "</s>"
    write(tmp_path, "gpt2", {}, {"eos_token": None, "bos_token": "<s>"})
    assert load_tokenizer(tmp_path).bos_token == "<s>"


@pytest.mark.parametrize(
    "config", [{}, {"add_bos_token": True, "add_eos_token": False}, {"add_bos_token": False}]
)
@pytest.mark.parametrize("around", [{}, {"bos": False}, {"eos": True}], ids=["bos", "none", "both"])
def test_llama_has_the_ids_of_transformers(around, config, tmp_path):
    """A thousand lines, special tokens included; what tokenizer.json puts around a text
    counts, as in transformers.

    Only behind a special token that a text spells out transformers' class departs from
    the file.
    """
    truth = llama_tokenizer.llama(**around)
    folder = llama_tokenizer.save(truth, tmp_path, **config)
    lines = llama_tokenizer.lines(1000)
    assert len(lines) == 1000
    ids = load_tokenizer(folder)(lines)["input_ids"]
    assert ids == [each.ids for each in truth.encode_batch(lines)]
    assert ids == AutoTokenizer.from_pretrained(folder)(lines)["input_ids"]


def bpe_files(tokenizer):
    model = json.loads(tokenizer.to_str())["model"]
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    return {"vocab.json": json.dumps(model["vocab"]), "merges.txt": f"#version: 0.2\n{merges}\n"}


@pytest.mark.parametrize(
    ("family", "config", "before", "after"),
    [
        ("gpt2", None, [], []),
        ("gpt2", {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024}, [], []),
        ("gpt_neo", None, [], []),
        ("gpt_neox", None, [], []),
        ("qwen2", {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"}, [], []),
        (
            "opt",
            {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "</s>"},
            ["</s>"],
            [],
        ),
        ("roberta", None, ["<s>"], ["</s>"]),
        ("roberta", {"tokenizer_class": "RobertaTokenizer"}, ["<s>"], ["</s>"]),
    ],
)
def test_a_vocabulary_with_merges_is_a_tokenizer(made, family, config, before, after, tmp_path):
    truth = made["byte level"]
    tokenizer = load_tokenizer(write(tmp_path, family, bpe_files(truth), config))
    for text in ("Return the sum", "it's a File of x", "naïve 数"):
        names = [*before, *truth.encode(text).tokens, *after]
        assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == names


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("config", "names"),
    [
        (None, ["[CLS]", "return", "the", "sum", "##s", "[UNK]", "[SEP]"]),
        (
            {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
            ["[CLS]", "Return", "the", "[UNK]", "na", "[SEP]"],
        ),
    ],
)
def test_a_list_of_word_pieces_is_a_tokenizer(config, names, end, tmp_path):
    words = [
        "[PAD]",
        "x",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "return",
        "the",
        "sum",
        "##s",
        "Return",
        "na",
    ]
    write(tmp_path, "bert", {"vocab.txt": end.join(words) + end}, config)
    tokenizer = load_tokenizer(tmp_path)
    text = "Return the Sums naïve" if config is None else "Return the Sums na"
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == names
    assert [tokenizer.convert_tokens_to_ids(word) for word in words] == [*range(len(words))]
    assert tokenizer.mask_token_id == 5


def test_a_text_always_becomes_the_same_tokens(made, tmp_path, caplog):
    content = json.loads(made["byte level"].to_str())
    content["model"]["dropout"] = 0.5
    write(tmp_path, "gpt2", {"tokenizer.json": json.dumps(content)})
    tokenizer = load_tokenizer(tmp_path)
    ids = made["byte level"].encode(TEXT[0]).ids
    assert all(tokenizer([TEXT[0]])["input_ids"] == [ids] for _ in range(20))
    assert "leaves out 0.5 of its merges at random" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not valid JSON"),
        ("[]", "holds a list"),
        ("null", "holds a NoneType"),
        ("\0", "is not valid JSON"),
    ],
)
def test_a_tokenizer_file_that_is_no_object_is_named(content, message, tmp_path):
    write(tmp_path, "gpt2", {"tokenizer.json": content})
    with pytest.raises(ValueError, match=rf"does not load: tokenizer\.json {message}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "added_tokens.json", "any.model"])
def test_a_file_that_no_tokenizer_needs_is_refused_before_it_is_read(name, made, tmp_path):
    write(tmp_path, "gpt2", {"tokenizer.json": made["byte level"].to_str()})
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(ValueError, match=rf"does not load: {name} has {1 << 40} bytes, and no"):
        load_tokenizer(tmp_path)


def test_half_a_tokenizer_and_one_that_the_class_does_not_read_are_refused(made, tmp_path):
    files = bpe_files(made["byte level"])
    for name, other in (("vocab.json", "merges.txt"), ("merges.txt", "vocab.json")):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, "gpt2", {name: files[name]})
        with pytest.raises(ValueError, match=f"there is {name}, but no {other} beside it"):
            load_tokenizer(folder)
    for family in ("gpt2", "roberta"):
        write(tmp_path, family, {"vocab.txt": "\n".join([*BERT, *"abcdefghijklm"])})
        with pytest.raises(
            ValueError, match=r"the class of this family, does not read vocab\.txt; say which"
        ):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "spm.model", "x.spm"]
)
def test_sentencepiece_files_are_seen_by_any_name(name, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    write(tmp_path, "xlm-roberta", {name: b"\x0a\x0e\x0a\x05"})
    says = (
        f"{name} is a SentencePiece file, which needs the package sentencepiece: pip install "
        "sentencepiece"
    )
    with pytest.raises(ValueError, match=says):
        load_tokenizer(tmp_path)
    write(tmp_path, "llama", {name: b"IQ== 0\nIg== 1\n"})
    with pytest.raises(
        ValueError,
        match="is a tiktoken file, which needs the package tiktoken: pip install tiktoken",
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "x.spm"])
@pytest.mark.parametrize(
    ("family", "given", "bos"),
    [
        ("llama", {}, {"add_bos_token": True}),
        ("gemma", {"add_bos_token": True}, {"add_bos_token": True}),
        ("mistral", {"add_bos_token": False}, {"add_bos_token": False}),
        ("xlm-roberta", {}, {}),
    ],
)
def test_sentencepiece_files_have_bos_as_their_config_says(
    name, family, given, bos, tmp_path, monkeypatch
):
    """Without the package: what the class of the family is called with."""
    package = types.SimpleNamespace(SentencePieceProcessor=lambda model_file: None)
    monkeypatch.setitem(sys.modules, "sentencepiece", package)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, find=importlib.util.find_spec: (
        package if name == "sentencepiece" else find(name)
    ))  # fmt: skip
    asked, other = [], load_tokenizer(REFERENCE / "gpt2")

    def by_class(folder, vocab_file, **options):
        assert (folder, pathlib.Path(vocab_file).suffix) == (tmp_path, ".model")
        assert pathlib.Path(vocab_file).read_bytes() == b"\x0a\x0e\x0a\x05"
        asked.append(options)
        return other

    monkeypatch.setattr(checkpoint_tokenizer, "_by_class", by_class)
    load_tokenizer(write(tmp_path, family, {name: b"\x0a\x0e\x0a\x05"}, given))
    assert asked == [bos]


def test_every_file_of_a_tokenizer_is_downloaded(tmp_path, monkeypatch):
    files = [
        "tokenizer.model",
        "sentencepiece.bpe.model",
        "spiece.model",
        "x.spm",
        "vocab.txt",
        "merges.txt",
        "tekken.json",
    ]
    fake_hub(monkeypatch, tmp_path, [*files, "model.safetensors", "model.py", "flax_model.msgpack"])
    find("someone/model")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*files, "model.safetensors"])


def test_the_tokenizer_of_another_model_is_told_by_its_size(tmp_path):
    rows = config().vocab_size
    for path in (REFERENCE / "gpt2").iterdir():
        (tmp_path / path.name).symlink_to(path)
    jmat.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    own = json.loads((REFERENCE / "gpt2" / "tokenizer.json").read_text())
    own["model"]["vocab"] |= {f"word{n}": len(own["model"]["vocab"]) + n for n in range(rows)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(own))
    with pytest.raises(
        ValueError, match=rf"ids up to \d+, but the model's embedding has {rows} rows"
    ):
        jmat.load(tmp_path)


def config(**fields):
    return dataclasses.replace(jmat.models.read_config(REFERENCE / "gpt2"), **fields)


def test_a_larger_embedding_or_an_added_token_beyond_it_is_fine(made, tmp_path):
    tokenizer = load_tokenizer(
        write(tmp_path, "gpt2", {"tokenizer.json": made["byte level"].to_str()})
    )
    size = len(tokenizer)
    tokenizer.add_tokens(["<extra>"])
    for rows in (size, size + 100):
        check_tokenizer(tokenizer, config(causal=True, vocab_size=rows), "it")
    check_tokenizer(None, config(causal=True, vocab_size=1), "it")
    masks = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    masks.add_special_tokens(["[CLS]", "[MASK]"])
    write(tmp_path, "bert", {"tokenizer.json": masks.to_str()}, {"mask_token": "[MASK]"})
    loaded = load_tokenizer(tmp_path)
    check_tokenizer(loaded, config(causal=True, vocab_size=2), "it")
    with pytest.raises(ValueError, match="ids up to 3, but the model's embedding has 2 rows"):
        check_tokenizer(loaded, config(causal=False, vocab_size=2), "it")
    masks.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 2)]
    )
    write(tmp_path, "gpt2", {"tokenizer.json": masks.to_str()})
    with pytest.raises(ValueError, match="ids up to 2"):
        check_tokenizer(load_tokenizer(tmp_path), config(causal=True, vocab_size=2), "it")


def test_a_vocabulary_without_a_token_for_unknown_words_reads_what_it_knows(tmp_path):
    chess = Tokenizer(models.WordLevel({"e4": 0, "e5": 1, "Nf3": 2}, unk_token="[UNK]"))
    chess.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = load_tokenizer(write(tmp_path, "gpt2", {"tokenizer.json": chess.to_str()}))
    assert tokenize(["e4 e5 Nf3"], tokenizer, 8, special_tokens=True)[0].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"the tokenizer fails on a text: .*Missing \[UNK\]"):
        tokenize(["e4 c5"], tokenizer, 8, special_tokens=True)


def test_an_exploding_regular_expression_is_refused_when_it_is_loaded(made, tmp_path, capfd):
    whole = json.loads(made["byte level"].to_str())
    pattern = {"Regex": r"(\w+\s?)*$|([\w ,]*)*!!"}
    whole["pre_tokenizer"] = {
        "type": "Split",
        "pattern": pattern,
        "behavior": "Isolated",
        "invert": False,
    }
    write(tmp_path, "gpt2", {"tokenizer.json": json.dumps(whole)})
    with pytest.raises(
        ValueError,
        match=r"the tokenizer in .* does not load: the tokenizer fails on a text: .*retry",
    ):
        load_tokenizer(tmp_path)
    assert capfd.readouterr().err == ""
