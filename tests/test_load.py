"""`jmat.load`: names, folders and hub ids, and what is said where they lead nowhere."""

import importlib
import inspect
import pathlib

import huggingface_hub
import huggingface_hub.errors
import jax.numpy as jnp
import pytest

import jmat
from experiments.pretraining.tokenizers import train_bpe, train_wordpiece
from jmat.checkpoint.load import bundled, find, load_tokenizer
from tests import hf

load_module = importlib.import_module("jmat.checkpoint.load")
TEXT = ["the cat sat on the mat", "a dog ran after the cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = hf.save(hf.make(hf.gpt2("load", vocab_size=300)), tmp_path_factory.mktemp("model"))
    train_bpe(TEXT, 300).save_pretrained(folder)
    return folder


def test_a_folder_loads_by_path_or_string_with_its_tokenizer(folder, monkeypatch):
    for name in (folder, str(folder)):
        model, tokenizer = jmat.load(name)
        assert tokenizer.decode(tokenizer("a cat")["input_ids"]) == "a cat"
        assert model.config.vocab_size == 300
    monkeypatch.setenv("HOME", str(folder.parent))
    assert find(f"~/{folder.name}") == folder


def test_the_dtype_is_that_of_the_parameters(folder):
    model, _ = jmat.load(folder, dtype="bfloat16")
    assert model.blocks[1].attn.q.kernel.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="dtype='int8' is not one of float32, bfloat16, float16"):
        jmat.load(folder, dtype="int8")


def test_a_wordpiece_tokenizer_loads(tmp_path):
    hf.save(hf.make(hf.bert("load", vocab_size=60)), tmp_path)
    train_wordpiece(TEXT, 60).save_pretrained(tmp_path)
    _, tokenizer = jmat.load(tmp_path)
    assert tokenizer.mask_token_id == 4


def test_a_folder_without_tokenizer_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": 3}'])
def test_a_damaged_tokenizer_is_one_sentence(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"the tokenizer in .* does not load: .") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_code_that_comes_with_a_tokenizer_is_not_run(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'run')!r}).touch()\n"
    )
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}'
    )
    assert load_tokenizer(tmp_path).decode([0]) is not None  # tokenizer.json needs no code
    assert not (tmp_path / "run").exists()


def test_bundled_names_come_first(folder, tmp_path, monkeypatch):
    (tmp_path / "gpt2-docs").symlink_to(folder)
    monkeypatch.setattr(load_module, "_BUNDLED", tmp_path)
    assert bundled() == ["gpt2-docs"]
    assert find("gpt2-docs") == tmp_path / "gpt2-docs"
    with pytest.raises(
        FileNotFoundError, match=r"no model 'gpt3': not bundled \(gpt2-docs\), not a local folder"
    ):
        find("gpt3")


@pytest.mark.parametrize("name", ["./none", "/none/such", "~/none", "a/b/c"])
def test_what_can_only_be_a_folder_is_not_sought_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub")
    )
    with pytest.raises(FileNotFoundError, match=f"there is no folder {name}"):
        find(name)


def test_a_file_is_no_model(folder):
    with pytest.raises(ValueError, match="is a file; expected the folder"):
        find(folder / "config.json")


def test_only_the_hub_has_revisions(folder):
    for name in (folder, "gpt2-docs"):
        with pytest.raises(
            ValueError, match="is on this machine, not on the hub: it has no revision 'steps/20'"
        ):
            find(name, revision="steps/20")


def test_a_hub_id_that_is_not_cached_is_one_sentence_offline(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, revision in (("gpt2-none", None), ("someone/model", "main")):
        with pytest.raises(
            FileNotFoundError, match=r"not in the hub's cache, and the hub cannot be reached"
        ) as caught:
            find(name, revision=revision)
        assert "\n" not in str(caught.value)
        assert revision is None or "at revision 'main'" in str(caught.value)
    with pytest.raises(FileNotFoundError, match="the hub says"):
        find("no spaces allowed")


def fake_hub(monkeypatch, root, files):
    """A hub with one model; returns the patterns that are asked for."""
    asked = []

    def snapshot_download(name, *, revision, allow_patterns):
        asked.append((name, revision, *allow_patterns))
        for file in files:
            if any(pathlib.PurePath(file).match(pattern) for pattern in allow_patterns):
                (root / file).touch()
        return str(root)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


@pytest.mark.parametrize(
    ("weights", "downloaded"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (
            ["model-00001-of-00002.safetensors", "pytorch_model.bin"],
            ["model-00001-of-00002.safetensors"],
        ),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (["model.fp16.safetensors", "tf_model.h5", "model.py"], []),
    ],
)
def test_safetensors_are_downloaded_else_a_pickle_and_nothing_else(
    tmp_path, monkeypatch, weights, downloaded
):
    asked = fake_hub(monkeypatch, tmp_path, ["config.json", "tokenizer.json", *weights])
    assert find("someone/model", revision="abc") == tmp_path
    assert {call[:2] for call in asked} == {("someone/model", "abc")}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["config.json", "tokenizer.json", *downloaded]
    )


def test_what_the_hub_refuses_is_one_sentence(monkeypatch):
    def refuse(*_, **__):
        raise huggingface_hub.errors.HFValidationError("first line\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(
        FileNotFoundError, match=r"no model 'gpt2' at revision 'x': .*the hub says: first line$"
    ):
        find("gpt2", revision="x")


def test_load_passes_ignored_fields_on(tmp_path):
    torch_model = hf.make(hf.gpt2("load"))
    torch_model.config.kv_sharing_modes = 1
    hf.save(torch_model, tmp_path)
    with pytest.raises(
        ValueError, match=r"kv_sharing_modes=1 is a field .*ignore_config=\('kv_sharing_modes',\)"
    ):
        jmat.load(tmp_path)
    assert jmat.load(tmp_path, ignore_config=("kv_sharing_modes",))[0].config.layers == 2
    given = [
        "name_or_folder",
        "dtype",
        "revision",
        "ignore_config",
        "shard_parameters",
        "ignore_maps",
    ]
    assert list(inspect.signature(jmat.load).parameters) == given
