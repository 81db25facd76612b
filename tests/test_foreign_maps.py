"""Lenses and maps of other libraries: files made by torch load with the logits that
torch computes from them, ours are read by torch, and maps of another model are refused.
"""

import json
import pickle

import huggingface_hub
import huggingface_hub.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jmat
from jmat.maps.compact import Diagonal, Hidden, LowRank, quantised
from jmat.maps.files import MapsInfo
from jmat.maps.lens_files import unembedding_hash
from jmat.maps.loading import read_any
from tests import hf

D, L = 64, 4  # of the reference model


def normal(*shape, scale=0.2, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator) * scale


@pytest.fixture(scope="module")
def streams(gpt2, gpt2_examples):
    """h_0 .. h_L at some tokens, as jmat computes them."""
    acts = jmat.capture(gpt2, gpt2_examples.eval, jmat.streams(gpt2))
    return [np.asarray(acts[site])[:50] for site in jmat.streams(gpt2)]


def head(gpt2, x):
    """Logits of a final stream: GPT-2's final norm and unembedding, in torch."""
    norm, table = gpt2.final_norm, np.array(gpt2.embed.tokens.table[...])
    scale, bias = (torch.from_numpy(np.array(each[...])) for each in (norm.scale, norm.bias))
    x = torch.nn.functional.layer_norm(x, (D,), scale, bias, gpt2.config.norm_eps)
    return (x @ torch.from_numpy(table).T).numpy()


def logits(gpt2, maps, name, streams):
    """Logits of a stream through a map, by jmat."""
    return np.asarray(jmat.logits(gpt2, maps[name](streams[int(name.split(".")[1])])))


def saved_jacobians(path, **changes):
    J = {l: torch.eye(D) + normal(D, D, seed=l) for l in range(L - 1)}
    content = {
        "J": {l: each.half() for l, each in J.items()},
        "n_prompts": 7,
        "source_layers": sorted(J),
        "d_model": D,
    }
    torch.save(content | changes, path)
    return content["J"]


def saved_tuned(folder, gpt2, bias=True, **changes):
    layers = [torch.nn.Linear(D, D, bias=bias) for _ in range(L)]
    folder.mkdir(exist_ok=True)
    torch.save(torch.nn.ModuleList(layers).state_dict(), folder / "params.pt")
    table = torch.from_numpy(np.array(gpt2.embed.tokens.table[...]))
    about = {
        "base_model_name_or_path": "tiny",
        "d_model": D,
        "num_hidden_layers": L,
        "bias": bias,
        "base_model_revision": None,
        "unembed_hash": printed_hash(table),
        "lens_type": "linear_tuned_lens",
    }
    (folder / "config.json").write_text(json.dumps(about | changes))
    return layers


def printed_hash(table):
    """The hash of tuned-lens 0.2.0."""
    import hashlib

    return hashlib.sha256(str.encode(np.array_str(table.numpy(), precision=1))).hexdigest()


# --- read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["a file", "a folder", "a folder with others"])
def test_a_jacobian_lens_predicts_what_torch_does(gpt2, streams, tmp_path, given):
    J = saved_jacobians(tmp_path / "lens.pt")
    if given == "a folder with others":
        (tmp_path / "another.pt").touch()
    maps = jmat.load_maps(tmp_path / "lens.pt" if given == "a file" else tmp_path, model=gpt2)
    assert list(maps) == [f"jacobian.{l + 1}.{L}" for l in range(L - 1)]
    # n counts tokens, and dtype is the model's
    assert (maps.info.prompts, maps.info.n, maps.info.dtype) == (7, 0, "float32")
    for l in range(L - 1):
        h = torch.from_numpy(streams[l + 1].copy())  # the output of block l
        expected = head(gpt2, h @ J[l].float().T)
        found = logits(gpt2, maps, f"jacobian.{l + 1}.{L}", streams)
        np.testing.assert_allclose(found, expected, atol=2e-4)
        assert np.abs(found - head(gpt2, torch.from_numpy(streams[l].copy()))).max() > 0.1


@pytest.mark.parametrize("place", ["metadata", "top"])
def test_a_jacobian_lens_to_another_layer_keeps_it(gpt2, tmp_path, place):
    path = tmp_path / "x.pt"
    J = {0: torch.eye(D)}
    target = {"metadata": {"metadata": {"target_layer": 1}}, "top": {"target_layer": 1}}[place]
    saved_jacobians(path, J=J, **target)
    assert list(jmat.load_maps(path, model=gpt2)) == ["jacobian.1.2"]


@pytest.mark.parametrize("bias", [True, False])
def test_a_tuned_lens_predicts_what_torch_does(gpt2, streams, tmp_path, bias):
    layers = saved_tuned(tmp_path, gpt2, bias)
    for source in (tmp_path, tmp_path / "params.pt"):
        maps = jmat.load_maps(source, model=gpt2)
        assert list(maps) == [f"tuned.{l}.{L}" for l in range(L)]
    assert maps.info.model == "tiny"
    for l in range(L):
        h = torch.from_numpy(streams[l].copy())  # the input of block l
        with torch.no_grad():
            expected = head(gpt2, h + layers[l](h))
        np.testing.assert_allclose(
            logits(gpt2, maps, f"tuned.{l}.{L}", streams), expected, atol=2e-4
        )


@pytest.mark.parametrize("write", [torch.save, lambda x, path: path.write_bytes(pickle.dumps(x))])
def test_shortcuts_of_the_paper_are_applied_from_the_left(streams, tmp_path, write):
    M, coef, intercept = normal(D, D), normal(D, D, seed=1), normal(D)
    write(M, tmp_path / "1_4.pickle")
    write([coef, intercept], tmp_path / "0_10.pickle")
    (tmp_path / "readme.txt").touch()
    maps = jmat.load_maps(tmp_path)
    assert list(maps) == ["affine.0.10", "mat.1.4"]
    x = torch.from_numpy(streams[1].copy())
    expected = (M.double() @ x.double()[..., None])[..., 0]
    np.testing.assert_allclose(maps["mat.1.4"](streams[1]), expected, atol=1e-4)
    expected = (coef.double() @ x.double()[..., None])[..., 0] + intercept
    np.testing.assert_allclose(maps["affine.0.10"](streams[1]), expected, atol=1e-4)
    assert list(jmat.load_maps(tmp_path / "1_4.pickle")) == ["mat.1.4"]
    write([coef, intercept], tmp_path / "1_4.pkl")  # a map of another kind
    assert list(jmat.load_maps(tmp_path)) == ["affine.0.10", "mat.1.4", "affine.1.4"]


@pytest.mark.parametrize("kind", ["tensors", "arrays"])
def test_stand_ins_of_nbl_replace_norm_and_attention(gpt2, gpt2_examples, tmp_path, kind):
    W, b = normal(D, D).double(), normal(D, 1).double()
    pair = [W, b] if kind == "tensors" else [W.numpy(), b.numpy()]
    (tmp_path / "xlayer_2_weights.pkl").write_bytes(pickle.dumps(pair))
    (tmp_path / "similarity_scores.pkl").write_bytes(b"not read")
    maps = jmat.load_maps(tmp_path, model=gpt2)
    assert list(maps) == ["ln_1.2", "attn.2"]
    sites = {"block.2.ln_1": maps["ln_1.2"], "block.2.attn": maps["attn.2"]}
    keep = ["block.1", "block.2.mid"]
    acts = jmat.capture(gpt2, gpt2_examples.eval, keep, sites=sites)
    h = np.asarray(acts["block.1"], np.float64)
    expected = h + h @ W.numpy().T + b.numpy()[:, 0]
    np.testing.assert_allclose(acts["block.2.mid"], expected, atol=1e-4)


# --- written --------------------------------------------------------------------------------------


def test_a_jacobian_lens_is_read_by_torch(gpt2, tmp_path):
    W = {i: np.asarray(normal(D, D, seed=i)) for i in range(1, L)}
    maps = {f"mat.{i}.{L}": jmat.Linear(W[i]) for i in reversed(W)}
    info = MapsInfo("tiny", prompts=9)
    jmat.save_maps(tmp_path / "out", maps, model=gpt2, info=info, format="jacobian-lens")
    content = torch.load(tmp_path / "out" / "lens.pt", weights_only=True)
    assert content["source_layers"] == [0, 1, 2]
    assert (content["n_prompts"], content["d_model"]) == (9, D)
    for i in W:
        np.testing.assert_array_equal(content["J"][i - 1].numpy(), W[i].T.astype(np.float16))
    loaded = jmat.load_maps(tmp_path / "out", model=gpt2)
    assert list(loaded) == [f"jacobian.{i}.{L}" for i in W]
    np.testing.assert_array_equal(loaded[f"jacobian.2.{L}"].W, W[2].astype(np.float16))
    jmat.save_maps(tmp_path / "ours", loaded, info=loaded.info)
    assert jmat.load_maps(tmp_path / "ours").info.prompts == 9
    # n counts tokens, which a lens does not say
    jmat.save_maps(tmp_path / "out", maps, model=gpt2, n=9, format="jacobian-lens")
    assert torch.load(tmp_path / "out" / "lens.pt", weights_only=True)["n_prompts"] == 0


def test_a_folder_with_two_files_of_maps_does_not_say_which(gpt2, tmp_path):
    maps = {f"mat.2.{L}": jmat.Linear(np.asarray(normal(D, D)))}
    jmat.save_maps(tmp_path, maps, model=gpt2)
    jmat.save_maps(tmp_path, maps, model=gpt2, format="jacobian-lens")
    with pytest.raises(ValueError, match="holds two files of maps: name one of them"):
        jmat.load_maps(tmp_path, model=gpt2)
    assert list(jmat.load_maps(tmp_path / "maps.json", model=gpt2)) == list(maps)
    assert list(jmat.load_maps(tmp_path / "lens.pt", model=gpt2)) == [f"jacobian.2.{L}"]


def test_a_tuned_lens_is_read_by_torch(gpt2, streams, tmp_path):
    W, bias = np.asarray(normal(D, D)), np.asarray(normal(D))
    maps = {
        f"id.0.{L}": jmat.Identity(),
        f"rank:2.1.{L}": LowRank(W[:, :2], W[:2], bias),
        f"affine+int8.2.{L}": quantised(jmat.Linear(jnp.asarray(W), jnp.asarray(bias))),
        f"diag.3.{L}": Diagonal(bias),
    }
    jmat.save_maps(tmp_path, maps, model=gpt2, format="tuned-lens")
    content = torch.load(tmp_path / "params.pt", weights_only=True)
    layers = torch.nn.ModuleList([torch.nn.Linear(D, D) for _ in range(L)])
    layers.load_state_dict(content)
    loaded = jmat.load_maps(tmp_path, model=gpt2)
    for l, name in enumerate(maps):
        h = torch.from_numpy(streams[l].copy())
        expected = np.asarray(maps[name](streams[l]))
        with torch.no_grad():
            np.testing.assert_allclose((h + layers[l](h)).numpy(), expected, atol=1e-4)
        np.testing.assert_allclose(loaded[f"tuned.{l}.{L}"](streams[l]), expected, atol=1e-4)
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["unembed_hash"] == printed_hash(
        torch.from_numpy(np.array(gpt2.embed.tokens.table))
    )


def test_a_large_bias_leaves_the_digits_of_a_lens(gpt2, tmp_path, monkeypatch):
    A, B = np.asarray(normal(D, 2)), np.asarray(normal(2, D, seed=1))
    large = np.full(D, 1e7, np.float32)
    low, precisions, call = LowRank(A, B, large), [], LowRank.__call__

    def watched(self, x):
        precisions.append(jax.config.jax_default_matmul_precision)
        return call(self, x)

    mean = jmat.Constant(large)
    maps = {f"rank:2.{l}.{L}": low for l in range(L - 1)} | {f"mean.{L - 1}.{L}": mean}
    monkeypatch.setattr(LowRank, "__call__", watched)
    jmat.save_maps(tmp_path, maps, model=gpt2, format="tuned-lens")
    assert "highest" in precisions
    loaded = jmat.load_maps(tmp_path, model=gpt2)
    np.testing.assert_allclose(loaded[f"tuned.0.{L}"].W, A @ B, atol=1e-6)
    np.testing.assert_array_equal(loaded[f"tuned.{L - 1}.{L}"].W, np.zeros((D, D)))
    for l in range(L):
        np.testing.assert_array_equal(loaded[f"tuned.{l}.{L}"].bias, large)


# A model's config can have a width and depth by the same names.
BART = {"model_type": "bart", "d_model": D, "num_hidden_layers": L}


@pytest.mark.parametrize("content", [json.dumps({"model_type": "gpt2"}), json.dumps(BART), "{"])
def test_a_tuned_lens_does_not_replace_the_config_of_a_model(content, gpt2, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"is not the config of a tuned lens.*a folder of its own"):
        jmat.save_maps(tmp_path, ALL, model=gpt2, format="tuned-lens")
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == content


def test_a_tuned_lens_replaces_a_lens(gpt2, tmp_path):
    saved_tuned(tmp_path, gpt2)
    for _ in range(2):  # theirs, then ours
        jmat.save_maps(tmp_path, ALL, model=gpt2, format="tuned-lens")
        np.testing.assert_array_equal(jmat.load_maps(tmp_path)[f"tuned.0.{L}"].W, LINEAR.W)


def test_the_hash_is_that_of_the_unembedding(gpt2):
    untied = hf.gpt2("untied", tie_word_embeddings=False)
    case, other = hf.make(untied), hf.ours(untied)
    assert unembedding_hash(other) == printed_hash(case.lm_head.weight.detach())
    with np.printoptions(precision=3, threshold=5, linewidth=200):
        assert unembedding_hash(other) == printed_hash_as_usual(case.lm_head.weight.detach())
    assert unembedding_hash(other) != unembedding_hash(gpt2)


def printed_hash_as_usual(table):
    with np.printoptions(threshold=1000, linewidth=75):
        return printed_hash(table)


# --- refused --------------------------------------------------------------------------------------


def wrong_lens(**changes):
    return lambda folder, gpt2: saved_jacobians(folder / "lens.pt", **changes)


def wrong_tuned(**changes):
    return lambda folder, gpt2: saved_tuned(folder, gpt2, **changes)


def pickled(name, content):
    return lambda folder, gpt2: (folder / name).write_bytes(pickle.dumps(content))


def without_params(folder, gpt2):
    saved_tuned(folder, gpt2)
    torch.save({"0.weight": torch.eye(D)}, folder / "params.pt")


def two_lenses(folder, gpt2):
    for name in ("a.pt", "b.pt"):
        saved_jacobians(folder / name)


def two_pickles(first, second):
    def write(folder, gpt2):
        for name in (first, second):
            (folder / name).write_bytes(pickle.dumps(torch.eye(D)))

    return write


def two_of_nbl(folder, gpt2):
    for name in ("xlayer_1_weights.pkl", "xlayer_1_weights.pickle"):
        (folder / name).write_bytes(pickle.dumps([torch.eye(D), torch.ones(D)]))


MISFITS = {
    "a narrow lens": (wrong_lens(J={0: torch.eye(3)}), r"J\[0\] in .*lens.pt is 3 wide; this model needs 64"),
    "a deep lens": (wrong_lens(J={L - 1: torch.eye(D)}), "from the output of block '3' to that of block 3; this model has the blocks 0 .. 3"),
    "a lens of a name": (wrong_lens(J={"x": torch.eye(D)}), "from the output of block 'x'"),
    "a lens to nowhere": (wrong_lens(metadata={"target_layer": L}), "leads to a layer that this model of 4 blocks does not have"),
    "an oblong lens": (wrong_lens(J={0: torch.zeros(D, 2)}), r"a tensor \[64, 2\]; expected a square matrix"),
    "a lens of text": (wrong_lens(J={0: "x"}), "is str; expected a square matrix"),
    "a lens of nothing": (wrong_lens(J={}), "has no table of layers"),
    "a lens that is none": (wrong_lens(J={0: torch.full((D, D), torch.nan)}), "holds NaN or infinity"),
    "two lenses": (two_lenses, "holds 2 .pt files: name one of them, a.pt say"),
    "something else of torch": (lambda folder, gpt2: torch.save({"x": torch.eye(D)}, folder / "a.pt"), "holds no maps that jmat reads"),
    "a wide tuned lens": (wrong_tuned(d_model=D + 1), "of 4 blocks and width 65; this model has 4 and 64"),
    "a deep tuned lens": (wrong_tuned(num_hidden_layers=L + 1), "of 5 blocks and width 64; this model has 4 and 64"),
    "a tuned lens of another model": (wrong_tuned(unembed_hash="0" * 64), "is for tiny, with another unembedding than this model's"),
    "a tuned lens of another kind": (wrong_tuned(lens_type="mlp"), "not the config of a linear tuned lens"),
    "a tuned lens of no width": (wrong_tuned(d_model="64"), "not the config of a linear tuned lens"),
    "a tuned lens without layers": (without_params, "does not hold the weight and bias of 4 layers"),
    "a shortcut backwards": (pickled("4_1.pickle", torch.eye(D)), "leads from layer 4 to 1"),
    "a shortcut too far": (pickled("1_5.pickle", torch.eye(D)), "from layer 1 to 5; expected a later layer among 0 .. 4"),
    "a shortcut of two files": (two_pickles("1_4.pickle", "1_4.pkl"), "1_4.pkl and another file beside it hold the map 'mat.1.4'"),
    "a shortcut of two numbers": (two_pickles("1_4.pickle", "01_4.pickle"), "another file beside it hold the map 'mat.1.4'"),
    "attention of two files": (two_of_nbl, "another file beside it hold the map 'attn.1'"),
    "a lens of two maps": (wrong_lens(J={0: torch.eye(D), "0": torch.eye(D)}), "has two maps from the output of block 0"),
    "a narrow shortcut": (pickled("1_4.pickle", torch.eye(3)), "is 3 wide; this model needs 64"),
    "a shortcut of text": (pickled("1_4.pickle", "x"), "the map in .* is str; expected a square matrix"),
    "a short intercept": (pickled("1_4.pickle", [torch.eye(D), torch.ones(3)]), r"b in .* is a tensor \[3\]; expected 64 numbers"),
    "attention of block 4": (pickled("xlayer_4_weights.pkl", [torch.eye(D), torch.ones(D)]), "is for block 4; this model has the blocks 0 .. 3"),
    "attention of three": (pickled("xlayer_0_weights.pkl", [1, 2, 3]), "holds a list; expected a list of W and b"),
    "a deep list": (lambda folder, gpt2: (folder / "a.pt").write_bytes(b"\x80\x02" + b"]" * 9000 + b"a" * 8999 + b"."), "holds no maps that jmat reads"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_the_model_is_refused(name, gpt2, tmp_path):
    make, message = MISFITS[name]
    make(tmp_path, gpt2)
    with pytest.raises(ValueError, match=message) as error:
        jmat.load_maps(tmp_path, model=gpt2)
    assert "\n" not in str(error.value)


def test_files_without_a_model(tmp_path, gpt2, bert):
    saved_jacobians(tmp_path / "lens.pt")
    with pytest.raises(
        ValueError, match="does not say how many blocks its model has: give the model"
    ):
        jmat.load_maps(tmp_path)
    saved_tuned(tmp_path / "tuned", gpt2, unembed_hash="0" * 64)
    assert len(jmat.load_maps(tmp_path / "tuned")) == L
    path = tmp_path / "xlayer_0_weights.pkl"
    width = bert.config.width
    path.write_bytes(pickle.dumps([torch.eye(width), torch.ones(width)]))
    with pytest.raises(ValueError, match="this model has no norm there that only attention reads"):
        jmat.load_maps(path, model=bert)
    (tmp_path / "tuned" / "config.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"config\.json not found: expected it beside params.pt"
    ):
        jmat.load_maps(tmp_path / "tuned")
    (tmp_path / "tuned" / "params.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"maps\.json not found"):
        jmat.load_maps(tmp_path / "tuned")
    with pytest.raises(FileNotFoundError, match=r"maps\.json not found"):
        read_any(tmp_path / "nowhere", gpt2)


LINEAR = jmat.Linear(np.eye(D, dtype=np.float32))
BIASED = jmat.Linear(np.eye(D, dtype=np.float32), np.ones(D, np.float32))
CURVED = Hidden(LINEAR.W, LINEAR.W[:, :2], BIASED.bias[:2], LINEAR.W[:2], BIASED.bias)
NARROW = LowRank(LINEAR.W[:10, :2], LINEAR.W[:2, :10], BIASED.bias[:10])
ALL = {f"mat.{l}.{L}": LINEAR for l in range(L)}


@pytest.mark.parametrize(
    ("form", "maps", "message"),
    [
        ("jacobian-lens", {"mat.0.4": LINEAR}, "'mat.0.4' leads from the embedding"),
        ("jacobian-lens", {"mat.1.3": LINEAR}, "'mat.1.3' does not lead to layer 4, the last"),
        ("jacobian-lens", {"attn.1": LINEAR}, "'attn.1' does not lead to layer 4"),
        ("jacobian-lens", {"mat.1.4": BIASED}, "'mat.1.4' has a bias"),
        ("jacobian-lens", {"mat.1.4": jmat.Linear(LINEAR.W * 1e6)}, "has weights above 65504"),
        ("jacobian-lens", {"mat.1.4": LINEAR, "id.1.4": LINEAR}, "'mat.1.4' and 'id.1.4' lead from one layer"),
        ("jacobian-lens", {"mat.1.4": jmat.Linear(LINEAR.W[:2, :2])}, r"is \[2, 2\]; this model needs \[64, 64\]"),
        ("jacobian-lens", {"rank:2.1.4": NARROW}, r"is \[10, 10\]; this model needs \[64, 64\]"),
        ("tuned-lens", {**ALL, "mat.2.4": NARROW}, r"'mat.2.4' is \[10, 10\]; this model needs"),
        ("tuned-lens", {**ALL, "mat.2.4": jmat.Constant(NARROW.bias)}, r"'mat.2.4' is \[10\]"),
        ("tuned-lens", {**ALL, "2.4": LINEAR}, "'2.4' does not lead to layer 4, the last, by a name such as 'mat.0.4'"),
        ("tuned-lens", {**ALL, "mat.2.4": CURVED}, "'mat.2.4' has a hidden layer"),
        ("tuned-lens", {name: ALL[name] for name in list(ALL)[1::2]}, "there is none from layer 0, 2"),
        ("safetensors", ALL, "format='safetensors': expected one of jmat, tuned-lens, jacobian-lens"),
    ],
)  # fmt: skip
def test_what_a_lens_cannot_hold_is_not_saved(form, maps, message, gpt2, tmp_path):
    with pytest.raises(ValueError, match=message):
        jmat.save_maps(tmp_path / "out", maps, model=gpt2, format=form)
    assert not (tmp_path / "out").exists()


def test_a_lens_needs_the_model(tmp_path, gpt2):
    jmat.save_maps(tmp_path, ALL, model=gpt2)
    info = jmat.load_maps(tmp_path).info
    with pytest.raises(ValueError, match="give model="):
        jmat.save_maps(tmp_path, ALL, info=info, format="tuned-lens")


COMMIT = "https://huggingface.co/someone/maps/commit/1"
# --- the hub --------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path, gpt2):
    """A hub with one repository: a lens at its top, a tuned lens in a folder."""
    saved_jacobians(tmp_path / "lens.pt")
    (tmp_path / "inside").mkdir()
    saved_tuned(tmp_path / "inside" / "tiny", gpt2)
    asked = []

    def snapshot_download(repo, **options):
        asked.append((repo, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_maps_are_loaded_from_the_hub(hub, gpt2, monkeypatch):
    assert len(jmat.load_maps("someone/lens", model=gpt2, revision="abc")) == L - 1
    assert len(jmat.load_maps("spaces/someone/lens/inside/tiny", model=gpt2)) == L
    assert len(jmat.load_maps("someone/lens/lens.pt", model=gpt2)) == L - 1
    with pytest.raises(
        FileNotFoundError, match="and no other of someone/lens is in the hub's cache: che"
    ):
        jmat.load_maps("someone/lens/other", model=gpt2)
    assert [repo for repo, _ in hub] == ["someone/lens"] * 4
    first, second, third, _ = (options for _, options in hub)
    assert first["revision"] == "abc"
    assert "repo_type" not in first
    assert {"maps.json", "params.pt", "*.pt"} <= set(first["allow_patterns"])
    assert first["ignore_patterns"] == ["*/*"]
    assert second["repo_type"] == "space"
    assert "inside/tiny/params.pt" in second["allow_patterns"]
    assert second["ignore_patterns"] == ["inside/tiny/*/*"]
    assert "lens.pt" in third["allow_patterns"]


def test_what_is_on_this_machine_is_not_asked_for(hub, gpt2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(jmat.load_maps("inside/tiny", model=gpt2)) == L
    with pytest.raises(ValueError, match="is on this machine, not on the hub: it has no revision"):
        jmat.load_maps("inside/tiny", model=gpt2, revision="abc")
    for path in ("./nowhere", "/nowhere/at/all", tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"maps\.json not found"):
            jmat.load_maps(path)
    assert not hub


def test_without_a_network_one_sentence_says_so(gpt2):
    message = "no maps 'someone/lens': not a file or folder here, not in the hub's cache"
    with pytest.raises(FileNotFoundError, match=message):
        jmat.load_maps("someone/lens")
    with pytest.raises(ConnectionError, match="cannot push maps to 'someone/lens'"):
        jmat.push_maps("someone/lens", ALL, model=gpt2)
    with pytest.raises(ValueError, match="repo='lens': expected the name of a repository"):
        jmat.push_maps("lens", ALL, model=gpt2)
    with pytest.raises(ValueError, match="give model="):
        jmat.push_maps("someone/lens", ALL)


def test_offline_the_hub_is_not_said_to_lack_a_file(gpt2, tmp_path, monkeypatch):
    """Other files of the repository are in the hub's cache, and the hub is not asked."""
    store = tmp_path / "models--someone--lens"
    (store / "refs").mkdir(parents=True)
    (store / "refs" / "main").write_text("0" * 40)
    (store / "snapshots" / ("0" * 40)).mkdir(parents=True)
    saved_jacobians(store / "snapshots" / ("0" * 40) / "lens.pt")
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda repo, **options: real(repo, cache_dir=tmp_path, **options),
    )
    assert len(jmat.load_maps("someone/lens", model=gpt2)) == L - 1
    message = r"no other\.pt of someone/lens is in the hub's cache: .* the hub can be reached"
    with pytest.raises(FileNotFoundError, match=message):
        jmat.load_maps("someone/lens/other.pt", model=gpt2)


def test_pushed_maps_are_those_that_are_saved(gpt2, tmp_path, monkeypatch):
    sent = {}
    configs = {}  # of repositories on the hub

    class Hub:
        def create_repo(self, repo, *, private, exist_ok):
            sent["made"] = (repo, private, exist_ok)

        def upload_folder(self, *, repo_id, folder_path, revision, commit_message):
            sent["maps"] = jmat.load_maps(folder_path, model=gpt2)
            sent["where"] = (repo_id, revision)
            return huggingface_hub.CommitInfo(
                commit_url=COMMIT, commit_message="", commit_description="", oid="1"
            )

    def hf_hub_download(repo, name, *, revision):
        if (repo, name) in configs:
            return configs[repo, name]
        missing = huggingface_hub.errors.RemoteEntryNotFoundError
        raise missing.__new__(missing)  # without the answer of a server

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    url = jmat.push_maps("someone/maps", ALL, model=gpt2, n=5, corpus="docs", private=True)
    assert url == COMMIT
    assert (sent["made"], sent["where"]) == (("someone/maps", True, True), ("someone/maps", None))
    assert list(sent["maps"]) == list(ALL)
    assert (sent["maps"].info.n, sent["maps"].info.corpus) == (5, "docs")
    jmat.push_maps("someone/maps", ALL, model=gpt2, format="tuned-lens", revision="lens")
    assert list(sent["maps"]) == [f"tuned.{l}.{L}" for l in range(L)]
    assert sent["where"] == ("someone/maps", "lens")
    sent.clear()
    (tmp_path / "config.json").write_text(json.dumps(BART))
    configs["someone/maps", "config.json"] = tmp_path / "config.json"
    with pytest.raises(ValueError, match="of someone/maps on the hub is not the config of a tuned"):
        jmat.push_maps("someone/maps", ALL, model=gpt2, format="tuned-lens")
    assert not sent
