"""Checkpoints of every kind load and match transformers, or are refused in one clear
sentence; and back again.
"""

import errno
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

import jmat
from jmat.checkpoint import load_model, parameters, save_model, tensor_files
from tests import hf

CASES = {"gpt2": hf.gpt2("checkpoint"), "bert": hf.bert("checkpoint")}
TOKENS = np.random.default_rng(0).integers(0, 37, (2, 6), dtype=np.int32)


@pytest.fixture(scope="module", params=CASES)
def torch_model(request):
    return hf.make(CASES[request.param])


@pytest.fixture(scope="module")
def gpt2():
    return hf.make(CASES["gpt2"])


@pytest.fixture(scope="module")
def bert():
    return hf.make(CASES["bert"])


def logits(model):
    return jmat.run(model, TOKENS, keep=("logits",))[1]["logits"]


def assert_same_logits(model, torch_model, atol=1e-4):
    with torch.no_grad():
        expected = torch_model(torch.tensor(TOKENS)).logits.float().numpy()
    np.testing.assert_allclose(logits(model), expected, rtol=0, atol=atol)


# --- file formats ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_files_of_every_float_dtype_load(torch_model, dtype, tmp_path):
    hf.rewrite(
        tmp_path, torch_model, lambda t: {k: v.to(getattr(torch, dtype)) for k, v in t.items()}
    )
    model = load_model(tmp_path)
    assert {value.dtype for value in parameters(model).values()} == {jnp.dtype("float32")}
    reference = type(torch_model).from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    assert_same_logits(model, reference)
    halves = load_model(tmp_path, dtype="bfloat16")
    assert {value.dtype for value in parameters(halves).values()} == {jnp.dtype("bfloat16")}


def test_shards_load(torch_model, tmp_path):
    torch_model.save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_logits(load_model(tmp_path), torch_model)


@pytest.mark.parametrize("mapped_bytes", [tensor_files._MAPPED_BYTES, 0])
@pytest.mark.parametrize("kind", ["zip", "legacy", "bfloat16", "shards"])
def test_pytorch_pickles_load(torch_model, kind, mapped_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "_MAPPED_BYTES", mapped_bytes)
    torch_model.config.save_pretrained(tmp_path)
    # A Parameter, a transposed view and a slice of something larger: what training scripts save.
    state = {
        name: torch.nn.Parameter(tensor.clone())
        for name, tensor in torch_model.state_dict().items()
    }
    state = {
        n: t.detach().T.contiguous().T if t.ndim == 2 else torch.stack([t, t])[1]
        for n, t in state.items()
    }
    if kind == "shards":
        names = list(state)
        files = {f"pytorch_model-{i + 1:05}-of-00003.bin": names[i::3] for i in range(3)}
        for file, part in files.items():
            torch.save({name: state[name] for name in part}, tmp_path / file)
        weight_map = {name: file for file, part in files.items() for name in part}
        (tmp_path / "pytorch_model.bin.index.json").write_text(
            json.dumps({"weight_map": weight_map})
        )
    else:
        state = {
            name: tensor.bfloat16() if kind == "bfloat16" else tensor
            for name, tensor in state.items()
        }
        torch.save(
            state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=kind != "legacy"
        )
    assert_same_logits(load_model(tmp_path), torch_model, atol=0.2 if kind == "bfloat16" else 1e-4)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_some_rows_of_a_tensor_are_read_and_compared_alone(gpt2, kind, tmp_path):
    table = gpt2.state_dict()["transformer.wte.weight"]
    tensors = {
        "a": table.clone(),
        "same": table.clone(),
        "other": table.clone(),
        "scalar": torch.tensor(2.0),
    }
    tensors["other"][36, 15] += 1
    if kind == "bin":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with tensor_files.open_weights(tmp_path) as files:
        for rows in (slice(None), slice(3, 9), slice(30, 60)):
            np.testing.assert_array_equal(files.read("a", rows), table.numpy()[rows])
        assert files.read("scalar") == 2
        assert files.equal("a", "same", rows=5)
        assert not files.equal("a", "other", rows=5)
        assert not files.equal("a", "scalar")


class Malicious:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.parametrize("new", [True, False])
def test_a_pickle_runs_no_code(gpt2, tmp_path, new):
    gpt2.config.save_pretrained(tmp_path)
    target = tmp_path / "pytorch_model.bin"
    torch.save(
        {"wte.weight": Malicious(tmp_path / "run")}, target, _use_new_zipfile_serialization=new
    )
    with pytest.raises(
        ValueError, match=r"holds more than tensors .*it was not loaded, and no code of it was run"
    ):
        load_model(tmp_path)
    assert not (tmp_path / "run").exists()
    torch.load(target, weights_only=False)  # it would have run
    assert (tmp_path / "run").exists()


def test_a_pickle_of_something_else_is_refused(gpt2, tmp_path):
    gpt2.config.save_pretrained(tmp_path)
    odd = {"a": torch.eye(2).to_sparse()}, {"a": torch.zeros(1, device="meta")}, {3: torch.zeros(1)}
    for content in ({"state_dict": {}}, [torch.zeros(1)], torch.zeros(1), *odd):
        torch.save(content, tmp_path / "pytorch_model.bin")
        with pytest.raises(ValueError, match="is not a table of named dense tensors"):
            load_model(tmp_path)


def test_without_torch_a_pickle_is_one_sentence_and_safetensors_load(gpt2, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    gpt2.config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(
        ValueError, match=r"install torch, or, where torch is, .*save_pretrained"
    ) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "pytorch_model.bin").unlink()


# --- key styles -----------------------------------------------------------------------------------


def without_prefix(tensors):
    return {
        name.removeprefix("transformer.").removeprefix("bert."): tensor
        for name, tensor in tensors.items()
    }


def with_old_norms(tensors):
    def old(name):
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        )

    return {old(name): tensor for name, tensor in tensors.items()}


def with_buffers(tensors):
    """What older versions of transformers stored besides the weights."""
    if "transformer.wte.weight" not in tensors:
        return tensors | {"bert.embeddings.position_ids": torch.arange(16)[None]}
    buffers = {
        f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8)
        for i in range(2)
    }
    return (
        tensors
        | buffers
        | {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    )


def with_head_stored_too(tensors):
    if "transformer.wte.weight" in tensors:
        return tensors | {"lm_head.weight": tensors["transformer.wte.weight"]}
    table, bias = tensors["bert.embeddings.word_embeddings.weight"], tensors["cls.predictions.bias"]
    return tensors | {"cls.predictions.decoder.weight": table, "cls.predictions.decoder.bias": bias}


@pytest.mark.parametrize(
    "change",
    [
        without_prefix,
        with_old_norms,
        with_buffers,
        with_head_stored_too,
        lambda t: without_prefix(with_buffers(t)),
    ],
)
def test_every_style_of_keys_loads(torch_model, change, tmp_path):
    model = load_model(hf.rewrite(tmp_path, torch_model, change))
    assert model.config.tied_head
    assert_same_logits(model, torch_model)


def test_an_unknown_field_can_be_ignored(gpt2, tmp_path):
    hf.rewrite(tmp_path, gpt2, harmless=3)
    assert_same_logits(load_model(tmp_path, ignore_config=("harmless",)), gpt2)


def test_a_head_that_differs_from_the_embedding_is_not_tied(torch_model, tmp_path):
    def untie(tensors):
        tensors = with_head_stored_too(tensors)
        name = "lm_head.weight" if "lm_head.weight" in tensors else "cls.predictions.decoder.weight"
        return tensors | {name: tensors[name] + 1}

    model = load_model(hf.rewrite(tmp_path, torch_model, untie))
    assert not model.config.tied_head
    assert_same_logits(
        model, type(torch_model).from_pretrained(tmp_path, attn_implementation="eager")
    )
    save_model(tmp_path / "again", model)
    np.testing.assert_array_equal(logits(load_model(tmp_path / "again")), logits(model))


@pytest.mark.parametrize(
    ("name", "has_head"),
    [
        ("GPT2Model", True),
        ("GPT2LMHeadModel", True),
        ("GPT2DoubleHeadsModel", True),
        ("GPT2ForSequenceClassification", True),
        ("GPT2ForTokenClassification", True),
        ("GPT2ForQuestionAnswering", True),
        ("BertModel", False),
        ("BertForMaskedLM", True),
        ("BertLMHeadModel", True),
        ("BertForPreTraining", True),
        ("BertForNextSentencePrediction", False),
        ("BertForSequenceClassification", False),
        ("BertForTokenClassification", False),
        ("BertForQuestionAnswering", False),
        ("BertForMultipleChoice", False),
    ],
)
def test_what_each_class_of_transformers_saves_loads(name, has_head, tmp_path):
    case = CASES["gpt2" if name.startswith("GPT2") else "bert"]
    extra = {"pad_token_id": 0, "is_decoder": name == "BertLMHeadModel"}
    torch_model = hf.make(case._replace(model=name, fields={**case.fields, **extra}))
    model = load_model(hf.save(torch_model, tmp_path))
    assert (model.head is not None) is has_head
    x, _ = jmat.run(model, TOKENS)
    with torch.no_grad():
        expected = torch_model.base_model(torch.tensor(TOKENS))[0].numpy()
    np.testing.assert_allclose(
        x if model.final_norm is None else model.final_norm(x), expected, rtol=0, atol=1e-4
    )


# --- saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", CASES)
def test_a_saved_model_loads_in_transformers_and_here(family, tied, tmp_path):
    case = CASES[family]
    torch_model = hf.make(case._replace(fields={**case.fields, "tie_word_embeddings": tied}))
    model = load_model(hf.save(torch_model, tmp_path / "theirs"))
    save_model(tmp_path / "ours", model)
    again, about = type(torch_model).from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    # transformers keeps a second output bias for an untied BERT, and never reads it.
    assert about["missing_keys"] <= {"cls.predictions.bias"}
    assert not about["unexpected_keys"]
    assert_same_logits(model, again)
    np.testing.assert_array_equal(logits(load_model(tmp_path / "ours")), logits(model))
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_saved_narrow_says_so(gpt2, dtype, tmp_path):
    save_model(tmp_path / "ours", load_model(hf.save(gpt2, tmp_path)), dtype=dtype)
    again = type(gpt2).from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert again.dtype == getattr(torch, dtype)
    assert_same_logits(load_model(tmp_path / "ours"), again.float())


def test_a_model_without_head_is_saved_without(tmp_path):
    torch_model = hf.make(hf.bert("headless", model="BertModel"))
    model = load_model(hf.save(torch_model, tmp_path))
    save_model(tmp_path / "ours", model)
    assert load_model(tmp_path / "ours").head is None
    again = transformers.BertModel.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.no_grad():
        expected = again(torch.tensor(TOKENS))[0].numpy()
    np.testing.assert_allclose(jmat.run(model, TOKENS)[0], expected, rtol=0, atol=1e-5)


def test_a_full_disk_leaves_what_was_there(gpt2, tmp_path, monkeypatch):
    model = load_model(hf.save(gpt2, tmp_path))
    before = (tmp_path / "model.safetensors").read_bytes()

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("jmat.checkpoint.model.write_tensors", fail)
    with pytest.raises(OSError, match=r"cannot write .*model.safetensors: the disk is full"):
        save_model(tmp_path, model)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("*model*")) == ["model.safetensors"]


# --- memory ---------------------------------------------------------------------------------------

MEASURE = """
import pathlib, sys, jax, numpy
import jax.numpy as jnp
from jmat.checkpoint import load_model, parameters

def peak():
    # Not resource.getrusage: a child's ru_maxrss begins at its parent's.
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

if sys.argv[2] == "bin":
    import torch
jnp.asarray(numpy.ones(3)).block_until_ready()
before = peak()
model = jax.block_until_ready(load_model(pathlib.Path(sys.argv[1])))
print((peak() - before) / sum(value.nbytes for value in parameters(model).values()))
"""


@pytest.mark.parametrize("kind", ["safetensors", "tied", "bin"])
def test_loading_peaks_at_little_more_than_the_weights(kind):
    config = transformers.GPT2Config(n_layer=6)  # 328 MB, half of it the embedding
    with torch.device("meta"):
        shapes = {
            name: value.shape
            for name, value in transformers.GPT2LMHeadModel(config).state_dict().items()
        }
    tensors = {
        name: torch.full(shape, 0.5) for name, shape in shapes.items() if name != "lm_head.weight"
    }
    if kind == "tied":
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(pathlib.Path(jmat.__file__).parents[1]),
    }
    with tempfile.TemporaryDirectory() as folder:  # not pytest's, which stay
        config.save_pretrained(folder)
        if kind == "bin":
            torch.save(tensors, f"{folder}/pytorch_model.bin")
        else:
            safetensors.torch.save_file(tensors, f"{folder}/model.safetensors")
        command = [sys.executable, "-c", MEASURE, folder, kind]
        child = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
    assert child.returncode == 0, child.stderr
    assert float(child.stdout) < 1.3
