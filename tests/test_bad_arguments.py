"""Wrong arguments of the public functions end in one sentence, and never in JAX's
words.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmat
from jmat.data.batches import Batch
from jmat.report.style import width_in_inches
from jmat.studies import layer_jump, map_zoo
from jmat.studies.tasks.harness import scorer
from tests import hf

EYE = np.eye(16, dtype=np.float32)
LINEAR = jmat.Linear(EYE)
TOKENS = np.ones((2, 3), np.int32)
STREAM = np.ones((1, 3, 16), np.float32)


pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def model():
    return hf.ours(hf.gpt2("arguments"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": "1"}, "stop='1': expected a whole number"),
        ({"stop": 1.5}, "stop=1.5: expected a whole number"),
        ({"stop": True}, "stop=True: expected a whole number"),
        ({"start": None}, "start=None: expected a whole number"),
        ({"inputs": [[1, 2], [3]]}, "rows of one length; got a list"),
        ({"inputs": np.zeros((1, 2, 16), np.complex64)}, "complex64 .*; expected tokens"),
        ({"inputs": np.zeros((1, 2, 16), bool)}, "bool .*; expected tokens"),
        ({"keep": "block.0", "read_at": [[1], [1, 2]]}, "rows of one length"),
        ({"sites": "block.0"}, "sites is str; expected a dict"),
        ({"sites": ["block.1.ffn"]}, "sites is list; expected a dict"),
        ({"keep": None}, "keep is NoneType; expected the name of a site"),
        ({"keep": 3}, "keep is int; expected the name of a site"),
        (
            {"sites": {"block.0": jmat.Linear("W")}},
            "site 'block.0' holds a str; expected real numbers",
        ),
        (
            {"sites": {"block.0": jmat.Constant(np.array(["a"]))}},
            "holds an array of <U1; expected real numbers",
        ),
        ({"sites": {"block.0": jmat.Add("1")}}, "holds a str"),
        ({"sites": {"block.0": jmat.Scale(2j)}}, "holds a complex; expected real numbers"),
        (
            {"sites": {"block.0": jmat.At(0, jmat.Add(jnp.ones(16, jnp.complex64)))}},
            "holds an array of complex64",
        ),
    ],
)
def test_run_refuses(model, options, message):
    with pytest.raises(ValueError, match=message):
        jmat.run(model, **{"inputs": TOKENS, **options})


def test_positions_have_rows_of_one_length():
    with pytest.raises(ValueError, match="rows of one length"):
        jmat.At([[1], [1, 2]], jmat.Zero())


@pytest.mark.parametrize(
    "x", ["h", None, [[1.0], [1.0, 2.0]], np.float32(1), (STREAM, {}), np.ones((2, 16), int)]
)
def test_logits_refuse_what_is_no_stream(model, x):
    with pytest.raises(ValueError, match=r"expected (a stream|numbers)"):
        jmat.logits(model, x)


def test_logits_take_a_list(model):
    np.testing.assert_array_equal(jmat.logits(model, STREAM.tolist()), jmat.logits(model, STREAM))


def test_whole_numbers_of_numpy_are_layers(model):
    x, _ = jmat.run(model, TOKENS, stop=np.int64(1))
    np.testing.assert_array_equal(x, jmat.run(model, TOKENS, stop=1)[0])
    assert list(jmat.Shortcut(np.int64(0), np.int64(1), LINEAR)) == ["block.0"]


def test_a_site_may_hold_a_key_of_random_numbers(model):
    noise = jax.tree_util.Partial(
        lambda key, y: y + jax.random.normal(key, y.shape), jax.random.key(0)
    )
    x, _ = jmat.run(model, TOKENS, sites={"block.1": jmat.Edit(noise)})
    assert float(jnp.abs(x - jmat.run(model, TOKENS)[0]).max()) > 0


@pytest.mark.parametrize("names", [jmat.sites, jmat.streams])
def test_names_are_those_of_a_model(names):
    with pytest.raises(ValueError, match="model is of type str; expected a Transformer"):
        names("gpt2")


@pytest.mark.parametrize("name", [None, 3])
def test_a_model_is_loaded_by_name(name):
    with pytest.raises(
        ValueError, match="expected the name of a model, or a path; got an object of type"
    ):
        jmat.load(name)


@pytest.mark.parametrize(
    ("tokenizer", "options", "message"),
    [
        ("gpt2", {}, "tokenizer is of type str; expected the one that jmat.load returns"),
        (None, {"max_length": 0}, "max_length=0: expected a whole number of at least 1"),
        (None, {"max_length": 1.5}, "max_length=1.5: expected a whole number"),
        (None, {"max_length": "9"}, "max_length='9': expected a whole number"),
    ],
)
def test_encode_refuses(tokenizer, options, message):
    tokenizer = tokenizer or jmat.load("gpt2-docs")[1]
    with pytest.raises(ValueError, match=message):
        jmat.encode(tokenizer, ["a"], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": None}, "keep is NoneType; expected the name of a site"),
        ({"stop": "1"}, "stop='1': expected a whole number"),
        ({"tokens_per_batch": 0}, "tokens_per_batch=0: expected a whole number of at least 1"),
        ({"tokens_per_batch": "a"}, "tokens_per_batch='a': expected a whole number"),
        ({"sites": "block.0"}, "sites is str; expected a dict"),
    ],
)
def test_capture_refuses(model, options, message):
    with pytest.raises(ValueError, match=message):
        jmat.capture(model, _batch(), **{"keep": "block.0", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": 1.0}, "layer=1.0: expected a whole number"),
        ({"source": None}, "layer=None: expected a whole number"),
        ({"kind": None}, "a kind of map is text such as 'mat'; got an object of type NoneType"),
        ({"kind": "RIDGE:1"}, "did you mean 'ridge'"),
        ({"kind": "mlp:999999999999"}, "at most 6 digits"),
        ({"kind": "rank:" + "9" * 5000}, "at most 6 digits"),
        ({"intercept": "no"}, "intercept='no': expected True or False"),
        ({"seed": -1}, "seed=-1: expected a whole number from 0"),
        ({"seed": "a"}, "seed='a': expected a whole number from 0"),
    ],
)
def test_fit_map_refuses(model, options, message):
    with pytest.raises(ValueError, match=message):
        jmat.fit_map(model, _batch(), **{"source": 0, "target": 1, **options})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"intercept": "no"}, "intercept='no': expected True or False"),
        ({"clock": "yes"}, "clock='yes': expected True or False"),
        ({"skip_special": "no"}, "skip_special='no': expected True or False"),
        ({"snapshot_folder": 3}, "snapshot_folder=3: expected a path"),
        ({"snapshot_every": -1}, "snapshot_every=-1: expected a number of at least 0"),
        ({"snapshot_every": "a"}, "snapshot_every='a': expected a number"),
        ({"kinds": "mat"}, "kinds='mat': expected a list"),
        ({"kinds": None}, "kinds=None: expected a list"),
        ({"layers": "12"}, "layers='12': expected a list"),
        ({"layers": 3}, "layers=3: expected a list"),
    ],
)
def test_settings_of_a_study_are_of_their_types(model, settings, message):
    with pytest.raises(ValueError, match=message):
        map_zoo.Options(**{"kinds": ["mat"], **settings}).check(model.config)


@pytest.mark.parametrize("options", [None, {}])
def test_a_study_takes_its_options(model, options):
    with pytest.raises(
        ValueError, match=r"options is of type .*; expected the Options of the study"
    ):
        layer_jump.run(model, ["a", "b"], options)


@pytest.mark.parametrize(
    ("source", "target", "stand_in", "message"),
    [
        ("0", 1, LINEAR, "source='0': expected a whole number"),
        (0, 1.5, LINEAR, "target=1.5: expected a whole number"),
        (0, 1, None, "is a NoneType; expected a callable pytree"),
        (0, 1, lambda x: x, "is a function; expected a callable pytree"),
        (0, 1, jmat.Add(1.0), "got the edit Add, which changes what they compute"),
        (0, 1, jmat.At(0, jmat.Zero()), "got the edit At"),
    ],
)
def test_a_shortcut_refuses(source, target, stand_in, message):
    with pytest.raises(ValueError, match=message):
        jmat.Shortcut(source, target, stand_in)


@pytest.mark.parametrize(
    ("shortcuts", "options", "message"),
    [
        ([LINEAR], {}, "shortcuts is list; expected a dict"),
        (None, {}, "shortcuts is NoneType; expected a dict"),
        (
            {"a": jmat.Shortcut(0, 2, jmat.Linear(np.eye(17)))},
            {},
            "shortcut 'a': .* does not take its input",
        ),
        (
            {"a": jmat.Shortcut(0, 1, jmat.Linear(np.ones((16, 17))))},
            {},
            "shortcut 'a': .* returned shape",
        ),
        ({"a": jmat.Shortcut(0, 2, jmat.Constant(np.ones((3, 4, 16))))}, {}, "shortcut 'a'"),
        (
            {"a": jmat.Shortcut(0, 2, LINEAR)},
            {"seed": -1},
            "seed=-1: expected a whole number from 0",
        ),
    ],
)
def test_evaluate_refuses(model, shortcuts, options, message):
    with pytest.raises(ValueError, match=message):
        jmat.evaluate(model, _batch(), shortcuts, **options)


def test_a_text_without_tokens_is_refused_by_both_kinds_of_models():
    for name, message in (
        ("gpt2-docs", "text 1 has no tokens"),
        ("bert-docs", "1 of 2 texts have no tokens"),
    ):
        model, tokenizer = jmat.load(name)
        with pytest.raises(ValueError, match=message):
            jmat.fit_map(model, ["a b", ""], 0, 1, tokenizer=tokenizer)


def test_a_block_is_a_shortcut_that_reads_the_whole_text(model):
    """From block 0's output to the end by block 1 itself: that is the model."""
    results = jmat.evaluate(model, _batch(), {"block": jmat.Shortcut(1, 2, model.blocks[1])})
    values = {row["metric"]: row["value"] for row in results.rows}
    assert values["precision@1"] == 1
    assert values["kl"] < 1e-5


def test_a_constant_of_one_number_fills_the_site(model):
    shortcut = jmat.Shortcut(0, 2, jmat.Constant(0.5))
    assert jmat.evaluate(model, _batch(), {"constant": shortcut}).rows
    np.testing.assert_array_equal(
        jmat.run(model, TOKENS, sites=shortcut)[0], np.full((2, 3, 16), 0.5, np.float32)
    )


@pytest.mark.parametrize("width", ["a", -1, np.ones(3)])
def test_zero_has_a_width(width):
    with pytest.raises(ValueError, match=r"width=.*: expected a whole number of at least 1"):
        jmat.Zero(width)


@pytest.mark.parametrize(
    ("maps", "options", "message"),
    [
        (None, {}, "maps is NoneType; expected a dict"),
        (LINEAR, {}, "maps is Linear; expected a dict"),
        ({3: LINEAR}, {}, "name of a map is 3; expected text"),
        ({"": LINEAR}, {}, "name of a map is ''; expected text"),
        ({"a": jmat.Linear([[1.0]])}, {}, "map 'a' holds a float; expected arrays"),
        ({"a": jmat.Linear("W")}, {}, "map 'a' holds a str; expected arrays"),
        ({"a": jmat.Linear(np.eye(3, dtype=int))}, {}, "map 'a' holds an array of int64"),
        ({"a": jmat.Linear(np.full((3, 3), np.nan))}, {}, "map 'a' holds NaN or infinity"),
        ({"a": jmat.Linear(np.ones(3))}, {}, r"parts of map 'a' do not fit one another: W \(3,\)"),
        ({"a": jmat.Linear(EYE, np.ones(3))}, {}, "parts of map 'a' do not fit one another"),
        ({"a": jmat.Constant(np.float32(1))}, {}, "parts of map 'a' do not fit one another"),
        (
            {"a": jmat.Linear(EYE, np.ones(16)), "a.bias": LINEAR},
            {},
            "two maps have a part 'a.bias'",
        ),
        ({"a": LINEAR}, {"n": "x"}, "n='x': expected a whole number"),
        ({"a": LINEAR}, {"n": -3}, "n=-3: expected a whole number of at least 0"),
        ({"a": LINEAR}, {"model": "gpt2"}, "model is of type str; expected a Transformer"),
        ({"a": LINEAR}, {"info": "x"}, "info is of type str; expected"),
    ],
)
def test_maps_that_cannot_be_read_back_are_not_saved(model, maps, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        jmat.save_maps(tmp_path / "maps", maps, **{"model": model, **options})
    assert not (tmp_path / "maps").exists()


def test_a_number_of_numpy_is_saved(model, tmp_path):
    jmat.save_maps(tmp_path, {"a": LINEAR}, model=model, n=np.int64(3))
    assert jmat.load_maps(tmp_path, model=model).info.n == 3


@pytest.mark.parametrize(
    "read", [jmat.load_maps, jmat.read_results, lambda out: jmat.save_maps(out, {"a": LINEAR})]
)
def test_a_folder_is_a_path(read):
    for folder in (None, 3):
        with pytest.raises(ValueError, match="expected a path"):
            read(folder)


def test_maps_are_loaded_for_a_model(tmp_path):
    with pytest.raises(ValueError, match="model is of type str; expected a Transformer"):
        jmat.load_maps(tmp_path, model="gpt2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": "1"}, "exit_layer='1': expected a whole number"),
        ({"exit_layer": 1.5}, "exit_layer=1.5: expected a whole number"),
        ({"tokens_per_batch": 0}, "tokens_per_batch=0: expected a whole number of at least 1"),
        ({"sites": "block.0"}, "sites is str; expected a dict"),
        ({"sites": {"blok.0": LINEAR}}, "unknown site 'blok.0'"),
    ],
)
def test_the_scorer_of_the_harness_refuses(options, message):
    model, tokenizer = jmat.load("gpt2-docs")
    with pytest.raises(ValueError, match=message):
        scorer(model, tokenizer, **options)


def test_the_scorer_of_the_harness_reads_text():
    with pytest.raises(ValueError, match="a text is of type NoneType; expected text"):
        scorer(*jmat.load("gpt2-docs")).texts([None])


def test_a_figure_has_one_width():
    with pytest.raises(ValueError, match=r"width=\[3\] is not a width of a figure"):
        width_in_inches([3])


def _batch():
    real = np.ones((4, 5), np.int32)
    tokens = np.arange(20, dtype=np.int32).reshape(4, 5)
    nothing = np.zeros((4, 0), np.int32)
    return Batch(tokens, real, np.broadcast_to(np.arange(5), (4, 5)), nothing, nothing)
