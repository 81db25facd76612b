"""Files of maps of every kind: what is loaded equals what was saved, bit by bit, and
damage is one sentence.
"""

import dataclasses
import hashlib
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import jmat
from jmat.maps.compact import Diagonal, Hadamard, Hidden, LowRank, Map, quantised
from jmat.maps.files import MapsInfo, read_maps, save_maps
from jmat.maps.forms import FORMS, form_of, jump_of
from jmat.maps.kinds import KINDS, fit_kind, parse_kind
from jmat.maps.metric import metric_of
from jmat.maps.regression import Regression, pair_moments
from jmat.maps.types import Constant, Identity, Linear, Zero

INFO = MapsInfo(
    model="tiny",
    model_hash="0123456789abcdef",
    protocol="din2023",
    corpus="docs",
    n=9,
    seed=0,
    dtype="float32",
)
D, R = 6, 2


def values(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def every_form():
    bias = values(D)
    maps = {
        "id.0.2": Identity(),
        "mean.0.2": Constant(bias),
        "mat.0.2": Linear(values(D, D)),
        "affine.0.2": Linear(values(D, D), bias),
        "attn.1": Linear(values(D, D), bias),
        "rank:2.1.2": LowRank(values(D, R), values(R, D), bias),
        "one_jump:2.1.2": LowRank(values(D, R), values(R, D)),
        "diag.0.2": Diagonal(values(D), bias),
        "diag.1.2": Diagonal(values(D)),
        "hadamard.0.2": Hadamard(values(D), bias),
        "hadamard.1.2": Hadamard(values(D)),
        "mlp:2.0.2": Hidden(values(D, D), values(D, R), values(R), values(R, D), bias),
    }
    small = ("mat.0.2", "affine.0.2", "rank:2.1.2", "mlp:2.0.2")
    return maps | {name.replace(".", "+int8.", 1): quantised(maps[name]) for name in small}


@pytest.fixture
def saved(tmp_path):
    save_maps(tmp_path, every_form(), INFO)
    return tmp_path


def about(folder, **changes):
    """Writes changed descriptions of maps."""
    path = folder / "maps.json"
    content = json.loads(path.read_text())
    for name, fields in changes.items():
        content["maps"][name] |= fields
    path.write_text(json.dumps(content))


def same(first, second):
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return jax.tree.structure(first) == jax.tree.structure(second) and all(
        a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b)) for a, b in leaves
    )


def test_all_forms_come_back_bit_by_bit(saved):
    assert {form_of(each).apply for each in every_form().values()} == set(FORMS)
    loaded, info = read_maps(saved, model_hash=INFO.model_hash, width=D)
    assert info == INFO
    assert list(loaded) == list(every_form())
    x = values(3, D)
    for name, stand_in in every_form().items():
        assert isinstance(stand_in, Map)
        assert same(loaded[name], stand_in), name
        np.testing.assert_array_equal(loaded[name](x), stand_in(x))


def test_a_name_says_from_where_to_where_a_map_leads():
    assert jump_of("mat.3.12") == ("mat", 3, 12)
    assert jump_of("ridge:0.5+int8.0.8") == ("ridge:0.5+int8", 0, 8)
    for name in (
        "attn.3",
        "3.12",
        ".3.12",
        "mat.3.x",
        "mat.-3.12",
        "mat.３.12",
        "mat.3." + "1" * 7,
    ):
        assert jump_of(name) is None


def test_the_json_has_prompts_only_where_they_are_known(tmp_path):
    for prompts in (0, 7):
        info = dataclasses.replace(INFO, prompts=prompts)
        save_maps(tmp_path, {"mat.0.2": Linear(values(D, D))}, info)
        content = json.loads((tmp_path / "maps.json").read_text())
        assert content.get("prompts", "none") == (prompts or "none")
        assert read_maps(tmp_path)[1] == info


def test_the_json_says_the_kind_and_how_it_is_applied(saved):
    described = json.loads((saved / "maps.json").read_text())["maps"]
    low = {"shape": [D, D], "bias": True, "kind": "rank:2", "apply": "y = x @ A @ B + bias"}
    assert described["rank:2.1.2"] == low
    assert described["rank:2+int8.1.2"] == low | {"kind": "rank:2+int8", "int8": ["A", "B"]}
    assert described["attn.1"] == {"shape": [D, D], "bias": True, "apply": "y = x @ W + bias"}
    assert described["mean.0.2"] == {
        "shape": [D],
        "bias": False,
        "kind": "mean",
        "apply": "y = value",
    }
    assert described["id.0.2"]["shape"] == []
    tensors = safetensors.numpy.load_file(saved / "maps.safetensors")
    expected = {
        "rank:2+int8.1.2.A.int8",
        "rank:2+int8.1.2.A.scale",
        "rank:2+int8.1.2.B.int8",
        "rank:2+int8.1.2.bias",
    }
    assert expected <= tensors.keys()
    assert tensors["mat+int8.0.2.int8"].dtype == np.int8
    assert {
        "mat.0.2",
        "affine.0.2",
        "affine.0.2.bias",
        "mlp:2.0.2",
        "mlp:2.0.2.U",
        "mean.0.2.value",
    } <= tensors.keys()
    assert not [name for name in tensors if name.startswith("id.0.2")]


def test_the_equations_are_those_that_the_types_compute():
    """As maps.json writes them, with numpy in float64."""
    from scipy.special import erf

    from jmat.maps.compact import rotation

    x = np.asarray(values(3, D), np.float64)
    for name, stand_in in every_form().items():
        if "int8" in name:
            continue
        given = {
            field: np.asarray(value, np.float64)
            for field, value in vars(stand_in).items()
            if value is not None
        }
        given |= {"x": x, "H": rotation(D), "gelu": lambda z: z * (1 + erf(z / np.sqrt(2))) / 2}
        expected = eval(form_of(stand_in).apply.removeprefix("y = "), given)
        found = np.broadcast_to(np.asarray(stand_in(values(3, D))), x.shape)
        np.testing.assert_allclose(
            found, np.broadcast_to(expected, x.shape), rtol=1e-5, atol=1e-5, err_msg=name
        )


def test_files_from_before_there_were_kinds_load(tmp_path):
    maps = {
        name: stand_in for name, stand_in in every_form().items() if name in ("mat.0.2", "attn.1")
    }
    save_maps(tmp_path, maps, INFO)
    content = json.loads((tmp_path / "maps.json").read_text())
    content["maps"] = {
        name: {key: each[key] for key in ("shape", "bias")}
        for name, each in content["maps"].items()
    }
    (tmp_path / "maps.json").write_text(json.dumps(content))
    loaded, _ = read_maps(tmp_path, width=D)
    assert all(same(loaded[name], stand_in) for name, stand_in in maps.items())


def test_a_file_that_another_library_wrote_loads(gpt2, tmp_path):
    """With the two keys that have to be there, as docs/files.md says."""
    width = gpt2.config.width
    W = np.arange(width * width, dtype=np.float32).reshape(width, width)
    safetensors.numpy.save_file({"mat.1.4": W}, tmp_path / "maps.safetensors")
    entry = {"shape": [width, width], "apply": "y = x @ W"}
    about = {"model": "theirs", "maps": {"mat.1.4": entry}}
    (tmp_path / "maps.json").write_text(json.dumps(about))
    for source in (tmp_path, tmp_path / "maps.json"):
        loaded = jmat.load_maps(source, model=gpt2)
        np.testing.assert_array_equal(loaded["mat.1.4"].W, W)
    assert loaded.info == MapsInfo("theirs")
    hashed = hashlib.sha256(f"mat.1.4|({width}, {width})|float32|".encode() + W.tobytes())
    for checksum, fits in ((hashed.hexdigest()[:16], True), ("0" * 16, False)):
        (tmp_path / "maps.json").write_text(json.dumps(about | {"checksum": checksum}))
        if fits:
            jmat.load_maps(tmp_path, model=gpt2)
        else:
            with pytest.raises(ValueError, match="its checksum is not the one in maps"):
                jmat.load_maps(tmp_path, model=gpt2)


def test_the_width_is_compared_where_the_hash_is_not_given(gpt2, tmp_path):
    save_maps(tmp_path, {"mat.0.2": Linear(values(D, D))}, MapsInfo("theirs"))
    assert len(jmat.load_maps(tmp_path)) == 1
    with pytest.raises(ValueError, match=r"is \(6, 6\); this model needs \(64, 64\)"):
        jmat.load_maps(tmp_path, model=gpt2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"apply": "y = exp(x)"},
            r"applied as 'y = exp\(x\)', which this version of jmat does not know",
        ),
        ({"apply": ["y = x"]}, "damaged or does not describe maps"),
        ({"int8": ["C"]}, "'C' is in int8, and no part of"),
        ({"int8": ["A", "B"]}, "not written together"),
        ({"apply": "y = x @ A @ B"}, "not written together"),
        (
            {"shape": [D, D + 1]},
            r"has A \(6, 2\), B \(2, 6\), bias \(6,\); expected what makes .* a map \[6, 7\]",
        ),
        ({"shape": [D]}, "expected what makes"),
    ],
)
def test_a_description_of_something_else_is_refused(saved, changes, message):
    about(saved, **{"rank:2.1.2": changes})
    with pytest.raises(ValueError, match=message):
        read_maps(saved)


def test_maps_of_another_width_are_refused(saved, tmp_path_factory):
    with pytest.raises(ValueError, match=r"'mean.0.2' in .* is \(6,\); this model needs \(8, 8\)"):
        read_maps(saved, width=8)
    folder = tmp_path_factory.mktemp("low")
    save_maps(folder, {"rank:2.1.2": LowRank(values(D, R), values(R, 8))}, INFO)
    assert read_maps(folder)[0]["rank:2.1.2"].B.shape == (R, 8)
    with pytest.raises(ValueError, match=r"is \(6, 8\); this model needs \(6, 6\)"):
        read_maps(folder, width=6)


def test_numbers_of_the_wrong_kind_are_refused(tmp_path):
    small = quantised(Linear(values(D, D)))
    wrong = type(small.W)(small.W.values.astype(jnp.float32), small.W.scale)
    save_maps(tmp_path, {"mat+int8.0.2": Linear(wrong)}, INFO)
    with pytest.raises(ValueError, match=r"'mat\+int8.0.2.int8' in .* is float32"):
        read_maps(tmp_path)


def test_what_is_no_map_is_not_saved(gpt2, tmp_path):
    unchecked = inspect.unwrap(jmat.save_maps)
    with pytest.raises(
        ValueError, match=r"'mat.0.1' is of type Zero; expected jmat.Linear, or another map"
    ):
        unchecked(tmp_path, {"mat.0.1": Zero()}, model=gpt2)
    with pytest.raises(ValueError, match=r"of type Zero has no form in maps.json"):
        inspect.unwrap(form_of)(Zero())
    with pytest.raises(ValueError, match=r"of type Hidden has no form in maps.json"):
        form_of(Hidden(values(D, D), values(D, R), values(R), values(R, D), None))


def test_every_kind_is_saved_and_loaded_by_the_public_calls(gpt2, tmp_path):
    width = gpt2.config.width
    X = np.random.default_rng(0).normal(size=(90, width)).astype(np.float32)
    pair = Regression(pair_moments(X, X[::-1]), metric_of(np.eye(width)))
    maps = {}
    for entry in KINDS.values():
        if entry.fit is None:  # a lens, which is Linear or Hidden
            continue
        kind = parse_kind(entry.example)
        maps |= {
            f"{kind}.1.4": fit_kind(kind, pair),
            f"{kind}+int8.1.4": fit_kind(parse_kind(f"{kind}+int8"), pair),
        }
    jmat.save_maps(tmp_path / "maps", maps, model=gpt2, n=90)
    loaded = jmat.load_maps(tmp_path / "maps", model=gpt2)
    assert list(loaded) == list(maps)
    assert all(same(loaded[name], stand_in) for name, stand_in in maps.items())
    described = json.loads((tmp_path / "maps" / "maps.json").read_text())["maps"]
    assert all(str(parse_kind(each["kind"])) == each["kind"] for each in described.values())
