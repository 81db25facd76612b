"""`jmat.generate` against transformers, against full passes, and its options."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest
import transformers

import jmat
from jmat import Add, At, Edit, Identity, Scale
from jmat.checkpoint.load import find
from jmat.decode import generate as generating
from jmat.decode import passes
from jmat.decode.prompts import prompt_ids
from tests import families, hf
from tests.generation import check_greedy, check_same, theirs
from tests.llama_tokenizer import llama
from tests.programs import programs

POSITIONS = {
    "GPT2Config": "n_positions",
    "BloomConfig": "seq_length",
}
rng = np.random.default_rng(0)
PROMPTS = [rng.integers(0, 37, size).tolist() for size in (5, 2, 9)]
NEW = 16


def longer(case):
    """The same model with positions for 256 tokens, and as random."""
    name = POSITIONS.get(case.config, "max_position_embeddings")
    return case._replace(fields={**case.fields, name: 256})


CASES = {
    case.name: longer(case)
    for case in [*hf.CASES, *families.CASES]
    if not case.name.endswith("headless")
    and (
        not case.name.startswith(("bert", "roberta", "xlmroberta", "camembert", "distilbert"))
        or case.name == "bert-decoder"
    )
}


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def torch_gpt2():
    return hf.make(hf.gpt2("writes", n_positions=64))


@pytest.fixture(scope="module")
def gpt2():
    return hf.ours(hf.gpt2("writes", n_positions=64))


@pytest.fixture(scope="module")
def docs():
    return jmat.load("gpt2-docs")


def write(model, prompts=PROMPTS, **options):
    """Texts of 16 tokens, which none ends, with scores: all tests share a program."""
    return jmat.generate(
        model,
        prompts,
        **{"max_new_tokens": NEW, "stop_tokens": [], "scores": True, **options},
    )


# --- against transformers -------------------------------------------------------------------------


def check_against_transformers(case, prompts, new):
    expected = theirs(hf.make(case), prompts, new)
    model = hf.ours(case)
    found = jmat.generate(model, prompts, max_new_tokens=new, stop_tokens=[])
    for prompt, ours, their in zip(prompts, found.tokens, expected, strict=True):
        check_same(model, prompt, ours, their)


@pytest.mark.parametrize("name", ["mistral-window", "bloom-plain"])
def test_greedy_text_is_transformers(name):
    check_against_transformers(CASES[name], PROMPTS, 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_200_greedy_tokens_are_transformers_in_every_family(name):
    case = CASES[name]
    prompts = [row % case.fields["vocab_size"] for row in map(np.asarray, PROMPTS)]
    if name == "bert-decoder":  # transformers' BERT counts positions from padding
        prompts = [row[:2] for row in prompts]
    check_against_transformers(case, prompts, 200)


@pytest.mark.slow
def test_greedy_text_of_the_bundled_model_is_transformers(docs):
    model, tokenizer = docs
    their_model = transformers.AutoModelForCausalLM.from_pretrained(find("gpt2-docs")).eval()
    texts = ["Return a new array", "The default", "Raises", "x = np.zeros((3, 4))"] * 4
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    expected = theirs(their_model.float(), prompts, 80)
    found = jmat.generate(model, texts, tokenizer=tokenizer, max_new_tokens=80, stop_tokens=[])
    for prompt, ours, their in zip(prompts, found.tokens, expected, strict=True):
        assert check_same(model, prompt, ours, their) == 80


@pytest.mark.slow
def test_greedy_text_of_the_reference_model_is_transformers(gpt2_examples):
    folder = find("tests/data/reference/gpt2")
    model, _ = jmat.load(folder)
    their_model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ends = np.cumsum(gpt2_examples.fit.lengths)[:6]
    prompts = [
        row[:8].tolist() for row in np.split(gpt2_examples.fit.tokens[: ends[-1]], ends[:-1])
    ]
    expected = theirs(their_model, prompts, 120)
    found = jmat.generate(model, prompts, max_new_tokens=120, stop_tokens=[])
    for prompt, ours, their in zip(prompts, found.tokens, expected, strict=True):
        assert check_same(model, prompt, ours, their) == 120


@pytest.mark.slow
def test_200_tokens_with_a_penalty_are_transformers():
    case = CASES["llama-plain"]
    row = PROMPTS[0]  # by itself: transformers counts padding as seen
    expected = theirs(hf.make(case), [row], 200, repetition_penalty=1.3)
    model = hf.ours(case)
    options = {"max_new_tokens": 200, "repetition_penalty": 1.3, "stop_tokens": []}
    found = jmat.generate(model, [row], **options)
    np.testing.assert_array_equal(found.tokens[0], expected[0])
    assert len(set(found.tokens[0])) > 10


# --- against full passes --------------------------------------------------------------------------


def test_greedy_tokens_and_scores_are_those_of_full_passes(gpt2):
    found = write(gpt2)
    check_greedy(gpt2, found)
    assert found.reasons == ("length",) * 3
    assert found.texts is None
    assert [len(tokens) for tokens in found.tokens] == [NEW] * 3
    assert [
        row[: len(prompt)].tolist() for row, prompt in zip(found.sequences, PROMPTS, strict=True)
    ] == PROMPTS


def test_a_penalty_is_for_all_tokens_of_a_text(gpt2):
    penalty = 2.5
    found = write(gpt2, repetition_penalty=penalty)
    for prompt, whole in zip(PROMPTS, found.sequences, strict=True):
        _, kept = jmat.run(gpt2, whole[None], keep="logits")
        for at in range(len(prompt), len(whole)):
            logits = np.array(kept["logits"][0, at - 1])
            seen = np.unique(whole[:at])
            logits[seen] = np.where(
                logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty
            )
            assert logits.max() - logits[whole[at]] < 1e-4
    assert any((a != b).any() for a, b in zip(found.tokens, write(gpt2).tokens, strict=True))


def test_long_prompts_are_read_in_pieces(gpt2, monkeypatch):
    prompts = [rng.integers(0, 37, size).tolist() for size in (30, 2, 17)]
    expected = write(gpt2, prompts)
    monkeypatch.setattr(generating, "usual_piece", lambda rows: 8)
    found = write(gpt2, prompts)
    for ours, whole in zip(found.tokens, expected.tokens, strict=True):
        np.testing.assert_array_equal(ours, whole)


def test_sites_apply_to_prompts_and_at_every_step(gpt2):
    sites = {
        "block.0": At([3, 9, 12], Add(np.linspace(-3, 3, 16, dtype=np.float32))),
        "block.1.ffn": Identity(),
        "block.0.attn": Scale(0.5),
        "block.1": At(np.array([[2, 6], [4, 8], [1, 13]]), Scale(1.5)),
        "final_norm": At(6, Scale(-1.0)),
        "logits": Edit(lambda y: y.at[..., 7].add(0.5)),
    }
    found = write(gpt2, sites=sites)
    for row, positions in enumerate(sites["block.1"].positions):
        ours = sites | {"block.1": At(positions.tolist(), Scale(1.5))}
        one = dataclasses.replace(
            found, prompts=found.prompts[row:][:1], tokens=found.tokens[row:][:1], scores=None
        )
        check_greedy(gpt2, one, sites=ours)
    for row, other in zip(found.tokens, write(gpt2).tokens, strict=True):
        assert (row != other).any()


@pytest.mark.parametrize(
    "name", ["gpt2-plain", pytest.param("llama-plain", marks=pytest.mark.slow)]
)
def test_narrow_dtypes_write_what_their_own_full_passes_do(name):
    model = hf.ours(CASES[name], dtype="bfloat16")
    check_greedy(model, write(model), bound=0.05)


# --- the end of a text ----------------------------------------------------------------------------


def test_a_stop_token_ends_its_row_alone(gpt2):
    plain = write(gpt2)
    stop = int(plain.tokens[1][4])
    found = write(gpt2, stop_tokens=[stop])
    for row, tokens in enumerate(plain.tokens):
        where = np.flatnonzero(tokens == stop)
        end = where[0] + 1 if where.size else NEW
        np.testing.assert_array_equal(found.tokens[row], tokens[:end])
        np.testing.assert_allclose(found.scores[row], plain.scores[row][:end], atol=1e-6)
        assert found.reasons[row] == ("stop token" if where.size else "length")


def test_the_models_end_of_text_ends_texts(docs):
    model, tokenizer = docs
    found = jmat.generate(
        model, ["Return a new array", "The default"], tokenizer=tokenizer, max_new_tokens=16
    )
    assert found.reasons == ("stop token", "stop token")
    assert [tokens[-1] for tokens in found.tokens] == [0, 0]
    for text, tokens in zip(found.texts, found.tokens, strict=True):
        assert text == tokenizer.decode(tokens[:-1].tolist())
        assert text.startswith(" ")
    assert found.prompt_texts == ("Return a new array", "The default")


def test_texts_come_as_they_are_written(docs):
    model, tokenizer = docs
    pieces = {0: [], 1: []}
    options = {"tokenizer": tokenizer, "max_new_tokens": 16, "stop_strings": [" type", "zzz"]}
    found = jmat.generate(
        model,
        ["Return a new array", "The default"],
        on_text=lambda row, text: pieces[row].append(text),
        **options,
    )
    assert tuple("".join(pieces[row]) for row in (0, 1)) == found.texts
    assert len(pieces[0]) > 3
    assert found.texts[0] == " with the same shape and"
    assert found.reasons == ("stop string", "stop token")
    assert tokenizer.decode(found.tokens[0].tolist()) == " with the same shape and type"
    again = jmat.generate(model, ["Return a new array", "The default"], **options)
    assert again.texts == found.texts
    assert [row.tolist() for row in again.tokens] == [row.tolist() for row in found.tokens]


# --- prompts --------------------------------------------------------------------------------------


def test_prompts_of_every_kind_are_the_same(docs):
    model, tokenizer = docs
    texts = ["Return a new array", "The default"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    for prompts in (texts, ids, [np.asarray(row) for row in ids], jmat.encode(tokenizer, texts)):
        found = prompt_ids(prompts, tokenizer, model.config)
        assert [row.tolist() for row in found] == ids
    for prompt in (texts[0], ids[0], np.asarray(ids[0]), np.asarray([ids[0]])):
        found = prompt_ids(prompt, tokenizer, model.config)
        assert [row.tolist() for row in found] == ids[:1]


def test_special_tokens_stand_in_front_of_texts():
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=llama(), bos_token="<s>", eos_token="</s>"
    )
    config = families.config_of(families.BY_NAME["llama-plain"], vocab_size=2000)
    (found,) = prompt_ids("Return the sum", tokenizer, config)
    assert found.tolist() == tokenizer("Return the sum")["input_ids"]
    assert found[0] == tokenizer.bos_token_id
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        prompt_ids("", tokenizer, config)


def test_chats_go_through_the_template(docs, monkeypatch):
    model, tokenizer = docs
    template = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", template)
    chat = [{"role": "user", "content": "Return a new array"}]
    found = jmat.generate(model, [chat, chat], tokenizer=tokenizer, max_new_tokens=2)
    assert found.prompt_texts == ("<user> Return a new array\n<assistant>",) * 2
    one = jmat.generate(model, chat, tokenizer=tokenizer, max_new_tokens=2)
    assert one.prompt_texts == found.prompt_texts[:1]
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system') }}")
    with pytest.raises(ValueError, match=r"chat template fails on these messages: .*no system"):
        jmat.generate(model, chat, tokenizer=tokenizer)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="need the package jinja2: pip install jinja2"):
        jmat.generate(model, chat, tokenizer=tokenizer)


# --- randomness and programs ----------------------------------------------------------------------

SAMPLING = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02}


def test_a_seed_gives_one_text_whatever_the_other_rows(gpt2):
    first = write(gpt2, seed=3, **SAMPLING)
    again = write(gpt2, [PROMPTS[0], [1, 2, 3], PROMPTS[2]], seed=3, **SAMPLING)
    other = write(gpt2, seed=4, **SAMPLING)
    for row in (0, 2):
        np.testing.assert_array_equal(first.tokens[row], again.tokens[row])
        assert (first.tokens[row] != other.tokens[row]).any()
    same = write(gpt2, [PROMPTS[0]] * 3, seed=3, **SAMPLING)
    assert (same.tokens[0] != same.tokens[1]).any()


def test_neither_lengths_nor_numbers_compile_programs(gpt2):
    def compiled():
        return programs() + passes.first._cache_size() + passes.write._cache_size()

    write(gpt2, seed=1, **SAMPLING)
    write(gpt2)
    write(gpt2, [[1, 2], [3], [4]])  # prompts of up to 8 tokens are read in a shorter piece
    before = compiled()
    write(gpt2, [[1], [2, 3], [4]], seed=7, **{**SAMPLING, "temperature": 0.4, "top_k": 3})
    write(gpt2, [[1] * 8, [2] * 3, [4]], max_new_tokens=11, stop_tokens=[3, 5])
    write(gpt2, max_new_tokens=13)
    assert compiled() == before


def test_rows_that_are_split_over_the_devices_are_the_same(gpt2):
    """Several times, since programs that need all devices at once can wait for one another."""
    expected = write(gpt2).tokens
    for _ in range(5):
        found = write(gpt2, [*PROMPTS, PROMPTS[0]]).tokens
        for ours, whole in zip(found, (*expected, expected[0]), strict=True):
            np.testing.assert_array_equal(ours, whole)


# --- results --------------------------------------------------------------------------------------


def test_a_result_shows_its_texts(docs):
    model, tokenizer = docs
    texts = ["Return a <b>\n", "The default"]
    options = {"tokenizer": tokenizer, "max_new_tokens": 2}
    found = jmat.generate(model, texts, **options)
    shown = repr(found)
    assert shown.startswith("Generated: 2 texts, 4 new tokens\n  0: Return a <b>\\n▸")
    assert "(2 tokens, length)" in shown
    page = found._repr_html_()
    assert "Return a &lt;b&gt;" in page
    assert "<b>\n" not in page
    ids = dataclasses.replace(
        found,
        prompts=found.prompts * 5,
        tokens=found.tokens * 5,
        reasons=found.reasons * 5,
        scores=(np.array([-1, -2], np.float32),) * 10,
        texts=None,
    )
    assert f"  0: {found.prompts[0][0]} " in repr(ids)
    assert "mean log-probability -1.50)" in repr(ids)
    assert "… and 2 more" in repr(ids)
    assert "… and 2 more" in ids._repr_html_()
    assert len(ids) == 10


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1] * 64], {}, "prompt 0 has 64 tokens; the model has positions for 64, one of which"),
        (
            [[1], [1] * 20],
            {"max_new_tokens": 45},
            "prompt 1 has 20 tokens, and max_new_tokens=45 more would be 65; .* at most 44",
        ),
        ([[1], []], {}, "prompt 1 is empty"),
        ([], {}, "there are no prompts"),
        (np.zeros((0, 4), int), {}, "there are no prompts"),
        ([[1, 37]], {}, r"prompt 0: token id 37 at \(1,\) is outside"),
        ([[2**32 + 5, 7]], {}, r"prompt 0: token id 4294967301 at \(0,\) is outside"),
        (np.array([2**32 + 5]), {}, r"prompt 0: token id 4294967301 at \(0,\) is outside"),
        ([[1.5]], {}, r"prompt 0 is \[1.5\]; expected texts, chats"),
        ([[1], "text"], {}, "prompt 1 is 'text'; expected .* all of one kind"),
        (None, {}, "prompts are of type NoneType"),
        ("text", {}, "texts need a tokenizer"),
        ([[{"role": "user", "content": "x"}]], {}, "texts need a tokenizer"),
        ([{"role": "user"}], {}, r"prompt 0 has the message \{'role': 'user'\}; expected"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0: expected a whole number of at least 1"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0: expected a number of at least 0"),
        ([[1]], {"temperature": float("nan")}, "temperature=nan"),
        ([[1]], {"temperature": float("inf")}, "temperature=inf: expected a finite number"),
        ([[1]], {"temperature": 1e-46}, "temperature=1e-46 is too small to divide by"),
        ([[1]], {"top_k": 0, "temperature": 1.0}, "top_k=0: expected a whole number"),
        ([[1]], {"top_p": 0.0, "temperature": 1.0}, "top_p=0.0: expected a number above 0, and"),
        ([[1]], {"min_p": 1.5, "temperature": 1.0}, "min_p=1.5: expected a number above 0, and"),
        ([[1]], {"top_p": 0.9}, "top_p=0.9 changes nothing at temperature 0"),
        ([[1]], {"repetition_penalty": 0.0}, "repetition_penalty=0.0: expected a number above 0"),
        ([[1]], {"seed": -1}, "seed=-1"),
        ([[1]], {"scores": "yes"}, "scores='yes': expected True or False"),
        ([[1]], {"stop_tokens": [40]}, r"stop_tokens: token id 40 at \(0,\) is outside"),
        ([[1]], {"stop_tokens": 3}, "stop_tokens=3: expected a list of token ids"),
        ([[1]], {"stop_tokens": [[1], [2, 3]]}, "expected a list of token ids"),
        ([[1]], {"stop_strings": "end"}, "stop_strings needs a tokenizer to write text with"),
        ([[1]], {"stop_strings": [""]}, "stop_strings has '': expected texts, none of them empty"),
        ([[1]], {"on_text": print}, "on_text needs a tokenizer"),
        ([[1]], {"on_text": 3}, "on_text is of type int; expected a function"),
        ([[1]], {"sites": {"block.9": Scale(1.0)}}, "unknown site 'block.9'"),
        ([[1]], {"sites": {"block.1": At(-1, Scale(0.0))}}, "At position -1 counts from the end"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(gpt2, prompts, options, message, monkeypatch):
    monkeypatch.setattr(generating, "_run", lambda *_, **__: pytest.fail("work was begun"))
    unchecked = inspect.unwrap(jmat.generate)
    with pytest.raises(ValueError, match=message):
        unchecked(gpt2, prompts, **options)


def test_only_causal_models_with_a_head_write(docs):
    with pytest.raises(ValueError, match=r"a masked model \(bert\) reads whole texts"):
        jmat.generate(hf.ours(hf.bert("silent")), [[1]])
    headless = hf.ours(families.BY_NAME["llama-headless"])
    with pytest.raises(ValueError, match="has no language-model head"):
        jmat.generate(headless, [[1]])
    with pytest.raises(ValueError, match="no chat template"):
        jmat.generate(docs[0], [[{"role": "user", "content": "x"}]], tokenizer=docs[1])
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        jmat.generate(docs[0], "", tokenizer=docs[1])
