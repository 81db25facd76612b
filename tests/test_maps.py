"""Maps as callable pytrees, and the files they are shared in."""

import contextlib
import errno
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jmat.maps.files import MapsInfo, read_maps, save_maps
from jmat.maps.types import Constant, Identity, Linear, Zero
from jmat.runtime.digests import model_hash

INFO = MapsInfo(
    model="tiny",
    model_hash="0123456789abcdef",
    protocol="din2023",
    corpus="docs",
    n=9,
    seed=0,
    dtype="float32",
)


def _maps():
    rng = np.random.default_rng(0)
    W = jnp.asarray(rng.standard_normal((3, 4, 4)), jnp.float32)
    return {"mat.0.2": Linear(W[0]), "attn.1": Linear(W[1], jnp.arange(4.0))}


@pytest.fixture
def saved(tmp_path):
    save_maps(tmp_path, _maps(), INFO)
    return tmp_path


_apply = jax.jit(lambda stand_in, x: stand_in(x))


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_maps_compute_what_they_say_on_any_leading_axes(batch, dtype):
    x = jax.random.normal(jax.random.key(0), (*batch, 4), dtype)
    W, b = jnp.arange(12.0).reshape(4, 3), jnp.arange(3.0)
    wide = np.asarray(x, np.float64)
    tolerance = 1e-5 if dtype == jnp.float32 else 0.5
    expected = {
        Identity(): wide,
        Linear(W): wide @ np.asarray(W),
        Linear(W, b): wide @ np.asarray(W) + np.asarray(b),
        Constant(b): np.broadcast_to(b, (*batch, 3)),
        Zero(5): np.zeros((*batch, 5)),
    }
    for stand_in, y in expected.items():
        for got in (stand_in(x), _apply(stand_in, x)):
            assert got.dtype == dtype
            np.testing.assert_allclose(np.asarray(got, np.float64), y, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "remake", [lambda v: Linear(jnp.full((4, 3), v)), lambda v: Constant(jnp.full(3, v))]
)
def test_new_values_of_the_same_shape_do_not_retrace(remake):
    traces = []

    @jax.jit
    def apply(stand_in, x):
        traces.append(stand_in)
        return stand_in(x)

    x = jnp.ones((2, 4))
    first, second = apply(remake(1.0), x), apply(remake(2.0), x)
    assert len(traces) == 1
    np.testing.assert_allclose(second, 2 * first)
    apply(Zero(3), x)
    apply(Zero(4), x)
    assert len(traces) == 3  # a width is a shape: it must


def test_maps_are_ordinary_pytrees():
    shapes = jax.tree.map(jnp.shape, Linear(jnp.ones((4, 3)), jnp.ones(3)))
    assert (shapes.W, shapes.bias) == ((4, 3), (3,))
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), Linear(jnp.eye(2)), Linear(2 * jnp.eye(2))
    )
    y = jax.vmap(lambda linear, x: linear(x), in_axes=(0, None))(stacked, jnp.ones(2))
    np.testing.assert_array_equal(y, [[1, 1], [2, 2]])


def test_saved_maps_come_back_exactly(saved):
    maps, info = read_maps(saved, model_hash=INFO.model_hash, width=4)
    assert info == INFO
    assert list(maps) == list(_maps())
    for name, linear in _maps().items():
        np.testing.assert_array_equal(maps[name].W, linear.W)
        assert (maps[name].bias is None) == (linear.bias is None)
    np.testing.assert_array_equal(maps["attn.1"].bias, np.arange(4.0))


def test_files_follow_the_contract(tmp_path):
    save_maps(tmp_path, _maps(), INFO, {"mat.0.2": {"rank": 4, "condition": 12.5}})
    tensors = safetensors.numpy.load_file(tmp_path / "maps.safetensors")
    assert set(tensors) == {"mat.0.2", "attn.1", "attn.1.bias"}
    about = json.loads((tmp_path / "maps.json").read_text())
    assert about["convention"] == "y = x @ W (+ b)"
    written = {
        "shape": [4, 4],
        "bias": False,
        "kind": "mat",
        "apply": "y = x @ W",
        "rank": 4,
        "condition": 12.5,
    }
    assert about["maps"]["mat.0.2"] == written
    assert {path.name for path in tmp_path.iterdir()} == {"maps.safetensors", "maps.json"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model_hash": "fedcba9876543210"},
            "fitted on tiny with weights 0123456789abcdef; this model's weights are fed",
        ),
        ({"width": 8}, r"'mat.0.2' in .* is \(4, 4\); this model needs \(8, 8\)"),
    ],
)
def test_maps_of_another_model_are_refused(saved, options, message):
    with pytest.raises(ValueError, match=message):
        read_maps(saved, **options)


@pytest.mark.parametrize("shape", [(4, 8), (8, 4), (8, 8)])
def test_maps_from_or_to_another_width_are_refused(tmp_path, shape):
    save_maps(
        tmp_path,
        {
            "mat.0.1": Linear(np.ones((4, 4), np.float32)),
            "mat.0.2": Linear(np.ones(shape, np.float32)),
        },
        INFO,
    )
    with pytest.raises(
        ValueError,
        match=rf"'mat.0.2' in .* is \({shape[0]}, {shape[1]}\); this model needs \(4, 4\)",
    ):
        read_maps(tmp_path, width=4)


@pytest.mark.parametrize("name", ["maps.safetensors", "maps.json"])
@pytest.mark.parametrize("keep", [0, 40, -1])
def test_truncated_file_is_one_clear_sentence(saved, name, keep):
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: keep if keep >= 0 else len(content) - 8])
    with pytest.raises(
        ValueError, match=rf"{name} is (truncated or )?damaged.*: fit the maps again"
    ):
        read_maps(saved)


def test_every_flipped_bit_of_the_tensors_file_is_noticed(saved):
    path = saved / "maps.safetensors"
    content = path.read_bytes()
    loaded = read_maps(saved)[0]
    rng = np.random.default_rng(0)
    unnoticed = []
    for place in [*range(8), *rng.choice(len(content), 150, replace=False)]:
        path.write_bytes(
            content[:place] + bytes([content[place] ^ 1 << rng.integers(8)]) + content[place + 1 :]
        )
        with contextlib.suppress(ValueError):
            again = read_maps(saved)[0]  # white space of the header says nothing
            unnoticed += [
                place for name in loaded if not np.array_equal(again[name].W, loaded[name].W)
            ]
    assert not unnoticed


def test_a_changed_weight_is_damage_and_old_files_without_checksum_load(saved):
    path = saved / "maps.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"maps\.safetensors is damaged \(its checksum"):
        read_maps(saved)
    about = json.loads((saved / "maps.json").read_text())
    del about["checksum"]
    (saved / "maps.json").write_text(json.dumps(about))
    assert len(read_maps(saved)[0]) == 2


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"maps": 3}',
        '{"maps": {"mat.0.1": {}}}',
        '{"maps": {}, "surplus": 1}',
        pytest.param("[" * 99_999, id="deep"),
    ],
)
def test_json_of_something_else_is_refused(saved, content):
    (saved / "maps.json").write_text(content)
    with pytest.raises(ValueError, match="damaged or does not describe maps"):
        read_maps(saved)


@pytest.mark.parametrize("name", ["maps.safetensors", "maps.json"])
def test_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} not found"):
        read_maps(saved)


def test_files_of_two_runs_do_not_mix(saved, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    save_maps(other, _maps(), MapsInfo(**{**vars(INFO), "seed": 1}))
    (other / "maps.json").rename(saved / "maps.json")
    with pytest.raises(ValueError, match="not written together"):
        read_maps(saved)


def test_files_of_version_0_1_load(tmp_path):
    """They say nothing of the text and of jmat's version, in both copies."""
    save_maps(tmp_path, _maps(), INFO)
    added = ("fit_text", "eval_text", "jmat")
    content = json.loads((tmp_path / "maps.json").read_text())
    about = {key: value for key, value in vars(INFO).items() if key not in added}
    old = {key: value for key, value in content.items() if key not in added}
    (tmp_path / "maps.json").write_text(json.dumps(old))
    tensors = safetensors.numpy.load_file(tmp_path / "maps.safetensors")
    safetensors.numpy.save_file(
        tensors, tmp_path / "maps.safetensors", metadata={"info": json.dumps(about)}
    )
    maps, info = read_maps(tmp_path)
    assert info == INFO
    assert maps.keys() == _maps().keys()


def test_a_map_that_is_not_what_the_json_says_is_refused(saved):
    content = json.loads((saved / "maps.json").read_text())
    content["maps"]["mat.0.2"]["shape"] = [7, 9]
    (saved / "maps.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not written together"):
        read_maps(saved)


@pytest.mark.parametrize(
    ("W", "message"), [(np.full((4, 4), np.nan), "NaN"), (np.eye(4, dtype=np.int32), "int32")]
)
def test_maps_are_finite_floats(tmp_path, W, message):
    save_maps(tmp_path, {"mat.0.1": Linear(W)}, INFO)
    with pytest.raises(ValueError, match=message):
        read_maps(tmp_path)


def test_bias_of_the_wrong_length_is_refused(tmp_path):
    save_maps(tmp_path, {"mat.0.1": Linear(jnp.eye(4), jnp.ones(3))}, INFO)
    with pytest.raises(ValueError, match=r"bias \(3,\)"):
        read_maps(tmp_path)


class _Trap:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("suffix", [".pickle", ".pt", ".bin"])
@pytest.mark.parametrize("given", ["file", "folder"])
def test_pickles_are_refused_and_never_opened(tmp_path, suffix, given):
    trap = tmp_path / f"5_10{suffix}"
    trap.write_bytes(pickle.dumps(_Trap(tmp_path / "sprung")))
    with pytest.raises(ValueError, match="is a pickle"):
        read_maps(trap if given == "file" else tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_full_disk_leaves_the_old_files(saved, monkeypatch):
    def full(path, tensors, metadata):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("jmat.maps.files.write_tensors", full)
    with pytest.raises(OSError, match=r"maps\.safetensors") as caught:
        save_maps(saved, {}, INFO)
    assert caught.value.errno == errno.ENOSPC
    assert len(read_maps(saved)[0]) == 2


def test_model_hash_sees_names_shapes_types_and_values_but_not_order():
    params = {"a": np.arange(4, dtype=np.float32), "b": np.float32(1)}
    fingerprint = model_hash(params)
    assert len(fingerprint) == 16
    assert model_hash(dict(reversed(params.items()))) == fingerprint
    assert model_hash(jax.tree.map(jnp.asarray, params)) == fingerprint
    others = [
        {**params, "a": np.arange(4, dtype=np.float32).reshape(2, 2)},
        {**params, "a": np.arange(4, dtype=np.float32).view(np.int32)},
        {**params, "a": np.arange(1, 5, dtype=np.float32)},
        {"c": params["a"], "b": params["b"]},
        {**params, "a": jnp.arange(4, dtype=jnp.bfloat16)},
    ]
    assert len({fingerprint, *map(model_hash, others)}) == 6
